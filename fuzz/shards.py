"""Shards: a campaign's work in fixed pieces, each a pure function of the campaign's seed and the shard's number.

Rules
- The same seed and number give the same programs in any process; no two shards of a campaign share a seed.
- All programs of a shard are of one model, so that they are judged together.
- A worker process keeps one bench for all its shards, leaves interrupts to the campaign's process, and ends with it.
"""

import atexit
import contextlib
import gc
import hashlib
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing import parent_process
from threading import Thread
from time import perf_counter

import msgspec

from ..oracle.recompute import use_one_thread
from ..spec.errors import UnavailableError, UsageError
from ..spec.models import Model
from ..spec.operations import operation_name
from ..spec.programs import Program, program_text
from ..store.campaigns import Noise
from .generation import generate, model_for
from .pair import open_bench
from .trial import Bench, Trial, without_rows

SHARD_PROGRAMS = 64


class Divergent(msgspec.Struct, frozen=True):
    """A program of a shard that diverged."""

    number: int
    trial: Trial


class ShardResult(msgspec.Struct, frozen=True):
    """What came of a shard.

    outcomes  operation name -> outcome word -> count
    verdicts  verdict kind -> programs
    not_judged  programs that were neither right nor wrong: why, and their text on one line
    seconds_* of wall time
    inspected  states that were compared
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


def number_of(*parts: object) -> int:
    """A number that is a pure function of its parts; 0 to 2^64 - 1."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def shard_model(seed: int, shard: int, families: Sequence[str]) -> Model:
    """The model of a shard: families take turns."""
    return model_for(number_of(seed, shard, "model"), families[shard % len(families)])


def shard_programs(seed: int, shard: int, families: Sequence[str], count: int = SHARD_PROGRAMS) -> list[Program]:
    """The first `count` programs of a shard."""
    model = shard_model(seed, shard, families)
    return [generate(number_of(seed, shard, number), model) for number in range(count)]


def run_shard(bench: Bench, seed: int, shard: int, families: Sequence[str], count: int = SHARD_PROGRAMS) -> ShardResult:
    """Generate, run and judge a shard's programs."""
    started = perf_counter()
    programs = shard_programs(seed, shard, families, count)
    generated = perf_counter()
    running, judging = bench.spent.running, bench.spent.judging
    trials = bench.try_programs(programs)
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for trial in trials:
        for operation, step in zip(trial.program.operations, trial.run.steps if trial.run else (), strict=False):
            outcomes[operation_name(operation)][step.outcome.word] += 1
    return ShardResult(
        shard,
        len(programs),
        sum(sum(counts.values()) for counts in outcomes.values()),
        {name: dict(counts) for name, counts in outcomes.items()},
        dict(Counter(trial.verdict.kind for trial in trials)),
        tuple(Divergent(number, _light(trial)) for number, trial in enumerate(trials) if trial.verdict.is_divergence),
        tuple(
            (f"{trial.verdict.kind}: {trial.verdict.reason}", "; ".join(program_text(trial.program).splitlines()))
            for trial in trials
            if trial.verdict.kind in ("harness-error", "unknown")
        ),
        generated - started,
        bench.spent.running - running,
        bench.spent.judging - judging,
        sum(len(trial.run.inspections) for trial in trials if trial.run),
    )


def _light(trial: Trial) -> Trial:
    """A trial without its output rows, which nobody needs again."""
    runs = [run and without_rows(run) for run in (trial.run, trial.other)]
    return msgspec.structs.replace(trial, run=runs[0], other=runs[1], truths=())


@contextlib.contextmanager
def settled_heap() -> Iterator[None]:
    """Keep what is loaded now out of garbage collections: with PyTorch imported a full one takes a tenth of a second, and finds nothing."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# --- in a worker process ---------------------------------------------------------------------------------------------------

_bench: list[Bench] = []
_why_none: list[str] = []


def _end_with_parent() -> None:
    """A worker that waits for work does not notice that nobody is left to give it any."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def start_worker(target_name: str, against_name: str | None, inspect: bool, oracle: str, noise: bytes) -> None:
    """Open the worker's bench; `noise` is the JSON of what the campaign's process measured.

    Raises nothing for a target that cannot be used: the pool would only say that it is broken. The first shard says why.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()
    use_one_thread()
    try:
        bench = open_bench(target_name, against_name, inspect, oracle)
    except (UsageError, UnavailableError) as error:
        _why_none.append(str(error))
        return
    atexit.register(bench.close)
    bench.set_noise(dict(msgspec.json.decode(noise, type=list[tuple[Model, Noise]])))
    _bench.append(bench)
    gc.freeze()


def run_shard_in_worker(seed: int, shard: int, families: tuple[str, ...], count: int) -> bytes:
    """A shard's result as MessagePack. Raises UnavailableError when the worker has no bench."""
    if _why_none:
        raise UnavailableError(f"a worker process cannot use the target: {_why_none[0]}")
    return msgspec.msgpack.encode(run_shard(_bench[0], seed, shard, families, count))
