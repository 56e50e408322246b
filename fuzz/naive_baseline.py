"""The naive way, for comparison: a Hypothesis state machine that recomputes the log after every decode.

Rules
- It is what one would write first, done honestly: the same target, models, weights, tolerance and recompute as a campaign, one session an
  example, one recompute a sequence of a decode, an assertion after each; only operations that must be accepted.
- Its operations are as much work as a campaign's: as large a share are decodes, of as many sequences and tokens. `Mix` says how nearly.
- Hypothesis at its quickest: health checks, deadlines and its database are off, a fixed number of examples, nothing is shrunk.
- Hypothesis is imported only when it is run.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..oracle.recompute import Request, recompute_of, use_one_thread
from ..spec.configuration import CacheConfiguration
from ..spec.families import dimensions_of
from ..spec.models import Model
from ..spec.operations import OPEN, Decode
from ..spec.target import Target
from .execution import lay_out
from .judgement import row_errors
from .shards import settled_heap, shard_programs
from .throughput import one_core
from .trial import Bench

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

TARGET_NAME = "numba"
STEPS = 20
"""Most steps of an example; the average is about 15."""
EXAMPLES = 200
SEARCH_EXAMPLES = 1_000_000
WALL_FACTOR_MAX = 12.0
"""A search ends after so many times its limit by the clock, however little of that the core worked for it: far above what a crowded core takes,
so that the limit is one of CPU time, and a target that only waits is given up all the same."""
WARM_UP_EXAMPLES = 10
MIX_SHARDS = 10
_SLOTS = ("a", "b")


class Mix(msgspec.Struct):
    """What programs are made of: how many there are, their operations, decodes, and the decodes' items (sequences) and tokens."""

    programs: int = 0
    operations: int = 0
    decodes: int = 0
    items: int = 0
    tokens: int = 0

    @property
    def operations_per_program(self) -> float:
        return self.operations / self.programs

    @property
    def decode_share(self) -> float:
        return self.decodes / self.operations

    @property
    def items_per_decode(self) -> float:
        return self.items / self.decodes

    @property
    def tokens_per_decode(self) -> float:
        return self.tokens / self.decodes


class NaiveThroughput(msgspec.Struct, frozen=True):
    """What was measured; a program is one example of the state machine, an operation one step of it."""

    family: str
    mix: Mix
    seconds: float
    core_seconds: float

    @property
    def programs(self) -> int:
        return self.mix.programs

    @property
    def operations(self) -> int:
        return self.mix.operations

    @property
    def programs_per_core_second(self) -> float:
        return self.programs / self.core_seconds

    @property
    def operations_per_core_second(self) -> float:
        return self.operations / self.core_seconds


def campaign_mix(families: Sequence[str], seed: int, shards: int = MIX_SHARDS) -> Mix:
    """What a campaign's programs are made of, whether or not a target gets to their end."""
    mix = Mix()
    for shard in range(shards):
        for program in shard_programs(seed, shard, families):
            mix.programs += 1
            mix.operations += len(program.operations)
            for operation in program.operations:
                if isinstance(operation, Decode):
                    mix.decodes += 1
                    mix.items += len(operation.items)
                    mix.tokens += sum(item.token_count for item in operation.items)
    return mix


def measure_naive(family: str, examples: int = EXAMPLES) -> NaiveThroughput:
    """Run the state machine on one core. Raises UnavailableError when numba cannot be used, AssertionError should it be wrong."""
    use_one_thread()
    model = Model(family)
    with one_core(), Bench(TARGET_NAME) as bench:
        tolerance = bench.tolerance(model)
        _run_machine(bench.target, model, tolerance, WARM_UP_EXAMPLES)
        with settled_heap():
            started, cpu_before = perf_counter(), process_time()
            mix = _run_machine(bench.target, model, tolerance, examples)
            seconds, core_seconds = perf_counter() - started, process_time() - cpu_before
    return NaiveThroughput(family, mix, seconds, core_seconds)


