"""Generated programs: the same everywhere, always well-formed, and made from any source of choices.

Rules
- golden/generated.txt pins what seeds give. A knowing change of the generator renews it: `python tests/unit/test_generation.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from statedrift.fuzz.choices import SeededChoices
from statedrift.fuzz.generation import generate, model_for, programs
from statedrift.spec.errors import UsageError
from statedrift.spec.models import Model
from statedrift.spec.operations import Decode
from statedrift.spec.programs import Program, check_program, parse_program, parse_program_json, program_id, program_json, program_text

GOLDEN = Path(__file__).parent / "golden" / "generated.txt"
PINNED = [(family, seed) for family in ("lfm2", "mamba2") for seed in (*range(12), 10**12)]
seeds = st.integers(0, (1 << 64) - 1)


def pinned_text() -> str:
    """The ids of some programs, and one program in full."""
    ids = [f"{family} {seed} {program_id(generate(seed, model_for(seed, family)))}" for family, seed in PINNED]
    return "\n".join(ids) + "\n\n" + program_text(generate(3, Model("lfm2")))


def test_seeds_give_the_programs_they_always_gave() -> None:
    assert pinned_text() == GOLDEN.read_text()


@pytest.mark.parametrize("hash_seed", ["0", "4242"])
def test_another_process_gives_the_same_program(hash_seed: str) -> None:
    code = (
        "from statedrift.fuzz.generation import generate\n"
        "from statedrift.spec.models import Model\n"
        "from statedrift.spec.programs import program_id\n"
        "print(*[program_id(generate(seed, Model('lfm2'))) for seed in range(40)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == [program_id(generate(seed, Model("lfm2"))) for seed in range(40)]


def test_hypothesis_is_not_imported_for_campaigns() -> None:
    code = "import sys; from statedrift.fuzz.generation import generate; print('hypothesis' in sys.modules, 'torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "False"]


def is_sound(program: Program) -> bool:
    check_program(program)
    kept_by_text = parse_program(program_text(program)) == program
    kept_by_json = parse_program_json(program_json(program)) == program
    return kept_by_text and kept_by_json


@given(seeds, st.sampled_from(["lfm2", "mamba2"]))
def test_a_seeded_program_is_well_formed(seed: int, family: str) -> None:
    program = generate(seed, model_for(seed, family))
    assert is_sound(program)
    assert program == generate(seed, model_for(seed, family))
    assert len(program.operations) <= 30


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_a_drawn_program_is_well_formed(program: Program) -> None:
    assert is_sound(program)
    assert isinstance(program.operations[-1], Decode)


@pytest.mark.parametrize("max_operations", [1, 2, 3, 5, 60])
def test_a_drawn_program_has_at_most_so_many_operations(max_operations: int) -> None:
    @settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
    @given(programs(["mamba2"], max_operations))
    def bounded(program: Program) -> None:
        assert 1 <= len(program.operations) <= max_operations
        assert program.model.family == "mamba2"

    bounded()


def test_other_seeds_give_other_programs() -> None:
    assert len({program_id(generate(seed, Model("lfm2"))) for seed in range(300)}) == 300


def test_a_small_vocabulary_is_respected() -> None:
    model = Model("lfm2", 0, (("n_vocab", 8),))
    for seed in range(200):
        check_program(generate(seed, model))


def test_only_a_model_with_a_window_is_given_a_cache_that_keeps_everything_behind_it() -> None:
    share = {family: sum(generate(seed, Model(family)).cache.swa_full for seed in range(200)) for family in ("lfm2", "lfm2_swa", "mamba2")}
    assert share["lfm2"] == share["mamba2"] == 0
    assert 20 <= share["lfm2_swa"] <= 60


def test_few_models_are_used() -> None:
    models = {model_for(seed, "lfm2") for seed in range(200)}
    assert models == {Model("lfm2", 0), Model("lfm2", 1)}


@pytest.mark.parametrize(
    ("families", "max_operations", "says"),
    [
        (["lfm2", "nosuch"], 30, "unknown family `nosuch`"),
        ([], 30, "`families` is empty"),
        (None, 0, "`max_operations` must be from 1"),
        (None, 10_001, "`max_operations` must be from 1"),
    ],
)
def test_programs_cannot_be_drawn_from_nonsense(families: list[str] | None, max_operations: int, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        programs(families, max_operations)
    assert says in str(caught.value)


def test_a_program_of_an_unknown_family_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="unknown family `nosuch`"):
        generate(0, Model("nosuch"))
    with pytest.raises(UsageError, match="unknown family `nosuch`"):
        model_for(0, "nosuch")


# --- the seeded source of choices ---------------------------------------------------------------------------------------------


@given(seeds, st.integers(-50, 50), st.integers(0, 100))
def test_integers_stay_within_their_bounds(seed: int, low: int, width: int) -> None:
    choices = SeededChoices(seed, "test")
    assert all(low <= choices.integer(low, low + width) <= low + width for _ in range(50))


def test_integers_reach_both_bounds() -> None:
    choices = SeededChoices(0, "test")
    assert {choices.integer(3, 6) for _ in range(200)} == {3, 4, 5, 6}


@given(seeds, st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_a_feature_without_weight_is_never_drawn(seed: int, weights: list[int]) -> None:
    choices = SeededChoices(seed, "test")
    cumulative = [sum(weights[: number + 1]) for number in range(len(weights))]
    assert all(weights[choices.weighted(cumulative)] > 0 for _ in range(30))


def test_weights_are_frequencies() -> None:
    choices = SeededChoices(1, "test")
    drawn = [choices.weighted([1, 1, 10]) for _ in range(5000)]
    assert 350 <= drawn.count(0) <= 650
    assert drawn.count(1) == 0


def test_a_chance_of_100_is_certain_and_of_0_impossible() -> None:
    choices = SeededChoices(2, "test")
    assert all(choices.chance(100) for _ in range(1000))
    assert not any(choices.chance(0) for _ in range(1000))


def test_purposes_have_series_of_their_own() -> None:
    one, other = SeededChoices(5, "program"), SeededChoices(5, "model")
    assert [one.integer(0, 999) for _ in range(4)] != [other.integer(0, 999) for _ in range(4)]


def test_a_repeated_step_may_end_the_series() -> None:
    calls: list[int] = []

    def step() -> bool:
        calls.append(1)
        return len(calls) < 3

    SeededChoices(0, "test").repeat(step, 5, 8, 12)
    assert len(calls) == 3


@given(seeds)
def test_a_series_has_its_bounds(seed: int) -> None:
    calls: list[int] = []
    SeededChoices(seed, "test").repeat(lambda: calls.append(1) is None, 3, 13, 28)
    assert 3 <= len(calls) <= 28


if __name__ == "__main__":
    GOLDEN.write_text(pinned_text())
