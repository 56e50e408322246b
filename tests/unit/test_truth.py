"""The engine as its own truth: what it sees, what it cannot see, what is decoded for it, and what happens when it fails.

Rules
- The engine is our own cache with planted misbehaviour, in this process; noise is given, not measured, but where it is the subject.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

TESTS = Path(__file__).parent.parent
FOLDERS = [str(TESTS), str(TESTS / "fixtures")]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

import faulty  # noqa: E402
from faulty import FaultySession, FaultyTarget  # noqa: E402
from statedrift.cli.application import run as run_command  # noqa: E402
from statedrift.cli.explaining import step_lines  # noqa: E402
from statedrift.cli.fuzzing import checked_oracle, checked_settings  # noqa: E402
from statedrift.cli.given import Given, replay_words  # noqa: E402
from statedrift.fuzz import calibration  # noqa: E402
from statedrift.fuzz.calibration import measure_own_noise  # noqa: E402
from statedrift.fuzz.engine_child import Failed  # noqa: E402
from statedrift.fuzz.execution import Run, execute  # noqa: E402
from statedrift.fuzz.pair import open_bench  # noqa: E402
from statedrift.fuzz.sandbox import Death  # noqa: E402
from statedrift.fuzz.trial import Bench  # noqa: E402
from statedrift.fuzz.truth import PLAIN_SETTING, EngineTruth, Form, NoTruth, Setting, settings_of, truth_program  # noqa: E402
from statedrift.oracle.recompute import use_one_thread  # noqa: E402
from statedrift.spec.configuration import CacheConfiguration  # noqa: E402
from statedrift.spec.errors import EngineAbort, UnavailableError, UsageError  # noqa: E402
from statedrift.spec.families import ENGINE_ONLY  # noqa: E402
from statedrift.spec.models import Model  # noqa: E402
from statedrift.spec.operations import Decode  # noqa: E402
from statedrift.spec.programs import Program, parse_program  # noqa: E402
from statedrift.spec.target import Batch, Decoded  # noqa: E402
from statedrift.spec.verdicts import Verdict, refused  # noqa: E402
from statedrift.store.campaigns import Noise  # noqa: E402
from statedrift.targets.numba import TARGET as SOUND  # noqa: E402

MODEL = Model("lfm2", 0)
QUIET = {MODEL: Noise(0.0, 1e-4, 200)}
ROLLED_BACK = "model lfm2 seed=0; decode 0:5; rollback 0 2; decode 0:1/1"
PLAIN = "model lfm2 seed=0; decode 0:5; share 0 1; decode 1:2/1; decode 0:1"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    use_one_thread()


class _Session(FaultySession):
    """A session that is right but for what its target does with a decode."""

    def __init__(self, target: "_Target", configuration: CacheConfiguration) -> None:
        super().__init__(SOUND.open(MODEL, msgspec.structs.replace(configuration, kv="f32", flash=0)), frozenset())
        self.target = target
        self.configuration = configuration

    def decode(self, batch: Batch) -> Decoded:
        return self.target.decoded(self, batch, super().decode)


class _Target(FaultyTarget):
    def __init__(self, decoded: Any) -> None:
        super().__init__()
        self.decoded = decoded
        self.opened: list[CacheConfiguration] = []

    def open(self, model: Model, configuration: CacheConfiguration) -> _Session:
        self.opened.append(configuration)
        return _Session(self, configuration)


def always_wrong(session: _Session, batch: Batch, decode: Any) -> Decoded:
    decoded: Decoded = decode(batch)
    return Decoded(decoded.outcome, None if decoded.rows is None else decoded.rows * np.float32(1.3))


def bench_of(target: Any, oracle: str = "engine", noise: dict[Model, Noise] = QUIET) -> Bench:
    bench = Bench(target, oracle=oracle)
    bench.set_noise(noise)
    return bench


# --- judging -------------------------------------------------------------------------------------------------------------------


def test_a_fault_of_the_state_is_seen_without_a_recompute_of_ours() -> None:
    with bench_of(faulty.ROLLBACK) as bench:
        wrong, right = bench.try_programs([parse_program(ROLLED_BACK), parse_program(PLAIN)])
    assert (wrong.verdict.kind, wrong.verdict.operation_index, wrong.verdict.sequence) == ("wrong-output", 2, 0)
    assert (right.verdict.kind, right.verdict.error) == ("ok", pytest.approx(0.0, abs=1e-5))


def test_both_oracles_come_to_the_same_verdict_and_signature() -> None:
    trials = []
    for oracle in ("own", "engine"):
        with bench_of(faulty.ROLLBACK, oracle) as bench:
            trials.append(bench.try_program(parse_program(ROLLED_BACK)))
    own, engine = trials
    assert own.signature == engine.signature
    assert own.verdict.error == pytest.approx(engine.verdict.error, rel=1e-3)


def test_an_engine_that_is_wrong_in_the_same_way_every_time_is_not_seen() -> None:
    target = _Target(always_wrong)
    with bench_of(target) as bench:
        assert bench.try_program(parse_program(PLAIN)).verdict.kind == "ok"
    with bench_of(target, "own") as bench:
        assert bench.try_program(parse_program(PLAIN)).verdict.kind == "wrong-output"


def test_hidden_states_are_held_to_hidden_states() -> None:
    text = "model lfm2 seed=0; cache outputs=embeddings; decode 0:5; rollback 0 2; decode 0:1/1"
    with bench_of(faulty.ROLLBACK) as bench:
        trial = bench.try_program(parse_program(text))
    assert trial.verdict.kind == "wrong-output"
    assert trial.verdict.reason.startswith("hidden states")


def test_answers_and_positions_are_judged_as_ever() -> None:
    with bench_of(faulty.KEEP_BESIDE_NOBODY) as bench:
        trial = bench.try_program(parse_program("model lfm2 seed=0; decode 0:2; keep 0"))
    assert trial.verdict.kind == "bad-refusal"


@pytest.mark.parametrize("reason", ["no room", ""])
def test_a_truth_that_cannot_be_had_makes_the_program_unknown(reason: str) -> None:
    def refusing(session: _Session, batch: Batch, decode: Any) -> Decoded:
        return Decoded(refused(reason)) if session.configuration.n_seq_max == 1 else decode(batch)

    with bench_of(_Target(refusing)) as bench:
        trial = bench.try_program(parse_program(PLAIN))
    assert trial.verdict.kind == "unknown"
    assert "could not test: the target's own recompute of the log failed" in trial.verdict.reason
    assert reason in trial.verdict.reason
    assert trial.signature is None
    assert any("could not test" in line for line in step_lines(trial))


def test_what_went_wrong_before_a_truth_is_missing_still_counts() -> None:
    def refusing(session: _Session, batch: Batch, decode: Any) -> Decoded:
        if session.configuration.n_seq_max == 1 and len(batch.tokens) > 4:
            return Decoded(refused("too long"))
        decoded: Decoded = decode(batch)
        is_spoiled = session.configuration.n_seq_max > 1 and len(batch.tokens) == 2
        return Decoded(decoded.outcome, decoded.rows * np.float32(1.5)) if is_spoiled and decoded.rows is not None else decoded

    with bench_of(_Target(refusing)) as bench:
        trial = bench.try_program(parse_program("model lfm2 seed=0; decode 0:2; decode 1:9"))
    assert (trial.verdict.kind, trial.verdict.operation_index) == ("wrong-output", 0)


def test_a_truth_that_is_not_finite_is_none() -> None:
    def infinite(session: _Session, batch: Batch, decode: Any) -> Decoded:
        decoded: Decoded = decode(batch)
        assert decoded.rows is not None
        return Decoded(decoded.outcome, np.full_like(decoded.rows, np.nan))

    with bench_of(_Target(infinite)) as bench:
        trial = bench.try_program(parse_program(PLAIN))
    assert (trial.verdict.kind, "not finite" in trial.verdict.reason) == ("unknown", True)


def test_the_step_view_shows_the_engines_own_rows_as_the_truth() -> None:
    with bench_of(faulty.ROLLBACK) as bench:
        trial = bench.try_program(parse_program(ROLLED_BACK))
    lines = step_lines(trial)
    assert any("expected" in line for line in lines)
    assert any("off by at most" in line for line in lines)
    assert trial.truths[-1].shape == (1, 64)


# --- what is decoded -----------------------------------------------------------------------------------------------------------


def truth_that_counts() -> tuple[EngineTruth, list[Program]]:
    asked: list[Program] = []

    def run_all(programs: Sequence[Program]) -> list[Run | Death | Failed]:
        asked.extend(programs)
        return [execute(program, SOUND) for program in programs]

    return EngineTruth(run_all), asked


def tokens_of(program: Program) -> list[int]:
    return [token for operation in program.operations if isinstance(operation, Decode) for token in operation.items[0].tokens or ()]


def test_a_log_that_another_extends_is_not_decoded_by_itself() -> None:
    truth, asked = truth_that_counts()
    program = parse_program("model lfm2 seed=0; decode 0:[1,2]; decode 0:[3]; share 0 1; decode 0:[4] 1:[5]; drop 0; decode 0:[1]")
    run = execute(program, SOUND)
    (rows,) = truth.rows_of_spans([program], [run])
    assert sorted(map(tokens_of, asked)) == [[1, 2, 3, 4], [1, 2, 3, 5]]
    for span, own in zip(run.spans, rows, strict=True):
        data, width = run.rows[span.operation_index]
        given = np.frombuffer(data, np.float32).reshape(-1, width)[list(span.places)]
        assert np.abs(given - own).max() < 1e-5


def test_what_was_decoded_is_not_decoded_again() -> None:
    truth, asked = truth_that_counts()
    program = parse_program("model lfm2 seed=0; decode 0:[1,2,3,4]")
    shorter = parse_program("model lfm2 seed=0; decode 0:[1,2,3]")
    first = truth.rows_of_spans([program], [execute(program, SOUND)])
    again = truth.rows_of_spans([shorter, program], [execute(shorter, SOUND), execute(program, SOUND)])
    assert len(asked) == 1
    assert isinstance(first[0][0], np.ndarray)
    assert isinstance(again[0][0], np.ndarray)
    assert (first[0][0][:3] == again[0][0]).all()


def test_hidden_states_models_and_settings_have_truths_of_their_own() -> None:
    truth, asked = truth_that_counts()
    texts = ["model lfm2 seed=0; decode 0:[1]", "model lfm2 seed=1; decode 0:[1]", "model lfm2 seed=0; decode 0:[1] outputs=embeddings"]
    programs = list(map(parse_program, texts))
    rows = truth.rows_of_spans(programs, [execute(program, SOUND) for program in programs])
    assert len(asked) == 3
    assert [own[0].shape for own in rows if isinstance(own[0], np.ndarray)] == [(1, 64), (1, 64), (1, 32)]


def test_a_truth_is_one_sequence_without_snapshots_and_one_decode() -> None:
    program = truth_program(Form(MODEL, Setting("f16", 1), True), tuple([7] * 300))
    cache = program.cache
    assert (cache.n_seq_max, cache.n_rs_seq, cache.start, cache.outputs) == (1, 0, "fresh", "embeddings")
    assert (cache.kv, cache.flash) == ("f16", 1)
    assert cache.n_ctx == cache.n_ubatch == 512
    assert len(program.operations) == 1


def test_a_log_that_is_longer_than_a_decode_takes_as_few_decodes_as_it_can() -> None:
    program = truth_program(Form(MODEL, PLAIN_SETTING, False), tuple([7] * 5000))
    assert [operation.items[0].token_count for operation in program.operations if isinstance(operation, Decode)] == [4096, 904]


def test_a_session_of_another_setting_has_its_own_truth() -> None:
    target = _Target(lambda session, batch, decode: decode(batch))
    program = parse_program("model lfm2 seed=0; cache kv=f16; decode 0:3; reopen kv=f32 flash=1; decode 0:3")
    assert settings_of(program) == [Setting("f16", 0), Setting("f32", 1)]
    with bench_of(target) as bench:
        bench._noise |= {(MODEL, setting): Noise(0.0, 1e-4, 200) for setting in settings_of(program)}
        assert bench.try_program(program).verdict.kind == "ok"
    truths = [configuration for configuration in target.opened if configuration.n_seq_max == 1]
    assert {(configuration.kv, configuration.flash) for configuration in truths} == {("f16", 0), ("f32", 1)}


# --- a truth that fails, or comes out different ----------------------------------------------------------------------------------

TWO_LOGS = "model lfm2 seed=0; decode 0:2; decode 0:3; decode 0:4"
SPOILED = "model lfm2 seed=0; decode 0:2; share 0 1; decode 1:2; decode 1:6"


def of_truths(longest: int, answer: Any, spoils: bool = True) -> Any:
    """What a target does that answers a truth's decode of more than `longest` tokens with `answer`; else it is right, but, with `spoils`, for
    decodes of two tokens that are not a sequence's first."""

    def decoded(session: _Session, batch: Batch, decode: Any) -> Decoded:
        if session.configuration.n_seq_max == 1 and len(batch.tokens) > longest:
            own: Decoded = answer(session, batch, decode)
            return own
        given: Decoded = decode(batch)
        is_spoiled = spoils and session.configuration.n_seq_max > 1 and len(batch.tokens) == 2 and batch.positions[0] > 0
        return Decoded(given.outcome, given.rows * np.float32(1.5)) if is_spoiled and given.rows is not None else given

    return decoded


