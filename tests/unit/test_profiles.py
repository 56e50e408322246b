"""Workload profiles: the same programs everywhere, always well-formed and within their bounds, each with its closing decodes.

Rules
- golden/profiles.txt pins what seeds give. A knowing change of a profile renews it: `python -m tests.unit.test_profiles`.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from statedrift.fuzz.campaign import Settings, run_campaign
from statedrift.fuzz.choices import SeededChoices
from statedrift.fuzz.execution import execute
from statedrift.fuzz.generation import generate, model_for, programs, seeded_programs
from statedrift.fuzz.profiles import PROFILES, SWARM, profile_of
from statedrift.fuzz.shards import shard_programs
from statedrift.spec.errors import UsageError
from statedrift.spec.models import Model
from statedrift.spec.operations import Decode
from statedrift.spec.programs import Program, check_program, parse_program, parse_program_json, program_id, program_json, program_text
from statedrift.store.campaigns import read_campaign

from tests.perfect_target import PerfectTarget

GOLDEN = Path(__file__).parent / "golden" / "profiles.txt"
WORKLOADS = [name for name in PROFILES if name != SWARM]
SHORT = [name for name in WORKLOADS if name != "soak"]
CANARY = "statedrift.fuzz.canary:FREQUENT"
seeds = st.integers(0, (1 << 64) - 1)


def pinned_text() -> str:
    """The ids of some programs of every profile, and one short program of each in full."""
    lines = []
    for name in WORKLOADS:
        for family in ("lfm2", "mamba2"):
            for seed in (*range(2 if name == "soak" else 6), 10**12):
                lines.append(f"{name} {family} {seed} {program_id(generate(seed, model_for(seed, family), name))}")
    texts = [f"# {name}\n" + program_text(short_program(name, 2)) for name in WORKLOADS]
    return "\n".join(lines) + "\n\n" + "\n".join(texts)


def short_program(name: str, seed: int, operations_max: int = 30, family: str = "lfm2") -> Program:
    """A program of a profile that is no longer than so, also of one whose programs are long."""
    return profile_of(name).draw(SeededChoices(seed, name), Model(family), operations_max)


def test_seeds_give_the_programs_they_always_gave() -> None:
    assert pinned_text() == GOLDEN.read_text()


def is_sound(program: Program) -> bool:
    check_program(program)
    return parse_program(program_text(program)) == program == parse_program_json(program_json(program))


def closing_sequences(program: Program) -> set[int]:
    """The sequences that the decodes at the end give a token each, of a salt that nothing else has."""
    closing: set[int] = set()
    salt: int | None = None
    for operation in reversed(program.operations):
        if not isinstance(operation, Decode) or {item.salt for item in operation.items} != {salt or operation.items[0].salt}:
            break
        salt = operation.items[0].salt
        closing |= {sequence for item in operation.items for sequence in item.sequences}
    return closing


@pytest.mark.parametrize("name", SHORT)
def test_a_seeded_program_is_well_formed_and_passes_on_a_perfect_target(name: str) -> None:
    target = PerfectTarget("draft")

    @given(seeds, st.sampled_from(["lfm2", "mamba2"]))
    def holds(seed: int, family: str) -> None:
        program = generate(seed, model_for(seed, family), name)
        assert is_sound(program)
        assert len(program.operations) <= profile_of(name).operations_max
        run = execute(program, target)
        assert run.verdict is None
        assert {sequence for sequence, (_, last) in enumerate(run.steps[-1].positions) if last >= 0} <= closing_sequences(program)

    holds()


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_a_long_program_is_well_formed_and_passes_on_a_perfect_target(family: str) -> None:
    for seed in range(3):
        program = generate(seed, model_for(seed, family), "soak")
        assert is_sound(program)
        run = execute(program, PerfectTarget("draft"))
        assert run.verdict is None
        assert {sequence for sequence, (_, last) in enumerate(run.steps[-1].positions) if last >= 0} <= closing_sequences(program)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("operations_max", [1, 2, 3, 5, 12, 40])
def test_a_program_has_at_most_so_many_operations(name: str, operations_max: int) -> None:
    counts = {len(short_program(name, seed, operations_max).operations) for seed in range(60)}
    assert 1 <= min(counts) <= max(counts) <= operations_max


@pytest.mark.parametrize("name", WORKLOADS)
def test_hypothesis_draws_programs_of_a_profile(name: str) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(programs(["mamba2"], 24, profile=name))
    def holds(program: Program) -> None:
        assert is_sound(program)
        assert len(program.operations) <= 24
        assert isinstance(program.operations[-1], Decode)

    holds()


def test_profiles_of_one_seed_have_nothing_in_common() -> None:
    assert len({program_id(generate(7, Model("lfm2"), name)) for name in PROFILES}) == len(PROFILES)


def test_a_seeded_program_is_one_draw_of_what_a_campaign_draws() -> None:
    drawn: list[Program] = []

    @settings(max_examples=20, database=None, derandomize=True, suppress_health_check=list(HealthCheck), deadline=None)
    @given(seeded_programs(["lfm2", "mamba2"], "server"))
    def collect(program: Program) -> None:
        drawn.append(program)

    collect()
    assert generate(0, model_for(0, "lfm2"), "server") in drawn, "Hypothesis tries the simplest seed"
    assert {program.model.family for program in drawn} == {"lfm2", "mamba2"}


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(seeded_programs(["lfm2"], "soak"))
def test_a_seeded_program_may_have_thousands_of_operations(program: Program) -> None:
    assert len(program.operations) >= 2000


def test_an_unknown_profile_is_a_usage_error_that_names_them() -> None:
    says = r"unknown profile `nosuch`; there are swarm, speculative, server, agents, soak"
    with pytest.raises(UsageError, match=says):
        generate(0, Model("lfm2"), "nosuch")
    with pytest.raises(UsageError, match=says):
        programs(profile="nosuch")
    with pytest.raises(UsageError, match=says):
        seeded_programs(profile="nosuch")
    with pytest.raises(UsageError, match=says):
        run_campaign(Settings(CANARY, ("lfm2",), programs=1, profile="nosuch"))


# --- campaigns ----------------------------------------------------------------------------------------------------------------


def test_a_shard_is_of_the_profile_that_is_asked_for() -> None:
    assert shard_programs(7, 3, ("lfm2",), 4, profile="agents") == shard_programs(7, 3, ("lfm2",), 4, profile="agents")
    assert shard_programs(7, 3, ("lfm2",), 4, profile="agents") != shard_programs(7, 3, ("lfm2",), 4)
    assert shard_programs(7, 3, ("lfm2",), 4, profile=SWARM) == shard_programs(7, 3, ("lfm2",), 4)


def test_a_campaign_draws_its_profile_and_says_so(tmp_path: Path) -> None:
    told: list[int] = []
    campaign = run_campaign(
        Settings("numba", ("lfm2",), programs=3, seed=2, profile="soak", out=tmp_path / "run"),
        lambda progress: told.append(progress.programs),
    )
    account = read_campaign(tmp_path / "run").account
    assert campaign.account.profile == account.profile == "soak"
    assert account.programs == 3
    assert account.operations > 6000
    assert {1, 2, 3} <= set(told), "a shard of long programs is one program"
    assert account.verdicts == {"ok": 3}


if __name__ == "__main__":
    GOLDEN.write_text(pinned_text())
