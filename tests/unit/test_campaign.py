"""Campaigns: what is run, what is kept, and what is said when something could not be."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

TESTS = Path(__file__).parent.parent
FOLDERS = [str(TESTS), str(TESTS / "fixtures")]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

from statedrift.cli.fuzzing import status_of_campaign  # noqa: E402
from statedrift.fuzz import campaign as campaign_module  # noqa: E402
from statedrift.fuzz import workers as workers_module  # noqa: E402
from statedrift.fuzz.campaign import Progress, Settings, round_of, run_campaign  # noqa: E402
from statedrift.fuzz.shards import SHARD_PROGRAMS, ShardResult, shard_programs  # noqa: E402
from statedrift.reports.terminal import verdict_sentence  # noqa: E402
from statedrift.spec.errors import UnavailableError, UsageError  # noqa: E402
from statedrift.spec.programs import parse_program, program_text  # noqa: E402
from statedrift.spec.verdicts import DIVERGENCE_KINDS  # noqa: E402
from statedrift.store.campaigns import Campaign, Canary, read_campaign, read_shards  # noqa: E402
from statedrift.store.records import divergent_of  # noqa: E402

from tests.processes import descendants  # noqa: E402

CANARY = "statedrift.fuzz.canary:FREQUENT"
WORKERS_SECONDS = 120

pytestmark = pytest.mark.usefixtures("one_fault_is_reduced_twice")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory, one_fault_is_reduced_twice: None) -> tuple[Campaign, Path]:
    """A campaign of 100 programs against the canary, kept in a folder."""
    folder = tmp_path_factory.mktemp("campaign") / "run"
    return run_campaign(Settings(CANARY, ("lfm2",), programs=100, seed=5, out=folder)), folder


def counts(campaign: Campaign) -> dict[str, object]:
    """What may not depend on how many processes took part."""
    account = campaign.account
    return {
        name: getattr(account, name)
        for name in ("programs", "operations", "outcomes", "verdicts", "noise", "could_not_test", "reach", "canary")
    }


def test_the_canary_is_found_reduced_and_reproduced(campaign: tuple[Campaign, Path]) -> None:
    done, _ = campaign
    assert [finding.signature for finding in done.findings] == [f"{CANARY}/lfm2 wrong-output at decode (self) after decode+rollback"]
    (finding,) = done.findings
    assert program_text(finding.program) == "model lfm2 seed=0\ndecode 0:2\nrollback 0 1\ndecode 0:1\n"
    assert finding.reproduced == finding.reruns == 10
    assert finding.documented
    assert finding.seen == done.account.verdicts["wrong-output"]


def test_the_original_is_a_program_of_the_campaign(campaign: tuple[Campaign, Path]) -> None:
    (finding,) = campaign[0].findings
    assert finding.original == (shard_programs(5, 0, ("lfm2",)) + shard_programs(5, 1, ("lfm2",)))[finding.found_after_programs - 1]


def test_the_account_adds_up(campaign: tuple[Campaign, Path]) -> None:
    account = campaign[0].account
    assert account.complete
    assert account.programs == 100 == sum(account.verdicts.values())
    assert account.operations == sum(count for words in account.outcomes.values() for count in words.values())
    assert account.reach is not None
    assert account.reach.cells["answers"]["decode accepted"] == account.outcomes["decode"]["accepted"]
    assert account.reach.cells["pairs"]["decode after rollback"] > 0
    assert account.canary is not None
    assert account.canary.programs == 64  # the first of its two shards
    assert account.noise["lfm2"].tolerance >= 1e-5
    assert account.seconds_running > 0


def test_a_campaign_is_on_disk_as_it_was_returned(campaign: tuple[Campaign, Path]) -> None:
    done, folder = campaign
    assert read_campaign(folder) == done
    assert (folder / "findings").is_dir()


@pytest.mark.parametrize("count", [1, 64, 65])
def test_a_budget_of_programs_is_kept_exactly(count: int) -> None:
    assert run_campaign(Settings("numba", ("lfm2",), programs=count)).account.programs == count


def test_a_budget_of_seconds_is_kept() -> None:
    account = run_campaign(Settings("numba", ("lfm2",), seconds=1.0)).account
    assert account.complete
    assert account.programs >= 64
    assert 1.0 <= account.seconds <= 10.0


def test_the_same_seed_gives_the_same_campaign_on_one_process_and_on_two(campaign: tuple[Campaign, Path], tmp_path: Path) -> None:
    again = run_campaign(Settings(CANARY, ("lfm2",), programs=100, seed=5, jobs=2, out=tmp_path / "two"))
    assert counts(again) == counts(campaign[0])
    assert {finding.signature for finding in again.findings} == {finding.signature for finding in campaign[0].findings}
    one, two = (
        [msgspec.structs.replace(record, seconds=0.0) for record in read_shards(folder)] for folder in (campaign[1], tmp_path / "two")
    )
    assert one == two
    assert [record.programs for record in one] == [64, 36]
    assert sum(len(list(divergent_of(record))) for record in one) == 100 - again.account.verdicts["ok"] > 0


# --- rounds, and what is known between them ----------------------------------------------------------------------------------


def test_rounds_grow_and_follow_each_other() -> None:
    rounds = sorted({(shards.start, len(shards)) for shards in map(round_of, range(31))})
    assert rounds == [(0, 1), (1, 2), (3, 4), (7, 8), (15, 8), (23, 8)]
    assert all(shard in round_of(shard) for shard in range(31))


@pytest.fixture(scope="module")
def ten_faults() -> tuple[Campaign, Campaign]:
    """Three rounds against an engine with ten faults, on one process and on two; its outputs, all zeros, are right for so large a tolerance."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(campaign_module.Bench, "noise", lambda bench, model: campaign_module.Noise(0.0, 1e9, 0))
        one, two = (run_campaign(Settings("ten_faults:TARGET", ("mamba2", "lfm2"), programs=256, seed=3, jobs=jobs)) for jobs in (1, 2))
    return one, two