def _run_machine(target: Target, model: Model, tolerance: float, examples: int) -> Mix:
    from hypothesis.stateful import run_state_machine_as_test

    mix = Mix()
    run_state_machine_as_test(state_machine(target, model, tolerance, mix), settings=quick_settings(examples))
    return mix


def quick_settings(examples: int, derandomize: bool = True) -> Any:
    """Hypothesis at its quickest: `hypothesis.settings`."""
    from hypothesis import HealthCheck, Phase, settings

    return settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        derandomize=derandomize,
        report_multiple_bugs=False,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


class SearchLimit:
    """The time of a search, which begins now: CPU seconds of this process, and whether `limit_seconds` of them, or so many times that by the
    clock, are over."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._started, self._clock_started = process_time(), perf_counter()

    @property
    def seconds(self) -> float:
        """CPU seconds until now."""
        return process_time() - self._started

    @property
    def is_over(self) -> bool:
        """Whether the search has to end."""
        return self.seconds >= self._limit_seconds or perf_counter() - self._clock_started >= WALL_FACTOR_MAX * self._limit_seconds


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """What Hypothesis keeps of its own (the constants of the code under test) goes to a folder that is removed afterwards."""
    from hypothesis.configuration import set_hypothesis_home_dir

    with TemporaryDirectory() as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(None)


class _TimeIsOver(BaseException):
    """Hypothesis does not take it for a failure of the test."""


def search_naively(target: Target, model: Model, tolerance: float, seed: int, limit_seconds: float) -> tuple[bool, float, int]:
    """Run the state machine on a target until it fails; whether it did, CPU seconds, and examples until then.

    The end is looked for between examples, also by the clock (`WALL_FACTOR_MAX`).
    """
    use_one_thread()
    with nothing_left_behind():
        with contextlib.suppress(Exception):  # it may find something already, which does not count
            _run_machine(target, model, tolerance, 1)  # what happens once in a process is not in the time
        return _search(target, model, tolerance, seed, limit_seconds)


def _search(target: Target, model: Model, tolerance: float, seed: int, limit_seconds: float) -> tuple[bool, float, int]:
    import hypothesis
    from hypothesis.stateful import run_state_machine_as_test

    mix = Mix()
    limit = SearchLimit(limit_seconds)
    is_over = False

    def check_time() -> None:
        nonlocal is_over
        if limit.is_over:
            is_over = True
            raise _TimeIsOver

    machine = hypothesis.seed(seed)(state_machine(target, model, tolerance, mix, check_time))
    is_found = False
    try:
        run_state_machine_as_test(machine, settings=quick_settings(SEARCH_EXAMPLES, derandomize=False))
    except _TimeIsOver:
        pass
    except Exception:  # an assertion of the machine, or whatever else the target raised; or Hypothesis on an example that was broken off
        is_found = not is_over
    return is_found, limit.seconds, mix.programs


def state_machine(
    target: Target, model: Model, tolerance: float, mix: Mix, before_example: Callable[[], None] = lambda: None
) -> type["RuleBasedStateMachine"]:
    """The state machine for a target; it counts in `mix` what it does."""
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

    from ..oracle.contract import Piece

    cache = CacheConfiguration()
    sequences = st.integers(0, cache.n_seq_max - 1)
    n_vocab = dimensions_of(model)["n_vocab"]

    def tokens(fewest: int, most: int) -> st.SearchStrategy[list[int]]:
        return st.lists(st.integers(0, n_vocab - 1), min_size=fewest, max_size=most)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            before_example()
            super().__init__()
            self.session = target.open(model, cache)
            self.logs: list[tuple[int, ...]] = [()] * cache.n_seq_max
            self.kept = [0] * cache.n_seq_max  # tokens that a rollback must take back
            self.slots: dict[str, tuple[tuple[int, ...], bytes]] = {}

        def teardown(self) -> None:
            mix.programs += 1
            self.session.close()

        def done(self) -> None:
            mix.operations += 1
            for log, (_, last) in zip(self.logs, self.session.positions(), strict=True):
                assert last == len(log) - 1

        def decode(self, *items: tuple[int, list[int]]) -> None:
            pieces = tuple(Piece((sequence,), tuple(new), len(self.logs[sequence]), len(self.logs[sequence])) for sequence, new in items)
            layout = lay_out(pieces, False, "all")
            decoded = self.session.decode(layout.batch)
            assert decoded.outcome.word == "accepted"
            assert decoded.rows is not None
            for piece, places in zip(pieces, layout.places, strict=True):
                (sequence,), new = piece.sequences, piece.tokens
                log = self.logs[sequence] = self.logs[sequence] + new
                self.kept[sequence] = min(cache.n_rs_seq, len(new) - 1)
                (truth,) = recompute_of(model).rows([Request(log, range(piece.first_index, len(log)))])
                assert np.all(row_errors(decoded.rows[places], truth) <= tolerance)
                mix.items += 1
                mix.tokens += len(new)
            mix.decodes += 1
            self.done()

        @rule(sequence=sequences, new=tokens(8, 16))
        def prompt(self, sequence: int, new: list[int]) -> None:
            self.decode((sequence, new))

        @rule(sequence=sequences, new=tokens(5, 11))
        def turn(self, sequence: int, new: list[int]) -> None:
            self.decode((sequence, new))

        @rule(sequence=sequences, new=tokens(3, 7))
        def draft(self, sequence: int, new: list[int]) -> None:
            self.decode((sequence, new))

        @rule(sequence=sequences, new=tokens(1, 1))
        def one_token(self, sequence: int, new: list[int]) -> None:
            self.decode((sequence, new))

        @rule(several=st.lists(st.tuples(sequences, tokens(1, 5)), min_size=2, max_size=3, unique_by=lambda item: item[0]))
        def batch(self, several: list[tuple[int, list[int]]]) -> None:
            self.decode(*several)

        @rule(several=st.lists(st.tuples(sequences, tokens(1, 2)), min_size=2, max_size=4, unique_by=lambda item: item[0]))
        def small_batch(self, several: list[tuple[int, list[int]]]) -> None:
            self.decode(*several)

        @precondition(lambda self: any(self.kept))
        @rule(data=st.data())
        def rollback(self, data: st.DataObject) -> None:
            sequence = data.draw(st.sampled_from([sequence for sequence, kept in enumerate(self.kept) if kept]))
            count = data.draw(st.integers(1, self.kept[sequence]))
            left = len(self.logs[sequence]) - count
            assert self.session.remove(sequence, left, OPEN).word == "accepted"
            self.logs[sequence] = self.logs[sequence][:left]
            self.kept[sequence] = 0
            self.done()

        @rule(source=sequences, destination=sequences)
        def share(self, source: int, destination: int) -> None:
            assert self.session.share(source, destination, OPEN, OPEN).word == "accepted"
            self.logs[destination] = self.logs[source]
            self.kept[source] = self.kept[destination] = 0
            self.done()

        @rule(sequence=sequences)
        def drop(self, sequence: int) -> None:
            assert self.session.remove(sequence, 0, OPEN).word == "accepted"
            self.logs[sequence] = ()
            self.kept[sequence] = 0
            self.done()

        @rule(sequence=sequences, slot=st.sampled_from(_SLOTS))
        def save(self, sequence: int, slot: str) -> None:
            outcome, blob = self.session.save(sequence, False, False)
            assert outcome.word == "accepted"
            self.slots[slot] = (self.logs[sequence], blob)
            self.done()

        @precondition(lambda self: bool(self.slots))
        @rule(sequence=sequences, data=st.data())
        def restore(self, sequence: int, data: st.DataObject) -> None:
            log, blob = self.slots[data.draw(st.sampled_from(sorted(self.slots)))]
            assert self.session.restore(sequence, blob, False, False).word == "accepted"
            self.logs[sequence] = log
            self.kept[sequence] = 0
            self.done()

    return Machine
