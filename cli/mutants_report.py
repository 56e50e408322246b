"""What `statedrift bench mutants` says: medians, effect sizes and stated bounds; as text, as a page, and as a table of runs.

Rules
- Bounds are on medians over seeds (Kaplan-Meier) of our own fuzzer; the others stand beside it.
- Nothing is run here.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pandas

from ..fuzz.mutants import Mutant
from ..fuzz.mutants.search import FINDERS, Detection, Finder, Twin, TwinPiece, effect_size, purity, survival_median
from ..reports.terminal import aligned
from .throughput import Bound, bound_table, markdown_table

SHARES_SECONDS = (1.0, 10.0, 60.0)
"""Those beyond the limit of a run are not asked about; the limit is."""
FOUND_EARLY_SECONDS = 10.0
FOUND_EARLY_SHARE_MIN = 0.9
"""36 of 40."""
LARGER_BY_ONE_SHARE_MIN = 0.95
"""38 of 40."""
LARGER_BY_MAX = 3
EFFECT_MIN = 0.06
"""How far A12 is from one half where there is a difference: what Vargha and Delaney call small begins at 0.56."""


class Measured(NamedTuple):
    """Runs, fixed twins (beside the search, or in pieces of the time for a family), and one line on each peer that was left out."""

    runs: list[Detection]
    twins: list[Twin]
    pieces: list[TwinPiece]
    gaps: list[str]


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


class TwinFamily(msgspec.Struct, frozen=True):
    """What the fixed twins of one family gave together; seconds of CPU time."""

    family: str
    twins: int
    programs: int
    seconds: float
    alarms: int


class Report(msgspec.Struct, frozen=True):
    """Everything that the command says.

    shares         finder, then seconds, then the share of mutants whose median is not later
    twin_families  where the fixed twins were run by the time
    gaps           one line on each peer that was left out
    """

    seeds: int
    limit_seconds: float
    summaries: tuple[Summary, ...]
    shares: dict[str, dict[str, float]]
    twin_programs: int
    twin_alarms: tuple[str, ...]
    bounds: tuple[Bound, ...]
    twin_families: tuple[TwinFamily, ...] = ()
    gaps: tuple[str, ...] = ()
    format: int = 1


def report_of(mutants: Sequence[Mutant], seeds: int, limit_seconds: float, measured: Measured) -> Report:
    """What came of the runs."""
    summaries = []
    for mutant in mutants:
        of_mutant = [run for run in measured.runs if run.mutant == mutant.name]
        own = [run for run in of_mutant if run.finder == FINDERS[0]]
        for finder in FINDERS:
            some = [run for run in of_mutant if run.finder == finder]
            if some:
                summaries.append(_summary(mutant, finder, some, own))
    asked_seconds = dict.fromkeys(min(seconds, limit_seconds) for seconds in SHARES_SECONDS)
    shares: dict[str, dict[str, float]] = {
        finder: {
            f"{seconds:g}": _share([summary for summary in summaries if summary.finder == finder], seconds) for seconds in asked_seconds
        }
        for finder in dict.fromkeys(summary.finder for summary in summaries)
    }
    alarms = tuple(f"{twin.mutant}: {alarm}" for twin in measured.twins for alarm in twin.alarms)
    alarms += tuple(alarm for piece in measured.pieces for alarm in piece.alarms)
    twin_programs = sum(twin.programs for twin in measured.twins) + sum(piece.programs for piece in measured.pieces)
    families = _twin_families(measured.pieces)
    bounds = (
        *_bounds([summary for summary in summaries if summary.finder == FINDERS[0]], limit_seconds),
        Bound(
            "no alarm on the fixed twins" + (f", {min(family.seconds for family in families):.0f} s of each family" if families else ""),
            f"{len(alarms)} in {twin_programs:,} programs",
            not alarms,
        ),
    )
    return Report(seeds, limit_seconds, tuple(summaries), shares, twin_programs, alarms, bounds, families, tuple(measured.gaps))


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


def _twin_families(pieces: Sequence[TwinPiece]) -> tuple[TwinFamily, ...]:
    return tuple(
        TwinFamily(
            family,
            len(some[0].mutants),
            sum(piece.programs for piece in some),
            sum(piece.seconds for piece in some),
            sum(len(piece.alarms) for piece in some),
        )
        for family in dict.fromkeys(piece.family for piece in pieces)
        for some in [[piece for piece in pieces if piece.family == family]]
    )


def _bounds(own: Sequence[Summary], limit_seconds: float) -> tuple[Bound, ...]:
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
    )


# --- for a terminal --------------------------------------------------------------------------------------------------------

HEADINGS = ("", "by", "found", "seconds", "programs", "A12", "larger by", "purity")
TWIN_HEADINGS = ("fixed twins", "of them", "programs", "seconds", "alarms")


def report_text(report: Report) -> str:
    """The report for a terminal."""
    rows = [
        [
            summary.mutant,
            summary.finder,
            f"{summary.found}/{summary.runs}",
            _seconds(summary, report.limit_seconds),
            "-" if summary.programs is None else f"{summary.programs:,.0f}",
            _effect(summary),
            _larger_by(summary),
            "-" if summary.purity is None else f"{100 * summary.purity:.0f} %",
        ]
        for summary in report.summaries
    ]
    lines = [f"mutants: medians over {report.seeds} seeds, at most {report.limit_seconds:g} s of one core each"]
    lines += ["  " + line for line in aligned([list(HEADINGS), *rows], numbers_from=2)]
    lines += ["", *("  " + line for line in aligned([_share_headings(report), *_share_rows(report)]))]
    if report.twin_families:
        lines += ["", *("  " + line for line in aligned([list(TWIN_HEADINGS), *_twin_rows(report)]))]
    lines += ["", *(f"  {gap}" for gap in report.gaps), "stated bounds"] if report.gaps else ["", "stated bounds"]
    lines += [
        "  " + line for line in aligned([["holds" if bound.holds else "FAILS", bound.measured, bound.stated] for bound in report.bounds], 3)
    ]
    lines += [f"  alarm on the fixed twin of {alarm}" for alarm in report.twin_alarms]
    return "\n".join(lines) + "\n"


def _seconds(summary: Summary, limit_seconds: float) -> str:
    return f"> {limit_seconds:g}" if summary.seconds is None else f"{summary.seconds:.2f}"


def _effect(summary: Summary) -> str:
    return "-" if summary.effect is None else f"{summary.effect:.2f}"


def _larger_by(summary: Summary) -> str:
    return "-" if summary.larger_by is None else f"{summary.larger_by:+d}"


def _share_headings(report: Report) -> list[str]:
    seconds = next(iter(report.shares.values()), {})
    return ["share found within", *(f"{some} s" for some in seconds), "ours quicker, alike, slower"]


def _share_rows(report: Report) -> list[list[str]]:
    """A row for each finder: the shares, and on how many mutants A12 is well above one half, near it, and well below."""
    rows = []
    for finder, shares in report.shares.items():
        effects = [summary.effect for summary in report.summaries if summary.finder == finder and summary.effect is not None]
        counts = (
            sum(effect >= 0.5 + EFFECT_MIN for effect in effects),
            sum(abs(effect - 0.5) < EFFECT_MIN for effect in effects),
            sum(effect <= 0.5 - EFFECT_MIN for effect in effects),
        )
        rows.append([finder, *(f"{100 * share:.0f} %" for share in shares.values()), ", ".join(map(str, counts)) if effects else "-"])
    return rows


def _twin_rows(report: Report) -> list[list[str]]:
    return [
        [family.family, str(family.twins), f"{family.programs:,}", f"{family.seconds:,.0f}", str(family.alarms)]
        for family in report.twin_families
    ]


# --- as a page -------------------------------------------------------------------------------------------------------------

_ABOUT_FINDERS = {
    "statedrift": "ours: programs of the profile `swarm`, as a campaign draws them, not steered by what is known.",
    "uniform": "the same operations, configurations and runner, drawn uniformly: no kind of operation is switched off or favoured, no size is leant towards.",
    "hypothesis": "a Hypothesis state machine over the same target that recomputes the log after every decode (fuzz/naive_baseline.py).\n  It has only operations that must be accepted: a fault in a refusal, a partial save or a damaged blob is beyond it.",
    "hypofuzz": "HypoFuzz on that state machine, with its own coverage and corpus, up to the first failing example (fuzz/hypofuzz_baseline.py); below Python 3.12\n  it traces every line with `sys.settrace`, which is slower than what it uses from there on.",
}
_READING = """- *seconds* and *programs* (of a state machine: its examples) are Kaplan-Meier medians over the seeds. A run that found nothing within its limit is censored: it
  counts as still searching, not as slow; `> {limit}`: half of the runs or more found nothing. In brackets how many did, where not all.
