"""Campaigns on a Dask cluster: Dask's own scheduler and workers, started here on loopback as processes of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
FOLDERS = [str(TESTS), str(TESTS / "fixtures")]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

import cluster_targets  # noqa: E402
from dask_cluster import Cluster, running_cluster  # noqa: E402
from distributed import Client  # noqa: E402
from statedrift.cli.application import run  # noqa: E402
from statedrift.fuzz import campaign as campaign_module  # noqa: E402
from statedrift.fuzz import known as known_module  # noqa: E402
from statedrift.fuzz.campaign import Settings, run_campaign  # noqa: E402
from statedrift.spec.errors import UnavailableError  # noqa: E402
from statedrift.store.campaigns import Campaign, Noise  # noqa: E402

from tests.processes import descendants  # noqa: E402

CANARY = "statedrift.fuzz.canary:FREQUENT"
SECONDS_MAX = 60.0


@pytest.fixture(autouse=True)
def _little_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_module, "EXPLAINED_REDUCTIONS_MAX", 2)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No noise is measured."""
    monkeypatch.setattr(campaign_module.Bench, "noise", lambda bench, model: Noise(0.0, 1e-4, 0))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers; one of them has two threads."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), 0) as started:
        for threads in ("1", "2"):
            started.start_worker("--nthreads", threads, variables={"STATEDRIFT_TEST_WORKER": str(started.folder)})
        started.await_workers(2)
        yield started


def as_found(campaign: Campaign) -> list[dict[str, object]]:
    """Findings without the time of day and the clock."""
    clocks = {"first_seen", "last_seen", "found_after_seconds"}
    return [{name: getattr(one, name) for name in one.__struct_fields__ if name not in clocks} for one in campaign.findings]


def counts(campaign: Campaign) -> dict[str, object]:
    account = campaign.account
    names = ("programs", "operations", "outcomes", "verdicts", "noise", "could_not_test", "reach", "canary", "known", "unreduced")
    return {name: getattr(account, name) for name in names}


def tasks_of(address: str) -> int:
    """Tasks that the scheduler and its workers know, those included that a thread is still busy with."""
    with Client(address, set_as_default=False) as client:
        workers = client.run(lambda dask_worker: len(dask_worker.state.tasks))
        return int(client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))) + sum(workers.values())


