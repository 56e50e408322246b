"""Two targets held to each other: what is sent to both, what counts as a difference, and what the machinery makes of it."""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

TESTS = Path(__file__).parent.parent
FOLDERS = [str(TESTS), str(TESTS / "fixtures")]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

from statedrift.cli.explaining import pair_step_lines  # noqa: E402
from statedrift.cli.fuzzing import checked_settings  # noqa: E402
from statedrift.fuzz import known as known_module  # noqa: E402
from statedrift.fuzz.campaign import Settings, run_campaign  # noqa: E402
from statedrift.fuzz.execution import Manner, Run, execute  # noqa: E402
from statedrift.fuzz.pair import Names, Pair, common_capabilities, compare, open_bench, row_differences  # noqa: E402
from statedrift.fuzz.reduction import reduce_trial  # noqa: E402
from statedrift.fuzz.trial import Bench  # noqa: E402
from statedrift.oracle.recompute import use_one_thread  # noqa: E402
from statedrift.spec.errors import EngineAbort, UnavailableError  # noqa: E402
from statedrift.spec.models import Model  # noqa: E402
from statedrift.spec.programs import parse_program, program_text  # noqa: E402
from statedrift.spec.verdicts import ACCEPTED, Outcome, Verdict  # noqa: E402
from statedrift.store.campaigns import Campaign, Noise, read_campaign  # noqa: E402

from tests.scripted_target import (  # noqa: E402
    Lie,
    ScriptedSession,
    ScriptedTarget,
    and_grow,
    call_it_cancelled,
    declared,
    do_it,
    do_nothing,
    fail,
    put,
    refuse,
    refuse_and_grow,
)

CANARY = "statedrift.fuzz.canary:FREQUENT"
NAMES = Names("ours", "theirs")
QUIET = {Model(family, seed): Noise(0.0, 1e-4, 0) for family in ("lfm2", "mamba2") for seed in range(5)}
FOLLOW = Manner(follow=True)
MEASURED_NOISE = Pair.noise


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    use_one_thread()


def die(session: ScriptedSession, do: Callable[[], Any]) -> Outcome:
    """Say that the engine would have died."""
    raise EngineAbort("cache.cpp:12: ASSERT(cells > 0) failed")


def followed(
    text: str, script: Mapping[int, Lie] | None = None, manner: Manner = FOLLOW, **capabilities: Any
) -> tuple[Run, ScriptedTarget]:
    """Follow a scripted target through a program."""
    target = ScriptedTarget(script or {}, capabilities)
    return execute(parse_program(f"model lfm2; {text}"), target, target.progress, manner), target


def compared(text: str, own: Mapping[int, Lie] | None = None, other: Mapping[int, Lie] | None = None) -> Verdict:
    """The verdict on a scripted target that is held to another one."""
    return compare(parse_program(f"model lfm2; {text}"), followed(text, own)[0], followed(text, other)[0], 1e-4, NAMES)


# --- differences -------------------------------------------------------------------------------------------------------------

ROLLBACK = "decode 0:5; share 0 1; rollback 0 2; decode 0:1 1:1"
OUTCOMES: list[tuple[Lie, Lie, str, str]] = [
    (refuse, do_it, "bad-refusal", "ours: refused (scripted); theirs: accepted"),
    (do_it, refuse, "false-success", "ours: accepted; theirs: refused (scripted)"),
    (fail, do_it, "bad-refusal", "ours: error (code 7); theirs: accepted"),
    (call_it_cancelled, refuse, "false-success", "ours: cancelled; theirs: refused (scripted)"),
    (die, do_it, "crash", "theirs: accepted; ours: crash (cache.cpp:12: ASSERT(cells > 0) failed)"),
    (refuse, die, "crash", "ours: refused (scripted); theirs: crash (cache.cpp:12: ASSERT(cells > 0) failed)"),
]


@pytest.mark.parametrize(("own", "other", "kind", "reason"), OUTCOMES)
def test_different_answers_are_a_difference_that_says_both(own: Lie, other: Lie, kind: str, reason: str) -> None:
    verdict = compared(ROLLBACK, {2: own}, {2: other})
    assert (verdict.kind, verdict.operation_index, verdict.sequence, verdict.relation) == (kind, 2, 0, "self")
    assert verdict.reason == reason


