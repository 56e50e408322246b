"""Retracing a run: the contract walks once more beside recorded answers, and sees what it saw."""

from typing import Any

import pytest
from statedrift.fuzz.execution import Run, Step, execute
from statedrift.fuzz.generation import generate
from statedrift.fuzz.retrace import retrace, undocumented_uses
from statedrift.spec.models import Model
from statedrift.spec.operations import Damage, Restore, RestoreAll
from statedrift.spec.programs import Program, parse_program
from statedrift.spec.target import Undocumented
from statedrift.spec.verdicts import ACCEPTED, Outcome, Verdict

from tests.perfect_target import PerfectTarget
from tests.scripted_target import Lie, ScriptedTarget, do_nothing, put, refuse, walk

USES = ("share-onto-nonempty", "partial-share", "shift-of-shared", "divide", "small-ubatch", "foreign-partial-restore")


def recorded(text: str, script: dict[int, Lie] | None = None, **changes: Any) -> tuple[Program, Run]:
    program = parse_program(f"model lfm2; {text}")
    target = ScriptedTarget(script, changes)
    return program, execute(program, target, target.progress)


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
@pytest.mark.parametrize("guarantee", ["draft", "any"])
def test_what_was_asked_once_is_asked_again(family: str, guarantee: Any) -> None:
    """Only what depends on the bytes of a blob may differ: they are not kept."""
    for seed in range(60):
        program = generate(seed, Model(family))
        run = execute(program, PerfectTarget(guarantee))
        count = 0
        for moment in retrace(program, run):
            count += 1
            assert moment.operation == program.operations[moment.index]
            assert moment.step == run.steps[moment.index]
            if not isinstance(moment.operation, Damage | Restore | RestoreAll):
                assert moment.checker.demand(moment.operation).word == moment.step.demand, (seed, moment.index)
        assert count == len(run.steps)


def test_the_logs_of_a_moment_are_those_before_its_operation() -> None:
    program, run = recorded("decode 0:3; rollback 0 1; share 0 1; drop 0")
    seen = [tuple(len(log.tokens) for log in moment.checker.ledger.logs[:2]) for moment in retrace(program, run)]
    assert seen == [(0, 0), (3, 0), (2, 0), (2, 2)]


def test_what_was_skipped_or_refused_changes_nothing() -> None:
    program, run = recorded("decode 0:3; restore a 0; divide 0 2; drop 0", {2: refuse})
    assert [len(moment.checker.ledger.logs[0].tokens) for moment in retrace(program, run)] == [0, 3, 3, 3]


def test_a_cancelled_decode_is_retraced_by_its_position() -> None:
    program, run = recorded("cancel 0:5 at=2; decode 0:1")
    assert [len(moment.checker.ledger.logs[0].tokens) for moment in retrace(program, run)] == [0, 2]


def test_a_refused_restore_that_emptied_its_destination_is_retraced() -> None:
    text = "decode 0:3; save 0 a; damage a header; restore a 0; decode 0:1"
    program, run = recorded(text, {3: put({0: 0}, Outcome("refused"))})
    assert [len(moment.checker.ledger.logs[0].tokens) for moment in retrace(program, run)][-1] == 0


DAMAGES = [
    ("flip 20", True),
    ("flip 20, flip 20", False),
    ("flip 20, flip 21", True),
    ("flip 20, flip 21, flip 20, flip 21", False),
    ("flip 20, flip 20, flip 20", True),
    ("header, header", True),
    ("header, flip 20, flip 20", True),
    ("foreign, flip 20", True),
]


@pytest.mark.parametrize(("damages", "is_unchecked"), DAMAGES)
def test_a_damaged_blob_is_retraced_as_damaged_and_an_undone_one_as_whole(damages: str, is_unchecked: bool) -> None:
    words = "; ".join(f"damage a {damage}" for damage in damages.split(", "))
    program = parse_program(f"model lfm2; decode 0:3; save 0 a; {words}; restore a 1; decode 1:1")
    target = ScriptedTarget({len(program.operations) - 2: put({1: 3}, ACCEPTED)})
    run = execute(program, target, target.progress)
    assert run.verdict is None
    *_, last = retrace(program, run)
    assert last.checker.ledger.logs[1].unchecked == is_unchecked


def test_a_run_that_ended_in_a_crash_is_retraced_up_to_it() -> None:
    program, run = recorded("decode 0:3; drop 0")
    crashed = Run((run.steps[0], Step(Outcome("crash"), "", "", run.steps[0].positions)), (), {}, None, run.capabilities)
    moments = [(moment.index, len(moment.checker.ledger.logs[0].tokens)) for moment in retrace(program, crashed)]
    assert moments == [(0, 0), (1, 3)]


