"""Workers: a campaign's shards and reductions, run in its own process or in a pool of them, with the same answers.

Rules
- Results come in the order of the tasks, however many processes take part.
- A task is taken when there is room for it, so that whoever gives the tasks may stop when time is over.
- What a reduction costs is counted in trials; seconds end it only where the campaign's own budget is of seconds.
"""

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context
from time import monotonic
from typing import Protocol

import msgspec

from ..spec.errors import UnavailableError
from .reduction import Reduction, reduce_trial
from .shards import ShardResult, ShardTask, light, run_shard, run_shard_in_worker, start_worker, worker_bench
from .trial import Bench, Trial

RERUNS = 10
REDUCTION_TRIALS_MAX = 4000
_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)


class ReductionTask(msgspec.Struct, frozen=True):
    """What to reduce.

    trial        a divergence, without its rows
    known        fine signatures of the findings there are already
    families     families, the simplest first, whose noise was measured: in which of them does the same divergence show
    seconds_max  None: trials alone end it
    """

    trial: Trial
    known: frozenset[str]
    families: tuple[str, ...]
    seconds_max: float | None


class Reduced(msgspec.Struct, frozen=True):
    """What came of it.

    reproduced  of RERUNS runs of the reduced program; 0 where it is a known finding, which was run again before
    seconds     of wall time
    """

    reduction: Reduction
    reproduced: int
    seconds: float


def reduce_task(bench: Bench, task: ReductionTask, on_step: Callable[[Trial], None] | None = None) -> Reduced:
    """Reduce a divergence, and run the program it came to again."""
    started = monotonic()
    again = bench.try_program(task.trial.program)
    if again.signature != task.trial.signature:  # it does not come back: keep it, with its reliability
        again = task.trial
    reduction = reduce_trial(again, bench, task.known, task.seconds_max, on_step, REDUCTION_TRIALS_MAX, task.families)
    reduction = msgspec.structs.replace(reduction, trial=light(reduction.trial), others=tuple(map(light, reduction.others)))
    reproduced = 0
    if not reduction.known:
        for _ in range(RERUNS):  # as whoever replays it: what an earlier program left in memory does not help
            bench.renew()
            reproduced += bench.try_program(reduction.program).signature == reduction.trial.signature
    return Reduced(reduction, reproduced, monotonic() - started)


def _reduce_in_worker(task: bytes) -> bytes:
    return msgspec.msgpack.encode(reduce_task(worker_bench(), msgspec.msgpack.decode(task, type=ReductionTask)))


class Workers(Protocol):
    """Whoever does the work."""

    def shards(self, tasks: Iterator[ShardTask]) -> Iterator[ShardResult]:
        """Results in the order of the tasks."""
        ...

    def reductions(self, tasks: Iterable[ReductionTask]) -> Iterator[Reduced]:
        """Results in the order of the tasks."""
        ...


class Here:
    """The campaign's own process; `on_step` is told of every smaller program."""

    def __init__(self, bench: Bench, on_step: Callable[[Trial], None]) -> None:
        self._bench = bench
        self._on_step = on_step

    def shards(self, tasks: Iterator[ShardTask]) -> Iterator[ShardResult]:
        for task in tasks:
            yield run_shard(self._bench, task)

    def reductions(self, tasks: Iterable[ReductionTask]) -> Iterator[Reduced]:
        for task in tasks:
            yield reduce_task(self._bench, task, self._on_step)


class Pool:
    """Several processes on this machine."""

    def __init__(self, executor: ProcessPoolExecutor, jobs: int) -> None:
        self._executor = executor
        self._jobs = jobs

    def shards(self, tasks: Iterator[ShardTask]) -> Iterator[ShardResult]:
        for answer in self._in_order(run_shard_in_worker, map(msgspec.msgpack.encode, tasks)):
            yield msgspec.msgpack.decode(answer, type=ShardResult)

    def reductions(self, tasks: Iterable[ReductionTask]) -> Iterator[Reduced]:
        for answer in self._in_order(_reduce_in_worker, map(msgspec.msgpack.encode, tasks)):
            yield msgspec.msgpack.decode(answer, type=Reduced)

    def _in_order(self, work: Callable[[bytes], bytes], tasks: Iterator[bytes]) -> Iterator[bytes]:
        running: list[Future[bytes]] = []
        try:
            while True:
                for task in islice(tasks, 2 * self._jobs - len(running)):
                    with _no_signals_to_new_processes():
                        running.append(self._executor.submit(work, task))
                if not running:
                    return
                yield running.pop(0).result()
        except BrokenProcessPool:
            raise UnavailableError(
                "a worker process ended by itself or was killed, perhaps for memory; fewer --jobs need less of it"
            ) from None
        finally:
            for future in running:
                future.cancel()


@contextlib.contextmanager
def open_pool(
    jobs: int, target: str, against: str | None, inspect: bool, oracle: str, noise: bytes, against_library: str | None = None
) -> Iterator[Pool]:
    """A pool of `jobs` processes, each with a bench of its own; the arguments are those of `start_worker`."""
    with ProcessPoolExecutor(
        jobs, get_context("spawn"), start_worker, (target, against, inspect, oracle, noise, against_library)
    ) as executor:
        yield Pool(executor, jobs)


@contextlib.contextmanager
def _no_signals_to_new_processes() -> Iterator[None]:
    """A process that is started here never sees the signals that a terminal sends to all: one that came before the worker can ignore it
    would break the pool. (A blocked signal stays blocked in what is started; here it only waits.)"""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINAL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
