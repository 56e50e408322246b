"""Shards: a campaign's work in fixed pieces, each a pure function of the campaign's seed, the shard's number and what was known before.

Rules
- The same seed and number give the same programs in any process; no two shards of a campaign share a seed.
- All programs of a shard are of one model, so that they are judged together.
- A worker process keeps one bench for all its shards, and ends with the campaign's process, which alone sees interrupts.
"""

import atexit
import contextlib
import ctypes
import gc
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing import parent_process
from threading import Thread
from time import perf_counter

import msgspec

from ..oracle.recompute import use_one_thread
from ..spec.errors import UnavailableError, UsageError
from ..spec.models import Model
from ..spec.programs import Program, program_line
from ..store.campaigns import Context, Noise
from ..store.records import Summary
from .corpus import Example, count_with_examples
from .generation import generate, model_for
from .pair import open_bench
from .profiles import PROFILES, SWARM
from .reach import NOTHING_REACHED, ReachCounter, Reached
from .summaries import summary_of
from .trial import Bench, Trial, without_rows
from .two_builds import also_in_old

SHARD_PROGRAMS = PROFILES[SWARM].shard_programs
YOUNG_OBJECTS_MAX = 20_000
"""So many new containers are a few MiB; what a shard makes is several times as many."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_KEPT_BYTES = 256 << 20, 32 << 20
"""Of glibc's malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD; the second takes at most 32 MiB."""


class ShardTask(msgspec.Struct, frozen=True):
    """Which shard: of which seed, with which number, how many of its programs, what they are steered away from, of which profile, and from
    which of its programs on."""

    seed: int
    shard: int
    families: tuple[str, ...]
    count: int = SHARD_PROGRAMS
    known: tuple[Context, ...] = ()
    profile: str = SWARM
    first: int = 0


class Divergent(msgspec.Struct, frozen=True):
    """A program of a shard that diverged; its number among those that were run."""

    number: int
    trial: Trial


class ShardResult(msgspec.Struct, frozen=True):
    """What came of a shard.

    outcomes  operation name -> outcome word -> count
    verdicts  verdict kind -> programs
    not_judged  programs that were neither right nor wrong: why, and their text on one line
    seconds_* of wall time
    inspected  states that were compared
    also_in_old  coarse signature -> programs that diverge in the same way on the other build, where there is one
    reached  what the programs reached
    examples  the smallest right programs for the cells that they reached
    summary  what is kept of every program; None: nothing
    """

    shard: int
    programs: int
    operations: int
    outcomes: dict[str, dict[str, int]]
    verdicts: dict[str, int]
    divergent: tuple[Divergent, ...]
    not_judged: tuple[tuple[str, str], ...]
    seconds_generating: float
    seconds_running: float
    seconds_judging: float
    inspected: int = 0
    also_in_old: dict[str, int] = {}
    reached: Reached = NOTHING_REACHED
    examples: tuple[Example, ...] = ()
    summary: Summary | None = None


