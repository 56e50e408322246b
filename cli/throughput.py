"""`statedrift bench throughput`: programs a second on one core, beside what a naive test would do, and whether the stated bounds hold.

Rules
- Shards of a campaign are measured, each target and family apart: a family whose programs diverge early is quick for a bad reason.
- A bound on a target's rate is on a campaign's, whose families take turns.
- Rates are by the time that the core worked on it; the clock's rate stands beside. On an idle machine they are the same.
- Status 1 when a stated bound fails, whatever the machine; 2 when a target that was named cannot be measured.
- What was found does not change the status.
"""

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from ..fuzz.naive_baseline import TARGET_NAME as NAIVE_TARGET
from ..fuzz.naive_baseline import Mix, NaiveThroughput, campaign_mix, measure_naive
from ..fuzz.throughput import Throughput, measure
from ..reports.terminal import aligned
from ..spec.errors import UnavailableError
from . import failures
from .failures import complain
from .fuzzing import checked_settings
from .output import check_file, say, write_file

TARGETS = ("numba", "llamacpp")
PROGRAMS_PER_SECOND_MIN = {"numba": 600.0, "llamacpp": 150.0}
OPERATIONS_PER_SECOND_MIN = {"numba": 10_000.0}
FAMILY_PROGRAMS_PER_SECOND_MIN = {("llamacpp", "lfm2"): 250.0}
"""Asked of one family of a target. What stands between it and what is measured: benchmarks/LLAMACPP_SPEED.md."""
NAIVE_RATIO_MIN = 10.0
GENERATING_SHARE_MAX = 1 / 4
JUDGING_SHARE_MAX = 1 / 3
PEAK_BYTES_MAX = 1 << 30
GROWTH_BYTES_MAX = 16 << 20
SHARED_CORE = 0.9
"""With less of the clock's time than this the core was shared, and the text says so."""
PACKAGES = ("statedrift", "numpy", "numba", "torch", "msgspec", "hypothesis", "llama-cpp-python")
_MIB = 1 << 20


class Bound(msgspec.Struct, frozen=True):
    """A stated bound, what was measured, and whether it holds."""

    stated: str
    measured: str
    holds: bool


class Report(msgspec.Struct, frozen=True):
    """Everything that one run of the command measured. mix: what a campaign's programs are made of; gaps: what could not be measured."""

    measured: tuple[Throughput, ...]
    naive: tuple[NaiveThroughput, ...]
    mix: Mix
    gaps: tuple[str, ...]


def throughput_command(targets: Sequence[str], families: Sequence[str], seconds: float, seed: int, write: Path | None) -> int:
    """Measure, print, and write Markdown when asked to; the answer is the exit status."""
    check_file("--write", write)
    report = _measure_all(tuple(dict.fromkeys(targets)), families, seconds, seed)
    say(report_text(report))
    if write is not None:
        write_file("--write", write, report_markdown(report, machine_facts()))
    return failures.OK if all(bound.holds for bound in bounds_of(report)) else failures.DIVERGENCE


def _measure_all(targets: Sequence[str], families: Sequence[str], seconds: float, seed: int) -> Report:
    """Measure the targets, those of `TARGETS` that are here when none is named, and the naive way where it can be compared."""
    measured: list[Throughput] = []
    naive: list[NaiveThroughput] = []
    gaps: list[str] = []
    for target in targets or TARGETS:
        try:
            for family in checked_settings(target, families, seconds, None, seed, 1, None).families:
                complain(f"measuring {target} on {family} for {seconds:g} s")
                measured.append(measure(target, (family,), seconds, seed))
                if target == NAIVE_TARGET:
                    complain(f"measuring the naive way on {family}")
                    naive.append(measure_naive(family))
        except UnavailableError as error:
            if targets:
                raise
            gaps.append(str(error))
    if not measured:
        raise UnavailableError("; ".join(gaps))
    every_family = tuple(dict.fromkeys(family for throughput in measured for family in throughput.families))
    return Report(tuple(measured), tuple(naive), campaign_mix(every_family, seed), tuple(gaps))


