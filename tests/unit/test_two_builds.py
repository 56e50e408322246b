"""Two builds of an engine: what the new one does and the old one does not is found, and nothing else."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

TESTS = Path(__file__).parent.parent
FOLDERS = [str(TESTS), str(TESTS / "fixtures")]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

from engine_in_builds import VARIABLE  # noqa: E402
from statedrift.cli.application import run  # noqa: E402
from statedrift.cli.fuzzing import checked_settings, status_of_campaign  # noqa: E402
from statedrift.fuzz import campaign as campaign_module  # noqa: E402
from statedrift.fuzz.campaign import Settings, run_campaign  # noqa: E402
from statedrift.fuzz.reduction import reduce_trial  # noqa: E402
from statedrift.fuzz.trial import Bench, Trial  # noqa: E402
from statedrift.fuzz.two_builds import TwoBuilds, is_right_before  # noqa: E402
from statedrift.reports.terminal import account_text, verdict_sentence  # noqa: E402
from statedrift.spec.errors import UsageError  # noqa: E402
from statedrift.spec.programs import parse_program  # noqa: E402
from statedrift.spec.verdicts import Verdict  # noqa: E402
from statedrift.store.campaigns import Campaign, Noise  # noqa: E402

TARGET = "engine_in_builds:TARGET"
ROLLED_BACK = parse_program("model lfm2 seed=0; decode 0:5; rollback 0 2; decode 0:1")
SHARED = parse_program("model lfm2 seed=0; decode 0:5; share 0 1; decode 1:1")
ROLLED_BACK_LATER = parse_program("model lfm2 seed=0; decode 0:5; share 0 1; decode 1:1; rollback 0 2; decode 0:1")


@pytest.fixture(scope="module", autouse=True)
def _any_row_is_right() -> Iterator[None]:
    """The engine computes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(campaign_module.Bench, "noise", lambda bench, model: Noise(0.0, 1e9, 0))
        yield


def builds(new: str, old: str) -> TwoBuilds:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, new)
        return TwoBuilds(TARGET, old)


def campaign(new: str, old: str, programs: int = 128, jobs: int = 1, out: Path | None = None) -> Campaign:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, new)
        return run_campaign(Settings(TARGET, ("lfm2",), programs=programs, seed=3, jobs=jobs, out=out, against_library=old))


@pytest.fixture(scope="module")
def share_is_new(tmp_path_factory: pytest.TempPathFactory) -> tuple[Campaign, Path]:
    folder = tmp_path_factory.mktemp("campaign")
    return campaign("rollback share", "rollback", out=folder), folder


def test_only_the_new_fault_is_found(share_is_new: tuple[Campaign, Path]) -> None:
    done, _ = share_is_new
    assert done.findings
    for finding in done.findings:
        assert "share" in finding.signature.rpartition(" after ")[2]
        assert not {"rollback", "drop"} & set(finding.signature.rpartition(" after ")[2].split("+"))
        assert finding.reproduced == finding.reruns == 10
    assert done.account.unreduced == ()
    assert status_of_campaign(done, False) == 1


def test_what_both_do_is_counted_and_green(share_is_new: tuple[Campaign, Path]) -> None:
    account = share_is_new[0].account
    assert account.version == "build rollback share"
    assert account.against_library == "build rollback"
    assert account.also_in_old[f"{TARGET}/lfm2 bad-refusal at decode"] > 5
    same = campaign("rollback", "rollback", 64)
    assert same.findings == ()
    assert same.account.verdicts == {"ok": 64}
    assert status_of_campaign(same, False) == 0


def test_a_fault_that_only_the_old_one_has_is_nothing(tmp_path: Path) -> None:
    done = campaign("sound", "rollback share", 64)
    assert (done.findings, done.account.also_in_old) == ((), {})


def test_the_reduced_program_is_right_on_the_old_one(share_is_new: tuple[Campaign, Path]) -> None:
    for finding in share_is_new[0].findings:
        with Bench(TARGET, environment={VARIABLE: "rollback"}) as old, Bench(TARGET, environment={VARIABLE: "rollback share"}) as new:
            assert old.try_program(finding.program).verdict.kind == "ok"
            assert new.try_program(finding.program).verdict.kind == "bad-refusal"