def last_row_not_finite(session: _Session, batch: Batch, decode: Any) -> Decoded:
    decoded: Decoded = decode(batch)
    assert decoded.rows is not None
    rows = decoded.rows.copy()
    rows[-1] = np.nan
    return Decoded(decoded.outcome, rows)


def dying(session: _Session, batch: Batch, decode: Any) -> Decoded:
    raise EngineAbort("out of ideas")


def refusing_it(session: _Session, batch: Batch, decode: Any) -> Decoded:
    return Decoded(refused("no"))


def all_not_finite(session: _Session, batch: Batch, decode: Any) -> Decoded:
    decoded: Decoded = decode(batch)
    assert decoded.rows is not None
    return Decoded(decoded.outcome, np.full_like(decoded.rows, np.inf))


@pytest.mark.parametrize("answer", [dying, refusing_it, all_not_finite])
def test_a_truth_that_fails_leaves_the_shorter_logs_their_own(answer: Any) -> None:
    with bench_of(_Target(of_truths(4, answer))) as bench:
        trial = bench.try_program(parse_program(SPOILED))
        right = bench.try_program(parse_program(TWO_LOGS))
    assert (trial.verdict.kind, trial.verdict.operation_index) == ("wrong-output", 2)
    assert (right.verdict.kind, right.verdict.operation_index) == ("unknown", 1)


