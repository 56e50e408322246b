"""A Dask cluster as the workers of a campaign: its own scheduler and workers, which know nothing of statedrift until a campaign comes.

Rules
- Every task is sent to one worker, and runs only in the process that it was sent to: whether it runs again after that process is lost is
  decided here, and it does so once. A task that is lost twice ends the campaign with a reason.
- A worker process opens one bench for a campaign and keeps it as a Dask result: it is closed as soon as nobody asks for it any more, be it
  that the campaign came to its end or that its process was killed.
- A worker process does one task at a time, however many threads it has: benches share what their process has loaded.
- A worker that has no statedrift, or another version of it or of the target, is an error at the start; one that comes later is left out.
- What goes over the wire is MessagePack, and names of functions: the scheduler needs no statedrift (Dask lets it unpack what is sent).
Source: distributed's documentation (Client.submit with `workers`, worker's and task's states).
"""

import contextlib
import logging
import re
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from importlib.metadata import version
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..spec.errors import UnavailableError, UsageError
from .shards import Opening, opened
from .trial import Bench
from .workers import Pool, Work, reduction, shard

if TYPE_CHECKING:
    from distributed import Client, Future

CONNECT_SECONDS_MAX = 8.0
LOOK_SECONDS = 1.0
"""So often is looked which workers there are; a lost one is noticed within that, and what Dask itself takes to notice it."""
REPLACEMENT_SECONDS_MAX = 60.0
"""So long a campaign without a worker waits for one: Dask's nanny starts a process that died again."""
LOSSES_MAX = 2
"""A task that was lost so often is not sent again."""
OPENING_LOSSES_MAX = 4
"""So many workers in a row may be lost while they open the target."""

Versions = tuple[str, str | None]

WORK: dict[str, Work] = {work.__name__: work for work in (shard, reduction)}
_ADDRESS = re.compile(r"(tcp|tls|ucx|wss?)://(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+):\d{1,5}")


def check_address(address: str) -> None:
    """Raise UsageError for what is no address of a scheduler."""
    if not _ADDRESS.fullmatch(address):
        raise UsageError(f"--scheduler {address}: give the address that `dask scheduler` prints, such as tcp://127.0.0.1:8786")


