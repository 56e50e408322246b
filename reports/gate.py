"""A gate as text: one screen that says whether it is red, why, and what to do; and all of it, for a campaign's report.

Rules
- `gate_screen` fits into a terminal of 80 columns and 24 rows, however much is red: what there is no room for is counted.
- What is new comes first, then what is expired, then the rest.
- An entry is called by its signature; its ticket and reason stand beside it, where it has them.
"""

import math
import shlex
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..store.baseline import Entry
from ..store.campaigns import Campaign
from ..store.findings import Finding
from ..store.gate import EntryReplay, Gate, Sorted, is_red, is_whole, sorted_out
from .terminal import could_not_test_words, in_order, line_width, numbered_program, plural, short_version, stopped_words, wrapped

COLUMNS = 80
ROWS = 23
"""Of a screen of 24: the last one has the prompt."""
_LABEL_WIDTH = 14


class _Item(NamedTuple):
    """Something to show: in full, and in short where there is no room."""

    full: list[str]
    short: list[str]


def entries_words(count: int) -> str:
    """A count of entries, e.g. "1 entry", "2 entries"."""
    return f"{count:,} {'entry' if count == 1 else 'entries'}"


def gate_colour(campaign: Campaign, gate: Gate) -> str:
    """ "red", "green", or "not tested" where nothing is red but something could not be tested, or it was stopped."""
    parts = sorted_out(campaign.account, campaign.findings, gate)
    if is_red(parts, gate):
        return "red"
    return "green" if is_whole(campaign, parts) else "not tested"


def gate_sentence(campaign: Campaign, gate: Gate) -> str:
    """The gate in one sentence, e.g. "red: 2 new divergences, 1 expired; 8 known"."""
    parts = sorted_out(campaign.account, campaign.findings, gate)
    unreduced = sum(left.programs for left in parts.unreduced)
    new = len(parts.new) + len(parts.other_new)
    counts = {
        plural(new, "new divergence"): new,
        f"{plural(unreduced, 'divergent program')} not reduced": unreduced,
        f"{len(parts.expired)} expired": len(parts.expired),
        f"{len(parts.gone)} fixed?": len(parts.gone),
        f"{len(parts.could_not_test)} could not be tested": len(parts.could_not_test),
    }
    words = [text for text, count in counts.items() if count]
    if not is_red(parts, gate):
        words.insert(0, f"nothing new in {plural(campaign.account.programs, 'program')}")
    return f"{gate_colour(campaign, gate)}: {', '.join(words)}; {len(parts.reproduced)} known{could_not_test_words(campaign.account)}{stopped_words(campaign.account)}"


def people_words(entry: Entry) -> str:
    """What people wrote beside an entry, e.g. " (#12; waits for the new allocator)"; empty when nothing."""
    words = [word for word in (" ".join(entry.ticket.split()), " ".join(entry.reason.split())) if word]
    return f" ({'; '.join(words)})" if words else ""


def expired_words(replayed: EntryReplay) -> str:
    """When an entry expired, and what it shows all the same."""
    shows = {"reproduces": "", "gone": ", and gone", "differs": ", and differs", "could not test": ", and could not be tested"}
    return f"expired {replayed.entry.expires}{shows[replayed.outcome]}"


# --- one screen --------------------------------------------------------------------------------------------------------------


