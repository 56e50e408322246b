"""Gates: what became of a baseline's entries when they were replayed, and what that makes of a campaign.

Rules
- `gate.json` lies beside the campaign's account. A gate replaces the one before when its campaign begins, so that one that is killed leaves
  none that is not its own.
- One function, `sorted_out`, says what is new, known, gone and expired; whoever shows a gate or makes a status of it asks that one.
- Two divergences are the same when their signatures are; a finding that no entry names is new, however much it is like one.
"""

from datetime import date
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from ..spec.errors import UsageError
from .baseline import Entry, Key, key_of, known_keys
from .campaigns import Account, Campaign, Unreduced, is_tested, present_findings
from .files import write_whole
from .findings import Count, Finding

FORMAT = 1
GATE_FILE = "gate.json"
Outcome = Literal["reproduces", "gone", "differs", "could not test"]


class EntryReplay(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an entry's program came to.

    outcome     `gone`: no divergence in any run; `differs`: another divergence than the entry's
    runs        how many it took to say so
    expired     the gate's day is after the entry's last one
    signature   what it shows where it `differs`
    documented  of that
    why         why it could not be tested
    coarse      where it reproduces: its coarse signature
    operations  that came before its divergence
    """

    entry: Entry
    outcome: Outcome
    runs: Count
    expired: bool = False
    signature: str = ""
    documented: bool = True
    why: str = ""
    coarse: str = ""
    operations: tuple[str, ...] = ()


class Gate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A baseline's replay before a campaign.

    file      of the baseline
    entries   in it
    left_out  of them were not replayed: entries of other targets, of families that were not asked for, or of another oracle
    day       UTC
    version   of the target; empty when nothing was replayed
    strict    what is gone is red, too
    undocumented  what the target's documentation does not promise is red, too
    """

    file: str
    entries: Count
    left_out: Count
    replayed: tuple[EntryReplay, ...]
    day: str
    version: str
    strict: bool = False
    undocumented: bool = False
    format: int = FORMAT


class Sorted(NamedTuple):
    """A campaign held to its gate; entries and findings in their order.

    new           findings that no entry names, and that count
    passed_over   new ones in uses that the target's documentation does not promise; they do not count unless asked
    known         findings that an entry names
    reproduced    entries that show themselves as before, and are not expired
    gone          entries that do not (`fixed?`)
    other_new     entries that show another divergence, which no entry names and which counts
    other         entries that show another divergence that does not count, or is known itself
    expired       entries whose time is over, whatever they show
    could_not_test  entries
    unreduced     divergent programs of which nothing known may be the reason
    explained     programs that were not reduced, and of which a known entry may be the reason
    """

    new: tuple[Finding, ...]
    passed_over: tuple[Finding, ...]
    known: tuple[Finding, ...]
    reproduced: tuple[EntryReplay, ...]
    gone: tuple[EntryReplay, ...]
    other_new: tuple[EntryReplay, ...]
    other: tuple[EntryReplay, ...]
    expired: tuple[EntryReplay, ...]
    could_not_test: tuple[EntryReplay, ...]
    unreduced: tuple[Unreduced, ...]
    explained: int


def sorted_out(account: Account, findings: tuple[Finding, ...], gate: Gate) -> Sorted:
    """What the gate and the campaign after it found."""
    keys = known_keys([replayed.entry for replayed in gate.replayed])
    findings = present_findings(account, findings)
    unnamed = [finding for finding in findings if key_of(finding) not in keys]
    differing = [replayed for replayed in gate.replayed if replayed.outcome == "differs"]
    other_new = [replayed for replayed in differing if _other_key(replayed) not in keys and (replayed.documented or gate.undocumented)]
    explained = [left for left in account.unreduced if _may_be_known(left, gate)]
    return Sorted(
        new=tuple(finding for finding in unnamed if finding.documented or gate.undocumented),
        passed_over=tuple(finding for finding in unnamed if not (finding.documented or gate.undocumented)),
        known=tuple(finding for finding in findings if key_of(finding) in keys),
        reproduced=tuple(replayed for replayed in _with_outcome(gate, "reproduces") if not replayed.expired),
        gone=_with_outcome(gate, "gone"),
        other_new=tuple(other_new),
        other=tuple(replayed for replayed in differing if replayed not in other_new),
        expired=tuple(replayed for replayed in gate.replayed if replayed.expired),
        could_not_test=_with_outcome(gate, "could not test"),
        unreduced=tuple(left for left in account.unreduced if left not in explained),
        explained=sum(left.programs for left in explained),
    )


def is_red(parts: Sorted, gate: Gate) -> bool:
    """Whether the gate is closed: something new, or expired, or (strict) gone."""
    return bool(parts.new or parts.other_new or parts.expired or parts.unreduced or (gate.strict and parts.gone))


def is_whole(campaign: Campaign, parts: Sorted) -> bool:
    """Whether a gate that is not red could test all that it was asked to, to its end."""
    return campaign.account.complete and is_tested(campaign) and not parts.could_not_test


def _with_outcome(gate: Gate, outcome: Outcome) -> tuple[EntryReplay, ...]:
    return tuple(replayed for replayed in gate.replayed if replayed.outcome == outcome)


def _other_key(replayed: EntryReplay) -> Key:
    return replayed.signature, replayed.entry.oracle


def _may_be_known(left: Unreduced, gate: Gate) -> bool:
    """Whether all these programs go wrong where a known divergence does, after at least the operations that it needs."""
    needed = [
        set(replayed.operations) for replayed in gate.replayed if replayed.outcome == "reproduces" and replayed.coarse == left.signature
    ]
    return bool(left.operations) and all(any(needs <= set(had) for needs in needed) for had in left.operations)


def write_gate(folder: Path, gate: Gate) -> None:
    """Write a gate into a campaign's folder. Raises UsageError when it cannot be written."""
    write_whole(folder / GATE_FILE, msgspec.json.format(msgspec.json.encode(gate), indent=1))


def read_gate(folder: Path) -> Gate | None:
    """The gate of a campaign's folder; None when it had none. Raises UsageError for a file that is damaged, or of another version."""
    path = folder / GATE_FILE
    if not path.is_file():
        return None
    try:
        gate = msgspec.json.decode(path.read_bytes(), type=Gate)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} is damaged or of another version: {error}") from None
    try:
        date.fromisoformat(gate.day)
    except ValueError as error:
        raise UsageError(f"{path} is damaged: its day: {error}") from None
    if gate.format != FORMAT:
        raise UsageError(f"{path} has format {gate.format}; this version reads format {FORMAT}")
    return gate
