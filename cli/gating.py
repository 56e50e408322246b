"""`statedrift fuzz --baseline`: known findings are replayed before the campaign, and what is new decides. `statedrift baseline`: their file.

Rules
- A gate's status: 1 when something is new, expired, or (`--strict`) gone; 2 when nothing is, and something could not be tested or it was
  stopped before its end; else 0.
- What is about to be done (the file, and how many entries) is said before it is done, on standard error.
- A baseline's file is changed by `statedrift baseline` alone, which says every entry that it touched.
"""

import shlex
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path

from ..fuzz.campaign import Settings
from ..fuzz.gate import chosen_entries, left_out_words, replay_baseline
from ..reports.gate import entries_words, gate_screen
from ..spec.errors import UnavailableError, UsageError
from ..spec.programs import Program
from ..store.baseline import Baseline, Entry, Key, Versions, key_of, known_keys, read_baseline
from ..store.baseline_changes import Change, Seen, entry_of, prune_baseline, update_baseline
from ..store.campaigns import Campaign, gone_signatures, present_findings
from ..store.files import alone_in
from ..store.findings import Finding
from ..store.gate import GATE_FILE, Gate, is_red, is_whole, sorted_out, write_gate
from . import failures
from .output import say, visible
from .reporting import opened_campaign, opened_gate, replay_of


def opened_baseline(path: Path | None, strict: bool) -> Baseline | None:
    """The baseline that a gate was asked to hold to. Raises UsageError when it cannot be read, or for `--strict` without one."""
    if path is None:
        if strict:
            raise UsageError("--strict is about the entries of a baseline; give its file with --baseline FILE")
        return None
    return read_baseline(path)


def replayed_gate(baseline: Baseline, settings: Settings, strict: bool, undocumented: bool) -> Gate:
    """Replay a baseline's entries before a campaign, and say so. Errors as of `replay_baseline`."""
    for remark in baseline.remarks:
        failures.complain(remark)
    count = len(chosen_entries(baseline, settings))
    left_out = left_out_words(baseline, settings)
    _tell(
        f"baseline {baseline.path}: {entries_words(len(baseline.entries))}"
        + (f", {count} replayed first" if baseline.entries else "")
        + (f"; left out: {left_out}" if left_out else "")
    )
    gate = replay_baseline(baseline, settings, datetime.now(UTC).date(), strict, undocumented)
    if count:
        outcomes = [replayed.outcome for replayed in gate.replayed]
        words = {"reproduces": "known", "gone": "fixed?", "differs": "with another divergence", "could not test": "could not be tested"}
        _tell(
            "baseline replayed: " + ", ".join(f"{outcomes.count(outcome)} {word}" for outcome, word in words.items() if outcome in outcomes)
        )
    return gate


def is_known_to(gate: Gate | None) -> Callable[[Finding], bool]:
    """Whether a finding is one that an entry of the gate names."""
    keys = frozenset() if gate is None else known_keys([replayed.entry for replayed in gate.replayed])
    return lambda finding: key_of(finding) in keys


def _tell(line: str) -> None:
    if sys.stderr is not None:
        print(visible(line), file=sys.stderr, flush=True)


def begin_gate(gate: Gate | None, folder: Path | None) -> None:
    """Put a gate, if there is one, in the place of the one before, whatever becomes of the campaign behind it."""
    if folder is not None and gate is not None:
        try:
            write_gate(folder, gate)
        except UsageError as error:
            failures.complain(f"the gate is not kept: {error}")


def close_gate(campaign: Campaign, gate: Gate, folder: Path | None) -> int:
    """Show what came of a gate and the campaign behind it; the answer is the exit status."""
    is_kept = folder is None or (folder / GATE_FILE).is_file()
    say(gate_screen(campaign, gate, replay_of(folder), folder))
    parts = sorted_out(campaign.account, campaign.findings, gate)
    if is_red(parts, gate):
        return failures.DIVERGENCE
    return failures.OK if is_whole(campaign, parts) and is_kept else failures.COULD_NOT_TEST


# --- the file ----------------------------------------------------------------------------------------------------------------


def baseline_command(folder: Path, file: Path, update: bool, prune: bool) -> int:
    """Change a baseline by what a campaign found; the answer is the exit status."""
    if update == prune:
        raise UsageError(
            "give one of --update (adds what is missing) and --prune (removes what is gone)" + (", not both" if update else "")
        )
    campaign = opened_campaign(folder)
    gate = opened_gate(folder)
    if prune and gate is None:
        raise UnavailableError(
            f"{folder} had no gate: nothing was replayed, and not seen is not fixed; run "
            f"`statedrift fuzz --baseline {shlex.quote(str(file))} --out ...` first"
        )
    with alone_in(file.parent):
        changes = prune_baseline(file, gone_entries(gate)) if prune and gate is not None else update_with(file, campaign, gate)
    say(changes_text(changes, file))
    return failures.OK


def update_with(file: Path, campaign: Campaign, gate: Gate | None) -> tuple[Change, ...]:
    """Bring a baseline up to date by what a campaign and its gate saw; errors as of `update_baseline`."""
    present = present_findings(campaign.account, campaign.findings)
    steady = [finding for finding in present if finding.reproduced]
    entries = [entry_of(finding) for finding in steady]
    seen: dict[Key, Seen] = {}
    if gate is not None:
        day = date.fromisoformat(gate.day)
        entries += [_differing(entry, signature, documented, day, gate.version) for entry, signature, documented in _others(gate)]
        seen = {key_of(replayed.entry): Seen(day, gate.version) for replayed in gate.replayed if replayed.outcome == "reproduces"}
    unsteady = [
        Change("left out", finding.signature, f"it never showed again in {finding.reruns} runs; an entry has to")
        for finding in present
        if not finding.reproduced
    ]
    mended = [Change("left out", signature, "it is not reproduced any more") for signature in gone_signatures(campaign.account)]
    return (*update_baseline(file, list({key_of(entry): entry for entry in reversed(entries)}.values())[::-1], seen), *unsteady, *mended)


def _others(gate: Gate) -> list[tuple[Entry, str, bool]]:
    """Entries whose programs show another divergence than theirs: which."""
    return [(replayed.entry, replayed.signature, replayed.documented) for replayed in gate.replayed if replayed.outcome == "differs"]


def _differing(entry: Entry, signature: str, documented: bool, day: date, version: str) -> Entry:
    """The entry of what another entry's program shows now."""
    return Entry(
        signature=signature,
        target=entry.target,
        family=entry.family,
        program=entry.program,
        documented=documented,
        first_seen=day,
        last_seen=day,
        versions=Versions(version, version),
        against=entry.against,
        oracle=entry.oracle,
        inspect=entry.inspect,
    )


def gone_entries(gate: Gate) -> dict[Key, Program]:
    """The entries whose divergence the gate could not see any more in any run, with the program that it ran."""
    return {key_of(replayed.entry): replayed.entry.program for replayed in gate.replayed if replayed.outcome in ("gone", "differs")}


def changes_text(changes: tuple[Change, ...], file: Path) -> str:
    """One line a change, and how many entries the file has now."""
    lines = [f"{change.what:<8}  {change.signature}" + (f"  ({change.why})" if change.why else "") for change in changes]
    is_changed = any(change.what in ("added", "updated", "removed") for change in changes)
    count = entries_words(len(read_baseline(file).entries))
    lines.append(f"{file} has {count}" if is_changed else f"{file} has {count}; nothing to change")
    return "\n".join(lines) + "\n"
