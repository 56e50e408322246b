"""Steering: a fault that is known does not hide the others, and nothing else becomes of it.

Rules
- Ten faults, three of them common (tests/fixtures/ten_faults.py); with the same programs to spend, a campaign that steers finds more of them.
- Measured in 960 programs, seeds 0 to 2: 9, 10 and 10 signatures with steering, 7, 8 and 7 without.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parent.parent
FOLDERS = [str(TESTS), str(TESTS / "fixtures")]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

from statedrift.fuzz import known as known_module  # noqa: E402
from statedrift.fuzz import trial as trial_module  # noqa: E402
from statedrift.fuzz.campaign import Settings, run_campaign  # noqa: E402
from statedrift.fuzz.execution import Run  # noqa: E402
from statedrift.fuzz.generation import generate  # noqa: E402
from statedrift.fuzz.judgement import Judged  # noqa: E402
from statedrift.spec.models import Model  # noqa: E402
from statedrift.spec.operations import operation_name  # noqa: E402
from statedrift.spec.programs import Program  # noqa: E402
from statedrift.spec.verdicts import Verdict  # noqa: E402
from statedrift.store.campaigns import Campaign, Noise  # noqa: E402

LFM2 = Model("lfm2")
SEEDS = range(600)
CANARY = "statedrift.fuzz.canary:FREQUENT"


@pytest.fixture
def answers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are not judged: the faults show in answers, and the target computes nothing."""

    def as_answered(model: Model, runs: Sequence[Run], *rest: object) -> list[Judged]:
        return [Judged(run.verdict or Verdict("ok"), np.zeros(0)) for run in runs]

    monkeypatch.setattr(trial_module, "judge", as_answered)
    monkeypatch.setattr(trial_module.Bench, "noise", lambda bench, model: Noise(0.0, 1.0, 0))
    monkeypatch.setattr(trial_module.Bench, "tolerance", lambda bench, model: 1.0)


def ten_faults(seed: int, steer: bool) -> Campaign:
    return run_campaign(Settings("ten_faults:TARGET", ("lfm2",), programs=960, seed=seed, steer=steer))


@pytest.mark.usefixtures("answers_only")
def test_with_steering_more_faults_are_found_in_the_same_number_of_programs() -> None:
    steered = [{finding.signature for finding in ten_faults(seed, True).findings} for seed in (0, 2)]
    plain = [{finding.signature for finding in ten_faults(seed, False).findings} for seed in (0, 2)]
    assert all(len(more) > len(fewer) for more, fewer in zip(steered, plain, strict=True))
    assert sum(map(len, steered)) >= sum(map(len, plain)) + 3


def test_one_fault_is_found_in_the_same_way_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_module, "EXPLAINED_REDUCTIONS_MAX", 2)  # many reductions of what it explains only take time
    steered, plain = (run_campaign(Settings(CANARY, ("lfm2",), programs=192, seed=5, steer=steer)) for steer in (True, False))
    for done in (steered, plain):
        assert len(done.findings) == 1
        assert done.findings[0].seen == done.account.verdicts["wrong-output"]
    same = ("signature", "title", "program", "original", "verdict", "documented", "found_after_programs", "reproduced", "answers")
    assert [getattr(steered.findings[0], name) for name in same] == [getattr(plain.findings[0], name) for name in same]
    assert 0 < steered.account.verdicts["wrong-output"] < plain.account.verdicts["wrong-output"]
    assert plain.account.known == ()


def names(program: Program) -> set[str]:
    return {operation_name(operation) for operation in program.operations}


def generated(*avoided: tuple[str, ...]) -> list[Program]:
    return [generate(seed, LFM2, avoided=avoided) for seed in SEEDS]


@pytest.mark.parametrize("context", [("rollback",), ("restore", "save"), ("rollback", "share"), ("keep",), ("cancel",)])
def test_what_is_known_comes_together_less_often_but_not_never(context: tuple[str, ...]) -> None:
    before = sum(names(program) >= set(context) for program in generated())
    after = sum(names(program) >= set(context) for program in generated(context))
    assert 0.1 * before <= after <= 0.5 * before


def test_a_program_without_what_is_known_is_as_it_would_have_been() -> None:
    plain, steered = generated(), generated(("restore", "save"))
    assert sum(one == other for one, other in zip(plain, steered, strict=True)) > 0.4 * len(plain)
    assert generated(()) == plain == generated(("decode",)) == generated(("a word of a later version",))


def test_all_that_is_known_can_be_avoided_at_once() -> None:
    contexts = [(name,) for name in ("rollback", "share", "drop", "keep", "clear", "shift", "divide", "reopen", "cancel", "decode-coupled")]
    programs = generated(*contexts)
    assert sum(names(program) == {"decode"} for program in programs) > 0
    assert {name for program in programs for name in names(program)} >= {"rollback", "share", "save", "restore"}
