"""State inspection: what is looked at, what is wrong, and what a refusal may not do."""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

TESTS = Path(__file__).parent.parent
FOLDERS = [str(TESTS), str(TESTS / "fixtures")]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

import statedrift.oracle.recompute as recompute_module  # noqa: E402
from statedrift.cli import application  # noqa: E402
from statedrift.cli.explaining import step_lines  # noqa: E402
from statedrift.fuzz.calibration import LOG_COUNT, measure_state_noise  # noqa: E402
from statedrift.fuzz.campaign import Settings, run_campaign  # noqa: E402
from statedrift.fuzz.execution import Manner, Run, execute  # noqa: E402
from statedrift.fuzz.inspection import NOTHING, Inspection, Inspector, Shown, shown  # noqa: E402
from statedrift.fuzz.pair import open_bench  # noqa: E402
from statedrift.fuzz.reduction import reduce_trial  # noqa: E402
from statedrift.fuzz.shards import shard_programs  # noqa: E402
from statedrift.fuzz.signatures import coarse_signature  # noqa: E402
from statedrift.fuzz.state_judgement import judge_states, worst_state_error  # noqa: E402
from statedrift.fuzz.titles import title_of  # noqa: E402
from statedrift.fuzz.trial import Bench, Trial  # noqa: E402
from statedrift.oracle.ledger import EMPTY, Log  # noqa: E402
from statedrift.oracle.recompute import Recompute, recompute_of, use_one_thread  # noqa: E402
from statedrift.spec.errors import UnavailableError, UsageError  # noqa: E402
from statedrift.spec.families import FAMILIES  # noqa: E402
from statedrift.spec.models import Model  # noqa: E402
from statedrift.spec.operations import Drop, Restore, Share  # noqa: E402
from statedrift.spec.programs import Program, parse_program, program_text  # noqa: E402
from statedrift.spec.target import StateRow  # noqa: E402
from statedrift.spec.verdicts import Verdict  # noqa: E402
from statedrift.store.campaigns import Noise  # noqa: E402
from statedrift.targets.numba import TARGET as NUMBA  # noqa: E402

from tests.fixtures.spoiling import LAYER, SpoilingTarget  # noqa: E402
from tests.judging import verdicts_of  # noqa: E402
from tests.scripted_target import ATTENTION_ONLY, ScriptedSession, ScriptedTarget  # noqa: E402

INSPECT = Manner(inspect=True)
TOLERANCE = 1e-3
MODEL = Model("lfm2")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    use_one_thread()


def verdict_on(fault: str, text: str, manner: Manner = INSPECT) -> Verdict:
    program = parse_program(f"model lfm2 seed=0; {text}")
    return verdicts_of(program.model, [execute(program, SpoilingTarget(fault), manner=manner)], TOLERANCE)[0]


# --- what is wrong -----------------------------------------------------------------------------------------------------------


def test_a_spoiled_row_is_seen_at_once_with_its_layer_and_part() -> None:
    text = "decode 0:9; share 0 1; save 1 a; decode 2:1; decode 1:1"
    verdict = verdict_on("share", text)
    assert (verdict.kind, verdict.operation_index, verdict.layer, verdict.part) == ("wrong-state", 1, LAYER, "conv")
    assert (verdict.sequence, verdict.position, verdict.relation) == (0, 8, "self")
    assert verdict.error is not None
    assert verdict.error > 100 * TOLERANCE
    assert verdict.reason == f"conv state of layer {LAYER} off by {verdict.error:.3g} (tolerance 0.001)"
    late = verdict_on("share", text, Manner())
    assert (late.kind, late.operation_index) == ("wrong-output", 4)


def test_outputs_that_nobody_asks_for_do_not_hide_it() -> None:
    assert verdict_on("share", "decode 0:9; share 0 1; drop 0; drop 1", Manner()).kind == "ok"
    assert verdict_on("share", "decode 0:9; share 0 1; drop 0; drop 1").kind == "wrong-state"


