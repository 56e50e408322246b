"""Reducing a program: where it ends, what it keeps, and what it must not become."""

import sys
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace
from statedrift.fuzz.generation import generate, programs
from statedrift.fuzz.mutants import MUTANTS, MutantTarget
from statedrift.fuzz.reduction import candidates, cost, is_documented, reduce_trial
from statedrift.fuzz.signatures import coarse_signature, fine_signature
from statedrift.fuzz.trial import Bench, Trial
from statedrift.oracle.recompute import use_one_thread
from statedrift.spec.configuration import CACHE_KEYS, CacheConfiguration
from statedrift.spec.errors import UsageError
from statedrift.spec.models import Model
from statedrift.spec.operations import AnyOperation, Clear, Decode, Drop, Item, Keep, Restore, Rollback, Save, operation_name
from statedrift.spec.programs import Program, check_program, parse_program, program_text
from statedrift.spec.verdicts import Verdict, VerdictKind
from statedrift.store.campaigns import Noise

FIXTURES = str(Path(__file__).parent.parent / "fixtures")
sys.path[:0] = [FIXTURES] if FIXTURES not in sys.path else []

use_one_thread()
QUIET = {Model("lfm2", seed): Noise(0.0, 1e-4, 0) for seed in (0, 1)}


def open_bench(target: str) -> Bench:
    bench = Bench(target)
    bench.set_noise(QUIET)
    return bench


def body(program: Program) -> str:
    return "; ".join(program_text(program).strip().split("\n"))


def reduced(target: str, text: str, known: frozenset[str] = frozenset()) -> str:
    with open_bench(target) as bench:
        return body(reduce_trial(bench.try_program(parse_program(text)), bench, known).program)


LONG = """
model lfm2 seed=1
cache n_seq_max=6 n_rs_seq=5 n_ubatch=16 start=dirty unified=1
decode 3:7/5 1:4 2:[5,9,9,2]
save 1 spare
decode 3:5 1:1/2
share 1 4
rollback 3 2
decode 1:2/1 outputs=last
decode 3:4/3
drop 2
decode 1:1 2:1 3:1 4:1
"""

MINIMAL = [
    ("statedrift.fuzz.canary:FREQUENT", LONG, "model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1"),
    ("faulty:ROLLBACK", LONG, "model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1"),
    (
        "faulty:ROLLBACK",
        "model lfm2 seed=0; decode 2:9; decode 2:5 0:5; remove 2 11 -1; decode 2:1",
        "model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1",
    ),
    (
        "faulty:RESTORE_AND_ROLLBACK",
        "model lfm2 seed=0; decode 1:9 0:3; save 1 blob; decode 1:5; restore blob 3; keep 3; decode 3:2/7 0:1",
        "model lfm2 seed=0; save 0 a; restore a 0; decode 0:1",
    ),
    ("faulty:KEEP_AND_ROLLBACK", "model lfm2 seed=0; decode 0:4; drop 3; keep 2; decode 2:1", "model lfm2 seed=0; keep 0"),
    (
        "faulty:CLEAR_DIES",
        "model lfm2 seed=0; cache n_ubatch=8; decode 2:9 1:3; clear; decode 0:5; save 0 a; clear; decode 0:1",
        "model lfm2 seed=0; decode 0:1; clear",
    ),
]


@pytest.mark.parametrize(("target", "text", "smallest"), MINIMAL)
def test_a_program_is_reduced_to_the_smallest_one(target: str, text: str, smallest: str) -> None:
    assert reduced(target, text) == smallest


def test_a_crash_is_found_again_in_the_reduced_program() -> None:
    with open_bench("faulty:CLEAR_DIES") as bench:
        start = bench.try_program(parse_program("model lfm2 seed=0; decode 0:3 1:2; drop 1; clear"))
        trial = reduce_trial(start, bench).trial
    assert trial.verdict.kind == "crash"
    assert "ASSERT(empty)" in trial.verdict.reason
    assert trial.run is not None
    assert [step.outcome.word for step in trial.run.steps] == ["accepted", "crash"]


def test_a_program_of_thousands_of_operations_is_reduced() -> None:
    """A long session that is cleared at its end: what aborts is its last operation, and needs one decode of all before it."""
    soak = generate(0, Model("lfm2"), "soak")
    long = msgspec.structs.replace(soak, operations=(*soak.operations, Clear()))
    with open_bench("faulty:CLEAR_ABORTS") as bench:
        start = bench.try_program(long)
        assert start.verdict.kind == "crash"
        assert start.verdict.operation_index == len(soak.operations) > 2000
        assert body(reduce_trial(start, bench).program) == "model lfm2 seed=0; decode 0:1; clear"