def await_nothing_running(address: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while (left := tasks_of(address)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == 0


def await_true(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert holds()


# --- the same campaign -------------------------------------------------------------------------------------------------------


def test_a_cluster_finds_reduces_and_counts_what_one_process_does(cluster: Cluster) -> None:
    settings = Settings(CANARY, ("lfm2",), programs=200, seed=5)
    alone = run_campaign(settings)
    together = run_campaign(Settings(CANARY, ("lfm2",), programs=200, seed=5, scheduler=cluster.address))
    assert alone.findings
    assert as_found(together) == as_found(alone)
    assert counts(together) == counts(alone)
    assert together.account.jobs == 2
    await_nothing_running(cluster.address)


def test_a_cluster_serves_one_campaign_after_the_other_and_keeps_nothing(cluster: Cluster, quiet: None) -> None:
    for target in ("numba", "faulty:CLEAR_DIES", "numba"):
        done = run_campaign(Settings(target, ("lfm2",), programs=128, scheduler=cluster.address))
        assert done.account.complete
        assert done.account.programs == 128
        assert bool(done.findings) == (target != "numba")
    await_nothing_running(cluster.address)
    below = set[int]().union(*(descendants(process.pid) for process in cluster.processes))
    assert not below  # the child processes of the native target ended with its campaign


# --- losses ------------------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_lost_in_the_midst_of_a_shard_changes_nothing(tmp_path: Path, quiet: None) -> None:
    with running_cluster(tmp_path, 0) as own:
        for _ in range(2):
            own.start_worker("--nthreads", "1", variables={"STATEDRIFT_TEST_WORKER": str(tmp_path)})
        own.await_workers(2)
        done = run_campaign(Settings("cluster_targets:DIES_ONCE", ("lfm2",), programs=320, seed=2, scheduler=own.address))
        assert sorted(process.poll() is None for process in own.processes) == [False, True, True]
    alone = run_campaign(Settings("cluster_targets:DIES_ONCE", ("lfm2",), programs=320, seed=2))
    assert counts(done) == counts(alone)
    assert done.account.verdicts == {"ok": 320}
    assert done.account.complete


def test_a_worker_that_its_nanny_starts_again_goes_on(tmp_path: Path, quiet: None) -> None:
    with running_cluster(tmp_path, 0) as own:
        own.start_worker("--nanny", "--nthreads", "1", variables={"STATEDRIFT_TEST_WORKER": str(tmp_path)})
        own.await_workers(1)
        done = run_campaign(Settings("cluster_targets:DIES_ONCE", ("lfm2",), programs=192, scheduler=own.address))
    assert done.account.verdicts == {"ok": 192}
    assert done.account.complete


def test_a_shard_that_is_lost_twice_ends_the_campaign_with_a_reason(tmp_path: Path, quiet: None) -> None:
    with running_cluster(tmp_path, 0) as own:
        for _ in range(4):
            own.start_worker("--nthreads", "1", variables={"STATEDRIFT_TEST_WORKER": str(tmp_path)})
        own.await_workers(4)
        with pytest.raises(UnavailableError, match=r"a task was lost twice: the worker processes at tcp://127\S+ and tcp://127\S+ ended"):
            run_campaign(Settings("cluster_targets:DIES_ALWAYS", ("lfm2",), programs=64, scheduler=own.address))
        assert sum(process.poll() is None for process in own.processes) == 3  # the scheduler, and two workers that nobody sent it to


def test_a_scheduler_that_is_lost_ends_the_campaign_with_what_was_done(tmp_path: Path, quiet: None) -> None:
    with running_cluster(tmp_path, 1, "--nthreads", "1") as own:

        def end(progress: campaign_module.Progress) -> None:
            if progress.programs >= 64:
                own.scheduler.kill()

        done = run_campaign(Settings("numba", ("lfm2",), programs=6400, scheduler=own.address), end)
        assert done.account.programs >= 64
        assert not done.account.complete
        assert done.account.ended_by is not None
        assert done.account.ended_by.startswith(f"the scheduler at {own.address} was lost")


# --- interruptions -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import signal
from statedrift.fuzz import campaign
from statedrift.store.campaigns import Noise
campaign.Bench.noise = lambda bench, model: Noise(0.0, 1e-4, 0)
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit that it is ignored
    settings = campaign.Settings({target!r}, ("lfm2",), seconds=600.0, scheduler={address!r})
    done = campaign.run_campaign(settings, lambda progress: print(progress.programs, progress.phase, flush=True))
    print("complete" if done.account.complete else "incomplete", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize(("target", "phase"), [("cluster_targets:SLOW", "fuzzing"), (CANARY, "reducing")])
def test_a_campaign_that_is_ended_leaves_nothing_running_and_the_cluster_of_use(
    number: signal.Signals, target: str, phase: str, cluster: Cluster, tmp_path: Path, quiet: None
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(target=target, address=cluster.address))
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    while not ((line := process.stdout.readline().split()) and line[0] != "0" and line[1] == phase):
        assert process.poll() is None
    process.send_signal(number)
    output, _ = process.communicate(timeout=SECONDS_MAX)
    if number == signal.SIGINT:
        assert output.split()[-1] == "incomplete"
    await_nothing_running(cluster.address)
    assert run_campaign(Settings("numba", ("lfm2",), programs=8, scheduler=cluster.address)).account.verdicts == {"ok": 8}


def test_a_task_notices_that_nobody_waits_for_it(cluster: Cluster, tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    with Client(cluster.address, set_as_default=False) as client:
        future = client.submit(cluster_targets.work_until_unwanted, str(begun), str(ended), pure=False)
        await_true(begun.exists)
        time.sleep(0.2)
        assert not ended.exists()
        del future
        await_true(ended.exists)


# --- what cannot take part ---------------------------------------------------------------------------------------------------

NO_STATEDRIFT = """
import importlib.metadata as metadata
known = metadata.version
def version(name):
    if name == "statedrift":
        {answer}
    return known(name)
version.__module__, version.__qualname__ = known.__module__, known.__qualname__
metadata.version = version
"""


@pytest.mark.parametrize(
    ("answer", "target", "message"),
    [
        ("raise metadata.PackageNotFoundError(name)", "numba", r"it has no statedrift; install statedrift \S+ where it runs"),
        ("return '0.0.1'", "numba", "it has statedrift 0.0.1, and this process"),
        ("pass", "cluster_targets:OTHER_VERSION", "its target is numba of yesterday, and that of this process statedrift"),
        ("pass", "cluster_targets:NOT_THERE", "the device is in use by another process"),
    ],
)
def test_a_worker_that_cannot_take_part_is_named(answer: str, target: str, message: str, tmp_path: Path, quiet: None) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_STATEDRIFT.format(answer=answer))
    with running_cluster(tmp_path, 0) as own:
        own.start_worker(path=[str(tmp_path)], variables={"STATEDRIFT_TEST_WORKER": str(tmp_path)})
        own.await_workers(1)
        with pytest.raises(UnavailableError, match=rf"worker tcp://127\S+ of the cluster cannot take part: {message}"):
            run_campaign(Settings(target, ("lfm2",), programs=64, scheduler=own.address))


def test_a_scheduler_that_does_not_answer_is_said_within_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    status = run(["fuzz", "--target", "numba", "--family", "lfm2", "--programs", "1", "--scheduler", "tcp://127.0.0.1:9"])
    assert time.monotonic() - started < 10
    assert status == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1] == (
        "statedrift: the scheduler at tcp://127.0.0.1:9 does not answer within 8 s; is it running, and reached from here? dask scheduler"
    )


def test_a_scheduler_without_workers_is_said(tmp_path: Path) -> None:
    with (
        running_cluster(tmp_path, 0) as own,
        pytest.raises(UnavailableError, match=f"has no workers; start one: dask worker {own.address}"),
    ):
        run_campaign(Settings("numba", ("lfm2",), programs=1, scheduler=own.address))


@pytest.mark.parametrize("address", ["localhost", "tcp://localhost", "127.0.0.1:8786", "tcp://a b:1", "http://a:1"])
def test_what_is_no_address_is_a_usage_error(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fuzz", "--target", "numba", "--scheduler", address]) == 64
    assert "give the address that `dask scheduler` prints" in capsys.readouterr().err


def test_jobs_are_of_this_machine_and_a_scheduler_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fuzz", "--target", "numba", "--scheduler", "tcp://127.0.0.1:9", "--jobs", "2"]) == 64
    assert "leave out one of them" in capsys.readouterr().err
