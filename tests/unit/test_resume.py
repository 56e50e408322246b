"""Going on: a campaign in a folder that has one tries again what is known, then what was never used; other settings are refused."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

FIXTURES = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "fixtures")]
sys.path[:0] = [folder for folder in FIXTURES if folder not in sys.path]

from statedrift.cli import application  # noqa: E402
from statedrift.cli.fuzzing import status_of_campaign  # noqa: E402
from statedrift.fuzz import campaign as campaign_module  # noqa: E402
from statedrift.fuzz import canary, workers  # noqa: E402
from statedrift.fuzz import known as known_module  # noqa: E402
from statedrift.fuzz.campaign import Progress, Settings, run_campaign  # noqa: E402
from statedrift.fuzz.shards import ShardResult, ShardTask  # noqa: E402
from statedrift.reports.terminal import account_text, verdict_sentence  # noqa: E402
from statedrift.spec.configuration import CacheConfiguration  # noqa: E402
from statedrift.spec.errors import UsageError  # noqa: E402
from statedrift.spec.models import Model  # noqa: E402
from statedrift.spec.target import Session  # noqa: E402
from statedrift.spec.verdicts import DIVERGENCE_KINDS  # noqa: E402
from statedrift.store.campaigns import Campaign, read_campaign, read_kept  # noqa: E402
from statedrift.targets.numba import TARGET as SOUND  # noqa: E402

CANARY = "statedrift.fuzz.canary:FREQUENT"


@pytest.fixture(scope="module", autouse=True)
def _one_fault_is_reduced_twice() -> Iterator[None]:
    """The canary has one fault; many reductions of what it explains only take time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_module, "EXPLAINED_REDUCTIONS_MAX", 2)
        yield


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[ShardTask]:
    """The shards that campaigns run from now on."""
    run, taken = workers.run_shard, []

    def run_shard(bench: Any, task: ShardTask) -> ShardResult:
        taken.append(task)
        return run(bench, task)

    monkeypatch.setattr(workers, "run_shard", run_shard)
    return taken


@pytest.fixture
def without_fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The canary's next version, in which its fault is mended."""
    with monkeypatch.context() as patch:
        patch.setattr(canary.FrequentCanaryTarget, "open", lambda self, model, configuration: opened(model, configuration))
        patch.setattr(canary.FrequentCanaryTarget, "version", lambda self: "mended")
        yield


def opened(model: Model, configuration: CacheConfiguration) -> Session:
    return SOUND.open(model, configuration)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a campaign that found the canary's fault."""
    folder = tmp_path_factory.mktemp("once") / "run"
    done = run_campaign(Settings(CANARY, ("lfm2",), programs=64, out=folder))
    assert len(done.findings) == 1
    return folder


def copied(folder: Path, place: Path) -> Path:
    return Path(shutil.copytree(folder, place / "run"))


def counted(campaign: Campaign) -> dict[str, object]:
    """What may not depend on how many runs a campaign had."""
    names = ("programs", "operations", "outcomes", "verdicts", "noise", "reach", "canary", "known", "unreduced")
    return {name: getattr(campaign.account, name) for name in names}


def found(campaign: Campaign) -> list[dict[str, object]]:
    """Findings without the time of day and the clock."""
    clocks = {"first_seen", "last_seen", "found_after_seconds"}
    ordered = sorted(campaign.findings, key=lambda finding: finding.signature)
    return [{name: getattr(one, name) for name in one.__struct_fields__ if name not in clocks} for one in ordered]


def every_divergent_program_counts_once(campaign: Campaign) -> bool:
    counts = sum(finding.seen for finding in campaign.findings) + sum(left.programs for left in campaign.account.unreduced)
    return counts == sum(campaign.account.verdicts.get(kind, 0) for kind in DIVERGENCE_KINDS)


def test_two_runs_of_half_the_budget_are_one_of_the_whole(tmp_path: Path, tasks: list[ShardTask]) -> None:
    whole = run_campaign(Settings("numba", ("lfm2",), programs=150, out=tmp_path / "whole"))
    del tasks[:]
    for _ in range(2):
        done = run_campaign(Settings("numba", ("lfm2",), programs=75, out=tmp_path / "run"))
    assert counted(done) == counted(whole)
    assert [(task.shard, task.first, task.count) for task in tasks] == [(0, 0, 64), (1, 0, 11), (1, 11, 53), (2, 0, 22)]
    assert done.account.runs == 2
    assert done.account.replayed is not None
    assert done.account.replayed.corpus > 20
    assert done.account.replayed.corpus_diverged == 0
    assert read_campaign(tmp_path / "run") == done
    one, two = (read_kept(tmp_path / name) for name in ("whole", "run"))
    assert one is not None
    assert two is not None
    assert (one.tally, one.corpus) == (two.tally, two.corpus)


