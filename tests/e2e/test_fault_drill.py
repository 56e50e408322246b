"""The fault drill: campaigns whose processes are killed at random, again and again; disks that are full, folders that may only be read, clocks
that jump. No finding is lost, nothing wrong is said, no process is left, and the next run goes on.

STATEDRIFT_DRILL_KILLS says how many kills; where and when they hit follows from STATEDRIFT_DRILL_SEED.
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from statedrift.cli import application
from statedrift.fuzz import known as known_module
from statedrift.fuzz.campaign import Progress, Settings, run_campaign
from statedrift.spec.errors import UsageError
from statedrift.spec.verdicts import DIVERGENCE_KINDS
from statedrift.store.campaigns import Campaign, read_campaign
from statedrift.store.findings import folder_name

from tests.e2e.test_endings import SCRIPT
from tests.processes import descendants, wait_until_gone

KILLS = int(os.environ.get("STATEDRIFT_DRILL_KILLS", "24"))
SEED = int(os.environ.get("STATEDRIFT_DRILL_SEED", "1"))
CANARY = "statedrift.fuzz.canary:FREQUENT"
ROOT = Path(__file__).resolve().parents[2]
LEFT_SECONDS_MAX = 30.0

pytestmark = pytest.mark.usefixtures("one_fault_is_reduced_twice")


def started(folder: Path, target: str, jobs: int) -> subprocess.Popen[str]:
    """The command on a campaign of ten minutes."""
    (folder / "script.py").write_text(SCRIPT)
    words = ["fuzz", "--target", target, "--family", "lfm2", "--seconds", "600", "--jobs", str(jobs), "--out", str(folder / "run")]
    return subprocess.Popen(
        [sys.executable, folder / "script.py", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )


def wait_for_work(process: subprocess.Popen[str]) -> None:
    """Wait until a campaign is past its noise; it may be replaying, fuzzing or reducing."""
    assert process.stdout is not None
    while (line := process.stdout.readline()).startswith("noise"):
        pass
    assert line, process.stderr and process.stderr.read()


def victims(process: subprocess.Popen[str]) -> list[int]:
    """Workers of the pool, or the sandbox's child and its worker."""
    found = []
    for pid in sorted(descendants(process.pid)):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text()
            if "resource_tracker" not in words:
                found.append(pid)
    return found


def check_whole(folder: Path, before: Campaign | None) -> Campaign | None:
    """What a kill left: a database that opens, all that was in it before, and numbers that add up. None where nothing had begun."""
    if not (folder / "campaign.sqlite").exists():
        assert before is None
        return None
    try:
        campaign = read_campaign(folder)
    except UsageError as error:
        if "only begun" not in str(error):
            raise
        return before
    account = campaign.account
    assert account.programs == sum(account.verdicts.values())
    diverged = sum(account.verdicts.get(kind, 0) for kind in DIVERGENCE_KINDS)
    assert sum(finding.seen for finding in campaign.findings) + sum(left.programs for left in account.unreduced) == diverged
    if before is not None:
        assert account.programs >= before.account.programs
        assert {finding.signature for finding in before.findings} <= {finding.signature for finding in campaign.findings}
    return campaign


def check_shown(folder: Path, campaign: Campaign | None) -> None:
    """What people were shown is in the database, which was written before."""
    shown = {path.name for path in (folder / "findings").glob("*") if (path / "finding.json").exists()}
    assert shown <= {folder_name(finding) for finding in (campaign.findings if campaign is not None else ())}


def drill(folder: Path, target: str, jobs: int, kills: int, chance: random.Random) -> Campaign:
    """A campaign that is killed so many times, sometimes a process below it first, and then ends by itself."""
    campaign: Campaign | None = None
    while kills > 0:
        process = started(folder, target, jobs)
        if chance.random() < 0.8:
            wait_for_work(process)
        time.sleep(chance.uniform(0.0, 1.0))
        everything = descendants(process.pid)
        for _ in range(chance.randint(0, min(3, kills - 1))):
            if found := victims(process):
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(found), signal.SIGKILL)
                kills -= 1
                time.sleep(chance.uniform(0.0, 0.4))
                everything |= descendants(process.pid)
        process.kill()
        kills -= 1
        process.communicate()
        assert wait_until_gone(everything, LEFT_SECONDS_MAX) == set()
        campaign = check_whole(folder / "run", campaign)
        check_shown(folder / "run", campaign)
    last = run_campaign(Settings(target, ("lfm2",), programs=32, jobs=jobs, out=folder / "run"))
    assert last.account.complete
    assert last.not_written == ""
    whole = check_whole(folder / "run", campaign)
    assert whole is not None
    assert whole.account == last.account
    assert {finding.signature: finding for finding in whole.findings} == {finding.signature: finding for finding in last.findings}
    return last


