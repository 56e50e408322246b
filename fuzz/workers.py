"""Workers: a campaign's shards and reductions, run in its own process or by others, with the same answers.

Rules
- Results come in the order of the tasks, however many processes take part.
- A task is taken when there is room for it, so that whoever gives the tasks may stop when time is over.
- Others are processes of this machine (here) or of a cluster (fuzz/cluster.py): an executor that takes tasks as MessagePack.
- Where tasks run out before their results are in, room is left: what will probably be asked for next is begun. A task is a pure function, so
  that its result is the same whenever it was begun; one that is not asked for after all is given up.
- What a reduction costs is counted in trials; seconds end it only where the campaign's own budget is of seconds.
"""

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import active_children, get_context
from time import monotonic
from typing import Protocol

import msgspec

from ..spec.errors import UnavailableError
from .reduction import Reduction, reduce_trial
from .shards import Opening, ShardResult, ShardTask, light, run_shard, start_worker, worker_bench
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


def shard(bench: Bench, task: bytes) -> bytes:
    """A ShardTask's result, both as MessagePack."""
    return msgspec.msgpack.encode(run_shard(bench, msgspec.msgpack.decode(task, type=ShardTask)))


def reduction(bench: Bench, task: bytes) -> bytes:
    """What came of a ReductionTask, both as MessagePack."""
    return msgspec.msgpack.encode(reduce_task(bench, msgspec.msgpack.decode(task, type=ReductionTask)))


Work = Callable[[Bench, bytes], bytes]


NOTHING_AHEAD: Iterator[ShardTask] = iter(())


class Workers(Protocol):
    """Whoever does the work."""

    @property
    def count(self) -> int:
        """How many processes work at a time."""
        ...

    def shards(self, tasks: Iterator[ShardTask], ahead: Iterator[ShardTask] = NOTHING_AHEAD) -> Iterator[ShardResult]:
        """Results in the order of the tasks. ahead: what will probably be asked for after them."""
        ...

    def reductions(self, tasks: Iterable[ReductionTask]) -> Iterator[Reduced]:
        """Results in the order of the tasks."""
        ...


class Here:
    """The campaign's own process; `on_step` is told of every smaller program."""

    count = 1

    def __init__(self, bench: Bench, on_step: Callable[[Trial], None]) -> None:
        self._bench = bench
        self._on_step = on_step

    def shards(self, tasks: Iterator[ShardTask], ahead: Iterator[ShardTask] = NOTHING_AHEAD) -> Iterator[ShardResult]:
        for task in tasks:
            yield run_shard(self._bench, task)

    def reductions(self, tasks: Iterable[ReductionTask]) -> Iterator[Reduced]:
        for task in tasks:
            yield reduce_task(self._bench, task, self._on_step)


class Sent(Protocol):
    """A task that was given to somebody."""

    def result(self) -> bytes:
        """Wait for what it came to. Raises UnavailableError when nobody can do it."""
        ...

    def cancel(self) -> object:
        """Nobody waits for it any more."""
        ...


class Executor(Protocol):
    """Processes that have a bench each."""

    @property
    def count(self) -> int:
        """How many they are now."""
        ...

    def submit(self, work: Work, task: bytes) -> Sent: ...


class Pool:
    """Several processes."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._ahead: dict[bytes, Sent] = {}

    @property
    def count(self) -> int:
        return self._executor.count

    def shards(self, tasks: Iterator[ShardTask], ahead: Iterator[ShardTask] = NOTHING_AHEAD) -> Iterator[ShardResult]:
        encode = msgspec.msgpack.encode
        begun, self._ahead = self._ahead, {}
        try:
            for answer in self._in_order(shard, map(encode, tasks), begun, map(encode, ahead)):
                yield msgspec.msgpack.decode(answer, type=ShardResult)
        finally:
            _cancel(begun.values())

    def reductions(self, tasks: Iterable[ReductionTask]) -> Iterator[Reduced]:
        for answer in self._in_order(reduction, map(msgspec.msgpack.encode, tasks), {}, iter(())):
            yield msgspec.msgpack.decode(answer, type=Reduced)

    def _in_order(self, work: Work, tasks: Iterator[bytes], begun: dict[bytes, Sent], ahead: Iterator[bytes]) -> Iterator[bytes]:
        """Results in the order of the tasks; as many are under way as keep everybody busy while the results are looked at."""
        running: list[Sent] = []
        try:
            while True:
                for task in islice(tasks, max(0, 2 * self.count - len(running))):
                    running.append(begun.pop(task) if task in begun else self._executor.submit(work, task))
                if not running:
                    return
                for task in islice(ahead, max(0, 2 * self.count - len(running) - len(self._ahead))):
                    self._ahead[task] = self._executor.submit(work, task)
                yield running.pop(0).result()
        finally:
            _cancel(running)

    def close(self) -> None:
        """Give up what was begun ahead."""
        _cancel(self._ahead.values())
        self._ahead = {}


def _cancel(tasks: Iterable[Sent]) -> None:
    for sent in tasks:
        sent.cancel()


class _SentHere:
    """A task of a local process."""

    def __init__(self, future: Future[bytes]) -> None:
        self._future = future
        self.cancel = future.cancel

    def result(self) -> bytes:
        try:
            return self._future.result()
        except BrokenProcessPool:
            raise _broken_pool() from None


def _broken_pool() -> UnavailableError:
    return UnavailableError("a worker process ended by itself or was killed, perhaps for memory; fewer --jobs need less of it")


def _work_here(work: Work, task: bytes) -> bytes:
    return work(worker_bench(), task)


class Local:
    """Processes of this machine."""

    def __init__(self, executor: ProcessPoolExecutor, count: int) -> None:
        self._executor = executor
        self.count = count

    def submit(self, work: Work, task: bytes) -> _SentHere:
        try:
            with _no_signals_to_new_processes():
                return _SentHere(self._executor.submit(_work_here, work, task))
        except BrokenProcessPool:
            raise _broken_pool() from None


@contextlib.contextmanager
def open_pool(jobs: int, opening: Opening) -> Iterator[Pool]:
    """A pool of `jobs` processes, each with a bench of its own, one of them ready."""
    others = set(active_children())
    with (
        ProcessPoolExecutor(jobs, get_context("spawn"), start_worker, (opening,)) as executor,
        contextlib.closing(Pool(Local(executor, jobs))) as pool,
    ):
        try:
            _await_first(executor, jobs)
            yield pool
        except BaseException:  # whoever wants to end does not wait for what is being done
            for process in set(active_children()) - others:
                process.kill()
            raise


def _await_first(executor: ProcessPoolExecutor, jobs: int) -> None:
    """Start all processes, and wait until one of them has opened its bench: the time before is not fuzzing."""
    with _no_signals_to_new_processes():
        started = [executor.submit(_nothing) for _ in range(jobs)]
    try:
        wait(started, return_when=FIRST_COMPLETED)
    finally:
        for future in started:
            future.cancel()


def _nothing() -> None:
    """A task that any worker has done as soon as it is there."""


@contextlib.contextmanager
def _no_signals_to_new_processes() -> Iterator[None]:
    """A process that is started here never sees the signals that a terminal sends to all: one that came before the worker can ignore it
    would break the pool. (A blocked signal stays blocked in what is started; here it only waits.)"""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINAL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
