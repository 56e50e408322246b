"""docs/profiles.md: its samples are right on our own cache, its table is the code's, its example runs.

Source: docs/profiles.md.
"""

import re
from pathlib import Path

import pytest
from statedrift.fuzz.profiles import PROFILES, SWARM
from statedrift.fuzz.rarities import Rarities
from statedrift.fuzz.trial import Bench
from statedrift.oracle.recompute import use_one_thread
from statedrift.spec.models import Model
from statedrift.spec.programs import parse_program, program_text
from statedrift.store.campaigns import Noise

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "profiles.md").read_text()
NOISE = {Model("lfm2"): Noise(0.0, 1e-4, 0)}


def samples(name: str) -> list[str]:
    """The programs under a profile's heading."""
    section = PAGE.split(f"\n## `{name}`\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^```\n(model .*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", [name for name in PROFILES if name != SWARM])
def test_the_samples_of_a_profile_are_right_on_our_own_cache(name: str) -> None:
    use_one_thread()
    texts = samples(name)
    assert len(texts) == 3
    programs = [parse_program(text) for text in texts]
    assert [program_text(program) for program in programs] == texts
    with Bench("numba") as bench:
        bench.set_noise(NOISE)
        assert [trial.verdict.kind for trial in bench.try_programs(programs)] == ["ok"] * 3


@pytest.mark.parametrize("name", PROFILES)
def test_the_table_has_every_profile_with_its_bounds(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
    most, shard = f"{PROFILES[name].operations_max:,}", f"| {PROFILES[name].shard_programs} |"
    assert most in row
    assert row.endswith(shard)


@pytest.mark.parametrize("count", Rarities._fields)
def test_the_page_explains_every_count(count: str) -> None:
    assert f"\n| {count.replace('_', ' ')} |" in PAGE


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    namespace: dict[str, object] = {}
    exec(code.replace("deadline=None", "deadline=None, max_examples=5, database=None"), namespace)
    namespace["test_my_cache"]()  # type: ignore[operator]
