"""Changes of a baseline's file: entries are added, brought up to date, and removed.

Rules
- The tool writes entries, `first_seen`, `last_seen` and `versions`, nothing else; `reason`, `ticket` and `expires` are people's, and so are
  comments, order, and keys of their own.
- A change is made in the entry's own lines only, and looked at before it is written: a file that would come to say something else stays as it is.
- Comments right above an entry are its own: they go when it goes.
- Not seen is not fixed: only an entry that was replayed, and did not show itself any more, is removed.
"""

import re
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomlkit

from ..spec.errors import UsageError
from ..spec.programs import Program, program_text
from .baseline import Entry, Key, Versions, key_of, parsed_baseline, tables_of, text_of
from .files import write_whole
from .findings import Finding

HEAD = """\
# Known findings of statedrift. `statedrift fuzz --baseline` replays them, and is red for what is not here.
# Changed only by `statedrift baseline DIR --file FILE --update` (adds entries, last_seen, versions) and `--prune` (removes what is gone).
# Yours, and never changed: reason, ticket, expires (a day without quotes, as in expires = 2027-01-31), comments, keys of your own.
format = 1
"""
CHANGED = ("first_seen", "last_seen", "versions")
"""What the tool changes in an entry that is there."""
LEFT_ALONE = "{path} was left as it is: its layout is beyond what can be changed safely; write every entry as a [[finding]] table"


class Change(NamedTuple):
    """What was done to an entry, and why not where nothing was."""

    what: Literal["added", "updated", "removed", "kept", "left out"]
    signature: str
    why: str = ""


class Seen(NamedTuple):
    """That a known divergence was seen: when, and with which version of the target."""

    day: date
    version: str


def entry_of(finding: Finding) -> Entry:
    """The entry of a finding that was not known."""
    version = finding.version if finding.against_version is None else f"{finding.version}; against {finding.against_version}"
    return Entry(
        signature=finding.signature,
        target=finding.target,
        family=finding.family,
        program=finding.program,
        documented=finding.documented,
        first_seen=datetime.fromisoformat(finding.first_seen).date(),
        last_seen=datetime.fromisoformat(finding.last_seen).date(),
        versions=Versions(version, version),
        against=finding.against,
        oracle=finding.oracle,
        inspect=finding.verdict.part is not None,
        alternatives=finding.alternatives,
    )


def update_baseline(path: Path, entries: Sequence[Entry], seen: dict[Key, Seen]) -> tuple[Change, ...]:
    """Add those of `entries` that are missing, and bring `last_seen` and `versions` up to date of those that are there, and of what was `seen`.

    The file is made when there is none, and left alone when nothing changes. What happened, an entry a change.
    Raises UsageError for a file that is no baseline, or cannot be written.
    """
    text = (text_of(path) if path.exists() else "") or HEAD
    known = {key_of(entry): entry for entry in parsed_baseline(path, text).entries}
    sightings = dict(seen)
    for entry in entries:
        if key_of(entry) in known and entry.last_seen is not None and entry.versions is not None:
            sighting = Seen(entry.last_seen, entry.versions.last)
            sightings[key_of(entry)] = max(sightings.get(key_of(entry), sighting), sighting, key=lambda one: one.day)
    changes: list[Change] = []
    chunks = _chunks(text)
    blocks = _blocks(path, chunks, len(known))
    for number, entry in zip(blocks, known.values(), strict=True):
        newer = _brought_up(entry, sightings[key_of(entry)]) if key_of(entry) in sightings else None
        if newer is not None:
            chunks[number] = chunks[number]._replace(text=_with_sighting(chunks[number].text, entry, newer))
            changes.append(Change("updated", entry.signature, newer.words))
    added = {key_of(entry): entry for entry in entries if key_of(entry) not in known}
    place = blocks[-1] + 1 if blocks else len(chunks)
    chunks[place:place] = [_Chunk(_entry_text(entry), True) for entry in added.values()]
    changes += [Change("added", entry.signature, "" if entry.documented else "undocumented") for entry in added.values()]
    if changes or not path.exists():
        _write(path, _joined(chunks), tables_of(path, text), len(added))
    return tuple(changes)


def prune_baseline(path: Path, gone: dict[Key, Program]) -> tuple[Change, ...]:
    """Remove the entries that are `gone`: replayed with this program, and without their divergence every time.

    An entry whose program is another one by now stays. What happened, an entry a change. Raises UsageError as `update_baseline`.
    """
    text = text_of(path)
    entries = parsed_baseline(path, text).entries
    chunks = _chunks(text)
    blocks = _blocks(path, chunks, len(entries))
    changes: list[Change] = []
    dropped: set[int] = set()
    for number, entry in zip(blocks, entries, strict=True):
        if key_of(entry) not in gone:
            continue
        if gone[key_of(entry)] != entry.program:
            changes.append(Change("kept", entry.signature, "its program is not the one that was replayed"))
            continue
        changes.append(Change("removed", entry.signature))
        dropped.add(number)
    if dropped:
        document, tables = tables_of(path, text)
        left = [table for number, table in zip(blocks, tables, strict=True) if number not in dropped]
        _write(path, _joined([chunk for number, chunk in enumerate(chunks) if number not in dropped]), (document, left), 0)
    return tuple(changes)


class _Newer(NamedTuple):
    """What an entry comes to say, and in words what is new of it."""

    last_seen: date
    versions: Versions
    words: str