def test_a_row_that_is_not_finite_leaves_the_rows_before_it_their_truth() -> None:
    def wrong_and_not_known(session: _Session, batch: Batch, decode: Any) -> Decoded:
        if session.configuration.n_seq_max == 1:
            return last_row_not_finite(session, batch, decode)
        decoded: Decoded = decode(batch)
        assert decoded.rows is not None
        rows = decoded.rows.copy()
        rows[-3] *= np.float32(1.5)
        return Decoded(decoded.outcome, rows)

    with bench_of(_Target(wrong_and_not_known)) as bench:
        trial = bench.try_program(parse_program("model lfm2 seed=0; decode 0:9"))
        lines = step_lines(trial)
    assert (trial.verdict.kind, trial.verdict.position) == ("wrong-output", 6)
    assert any("after token 7" in line for line in lines)
    with bench_of(_Target(of_truths(4, last_row_not_finite, spoils=False))) as bench:
        trial = bench.try_program(parse_program("model lfm2 seed=0; decode 0:9"))
    assert (trial.verdict.kind, trial.verdict.error) == ("unknown", None)
    assert "not finite" in trial.verdict.reason


def test_a_failure_that_passes_is_not_remembered() -> None:
    failures = iter([True])

    def once(session: _Session, batch: Batch, decode: Any) -> Decoded:
        if session.configuration.n_seq_max == 1 and next(failures, False):
            raise EngineAbort("out of memory")
        decoded: Decoded = decode(batch)
        return decoded

    program = parse_program("model lfm2 seed=0; decode 0:4")
    with bench_of(_Target(once)) as bench:
        assert [bench.try_program(program).verdict.kind for _ in range(3)] == ["unknown", "ok", "ok"]