WRONG_TOGETHER: list[Lie] = [do_it, refuse, fail, do_nothing, die, and_grow(1), refuse_and_grow(0), put({0: 2, 1: 7}, ACCEPTED)]


@pytest.mark.parametrize("lie", WRONG_TOGETHER)
def test_what_both_do_is_right_however_wrong_it_is(lie: Lie) -> None:
    assert compared(ROLLBACK, {2: lie}, {2: lie}).kind == "ok"


def test_positions_of_any_sequence_are_compared() -> None:
    verdict = compared(ROLLBACK, {2: and_grow(1)}, {})
    assert (verdict.kind, verdict.operation_index, verdict.sequence, verdict.position) == ("wrong-position", 2, 1, 5)
    assert verdict.relation == "other"
    assert verdict.reason == "sequence 1 is at positions 0 to 5 in ours, at positions 0 to 4 in theirs"


def test_the_first_difference_decides() -> None:
    assert compared(ROLLBACK, {1: refuse, 2: die}, {2: refuse}).operation_index == 1
    assert compared(ROLLBACK, {1: die}, {1: die, 2: refuse}).kind == "ok"


def spoiled(run: Run, index: int, row: int, value: float) -> Run:
    """The run with one number of an output row changed."""
    data, width = run.rows[index]
    rows = np.frombuffer(data, np.float32).reshape(-1, width).copy()
    rows[row, 3] = value
    return msgspec.structs.replace(run, rows={**run.rows, index: (rows.tobytes(), width)})


@pytest.mark.parametrize(("row", "sequence", "position", "relation"), [(0, 0, 3, "self"), (1, 1, 5, "other")])
def test_rows_are_compared_and_say_whose_they_are(row: int, sequence: int, position: int, relation: str) -> None:
    program = parse_program(f"model lfm2; {ROLLBACK}")
    run, _ = followed(ROLLBACK)
    verdict = compare(program, spoiled(run, 3, row, 0.5), run, 0.25, NAMES)
    assert (verdict.kind, verdict.operation_index, verdict.error) == ("wrong-output", 3, 0.5)
    assert (verdict.sequence, verdict.position, verdict.relation) == (sequence, position, relation)
    assert verdict.reason == "logits differ from theirs's by 0.5 (tolerance 0.25)"
    assert compare(program, spoiled(run, 3, row, 0.25), run, 0.25, NAMES).kind == "ok"