def test_no_kill_loses_a_finding(tmp_path: Path) -> None:
    done = drill(tmp_path, CANARY, 2, KILLS // 2, random.Random(SEED))
    assert [finding.signature for finding in done.findings] == [f"{CANARY}/lfm2 wrong-output at decode (self) after decode+rollback"]
    assert done.findings[0].reproduced == 10


def test_no_kill_makes_a_sound_target_wrong(tmp_path: Path) -> None:
    done = drill(tmp_path, "numba", 2, KILLS // 4, random.Random(SEED + 1))
    assert set(done.account.verdicts) == {"ok"}
    assert done.findings == ()


def test_no_kill_in_the_sandbox_is_taken_for_the_engine(tmp_path: Path) -> None:
    """llama.cpp gives itself up on some programs, and says why; whoever is killed from outside is `unknown`."""
    pytest.importorskip("llama_cpp")
    done = drill(tmp_path, "llamacpp", 1, KILLS - KILLS // 2 - KILLS // 4, random.Random(SEED + 2))
    assert not [finding.signature for finding in done.findings if "SIGKILL" in finding.verdict.reason or finding.verdict.kind == "hang"]
    assert not [left.signature for left in done.account.unreduced if "SIGKILL" in left.signature or " hang " in left.signature]
    assert all(finding.reproduced for finding in done.findings)


# --- disks, folders, clocks --------------------------------------------------------------------------------------------------


def test_a_disk_that_takes_no_more_ends_no_campaign_and_the_next_run_goes_on(tmp_path: Path) -> None:
    """The system refuses to let any file grow, in the middle of a campaign."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(progress: Progress) -> None:
        if progress.programs >= 64:
            resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, before[1]))

    settings = Settings(CANARY, ("lfm2",), programs=128, out=tmp_path / "run")
    try:
        done = run_campaign(settings, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.account.complete
    assert len(done.findings) == 1
    assert "campaign.sqlite cannot be written: the disk refused (it may be full); choose another place" in done.not_written
    kept = check_whole(tmp_path / "run", None)
    assert kept is not None
    assert 64 <= kept.account.programs < 128
    again = run_campaign(settings)
    assert (again.not_written, len(again.findings)) == ("", 1)


IN_A_SMALL_DISK = """
import os, shutil, sys
from pathlib import Path
from statedrift.cli import application
from statedrift.fuzz import known
from statedrift.fuzz.campaign import Settings, run_campaign
from statedrift.spec.errors import UsageError
from statedrift.store.campaigns import read_campaign
known.EXPLAINED_REDUCTIONS_MAX = 2
disk = Path(sys.argv[1])

def remount(how):
    assert os.system(f"mount -o remount,{how} {disk}") == 0

def spoil(progress):
    if progress.programs >= 64 and not (disk / "filler").exists():
        shutil.copytree(disk / "run", disk / "killed")
        with open(disk / "filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert error.strerror == "No space left on device"

settings = Settings(sys.argv[2], ("lfm2",), programs=128, out=disk / "run")
done = run_campaign(settings, spoil)
assert done.account.complete and len(done.findings) == 1
print(done.not_written)
before = read_campaign(disk / "run")
(disk / "filler").unlink()
done = run_campaign(settings)
assert done.not_written == "" and len(done.findings) == 1 and done.account.programs > before.account.programs
remount("ro")
assert read_campaign(disk / "run") == done
assert (disk / "killed" / "campaign.sqlite-wal").exists()
assert read_campaign(disk / "killed").account.programs == 64
try:
    run_campaign(settings)
except UsageError as error:
    print(error)
assert application.run(["report", str(disk / "run")]) == 0
"""


def test_a_full_disk_and_one_that_may_only_be_read(tmp_path: Path) -> None:
    """On a disk of two MiB that this process has for itself."""
    disk = tmp_path / "disk"
    disk.mkdir()
    own = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size=2m tmpfs {disk}"
    if not shutil.which("unshare") or subprocess.run([*own, "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here, not even for one process")
    (tmp_path / "script.py").write_text(IN_A_SMALL_DISK)
    command = f"{mount} && exec {sys.executable} {tmp_path / 'script.py'} {disk} {CANARY}"
    done = subprocess.run([*own, "sh", "-c", command], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    full, read_only, *report = done.stdout.split("\n")
    assert "campaign.sqlite cannot be written: no space left on its disk; choose another place" in full
    assert read_only == f"{disk}/run/campaign.lock cannot be written: Read-only file system; choose another --out"
    assert "1 divergence in " in "\n".join(report)


def test_a_truncated_database_is_said_and_nothing_is_lost_of_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_campaign(Settings("numba", ("lfm2",), programs=3, out=tmp_path / "run"))
    path = tmp_path / "run" / "campaign.sqlite"
    path.write_bytes(path.read_bytes()[:8192])
    words = ["--target", "numba", "--family", "lfm2", "--programs", "3", "--out", str(tmp_path / "run")]
    assert application.run(["fuzz", *words]) == 64
    assert f"statedrift: {path} is damaged: " in capsys.readouterr().err
    assert application.run(["report", str(tmp_path / "run")]) == 2
    assert path.stat().st_size == 8192
    assert application.run(["fuzz", *words, "--fresh"]) == 0
    assert read_campaign(tmp_path / "run-2").account.programs == 3


class JumpingClock(datetime):
    """Tells another year at every look, backwards as often as forwards."""

    chance = random.Random(SEED)

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=cls.chance.randint(-20_000, 20_000))


def test_a_clock_that_jumps_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_module, "datetime", JumpingClock)
    monkeypatch.setattr(time, "time", lambda: random.uniform(0.0, 4e9))
    for runs in (1, 2):
        began = time.monotonic()
        done = run_campaign(Settings(CANARY, ("lfm2",), seconds=1.0, out=tmp_path / "run"))
        assert done.account.complete
        assert done.account.runs == runs
        assert runs <= done.account.seconds <= time.monotonic() - began + 60.0 * (runs - 1)
        assert check_whole(tmp_path / "run", None) == done
    assert len(done.findings) == 1