def as_found(campaign: Campaign) -> list[dict[str, object]]:
    """Findings without the time of day and the clock."""
    clocks = {"first_seen", "last_seen", "found_after_seconds"}
    return [{name: getattr(one, name) for name in one.__struct_fields__ if name not in clocks} for one in campaign.findings]


def test_one_process_and_two_find_reduce_and_count_the_same(ten_faults: tuple[Campaign, Campaign]) -> None:
    one, two = ten_faults
    assert len(one.findings) >= 6
    assert as_found(one) == as_found(two)
    assert counts(one) == counts(two)
    assert one.account.known == two.account.known != ()


def test_the_account_says_from_which_shard_on_what_was_known(ten_faults: tuple[Campaign, Campaign]) -> None:
    known = ten_faults[0].account.known
    assert [entry.first_shard for entry in known] == [1, 3]
    for earlier, later in pairwise(known):
        assert set(earlier.contexts) < set(later.contexts)
    for entry in known:
        assert entry.contexts == tuple(sorted(entry.contexts))
    contexts = {(context.family, context.operations) for context in known[-1].contexts}
    assert ("mamba2", ("rollback",)) in contexts
    assert ("lfm2", ("rollback",)) in contexts


def test_every_program_can_be_generated_anew_from_the_account(ten_faults: tuple[Campaign, Campaign]) -> None:
    account = ten_faults[0].account
    for finding in ten_faults[0].findings:
        shard, number = divmod(finding.found_after_programs - 1, SHARD_PROGRAMS)
        contexts = [entry.contexts for entry in account.known if entry.first_shard <= shard]
        programs = shard_programs(3, shard, account.families, known=contexts[-1] if contexts else ())
        assert finding.original == programs[number]


def test_another_seed_gives_another_campaign(campaign: tuple[Campaign, Path]) -> None:
    assert counts(run_campaign(Settings(CANARY, ("lfm2",), programs=100, seed=6))) != counts(campaign[0])


def test_families_take_turns() -> None:
    done = run_campaign(Settings(CANARY, ("lfm2", "mamba2"), programs=128))
    assert {finding.family for finding in done.findings} == {"lfm2", "mamba2"}
    assert set(done.account.noise) == {"lfm2", "mamba2"}


def test_progress_is_told() -> None:
    told: list[Progress] = []
    run_campaign(Settings(CANARY, ("lfm2",), programs=128), told.append)
    assert [told[0].phase, told[-1].programs, told[-1].findings] == ["noise", 128, 1]
    assert {progress.phase for progress in told} == {"noise", "fuzzing", "reducing"}
    programs = [progress.programs for progress in told]
    assert programs == sorted(programs)


