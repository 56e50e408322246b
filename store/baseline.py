"""Baselines: the known findings of a target, as a TOML file that people keep beside their code (changed in baseline_changes.py).

Rules
- Reading says which entry and which key is wrong, and what to do.
- Keys that are not ours are allowed: they are people's. One that is nearly ours is remarked on, for a slip of the pen must not make an entry eternal.
Source: Schemathesis, docs/guides/baseline.md (what an entry holds, that it expires); replaying entries is ours.
"""

import difflib
import tomllib
from collections.abc import Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from ..spec.errors import UsageError
from ..spec.programs import Program, read_program
from .findings import Finding, Oracle

FORMAT = 1
FILE_BYTES_MAX = 8 << 20
Key = tuple[str, str]
"""What makes two divergences the same: the signature, and whose recompute was the truth."""


class Versions(msgspec.Struct, frozen=True):
    """The first and the last version of the target that a finding was seen with, by time."""

    first: str
    last: str


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One known finding.

    signature, target, family, program   as of the finding; the program is replayed
    documented   False when it needs a use outside the target's own documentation
    first_seen, last_seen   days, UTC
    reason, ticket   why it is there, in people's words
    expires      the last day on which it is known; from the next one on it is red
    against, oracle, inspect   what its campaign was run with
    alternatives  names of the same divergence in simpler families
    """

    signature: str
    target: str
    family: str
    program: Program
    documented: bool = True
    first_seen: date | None = None
    last_seen: date | None = None
    versions: Versions | None = None
    reason: str = ""
    ticket: str = ""
    expires: date | None = None
    against: str | None = None
    oracle: Oracle = "own"
    inspect: bool = False
    alternatives: tuple[str, ...] = ()


class Baseline(msgspec.Struct, frozen=True):
    """A file's entries, in its order; `remarks`: what may be a slip of the pen, one sentence each."""

    path: Path
    entries: tuple[Entry, ...]
    remarks: tuple[str, ...] = ()


def key_of(item: Entry | Finding) -> Key:
    """What an entry or a finding is known by."""
    return item.signature, item.oracle


def known_keys(entries: Sequence[Entry]) -> frozenset[Key]:
    """What findings are known by these entries: their own signatures, and what the same divergence is called in simpler families."""
    return frozenset((name, entry.oracle) for entry in entries for name in (entry.signature, *entry.alternatives))


# --- reading -----------------------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What a key's value must be, in words and with an example."""

    type: type
    words: str
    example: str


_TEXT = "a text"
KEYS = {
    "signature": _Kind(str, _TEXT, '"numba/lfm2 wrong-output at decode (self) after decode+rollback"'),
    "target": _Kind(str, _TEXT, '"numba"'),
    "family": _Kind(str, _TEXT, '"lfm2"'),
    "program": _Kind(str, _TEXT, '"model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1"'),
    "documented": _Kind(bool, "true or false", "false"),
    "first_seen": _Kind(date, "a date without quotes", "2026-11-30"),
    "last_seen": _Kind(date, "a date without quotes", "2026-11-30"),
    "versions": _Kind(dict, "a table of two texts", '{ first = "1.0", last = "1.2" }'),
    "reason": _Kind(str, _TEXT, '"waits for the new allocator"'),
    "ticket": _Kind(str, _TEXT, '"https://example.org/issues/12"'),
    "expires": _Kind(date, "a date without quotes", "2027-01-31"),
    "against": _Kind(str, _TEXT, '"llamacpp"'),
    "oracle": _Kind(str, _TEXT, '"engine"'),
    "inspect": _Kind(bool, "true or false", "true"),
    "alternatives": _Kind(list, "a list of texts", '["numba/mamba2 wrong-output at decode (self) after decode+rollback"]'),
}
"""Key of an entry -> what it holds."""
REQUIRED = ("signature", "target", "family", "program")


def read_baseline(path: Path) -> Baseline:
    """Read a baseline. Raises UsageError that names the file, the line or the entry with its key, and what to do."""
    return parsed_baseline(path, text_of(path))