def test_a_finding_is_replayed_once_and_seen_again(once: Path, tmp_path: Path) -> None:
    folder = copied(once, tmp_path)
    shutil.rmtree(folder / "findings")
    (before,) = read_campaign(folder).findings
    done = run_campaign(Settings(CANARY, ("lfm2",), programs=1, out=folder))
    (after,) = done.findings
    assert (after.signature, after.first_seen, after.program) == (before.signature, before.first_seen, before.program)
    assert after.last_seen >= before.last_seen
    assert done.account.replayed is not None
    assert (done.account.replayed.findings, done.account.replayed.gone, done.account.replayed.version_before) == (1, (), None)
    assert every_divergent_program_counts_once(done)
    assert read_campaign(folder) == done
    assert len(list(folder.glob("findings/*/repro.py"))) == 1  # the database is the truth: a missing folder is written again
    assert "went on      in run 2, after 1 finding and " in account_text(done.account)


@pytest.mark.usefixtures("without_fault")
def test_a_finding_that_is_not_reproduced_any_more_is_named_and_kept(once: Path, tmp_path: Path) -> None:
    folder = copied(once, tmp_path)
    done = run_campaign(Settings(CANARY, ("lfm2",), programs=1, out=folder))
    (finding,) = done.findings
    assert done.account.replayed is not None
    assert done.account.replayed.gone == (finding.signature,)
    assert done.account.replayed.version_before not in (None, "mended")
    text = " ".join(account_text(done.account).split())
    assert f"not reproduced any more: {finding.signature}" in text
    assert "the version before was" in text
    assert "; 1 of them not reproduced any more" in verdict_sentence(done)
    assert status_of_campaign(msgspec.structs.replace(done, account=msgspec.structs.replace(done.account, unreduced=())), False) == 0
    assert read_campaign(folder) == done


def test_a_program_of_the_corpus_that_is_not_right_any_more_is_a_find(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canary.FrequentCanaryTarget, "open", lambda self, model, configuration: opened(model, configuration))
        assert run_campaign(Settings(CANARY, ("lfm2",), programs=64, out=tmp_path)).findings == ()
    done = run_campaign(Settings(CANARY, ("lfm2",), programs=1, out=tmp_path))
    assert done.account.replayed is not None
    assert done.account.replayed.corpus_diverged > 0
    assert len(done.findings) == 1
    assert every_divergent_program_counts_once(done)
    assert done.account.programs == sum(done.account.verdicts.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 4}, r"--seed 0 \(now 4\)"),
        ({"families": ("mamba2", "lfm2")}, r"--family lfm2 \(now mamba2, lfm2\)"),
        ({"inspect": True, "profile": "server"}, r"--profile swarm \(now server\); --inspect not given \(now given\)"),
        ({"target": "numba", "against": CANARY}, r"--target .*FREQUENT \(now numba\); --against not given \(now .*FREQUENT\)"),
    ],
)
def test_other_settings_are_another_campaign(changes: dict[str, Any], said: str, once: Path) -> None:
    before = read_campaign(once)
    with pytest.raises(UsageError, match=rf"run holds a campaign with other settings: {said}\. Give the same to go on, --fresh"):
        run_campaign(msgspec.structs.replace(Settings(CANARY, ("lfm2",), programs=64, out=once), **changes))
    assert read_campaign(once) == before


def test_fresh_starts_over_beside_it(once: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(once, tmp_path)
    before = read_campaign(folder)
    words = ["fuzz", "--target", "numba", "--family", "lfm2", "--programs", "3", "--fresh"]
    assert application.run([*words, "--out", str(folder)]) == 0
    assert f"a new campaign in {folder}-2\n" in capsys.readouterr().err
    assert read_campaign(folder) == before
    assert read_campaign(Path(f"{folder}-2")).account.programs == 3
    assert application.run(words) == 64
    assert "give --out, too" in capsys.readouterr().err


# --- killed ------------------------------------------------------------------------------------------------------------------


def test_a_campaign_that_was_killed_goes_on_with_the_same_programs_and_finds_the_same(tmp_path: Path, tasks: list[ShardTask]) -> None:
    """Killed in the middle of a round, and in the middle of a reduction: what lies on disk then is what is gone on from."""
    settings = Settings("ten_faults:TARGET", ("lfm2",), programs=192, seed=3, out=tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(campaign_module.Bench, "noise", lambda bench, model: campaign_module.Noise(0.0, 1e9, 0))

        def keep(progress: Progress) -> None:
            for name, is_there in (
                ("reducing", progress.programs == 64 and progress.findings == 2),
                ("round", progress.programs == 128 and progress.phase == "fuzzing"),
            ):
                if is_there and not (tmp_path / name).exists():
                    shutil.copytree(tmp_path / "run", tmp_path / name)

        whole = run_campaign(settings, keep)
        drawn = list(tasks)
        assert len(whole.findings) >= 4
        for name, programs in (("reducing", 64), ("round", 128)):
            assert len(list((tmp_path / name).glob("findings/*/repro.py"))) >= 2  # people see a finding as soon as it is one
            del tasks[:]
            done = run_campaign(msgspec.structs.replace(settings, out=tmp_path / name, programs=192 - programs))
            assert tasks == drawn[programs // 64 :]
            assert {finding.signature for finding in done.findings} == {finding.signature for finding in whole.findings}
            assert every_divergent_program_counts_once(done)
        assert found(done) == found(whole)  # between two reductions of a wave more is known than the wave knew: counts may differ then
        assert counted(done) == counted(whole)