def test_a_generator_that_went_blind_makes_the_canary_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs without a save: nothing is found, and nothing can be."""
    blind = [parse_program("model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1")] * 64
    monkeypatch.setattr("statedrift.fuzz.shards.shard_programs", lambda *arguments: blind)
    monkeypatch.setattr("statedrift.fuzz.canary_watch.shard_programs", lambda *arguments: blind)
    monkeypatch.setattr("statedrift.fuzz.canary_watch.WATCH_EVERY", 1)
    done = run_campaign(Settings("numba", ("lfm2",), programs=24 * 64))
    assert done.account.canary == Canary(24 * 64, 0)
    assert done.account.verdicts == {"ok": 24 * 64}
    assert status_of_campaign(done, False) == 2


# --- what could not be done --------------------------------------------------------------------------------------------------


def test_a_family_that_could_not_be_tested_is_said_and_the_others_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = campaign_module.Bench.noise

    def noise(bench: campaign_module.Bench, model: campaign_module.Model) -> campaign_module.Noise:
        if model.family == "mamba2":
            raise UnavailableError("could not test mamba2: too noisy")
        return measured(bench, model)

    monkeypatch.setattr(campaign_module.Bench, "noise", noise)
    account = run_campaign(Settings("numba", ("mamba2", "lfm2"), programs=70)).account
    assert account.could_not_test == {"mamba2": "could not test mamba2: too noisy"}
    assert account.verdicts == {"ok": 70}
    account = run_campaign(Settings("numba", ("mamba2",), programs=70)).account
    assert (account.programs, account.could_not_test) == (0, {"mamba2": "could not test mamba2: too noisy"})


def test_programs_that_nobody_could_judge_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = "fake_engine:TARGET"
    quiet = campaign_module.Noise(0.0, float("inf"), 0)
    monkeypatch.setattr(campaign_module.Bench, "noise", lambda bench, model: quiet)
    monkeypatch.setattr("statedrift.fuzz.shards.shard_model", lambda seed, shard, families: campaign_module.Model("lfm2", 3))
    done = run_campaign(Settings(target, ("lfm2",), programs=20, out=tmp_path))
    assert done.account.verdicts == {"unknown": 20}
    assert done.findings == ()
    assert done.account.complete


SETTINGS = [
    (Settings(CANARY, (), programs=1), "at least one family"),
    (Settings(CANARY, ("lfm2",)), "either a number of seconds or a number of programs"),
    (Settings(CANARY, ("lfm2",), seconds=1.0, programs=1), "either a number of seconds or a number of programs"),
    (Settings(CANARY, ("gpt",), programs=1), "gpt"),
    (Settings("nothing", ("lfm2",), programs=1), "no target `nothing`"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_settings_that_make_no_campaign_are_refused(settings: Settings, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_campaign(settings)


def test_a_folder_that_is_in_use_is_refused_before_anything_is_run(campaign: tuple[Campaign, Path], tmp_path: Path) -> None:
    done, folder = campaign
    (tmp_path / "file").write_text("mine")
    for out in (folder, tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=str(out)):
            run_campaign(Settings(CANARY, ("lfm2",), programs=1, out=out))
    assert read_campaign(folder) == done


def test_a_folder_can_be_used_after_a_campaign_that_did_not_start(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(UsageError, match="no target"):
            run_campaign(Settings("nothing", ("lfm2",), programs=1, out=tmp_path / "run"))


# --- interruptions -----------------------------------------------------------------------------------------------------------


def test_an_interrupted_campaign_is_written_as_incomplete(tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.programs >= 64 and progress.findings:
            raise KeyboardInterrupt

    done = run_campaign(Settings(CANARY, ("lfm2",), programs=1000, out=tmp_path), interrupt)
    assert not done.account.complete
    assert done.account.programs == sum(done.account.verdicts.values()) == 64
    assert len(done.findings) == 1
    assert read_campaign(tmp_path) == done


def test_what_was_not_reduced_is_said_and_counts(tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.phase == "reducing":
            raise KeyboardInterrupt

    done = run_campaign(Settings(CANARY, ("lfm2",), programs=64, out=tmp_path), interrupt)
    diverged = done.account.verdicts["wrong-output"]
    assert diverged > 0
    assert done.findings == ()
    assert 0 < len(done.account.unreduced[0].operations) <= diverged
    assert [(left.signature, left.programs) for left in done.account.unreduced] == [(f"{CANARY}/lfm2 wrong-output at decode", diverged)]
    assert all("decode" in words for words in done.account.unreduced[0].operations)
    again = parse_program(done.account.unreduced[0].program)
    assert again in shard_programs(0, 0, ("lfm2",))
    assert read_campaign(tmp_path) == done
    assert status_of_campaign(done, undocumented=False) == 1
    assert verdict_sentence(done) == f"{diverged} of 64 programs diverged, and none was reduced"


def test_every_divergent_program_counts_once(campaign: tuple[Campaign, Path]) -> None:
    done, _ = campaign
    unreduced = sum(left.programs for left in done.account.unreduced)
    diverged = sum(done.account.verdicts.get(kind, 0) for kind in DIVERGENCE_KINDS)
    assert sum(finding.seen for finding in done.findings) + unreduced == diverged


def test_a_folder_that_cannot_be_written_any_more_ends_no_campaign(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def spoil(progress: Progress) -> None:
        if not (folder / "findings").exists():
            (folder / "findings").write_text("in the way")

    done = run_campaign(Settings(CANARY, ("lfm2",), programs=64, out=folder), spoil)
    assert done.account.complete
    assert len(done.findings) == 1
    assert "cannot be written" in done.not_written
    assert status_of_campaign(done, undocumented=False) == 1
    clean = msgspec.structs.replace(done, findings=())
    assert status_of_campaign(clean, undocumented=False) == 2


def test_a_target_that_is_lost_leaves_the_account_of_what_was_done(tmp_path: Path) -> None:
    def lose(progress: Progress) -> None:
        if progress.programs >= 64:
            raise UnavailableError("lost")

    done = run_campaign(Settings("numba", ("lfm2",), programs=1000, out=tmp_path), lose)
    assert (done.account.programs, done.account.complete, done.account.ended_by) == (64, False, "lost")
    assert read_campaign(tmp_path) == done


SCRIPT = """
import multiprocessing, signal, time
if multiprocessing.current_process().name.endswith("-2"):
    time.sleep({second_worker_late_seconds})