def test_a_truth_that_comes_out_different_the_second_time_makes_nothing_wrong() -> None:
    asked = iter(range(1 << 20))

    def restless(session: _Session, batch: Batch, decode: Any) -> Decoded:
        decoded: Decoded = decode(batch)
        return shifted(1e-3 * next(asked), decoded) if session.configuration.n_seq_max == 1 else decoded

    next(asked)
    program = parse_program("model lfm2 seed=0; decode 0:4")
    with bench_of(_Target(restless)) as bench:
        trials = [bench.try_program(program) for _ in range(3)]
    assert [trial.verdict.kind for trial in trials] == ["unknown"] * 3
    assert all("a second time" in trial.verdict.reason and trial.signature is None for trial in trials)


def test_a_truth_that_dies_the_second_time_makes_nothing_wrong() -> None:
    asked = iter(range(1 << 20))

    def once(session: _Session, batch: Batch, decode: Any) -> Decoded:
        if session.configuration.n_seq_max == 1 and next(asked) % 2:
            raise EngineAbort("out of ideas")
        decoded: Decoded = decode(batch)
        return decoded if session.configuration.n_seq_max == 1 else shifted(0.1, decoded)

    with bench_of(_Target(once)) as bench:
        verdict = bench.try_program(parse_program("model lfm2 seed=0; decode 0:4")).verdict
    assert verdict.kind == "unknown"
    assert "out of ideas" in verdict.reason


