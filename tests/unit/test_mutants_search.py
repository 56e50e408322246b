"""Looking for mutants: the statistics by hand, the fuzzers that are compared, the fixed twins, the file of results, and the pages."""

import csv
import math
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from time import perf_counter

import msgspec
import pytest
from statedrift.cli import mutants as command
from statedrift.cli.mutants_report import Measured, Report, report_markdown, report_of, report_text
from statedrift.fuzz import hypofuzz_baseline
from statedrift.fuzz.generation import generate
from statedrift.fuzz.generation_operations import draw_program
from statedrift.fuzz.mutants import MUTANTS, MutantTarget
from statedrift.fuzz.mutants import search as searching
from statedrift.fuzz.mutants.search import (
    FINDERS,
    Detection,
    Twin,
    TwinPiece,
    UniformChoices,
    check_ready,
    effect_size,
    purity,
    search,
    sound_noise,
    survival_median,
    try_twin,
    try_twins,
)
from statedrift.fuzz.naive_baseline import WALL_FACTOR_MAX
from statedrift.fuzz.trial import Bench, Trial
from statedrift.spec.errors import UnavailableError, UsageError
from statedrift.spec.models import Model
from statedrift.spec.programs import Program, program_line

MUTANT = MUTANTS["share_forgets_attention"]
needs_hypofuzz = pytest.mark.skipif(not hypofuzz_baseline.is_installed(), reason=hypofuzz_baseline.MISSING)


@pytest.mark.parametrize(
    ("times", "is_found", "median"),
    [
        ([3.0, 1.0, 2.0], [True, True, True], 2.0),
        ([1.0, 2.0, 3.0, 4.0], [True, True, True, True], 2.0),
        ([1.0, 5.0, 5.0], [True, False, False], None),  # a share of 2/3 is still to be found
        ([1.0, 1.5, 2.0, 3.0], [True, False, True, True], 2.0),  # 3/4, then 3/4 * 1/2: what gave up is not counted as found
        ([2.0, 2.0], [False, True], 2.0),  # at one time, what was found comes first
        ([5.0], [False], None),
    ],
)
def test_the_median_counts_runs_that_gave_up(times: list[float], is_found: list[bool], median: float | None) -> None:
    assert survival_median(times, is_found) == median


