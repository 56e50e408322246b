"""A gate before a campaign: every known finding's program is run again, and says for itself whether it still diverges.

Rules
- Only entries of this target, of the campaign's families, and of its oracle are replayed; the others are counted as left out.
- An entry reproduces when one run shows its signature. It is gone only when none of `REPLAYS` runs does, of a native target each in a process
  that ran nothing before.
- What cannot be run or judged is neither: the gate could not test it.
- Nothing here is told to the campaign: a baseline never changes what is generated.
Source: CIFuzz, infra/cifuzz/fuzz_target.py (a crash counts as gone after 10 attempts).
"""

from collections import defaultdict
from collections.abc import Sequence
from datetime import date

import msgspec

from ..spec.errors import UnavailableError
from ..store.baseline import Baseline, Entry, Key, key_of
from ..store.gate import EntryReplay, Gate
from .campaign import Settings
from .pair import open_bench
from .reduction import is_documented
from .signatures import enabling_operations, fine_signature
from .trial import Bench, Trial

REPLAYS = 10


def chosen_entries(baseline: Baseline, settings: Settings) -> tuple[Entry, ...]:
    """The entries that a campaign's gate replays."""
    return tuple(
        entry
        for entry in baseline.entries
        if (entry.target, entry.against, entry.oracle) == (settings.target, settings.against, settings.oracle)
        and entry.family in settings.families
        and (settings.inspect or not entry.inspect)
    )


def left_out_words(baseline: Baseline, settings: Settings) -> str:
    """Why entries are left out, e.g. "2 of other targets, 1 of other families"; empty when none is."""
    why: dict[str, int] = defaultdict(int)
    chosen = chosen_entries(baseline, settings)
    for entry in baseline.entries:
        if entry in chosen:
            continue
        if entry.target != settings.target:
            why["of other targets"] += 1
        elif (entry.against, entry.oracle) != (settings.against, settings.oracle):
            why["with another truth"] += 1
        elif entry.family not in settings.families:
            why["of other families"] += 1
        else:
            why["that need --inspect"] += 1
    return ", ".join(f"{count} {words}" for words, count in why.items())


def replay_baseline(
    baseline: Baseline,
    settings: Settings,
    today: date,
    strict: bool,
    undocumented: bool,
) -> Gate:
    """Replay a baseline's entries on a campaign's target.

    today  UTC; an entry whose last day is before it is expired
    Raises UnavailableError when the target cannot be used at all.
    """
    entries = chosen_entries(baseline, settings)
    replayed: dict[Key, EntryReplay] = {}
    version = ""
    for inspect in (False, True):
        same = [entry for entry in entries if entry.inspect == inspect]
        if not same:
            continue
        with open_bench(settings.target, settings.against, inspect, settings.oracle) as bench:
            version = bench.version
            for model in dict.fromkeys(entry.program.model for entry in same):
                replayed |= _replayed(bench, [entry for entry in same if entry.program.model == model])
    results = tuple(_with_day(replayed[key_of(entry)], today) for entry in entries)
    return Gate(
        str(baseline.path),
        len(baseline.entries),
        len(baseline.entries) - len(entries),
        results,
        today.isoformat(),
        version,
        strict,
        undocumented,
    )


def _with_day(replayed: EntryReplay, today: date) -> EntryReplay:
    expires = replayed.entry.expires
    return msgspec.structs.replace(replayed, expired=expires is not None and expires < today)


def _replayed(bench: Bench, entries: Sequence[Entry]) -> dict[Key, EntryReplay]:
    """Entries of one model: all at once, and what does not show itself again and again."""
    try:
        trials = bench.try_programs([entry.program for entry in entries])
        return {key_of(entry): _outcome(bench, entry, trial) for entry, trial in zip(entries, trials, strict=True)}
    except UnavailableError as error:
        why = str(error).removeprefix("could not test: ")
        return {key_of(entry): EntryReplay(entry, "could not test", 0, why=why) for entry in entries}


def _outcome(bench: Bench, entry: Entry, first: Trial) -> EntryReplay:
    best = _said(bench, entry, first)
    runs = 1
    while best.outcome != "reproduces" and runs < REPLAYS:
        bench.renew()
        runs += 1
        best = max(best, _said(bench, entry, bench.try_program(entry.program)), key=_weight)
    return msgspec.structs.replace(best, runs=runs)


def _weight(replayed: EntryReplay) -> int:
    """Of several runs the one that says most; a program that can be judged now and then can be judged."""
    return ("could not test", "gone", "differs", "reproduces").index(replayed.outcome)


def _said(bench: Bench, entry: Entry, trial: Trial) -> EntryReplay:
    """What one run says of an entry."""
    if not trial.verdict.is_judged:
        return EntryReplay(entry, "could not test", 1, why=f"{trial.verdict.kind}: {trial.verdict.reason}")
    if not trial.verdict.is_divergence:
        return EntryReplay(entry, "gone", 1)
    signature = fine_signature(bench.label, trial.program, trial.verdict)
    operations = tuple(sorted(enabling_operations(trial.program, trial.verdict)))
    if signature == entry.signature:
        return EntryReplay(entry, "reproduces", 1, coarse=trial.signature or "", operations=operations)
    return EntryReplay(entry, "differs", 1, signature=signature, documented=is_documented(trial, bench)[0], operations=operations)
