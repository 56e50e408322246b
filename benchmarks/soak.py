"""A soak: a long campaign, watched from outside every second. Memory must stay flat, descriptors must not grow, and it must not slow down.

    python benchmarks/soak.py [--minutes 30] [--target numba] [--family lfm2 ...] [--jobs 2] [--out DIR] [--write FILE]

Rules
- What is watched is the command line as anybody runs it: `statedrift fuzz`, its workers, and the children of native targets, by /proc.
- Programs are read from its `stats.json`; a minute's rate is of the time by the campaign's own clock.
- Minutes count from the first program on: noise is measured and kernels are compiled before it.
- Memory and descriptors are sums over all processes; pages that they share count once for each.
- "CPU ms" is what a program costs in all processes together: where it stays and programs/s fall, the machine had something else to do.
- It ends with status 1 when a stated bound does not hold, and 2 when there is nothing to see (no /proc, or the campaign ended too soon).
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
from statedrift.cli.throughput import Bound, bound_table, machine_facts, markdown_table
from statedrift.store.statistics import STATISTICS_FILE, Statistics

SAMPLE_SECONDS = 1.0
MINUTE_SECONDS = 60.0
GROWTH_BYTES_MAX = 16 << 20
"""Of all processes together, from the second quarter of the time to the last one (medians); caches and heaps fill in the first."""
SLOWER_MAX = 0.1
_MIB = 1 << 20


class Sample(NamedTuple):
    """At a moment: resident bytes of the campaign's own process, and of all below it; CPU seconds, open descriptors and processes, of all
    together."""

    seconds: float
    parent_bytes: int
    child_bytes: int
    cpu_seconds: float
    descriptors: int
    processes: int
    statistics: Statistics | None

    @property
    def total_bytes(self) -> int:
        return self.parent_bytes + self.child_bytes


class Minute(NamedTuple):
    """What was seen in a minute: programs a second, CPU seconds a program, and medians (descriptors and processes: the most)."""

    programs_per_second: float
    cpu_seconds: float
    parent_bytes: float
    child_bytes: float
    descriptors: int
    processes: int


# --- looking -----------------------------------------------------------------------------------------------------------------


def processes_below(process: int) -> list[int]:
    """A process and all below it, by /proc; without those that ended and wait to be noticed."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(folder.name)] = int(parent)
    found = [process]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def resident_bytes(process: int) -> int:
    """0 for one that has just ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def cpu_seconds_of(process: int) -> float:
    """With what the processes below it took that have ended; 0 for one that has just ended itself."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def descriptors_of(process: int) -> int:
    """0 for one that has just ended."""
    try:
        return len(list(Path(f"/proc/{process}/fd").iterdir()))
    except OSError:
        return 0


def statistics_in(folder: Path) -> Statistics | None:
    """What the campaign says of itself; None before it says anything."""
    try:
        return msgspec.json.decode((folder / STATISTICS_FILE).read_bytes(), type=Statistics)
    except OSError:
        return None


def sample(process: int, folder: Path, seconds: float) -> Sample:
    """Everything at this moment."""
    parent, *below = processes_below(process)
    descriptors = sum(map(descriptors_of, (parent, *below)))
    cpu_seconds = sum(map(cpu_seconds_of, (parent, *below)))
    return Sample(
        seconds, resident_bytes(parent), sum(map(resident_bytes, below)), cpu_seconds, descriptors, 1 + len(below), statistics_in(folder)
    )


def watched(command: Sequence[str], folder: Path) -> tuple[list[Sample], int]:
    """Run a campaign to its end, and sample it every second; the samples, and its exit status."""
    started = time.monotonic()
    samples: list[Sample] = []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            samples.append(sample(process.pid, folder, time.monotonic() - started))
            time.sleep(max(0.0, len(samples) * SAMPLE_SECONDS - (time.monotonic() - started)))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        status = process.wait()
    return samples, status


# --- what it comes to --------------------------------------------------------------------------------------------------------