def test_the_signature_stays() -> None:
    with open_bench("faulty:RESTORE_AND_ROLLBACK") as bench:
        start = bench.try_program(parse_program("model lfm2 seed=0; decode 0:4; save 0 a; restore a 1; decode 1:2"))
        reduction = reduce_trial(start, bench)
    assert reduction.trial.signature == start.signature
    assert reduction.signature == fine_signature("faulty:RESTORE_AND_ROLLBACK", reduction.program, reduction.trial.verdict)
    assert not reduction.known
    assert reduction.tried > 0


def test_an_error_does_not_shrink_towards_the_tolerance() -> None:
    """A rollback of one token is wrong, too, but a thousandth as much: that may be something else."""
    large = reduced("faulty:LONG_ROLLBACK", "model lfm2 seed=0; cache n_rs_seq=7; decode 0:9; decode 0:8; rollback 0 6; decode 0:2")
    assert large == "model lfm2 seed=0; decode 0:4; rollback 0 3; decode 0:1"
    small = reduced("faulty:LONG_ROLLBACK", "model lfm2 seed=0; decode 0:9; decode 0:4; rollback 0 2; decode 0:2")
    assert small == "model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1"


AFTER_ROLLBACK = "faulty:RESTORE_AND_ROLLBACK/lfm2 wrong-output at decode (self) after decode+rollback"
AFTER_RESTORE = "faulty:RESTORE_AND_ROLLBACK/lfm2 wrong-output at decode (self) after restore+save"
BOTH = "model lfm2 seed=0; decode 0:9 1:5; save 1 a; decode 0:3; rollback 0 1; restore a 2; decode 0:1 2:1"


def test_it_does_not_slip_to_a_known_signature() -> None:
    with open_bench("faulty:RESTORE_AND_ROLLBACK") as bench:
        start = bench.try_program(parse_program(BOTH))
        first = reduce_trial(start, bench, frozenset({AFTER_ROLLBACK}))
        second = reduce_trial(start, bench, frozenset({AFTER_RESTORE}))
    assert first.signature == AFTER_RESTORE
    assert second.signature == AFTER_ROLLBACK
    assert not first.known
    assert not second.known


@pytest.mark.parametrize(
    "decoration", ["save 0 b", "share 0 3", "drop 3", "keep 0", "cancel 0:2 at=5", "save 0 b; restore b 1", "divide 1 2", "save_all z"]
)
def test_a_known_finding_is_recognised_under_decoration(decoration: str) -> None:
    with open_bench("faulty:ROLLBACK") as bench:
        known = "faulty:ROLLBACK/lfm2 wrong-output at decode (self) after decode+rollback"
        start = bench.try_program(parse_program(f"model lfm2 seed=0; decode 0:5; {decoration}; decode 0:4; rollback 0 2; decode 0:1"))
        reduction = reduce_trial(start, bench, frozenset({known}))
    assert (reduction.signature, reduction.known) == (known, True)


def test_time_that_is_over_ends_the_search_with_what_there_is() -> None:
    with open_bench("faulty:ROLLBACK") as bench:
        start = bench.try_program(parse_program(LONG))
        reduction = reduce_trial(start, bench, seconds_max=0.0)
    assert reduction.trial.signature == start.signature


def test_every_smaller_program_is_told() -> None:
    told: list[Program] = []
    with open_bench("faulty:ROLLBACK") as bench:
        reduction = reduce_trial(bench.try_program(parse_program(LONG)), bench, on_step=lambda trial: told.append(trial.program))
    sizes = [cost(program) for program in told]
    assert sizes == sorted(sizes, reverse=True)
    assert told[-1] == reduction.program


# --- the fixpoint ------------------------------------------------------------------------------------------------------------


def lower(value: int, least: int = 0) -> list[int]:
    return list(range(least, value))


def smaller_items(item: Item) -> Iterator[Item]:
    for count in lower(item.token_count, 1):
        yield replace(item, token_count=count, tokens=item.tokens and item.tokens[:count])
    for salt in lower(item.salt):
        yield replace(item, salt=salt)
    if item.tokens is not None:
        yield Item(item.sequences, item.token_count)
        for place, token in enumerate(item.tokens):
            yield from (replace(item, tokens=(*item.tokens[:place], other, *item.tokens[place + 1 :])) for other in lower(token))
    for sequence in item.sequences if len(item.sequences) > 1 else ():
        yield replace(item, sequences=tuple(other for other in item.sequences if other != sequence))


