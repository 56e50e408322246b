"""The throughput benchmark: its arithmetic, its bounds and its text, on fixed data; nothing here is timed."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from statedrift.cli import throughput as command
from statedrift.cli.application import run
from statedrift.cli.throughput import (
    Report,
    bounds_of,
    machine_facts,
    naive_ratio,
    rate_in_turn,
    report_markdown,
    report_text,
)
from statedrift.fuzz.naive_baseline import Mix, NaiveThroughput, campaign_mix, measure_naive
from statedrift.fuzz.shards import settled_heap, shard_programs
from statedrift.fuzz.throughput import Memory, Throughput, measure, one_core
from statedrift.spec.errors import UnavailableError
from statedrift.spec.operations import Decode

MIB = 1 << 20
MIX = Mix(programs=100, operations=1500, decodes=750, items=1500, tokens=4500)
NUMBA = Throughput(
    target="numba",
    version="statedrift 0.1.0",
    families=("mamba2",),
    seed=0,
    programs=11_200,
    operations=168_000,
    divergent=0,
    failed=0,
    seconds=20.0,
    core_seconds=16.0,
    seconds_generating=1.0,
    seconds_running=14.0,
    seconds_judging=5.0,
    parent_peak_bytes=400 * MIB,
    child_peak_bytes=0,
    memory=tuple(Memory(float(second), 300 * MIB + second * MIB // 10, 0) for second in range(1, 21)),
)
LLAMACPP = msgspec.structs.replace(
    NUMBA,
    target="llamacpp",
    families=("lfm2",),
    programs=2000,
    operations=26_000,
    divergent=800,
    core_seconds=20.0,
    child_peak_bytes=100 * MIB,
)
NAIVE = NaiveThroughput("mamba2", MIX, seconds=4.0, core_seconds=4.0)
REPORT = Report((NUMBA, LLAMACPP), (NAIVE,), MIX, ("target other is not available: no library",))


def changed(throughput: Throughput, **values: object) -> Report:
    return Report((msgspec.structs.replace(throughput, **values),), (NAIVE,), MIX, ())  # type: ignore[arg-type]


def beside(programs_per_second: float) -> NaiveThroughput:
    """A naive way of so many programs a second."""
    seconds = MIX.programs / programs_per_second
    return msgspec.structs.replace(NAIVE, seconds=seconds, core_seconds=seconds)


def failing(report: Report) -> list[str]:
    return [bound.stated for bound in bounds_of(report) if not bound.holds]


def test_rates_are_by_the_time_of_the_core_and_by_the_clock() -> None:
    assert NUMBA.programs_per_core_second == 700
    assert NUMBA.programs_per_second == 560
    assert NUMBA.operations_per_core_second == 10_500
    assert NUMBA.operations_per_program == 15
    assert NUMBA.generating_share == 0.05
    assert NUMBA.judging_share == 0.25


def test_where_the_cores_time_is_not_known_rates_are_by_the_clock() -> None:
    unknown = msgspec.structs.replace(NUMBA, core_seconds=None)
    assert unknown.programs_per_core_second == unknown.programs_per_second == 560


def test_growth_compares_the_last_quarter_with_the_second() -> None:
    assert NUMBA.growth_bytes is not None
    assert abs(NUMBA.growth_bytes - MIB) <= MIB // 10  # ten seconds, a tenth of a MiB each


def test_growth_before_the_second_quarter_does_not_count() -> None:
    memory = tuple(Memory(float(second), (100 if second < 5 else 400) * MIB, 0) for second in range(1, 21))
    assert msgspec.structs.replace(NUMBA, memory=memory).growth_bytes == 0


def test_growth_counts_the_child() -> None:
    memory = tuple(Memory(float(second), 100 * MIB, second * MIB) for second in range(1, 21))
    growth = msgspec.structs.replace(NUMBA, memory=memory).growth_bytes
    assert growth is not None
    assert growth >= 10 * MIB


def test_growth_of_too_few_samples_is_not_known() -> None:
    assert msgspec.structs.replace(NUMBA, memory=NUMBA.memory[-1:]).growth_bytes is None


def test_families_in_turn_are_as_quick_as_their_times_added_up() -> None:
    assert rate_in_turn((100.0, 300.0)) == pytest.approx(150.0)


def test_the_ratio_to_the_naive_way_is_the_smaller_of_programs_and_operations() -> None:
    assert naive_ratio(NUMBA, NAIVE) == 700 / 25
    long_programs = msgspec.structs.replace(MIX, operations=6000)
    assert naive_ratio(NUMBA, msgspec.structs.replace(NAIVE, mix=long_programs)) == 10_500 / 1500


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (changed(NUMBA, programs=9599), "at least 600 programs/s"),
        (changed(NUMBA, operations=159_999), "at least 10,000 operations/s"),
        (changed(LLAMACPP, families=("mamba2",), programs=2999), "at least 150 programs/s"),
        (changed(LLAMACPP, programs=4999), "llamacpp lfm2: at least 250 programs/s"),
        (Report((NUMBA,), (beside(70.1),), MIX, ()), "at least 10 times the naive way"),
        (changed(NUMBA, seconds_generating=5.1), "at most a quarter"),
        (changed(NUMBA, seconds_generating=float("nan")), "at most a quarter"),
        (changed(NUMBA, seconds_judging=20 / 3), "less than a third"),
        (changed(NUMBA, seconds_judging=float("nan")), "less than a third"),
        (changed(NUMBA, parent_peak_bytes=1024 * MIB + 1), "at most 1024 MiB"),
        (changed(NUMBA, parent_peak_bytes=600 * MIB, child_peak_bytes=500 * MIB), "at most 1024 MiB"),
        (changed(NUMBA, memory=tuple(Memory(float(second), second * 2 * MIB, 0) for second in range(1, 21))), "more in the last quarter"),
    ],
)
def test_a_bound_fails_by_itself(report: Report, words: str) -> None:
    (stated,) = failing(report)
    assert words in stated


@pytest.mark.parametrize(
    "report",
    [
        changed(NUMBA, programs=9600, operations=160_000),
        changed(LLAMACPP, families=("mamba2",), programs=3000),
        changed(LLAMACPP, programs=5000),
        changed(NUMBA, seconds_generating=5.0),
        Report((NUMBA,), (beside(70.0),), MIX, ()),
    ],
)
def test_what_just_reaches_a_bound_holds(report: Report) -> None:
    assert failing(report) == []


def test_the_bound_on_a_target_is_on_its_families_in_turn() -> None:
    quick = msgspec.structs.replace(NUMBA, families=("mamba2",), programs=32_000, operations=640_000)  # 2,000 a second
    slow = msgspec.structs.replace(NUMBA, families=("lfm2",), programs=6400, operations=64_000)  # 400 a second
    assert failing(Report((quick, slow), (), MIX, ())) == []
    assert failing(Report((slow,), (), MIX, ())) == [
        "numba lfm2: at least 600 programs/s on one core",
        "numba lfm2: at least 10,000 operations/s on one core",
    ]
    # of a program of each: 30 operations in 1/2,000 + 1/400 of a second
    stated = {bound.stated: bound.measured for bound in bounds_of(Report((quick, slow), (), MIX, ()))}
    assert stated["numba mamba2 and lfm2 in turn: at least 10,000 operations/s on one core"] == "10,000"


def test_a_target_of_somebody_elses_has_no_bound_on_its_rate() -> None:
    report = changed(NUMBA, target="mine:TARGET", programs=1)
    assert not any("programs/s" in bound.stated or "naive" in bound.stated for bound in bounds_of(report))


def test_the_text_says_the_rates_the_notes_and_the_bounds() -> None:
    lines = report_text(REPORT).splitlines()
    (row,) = [line for line in lines if line.startswith("  numba mamba2  ")][:1]
    assert row.split()[2:] == ["700", "560", "10,500", "15.0", "0.0", "%", "28.0"]
    (row,) = [line for line in lines if line.startswith("  naive mamba2 ")]
    assert row.split()[2:] == ["25", "25", "375", "15.0", "-", "1"]
    assert "  numba mamba2: the core was shared, 80 % of the clock's time was for this." in lines
    assert "  Not measured: target other is not available: no library" in lines
    assert not any("llamacpp" in line and "150" in line for line in lines), "lfm2 alone has a bound of its own"
    assert "  FAILS     100  llamacpp lfm2: at least 250 programs/s on one core" in lines
    assert "  holds     700  numba mamba2: at least 600 programs/s on one core" in lines
    assert "  holds  10,500  numba mamba2: at least 10,000 operations/s on one core" in lines


def test_the_page_has_the_same_numbers_and_the_machine() -> None:
    page = report_markdown(REPORT, [("date", "2026-11-29"), ("processor", "a processor, 2 cores, one used")])
    assert "| numba mamba2 | 700 | 560 | 10,500 | 15.0 | 0.0 % | 28.0 |" in page
    assert "| llamacpp lfm2: at least 250 programs/s on one core | 100 | **no** |" in page
    assert "| processor | a processor, 2 cores, one used |" in page
    tables = [block for block in page.split("\n\n") if block.startswith("|")]
    assert all(len({line.count("|") for line in table.splitlines()}) == 1 for table in tables)


def test_the_machine_is_described_without_its_name() -> None:
    facts = dict(machine_facts())
    assert {"date", "processor", "memory", "system", "numba", "torch"} <= facts.keys()
    assert os.uname().nodename not in " ".join(facts.values()).split()


def command_with(monkeypatch: pytest.MonkeyPatch, numba: Throughput) -> None:
    """Put fixed measurements in the place of real ones; llamacpp is not here."""

    def measured(target: str, families: object, seconds: float, seed: int) -> Throughput:
        if target == "llamacpp":
            raise UnavailableError("target llamacpp is not available: no library")
        return numba

    monkeypatch.setattr(command, "measure", measured)
    monkeypatch.setattr(command, "measure_naive", lambda family: NAIVE)
    monkeypatch.setattr(command, "campaign_mix", lambda families, seed: MIX)


def test_the_command_writes_the_page_and_says_what_it_could_not_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command_with(monkeypatch, NUMBA)
    assert run(["bench", "throughput", "--family", "mamba2", "--write", str(tmp_path / "page.md")]) == 0
    assert "Not measured: target llamacpp is not available" in capsys.readouterr().out
    assert (tmp_path / "page.md").read_text().startswith("# Throughput\n")


def test_a_failed_bound_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    command_with(monkeypatch, msgspec.structs.replace(NUMBA, programs=10))
    assert run(["bench", "throughput", "--target", "numba", "--family", "mamba2"]) == 1


def test_a_target_that_was_named_and_is_not_here_is_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    command_with(monkeypatch, NUMBA)
    assert run(["bench", "throughput", "--target", "llamacpp"]) == 2


@pytest.mark.parametrize("place", [".", "no-such-folder/page.md"])
def test_where_nothing_can_be_written_is_said_before_measuring(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "measure", lambda *arguments: pytest.fail("it measured"))
    assert run(["bench", "throughput", "--target", "numba", "--write", str(tmp_path / place)]) == 64
    assert "--write" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its cores")
def test_one_core_is_given_back() -> None:
    before = os.sched_getaffinity(0)
    with one_core():
        assert len(os.sched_getaffinity(0)) == 1
        code = "import os; print(len(os.sched_getaffinity(0)))"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"
    assert os.sched_getaffinity(0) == before


def test_a_settled_heap_is_collected_again_afterwards() -> None:
    thresholds = gc.get_threshold()
    with settled_heap():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > thresholds[0]
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds


def test_a_measurement_counts_what_its_shards_ran() -> None:
    measured = measure("numba", ("mamba2",), 0.0, 3)  # one shard: the time is up after it
    programs = shard_programs(3, 0, ("mamba2",))
    assert (measured.programs, measured.divergent, measured.failed) == (len(programs), 0, 0)
    assert measured.operations == sum(len(program.operations) for program in programs)
    assert 0 < measured.seconds_judging < measured.seconds
    assert measured.core_seconds is not None
    assert measured.parent_peak_bytes > 50 * MIB
    assert len(measured.memory) == (1 if sys.platform == "linux" else 0)


def test_the_naive_way_agrees_with_the_target_and_does_about_a_campaigns_work() -> None:
    naive = measure_naive("lfm2", examples=60).mix
    campaign = campaign_mix(("lfm2",), 0)
    assert naive.programs >= 60
    for name in ("operations_per_program", "decode_share", "items_per_decode", "tokens_per_decode"):
        ratio = getattr(naive, name) / getattr(campaign, name)
        assert 0.5 <= ratio <= 1.25, name  # more would flatter the comparison


def test_the_mix_counts_operations_decodes_items_and_tokens() -> None:
    programs = shard_programs(5, 0, ("lfm2",))
    decodes = [operation for program in programs for operation in program.operations if isinstance(operation, Decode)]
    mix = campaign_mix(("lfm2",), 5, shards=1)
    assert (mix.programs, mix.operations) == (len(programs), sum(len(program.operations) for program in programs))
    assert (mix.decodes, mix.items) == (len(decodes), sum(len(decode.items) for decode in decodes))
    assert mix.tokens == sum(item.token_count for decode in decodes for item in decode.items)


def test_hypothesis_is_imported_only_when_the_naive_way_is_run() -> None:
    code = "import sys, statedrift.fuzz.naive_baseline; print('hypothesis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