def bounds_of(report: Report) -> list[Bound]:
    """Every stated bound that concerns what was measured."""
    result = []
    for target, least in PROGRAMS_PER_SECOND_MIN.items():
        own = [throughput for throughput in report.measured if throughput.target == target]
        if not own:
            continue
        if len(own) == 1 and (target, _families(own[0])) in FAMILY_PROGRAMS_PER_SECOND_MIN:
            continue  # alone it has a bound of its own
        name = f"{target} {' and '.join(map(_families, own))}" + " in turn" * (len(own) > 1)
        rate = rate_in_turn([throughput.programs_per_core_second for throughput in own])
        result.append(Bound(f"{name}: at least {least:,.0f} programs/s on one core", f"{rate:,.0f}", rate >= least))
        if target in OPERATIONS_PER_SECOND_MIN:
            least = OPERATIONS_PER_SECOND_MIN[target]
            rate *= sum(throughput.operations_per_program for throughput in own) / len(own)
            result.append(Bound(f"{name}: at least {least:,.0f} operations/s on one core", f"{rate:,.0f}", rate >= least))
    for throughput in report.measured:
        name = _name(throughput)
        asked = FAMILY_PROGRAMS_PER_SECOND_MIN.get((throughput.target, _families(throughput)))
        if asked is not None:
            rate = throughput.programs_per_core_second
            result.append(Bound(f"{name}: at least {asked:.0f} programs/s on one core", f"{rate:,.0f}", rate >= asked))
        for naive in report.naive:
            if throughput.target == NAIVE_TARGET and throughput.families == (naive.family,):
                ratio = naive_ratio(throughput, naive)
                result.append(
                    Bound(f"{name}: at least {NAIVE_RATIO_MIN:.0f} times the naive way", f"{ratio:.1f}", ratio >= NAIVE_RATIO_MIN)
                )
        generating, share = throughput.generating_share, throughput.judging_share
        peak, growth = throughput.peak_bytes, throughput.growth_bytes
        result.append(
            Bound(
                f"{name}: generating takes at most a quarter of the time", f"{100 * generating:.0f} %", generating <= GENERATING_SHARE_MAX
            )
        )
        result.append(Bound(f"{name}: judging takes less than a third of the time", f"{100 * share:.0f} %", share < JUDGING_SHARE_MAX))
        result.append(Bound(f"{name}: at most {PEAK_BYTES_MAX // _MIB} MiB at its peak", f"{peak / _MIB:,.0f}", peak <= PEAK_BYTES_MAX))
        if growth is not None:
            result.append(
                Bound(
                    f"{name}: at most {GROWTH_BYTES_MAX // _MIB} MiB more in the last quarter than in the second",
                    f"{growth / _MIB:+.1f}",
                    growth <= GROWTH_BYTES_MAX,
                )
            )
    return result


def rate_in_turn(rates: Sequence[float]) -> float:
    """Programs a second of a campaign whose families take turns, each at its own rate."""
    return len(rates) / sum(1 / rate for rate in rates)


def naive_ratio(throughput: Throughput, naive: NaiveThroughput) -> float:
    """How many times quicker than the naive way: by programs or by operations, whichever is less."""
    return min(
        throughput.programs_per_core_second / naive.programs_per_core_second,
        throughput.operations_per_core_second / naive.operations_per_core_second,
    )


def _name(throughput: Throughput) -> str:
    return f"{throughput.target} {_families(throughput)}"


def _families(throughput: Throughput) -> str:
    return "+".join(throughput.families)


RATE_HEADINGS = ("", "programs/s", "by the clock", "operations/s", "operations a program", "diverged", "times naive")
TIME_HEADINGS = ("", "ms a program", "generating", "running", "judging", "peak MiB", "child's", "growth MiB", "measured s")


def rate_rows(report: Report) -> list[list[str]]:
    """How quick: one row for each measurement, a naive one below what it compares with."""
    rows = []
    for throughput in report.measured:
        rivals = [naive for naive in report.naive if throughput.target == NAIVE_TARGET and throughput.families == (naive.family,)]
        rows.append(
            [
                _name(throughput),
                f"{throughput.programs_per_core_second:,.0f}",
                f"{throughput.programs_per_second:,.0f}",
                f"{throughput.operations_per_core_second:,.0f}",
                f"{throughput.operations_per_program:.1f}",
                f"{100 * throughput.divergent / throughput.programs:.1f} %",
                *([f"{naive_ratio(throughput, rivals[0]):.1f}"] if rivals else ["-"]),
            ]
        )
        rows += [
            [
                f"naive {naive.family}",
                f"{naive.programs_per_core_second:,.0f}",
                f"{naive.programs / naive.seconds:,.0f}",
                f"{naive.operations_per_core_second:,.0f}",
                f"{naive.mix.operations_per_program:.1f}",
                "-",
                "1",
            ]
            for naive in rivals
        ]
    return rows


