"""`statedrift bench mutants`: how soon named faults in our own caches are found, by us and by others, and whether the stated bounds hold.

Rules
- Every run is a line of JSON in a file; a last line that was not finished is dropped; what else stands there with the same limit and version is not run again.
- Before anything is measured every mutant shows itself on its own program, and its fixed twin passes it.
- Bounds are on medians over seeds (Kaplan-Meier) of our own fuzzer; the others stand beside it.
- Status 1 when a stated bound fails; 2 when a mutant is not what it says.
"""

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..fuzz.mutants import MUTANTS, Mutant
from ..fuzz.mutants.search import (
    FINDERS,
    Detection,
    Finder,
    Twin,
    check_ready,
    effect_size,
    purity,
    search,
    sound_noise,
    survival_median,
    try_twin,
)
from ..fuzz.throughput import one_core
from ..oracle.recompute import use_one_thread
from ..reports.terminal import aligned
from ..spec.errors import UsageError
from ..targets.numba import TARGET
from . import failures
from .failures import complain
from .output import say, standard_output_reserved

SEEDS, SEEDS_FULL = 3, 10
SECONDS, SECONDS_FULL = 20.0, 60.0
SHARES_SECONDS = (1.0, 10.0, 60.0)
FOUND_EARLY_SECONDS = 10.0
FOUND_EARLY_SHARE_MIN = 0.9
"""36 of 40."""
LARGER_BY_ONE_SHARE_MIN = 0.95
"""38 of 40."""
LARGER_BY_MAX = 3


class Bound(msgspec.Struct, frozen=True):
    """A stated bound, what was measured, and whether it holds."""

    stated: str
    measured: str
    holds: bool


class Summary(msgspec.Struct, frozen=True):
    """What came of all runs of one fuzzer on one mutant.

    seconds, programs  Kaplan-Meier medians; None: half of the runs found nothing within their limit
    effect             A12 of our own fuzzer against this one: how likely ours is quicker; None for our own
    larger_by          operations of the largest reduced program beyond those of the program written by hand; None where nothing was reduced
    purity             the share of runs whose reduced program has the commonest signature
    """

    mutant: str
    finder: Finder
    runs: int
    found: int
    seconds: float | None
    programs: float | None
    effect: float | None = None
    larger_by: int | None = None
    purity: float | None = None


class Report(msgspec.Struct, frozen=True):
    """Everything that the command says; shares: finder, then seconds, then the share of mutants whose median is not later."""

    seeds: int
    limit_seconds: float
    summaries: tuple[Summary, ...]
    shares: dict[str, dict[str, float]]
    twin_programs: int
    twin_alarms: tuple[str, ...]
    bounds: tuple[Bound, ...]
    format: int = 1


class _Line(msgspec.Struct, frozen=True):
    """A line of the file of results."""

    version: str
    run: Detection | None = None
    twin: Twin | None = None


def mutants_command(names: Sequence[str], is_full: bool, compares: bool, results: Path | None, as_json: bool) -> int:
    """Measure what is not in the file yet, and print; the answer is the exit status."""
    chosen = _chosen(names)
    seeds, limit_seconds = (SEEDS_FULL, SECONDS_FULL) if is_full else (SEEDS, SECONDS)
    known = [] if results is None else _read(results)
    with standard_output_reserved() if as_json else contextlib.nullcontext():
        lines = _measured(chosen, seeds, limit_seconds, FINDERS if compares else FINDERS[:1], known, results)
    report = report_of(chosen, seeds, limit_seconds, [line.run for line in lines if line.run], [line.twin for line in lines if line.twin])
    say(msgspec.json.encode(report).decode() + "\n" if as_json else report_text(report), plain=as_json)
    return failures.OK if all(bound.holds for bound in report.bounds) else failures.DIVERGENCE