@pytest.mark.parametrize(("family", "kind"), [("qwen4exp", "ok"), ("lfm2", "wrong-output")])
def test_rows_that_hang_on_a_selection_too_close_to_be_judged_are_not_compared(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = parse_program(f"model {family}; decode 0:60 1:2")
    run = execute(program, ScriptedTarget({}, {}), None, FOLLOW)
    wrong = spoiled(run, 0, 59, 0.5)
    assert compare(program, wrong, run, 0.25, NAMES).kind == "wrong-output"
    monkeypatch.setattr("statedrift.fuzz.judgement.MARGIN_MIN", float("inf"))
    assert compare(program, wrong, run, 0.25, NAMES).kind == kind
    assert compare(program, spoiled(run, 0, 59, float("nan")), run, 0.25, NAMES).kind == "nonfinite"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_finite_in_one_target_only_is_nonfinite(value: float) -> None:
    program = parse_program(f"model lfm2; {ROLLBACK}")
    run, _ = followed(ROLLBACK)
    wrong = spoiled(run, 3, 0, value)
    assert compare(program, wrong, run, 0.25, NAMES).kind == compare(program, run, wrong, 0.25, NAMES).kind == "nonfinite"
    assert compare(program, wrong, spoiled(run, 3, 0, float("nan")), 0.25, NAMES).kind == "ok"


def test_rows_that_are_finite_in_neither_agree() -> None:
    own = np.array([[np.nan, 1], [np.inf, 1], [1, 1], [1, np.nan]], np.float32)
    other = np.array([[np.inf, 2], [1, 1], [1, 3], [np.nan, 1]], np.float32)
    errors = row_differences(own, other)
    assert errors[0] == errors[3] == 0
    assert not np.isfinite(errors[1])
    assert 0 < errors[2] < 2


def test_an_earlier_answer_goes_before_a_later_row_and_a_row_before_a_later_answer() -> None:
    program = parse_program(f"model lfm2; {ROLLBACK}")
    run, refusing = followed(ROLLBACK)[0], followed(ROLLBACK, {2: refuse})[0]
    assert compare(program, spoiled(refusing, 0, 0, 9.0), run, 1e-4, NAMES).operation_index == 0
    assert compare(program, refusing, spoiled(run, 3, 0, 9.0), 1e-4, NAMES).operation_index == 2


def test_a_program_that_went_on_further_with_one_target_is_our_fault() -> None:
    run, _ = followed(ROLLBACK)
    verdict = compare(parse_program(f"model lfm2; {ROLLBACK}"), run, msgspec.structs.replace(run, steps=run.steps[:2]), 1e-4, NAMES)
    assert verdict.kind == "harness-error"


# --- the same calls ----------------------------------------------------------------------------------------------------------


def test_nothing_that_the_contract_forbids_ends_the_program() -> None:
    run, _ = followed(ROLLBACK + "; drop 0; keep 1", {1: do_nothing, 2: refuse_and_grow(0), 4: refuse, 5: fail})
    assert [step.outcome.word for step in run.steps] == ["accepted", "accepted", "refused", "accepted", "refused", "error"]
    assert (run.verdict, run.followed) == (None, True)


def test_a_log_that_a_position_contradicts_goes_on_from_the_position() -> None:
    _, target = followed("decode 0:5; rollback 0 2; decode 0:2; rollback 0 1", {1: do_nothing})
    assert target.calls[2][2][0].positions.tolist() == [5, 6]
    assert target.calls[3][1:] == ("remove", (0, 6, -1))


def test_a_log_that_the_target_calls_empty_is_empty() -> None:
    _, target = followed("decode 0:5; rollback 0 2; decode 0:2", {1: put({0: 0}, ACCEPTED)})
    assert target.calls[2][2][0].positions.tolist() == [0, 1]


def test_the_rows_of_unchecked_logs_are_kept() -> None:
    text = "decode 0:5; remove 0 1 3; decode 0:2"
    run, _ = followed(text, {1: do_nothing})
    assert [(span.operation_index, span.sequence, span.offset + span.indices[0]) for span in run.spans] == [(0, 0, 0), (2, 0, 5)]
    assert 2 in run.rows


def test_damage_to_a_single_byte_is_sent_to_neither() -> None:
    run, _ = followed("decode 0:5; damage a truncate 2; save 0 a; damage a flip 3; damage a header; damage a truncate 200")
    assert [step.outcome.word for step in run.steps[1:]] == ["skipped", "accepted", "skipped", "skipped", "accepted"]


def test_only_what_is_allowed_is_sent() -> None:
    allowed = declared(shift=False, n_batch=4, partial_share=False)
    run, target = followed(
        "decode 0:5; decode 0:4; shift 0 1; share 0 1 0 4; reopen; decode 0:4", manner=Manner(True, (allowed, declared()))
    )
    assert [step.outcome.word for step in run.steps] == ["refused", "accepted", "refused", "accepted", "accepted", "accepted"]
    assert [name for _, name, _ in target.calls] == ["decode", "share", "decode"]
    assert run.sessions == (allowed, declared())


def test_memory_is_used_with_the_allowed_batch_only() -> None:
    target = ScriptedTarget()
    execute(parse_program("model lfm2; cache n_seq_max=1 start=dirty; drop 0"), target, manner=Manner(True, (declared(n_batch=3),)))
    assert len(target.calls[0][2][0].tokens) == 3


def test_common_capabilities_are_what_both_can_do() -> None:
    own = declared(shift=True, divide=False, n_batch=7, n_ctx=0, guarantee="any")
    other = declared(shift=False, divide=True, n_batch=9, n_ctx=5, guarantee="draft", inspect=True)
    common = common_capabilities(own, other)
    assert (common.shift, common.divide, common.coupled) == (False, False, True)
    assert (common.n_batch, common.n_ctx, common.guarantee) == (7, 5, "draft")


def test_sessions_that_keep_different_numbers_of_snapshots_differ() -> None:
    own, other = ScriptedTarget(capabilities={"engine": "x"}), ScriptedTarget(capabilities={"engine": "x", "n_rs_seq": 1})
    with Pair(own, other) as pair:
        pair.set_noise(QUIET)
        verdict = pair.try_program(parse_program("model lfm2; decode 0:2")).verdict
        later = parse_program("model lfm2; cache n_rs_seq=1; decode 0:2; reopen n_rs_seq=2; drop 0")
        assert (verdict.kind, verdict.operation_index) == ("false-success", None)
        assert verdict.reason == "snapshots (n_rs_seq) that a session keeps, scripted: 3; scripted: 1"
        assert pair.try_program(later).verdict.operation_index == 1


@pytest.mark.parametrize(("engine", "kind"), [("", "ok"), ("x", "wrong-position")])
def test_first_positions_are_compared_where_both_are_of_one_engine(engine: str, kind: str) -> None:
    text = "decode 0:4"
    runs = [followed(text, {}, Manner(True, (declared(engine=engine),)))[0] for _ in range(2)]
    step = runs[0].steps[0]
    moved = msgspec.structs.replace(step, positions=((3, 3), *step.positions[1:]))
    own = msgspec.structs.replace(runs[0], steps=(moved,))
    assert compare(parse_program(f"model lfm2; {text}"), own, runs[1], 1e-4, NAMES).kind == kind


def test_a_sequence_without_a_first_position_differs_from_one_with_it() -> None:
    text = "decode 0:4"
    run = followed(text, {})[0]
    emptied = msgspec.structs.replace(run.steps[0], positions=((-1, 3), *run.steps[0].positions[1:]))
    assert (
        compare(parse_program(f"model lfm2; {text}"), msgspec.structs.replace(run, steps=(emptied,)), run, 1e-4, NAMES).kind
        == "wrong-position"
    )


def test_other_engines_may_keep_other_numbers_of_snapshots() -> None:
    with Pair(ScriptedTarget(), ScriptedTarget(capabilities={"n_rs_seq": 1})) as pair:
        pair.set_noise(QUIET)
        assert pair.try_program(parse_program("model lfm2; decode 0:2")).verdict.kind == "ok"


# --- deaths ------------------------------------------------------------------------------------------------------------------


def test_an_abort_in_this_process_is_a_crash_that_ends_the_program() -> None:
    for manner in (Manner(), FOLLOW):
        run, _ = followed(ROLLBACK, {2: die}, manner)
        assert [step.outcome.word for step in run.steps] == ["accepted", "accepted", "crash"]
        assert run.verdict == Verdict(
            "crash", 2, 0, relation="self", reason="the engine would have died (abort): cache.cpp:12: ASSERT(cells > 0) failed"
        )


def test_an_abort_while_positions_are_asked_is_a_crash() -> None:
    def dying(answer: object) -> object:
        raise EngineAbort("positions")

    target = ScriptedTarget()
    target.positions_lie = dying
    run = execute(parse_program("model lfm2; drop 0"), target)
    assert run.steps[0].outcome == Outcome("crash", "positions")


@pytest.mark.parametrize("where", ["open", "dirty"])
def test_an_abort_while_opening_is_a_crash_before_the_first_operation(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = ScriptedTarget({-1: die} if where == "dirty" else {})
    if where == "open":
        monkeypatch.setattr(target, "open", lambda model, configuration: die(None, None))  # type: ignore[arg-type]
    run = execute(parse_program("model lfm2; cache start=dirty; drop 0"), target)
    assert run.steps == ()
    assert run.verdict is not None
    assert (run.verdict.kind, run.verdict.operation_index) == ("crash", None)
    assert run.capabilities.n_rs_seq == (3 if where == "dirty" else 0)


def test_an_abort_while_reopening_belongs_to_the_reopen() -> None:
    run, _ = followed("decode 0:1; reopen start=dirty; drop 0", {1: die})
    assert [step.outcome.word for step in run.steps] == ["accepted", "crash"]


def test_an_abort_while_closing_belongs_to_the_last_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(session: ScriptedSession) -> None:
        raise EngineAbort("close")

    monkeypatch.setattr(ScriptedSession, "close", close)
    run, _ = followed("decode 0:1; drop 0")
    assert [step.outcome.word for step in run.steps] == ["accepted", "crash"]
    assert run.verdict is not None
    assert run.verdict.operation_index == 1


def test_a_death_while_opening_is_compared_too() -> None:
    text = "cache start=dirty; decode 0:1"
    assert compared(text, {-1: die}, {-1: die}).kind == "ok"
    verdict = compared(text, {-1: die}, {})
    assert (verdict.kind, verdict.operation_index) == ("crash", None)
    assert "theirs: a session" in verdict.reason


def test_an_abort_in_this_process_agrees_with_a_death_in_a_child_process() -> None:
    text = "model lfm2 seed=0; decode 0:5; decode 1:2; share 0 2; clear; decode 0:1"
    with Pair("faulty:CLEAR_ABORTS", "faulty:CLEAR_DIES") as pair, Pair("faulty:CLEAR_DIES", "numba") as unlike:
        pair.set_noise(QUIET)
        unlike.set_noise(QUIET)
        trial = pair.try_program(parse_program(text))
        assert trial.verdict.kind == "ok", trial.verdict
        assert trial.verdict.reason.startswith("both targets die; ")
        assert trial.other is not None
        assert [step.outcome.word for step in trial.other.steps] == ["accepted", "accepted", "accepted", "crash"]
        assert sorted(trial.other.rows) == [0, 1]
        verdict = unlike.try_program(parse_program(text)).verdict
        assert (verdict.kind, verdict.operation_index) == ("crash", 3)
        assert verdict.reason.startswith("numba: accepted; faulty:CLEAR_DIES: crash (")


# --- the machinery -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _quick() -> Iterator[None]:
    """One fault is reduced twice, and no noise is measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_module, "EXPLAINED_REDUCTIONS_MAX", 2)
        patch.setattr(Pair, "noise", lambda pair, model: Noise(0.0, 1e-4, 200))
        yield


@pytest.fixture(scope="module")
def campaign(_quick: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Campaign, Path]:
    folder = tmp_path_factory.mktemp("pair") / "run"
    return run_campaign(Settings(CANARY, ("lfm2",), programs=100, seed=5, out=folder, against="numba")), folder


def test_a_difference_is_found_reduced_and_reproduced(campaign: tuple[Campaign, Path]) -> None:
    done, folder = campaign
    (finding,) = done.findings
    assert finding.signature == f"{CANARY} against numba/lfm2 wrong-output at decode (self) after decode+rollback"
    assert program_text(finding.program) == "model lfm2 seed=0\ndecode 0:2\nrollback 0 1\ndecode 0:1\n"
    assert (finding.against, finding.reproduced, finding.documented) == ("numba", 10, True)
    assert finding.title == "the next outputs of the sequence are not those of numba after rollback"
    assert not list(folder.glob("findings/*/repro.py"))
    assert read_campaign(folder) == done


def test_the_account_says_which_targets_and_how_often_they_agreed(campaign: tuple[Campaign, Path]) -> None:
    account = campaign[0].account
    assert (account.target, account.against) == (CANARY, "numba")
    assert account.verdicts["ok"] + account.verdicts["wrong-output"] == account.programs == 100
    assert account.could_not_test == {}


def test_two_processes_find_the_same_differences_as_one(campaign: tuple[Campaign, Path]) -> None:
    again = run_campaign(Settings(CANARY, ("lfm2",), programs=100, seed=5, jobs=2, against="numba"))
    assert (again.account.verdicts, again.account.outcomes) == (campaign[0].account.verdicts, campaign[0].account.outcomes)
    assert [finding.signature for finding in again.findings] == [finding.signature for finding in campaign[0].findings]


def test_a_target_agrees_with_itself() -> None:
    account = run_campaign(Settings("numba", ("lfm2", "mamba2"), programs=128, against="numba")).account
    assert account.verdicts == {"ok": 128}


def test_an_answer_is_reduced_to_the_smallest_program_in_which_it_differs() -> None:
    text = "model lfm2 seed=0; cache n_seq_max=3; decode 0:5 1:2; keep 1; decode 1:3; rollback 1 1; keep 1; decode 1:1"
    with Pair("faulty:KEEP_BESIDE_NOBODY", "numba") as pair:
        pair.set_noise(QUIET)
        reduction = reduce_trial(pair.try_program(parse_program(text)), pair)
    assert reduction.trial.verdict.kind == "bad-refusal"
    assert program_text(reduction.program) == "model lfm2 seed=0\nkeep 0\n"
    assert reduction.undocumented_uses == ()


def test_tolerances_are_added() -> None:
    with Pair("numba", "numba") as pair:
        model = Model("lfm2")
        pair.against.set_noise({model: Noise(0.25, 2.0, 200)})
        Bench.set_noise(pair, {model: Noise(0.5, 4.0, 100)})
        assert MEASURED_NOISE(pair, model) == Noise(0.75, 6.0, 100)


def test_without_a_second_target_a_bench_is_held_to_the_oracle() -> None:
    with open_bench("numba") as bench:
        assert type(bench) is Bench


def test_a_program_that_one_target_cannot_open_is_unknown() -> None:
    with Pair("fake_engine:SILENT", "fake_engine:TARGET") as pair:
        model = Model("lfm2", 2)
        pair.set_noise({model: Noise(0.0, 1e-4, 0)})
        verdict = pair.try_program(parse_program("model lfm2 seed=2; decode 0:1")).verdict
    assert verdict == Verdict("unknown", reason="fake_engine:TARGET: no such model")


def test_targets_without_a_common_family_could_not_be_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    import faulty

    monkeypatch.setattr(faulty.ROLLBACK, "families", ("mamba2",))
    monkeypatch.setattr(faulty.LONG_ROLLBACK, "families", ("lfm2", "qwen35"))
    with pytest.raises(UnavailableError, match="no family in common; they run mamba2 and lfm2, qwen35"):
        checked_settings("faulty:ROLLBACK", (), None, 1, 0, 1, None, "faulty:LONG_ROLLBACK")
    with pytest.raises(UnavailableError, match="target faulty:LONG_ROLLBACK does not run family mamba2"):
        checked_settings("faulty:ROLLBACK", ("mamba2",), None, 1, 0, 1, None, "faulty:LONG_ROLLBACK")
    assert checked_settings("numba", (), None, 1, 0, 1, None, "faulty:LONG_ROLLBACK").families == ("lfm2", "qwen35")


# --- explaining --------------------------------------------------------------------------------------------------------------


def explained(text: str, target: str) -> str:
    with Pair(target, "numba") as pair:
        pair.set_noise(QUIET)
        return "\n".join(pair_step_lines(pair.try_program(parse_program(text)), (target, "numba")))


def test_what_both_say_is_said_once_and_where_they_part_apart() -> None:
    text = explained("model lfm2 seed=0; decode 0:2; keep 0; decode 0:1", "faulty:KEEP_BESIDE_NOBODY")
    assert "both said accepted; last positions 0:1" in text
    assert "said      faulty:KEEP_BESIDE_NOBODY: refused (planted); last positions 0:1" in text
    assert "said      numba: accepted; last positions 0:1" in text
    assert "> 2  keep 0" in text
    assert "3  decode" not in text


def test_a_wrong_row_is_shown_as_both_gave_it() -> None:
    text = explained("model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1", CANARY)
    assert "row       after token 2, position 1" in text
    assert f"given     {CANARY}: likeliest tokens" in text
    assert "given     numba: likeliest tokens" in text
