"""How a campaign scales: two processes against one, and two workers of a Dask cluster against two processes, side by side.

    python benchmarks/scaling.py [--target numba] [--family lfm2 ...] [--seconds 30] [--passes 3] [--write FILE]

Rules
- Whole campaigns are measured as they are run: merging, rounds, the canary and what is reduced included. What a pool or a cluster takes to
  start is not: a rate is of the time from the first quarter of the budget on.
- The three take turns, pass by pass; a ratio is the median of the passes' ratios, so that a machine that changes does not count.
- "CPU ms" is what a program costs in all processes together (the campaign's, the workers, Dask's scheduler): with as many cores as there is
  work for, it alone limits how far two processes come. It says so also on a machine that does other things, too; the rates do not.
- Scheduler and workers are Dask's own, on loopback, each a process of its own.
- It ends with status 1 when a stated bound does not hold.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
from statedrift.cli.fuzzing import checked_settings
from statedrift.cli.throughput import Bound, bound_table, machine_facts, markdown_table
from statedrift.fuzz.campaign import run_campaign
from statedrift.fuzz.progress import Progress

PROCESSES = 2
TWO_TO_ONE_MIN = 1.8
CLUSTER_TO_LOCAL_MIN = 0.9
LEFT_OUT_SHARE = 0.25
START_SECONDS_MAX = 60.0
WAYS = ("one process", "two processes", "Dask, two workers")


class Measured(NamedTuple):
    """A campaign's programs a second by the clock, and CPU seconds that a program took in all processes."""

    programs_per_second: float
    cpu_seconds: float


class Cluster(NamedTuple):
    """A scheduler's address, and the processes of the cluster."""

    address: str
    processes: tuple[int, ...]


class Moment(NamedTuple):
    """Where a campaign was, and the CPU time of all processes."""

    seconds: float
    programs: int
    cpu_seconds: float


def cpu_seconds(processes: Sequence[int]) -> float:
    """Of processes and all below them, each once; those that ended are left out."""
    all_of_them = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            all_of_them |= {psutil.Process(process), *psutil.Process(process).children(recursive=True)}
    found = 0.0
    for one in all_of_them:
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            found += times.user + times.system
    return found


@contextlib.contextmanager
def dask_cluster(workers: int) -> Iterator[Cluster]:
    """A scheduler and so many workers with a thread each, started as docs/campaigns.md says."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "scheduler.json"
        common = ["--scheduler-file", str(told), "--no-dashboard"]
        commands = (
            ["scheduler", "--host", "127.0.0.1", "--port", "0", *common],
            ["worker", "--nworkers", str(workers), "--nthreads", "1", "--local-directory", folder, *common],
        )
        environment = {**os.environ, "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False"}
        processes = [
            subprocess.Popen([sys.executable, "-m", "dask", *command], stderr=subprocess.DEVNULL, process_group=0, env=environment)
            for command in commands
        ]
        try:
            yield Cluster(_address(told, workers), tuple(process.pid for process in processes))
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
            for process in processes:
                process.wait()


def _address(told: Path, workers: int) -> str:
    """The scheduler's address, when it has so many workers."""
    from distributed import Client

    deadline = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            address = str(json.loads(told.read_text())["address"])
            with Client(address, set_as_default=False) as client:
                client.wait_for_workers(workers, timeout=START_SECONDS_MAX)
            return address
        time.sleep(0.1)
    raise SystemExit("scaling: Dask's scheduler did not start")


def measure(target: str, families: Sequence[str], seconds: float, seed: int, jobs: int | None, cluster: Cluster | None) -> Measured:
    """One campaign."""
    told: list[Moment] = []
    processes = (os.getpid(), *(cluster.processes if cluster else ()))

    def note(progress: Progress) -> None:
        if progress.programs and progress.seconds >= LEFT_OUT_SHARE * seconds:
            told.append(Moment(progress.seconds, progress.programs, cpu_seconds(processes)))

    address = cluster.address if cluster else None
    run_campaign(checked_settings(target, families, seconds, None, seed, jobs, None, scheduler=address), note)
    if len(told) < 2 or told[-1].seconds < 2 * LEFT_OUT_SHARE * seconds:
        raise SystemExit(f"scaling: {seconds:g} s are too few on this machine; give more --seconds")
    programs = told[-1].programs - told[0].programs
    return Measured(programs / (told[-1].seconds - told[0].seconds), (told[-1].cpu_seconds - told[0].cpu_seconds) / programs)


def measure_all(target: str, families: Sequence[str], seconds: float, passes: int) -> list[tuple[Measured, ...]]:
    """For every pass what each of `WAYS` came to; a pass has its own seed."""
    found = []
    with dask_cluster(PROCESSES) as cluster:
        for seed in range(passes):
            ways: tuple[tuple[int | None, Cluster | None], ...] = ((1, None), (PROCESSES, None), (None, cluster))
            found.append(tuple(measure(target, families, seconds, seed, jobs, remote) for jobs, remote in ways))
            print(f"pass {seed + 1} of {passes}: {', '.join(f'{one.programs_per_second:,.0f}' for one in found[-1])}", file=sys.stderr)
    return found


def bounds_of(passes: Sequence[tuple[Measured, ...]]) -> list[Bound]:
    """The stated bounds, of the medians of the passes' ratios."""
    one, two, cluster = ([ways[number].programs_per_second for ways in passes] for number in range(len(WAYS)))
    scaling = median(more / less for more, less in zip(two, one, strict=True))
    dask = median(theirs / ours for theirs, ours in zip(cluster, two, strict=True))
    return [
        Bound(f"two processes: at least {TWO_TO_ONE_MIN} times one", f"{scaling:.2f}", scaling >= TWO_TO_ONE_MIN),
        Bound(f"Dask with two workers: at least {CLUSTER_TO_LOCAL_MIN} times two processes", f"{dask:.2f}", dask >= CLUSTER_TO_LOCAL_MIN),
    ]


def page(command: str, passes: Sequence[tuple[Measured, ...]]) -> str:
    """What was measured as Markdown."""
    rows = [
        [
            way,
            f"{median(ways[number].programs_per_second for ways in passes):,.0f}",
            ", ".join(f"{ways[number].programs_per_second:,.0f}" for ways in passes),
            f"{1000 * median(ways[number].cpu_seconds for ways in passes):.2f}",
        ]
        for number, way in enumerate(WAYS)
    ]
    parts = [
        "# Scaling",
        f"Written by `{command}`. Programs a second of whole campaigns by the clock, side by side; what the numbers mean stands at the head of that file.",
        markdown_table(("", "programs/s", "pass by pass", "CPU ms"), rows),
        bound_table(bounds_of(passes)),
        markdown_table(
            ("", ""),
            [list(fact) for fact in machine_facts(("statedrift", "numpy", "numba", "torch", "msgspec", "distributed"), "all for use")],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure how a campaign scales.")
    parser.add_argument("--target", default="numba")
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each campaign (30)")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args(arguments)
    families = tuple(given.family) or ("mamba2", "lfm2")
    passes = measure_all(given.target, families, given.seconds, given.passes)
    options = f"--target {given.target} {' '.join(f'--family {family}' for family in families)} --seconds {given.seconds:g} --passes {given.passes}"
    text = page(f"python benchmarks/scaling.py {options}", passes)
    print(text, end="")
    if given.write is not None:
        given.write.write_text(text, encoding="utf-8")
    return 0 if all(bound.holds for bound in bounds_of(passes)) else 1


if __name__ == "__main__":
    sys.exit(main())