@contextlib.contextmanager
def connected(address: str) -> Iterator["Client"]:
    """A connection to a scheduler. Raises UnavailableError when there is none within CONNECT_SECONDS_MAX, or it has no worker."""
    try:
        from distributed import Client
    except ImportError:
        raise UnavailableError("--scheduler needs Dask, which is not installed: pip install 'statedrift[dask]'") from None
    with _quiet():
        try:
            client = Client(address, timeout=CONNECT_SECONDS_MAX, set_as_default=False)
        except (OSError, TimeoutError, ValueError, RuntimeError) as error:
            reason = "" if isinstance(error, OSError) else f" ({error})"
            raise UnavailableError(
                f"the scheduler at {address} does not answer within {CONNECT_SECONDS_MAX:g} s{reason}; "
                "is it running, and reached from here? dask scheduler"
            ) from None
        try:
            if not client.nthreads():
                raise UnavailableError(f"the scheduler at {address} has no workers; start one: dask worker {address} --nthreads 1")
            yield client
        finally:
            client.close(timeout=5)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What Dask says of lost connections is said by us, in one line."""
    loggers = [logging.getLogger(name) for name in ("distributed", "distributed.client", "distributed.core", "distributed.comm")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


# --- in a worker process ---------------------------------------------------------------------------------------------------

_PROCESS = uuid.uuid4().hex
"""This process, which no other one is, also not one that has its address after it."""
_one_at_a_time = threading.Lock()


class Held:
    """The bench of a worker process, opened when it is first needed; it crosses to another process as what it was opened with."""

    def __init__(self, opening: bytes) -> None:
        self._opening = opening
        self._bench: Bench | None = None

    def __reduce__(self) -> tuple[type["Held"], tuple[bytes]]:
        return Held, (self._opening,)

    def __sizeof__(self) -> int:
        return 1000  # for Dask, which would measure all that hangs on it

    @contextlib.contextmanager
    def bench(self) -> Iterator[Bench]:
        """The bench, for one thread. Raises UsageError and UnavailableError as `open_bench` does."""
        with _one_at_a_time:
            if self._bench is None:
                self._bench = self._open()
            yield self._bench

    def _open(self) -> Bench:
        kept = contextlib.ExitStack()
        bench = kept.enter_context(opened(msgspec.msgpack.decode(self._opening, type=Opening)))
        weakref.finalize(self, kept.close)  # at the end of the process, too
        return bench


class Opened(msgspec.Struct, frozen=True):
    """What a worker says when it has opened its bench, or why it could not."""

    process: str
    versions: Versions = ("", None)
    why_not: str = ""


def _open(opening: bytes) -> Held:
    return Held(opening)


def _describe(held: Held) -> bytes:
    try:
        with held.bench() as bench:
            opened = Opened(_PROCESS, (bench.version, bench.against_version))
    except (UsageError, UnavailableError) as error:
        opened = Opened(_PROCESS, why_not=str(error))
    return msgspec.msgpack.encode(opened)


class _NotWanted(Exception):  # noqa: N818  it is caught here
    """Nobody waits for what is being done any more."""


class _WhileWanted:
    """A bench that tries nothing more once its task was given up: a thread cannot be ended from outside."""

    def __init__(self, bench: Bench, is_wanted: Callable[[], bool]) -> None:
        self._bench = bench
        self._is_wanted = is_wanted

    def __getattr__(self, name: str) -> Any:
        if not self._is_wanted():
            raise _NotWanted
        return getattr(self._bench, name)


def wanted_here() -> Callable[[], bool]:
    """Whether the task that runs in this thread is still asked for."""
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()

    def is_wanted() -> bool:
        state = worker.state.tasks.get(key)
        return state is not None and state.state != "cancelled"

    return is_wanted


def _run(held: Held, process: str, work: str, task: bytes) -> bytes | None:
    """Do a task, given by the name of what to do; None in another process than it was sent to, and when nobody waits for it."""
    if process != _PROCESS:
        return None
    try:
        with held.bench() as bench:
            return WORK[work](cast(Bench, _WhileWanted(bench, wanted_here())), task)
    except _NotWanted:
        return None


def _by_name() -> Callable[..., Any]:
    """A function that calls one of this file; since it has no name that can be imported, whoever unpacks it imports nothing."""
    module = __name__

    def call(name: str, *arguments: Any) -> Any:
        from importlib import import_module

        return getattr(import_module(module), name)(*arguments)

    return call


# --- in the campaign's process ---------------------------------------------------------------------------------------------


class _Worker:
    """A worker process that has opened a bench, or is about to."""

    def __init__(self, address: str, held: "Future", described: "Future") -> None:
        self.address = address
        self.held = held
        self.described = described
        self.process: str | None = None
        self.sent: list[Sent] = []

    def under_way(self) -> list["Sent"]:
        """What it has not done yet, as far as is known, in the order in which it does it."""
        for sent in self.sent:
            sent.is_done = sent.is_done or (sent.future is not None and sent.future.done())
        return [sent for sent in self.sent if not sent.is_done]


class Sent:
    """A task that was sent to a worker; to another one when that is lost. lost_with: the workers that were lost while they were at it."""

    def __init__(self, cluster: "Cluster", work: Work, task: bytes) -> None:
        self.work = work
        self.task = task
        self.lost_with: list[str] = []
        self.worker: _Worker | None = None
        self.future: Future | None = None
        self.is_done = False
        self._cluster = cluster

    def result(self) -> bytes:
        """Wait for the task's result. Raises UnavailableError when it was lost twice, when no worker is left, or the scheduler is."""
        return self._cluster.result_of(self)

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._cluster.forget(self)