def test_one_process_and_two_find_the_same(share_is_new: tuple[Campaign, Path]) -> None:
    again = campaign("rollback share", "rollback", jobs=2)
    assert {finding.signature for finding in again.findings} == {finding.signature for finding in share_is_new[0].findings}
    assert again.account.also_in_old == share_is_new[0].account.also_in_old


def test_the_summary_says_what_both_do_on_one_line_and_what_is_new(share_is_new: tuple[Campaign, Path]) -> None:
    done, _ = share_is_new
    programs = sum(done.account.also_in_old.values())
    text = account_text(done.account)
    assert "other build  build rollback\n" in text
    assert f"also there   {programs} programs: bad-refusal at decode ({programs})\n" in text
    assert verdict_sentence(done).startswith(
        f"{len(done.findings)} new divergence{'s' if len(done.findings) > 1 else ''} in 128 programs; {programs} programs diverged"
    )


def test_a_campaign_that_was_kept_is_shown_again(share_is_new: tuple[Campaign, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(share_is_new[1])]) == 0
    assert "other build  build rollback\n" in capsys.readouterr().out


# --- one program at a time ---------------------------------------------------------------------------------------------------


def test_each_build_has_a_process_of_its_own_and_closing_ends_both() -> None:
    with builds("rollback", "sound") as bench:
        assert bench.sandbox is not None
        assert bench.old.sandbox is not None
        processes = [*bench.sandbox.processes, *bench.old.sandbox.processes]
        assert len(set(processes)) == 4
        assert (bench.version, bench.old_version) == ("build rollback", "build sound")
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_divergence_of_both_is_right_with_a_reason() -> None:
    with builds("rollback", "rollback") as bench:
        trial = bench.try_program(ROLLED_BACK)
    assert (trial.verdict.kind, trial.signature) == ("ok", None)
    assert trial.verdict.reason == f"the other library does the same: {TARGET}/lfm2 bad-refusal at decode"
    assert not is_right_before(trial)


def test_the_old_one_is_asked_only_up_to_the_divergence() -> None:
    with builds("rollback share", "rollback") as bench:
        trial = bench.try_program(ROLLED_BACK_LATER)
    assert trial.verdict.operation_index == 2
    assert is_right_before(trial)


def test_an_old_build_that_fails_otherwise_does_not_excuse_the_new_one() -> None:
    with builds("rollback", "dies") as bench:
        trial = bench.try_program(ROLLED_BACK)
        assert trial.verdict.kind == "bad-refusal"
        assert trial.old is not None
        assert trial.old.kind == "crash"
        assert bench.try_program(SHARED).verdict.kind == "ok"


def test_a_reduction_stays_where_the_old_build_is_right() -> None:
    """Without the rule it would end in the smaller program, on which the old one is wrong in another way."""

    class Told(Bench):
        """A bench whose old build fails in every program of fewer than 4 operations."""

        def try_programs(self, programs: object) -> list[Trial]:
            trials = super().try_programs(programs)  # type: ignore[arg-type]
            old = {True: Verdict("ok"), False: Verdict("crash", 0)}
            return [msgspec.structs.replace(trial, old=old[len(trial.program.operations) > 3]) for trial in trials]

    start = parse_program("model lfm2 seed=0; decode 0:5; decode 1:3; drop 1; rollback 0 2; decode 0:1")
    with Told(TARGET, environment={VARIABLE: "rollback"}) as bench:
        reduction = reduce_trial(bench.try_program(start), bench)
    assert len(reduction.program.operations) == 4


# --- what cannot be asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "against", "old", "words"),
    [
        ("numba", None, "/tmp", "target numba has no builds; it is for llamacpp"),
        (TARGET, "numba", "sound", "leave out one of them"),
        (TARGET, None, "nowhere", "there is no build at nowhere"),
        ("llamacpp", None, "/no/such/place", "there is no build of llama.cpp at /no/such/place"),
    ],
)
def test_what_cannot_be_compared_is_a_usage_error(target: str, against: str | None, old: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        checked_settings(target, ("lfm2",), None, 1, 0, 1, None, against, against_library=old)
