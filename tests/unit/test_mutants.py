"""Every mutant is what it says: its shortest program shows it, its fixed twin passes, and no shorter program shows it."""

import msgspec
import pytest
from statedrift.fuzz.mutants import MUTANTS, Mutant, MutantTarget
from statedrift.fuzz.trial import Bench, Trial
from statedrift.spec.models import Model
from statedrift.spec.programs import Program, program_text
from statedrift.store.campaigns import Noise


@pytest.fixture(scope="module")
def noises() -> dict[Model, Noise]:
    """Tolerances are those of the sound cache, measured once a model."""
    return {}


def _trials(mutant: Mutant, programs: list[Program], noises: dict[Model, Noise], is_faulty: bool) -> tuple[list[Trial], MutantTarget]:
    model = mutant.program.model
    if model not in noises:
        with Bench("numba-ring" if mutant.cache != "planes" else "numba") as sound:
            noises[model] = sound.noise(model)
    target = MutantTarget(mutant, is_faulty)
    with Bench(target) as bench:
        bench.set_noise({model: noises[model]})
        return bench.try_programs(programs), target


def _shorter(program: Program) -> list[Program]:
    operations = program.operations
    return [msgspec.structs.replace(program, operations=operations[:i] + operations[i + 1 :]) for i in range(len(operations))]


@pytest.mark.parametrize("name", MUTANTS)
def test_the_shortest_program_shows_the_mutant_and_no_shorter_one_does(name: str, noises: dict[Model, Noise]) -> None:
    mutant = MUTANTS[name]
    (trial, *shorter), target = _trials(mutant, [mutant.program, *_shorter(mutant.program)], noises, True)
    assert trial.verdict.kind == mutant.kind, trial.verdict
    assert target.probe.reached
    assert target.probe.triggered
    for other in shorter:
        assert other.verdict.kind == "ok", program_text(other.program)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fixed_twin_is_right(name: str, noises: dict[Model, Noise]) -> None:
    mutant = MUTANTS[name]
    (trial,), target = _trials(mutant, [mutant.program], noises, False)
    assert trial.verdict.kind == "ok", trial.verdict
    assert target.probe.reached