class Cluster:
    """The workers of a scheduler that can take part. Raises UnavailableError when one of those that are there cannot."""

    def __init__(self, client: "Client", address: str, opening: Opening, versions: Versions) -> None:
        self._client = client
        self._address = address
        self._opening = msgspec.msgpack.encode(opening)
        self._versions = versions
        self._workers: dict[str, _Worker] = {}
        self._left_out: dict[str, str] = {}
        self._waiting: list[Sent] = []
        self._opening_losses = 0
        self._looked = -LOOK_SECONDS
        self._had_worker = monotonic()
        with self._scheduler_said():
            self._look()
            while [worker for worker in self._workers.values() if worker.process is None] and not self._left_out:
                self._wait_for_a_worker()
                self._look()
        for address_of_worker, why in self._left_out.items():
            raise UnavailableError(f"worker {address_of_worker} of the cluster cannot take part: {why}")

    @property
    def count(self) -> int:
        """How many worker processes take part now; at least 1, so that a task may wait for a worker that is lost to be replaced."""
        return max(1, sum(worker.process is not None for worker in self._workers.values()))

    def submit(self, work: Work, task: bytes) -> Sent:
        """Send a task to the worker that has the fewest."""
        sent = Sent(self, work, task)
        with self._scheduler_said():
            self._send(sent)
        return sent

    def _send(self, sent: Sent) -> None:
        ready = [worker for worker in self._workers.values() if worker.process is not None]
        if not ready:
            self._waiting.append(sent)
            return
        worker = min(ready, key=lambda worker: len(worker.under_way()))
        key = f"statedrift-{sent.work.__name__}-{uuid.uuid4().hex}"
        arguments = (worker.held, worker.process, sent.work.__name__, sent.task)
        sent.future = self._client.submit(_by_name(), _run.__name__, *arguments, key=key, workers=[worker.address], pure=False)
        sent.worker = worker
        worker.sent.append(sent)

    def forget(self, sent: Sent) -> None:
        """Give up a task, wherever it is."""
        if sent in self._waiting:
            self._waiting.remove(sent)
        if sent.worker is not None and sent in sent.worker.sent:
            sent.worker.sent.remove(sent)
        sent.future = None  # Dask forgets what nobody refers to, and a worker that is at it stops at its next trial

    def result_of(self, sent: Sent) -> bytes:
        """The result of a task, which is then forgotten."""
        with self._scheduler_said():
            while (answer := self._answer(sent)) is None:
                if len(sent.lost_with) >= LOSSES_MAX:
                    raise UnavailableError(
                        f"a task was lost twice: the worker processes at {' and '.join(sent.lost_with)} ended while they had it, perhaps for memory"
                    )
                self._look()
        self.forget(sent)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _answer(self, sent: Sent) -> bytes | BaseException | None:
        """What the task came to, or raised, if it comes within LOOK_SECONDS; None also when its process was lost, which is then known."""
        from distributed import KilledWorker

        if sent.future is None or sent.worker is None:
            self._wait_for_a_worker()
            return None
        worker, future = sent.worker, sent.future
        try:
            answer: bytes | BaseException | None = future.exception(timeout=LOOK_SECONDS) or future.result()
        except TimeoutError:
            return None
        if answer is None or isinstance(answer, KilledWorker):
            self._lose(worker)
            return None
        return answer

    def _wait_for_a_worker(self) -> None:
        """Until one has opened its bench, or a moment."""
        openings = [worker.described for worker in self._workers.values() if worker.process is None]
        if openings:
            with contextlib.suppress(TimeoutError):
                openings[0].exception(timeout=LOOK_SECONDS / 2)
        elif not self._workers:
            sleep(LOOK_SECONDS / 4)

    # --- who is there ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Take note of workers that came, went, or are ready; send again what was lost."""
        now = monotonic()
        for worker in [worker for worker in self._workers.values() if worker.process is None and worker.described.done()]:
            self._take_part(worker)
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            there = set(self._client.nthreads())
            for worker in [worker for address, worker in self._workers.items() if address not in there]:
                self._lose(worker)
            for address in sorted(there - self._workers.keys() - self._left_out.keys()):
                self._open(address)
        if self._workers:  # ready, or still opening the target, which may take its time
            self._had_worker = now
        if any(worker.process is not None for worker in self._workers.values()):
            waiting, self._waiting = self._waiting, []
            for sent in waiting:
                self._send(sent)
        elif now - self._had_worker > REPLACEMENT_SECONDS_MAX or self._opening_losses > OPENING_LOSSES_MAX:
            reasons = "".join(f"; {address}: {why}" for address, why in self._left_out.items())
            raise UnavailableError(
                f"no worker is left of the cluster at {self._address}{reasons or '; they ended by themselves or were killed, perhaps for memory'}"
            )

    def _open(self, address: str) -> None:
        """Let a worker open its bench, if it has the statedrift that this process has."""
        own = version("statedrift")
        (there,) = self._client.run(version, "statedrift", workers=[address], on_error="return").values()
        if isinstance(there, OSError):
            return  # it is lost already
        if isinstance(there, ModuleNotFoundError):
            self._left_out[address] = f"it has no statedrift; install statedrift {own} where it runs"
        elif there != own:
            self._left_out[address] = f"it has statedrift {there}, and this process {own}; install the same version"
        else:
            keys = [f"statedrift-{what}-{uuid.uuid4().hex}" for what in ("bench", "opened")]
            held = self._client.submit(_by_name(), _open.__name__, self._opening, key=keys[0], workers=[address], pure=False)
            described = self._client.submit(_by_name(), _describe.__name__, held, key=keys[1], workers=[address], pure=False)
            self._workers[address] = _Worker(address, held, described)

    def _take_part(self, worker: _Worker) -> None:
        """A worker has opened its bench, or could not."""
        from distributed import KilledWorker

        why = ""
        try:
            opened = msgspec.msgpack.decode(worker.described.result(), type=Opened)
        except KilledWorker:
            return self._lose(worker)
        except (ImportError, AttributeError, TypeError, ValueError) as error:  # another Python or package than ours
            why = f"{type(error).__name__}: {error}"
        else:
            why = opened.why_not
            if not why and opened.versions != self._versions:
                theirs, ours = (" against ".join(filter(None, versions)) for versions in (opened.versions, self._versions))
                why = f"its target is {theirs}, and that of this process {ours}"
        if why:
            del self._workers[worker.address]
            self._left_out[worker.address] = why
            return None
        self._opening_losses = 0
        worker.process = opened.process
        return None

    def _lose(self, worker: _Worker) -> None:
        """The worker's process is gone: what it had is sent to another one, once."""
        if self._workers.get(worker.address) is worker:
            del self._workers[worker.address]
            self._opening_losses += worker.process is None
        for sent in worker.under_way()[:1] or worker.sent:  # the others only waited for their turn
            sent.lost_with.append(worker.address)
        lost, worker.sent = worker.sent, []
        for sent in lost:
            sent.worker = sent.future = None
            sent.is_done = False
            if len(sent.lost_with) < LOSSES_MAX:
                self._send(sent)

    def close(self) -> None:
        """Give up what was sent, and the benches."""
        self._waiting.clear()
        for worker in self._workers.values():
            for sent in worker.sent:
                sent.future = None
        self._workers.clear()

    @contextlib.contextmanager
    def _scheduler_said(self) -> Iterator[None]:
        """What Dask raises when its scheduler is gone, or gave our work up, in words. Raises UnavailableError."""
        from distributed import CancelledError

        try:
            yield
        except (CancelledError, OSError):
            raise UnavailableError(
                f"the scheduler at {self._address} was lost, or gave this campaign's work up; what was found until then stands"
            ) from None


@contextlib.contextmanager
def open_cluster(client: "Client", address: str, opening: Opening, versions: Versions) -> Iterator[Pool]:
    """The workers of the scheduler that `client` is connected to, each with a bench. Raises UnavailableError when one of them has none.

    versions  of the target and of the one it is run against, in this process; a worker must have the same
    """
    with contextlib.closing(Cluster(client, address, opening, versions)) as cluster, contextlib.closing(Pool(cluster)) as pool:
        yield pool