from statedrift.fuzz.campaign import Settings, run_campaign
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit that it is ignored
    done = run_campaign(Settings({target!r}, ("lfm2",), seconds=60.0, jobs=2), lambda progress: print(progress.programs, flush=True))
    print("complete" if done.account.complete else "incomplete", len(done.findings))
"""


def start_campaign(folder: Path, second_worker_late_seconds: float = 0.0) -> subprocess.Popen[str]:
    """A campaign on two processes, after its first shard."""
    script = SCRIPT.format(target=CANARY, second_worker_late_seconds=second_worker_late_seconds)
    (folder / "campaign_script.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, folder / "campaign_script.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stdout is not None
    while process.stdout.readline().strip() in ("0", ""):
        assert process.poll() is None, process.stderr and process.stderr.read()
    return process


@pytest.mark.parametrize("second_worker_late_seconds", [0.0, 20.0])
def test_an_interrupt_at_the_terminal_ends_all_processes_with_a_summary(second_worker_late_seconds: float, tmp_path: Path) -> None:
    process = start_campaign(tmp_path, second_worker_late_seconds)
    below = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=WORKERS_SECONDS)
    assert errors == ""
    assert output.strip().split("\n")[-1].startswith("incomplete ")
    assert not below & descendants(os.getpid())


def test_an_interrupt_that_was_swallowed_ends_a_campaign_after_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = workers_module.run_shard

    def run_shard(*arguments: Any) -> ShardResult:
        with contextlib.suppress(KeyboardInterrupt):  # as a callback from native code does
            signal.raise_signal(signal.SIGTERM)
        return judged(*arguments)

    monkeypatch.setattr(workers_module, "run_shard", run_shard)
    assert not run_campaign(Settings("numba", ("lfm2",), programs=200)).account.complete


def test_nothing_is_left_of_a_campaign_that_is_killed(tmp_path: Path) -> None:
    process = start_campaign(tmp_path)
    below = descendants(process.pid)
    assert len(below) >= 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while (left := [pid for pid in below if Path(f"/proc/{pid}/exe").exists()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("elsewhere:TARGET", "a worker process cannot use the target: the device is in use by another process"),
        ("elsewhere:DIES", "a worker process ended by itself or was killed"),
    ],
)
def test_a_worker_that_cannot_start_says_why(
    target: str, message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign_module.Bench, "noise", lambda bench, model: campaign_module.Noise(0.0, 1.0, 0))  # nothing is judged
    with pytest.raises(UnavailableError, match=message):
        run_campaign(Settings(target, ("lfm2",), programs=200, jobs=2))
    assert "Traceback" not in capfd.readouterr().err


def test_every_divergence_kind_has_a_place_in_the_account(campaign: tuple[Campaign, Path]) -> None:
    account = campaign[0].account
    assert set(account.verdicts) <= {"ok", "unknown", "harness-error", *DIVERGENCE_KINDS}
    assert msgspec.json.decode(msgspec.json.encode(account), type=type(account)) == account