def test_only_what_a_divergence_rests_on_is_decoded_a_second_time() -> None:
    target = _Target(of_truths(1 << 20, dying))
    with bench_of(target) as bench:
        bench.try_program(parse_program(TWO_LOGS))
        right = sum(configuration.n_seq_max == 1 for configuration in target.opened)
        assert bench.try_program(parse_program(SPOILED)).verdict.kind == "wrong-output"
    assert right == 1
    assert sum(configuration.n_seq_max == 1 for configuration in target.opened) == right + 2


# --- the target's largest batch --------------------------------------------------------------------------------------------------


def test_a_truth_is_cut_at_the_targets_largest_batch() -> None:
    class Small(_Target):
        def open(self, model: Model, configuration: CacheConfiguration) -> _Session:
            session = super().open(model, configuration)
            session.capabilities = msgspec.structs.replace(session.capabilities, n_batch=5)
            return session

    sizes: list[int] = []

    def decoded(session: _Session, batch: Batch, decode: Any) -> Decoded:
        if session.configuration.n_seq_max == 1:
            sizes.append(len(batch.tokens))
        given: Decoded = decode(batch)
        return given

    with bench_of(Small(decoded)) as bench:
        verdict = bench.try_program(parse_program("model lfm2 seed=0; decode 0:4; decode 0:4; decode 0:4")).verdict
    assert verdict.kind == "ok"
    assert sizes == [5, 5, 2]


# --- settings --------------------------------------------------------------------------------------------------------------------


def of_settings(wrong_by: dict[str, float]) -> Any:
    """Decodes that are wrong by so much in sessions of several sequences with such cells."""

    def decoded(session: _Session, batch: Batch, decode: Any) -> Decoded:
        given: Decoded = decode(batch)
        is_truth = session.configuration.n_seq_max == 1
        return given if is_truth else shifted(wrong_by.get(session.configuration.kv, 0.0), given)

    return decoded