def text_of(path: Path) -> str:
    """A baseline's text. Raises UsageError when it cannot be read."""
    try:
        if path.is_file() and path.stat().st_size > FILE_BYTES_MAX:
            raise UsageError(f"{path} has {path.stat().st_size:,} bytes; a baseline has at most {FILE_BYTES_MAX:,}")
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"there is no baseline {path}; `statedrift baseline DIR --file {path} --update` makes one from a campaign, and an empty file is one, too"
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no baseline: byte {error.start} is not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"baseline {path} cannot be read: {error.strerror}") from None
    if text.startswith("\ufeff"):
        raise UsageError(f"{path} begins with a byte order mark; save it as UTF-8 without one")
    return text


def tables_of(path: Path, text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole file, and its entries as they are. Raises UsageError for what is no TOML, of another format, or has something else for entries."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is no TOML: {error}; correct it by hand, nothing was changed") from None
    except (RecursionError, ValueError) as error:  # what is nested too deep, and numbers of thousands of digits
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"{path} cannot be read: {reason}; correct it by hand, nothing was changed") from None
    if document.get("format", FORMAT) != FORMAT:
        raise UsageError(f"{path} has format {document['format']!r}; this version reads format {FORMAT}")
    entries = document.get("finding", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{path}, key finding: write every entry as a table of its own that begins with [[finding]]")
    return document, entries


def parsed_baseline(path: Path, text: str) -> Baseline:
    """What the text of a file says. Raises UsageError as `read_baseline`."""
    document, tables = tables_of(path, text)
    remarks = [
        f'{path} has the key "{key}" outside of its entries; did you mean [[finding]]?'
        for key in document
        if key not in ("format", "finding") and difflib.get_close_matches(key, ("finding", "findings"), cutoff=0.7)
    ]
    entries: dict[Key, Entry] = {}
    for number, table in enumerate(tables, 1):
        where = f"{path}, entry {number}"
        entry = _entry(where, table)
        if key_of(entry) in entries:
            raise UsageError(f"{where}, key signature: an earlier entry has it, too; remove one of them ({entry.signature})")
        entries[key_of(entry)] = entry
        for key in table:
            near = [] if key in KEYS else difflib.get_close_matches(key, KEYS, 1, 0.8)
            remarks += [f'{where} has the key "{key}", which is none of ours; did you mean "{near[0]}"?'] if near else []
    return Baseline(path, tuple(entries.values()), tuple(remarks))


def _entry(where: str, table: dict[str, Any]) -> Entry:
    for key in REQUIRED:
        if key not in table:
            raise UsageError(f"{where}, key {key}: it is missing; write it, as in {key} = {KEYS[key].example}")
    for key, kind in KEYS.items():
        if key in table and (not isinstance(table[key], kind.type) or isinstance(table[key], datetime)):
            raise UsageError(f"{where}, key {key}: it must be {kind.words}, as in {key} = {kind.example}, not {_shown(table[key])}")
    fields = {key: value for key, value in table.items() if key in KEYS and key != "program"}
    if "versions" in fields:
        fields["versions"] = _versions(where, fields["versions"])
    if not all(isinstance(name, str) for name in fields.get("alternatives", ())):
        raise UsageError(f"{where}, key alternatives: it must be a list of texts, as in alternatives = {KEYS['alternatives'].example}")
    if fields.get("oracle", "own") not in get_args(Oracle):
        raise UsageError(f'{where}, key oracle: it must be "own" or "engine", not {_shown(fields["oracle"])}')
    fields["alternatives"] = tuple(fields.get("alternatives", ()))
    try:
        entry = Entry(program=read_program(table["program"]), **fields)
    except UsageError as error:
        raise UsageError(f"{where}, key program: {error}") from None
    if entry.program.model.family != entry.family:
        raise UsageError(f"{where}, key family: it is {entry.family}, but the program's model is {entry.program.model.family}; correct one")
    label = entry.target if entry.against is None else f"{entry.target} against {entry.against}"
    if not entry.signature.startswith(f"{label}/{entry.family} "):
        raise UsageError(f"{where}, key signature: it is of another target or family, it must begin with `{label}/{entry.family} `")
    return entry


def _versions(where: str, table: dict[str, Any]) -> Versions:
    if not all(isinstance(table.get(key), str) for key in ("first", "last")):
        raise UsageError(f"{where}, key versions: it must be a table of two texts, as in versions = {KEYS['versions'].example}")
    return Versions(table["first"], table["last"])


def _shown(value: object) -> str:
    text = f'the text "{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