def number_of(*parts: object) -> int:
    """A number that is a pure function of its parts; 0 to 2^64 - 1."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def shard_model(seed: int, shard: int, families: Sequence[str]) -> Model:
    """The model of a shard: families take turns."""
    return model_for(number_of(seed, shard, "model"), families[shard % len(families)])


def shard_programs(
    seed: int,
    shard: int,
    families: Sequence[str],
    count: int = SHARD_PROGRAMS,
    known: Sequence[Context] = (),
    profile: str = SWARM,
    first: int = 0,
) -> list[Program]:
    """`count` programs of a shard from number `first` on; `known`: what they are steered away from, where it is of their family and the
    profile is `swarm`. Raises UsageError for an unknown profile."""
    model = shard_model(seed, shard, families)
    avoided = [context.operations for context in known if context.family == model.family]
    return [generate(number_of(seed, shard, number), model, profile, avoided) for number in range(first, first + count)]


def run_shard(bench: Bench, task: ShardTask) -> ShardResult:
    """Generate, run and judge a shard's programs."""
    started = perf_counter()
    programs = shard_programs(task.seed, task.shard, task.families, task.count, task.known, task.profile, task.first)
    generated = perf_counter()
    running, judging = bench.spent.running, bench.spent.judging
    trials = bench.try_programs(programs)
    counter = ReachCounter(bench.target.poison)
    examples = count_with_examples(counter, trials)
    outcomes = counter.outcomes
    return ShardResult(
        task.shard,
        len(programs),
        sum(sum(counts.values()) for counts in outcomes.values()),
        outcomes,
        dict(Counter(trial.verdict.kind for trial in trials)),
        tuple(Divergent(number, light(trial)) for number, trial in enumerate(trials) if trial.verdict.is_divergence),
        tuple(
            (f"{trial.verdict.kind}: {trial.verdict.reason}", program_line(trial.program))
            for trial in trials
            if not trial.verdict.is_judged
        ),
        generated - started,
        bench.spent.running - running,
        bench.spent.judging - judging,
        sum(len(trial.run.inspections) for trial in trials if trial.run),
        also_in_old(bench.label, trials),
        counter.reached(),
        examples,
        summary_of(trials, outcomes),
    )


def light(trial: Trial) -> Trial:
    """A trial without its output rows, which nobody needs again."""
    runs = [run and without_rows(run) for run in (trial.run, trial.other)]
    return msgspec.structs.replace(trial, run=runs[0], other=runs[1], truths=(), tolerances=(), closeness=None)


@contextlib.contextmanager
def settled_heap() -> Iterator[None]:
    """Keep what is loaded now out of garbage collections: with PyTorch imported a full one takes a tenth of a second, and finds nothing.
    The others come seldom, since what a shard keeps until its end would be looked at over and over."""
    _keep_freed_memory()
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _keep_freed_memory() -> None:
    """Where the environment tells glibc to give freed memory back at once, keep it for the next program all the same.

    Dask starts its workers so (MALLOC_TRIM_THRESHOLD_=65536): every program then took 150 pages anew, which cost a fifth of its time.
    """
    if "MALLOC_TRIM_THRESHOLD_" in os.environ:
        with contextlib.suppress(OSError, AttributeError):  # another C library
            set_option = ctypes.CDLL(None).mallopt
            set_option(_TRIM_THRESHOLD, _KEPT_BYTES)
            set_option(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)


class Opening(msgspec.Struct, frozen=True):
    """What a worker opens: the arguments of `open_bench`, and the JSON of the noise that the campaign's process measured."""

    target: str
    against: str | None
    inspect: bool
    oracle: str
    noise: bytes
    against_library: str | None = None


@contextlib.contextmanager
def opened(opening: Opening) -> Iterator[Bench]:
    """A worker's bench. Raises UsageError and UnavailableError as `open_bench` does."""
    use_one_thread()
    bench = open_bench(opening.target, opening.against, opening.inspect, opening.oracle, opening.against_library)
    with contextlib.closing(bench), settled_heap():
        bench.set_noise(dict(msgspec.json.decode(opening.noise, type=list[tuple[Model, Noise]])))
        yield bench


# --- in a worker process ---------------------------------------------------------------------------------------------------

_bench: list[Bench] = []
_why_none: list[str] = []


def _end_with_parent() -> None:
    """A worker that waits for work does not notice that nobody is left to give it any."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def start_worker(opening: Opening) -> None:
    """Open the worker's bench.

    Raises nothing for a target that cannot be used: the pool would only say that it is broken. The first shard says why.
    """
    Thread(target=_end_with_parent, daemon=True).start()
    kept = contextlib.ExitStack()
    try:
        _bench.append(kept.enter_context(opened(opening)))
    except (UsageError, UnavailableError) as error:
        _why_none.append(str(error))
    atexit.register(kept.close)


def worker_bench() -> Bench:
    """The bench of this worker process. Raises UnavailableError when it has none."""
    if _why_none:
        raise UnavailableError(f"a worker process cannot use the target: {_why_none[0]}")
    return _bench[0]