def _chosen(names: Sequence[str]) -> list[Mutant]:
    for name in names:
        if name not in MUTANTS:
            raise UsageError(f"there is no mutant `{name}`; docs/mutants.md lists them, such as {next(iter(MUTANTS))}")
    return [mutant for name, mutant in MUTANTS.items() if not names or name in names]


# --- runs ------------------------------------------------------------------------------------------------------------------


def _read(results: Path) -> list[_Line]:
    """The lines of this version; a last line without its end, of a run that was ended while it wrote, is taken out of the file. Raises
    UsageError for a file that is none of ours."""
    try:
        data = results.read_bytes() if results.exists() else b""
        lines = [msgspec.json.decode(line, type=_Line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
        if data and not data.endswith(b"\n"):
            os.truncate(results, data.rfind(b"\n") + 1)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"--results {results}: it cannot be read as results of this command: {error}") from error
    return [line for line in lines if line.version == TARGET.version()]


def _append(results: Path | None, line: _Line) -> None:
    """One line more."""
    if results is None:
        return
    try:
        with results.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
    except OSError as error:
        raise UsageError(f"--results {results}: {error.strerror}; the runs before this one are kept") from error


def _measured(
    mutants: Sequence[Mutant], seeds: int, limit_seconds: float, finders: Sequence[Finder], known: Sequence[_Line], results: Path | None
) -> list[_Line]:
    """The runs asked for: those that are known, and the others, which are made now."""
    use_one_thread()
    runs = {
        (line.run.mutant, line.run.finder, line.run.seed): line for line in known if line.run and line.run.limit_seconds == limit_seconds
    }
    twins = {(line.twin.mutant, line.twin.seed): line for line in known if line.twin}
    version = TARGET.version()
    lines: list[_Line] = []
    noises = sound_noise(mutants)
    with one_core():
        for number, mutant in enumerate(mutants):
            check_ready(mutant, noises)
            complain(f"mutant {number + 1} of {len(mutants)}: {mutant.name}")
            for seed in range(seeds):
                if (mutant.name, seed) not in twins:
                    twins[mutant.name, seed] = _Line(version, twin=try_twin(mutant, seed, noises))
                    _append(results, twins[mutant.name, seed])
                lines.append(twins[mutant.name, seed])
                for finder in finders:
                    key = mutant.name, finder, seed
                    if key not in runs:
                        runs[key] = _Line(version, search(mutant, finder, seed, limit_seconds, noises))
                        _append(results, runs[key])
                    lines.append(runs[key])
    return lines


# --- the report ------------------------------------------------------------------------------------------------------------


def report_of(mutants: Sequence[Mutant], seeds: int, limit_seconds: float, runs: Sequence[Detection], twins: Sequence[Twin]) -> Report:
    """What came of the runs."""
    summaries = []
    for mutant in mutants:
        of_mutant = [run for run in runs if run.mutant == mutant.name]
        own = [run for run in of_mutant if run.finder == FINDERS[0]]
        for finder in FINDERS:
            some = [run for run in of_mutant if run.finder == finder]
            if some:
                summaries.append(_summary(mutant, finder, some, own))
    shares: dict[str, dict[str, float]] = {
        finder: {
            f"{seconds:g}": _share([summary for summary in summaries if summary.finder == finder], seconds) for seconds in SHARES_SECONDS
        }
        for finder in dict.fromkeys(summary.finder for summary in summaries)
    }
    alarms = tuple(f"{twin.mutant}: {alarm}" for twin in twins for alarm in twin.alarms)
    own_summaries = [summary for summary in summaries if summary.finder == FINDERS[0]]
    twin_programs = sum(twin.programs for twin in twins)
    bounds = _bounds(own_summaries, limit_seconds, twin_programs, len(alarms))
    return Report(seeds, limit_seconds, tuple(summaries), shares, twin_programs, alarms, bounds)


def _summary(mutant: Mutant, finder: Finder, runs: Sequence[Detection], own: Sequence[Detection]) -> Summary:
    found = [run for run in runs if run.is_found]
    is_found = [run.is_found for run in runs]
    larger = [run.reduced_operations - len(mutant.program.operations) for run in found if run.reduced_operations is not None]
    signatures = [run.signature for run in found if run.signature is not None]
    return Summary(
        mutant.name,
        finder,
        len(runs),
        len(found),
        survival_median([run.seconds for run in runs], is_found),
        survival_median([float(run.programs) for run in runs], is_found),
        None if finder == FINDERS[0] else effect_size(_times(own), _times(runs)),
        max(larger) if larger else None,
        purity(signatures) if signatures else None,
    )


def _times(runs: Sequence[Detection]) -> list[float]:
    return [run.seconds if run.is_found else math.inf for run in runs]


def _share(summaries: Sequence[Summary], seconds: float) -> float:
    """The share of mutants that are found within these seconds, by their median."""
    return sum(summary.seconds is not None and summary.seconds <= seconds for summary in summaries) / len(summaries)


def _bounds(own: Sequence[Summary], limit_seconds: float, twin_programs: int, alarm_count: int) -> tuple[Bound, ...]:
    count = len(own)
    found = sum(summary.seconds is not None for summary in own)
    early = sum(summary.seconds is not None and summary.seconds <= FOUND_EARLY_SECONDS for summary in own)
    larger = [summary.larger_by for summary in own if summary.larger_by is not None]
    by_one = sum(size <= 1 for size in larger)
    return (
        Bound(f"every mutant found within {limit_seconds:g} s", f"{found} of {count}", found == count),
        Bound(
            f"{100 * FOUND_EARLY_SHARE_MIN:.0f} % found within {FOUND_EARLY_SECONDS:g} s",
            f"{early} of {count}",
            early >= FOUND_EARLY_SHARE_MIN * count,
        ),
        Bound(
            f"{100 * LARGER_BY_ONE_SHARE_MIN:.0f} % of reduced programs at most one operation longer than by hand",
            f"{by_one} of {len(larger)}",
            by_one >= LARGER_BY_ONE_SHARE_MIN * len(larger),
        ),
        Bound(
            f"no reduced program more than {LARGER_BY_MAX} operations longer",
            f"{max(larger, default=0):+d}",
            max(larger, default=0) <= LARGER_BY_MAX,
        ),
        Bound("no alarm on the fixed twins", f"{alarm_count} in {twin_programs:,} programs", alarm_count == 0),
    )


HEADINGS = ("", "by", "found", "seconds", "programs", "A12", "larger by", "purity")


def report_text(report: Report) -> str:
    """The report for a terminal."""
    rows = [
        [
            summary.mutant,
            summary.finder,
            f"{summary.found}/{summary.runs}",
            f"> {report.limit_seconds:g}" if summary.seconds is None else f"{summary.seconds:.2f}",
            "-" if summary.programs is None else f"{summary.programs:,.0f}",
            "-" if summary.effect is None else f"{summary.effect:.2f}",
            "-" if summary.larger_by is None else f"{summary.larger_by:+d}",
            "-" if summary.purity is None else f"{100 * summary.purity:.0f} %",
        ]
        for summary in report.summaries
    ]
    lines = [f"mutants: medians over {report.seeds} seeds, at most {report.limit_seconds:g} s of one core each"]
    lines += ["  " + line for line in aligned([list(HEADINGS), *rows], numbers_from=2)]
    share_rows = [[finder, *(f"{100 * share:.0f} %" for share in shares.values())] for finder, shares in report.shares.items()]
    headings = ["share found within", *(f"{seconds:g} s" for seconds in SHARES_SECONDS)]
    lines += ["", *("  " + line for line in aligned([headings, *share_rows])), "", "stated bounds"]
    lines += [
        "  " + line for line in aligned([["holds" if bound.holds else "FAILS", bound.measured, bound.stated] for bound in report.bounds], 3)
    ]
    lines += [f"  alarm on the fixed twin of {alarm}" for alarm in report.twin_alarms]
    return "\n".join(lines) + "\n"
