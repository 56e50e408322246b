"""docs/targets.md and its examples: what the page shows runs, is right, and is the whole protocol.

Source: docs/targets.md.
"""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from statedrift.fuzz.generation import generate, model_for
from statedrift.fuzz.trial import Bench, Trial
from statedrift.oracle.recompute import use_one_thread
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.errors import UsageError
from statedrift.spec.models import Model
from statedrift.spec.programs import parse_program, program_text
from statedrift.spec.target import Batch, Capabilities, Decoded, Session, StateRow, Target
from statedrift.store.campaigns import Noise
from statedrift.targets.registry import PROTOCOL_MEMBERS, load_target

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "own_target"
PAGE = (ROOT / "docs" / "targets.md").read_text()
PROGRAMS_PER_FAMILY = 100
NOISE = {Model(family, seed): Noise(0.0, 1e-5, 0) for family in ("mamba2", "lfm2") for seed in range(2)}
"""The smallest tolerance that there is; measuring the floor would take longer than the programs."""


@pytest.fixture(autouse=True)
def _examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    use_one_thread()
    monkeypatch.syspath_prepend(str(EXAMPLES))


def tried(target: str, family: str) -> list[Trial]:
    with Bench(target) as bench:
        bench.set_noise(NOISE)
        return bench.try_programs([generate(seed, model_for(seed, family)) for seed in range(PROGRAMS_PER_FAMILY)])


def protocol_methods() -> list[str]:
    return [name for name, value in vars(Session).items() if callable(value) and not name.startswith("_")]


@pytest.mark.parametrize("family", ["mamba2", "lfm2"])
def test_the_recompute_cache_is_right_in_every_program(family: str) -> None:
    trials = tried("recompute_cache:TARGET", family)
    wrong = [f"{trial.verdict}\n{program_text(trial.program)}" for trial in trials if trial.verdict.kind != "ok"]
    assert wrong == []


def test_every_call_of_the_protocol_is_accepted_by_some_program() -> None:
    trials = tried("recompute_cache:TARGET", "lfm2")
    answered = {
        type(operation).__struct_config__.tag
        for trial in trials
        if trial.run
        for operation, step in zip(trial.program.operations, trial.run.steps, strict=True)
        if step.outcome.word in ("accepted", "cancelled")
    }
    calls = set(protocol_methods()) - {"positions", "inspect", "close"}
    assert calls - answered == set()


@pytest.mark.parametrize("family", ["mamba2", "lfm2"])
def test_the_forgetful_cache_is_found(family: str) -> None:
    trials = tried("forgetful_cache:TARGET", family)
    found = {trial.verdict.kind for trial in trials if trial.verdict.is_divergence}
    assert found
    assert {trial.verdict.kind for trial in trials} <= {"ok"} | found


def test_the_smallest_program_of_the_forgetful_cache_is_the_page_s() -> None:
    (text,) = re.findall(r"statedrift replay '([^']+)' --target forgetful_cache:TARGET", PAGE)
    for target, kind in (("forgetful_cache:TARGET", "wrong-position"), ("recompute_cache:TARGET", "ok")):
        with Bench(target) as bench:
            bench.set_noise(NOISE)
            assert bench.try_program(parse_program(text)).verdict.kind == kind


def test_a_bad_argument_is_a_usage_error_that_names_it() -> None:
    session = load_target("recompute_cache:TARGET").open(Model("lfm2"), CacheConfiguration(n_seq_max=2))
    one = Batch(np.array([1 << 20], np.int32), np.array([0], np.int32), ((0,),), np.array([True]), "all")
    for name, call in {
        "tokens": lambda: session.decode(one),
        "sequence": lambda: session.remove(-1, 0, -1),
    }.items():
        with pytest.raises(UsageError, match=f"`{name}`"):
            call()
    assert session.positions() == [(-1, -1), (-1, -1)]


@pytest.mark.parametrize("name", ["recompute_cache.py", "forgetful_cache.py"])
def test_the_page_shows_the_example_as_it_is(name: str) -> None:
    assert f"```python\n{(EXAMPLES / name).read_text()}```" in PAGE


@pytest.mark.parametrize("name", protocol_methods())
def test_the_page_explains_every_method_of_a_session(name: str) -> None:
    assert re.search(rf"^\| `{name}\(", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", PROTOCOL_MEMBERS)
def test_the_page_explains_every_member_of_a_target(name: str) -> None:
    assert re.search(rf"^\| `{name}\b", PAGE, re.MULTILINE)


@pytest.mark.parametrize(
    "name", sorted({field.name for struct in (Capabilities, Batch, Decoded, StateRow) for field in msgspec.structs.fields(struct)})
)
def test_the_page_names_every_field_of_the_data(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_the_example_follows_the_protocol() -> None:
    target = load_target("recompute_cache:TARGET")
    assert isinstance(target, Target)
    assert isinstance(target.open(Model("lfm2"), CacheConfiguration()), Session)
