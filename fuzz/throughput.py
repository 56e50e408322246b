"""Throughput: programs a second on one core, where the time goes, and what memory it takes.

Rules
- Only shards are measured: generating, running and judging. No reduction, no noise measurement, and a few shards go first to warm up.
- Everything runs on one core (where the system lets a process choose), the child process of a native target too.
- A core's time is the CPU time of all processes: on a core shared with others the clock on the wall says more than the programs took.
- What cannot be known on this system (a child's memory and CPU time, without /proc) is None, never a guess.
"""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from time import perf_counter, process_time

import msgspec

from ..oracle.recompute import use_one_thread
from .shards import ShardTask, run_shard, settled_heap, shard_model
from .trial import Bench

WARM_UP_SHARDS = 6
_MODEL_SHARDS = 64
"""Shards among which every model of a campaign occurs."""
_WARM_UP_SEED = 1 << 32
"""Beyond every seed that can be asked for: no measured program has run before."""


class Memory(msgspec.Struct, frozen=True):
    """Resident bytes of this process, and of the target's child processes together, `seconds` after the start."""

    seconds: float
    parent_bytes: int
    child_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.parent_bytes + self.child_bytes


class Throughput(msgspec.Struct, frozen=True):
    """What was measured.

    seconds, core_seconds   of wall time, and of CPU time over all processes (None: not known here)
    seconds_generating, seconds_running, seconds_judging  of wall time
    divergent, failed       programs that diverged, and that could not be judged
    parent_peak_bytes, child_peak_bytes  largest resident size of this process (where the system cannot forget an older peak: ever), and of
                            the child processes (None: not known here)
    memory                  after every shard; empty where it is not known
    """

    target: str
    version: str
    families: tuple[str, ...]
    seed: int
    programs: int
    operations: int
    divergent: int
    failed: int
    seconds: float
    core_seconds: float | None
    seconds_generating: float
    seconds_running: float
    seconds_judging: float
    parent_peak_bytes: int
    child_peak_bytes: int | None
    memory: tuple[Memory, ...]

    @property
    def programs_per_second(self) -> float:
        """By the clock on the wall."""
        return self.programs / self.seconds

    @property
    def programs_per_core_second(self) -> float:
        """By the time that the core spent on it; by the clock where that is not known."""
        return self.programs / (self.core_seconds or self.seconds)

    @property
    def operations_per_core_second(self) -> float:
        return self.operations / (self.core_seconds or self.seconds)

    @property
    def operations_per_program(self) -> float:
        """Operations that were reached; a program ends at its first divergence."""
        return self.operations / self.programs

    @property
    def generating_share(self) -> float:
        """Of the wall time."""
        return self.seconds_generating / self.seconds

    @property
    def judging_share(self) -> float:
        """Of the wall time."""
        return self.seconds_judging / self.seconds

    @property
    def peak_bytes(self) -> int:
        """At most so much was resident at once: the sum of the peaks."""
        return self.parent_peak_bytes + (self.child_peak_bytes or 0)

    @property
    def growth_bytes(self) -> int | None:
        """How much larger the processes were in the last quarter of the time than in the second (medians); None with too few samples.

        The first quarter is left out: caches and heaps fill.
        """
        second = [sample.total_bytes for sample in self.memory if 0.25 <= sample.seconds / self.seconds < 0.5]
        last = [sample.total_bytes for sample in self.memory if sample.seconds / self.seconds >= 0.75]
        return _median(last) - _median(second) if second and last else None


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keep this process, and those it starts, to one core it may use; as before afterwards. Where the system cannot, nothing changes."""
    if sys.platform != "linux":
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def measure(target_name: str, families: Sequence[str], seconds: float, seed: int) -> Throughput:
    """Run shards for `seconds` of wall time on one core.

    Raises UsageError for an unknown target, UnavailableError when it cannot be used or judged here.
    """
    use_one_thread()
    with one_core(), Bench(target_name) as bench:
        for model in dict.fromkeys(shard_model(seed, shard, families) for shard in range(_MODEL_SHARDS)):
            bench.noise(model)
        for shard in range(WARM_UP_SHARDS):
            run_shard(bench, ShardTask(_WARM_UP_SEED, shard, tuple(families)))
        with settled_heap():
            return _measured(bench, tuple(families), seconds, seed)


def _measured(bench: Bench, families: tuple[str, ...], seconds: float, seed: int) -> Throughput:
    programs = operations = divergent = failed = 0
    generating = running = judging = 0.0
    memory = []
    _forget_peak()
    started, cpu_before = perf_counter(), _cpu_seconds(bench)
    for shard in count():
        result = run_shard(bench, ShardTask(seed, shard, families))
        programs += result.programs
        operations += result.operations
        divergent += len(result.divergent)
        failed += len(result.not_judged)
        generating += result.seconds_generating
        running += result.seconds_running
        judging += result.seconds_judging
        elapsed = perf_counter() - started
        if (parent := _status_bytes(os.getpid(), "VmRSS")) is not None:
            memory.append(Memory(elapsed, parent, _child_bytes(bench, "VmRSS") or 0))
        if elapsed >= seconds:
            break
    cpu_after = _cpu_seconds(bench)
    return Throughput(
        target=bench.target_name,
        version=bench.version,
        families=families,
        seed=seed,
        programs=programs,
        operations=operations,
        divergent=divergent,
        failed=failed,
        seconds=elapsed,
        core_seconds=None if cpu_before is None or cpu_after is None else cpu_after - cpu_before,
        seconds_generating=generating,
        seconds_running=running,
        seconds_judging=judging,
        parent_peak_bytes=_parent_peak_bytes(),
        child_peak_bytes=_child_bytes(bench, "VmHWM"),
        memory=tuple(memory),
    )


def _forget_peak() -> None:
    """Let the peak of this process be what it has now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _parent_peak_bytes() -> int:
    peak = _status_bytes(os.getpid(), "VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return peak if peak is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _cpu_seconds(bench: Bench) -> float | None:
    """CPU seconds of this process and of the target's child processes, those that died included."""
    if bench.sandbox is None:
        return process_time()
    nursery, worker = bench.sandbox.processes
    ended = _stat_seconds(nursery, 4)  # with the workers that it has outlived
    living = _stat_seconds(worker, 2)
    return None if ended is None or living is None else process_time() + ended + living


def _stat_seconds(process: int, fields: int) -> float | None:
    """The first of utime, stime, cutime and cstime of a process, added up."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    ticks = text.rpartition(")")[2].split()[11 : 11 + fields]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _child_bytes(bench: Bench, field: str) -> int | None:
    """VmRSS or VmHWM of the target's child processes together; pages that they share count twice."""
    if bench.sandbox is None:
        return 0
    sizes = [_status_bytes(process, field) for process in bench.sandbox.processes]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _status_bytes(process: int, field: str) -> int | None:
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith(field + ":")), None)
    return None if line is None else int(line.split()[1]) * 1024