def _brought_up(entry: Entry, sighting: Seen) -> _Newer | None:
    """None when the entry says it already, or knows of a later day."""
    if entry.last_seen is not None and sighting.day < entry.last_seen:
        return None
    versions = Versions(entry.versions.first if entry.versions else sighting.version, sighting.version)
    if entry.last_seen == sighting.day and entry.versions == versions:
        return None
    words = [f"last seen {sighting.day}"] if entry.last_seen != sighting.day else []
    words += [f"with {sighting.version.split(' (', 1)[0]}"] if entry.versions != versions else []
    return _Newer(sighting.day, versions, ", ".join(words))


def _with_sighting(text: str, entry: Entry, newer: _Newer) -> str:
    """An entry's own lines with the new day and versions; everything else in them stays."""
    body = text.rstrip("\n")
    document: Any = tomlkit.parse(body + "\n")
    table = document["finding"][0]
    if entry.first_seen is None:
        table["first_seen"] = newer.last_seen
    table["last_seen"] = newer.last_seen
    if entry.versions is None:
        table["versions"] = _versions_table(newer.versions)
    else:
        table["versions"]["last"] = newer.versions.last
    return tomlkit.dumps(document).rstrip("\n") + text[len(body) :]


def _versions_table(versions: Versions) -> Any:
    item: Any = tomlkit.parse('versions = { first = "", last = "" }')["versions"]
    item.update({"first": versions.first, "last": versions.last})
    return item


def _entry_text(entry: Entry) -> str:
    """The lines of a new entry, with an empty one before; `reason` and `ticket` are there to be filled in."""
    table = tomlkit.table()
    table.add("signature", entry.signature)
    table.add("target", entry.target)
    if entry.against is not None:
        table.add("against", entry.against)
    if entry.oracle != "own":
        table.add("oracle", entry.oracle)
    if entry.inspect:
        table.add("inspect", True)
    table.add("family", entry.family)
    table.add("documented", entry.documented)
    if entry.versions is not None:
        table.add("versions", _versions_table(entry.versions))
    for key, day in (("first_seen", entry.first_seen), ("last_seen", entry.last_seen)):
        if day is not None:
            table.add(key, day)
    if entry.alternatives:
        table.add("alternatives", list(entry.alternatives))
    table.add("reason", entry.reason)
    table.add("ticket", entry.ticket)
    program: Any = tomlkit.parse(f'program = """\n{program_text(entry.program)}"""\n')["program"]  # no quote or \\ in it
    table.add("program", program)
    entries = tomlkit.aot()
    entries.append(table)
    document = tomlkit.document()
    document.add("finding", entries)
    return "\n" + tomlkit.dumps(document)


# --- the file as chunks of lines -----------------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """Some lines: an entry with the comments right above it, or what is between entries."""

    text: str
    is_entry: bool


_ENTRY = re.compile(r"\s*\[\[\s*finding\s*\]\]")
_TABLE = re.compile(r"\s*\[+\s*(?!finding\s*\.)[^\]]*\]+\s*(#.*)?$")
_TOKEN = re.compile(r"'''|\"\"\"|\"(?:\\.|[^\"\\])*\"|'[^']*'|#.*")


def _lines_outside(text: str) -> Iterator[tuple[str, bool]]:
    """Every line with its end, and whether it begins outside of a text of several lines."""
    closing = ""
    for line in text.splitlines(keepends=True):
        yield line, not closing
        rest = line
        while rest:
            if closing:
                _, found, rest = rest.partition(closing)
                closing = "" if found else closing
            elif (token := _TOKEN.search(rest)) is None:
                break
            else:
                rest = rest[token.end() :]
                closing = token.group() if token.group() in ("'''", '"""') else ""


def _chunks(text: str) -> list[_Chunk]:
    """The text cut where entries begin and end; joined again it is the same."""
    chunks: list[list[str]] = [[]]
    kinds = [False]
    for line, is_outside in _lines_outside(text):
        is_entry = is_outside and _ENTRY.match(line) is not None
        if is_entry or (kinds[-1] and is_outside and _TABLE.match(line)):
            above: list[str] = []
            while chunks[-1] and chunks[-1][-1].lstrip().startswith("#"):
                above.insert(0, chunks[-1].pop())
            while chunks[-1] and not chunks[-1][-1].strip():  # empty lines go with what follows them
                above.insert(0, chunks[-1].pop())
            chunks.append(above)
            kinds.append(is_entry)
        chunks[-1].append(line)
    return [_Chunk("".join(lines), is_entry) for lines, is_entry in zip(chunks, kinds, strict=True)]


def _blocks(path: Path, chunks: Sequence[_Chunk], count: int) -> list[int]:
    """Which chunks are the entries, of which there are so many."""
    blocks = [number for number, chunk in enumerate(chunks) if chunk.is_entry]
    if len(blocks) != count:
        raise UsageError(LEFT_ALONE.format(path=path))
    return blocks


def _joined(chunks: Sequence[_Chunk]) -> str:
    text = ""
    for chunk in chunks:
        text += ("" if not text or text.endswith("\n") else "\n") + chunk.text
    return text.lstrip("\n")


def _write(path: Path, text: str, before: tuple[dict[str, Any], list[dict[str, Any]]], added: int) -> None:
    """Write the new text, if it says what the file said `before`, but for the keys that are ours to change and for the `added` last entries."""
    try:
        parsed_baseline(path, text)
        document, tables = tables_of(path, text)
        is_right = (_without(document, "finding"), [_without(table, *CHANGED) for table in tables[: len(tables) - added]]) == (
            _without(before[0], "finding"),
            [_without(table, *CHANGED) for table in before[1]],
        )
    except UsageError:
        is_right = False
    if not is_right:
        raise UsageError(LEFT_ALONE.format(path=path))
    write_whole(path, text.encode())


def _without(table: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}