@pytest.mark.parametrize(
    ("wrong_by", "kind", "index", "tolerance"),
    [
        ({"f32": 1e-3}, "wrong-output", 0, 1e-4),
        ({"f16": 1e-3}, "ok", None, 1e-2),
        ({"f32": 5e-5, "f16": 1e-3}, "ok", None, 1e-4),
        ({"f16": 0.1}, "wrong-output", 2, 1e-2),
    ],
)
def test_every_row_is_held_to_the_tolerance_of_its_own_session(
    wrong_by: dict[str, float], kind: str, index: int | None, tolerance: float
) -> None:
    program = parse_program("model lfm2 seed=0; decode 0:3; reopen kv=f16; decode 0:3")
    with bench_of(_Target(of_settings(wrong_by))) as bench:
        bench._noise |= {(MODEL, Setting("f16", 0)): Noise(5e-4, 1e-2, 200)}
        trial = bench.try_program(program)
        lines = step_lines(trial)
    assert (trial.verdict.kind, trial.verdict.operation_index) == (kind, index)
    assert trial.verdict.tolerance == trial.tolerance == tolerance
    if kind == "ok":
        assert [sum(f"(tolerance {each})" in line for line in lines) for each in (0.0001, 0.01)] == [1, 1]


# --- noise ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "LOG_TOKENS_MAX", 6)
    monkeypatch.setattr(calibration, "LOG_COUNT", 12)
    monkeypatch.setattr(calibration, "CUT_UBATCH", 2)


def measured(decoded: Any, setting: Setting = PLAIN_SETTING) -> Noise:
    target = _Target(decoded)
    bench = Bench(target, oracle="engine")
    assert bench.truth is not None
    return measure_own_noise(MODEL, setting, lambda programs: [execute(program, target) for program in programs], bench.truth)


def shifted(by: float, decoded: Decoded) -> Decoded:
    """The rows, with an error of `by` in each of them."""
    assert decoded.rows is not None
    rows = decoded.rows.copy()
    rows[:, 0] += np.float32(by) * (1 + np.sqrt(np.mean(rows**2, axis=1)))
    return Decoded(decoded.outcome, rows)


@pytest.mark.usefixtures("few_tokens")
def test_the_floor_is_what_steps_differ_from_the_whole() -> None:
    noise = measured(lambda session, batch, decode: shifted(5e-5 if batch.positions[0] else 0.0, decode(batch)))
    assert noise.floor == pytest.approx(5e-5, rel=0.05)


@pytest.mark.usefixtures("few_tokens")
def test_the_floor_is_what_cut_decodings_differ_from_the_whole() -> None:
    noise = measured(lambda session, batch, decode: shifted(3e-5 if session.configuration.n_ubatch == 2 else 0.0, decode(batch)))
    assert noise.floor == pytest.approx(3e-5, rel=0.05)


@pytest.mark.usefixtures("few_tokens")
def test_steps_that_are_quite_wrong_are_a_fault_and_no_noise() -> None:
    noise = measured(lambda session, batch, decode: shifted(0.1 if batch.positions[0] else 0.0, decode(batch)))
    assert noise.floor < 1e-5


@pytest.mark.usefixtures("few_tokens")
def test_an_engine_that_never_answers_twice_the_same_could_not_be_tested() -> None:
    count = iter(range(1 << 20))
    with pytest.raises(UnavailableError, match="different bits"):
        measured(lambda session, batch, decode: shifted(1e-6 * next(count), decode(batch)))


@pytest.mark.usefixtures("few_tokens")
def test_an_engine_whose_plain_decodings_fail_could_not_be_tested() -> None:
    def refusing(session: _Session, batch: Batch, decode: Any) -> Decoded:
        return Decoded(refused("no")) if len(batch.tokens) > 3 else decode(batch)

    with pytest.raises(UnavailableError, match="plain decoding"):
        measured(refusing)