def gate_screen(campaign: Campaign, gate: Gate, replay_of: Callable[[Finding], str], folder: Path | None) -> str:
    """What a gate shows at its end, at most `ROWS` rows of a terminal of `COLUMNS` columns (but for a program of more rows than that).

    replay_of  the command that shows a finding again
    folder     of the campaign; None: it is not kept
    """
    parts = sorted_out(campaign.account, campaign.findings, gate)
    account = campaign.account
    head = _cut(gate_sentence(campaign, gate), "  ") + _cut(
        f"{account.target} {short_version(account.version)} · {', '.join(account.families)} · {plural(account.programs, 'program')}, "
        f"{account.seconds:.1f} s · baseline {gate.file}, {entries_words(len(gate.replayed))} replayed",
        "  ",
    )
    foot = _to_do(parts, gate, folder)
    items = _items(campaign, parts, replay_of)
    gaps = bool(items) + bool(foot)  # an empty line each
    shown = _fitted(items, ROWS - _rows(head) - _rows(foot) - gaps, folder)
    blocks = [head, [line for item in shown for line in item], foot]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _cut(line: str, indent: str) -> list[str]:
    return textwrap.wrap(line, min(COLUMNS, line_width()), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _rows(lines: Sequence[str]) -> int:
    """Rows of a terminal that lines take."""
    return sum(max(1, math.ceil(len(line) / COLUMNS)) for line in lines)


def _fitted(items: Sequence[_Item], rows: int, folder: Path | None) -> list[list[str]]:
    """As many items as there are rows for: in short, those that come first in full where there is room; and how many there are more."""
    more = "" if folder is None else f": statedrift report {shlex.quote(str(folder))}"
    chosen = [item.short for item in items]
    count = len(chosen)
    while count and sum(map(_rows, chosen[:count])) + (count < len(items)) > rows:
        count -= 1
    shown = chosen[:count]
    left = rows - sum(map(_rows, shown)) - (count < len(items))
    for number, item in enumerate(items[:count]):
        added = _rows(item.full) - _rows(item.short)
        if added <= left:
            shown[number] = item.full
            left -= added
    return shown + ([[f"... and {len(items) - count} more{more}"]] if count < len(items) else [])


def _items(campaign: Campaign, parts: Sorted, replay_of: Callable[[Finding], str]) -> list[_Item]:
    """What is to be shown, what matters most first."""
    numbers = {id(finding): number for number, finding in enumerate(in_order(campaign.findings), 1)}
    items = [_new_item(numbers[id(finding)], finding, replay_of(finding)) for finding in in_order(parts.new)]
    for replayed in parts.other_new:
        items.append(_plain_item(f"new: {replayed.signature}", f"shown by the program of {replayed.entry.signature}"))
    for left in parts.unreduced:
        items.append(_plain_item(f"not reduced: {plural(left.programs, 'program')} with {left.signature}", left.program))
    for replayed in parts.expired:
        items.append(_plain_item(f"{expired_words(replayed)}: {replayed.entry.signature}{people_words(replayed.entry)}"))
    for replayed in parts.could_not_test:
        items.append(_plain_item(f"could not test: {replayed.entry.signature}: {replayed.why}"))
    for reason, program in campaign.account.not_judged:
        items.append(_plain_item(f"not judged: {reason}", program))
    for replayed in parts.gone:
        items.append(_plain_item(f"fixed? {replayed.entry.signature}{people_words(replayed.entry)}"))
    for replayed in parts.other:
        items.append(_plain_item(f"differs: {replayed.entry.signature} shows {replayed.signature}"))
    if parts.passed_over:
        items.append(
            _plain_item(f"{plural(len(parts.passed_over), 'new divergence')} only in uses that the target's documentation does not promise")
        )
    if parts.explained:
        items.append(_plain_item(f"{plural(parts.explained, 'divergent program')} not reduced, where a known entry may be the reason"))
    return items


def _new_item(number: int, finding: Finding, replay: str) -> _Item:
    heading = _cut(
        f"{number} {finding.verdict.kind} · new · {finding.family} · reproducible {finding.reproduced}/{finding.reruns}", "    "
    ) + _cut("  " + finding.title, "    ")
    replaying = [f"  replay   {replay}"]
    program = numbered_program(finding.program, finding.verdict, finding.answers, finding.title)
    return _Item([*heading, *program, *replaying], [*heading, *replaying])


def _plain_item(line: str, program: str = "") -> _Item:
    short = _cut(line, "    ")
    return _Item(short + ([f"    {program}"] if program else []), short)


def _to_do(parts: Sorted, gate: Gate, folder: Path | None) -> list[str]:
    """What whoever sees a red gate does about it."""
    where = "DIR" if folder is None else shlex.quote(str(folder))
    command = f"statedrift baseline {where} --file {shlex.quote(gate.file)}"
    lines = []
    if parts.new or parts.other_new:
        lines += ["to do: fix what is new, or take it into the baseline with a reason:", f"  {command} --update"]
    if parts.unreduced:
        lines += ["to do: run longer, or give --programs, so that the rest gets reduced"]
    if parts.expired:
        lines += [f"to do: fix what is expired, or give it a later day in {gate.file}"]
    if parts.gone:
        lines += ["to do: take what is fixed out of the baseline:", f"  {command} --prune"]
    if folder is None and (parts.new or parts.other_new or parts.gone):
        lines.append("DIR is the campaign's folder: give --out DIR, so that there is one")
    return lines


# --- all of it ---------------------------------------------------------------------------------------------------------------


def gate_text(campaign: Campaign, gate: Gate) -> str:
    """A gate with every entry and every new finding by name, for a campaign's report."""
    parts = sorted_out(campaign.account, campaign.findings, gate)
    left_out = f", {gate.left_out} left out" if gate.left_out else ""
    lines = wrapped("gate         " + gate_sentence(campaign, gate), " " * 13)
    lines += wrapped(f"baseline     {gate.file}: {entries_words(gate.entries)}{left_out}; replayed {gate.day}", " " * 13)
    for label, words in gate_rows(campaign, parts):
        lines += wrapped(f"  {label:<{_LABEL_WIDTH}}  {words}", " " * (_LABEL_WIDTH + 4))
    return "\n".join(lines) + "\n"


def gate_rows(campaign: Campaign, parts: Sorted) -> list[tuple[str, str]]:
    """Every part of a gate: a word for what it is, and its name with what people wrote."""
    rows = [("new", finding.signature) for finding in in_order(parts.new)]
    rows += [("new", f"{replayed.signature}, of the program of {replayed.entry.signature}") for replayed in parts.other_new]
    rows += [("not reduced", f"{plural(left.programs, 'program')} with {left.signature}") for left in parts.unreduced]
    rows += [("expired", f"{replayed.entry.expires}  {_named(replayed)}") for replayed in parts.expired]
    rows += [("could not test", f"{replayed.entry.signature}: {replayed.why}") for replayed in parts.could_not_test]
    rows += [("fixed?", f"{_named(replayed)}") for replayed in parts.gone]
    rows += [("differs", f"{replayed.entry.signature} shows {replayed.signature}") for replayed in parts.other]
    rows += [("known", _named(replayed)) for replayed in parts.reproduced]
    rows += [("undocumented", finding.signature) for finding in in_order(parts.passed_over)]
    return rows


def _named(replayed: EntryReplay) -> str:
    return replayed.entry.signature + people_words(replayed.entry)