@pytest.mark.parametrize(
    ("first", "second", "size"),
    [
        ([1.0, 2.0], [3.0, 4.0], 1.0),
        ([3.0, 4.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [1.0, 2.0], 0.5),
        ([1.0, 3.0], [2.0, 4.0], 0.75),
        ([1.0, math.inf], [math.inf, math.inf], 0.75),  # two that never found it are equal
    ],
)
def test_the_effect_size_is_how_likely_the_first_is_quicker(first: list[float], second: list[float], size: float) -> None:
    assert effect_size(first, second) == size


def test_purity_is_the_share_of_the_commonest_signature() -> None:
    assert purity(["a", "b", "a", "a"]) == 0.75


def test_uniform_choices_switch_nothing_off() -> None:
    assert UniformChoices(0, "program").swarm(4) == [1, 1, 1, 1]
    assert {UniformChoices(seed, "program").weighted([1, 100]) for seed in range(40)} == {0, 1}
    programs = [draw_program(UniformChoices(seed, "program"), Model("lfm2"), 30) for seed in range(20)]
    assert programs == [draw_program(UniformChoices(seed, "program"), Model("lfm2"), 30) for seed in range(20)]
    assert programs != [generate(seed, Model("lfm2")) for seed in range(20)]


@pytest.mark.parametrize("finder", [pytest.param(finder, marks=needs_hypofuzz) if finder == "hypofuzz" else finder for finder in FINDERS])
def test_every_fuzzer_finds_a_plain_mutant_and_is_silent_on_its_twin(finder: str) -> None:
    noises = sound_noise([MUTANT])
    detection = search(MUTANT, finder, 0, 20.0, noises)
    assert detection.is_found
    assert detection.programs > 0
    assert (detection.reduced_operations is None) == (finder in ("hypothesis", "hypofuzz"))
    assert try_twin(MUTANT, 0, noises, programs=16).alarms == ()


@pytest.mark.parametrize("finder", ["hypothesis", pytest.param("hypofuzz", marks=needs_hypofuzz)])
def test_a_run_that_finds_nothing_gives_up_at_its_limit(finder: str) -> None:
    mutant = MUTANTS["partial_restore_keeps_later_keys"]  # a partial save is no operation of the state machine
    noises = sound_noise([mutant])
    started = perf_counter()
    detection = search(mutant, finder, 0, 0.3, noises)
    assert not detection.is_found
    # on a machine that is busy with other things so many times the limit have passed before the process had its time
    assert detection.seconds >= 0.3 or perf_counter() - started >= WALL_FACTOR_MAX * 0.3
    assert detection.programs > 1


@needs_hypofuzz
def test_hypofuzz_leaves_hypothesis_as_it_was() -> None:
    from hypothesis.internal import observability

    before = observability.OBSERVABILITY_CHOICES, observability.OBSERVABILITY_COLLECT_COVERAGE
    search(MUTANT, "hypofuzz", 0, 0.1, sound_noise([MUTANT]))
    assert before == (observability.OBSERVABILITY_CHOICES, observability.OBSERVABILITY_COLLECT_COVERAGE)
    assert not observability.observability_enabled()


@needs_hypofuzz
def test_hypofuzz_that_fails_in_itself_has_found_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from hypofuzz.provider import HypofuzzProvider

    monkeypatch.setattr(HypofuzzProvider, "after_test_case", None)
    with pytest.raises(UnavailableError, match=r"could not test: HypoFuzz [\d.]+ failed in itself on share_forgets_attention: 'NoneType'"):
        search(MUTANT, "hypofuzz", 0, 0.1, sound_noise([MUTANT]))


def test_a_search_with_hypothesis_leaves_no_file(tmp_path: Path) -> None:
    finders = [finder for finder in ("hypothesis", "hypofuzz") if finder != "hypofuzz" or hypofuzz_baseline.is_installed()]
    script = f"""if True:
        from statedrift.fuzz.mutants import MUTANTS
        from statedrift.fuzz.mutants.search import search, sound_noise
        mutant = MUTANTS["{MUTANT.name}"]
        assert all(search(mutant, finder, 0, 5.0, sound_noise([mutant])).is_found for finder in {finders})
    """
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    assert list(tmp_path.iterdir()) == []


def test_twins_take_turns_on_programs_that_no_search_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = [MUTANT, MUTANTS["share_forgets_attention"]]
    noises = sound_noise(twins)
    piece = try_twins(twins, 0, 0.01, noises)
    assert piece.mutants == (MUTANT.name, MUTANT.name)
    assert piece.programs == 2 * searching.BATCH_PROGRAMS  # a whole turn, although its time was over before
    assert piece.seconds >= 0.01
    assert piece.alarms == ()
    tried: list[set[str]] = []

    def note(bench: Bench, programs: list[Program]) -> list[Trial]:
        tried[-1] |= {program_line(program) for program in programs}
        return []

    with monkeypatch.context() as patched:
        patched.setattr(Bench, "try_programs", note)
        for number in (0, 1):
            tried.append(set())
            try_twins(twins, number, 0.01, noises)
        for seed in (0, 1, 2):
            tried.append(set())
            try_twin(MUTANT, seed, noises)
    assert all(tried)
    assert not any(some & others for some, others in combinations(tried, 2))
    monkeypatch.setattr(searching, "MutantTarget", lambda mutant, is_faulty: MutantTarget(mutant))  # twins with the fault in them
    alarms = try_twins(twins, 0, 0.01, noises).alarms
    assert alarms
    assert all(alarm.startswith(f"{MUTANT.name}: model lfm2") for alarm in alarms)


def test_a_mutant_that_is_not_what_it_says_is_not_measured() -> None:
    wrong = msgspec.structs.replace(MUTANT, kind="wrong-position")
    with pytest.raises(UnavailableError, match="gives wrong-output and not wrong-position"):
        check_ready(wrong, sound_noise([MUTANT]))


def _run(seed: int, seconds: float, is_found: bool = True, operations: int | None = 3) -> Detection:
    return Detection(MUTANT.name, "statedrift", seed, 20.0, is_found, seconds, 5, "s", operations, "p")


def _report(runs: list[Detection], twins: list[Twin], pieces: list[TwinPiece] | None = None, gaps: list[str] | None = None) -> Report:
    return report_of([MUTANT], 2, 20.0, Measured(runs, twins, pieces or [], gaps or []))


def test_the_stated_bounds_can_fail() -> None:
    good = _report([_run(0, 1.0), _run(1, 2.0)], [Twin(MUTANT.name, 0, 64, ())])
    assert [bound.holds for bound in good.bounds] == [True] * 5
    bad = _report([_run(0, 20.0, False, None), _run(1, 15.0, operations=7)], [Twin(MUTANT.name, 0, 64, ("decode 0:1",))])
    assert [bound.holds for bound in bad.bounds] == [True, False, False, False, False]
    never = _report([_run(0, 20.0, False, None), _run(1, 20.0, False, None)], [Twin(MUTANT.name, 0, 64, ())])
    assert not never.bounds[0].holds
    assert "> 20" in report_text(never)
    assert MUTANT.name in report_text(bad)


def test_fixed_twins_that_ran_for_a_time_are_told_by_family() -> None:
    pieces = [TwinPiece("lfm2", ("a", "b"), 0, 30.0, 100, ()), TwinPiece("lfm2", ("a", "b"), 1, 31.0, 101, ("b: decode 0:1",))]
    report = _report([_run(0, 1.0)], [], [*pieces, TwinPiece("jamba", ("c",), 0, 60.4, 50, ())])
    assert [(family.family, family.twins, family.programs, family.seconds, family.alarms) for family in report.twin_families] == [
        ("lfm2", 2, 201, 61.0, 1),
        ("jamba", 1, 50, 60.4, 0),
    ]
    bound = report.bounds[-1]
    assert (bound.stated, bound.measured, bound.holds) == ("no alarm on the fixed twins, 60 s of each family", "1 in 251 programs", False)
    for text in (report_text(report), report_markdown(report, [])):
        assert "alarm on the fixed twin of b: decode 0:1" in text
    assert "| lfm2 | 2 | 201 | 61 | 1 |" in report_markdown(report, [])
    assert "Fixed twins" not in report_markdown(_report([_run(0, 1.0)], []), [])


def test_the_page_has_the_fuzzers_side_by_side() -> None:
    theirs = [Detection(MUTANT.name, "hypofuzz", seed, 20.0, seed == 0, 4.0 + 16.0 * seed, 9) for seed in range(2)]
    page = report_markdown(_report([_run(0, 1.0), _run(1, 5.0)], [], gaps=["no such peer"]), [("date", "today")])
    assert f"| `{MUTANT.name}` | 1.00 | 5 | +0 | 100 % |\n" in page
    assert "- no such peer\n" in page
    assert "| date | today |" in page
    assert "\n- *hypofuzz*" not in page
    page = report_markdown(_report([_run(0, 1.0), _run(1, 5.0), *theirs], []), [])
    assert f"| `{MUTANT.name}` | 1.00 | 5 | +0 | 100 % | 4.00 (1 of 2) | 0.75 |\n" in page
    assert "| share found within | 1 s | 10 s | 20 s | ours quicker, alike, slower |" in page
    assert "| hypofuzz | 0 % | 100 % | 100 % | 1, 0, 0 |" in page
    assert "\n- *hypofuzz*" in page


def test_a_second_run_goes_on_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.jsonl"
    assert command.mutants_command([MUTANT.name], False, False, results, True) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(command, "search", None)
    monkeypatch.setattr(command, "try_twin", None)
    assert command.mutants_command([MUTANT.name], False, False, results, True) == 0
    assert capsys.readouterr().out == first
    assert len(results.read_text().splitlines()) == 1 + 2 * command.SEEDS  # the first says what it was measured with
    monkeypatch.undo()
    whole = results.read_bytes()
    results.write_bytes(whole[:-20])  # a run that was ended while it wrote
    assert command.mutants_command([MUTANT.name], False, False, results, True) == 0
    again = results.read_bytes()
    assert again.startswith(whole[: whole.rstrip(b"\n").rfind(b"\n") + 1])
    assert len(again.splitlines()) == 1 + 2 * command.SEEDS


def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run takes time; every piece of twins is as long as it should be."""
    monkeypatch.setattr(
        command, "search", lambda mutant, finder, seed, limit, noises: Detection(mutant.name, finder, seed, limit, True, 1.0, 5)
    )
    monkeypatch.setattr(
        command, "try_twins", lambda mutants, number, seconds, noises: TwinPiece("lfm2", (mutants[0].name,), number, seconds, 16, ())
    )


def test_twins_that_are_run_for_a_time_go_on_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    _quick(monkeypatch)
    monkeypatch.setattr(command, "try_twin", None)
    assert command.mutants_command([MUTANT.name], False, False, results, False, twins_seconds=40.0) == 0
    assert "no alarm on the fixed twins, 40 s of each family" in capsys.readouterr().out
    pieces = [msgspec.json.decode(line).get("twins") for line in results.read_bytes().splitlines()]
    assert [(piece["number"], piece["seconds"]) for piece in pieces if piece] == [(0, 30.0), (1, 10.0)]
    monkeypatch.setattr(command, "search", None)
    assert command.mutants_command([MUTANT.name], False, False, results, False, twins_seconds=70.0) == 0
    pieces = [msgspec.json.decode(line).get("twins") for line in results.read_bytes().splitlines()]
    assert [(piece["number"], piece["seconds"]) for piece in pieces if piece] == [(0, 30.0), (1, 10.0), (2, 30.0)]
    monkeypatch.setattr(command, "try_twins", lambda *_: TwinPiece("lfm2", (MUTANT.name,), 3, 30.0, 16, ("x: y",)))
    assert command.mutants_command([MUTANT.name], False, False, results, False, twins_seconds=71.0) == 1


def test_a_peer_that_is_not_installed_is_left_out_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, page, table = tmp_path / "results.jsonl", tmp_path / "page.md", tmp_path / "runs.csv"
    _quick(monkeypatch)
    monkeypatch.setattr(hypofuzz_baseline, "is_installed", lambda: False)
    assert command.mutants_command([MUTANT.name], False, True, results, False, 5.0, page, table) == 0
    printed = capsys.readouterr().out
    assert printed.count(hypofuzz_baseline.MISSING) == 1
    assert "pip install 'statedrift[bench]'" in page.read_text()
    with table.open(newline="") as file:
        assert [row["finder"] for row in csv.DictReader(file)] == ["statedrift", "uniform", "hypothesis"] * command.SEEDS
    monkeypatch.setattr(hypofuzz_baseline, "is_installed", lambda: True)
    assert command.mutants_command([MUTANT.name], False, True, results, False, 5.0, page) == 0
    assert hypofuzz_baseline.MISSING not in capsys.readouterr().out
    monkeypatch.setattr(hypofuzz_baseline, "is_installed", lambda: False)  # elsewhere, what is in the file is shown all the same
    assert command.mutants_command([MUTANT.name], False, True, results, False, 5.0, page) == 0
    assert hypofuzz_baseline.MISSING not in capsys.readouterr().out
    assert "| hypofuzz: seconds |" in page.read_text()


def test_a_page_names_every_machine_that_its_file_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    _quick(monkeypatch)
    for day in ("2026-01-01", "2026-01-02", "2026-01-03"):
        facts = [("date", day), ("memory", "1 GiB")]
        monkeypatch.setattr(command, "machine_facts", lambda packages, facts=facts: facts)
        full = day == "2026-01-02"  # on the third day nothing is measured
        assert command.mutants_command([MUTANT.name], full, False, results, False, 5.0, page) == 0
    assert "| date | 2026-01-01; 2026-01-02 |" in page.read_text()
    assert "| memory | 1 GiB |" in page.read_text()


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no mutant `nothing`"):
        command.mutants_command(["nothing"], False, False, None, False)
    other = tmp_path / "other.txt"
    other.write_text("no JSON\n")
    with pytest.raises(UsageError, match="cannot be read as results"):
        command.mutants_command([MUTANT.name], False, False, other, False)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match=r"--twins .*: give a number of seconds above 0"):
            command.mutants_command([MUTANT.name], False, False, None, False, seconds)
    with pytest.raises(UsageError, match=r"--write .*: give a file in a folder that exists"):
        command.mutants_command([MUTANT.name], False, False, None, False, write=tmp_path / "nowhere" / "page.md")
    with pytest.raises(UsageError, match=r"--csv .*: give a file in a folder that exists"):
        command.mutants_command([MUTANT.name], False, False, None, False, csv=tmp_path)


@pytest.mark.parametrize("text", ['{"my precious": "data"}', "notes", '{"version":"x"}\nnotes'])
def test_a_file_of_results_that_is_none_of_ours_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    file = tmp_path / "precious.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="--results"):
        command._Results(file)
    assert file.read_text() == text


def test_a_file_of_results_is_of_one_command_at_a_time_and_an_ordinary_file(tmp_path: Path) -> None:
    first = command._Results(tmp_path / "results.jsonl")
    with pytest.raises(UsageError, match="another command has this file"):
        command._Results(first.path)
    with pytest.raises(UsageError, match="no ordinary file"):
        command._Results(Path("/dev/null"))


def test_a_file_of_results_without_a_folder_is_refused_at_once(tmp_path: Path) -> None:
    for option in ("results", "write", "csv"):
        with pytest.raises(UsageError, match=f"--{option} .*: give a file in a folder that exists"):
            command.mutants_command([MUTANT.name], False, False, **{"results": None, option: tmp_path / "no" / "file"}, as_json=False)
