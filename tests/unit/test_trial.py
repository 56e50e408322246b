"""Trying programs on a target: what each comes to, whoever is at fault."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
FOLDERS = [str(TESTS), str(TESTS / "fixtures")]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

import fake_engine as fake  # noqa: E402
from statedrift.fuzz import calibration, trial  # noqa: E402
from statedrift.fuzz.canary import FrequentCanaryTarget  # noqa: E402
from statedrift.fuzz.trial import Bench, answers_of  # noqa: E402
from statedrift.oracle.recompute import use_one_thread  # noqa: E402
from statedrift.spec.configuration import CacheConfiguration  # noqa: E402
from statedrift.spec.errors import UnavailableError, UsageError  # noqa: E402
from statedrift.spec.models import Model  # noqa: E402
from statedrift.spec.programs import Program, parse_program  # noqa: E402
from statedrift.spec.target import Session  # noqa: E402
from statedrift.store.campaigns import Noise  # noqa: E402
from statedrift.targets.llamacpp import LlamaTarget  # noqa: E402

import statedrift  # noqa: E402

CANARY = "statedrift.fuzz.canary:FREQUENT"
QUIET = {Model(family, seed): Noise(0.0, 1e-4, 0) for family in ("lfm2", "mamba2") for seed in range(5)}
DEAF = {model: Noise(0.0, float("inf"), 0) for model in QUIET}
"""For a target that computes nothing: every finite row is right."""
RIGHT = "model lfm2 seed=0; decode 0:5; share 0 1; decode 1:1"
WRONG = "model lfm2 seed=0; decode 0:5; rollback 0 2; decode 0:1"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    use_one_thread()


def deed(token: int) -> Program:
    return parse_program(f"model lfm2 seed=0; decode 0:[{fake.GOOD}] 1:[{fake.GOOD}]; keep 0; decode 0:[{token}]; drop 0")


@pytest.fixture(scope="module")
def native() -> Iterator[Bench]:
    with Bench("fake_engine:TARGET") as bench:
        bench.set_noise(DEAF)
        yield bench


def test_programs_of_several_models_are_judged_in_their_order() -> None:
    texts = [
        WRONG,
        "model mamba2 seed=1; decode 0:5; rollback 0 2; decode 0:3",
        "model lfm2 seed=0; decode 0:3",
        "model lfm2 seed=1; decode 0:4; rollback 0 1; decode 0:1",
        "model mamba2 seed=0; drop 0",
    ]
    with Bench(CANARY) as bench:
        bench.set_noise(QUIET)
        trials = bench.try_programs(list(map(parse_program, texts)))
    assert [trial.program for trial in trials] == list(map(parse_program, texts))
    assert [trial.verdict.kind for trial in trials] == ["wrong-output", "wrong-output", "ok", "wrong-output", "ok"]
    assert [trial.signature for trial in trials] == [
        f"{CANARY}/lfm2 wrong-output at decode",
        f"{CANARY}/mamba2 wrong-output at decode",
        None,
        f"{CANARY}/lfm2 wrong-output at decode",
        None,
    ]


def test_time_that_was_spent_is_counted() -> None:
    with Bench(CANARY) as bench:
        bench.set_noise(QUIET)
        bench.try_program(parse_program(WRONG))
        assert bench.spent.running > 0
        assert bench.spent.judging > 0


def test_a_crash_has_the_run_before_it(native: Bench) -> None:
    crashed = native.try_program(deed(fake.ASSERTION))
    assert crashed.verdict.kind == "crash"
    assert crashed.signature == "fake_engine:TARGET/lfm2 crash at decode [cache.cpp ASSERT(cells > ) failed]"
    assert "cache.cpp:12: ASSERT(cells > 0) failed" in crashed.log
    assert crashed.run is not None
    assert [step.outcome.word for step in crashed.run.steps] == ["accepted", "accepted", "crash"]
    assert crashed.run.steps[1].positions[:2] == ((0, 0), (-1, -1))


def test_a_crash_while_opening_has_a_run_without_steps(native: Bench) -> None:
    crashed = native.try_program(parse_program("model lfm2 seed=1; drop 0"))
    assert crashed.signature is not None
    assert "crash at open" in crashed.signature
    assert crashed.run is None  # opening dies over fresh memory, too


def test_one_death_in_a_batch_leaves_the_other_verdicts(native: Bench) -> None:
    trials = native.try_programs([deed(fake.GOOD), deed(fake.SEGFAULT), deed(fake.GOOD)])
    assert [trial.verdict.kind for trial in trials] == ["ok", "crash", "ok"]


@pytest.mark.parametrize("program", [deed(fake.USAGE), deed(fake.UNAVAILABLE), parse_program("model lfm2 seed=2; drop 0")])
def test_what_the_target_does_not_take_counts_against_nobody(native: Bench, program: Program) -> None:
    failed, after = native.try_programs([program, deed(fake.GOOD)])
    assert failed.verdict.kind in ("unknown", "harness-error")
    assert failed.verdict.reason
    assert failed.signature is None
    assert after.verdict.kind == "ok"


def test_a_fault_of_ours_counts_against_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    with Bench(CANARY) as bench:
        bench.set_noise(QUIET)
        monkeypatch.setattr(trial, "execute", fail)
        failed = bench.try_program(parse_program(WRONG))
    assert (failed.verdict.kind, failed.signature) == ("harness-error", None)
    assert failed.verdict.reason == "ZeroDivisionError: ours"


def test_answers_name_outcomes_and_last_positions(native: Bench) -> None:
    answers = answers_of(native.try_program(deed(fake.GOOD)))
    assert [answer.outcome.word for answer in answers] == ["accepted"] * 4
    assert [answer.last_positions[:2] for answer in answers] == [(0, 0), (0, -1), (1, -1), (-1, -1)]


# --- noise -----------------------------------------------------------------------------------------------------------------


def test_a_measured_floor_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Bench("numba") as bench:
        first = bench.noise(Model("lfm2"))
    monkeypatch.setattr(trial, "measure_noise", None)
    with Bench("numba") as bench:
        assert bench.noise(Model("lfm2")) == first
    for name in (CANARY, "elsewhere:TARGET"):
        with Bench(name) as bench:
            calibration.remember_noise(name, bench.version, Model("lfm2"), first)
    with Bench(CANARY) as bench:  # it comes with statedrift
        assert bench.noise(Model("lfm2")) == first
    with Bench("elsewhere:TARGET") as bench, pytest.raises(TypeError):  # one in development changes under the same version
        bench.noise(Model("lfm2"))
    assert first.tolerance == max(20 * first.floor, 1e-5)
    assert first.log_count >= 200


def test_a_memory_that_is_damaged_or_cannot_be_written_is_only_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = (CANARY, "1", Model("lfm2"))
    calibration.remember_noise(*key, Noise(1e-7, 1e-5, 200))
    (memory,) = tmp_path.rglob("noise-*.json")
    for damaged in ("", "[]", '{"x": 1', memory.read_text().replace("floor", "flour")):
        memory.write_text(damaged)
        assert calibration.remembered_noise(*key) is None
        calibration.remember_noise(*key, Noise(1e-7, 1e-5, 200))
        assert calibration.remembered_noise(*key) == Noise(1e-7, 1e-5, 200)
    memory.unlink()
    memory.mkdir()
    calibration.remember_noise(*key, Noise(1e-7, 1e-5, 200))


def test_a_family_that_the_target_does_not_run_could_not_be_tested() -> None:
    class OnlyMamba:
        families = ("mamba2",)

    with Bench(CANARY) as bench:
        bench.target = OnlyMamba()  # type: ignore[assignment]
        with pytest.raises(UnavailableError, match=r"could not test: target .* does not run family lfm2; it runs mamba2"):
            bench.try_program(parse_program(WRONG))


def test_a_target_that_computes_nothing_could_not_be_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Bench("fake_engine:SILENT") as bench, pytest.raises(UnavailableError, match="could not test"):
        bench.noise(Model("lfm2"))


def test_a_target_that_dies_in_plain_decodings_could_not_be_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Bench("fake_engine:TARGET") as bench, pytest.raises(UnavailableError, match=r"could not test: .* ended in a crash"):
        bench.noise(Model("lfm2", 1))


@pytest.mark.parametrize("line", ["cache kv=f16", "cache flash=1", "reopen kv=f16"])
def test_half_precision_could_not_be_tested(line: str) -> None:
    with Bench(CANARY) as bench:
        bench.set_noise(QUIET)
        with pytest.raises(UnavailableError, match="only the engine itself"):
            bench.try_program(parse_program(f"model lfm2 seed=0; {line}"))


@pytest.mark.parametrize("name", ["nothing", "fake_engine:NOWHERE", "no_such_module:TARGET"])
def test_a_target_that_is_not_there_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match=name.partition(":")[0]):
        Bench(name)


def test_check_judges_output_rows_too() -> None:
    assert statedrift.check(parse_program(RIGHT), "numba").kind == "ok"
    assert statedrift.check(parse_program(WRONG), CANARY).kind == "wrong-output"
    assert statedrift.check(parse_program(WRONG), FrequentCanaryTarget()).kind == "wrong-output"


def test_an_isolated_target_is_given_by_name() -> None:
    with pytest.raises(UsageError, match="give its name"):
        statedrift.check(parse_program(RIGHT), LlamaTarget())


def test_an_answer_that_is_no_outcome_is_an_error_that_says_so() -> None:
    class Talkative(FrequentCanaryTarget):
        def open(self, model: Model, configuration: CacheConfiguration) -> Session:
            session = super().open(model, configuration)
            session.share = lambda *arguments: True  # type: ignore[assignment,return-value]
            return session

    target = Talkative()
    trial._bench_of(target).set_noise(QUIET)
    verdict = statedrift.check(parse_program("model lfm2 seed=0; decode 0:2; share 0 1"), target)
    assert verdict.kind == "bad-refusal"
    assert "must be an Outcome, not bool" in verdict.reason