def time_rows(report: Report) -> list[list[str]]:
    """Where the time goes, as shares of the wall time, and what memory it takes."""
    return [
        [
            _name(throughput),
            f"{1000 / throughput.programs_per_core_second:.2f}",
            *(
                f"{100 * seconds / throughput.seconds:.0f} %"
                for seconds in (throughput.seconds_generating, throughput.seconds_running, throughput.seconds_judging)
            ),
            f"{throughput.peak_bytes / _MIB:,.0f}",
            "?" if throughput.child_peak_bytes is None else f"{throughput.child_peak_bytes / _MIB:,.0f}",
            "?" if throughput.growth_bytes is None else f"{throughput.growth_bytes / _MIB:+.1f}",
            f"{throughput.seconds:.0f}",
        ]
        for throughput in report.measured
    ]


def notes(report: Report) -> list[str]:
    """What a reader has to know about the numbers."""
    texts = [f"A campaign's programs: {_mix_text(report.mix)}."]
    texts += [f"The naive way on {naive.family}: {_mix_text(naive.mix)}." for naive in report.naive]
    for throughput in report.measured:
        if throughput.core_seconds is None:
            texts.append(f"{_name(throughput)}: the child's CPU time is not known on this system; rates are by the clock.")
        elif not throughput.core_seconds >= SHARED_CORE * throughput.seconds:
            share = 100 * throughput.core_seconds / throughput.seconds
            texts.append(f"{_name(throughput)}: the core was shared, {share:.0f} % of the clock's time was for this.")
        if throughput.failed:
            texts.append(f"{_name(throughput)}: {throughput.failed} programs could not be judged.")
    return texts + [f"Not measured: {gap}" for gap in report.gaps]


def _mix_text(mix: Mix) -> str:
    return (
        f"{mix.operations_per_program:.1f} operations on average, {100 * mix.decode_share:.0f} % of them decodes, "
        f"a decode of {mix.items_per_decode:.1f} items and {mix.tokens_per_decode:.1f} tokens"
    )


def report_text(report: Report) -> str:
    """The report for a terminal."""
    lines = ["throughput on one core"]
    lines += ["  " + line for line in aligned([list(RATE_HEADINGS), *rate_rows(report)])]
    lines += ["", *("  " + line for line in aligned([list(TIME_HEADINGS), *time_rows(report)]))]
    lines += ["", *("  " + note for note in notes(report)), "", "stated bounds"]
    rows = [["holds" if bound.holds else "FAILS", bound.measured, bound.stated] for bound in bounds_of(report)]
    lines += [f"  {word}  {measured}  {stated}" for word, measured, stated in _padded(rows)]
    return "\n".join(lines) + "\n"


def _padded(rows: Sequence[Sequence[str]]) -> list[tuple[str, str, str]]:
    width = max((len(row[1]) for row in rows), default=0)
    return [(word, measured.rjust(width), stated) for word, measured, stated in rows]


def machine_facts(packages: Sequence[str] = PACKAGES, used: str = "one used") -> list[tuple[str, str]]:
    """The machine (and of its cores, which were `used`) and the versions that the numbers were measured with, and the date."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = [
        ("date", datetime.now(UTC).date().isoformat()),
        ("processor", f"{_processor()}, {os.cpu_count()} cores, {used}"),
        ("memory", f"{memory / (1 << 30):.0f} GiB"),
        ("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"),
    ]
    for package in packages:
        try:
            facts.append((package, version(package)))
        except PackageNotFoundError:
            facts.append((package, "not installed"))
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def report_markdown(report: Report, facts: Sequence[tuple[str, str]]) -> str:
    """The report as a Markdown page."""
    parts = [
        "# Throughput",
        "Written by `statedrift bench throughput --write FILE`. Rates are for one core, by the time it worked on it (parent and child process);\n"
        '"by the clock" is what a watch would say. Only shards are measured: generating, running, judging; no reduction. The naive way is a\n'
        "Hypothesis state machine over the same target that recomputes the log after every decode (fuzz/naive_baseline.py). Kernels alone: [KERNELS.md](KERNELS.md).",
        markdown_table(RATE_HEADINGS, rate_rows(report)),
        "Where the time goes (shares of the wall time), and memory: the sum of the peaks of parent and child, and how much more was resident in\n"
        "the last quarter of the time than in the second.",
        markdown_table(TIME_HEADINGS, time_rows(report)),
        "\n".join(f"- {note}" for note in notes(report)),
        "## Stated bounds",
        bound_table(bounds_of(report)),
        "## Measured on",
        markdown_table(("", ""), [list(fact) for fact in facts]),
    ]
    return "\n\n".join(parts) + "\n"


def bound_table(bounds: Sequence[Bound]) -> str:
    """Stated bounds as a Markdown table."""
    return markdown_table(
        ("bound", "measured", "holds"), [[bound.stated, bound.measured, "yes" if bound.holds else "**no**"] for bound in bounds]
    )


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