def minutes_of(samples: Sequence[Sample]) -> list[Minute]:
    """Whole minutes from the first program on. A rate is of the statistics that were newest at both ends of the minute."""
    fuzzing = [one for one in samples if one.statistics is not None and one.statistics.programs]
    found = []
    start = fuzzing[0].seconds if fuzzing else 0.0
    while fuzzing and start + MINUTE_SECONDS <= fuzzing[-1].seconds:
        own = [one for one in fuzzing if start <= one.seconds < start + MINUTE_SECONDS]
        after = next(one for one in fuzzing if one.seconds >= start + MINUTE_SECONDS)
        first, last = own[0].statistics, after.statistics
        assert first is not None
        assert last is not None
        elapsed, programs = last.elapsed - first.elapsed, last.programs - first.programs
        found.append(
            Minute(
                programs / elapsed if elapsed > 0 else 0.0,
                (after.cpu_seconds - own[0].cpu_seconds) / programs if programs else float("nan"),
                median(one.parent_bytes for one in own),
                median(one.child_bytes for one in own),
                max(one.descriptors for one in own),
                max(one.processes for one in own),
            )
        )
        start += MINUTE_SECONDS
    return found


def bounds_of(samples: Sequence[Sample], minutes: Sequence[Minute]) -> list[Bound]:
    """The stated bounds."""
    fuzzing = [one for one in samples if one.statistics is not None and one.statistics.programs]
    second = fuzzing[len(fuzzing) // 4 : len(fuzzing) // 2]
    last = fuzzing[3 * len(fuzzing) // 4 :]
    growth = median(one.total_bytes for one in last) - median(one.total_bytes for one in second)
    more = max(one.descriptors for one in last) - max(one.descriptors for one in second)
    first, slowest = minutes[0].programs_per_second, min(minute.programs_per_second for minute in minutes)
    slower = 1 - slowest / first if first > 0 else float("nan")
    return [
        Bound(
            f"memory: at most {GROWTH_BYTES_MAX // _MIB} MiB more in the last quarter than in the second",
            f"{growth / _MIB:+.1f}",
            growth <= GROWTH_BYTES_MAX,
        ),
        Bound("descriptors: no more in the last quarter than in the second", f"{more:+d}", more <= 0),
        Bound(f"programs/s: no minute more than {100 * SLOWER_MAX:.0f} % under the first", f"{100 * slower:.1f} %", slower <= SLOWER_MAX),
    ]


HEADINGS = ("minute", "programs/s", "CPU ms", "parent MiB", "children MiB", "descriptors", "processes")


def rows_of(minutes: Sequence[Minute]) -> list[list[str]]:
    """A row a minute."""
    return [
        [
            str(number),
            f"{minute.programs_per_second:,.1f}",
            f"{1000 * minute.cpu_seconds:.2f}",
            f"{minute.parent_bytes / _MIB:,.0f}",
            f"{minute.child_bytes / _MIB:,.0f}",
            str(minute.descriptors),
            str(minute.processes),
        ]
        for number, minute in enumerate(minutes, 1)
    ]


def page(command: str, minutes: Sequence[Minute], bounds: Sequence[Bound]) -> str:
    """The soak as Markdown."""
    parts = [
        "# Soak",
        f"Written by `python benchmarks/soak.py`, of `{command}`, sampled every second. Memory and descriptors are sums over processes.",
        markdown_table(HEADINGS, rows_of(minutes)),
        bound_table(bounds),
        markdown_table(("", ""), [list(fact) for fact in machine_facts(("statedrift", "numpy", "numba", "torch"), "all for use")]),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Watch a long campaign.")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to look for divergences (30)")
    parser.add_argument("--target", default="numba")
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="keep the campaign here")
    parser.add_argument("--write", type=Path, help="write the page here, too")
    given = parser.parse_args(arguments)
    options = ["--target", given.target, "--jobs", str(given.jobs), "--seconds", f"{60 * given.minutes:g}"]
    options += [word for family in given.family for word in ("--family", family)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.out or Path(temporary) / "run"
        samples, status = watched([sys.executable, "-m", "statedrift", "fuzz", *options, "--out", str(folder)], folder)
    minutes = minutes_of(samples)
    if status not in (0, 1) or len(minutes) < 2:
        print(f"soak: nothing to see: {len(minutes)} whole minutes, and the campaign ended with status {status}", file=sys.stderr)
        return 2
    bounds = bounds_of(samples, minutes)
    text = page(f"statedrift fuzz {' '.join(options)}", minutes, bounds)
    print(text, end="")
    if given.write is not None:
        given.write.write_text(text, encoding="utf-8")
    return 0 if all(bound.holds for bound in bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