- *A12* (Vargha and Delaney) is how likely a run of ours is quicker than one of theirs, ties half: 1 always, 0.5 no difference, 0 never.
- *larger by*: operations of the largest reduced program over the seeds beyond those of the shortest one, which was written by hand.
- *purity*: the share of runs whose reduced programs have the commonest signature."""


def report_markdown(report: Report, facts: Sequence[tuple[str, str]]) -> str:
    """The report as a Markdown page; facts: what it was measured with."""
    finders = [finder for finder in FINDERS if finder in report.shares]
    count = len({summary.mutant for summary in report.summaries})
    parts = [
        "# How soon mutants are found",
        "Written by `statedrift bench mutants --write FILE`. "
        f"{count} mutants of our own caches (what they are: docs/mutants.md), {report.seeds} seeds each, at most {report.limit_seconds:g} s a run.\n"
        "Time is CPU time of one core until a fuzzer first calls something wrong; reduction is not in it.",
        "\n".join(f"- *{finder}*: {_ABOUT_FINDERS[finder]}" for finder in finders),
        markdown_table(_share_headings(report), _share_rows(report)),
        *(["\n".join(f"- {gap}" for gap in report.gaps)] if report.gaps else []),
        "## Stated bounds",
        "On our own fuzzer.",
        bound_table(report.bounds),
        *(["\n".join(f"- alarm on the fixed twin of {alarm}" for alarm in report.twin_alarms)] if report.twin_alarms else []),
        "## Mutant by mutant",
        _READING.format(limit=f"{report.limit_seconds:g}"),
        markdown_table(_mutant_headings(finders), _mutant_rows(report, finders)),
        *(
            [
                "## Fixed twins",
                "In turns, on programs that no search drew; seconds of CPU time.",
                markdown_table(TWIN_HEADINGS, _twin_rows(report)),
            ]
            if report.twin_families
            else []
        ),
        "## Measured on",
        markdown_table(("", ""), [list(fact) for fact in facts]),
    ]
    return "\n\n".join(parts) + "\n"


def _mutant_headings(finders: Sequence[Finder]) -> list[str]:
    theirs = [f"{finder}: {what}" for finder in finders[1:] for what in ("seconds", "A12")]
    return ["mutant", "seconds", "programs", "larger by", "purity", *theirs]


def _mutant_rows(report: Report, finders: Sequence[Finder]) -> list[list[str]]:
    """A row for each mutant: our own fuzzer, then the others side by side."""
    rows = []
    for mutant in dict.fromkeys(summary.mutant for summary in report.summaries):
        by_finder = {summary.finder: summary for summary in report.summaries if summary.mutant == mutant}
        row = [f"`{mutant}`"]
        for finder, summary in ((finder, by_finder.get(finder)) for finder in finders):
            if summary is None:
                row += ["-", "-"]
                continue
            some = f" ({summary.found} of {summary.runs})" if summary.found < summary.runs else ""
            row.append(_seconds(summary, report.limit_seconds) + some)
            if finder == FINDERS[0]:
                row.append("-" if summary.programs is None else f"{summary.programs:,.0f}")
                row += [_larger_by(summary), "-" if summary.purity is None else f"{100 * summary.purity:.0f} %"]
            else:
                row.append(_effect(summary))
        rows.append(row)
    return rows


def runs_csv(runs: Sequence[Detection]) -> str:
    """One line a run, with a heading; the columns are the fields of `Detection`."""
    frame = pandas.DataFrame([msgspec.structs.asdict(run) for run in runs], columns=list(Detection.__struct_fields__))
    return frame.astype({"reduced_operations": "Int64"}).to_csv(index=False)