def single_steps(program: Program) -> Iterator[Program]:
    """Every way to make one thing of a program smaller, written down apart from the reducer."""
    operations = program.operations
    for first, last in combinations(range(len(operations) + 1), 2):
        yield replace(program, operations=operations[:first] + operations[last:])
    for index, operation in enumerate(operations):
        others: list[AnyOperation] = []
        if isinstance(operation, Decode):
            for place, item in enumerate(operation.items):
                before, after = operation.items[:place], operation.items[place + 1 :]
                others += [replace(operation, items=before + after)] if before or after else []
                others += [replace(operation, items=(*before, other, *after)) for other in smaller_items(item)]
        if isinstance(operation, Rollback):
            others += [replace(operation, token_count=count) for count in lower(operation.token_count, 1)]
        if isinstance(operation, Rollback | Drop | Keep | Save | Restore):
            others += [replace(operation, sequence=sequence) for sequence in lower(operation.sequence)]
        yield from (replace(program, operations=(*operations[:index], other, *operations[index + 1 :])) for other in others)
    default = CacheConfiguration()
    for key in CACHE_KEYS:
        value, simplest = getattr(program.cache, key), getattr(default, key)
        between = range(min(value, simplest), max(value, simplest) + 1) if isinstance(value, int) else (simplest,)
        yield from (replace(program, cache=replace(program.cache, **{key: other})) for other in between if other != value)
    yield from (replace(program, model=replace(program.model, seed=seed)) for seed in lower(program.model.seed))
    for name in program.model.dimensions:
        yield replace(program, model=replace(program.model, dimensions=tuple(one for one in program.model.dimensions if one != name)))


def is_valid(program: Program) -> bool:
    try:
        check_program(program)
    except UsageError:
        return False
    return True


FIXPOINTS = [
    ("faulty:ROLLBACK", LONG),
    ("faulty:RESTORE_AND_ROLLBACK", "model lfm2 seed=1; cache n_rs_seq=5; decode 1:9 0:3; save 1 blob; decode 1:[7,5]; restore blob 3; keep 3; decode 3:2/7"),
    ("faulty:LONG_ROLLBACK", "model lfm2 seed=0; cache n_rs_seq=7 n_ubatch=16; decode 0:9; decode 0:8/3; rollback 0 6; decode 0:[3,4]"),
    ("faulty:KEEP_AND_ROLLBACK", "model lfm2 seed=0; decode 0:4; drop 3; keep 2; decode 2:1"),
    ("faulty:CLEAR_ABORTS", "model lfm2 seed=0; cache n_ubatch=8 unified=1; decode 2:9 1:3; clear; decode 0:5; save 0 a; clear; decode 0:1"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "text"), FIXPOINTS)
def test_no_single_step_makes_a_reduced_program_smaller(target: str, text: str) -> None:
    with open_bench(target) as bench:
        reduction = reduce_trial(bench.try_program(parse_program(text)), bench, seconds_max=None)
        steps = [program for program in single_steps(reduction.program) if is_valid(program) and cost(program) < cost(reduction.program)]
        trials = bench.try_programs(steps)
    assert reduction.is_fixpoint
    same = [trial for trial in trials if trial.signature == reduction.trial.signature]
    assert [body(trial.program) for trial in same if trial.verdict.error is None or trial.verdict.error >= reduction.error_floor] == []


def test_a_limit_of_trials_ends_the_search_and_is_said() -> None:
    with open_bench("faulty:ROLLBACK") as bench:
        start = bench.try_program(parse_program(LONG))
        few, again = (reduce_trial(start, bench, seconds_max=None, trials_max=30) for _ in range(2))
    assert not few.is_fixpoint
    assert 30 <= few.tried < 50
    assert (few.program, few.tried) == (again.program, again.tried)


def test_a_hang_is_reduced_and_costs_more_than_an_answer() -> None:
    bench = StubBench("keep", "hang")
    start = bench.try_program(parse_program("model lfm2 seed=0; decode 0:4 1:2; rollback 0 1; share 0 1; keep 1"))
    whole = reduce_trial(start, bench)  # type: ignore[arg-type]
    assert body(whole.program) == "model lfm2 seed=0; keep 0"
    few = reduce_trial(start, bench, seconds_max=None, trials_max=300)  # type: ignore[arg-type]
    assert not few.is_fixpoint
    assert few.tried < whole.tried