def test_every_session_is_retraced_with_its_own_capabilities() -> None:
    program, run = recorded("cache n_rs_seq=3; decode 0:1; reopen n_rs_seq=1; decode 0:1; reopen n_rs_seq=0; decode 0:1")
    seen = [(moment.checker.capabilities.n_rs_seq, moment.opened.n_rs_seq) for moment in retrace(program, run)]
    assert seen == [(3, 3), (3, 1), (1, 1), (1, 0), (0, 0)]


# --- undocumented uses ------------------------------------------------------------------------------------------------------------


def uses_of(text: str, script: dict[int, Lie] | None = None, until: int | None = None, known: tuple[str, ...] = USES) -> tuple[str, ...]:
    program, run = recorded(text, script)
    target = ScriptedTarget()
    target.undocumented = tuple(Undocumented(use, "a sentence") for use in known)  # type: ignore[arg-type]
    return undocumented_uses(program, run, Verdict("wrong-output", until), target)


UNDOCUMENTED = [
    ("decode 0:3; share 0 1", ()),
    ("decode 0:3 1:2; share 0 1", ("share-onto-nonempty",)),
    ("decode 1:2; share 0 1", ("share-onto-nonempty",)),
    ("decode 0:3; share 0 0", ()),
    ("decode 0:3 1:2; drop 1; share 0 1", ()),
    ("decode 0:3; share 0 1 0 3", ("partial-share",)),
    ("decode 0:3; shift 0 2", ()),
    ("decode 0:3; share 0 1; shift 0 2", ("shift-of-shared",)),
    ("decode 0:3; share 0 1; shift 1 2", ("shift-of-shared",)),
    ("decode 0:3; share 0 1; drop 0; shift 1 2", ()),
    ("decode 0:3; share 0 1; decode 1:2; shift 1 2", ("shift-of-shared",)),
    ("decode 0+1:3; shift 1 2", ("shift-of-shared",)),
    ("decode 0:3; save 0 a; restore a 1; shift 1 2", ()),
    ("decode 0:3; divide 0 2", ("divide",)),
    ("divide 0 2", ()),  # skipped
    ("cache n_rs_seq=3 n_ubatch=4; decode 0:3", ("small-ubatch",)),
    ("cache n_rs_seq=3 n_ubatch=5; decode 0:3", ()),
    ("cache n_rs_seq=0 n_ubatch=1; decode 0:3", ()),
    ("cache n_rs_seq=3 n_ubatch=4; cancel 0:3 at=1", ("small-ubatch",)),
    ("cache n_rs_seq=3 n_ubatch=4; drop 0", ()),
    ("cache n_rs_seq=3 n_ubatch=4 start=dirty; drop 0", ("small-ubatch",)),
    ("cache n_ubatch=4 n_rs_seq=0 start=dirty; reopen n_rs_seq=3", ("small-ubatch",)),
    ("cache n_ubatch=4 n_rs_seq=0; reopen n_rs_seq=3; drop 0", ()),
    ("cache n_rs_seq=3 n_ubatch=4; decode 0:3; reopen n_rs_seq=0", ("small-ubatch",)),
    ("cache n_rs_seq=0 n_ubatch=4; decode 0:3; reopen n_rs_seq=3", ()),
    ("decode 0:3; save 0 a partial; restore a 0", ()),
    ("decode 0:3; save 0 a partial; damage a header; restore a 1", ("foreign-partial-restore",)),
    ("decode 0:3 1:2; share 0 1; divide 0 2", ("divide", "share-onto-nonempty")),
]


@pytest.mark.parametrize(("text", "uses"), UNDOCUMENTED)
def test_undocumented_uses_are_told(text: str, uses: tuple[str, ...]) -> None:
    assert uses_of(text) == uses


def test_only_uses_up_to_the_divergence_count() -> None:
    text = "decode 0:3 1:2; share 0 1; divide 0 2; decode 0:1"
    assert uses_of(text, until=1) == ("share-onto-nonempty",)
    assert uses_of(text, until=2) == ("divide", "share-onto-nonempty")


def test_a_use_that_was_refused_was_made_all_the_same() -> None:
    assert uses_of("decode 0:3; divide 0 2", {1: refuse}) == ("divide",)


def test_only_uses_that_the_target_calls_undocumented_are_told() -> None:
    text = "decode 0:3 1:2; share 0 1; divide 0 2"
    assert uses_of(text, known=("divide",)) == ("divide",)
    assert uses_of(text, known=()) == ()


def test_the_use_at_the_divergence_itself_counts() -> None:
    program, run = recorded("decode 0:3 1:2; share 0 1", {1: do_nothing})
    assert run.verdict is not None
    target = ScriptedTarget()
    target.undocumented = (Undocumented("share-onto-nonempty", "a sentence"),)
    assert undocumented_uses(program, run, run.verdict, target) == ("share-onto-nonempty",)


def test_a_scripted_walk_can_be_retraced() -> None:
    run, _ = walk("decode 0:3; drop 0")
    assert [moment.index for moment in retrace(parse_program("model lfm2; decode 0:3; drop 0"), run)] == [0, 1]
