"""Looking for mutants: the statistics by hand, the fuzzers that are compared, and the file of results."""

import math
from pathlib import Path
from time import perf_counter

import msgspec
import pytest
from statedrift.cli import mutants as command
from statedrift.fuzz.generation import generate
from statedrift.fuzz.generation_operations import draw_program
from statedrift.fuzz.mutants import MUTANTS
from statedrift.fuzz.mutants.search import (
    FINDERS,
    Detection,
    Twin,
    UniformChoices,
    check_ready,
    effect_size,
    purity,
    search,
    sound_noise,
    survival_median,
    try_twin,
)
from statedrift.fuzz.naive_baseline import WALL_FACTOR_MAX
from statedrift.spec.errors import UnavailableError, UsageError
from statedrift.spec.models import Model

MUTANT = MUTANTS["share_forgets_attention"]


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


@pytest.mark.parametrize("finder", FINDERS)
def test_every_fuzzer_finds_a_plain_mutant_and_is_silent_on_its_twin(finder: str) -> None:
    noises = sound_noise([MUTANT])
    detection = search(MUTANT, finder, 0, 20.0, noises)
    assert detection.is_found
    assert detection.programs > 0
    assert (detection.reduced_operations is None) == (finder == "hypothesis")
    assert try_twin(MUTANT, 0, noises, programs=16).alarms == ()


def test_a_run_that_finds_nothing_gives_up_at_its_limit() -> None:
    mutant = MUTANTS["partial_restore_keeps_later_keys"]  # a partial save is no operation of the state machine
    noises = sound_noise([mutant])
    started = perf_counter()
    detection = search(mutant, "hypothesis", 0, 0.3, noises)
    assert not detection.is_found
    # on a machine that is busy with other things so many times the limit have passed before the process had its time
    assert detection.seconds >= 0.3 or perf_counter() - started >= WALL_FACTOR_MAX * 0.3


def test_a_mutant_that_is_not_what_it_says_is_not_measured() -> None:
    wrong = msgspec.structs.replace(MUTANT, kind="wrong-position")
    with pytest.raises(UnavailableError, match="gives wrong-output and not wrong-position"):
        check_ready(wrong, sound_noise([MUTANT]))


def _run(seed: int, seconds: float, is_found: bool = True, operations: int | None = 3) -> Detection:
    return Detection(MUTANT.name, "statedrift", seed, 20.0, is_found, seconds, 5, "s", operations, "p")


def test_the_stated_bounds_can_fail() -> None:
    good = command.report_of([MUTANT], 2, 20.0, [_run(0, 1.0), _run(1, 2.0)], [Twin(MUTANT.name, 0, 64, ())])
    assert [bound.holds for bound in good.bounds] == [True] * 5
    bad = command.report_of(
        [MUTANT], 2, 20.0, [_run(0, 20.0, False, None), _run(1, 15.0, operations=7)], [Twin(MUTANT.name, 0, 64, ("decode 0:1",))]
    )
    assert [bound.holds for bound in bad.bounds] == [True, False, False, False, False]
    never = command.report_of([MUTANT], 2, 20.0, [_run(0, 20.0, False, None), _run(1, 20.0, False, None)], [Twin(MUTANT.name, 0, 64, ())])
    assert not never.bounds[0].holds
    assert "> 20" in command.report_text(never)
    assert MUTANT.name in command.report_text(bad)


def test_a_second_run_goes_on_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.jsonl"
    assert command.mutants_command([MUTANT.name], False, False, results, True) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(command, "search", None)
    monkeypatch.setattr(command, "try_twin", None)
    assert command.mutants_command([MUTANT.name], False, False, results, True) == 0
    assert capsys.readouterr().out == first
    assert len(results.read_text().splitlines()) == 2 * command.SEEDS
    monkeypatch.undo()
    whole = results.read_bytes()
    results.write_bytes(whole[:-20])  # a run that was ended while it wrote
    assert command.mutants_command([MUTANT.name], False, False, results, True) == 0
    again = results.read_bytes()
    assert again.startswith(whole[: whole.rstrip(b"\n").rfind(b"\n") + 1])
    assert len(again.splitlines()) == 2 * command.SEEDS


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no mutant `nothing`"):
        command.mutants_command(["nothing"], False, False, None, False)
    other = tmp_path / "other.txt"
    other.write_text("no JSON\n")
    with pytest.raises(UsageError, match="cannot be read as results"):
        command.mutants_command([MUTANT.name], False, False, other, False)