def test_the_same_divergence_in_a_simpler_family_is_an_alternative_key() -> None:
    text = "model mamba2 seed=1; decode 0:5; rollback 0 2; decode 0:1"
    with open_bench("faulty:ROLLBACK") as bench:
        bench.set_noise({Model("mamba2", seed): Noise(0.0, 1e-4, 0) for seed in (0, 1)})
        start = bench.try_program(parse_program(text))
        reduction = reduce_trial(start, bench, families=("lfm2", "mamba2", "jamba"))
        alone = reduce_trial(start, bench, families=("mamba2", "lfm2"))
    assert reduction.program.model == Model("mamba2")
    assert reduction.alternatives == ("faulty:ROLLBACK/lfm2 wrong-output at decode (self) after decode+rollback",)
    assert alone.alternatives == ()


# --- uses outside the target's documentation ---------------------------------------------------------------------------------

ONTO = "model lfm2 seed=0; decode 0:4 1:3; share 0 1; decode 1:2"


def test_an_undocumented_use_is_replaced_where_the_divergence_stays() -> None:
    with open_bench("faulty:SHARE_ONTO_ONCE_USED") as bench:
        start = bench.try_program(parse_program(ONTO))
        reduction = reduce_trial(start, bench)
        assert reduction.undocumented_uses == ()
        assert body(reduction.program) == "model lfm2 seed=0; decode 0:1; drop 0; share 1 0; decode 0:1"
        assert is_documented(start, bench)[0]


def test_an_undocumented_use_that_is_needed_is_said() -> None:
    with open_bench("faulty:SHARE_ONTO_USED") as bench:
        start = bench.try_program(parse_program(ONTO))
        reduction = reduce_trial(start, bench)
        assert reduction.undocumented_uses == ("share-onto-nonempty",)
        assert body(reduction.program) == "model lfm2 seed=0; decode 0:1; share 1 0; decode 0:1"
        assert is_documented(start, bench) == (False, ("share-onto-nonempty",))


# --- laws --------------------------------------------------------------------------------------------------------------------


class StubBench:
    """A bench that runs nothing: a program diverges while it has an operation of one name (or always, for the name "")."""

    target_name = label = "stub"
    against_name = None

    def __init__(self, name: str, kind: VerdictKind = "bad-refusal") -> None:
        self.name = name
        self.kind = kind
        self.tried: list[Program] = []

    def try_program(self, program: Program) -> Trial:
        return self.try_programs([program])[0]

    def try_programs(self, programs: Sequence[Program]) -> list[Trial]:
        self.tried += programs
        return [self._trial(program) for program in programs]

    def _trial(self, program: Program) -> Trial:
        indices = [index for index, operation in enumerate(program.operations) if operation_name(operation) == self.name]
        if self.name and not indices:
            return Trial(program, None, Verdict("ok"), None, 0.0)
        verdict = Verdict(self.kind, indices[0] if self.name else None)
        return Trial(program, None, verdict, coarse_signature("stub", program, verdict), 0.0)


class TwofoldBench(StubBench):
    """Where the operation is gone, every rollback goes wrong."""

    def _trial(self, program: Program) -> Trial:
        trial = super()._trial(program)
        indices = [index for index, operation in enumerate(program.operations) if operation_name(operation) == "rollback"]
        if trial.verdict.is_divergence or not indices:
            return trial
        verdict = Verdict("wrong-position", indices[0])
        return Trial(program, None, verdict, coarse_signature("stub", program, verdict), 0.0)


def test_other_signatures_met_on_the_way_are_kept() -> None:
    bench = TwofoldBench("keep")
    start = bench.try_program(parse_program("model lfm2 seed=0; decode 0:4; rollback 0 1; keep 1"))
    reduction = reduce_trial(start, bench)  # type: ignore[arg-type]
    assert body(reduction.program) == "model lfm2 seed=0; keep 0"
    assert [trial.signature for trial in reduction.others] == ["stub/lfm2 wrong-position at rollback"]


FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FEW
@given(programs(max_operations=12))
def test_every_program_that_is_tried_is_valid_and_smaller(program: Program) -> None:
    names = sorted({operation_name(operation) for operation in program.operations})
    bench = StubBench(names[0] if names else "")
    start = bench.try_program(program)
    reduction = reduce_trial(start, bench)  # type: ignore[arg-type]
    for tried in bench.tried:
        check_program(tried)
        assert tried == program or cost(tried) < cost(program)
    assert len(reduction.program.operations) == len(names[:1])