def test_a_number_that_is_none_is_nonfinite_with_layer_and_part() -> None:
    verdict = verdict_on("share with NaN", "decode 0:9; share 0 1")
    assert (verdict.kind, verdict.layer, verdict.part, verdict.error) == ("nonfinite", LAYER, "conv", None)


def test_a_refusal_that_touches_a_row_is_a_partial_effect() -> None:
    text = "decode 0:9; decode 0:1; rollback 0 3"
    verdict = verdict_on("refusal", text)
    assert (verdict.kind, verdict.operation_index, verdict.layer, verdict.part) == ("partial-effect", 2, LAYER, "conv")
    assert verdict.reason == f"rollback was refused, but the conv state of sequence 0 in layer {LAYER} changed"
    assert verdict_on("refusal", text, Manner()).kind == "ok"


def test_a_refused_restore_may_leave_its_destination_empty() -> None:
    assert verdict_on("refused restore empties", "decode 0:9; save 0 a; damage a truncate 1; restore a 0; decode 0:2").kind == "ok"


SHAPES = [
    ("no conv rows", 0, 0, "conv", "no conv state of layer 0 is shown"),
    ("one row more", 0, 0, "recurrent", "a recurrent state of layer 0 is shown that the model does not have"),
    ("wrong shape", 0, 0, "conv", "conv state of layer 0 has shape [32, 1], not [32, 2]"),
    ("rows of nothing", 0, 0, "conv", "an empty sequence shows a conv state [32, 2] in layer 0"),
]


@pytest.mark.parametrize(("fault", "index", "layer", "part", "reason"), SHAPES)
def test_missing_additional_and_misshapen_rows_are_wrong_states(fault: str, index: int, layer: int, part: str, reason: str) -> None:
    verdict = verdict_on(fault, "decode 0:3; decode 0:1")
    assert (verdict.kind, verdict.operation_index, verdict.layer, verdict.part, verdict.error) == ("wrong-state", index, layer, part, None)
    assert verdict.reason == reason


def test_what_is_no_row_is_an_error_of_the_target() -> None:
    verdict = verdict_on("float64", "decode 0:3")
    assert (verdict.kind, verdict.operation_index) == ("bad-refusal", 0)
    assert "TypeError: the conv row of layer 0 must be an array of float32" in verdict.reason


def test_an_engine_that_dies_when_it_is_looked_at_is_a_crash() -> None:
    assert verdict_on("dies", "decode 0:3").kind == "crash"


