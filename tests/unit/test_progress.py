"""Where a campaign is, told from outside: the beat, its numbers, and stats.json."""

import time
from pathlib import Path

import msgspec
import pytest
from statedrift.fuzz import campaign as campaign_module
from statedrift.fuzz.campaign import Settings, run_campaign
from statedrift.fuzz.progress import Progress, Watch, beating
from statedrift.spec.errors import UsageError
from statedrift.store.statistics import STATISTICS_FILE, Statistics, write_statistics

CANARY = "statedrift.fuzz.canary:FREQUENT"
TOLD = Progress(0.0, 0, 0, 0.0, 0, None, 0, "noise")


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_nothing_told_is_a_campaign_that_starts() -> None:
    clock = Clock()
    watch = Watch(clock)
    clock.now += 4.04
    assert watch.statistics() == Statistics(4.0, 0, 0.0, 0.0, 0, 0, 0, 0, None, 1, "starting")


def test_programs_a_second_are_of_this_run_and_of_the_time_since_its_first() -> None:
    clock = Clock()
    watch = Watch(clock)
    watch.tell(msgspec.structs.replace(TOLD, programs=5000))  # it goes on where an earlier run ended
    clock.now += 30.0  # measuring and compiling
    watch.tell(msgspec.structs.replace(TOLD, programs=5000, phase="fuzzing"))
    clock.now += 10.0
    watch.tell(msgspec.structs.replace(TOLD, programs=5640, phase="fuzzing"))
    statistics = watch.statistics()
    assert (statistics.elapsed, statistics.programs, statistics.programs_per_second) == (40.0, 5640, 64.0)


def test_seconds_since_the_last_find_go_on_while_nothing_is_told() -> None:
    clock = Clock()
    watch = Watch(clock)
    watch.tell(msgspec.structs.replace(TOLD, findings=3))  # of an earlier run
    assert watch.statistics().seconds_since_last_find is None
    watch.tell(msgspec.structs.replace(TOLD, findings=4, phase="reducing"))
    clock.now += 12.5
    assert watch.statistics().seconds_since_last_find == 12.5


def test_findings_of_a_baseline_are_counted_apart() -> None:
    watch = Watch()
    watch.tell(msgspec.structs.replace(TOLD, findings=5, findings_known=2))
    assert (watch.statistics().findings_new, watch.statistics().findings_known) == (3, 2)


def test_beats_come_while_nothing_else_happens_and_end_with_it() -> None:
    beats: list[float] = []
    with beating(lambda: beats.append(time.monotonic()), 0.02, 0.05):
        time.sleep(0.3)
    count = len(beats)
    assert count >= 3
    time.sleep(0.1)
    assert len(beats) == count


def test_a_clock_that_jumps_changes_no_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    beats: list[int] = []
    with beating(lambda: beats.append(1), 0.02, 0.05):
        for jump in (-86_400.0, 86_400.0, 0.0):
            monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
            time.sleep(0.1)
    assert 3 <= len(beats) <= 8


def test_stats_json_says_how_a_campaign_ended(tmp_path: Path) -> None:
    done = run_campaign(Settings("numba", ("lfm2",), programs=64, out=tmp_path / "run"))
    statistics = msgspec.json.decode((tmp_path / "run" / STATISTICS_FILE).read_bytes(), type=Statistics)
    assert done.account.complete
    assert (statistics.programs, statistics.phase, statistics.complete, statistics.jobs) == (64, "done", True, 1)
    assert statistics.elapsed >= done.account.seconds - 0.1
    assert statistics.accepted_percent > 50


def test_stats_json_is_replaced_while_a_campaign_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign_module, "FIRST_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(campaign_module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr("statedrift.fuzz.known.EXPLAINED_REDUCTIONS_MAX", 1)
    beats: list[Statistics] = []
    kept: list[Statistics] = []

    def look(statistics: Statistics) -> None:
        beats.append(statistics)
        if (path := tmp_path / STATISTICS_FILE).exists():
            kept.append(msgspec.json.decode(path.read_bytes(), type=Statistics))

    run_campaign(Settings(CANARY, ("lfm2",), programs=64, out=tmp_path), on_beat=look, is_known=lambda finding: True)
    assert {"noise", "reducing"} <= {statistics.phase for statistics in beats}
    assert beats[-1].findings_new == 0
    assert beats[-1].findings_known == 1
    assert kept
    assert set(kept) <= set(beats)
    assert not any(statistics.complete for statistics in kept)
    elapsed = [statistics.elapsed for statistics in beats]
    assert elapsed == sorted(elapsed)


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="cannot be written"):
        write_statistics(tmp_path / "file", Watch().statistics())


def test_the_page_names_every_field_in_its_order() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "campaigns.md").read_text()
    named = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert tuple(named) == Statistics.__struct_fields__
    example = next(line for line in page.splitlines() if line.startswith("elapsed="))
    assert [pair.partition("=")[0] for pair in example.split()] == [name for name in named if name != "complete"]