@pytest.mark.usefixtures("few_tokens")
def test_whole_decodings_that_are_not_finite_could_not_be_tested() -> None:
    with pytest.raises(UnavailableError, match="not finite"):
        measured(lambda session, batch, decode: all_not_finite(session, batch, decode) if len(batch.tokens) > 4 else decode(batch))


@pytest.mark.usefixtures("few_tokens")
def test_many_rows_that_hang_on_a_close_selection_could_not_be_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def many(model: Model, runs: Sequence[Run], tolerance: float) -> tuple[int, int]:
        asked.append(tolerance)
        return 2, 100

    monkeypatch.setattr(calibration, "unjudged_rows", many)
    with pytest.raises(UnavailableError, match=r"2.00% of all rows"):
        measured(lambda session, batch, decode: decode(batch), Setting("f16", 0))
    assert asked == [1e-5]


def test_a_death_and_a_failure_are_no_truths() -> None:
    death = Death(Verdict("crash", 0, reason="SIGSEGV"), ())
    program = parse_program("model lfm2 seed=0; decode 0:3")
    for result, words in [(death, "SIGSEGV"), (Failed("usage", "no such model"), "no such model")]:
        truth = EngineTruth(lambda programs, result=result: [result] * len(programs))  # type: ignore[misc]
        ((row,),) = truth.rows_of_spans([program], [execute(program, SOUND)])
        assert isinstance(row, NoTruth)
        assert words in row.reason


# --- words ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fuzz", "--target", "numba", "--oracle", "engine", "--inspect"], "--inspect"),
        (["fuzz", "--target", "numba", "--oracle", "engine", "--against", "llamacpp"], "--against"),
        (["fuzz", "--target", "numba", "--oracle", "hearsay"], "own, engine"),
        (["replay", PLAIN, "--target", "numba", "--oracle", "engine", "--inspect"], "--inspect"),
        (["explain", PLAIN, "--target", "numba", "--oracle", "engine", "--against", "numba"], "--against"),
        (["reduce", PLAIN, "--target", "numba", "--oracle", "hearsay"], "own, engine"),
        (["fuzz", "--target", "numba", "--family", "nothing"], "arwkv7"),
        (["size", "--family", "arwkv7"], "--layers"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(arguments) == 64
    _, err = capsys.readouterr()
    assert words in err
    assert "Traceback" not in err


def test_half_precision_cells_are_judged_by_the_engine_only() -> None:
    with bench_of(faulty.ROLLBACK, "own") as bench, pytest.raises(UnavailableError, match="--oracle engine"):
        bench.try_program(parse_program("model lfm2 seed=0; cache kv=f16; decode 0:1"))


def test_a_family_without_a_recompute_says_who_can_judge_it() -> None:
    class Anything(FaultyTarget):
        families = ("arwkv7",)

    with Bench(Anything()) as bench, pytest.raises(UnavailableError, match="judge it with `--oracle engine`"):
        bench.noise(Model("arwkv7"))


def test_only_modelled_families_are_offered_to_our_own_oracle() -> None:
    assert not set(checked_settings("llamacpp", (), None, 1, 0, 1, None).families) & set(ENGINE_ONLY)
    assert set(ENGINE_ONLY) <= set(checked_settings("llamacpp", (), None, 1, 0, 1, None, oracle="engine").families)
    assert checked_oracle("own", "llamacpp", False) == "own"


def test_an_oracle_that_does_not_exist_makes_no_bench() -> None:
    with pytest.raises(UsageError, match="own, engine"):
        open_bench("numba", oracle="hearsay")


def test_the_replay_line_and_the_object_say_who_judged(capsys: pytest.CaptureFixture[str]) -> None:
    given = Given(parse_program(PLAIN), "p.drift")
    assert replay_words(given, "llamacpp", oracle="engine") == "statedrift replay p.drift --target llamacpp --oracle engine"
    assert "--oracle" not in replay_words(given, "llamacpp")