@FEW
@given(programs(max_operations=12))
def test_what_always_diverges_is_reduced_to_nothing(program: Program) -> None:
    bench = StubBench("")
    reduction = reduce_trial(bench.try_program(program), bench)  # type: ignore[arg-type]
    assert body(reduction.program) == f"model {program.model.family} seed=0"


def _smaller(program: Program) -> Iterator[Program]:
    return (candidate for candidate in candidates(program) if cost(candidate) < cost(program))


@pytest.mark.parametrize(
    "text",
    [
        "cancel 0:1 at=1",
        "decode 0:1/1",
        "decode 0:[0]",
        "decode 0:1 outputs=last",
        "decode 1:1",
        "decode 0:2",
        "decode 0:1 1:1",
        "decode 0+1:1",
        "rollback 0 2",
        "remove 0 0 1",
        "remove 0 1 3",
        "share 0 1 0 2",
        "shift 0 2",
        "shift 0 -1",
        "save 0 a partial",
        "save 0 a device",
        "damage a flip 3",
        "damage a truncate 2",
        "reopen n_seq_max=2",
        "save 0 long_name",
    ],
)
def test_every_kind_of_size_can_shrink(text: str) -> None:
    """Programs of one operation that is not the plainest: something smaller is offered besides nothing at all."""
    program = parse_program(f"model lfm2 seed=0; {text}")
    assert any(candidate.operations for candidate in _smaller(program))


@pytest.mark.parametrize("setting", ["n_seq_max=5", "n_rs_seq=7", "n_ubatch=8", "n_ctx=512", "unified=1", "start=dirty", "interleave=1"])
def test_every_setting_can_go_back_to_its_default(setting: str) -> None:
    program = parse_program(f"model lfm2 seed=0; cache {setting}; drop 0")
    assert "model lfm2 seed=0; drop 0" in map(body, _smaller(program))


@pytest.mark.parametrize(
    ("text", "smaller"),
    [
        ("decode 0:4; decode 1:3", "decode 0:4 1:3"),
        ("decode 0:4/2 1:1; decode 1:3/5 0:2", "decode 0:6/2 1:4"),
        ("decode 0+1:4; decode 0:1", "decode 0+1:4 0:1"),
        ("decode 0:1 1:1 0:2; decode 0:3", "decode 0:6 1:1"),
        ("decode 0:[1,2]; decode 0:[3]", "decode 0:3"),
    ],
)
def test_decodes_that_follow_each_other_become_one(text: str, smaller: str) -> None:
    assert f"model lfm2 seed=0; {smaller}" in map(body, _smaller(parse_program(f"model lfm2 seed=0; {text}")))


def test_decodes_with_other_outputs_stay_apart() -> None:
    program = parse_program("model lfm2 seed=0; decode 0:4; decode 1:3 outputs=last")
    assert not [candidate for candidate in map(body, _smaller(program)) if "0:4 1:3" in candidate]


def test_lengths_that_have_to_be_alike_shrink_together() -> None:
    program = parse_program("model lfm2 seed=0; decode 1:40 0:[5,6,7,8]; save_all a; decode 0:36")
    smaller = list(map(body, _smaller(program)))
    assert "model lfm2 seed=0; decode 1:1 0:[5]; save_all a; decode 0:1" in smaller
    assert "model lfm2 seed=0; decode 1:32 0:[5,6,7,8]; save_all a; decode 0:32" in smaller


def test_two_sequences_of_one_length_are_reduced_to_a_token_each() -> None:
    """A restored session in which sequences of one length share one state: neither sequence can be cut alone."""
    mutant = MUTANTS["restore_all_gives_everyone_the_same_state"]
    text = "model mamba2 seed=0; decode 1:5; decode 0:4 1:1; decode 0:4; decode 1:2; save_all x; restore_all x; decode 1:1"
    with Bench(MutantTarget(mutant)) as bench:
        bench.set_noise({Model("mamba2"): Noise(0.0, 1e-4, 0)})
        reduction = reduce_trial(bench.try_program(parse_program(text)), bench)
    assert body(reduction.program) == "model mamba2 seed=0; decode 1:1 0:1; save_all x; restore_all x; decode 1:1"