def test_the_earlier_of_an_output_and_a_state_decides_and_at_one_operation_the_state() -> None:
    program = parse_program("model lfm2 seed=0; decode 0:9; share 0 1; decode 0:1")
    run = execute(program, SpoilingTarget("share"), manner=INSPECT)
    data, width = run.rows[0]
    early = msgspec.structs.replace(run, rows={**run.rows, 0: (np.full(len(data) // 4, 7, np.float32).tobytes(), width)})
    assert verdicts_of(MODEL, [early], TOLERANCE)[0].kind == "wrong-output"
    late = msgspec.structs.replace(run, inspections=tuple(own for own in run.inspections if own.operation_index == 2))
    assert (verdicts_of(MODEL, [late], TOLERANCE)[0].kind, verdicts_of(MODEL, [late], TOLERANCE)[0].operation_index) == ("wrong-state", 2)
    answered = msgspec.structs.replace(run, verdict=Verdict("bad-refusal", 0))
    assert verdicts_of(MODEL, [answered], TOLERANCE)[0].kind == "bad-refusal"


def test_state_rows_have_a_tolerance_of_their_own() -> None:
    program = parse_program("model lfm2 seed=0; decode 0:9; share 0 1; drop 0")
    run = execute(program, SpoilingTarget("share"), manner=INSPECT)
    assert verdicts_of(MODEL, [run], TOLERANCE, 100.0)[0].kind == "ok"
    assert verdicts_of(MODEL, [run], 100.0, TOLERANCE)[0].tolerance == TOLERANCE


# --- what is looked at -------------------------------------------------------------------------------------------------------


def looked_at(text: str, manner: Manner = INSPECT) -> list[tuple[int, int, int]]:
    """Operation, sequence and log length of everything that is kept."""
    run = execute(parse_program(f"model lfm2 seed=0; cache n_seq_max=3; {text}"), NUMBA, manner=manner)
    return [(own.operation_index, own.sequence, len(own.log)) for own in run.inspections]


def test_every_sequence_is_looked_at_and_the_same_log_with_the_same_bits_kept_once() -> None:
    seen = looked_at("decode 0:3 1:2; share 0 2; decode 2:1; rollback 2 9; save 1 a; restore a 0")
    assert seen == [(0, 0, 3), (0, 1, 2), (0, 2, 0), (2, 2, 4)]


def test_nothing_is_looked_at_unless_asked_or_not_sent() -> None:
    assert looked_at("decode 0:3", Manner()) == []
    assert looked_at("restore a 0; cancel 0:3 at=1; decode 0:1") == [(2, 0, 1), (2, 1, 0)]


def test_a_new_session_is_looked_at_anew() -> None:
    assert looked_at("decode 0:3; reopen n_seq_max=1; decode 0:3") == [(0, 0, 3), (0, 1, 0)]


def test_an_unchecked_sequence_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(ScriptedSession, "inspect", lambda session, sequence: asked.append(sequence) or ())
    target = ScriptedTarget(capabilities=ATTENTION_ONLY | {"inspect": True})
    run = execute(parse_program("model lfm2; cache n_seq_max=2; decode 0:5; remove 0 1 2; drop 0"), target, manner=INSPECT)
    assert [step.outcome.word for step in run.steps] == ["accepted"] * 3
    assert asked == [0, 1, 1, 0, 1]


def test_a_session_that_does_not_declare_it_is_not_looked_at() -> None:
    run = execute(parse_program("model lfm2; decode 0:5"), ScriptedTarget(), manner=INSPECT)
    assert run.inspections == ()


def rows_of(value: float) -> Shown:
    return shown([StateRow(0, "conv", np.full((2, 2), value, np.float32))])


def test_a_refusal_is_compared_bit_by_bit_with_what_was_shown_before() -> None:
    inspector, log = Inspector(), Log((1, 2), 1)
    assert inspector.look(0, Drop(1), False, 0, log, rows_of(np.nan)) is None
    assert inspector.look(1, Drop(1), True, 0, log, rows_of(np.nan)) is None
    verdict = inspector.look(2, Drop(1), True, 0, log, rows_of(0.5))
    assert verdict is not None
    assert (verdict.kind, verdict.relation, verdict.position) == ("partial-effect", "other", 1)
    assert inspector.look(3, Drop(1), True, 0, log, NOTHING) is not None
    assert inspector.look(4, Restore("a", 0), True, 0, log, rows_of(0.5)) is not None
    assert inspector.look(5, Restore("a", 0), True, 0, EMPTY, NOTHING) is None


def test_of_an_unknown_state_a_refusal_says_nothing() -> None:
    inspector, log = Inspector(), Log((1, 2), 1)
    inspector.look(0, Drop(0), False, 0, log, rows_of(1.0))
    inspector.skip(0)
    assert inspector.look(1, Drop(0), True, 0, log, rows_of(2.0)) is None
    inspector.forget()
    assert inspector.look(2, Drop(0), True, 0, log, rows_of(3.0)) is None


def test_rows_are_shown_by_layer_and_part() -> None:
    rows = [StateRow(layer, part, np.zeros(2, np.float32)) for layer, part in ((1, "recurrent"), (0, "conv"), (1, "conv"))]  # type: ignore[arg-type]
    assert [entry[:2] for entry in shown(rows).layout] == [(0, "conv"), (1, "conv"), (1, "recurrent")]


def test_inspections_survive_the_way_from_a_child_process() -> None:
    run = execute(parse_program("model lfm2 seed=0; decode 0:3"), NUMBA, manner=INSPECT)
    assert run.inspections
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(run), type=Run).inspections == run.inspections


# --- the truth ---------------------------------------------------------------------------------------------------------------


def some_logs(seed: int = 0) -> list[tuple[int, ...]]:
    """Logs that share prefixes, repeat and come in no order; one is empty."""
    generator = np.random.default_rng(seed)
    trunk = tuple(generator.integers(0, 64, 40).tolist())
    branches = [(*trunk[:cut], *generator.integers(0, 64, more).tolist()) for cut, more in ((7, 9), (20, 1), (20, 30), (0, 3))]
    return [trunk[:1], *branches, (), trunk, trunk[:20], trunk, trunk[:39]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_states_of_many_logs_are_those_of_each(family: str) -> None:
    recompute, logs = recompute_of(Model(family)), some_logs()
    together = recompute.states(logs)
    assert together[5] == []
    for log, rows in zip(logs, together, strict=True):
        alone = recompute.state_rows(log)
        assert [(row.layer, row.part, row.values.shape) for row in rows] == [(row.layer, row.part, row.values.shape) for row in alone]
        for row, same in zip(rows, alone, strict=True):
            assert np.abs(row.values - same.values).max() <= 1e-6
            assert row.values.dtype == np.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_small_bounds_change_no_state(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = some_logs(1)
    expected = Recompute(Model(family)).states(logs)
    monkeypatch.setattr(recompute_module, "NODES_MAX_ELEMENTS", 1000)
    monkeypatch.setattr(recompute_module, "PAIRS_MAX_ELEMENTS", 100)
    monkeypatch.setattr("statedrift.oracle.trace.BATCH_MAX_ELEMENTS", 100)
    for rows, same in zip(Recompute(Model(family)).states(logs), expected, strict=True):
        for row, own in zip(rows, same, strict=True):
            assert np.abs(row.values - own.values).max() <= 1e-6


@pytest.mark.parametrize(
    "family",
    [
        "mamba2",
        "nemotron_h",
        "qwen35",
        "mamba",
        "jamba",
        "minimax01",
        "qwen3next",
        "kimi_linear",
        "rwkv6",
        "rwkv7",
        "falcon_h1",
        "zamba2",
        "qwen4exp",
    ],
)
def test_a_state_is_what_the_next_token_reads(family: str) -> None:
    """Two logs with equal states after them would have equal outputs; other states, other outputs: the state holds the whole past."""
    recompute = recompute_of(Model(family))
    first, second = (recompute.state_rows(log) for log in ((1, 2, 3, 4, 5, 6, 7), (8, 2, 3, 4, 5, 6, 7)))
    recurrent = [(row, other) for row, other in zip(first, second, strict=True) if row.part == "recurrent"]
    assert recurrent
    assert all(np.abs(row.values - other.values).max() > 1e-3 for row, other in recurrent)


def test_attention_rows_of_a_prefix_are_a_prefix() -> None:
    log = tuple(range(20))
    short, whole = recompute_of(MODEL).states([log[:7], log])
    for row, other in zip(short, whole, strict=True):
        if row.part == "attention":
            assert np.abs(row.values - other.values[:, :7]).max() <= 1e-6


def key_of(model: Model, log: tuple[int, ...], newest: int | None = None) -> tuple[tuple[int, ...], Shown]:
    """The true rows of a log, as a session would show them; with `newest` only so many tokens of the attention rows."""
    rows = []
    for row in recompute_of(model).state_rows(log):
        is_cut = newest is not None and row.part == "attention"
        rows.append(StateRow(row.layer, row.part, np.ascontiguousarray(row.values[:, -newest:]) if is_cut else row.values))  # type: ignore[operator]
    return log, shown(rows)


def test_a_windowed_layer_may_show_its_newest_tokens_only() -> None:
    model, log = Model("lfm2_swa"), tuple(range(40))
    window = recompute_of(model)._dimensions["n_swa"]
    for newest, is_right in ((40, True), (window, True), (window - 1, True), (window - 2, False)):
        key = key_of(model, log, newest)
        assert (judge_states(model, [key], 1e-5).faults[key] is None) == is_right
    key = key_of(MODEL, log, 30)
    assert judge_states(MODEL, [key], 1e-5).faults[key] is not None


def test_a_state_is_judged_once_however_often_it_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[tuple[int, ...]]] = []
    traced = Recompute.traced

    def noted(recompute: Recompute, logs: Sequence[tuple[int, ...]]) -> object:
        asked.append(logs)
        return traced(recompute, logs)

    monkeypatch.setattr(Recompute, "traced", noted)
    key = key_of(MODEL, (1, 2, 3))
    asked.clear()
    judged = judge_states(MODEL, [key, key, ((), NOTHING), key], 1e-5)
    assert asked == [[(1, 2, 3)]]
    assert judged.faults == {key: None, ((), NOTHING): None}
    assert judged.worst_error <= 1e-6


# --- the floor ---------------------------------------------------------------------------------------------------------------


def inspected(programs: Sequence[Program], fault: str = "") -> list[Run]:
    return [execute(program, SpoilingTarget(fault), manner=INSPECT) for program in programs]


def test_state_rows_have_a_floor_of_their_own() -> None:
    noise = measure_state_noise(MODEL, Noise(1e-6, 2e-5, LOG_COUNT), inspected)
    assert noise.state_floor is not None
    assert noise.state_tolerance is not None
    assert 1e-7 <= noise.state_floor <= 2e-5
    assert noise.state_tolerance == max(20 * noise.state_floor, 1e-5)
    assert (noise.floor, noise.tolerance) == (1e-6, 2e-5)


@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_rows_that_are_far_off_are_shown_by_the_campaign(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statedrift.fuzz.calibration.worst_state_error", lambda model, runs: error)
    assert measure_state_noise(MODEL, Noise(1e-6, 2e-5, LOG_COUNT), lambda programs: []).state_tolerance == 2e-5


def test_misshapen_rows_say_nothing_of_the_floor() -> None:
    runs = inspected([parse_program("model lfm2 seed=0; decode 0:3")], "wrong shape")
    assert np.isnan(worst_state_error(MODEL, runs))


def test_a_target_that_shows_nothing_could_not_be_tested() -> None:
    message = "fake_engine:SILENT does not show its state rows; leave out --inspect"
    with Bench("fake_engine:SILENT", inspect=True) as bench, pytest.raises(UnavailableError, match=message):
        bench.noise(MODEL)


def test_two_truths_are_refused() -> None:
    with pytest.raises(UsageError, match="leave out one of them"):
        open_bench("numba", "numba", inspect=True)
    assert application.run(["fuzz", "--target", "numba", "--against", "numba", "--inspect"]) == 64


# --- our own caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_our_own_caches_show_the_true_state_after_every_operation(family: str) -> None:
    programs = shard_programs(11, 0, (family,), 48)
    for start in ("fresh", "poison"):
        started = [msgspec.structs.replace(own, cache=msgspec.structs.replace(own.cache, start=start)) for own in programs]
        runs = [execute(program, NUMBA, manner=INSPECT) for program in started]
        verdicts = verdicts_of(programs[0].model, runs, 2e-4)
        assert {verdict.kind for verdict in verdicts} == {"ok"}, next(verdict for verdict in verdicts if verdict.kind != "ok")
        assert sum(len(run.inspections) for run in runs) >= 200


# --- the machinery -----------------------------------------------------------------------------------------------------------

QUIET = {Model("lfm2", seed): Noise(0.0, 1e-4, 200, 0.0, 1e-4) for seed in range(5)}


def test_a_wrong_state_is_reduced_and_says_its_part() -> None:
    text = "model lfm2 seed=0; cache n_seq_max=3; decode 0:9 1:4; rollback 0 1; save 0 a; share 0 2; restore a 1; decode 2:3"
    with Bench("spoiling:SHARE", inspect=True) as bench:
        bench.set_noise(QUIET)
        trial = bench.try_program(parse_program(text))
        reduction = reduce_trial(trial, bench)
    assert trial.signature == "spoiling:SHARE/lfm2 wrong-state at share in conv"
    assert program_text(reduction.program) == "model lfm2 seed=0\ndecode 0:1\nshare 0 1\n"
    assert reduction.signature == "spoiling:SHARE/lfm2 wrong-state at share in conv (self) after decode"


def test_a_campaign_counts_what_it_looked_at_and_finds_it_on_two_processes_as_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statedrift.fuzz.known.EXPLAINED_REDUCTIONS_MAX", 2)
    monkeypatch.setattr(Bench, "noise", lambda bench, model: Noise(0.0, 1e-4, 200, 0.0, 1e-4))
    one, two = (run_campaign(Settings("spoiling:SHARE", ("lfm2",), programs=80, jobs=jobs, inspect=True)) for jobs in (1, 2))
    (finding,) = one.findings
    assert (finding.verdict.kind, finding.verdict.part, finding.verdict.layer) == ("wrong-state", "conv", LAYER)
    assert finding.title == "the conv state of the sequence is wrong"
    assert one.account.inspected == two.account.inspected
    assert one.account.inspected is not None
    assert one.account.inspected > 200
    assert one.account.verdicts == two.account.verdicts
    assert [own.signature for own in two.findings] == [finding.signature]


TITLES = [
    ("wrong-state", "the recurrent state of the sequence is wrong after share"),
    ("nonfinite", "the recurrent state of the sequence is not finite after share"),
    ("partial-effect", "share is refused and still changes the recurrent state of the sequence after share"),
]


@pytest.mark.parametrize(("kind", "title"), TITLES)
def test_titles_name_the_part(kind: str, title: str) -> None:
    program = Program(MODEL, parse_program("model lfm2; drop 0").cache, (Share(0, 1), Share(0, 1)))
    verdict = Verdict(kind, 1, 0, 3, "self", part="recurrent", layer=2)  # type: ignore[arg-type]
    assert title_of(program, verdict) == title
    assert coarse_signature("numba", program, verdict) == f"numba/lfm2 {kind} at share in recurrent"


def test_explain_shows_the_wrong_row_beside_the_true_one() -> None:
    program = parse_program("model lfm2 seed=0; decode 0:9; share 0 1; decode 1:1")
    run = execute(program, SpoilingTarget("share"), manner=INSPECT)
    (verdict,) = verdicts_of(MODEL, [run], TOLERANCE)
    text = "\n".join(step_lines(Trial(program, run, verdict, "s", TOLERANCE)))
    assert "new states shown" in " ".join(text.split())
    assert f"parted    wrong-state (sequence 0, position 8): conv state of layer {LAYER} off by" in text
    assert f"state     conv of layer {LAYER}, [32, 2]; 1 of 64 numbers differ" in text
    assert ", given 3.0000" in text
    assert "3  decode" not in text


def test_an_inspection_knows_whose_it_is() -> None:
    run = execute(parse_program("model lfm2 seed=0; decode 0:3 1:2; decode 1:1; drop 0"), NUMBA, manner=INSPECT)
    assert run.inspections[0] == Inspection(0, 0, run.inspections[0].log, 2, "self", run.inspections[0].shown)
    assert [(own.operation_index, own.sequence, own.position, own.relation) for own in run.inspections[1:]] == [
        (0, 1, 1, "self"),
        (0, 2, -1, "other"),
        (1, 1, 2, "self"),
    ]
