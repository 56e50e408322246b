"""The doctor notices what makes verdicts worthless."""

import msgspec
import numpy as np
import pytest
from statedrift.cli import doctor
from statedrift.cli.doctor import Check, check_lines, determinism_check, doctor_command, probe_program
from statedrift.fuzz.execution import Run, execute
from statedrift.fuzz.trial import Trial
from statedrift.spec.errors import UnavailableError, UsageError
from statedrift.spec.models import Model
from statedrift.spec.verdicts import Verdict
from statedrift.targets.numba import TARGET


def trial_of(run: Run | None, verdict: Verdict) -> Trial:
    return Trial(probe_program(Model("lfm2")), run, verdict, None, 1e-5)


def test_equal_rows_are_deterministic_and_one_changed_bit_is_not() -> None:
    run = execute(probe_program(Model("lfm2")), TARGET)
    same = trial_of(run, Verdict("ok"))
    assert determinism_check("x", same, same).result == "ok"
    data, width = run.rows[0]
    rows = np.frombuffer(data, np.uint8).copy()
    rows[5] ^= 1
    other = trial_of(msgspec.structs.replace(run, rows={**run.rows, 0: (rows.tobytes(), width)}), Verdict("ok"))
    assert determinism_check("x", same, other).result == "failed"


def test_no_rows_are_not_deterministic() -> None:
    nothing = trial_of(None, Verdict("crash", 0, reason="it died"))
    assert determinism_check("x", nothing, nothing) == Check("x", "the same program twice gives the same rows", "failed", "it died")


@pytest.mark.parametrize(
    ("checks", "status"),
    [
        ([Check("a", "opens", "ok", ""), Check("planted fault", "is found", "ok", "")], 0),
        ([Check("a", "opens", "ok", ""), Check("b", "opens", "not here", ""), Check("planted fault", "is found", "ok", "")], 0),
        ([Check("a", "opens", "ok", ""), Check("planted fault", "is found", "failed", "")], 2),
        ([Check("a", "opens", "ok", ""), Check("a", "noise", "failed", "")], 2),
        ([Check("a", "opens", "not here", ""), Check("planted fault", "is found", "ok", "")], 2),
    ],
)
def test_the_status_follows_the_checks(
    checks: list[Check], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "all_checks", lambda names, named, families: iter(checks))
    assert doctor_command(None) == status
    text = capsys.readouterr().out
    assert ("all is well" in text) is (status == 0)
    assert text.startswith(doctor.versions_text() + "\n"), "versions stand first"


@pytest.mark.parametrize(("named", "result"), [(True, "failed"), (False, "not here")])
def test_a_missing_target_fails_only_when_it_was_named(named: bool, result: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise UnavailableError("not installed")

    monkeypatch.setattr(doctor, "Bench", missing)
    assert list(doctor.target_checks("numba", named)) == [Check("numba", "opens", result, "not installed")]  # type: ignore[arg-type]


def test_a_fault_that_is_not_found_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CANARY", "numba")
    monkeypatch.setattr(doctor, "CANARY_PROGRAMS", 3)
    assert doctor.planted_fault_check().result == "failed"


def test_a_planted_fault_is_found() -> None:
    assert doctor.planted_fault_check().result == "ok"


def test_a_check_is_one_line() -> None:
    assert check_lines(Check("numba lfm2", "noise", "ok", "floor 1e-06")) == ["ok        numba lfm2: noise: floor 1e-06"]


def test_a_family_that_was_named_is_the_only_one_looked_at() -> None:
    checks = list(doctor.target_checks("numba", True, ("mamba2",)))
    assert [check.subject for check in checks] == ["numba", "numba mamba2", "numba mamba2"]
    assert {check.result for check in checks} == {"ok"}


def test_a_target_without_the_family_that_was_named_fails() -> None:
    checks = list(doctor.target_checks("numba-llamacpp", True, ("qwen4exp",)))
    assert [(check.what, check.result) for check in checks] == [("opens", "ok"), ("is run", "failed")]


@pytest.mark.parametrize(("family", "told"), [("lfm3", "unknown family `lfm3`"), ("plamo2", "only an engine's own recompute can judge")])
def test_a_family_that_cannot_be_judged_is_said_at_once(family: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        doctor_command(None, (family,))
