"""What a target's name on the command line becomes, and what is said when it becomes nothing."""

import sys
from pathlib import Path

import pytest
from statedrift.spec.errors import UnavailableError, UsageError
from statedrift.spec.target import Target
from statedrift.targets import registry
from statedrift.targets.registry import load_target, target_names


def test_own_targets_are_installed() -> None:
    assert {"cuda", "cuda-ring", "llamacpp", "numba", "numba-llamacpp", "numba-ring"} <= set(target_names())


@pytest.mark.parametrize("name", ["llamacpp", "numba", "statedrift.fuzz.canary:TARGET"])
def test_a_name_becomes_a_target(name: str) -> None:
    target = load_target(name)
    assert isinstance(target, Target)
    assert target.families


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llamaccp", "there is no target `llamaccp`; there are cuda, cuda-ring, llamacpp, numba"),
        ("", "there is no target ``"),
        ("no_such_module_here:TARGET", "there is no module `no_such_module_here`"),
        ("statedrift.nothing:TARGET", "there is no module `statedrift.nothing`"),
        ("statedrift.targets.numba:NOTHING", "has no `NOTHING`"),
        ("statedrift.targets.numba:", "write module:attribute"),
        (":TARGET", "write module:attribute"),
        ("../x:TARGET", "write module:attribute"),
        ("statedrift.targets.numba:TARGET.name", "has no name, isolated"),
        ("statedrift.targets.numba:NumbaTarget", "is a class"),
    ],
)
def test_what_is_no_target_is_a_clear_error(name: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        load_target(name)
    assert words in str(raised.value)


def test_a_target_in_the_current_folder_needs_no_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_cache_target.py").write_text("from statedrift.targets.numba import TARGET\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert load_target("my_cache_target:TARGET").name == "numba"


def test_a_target_whose_library_is_missing_is_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_broken_target.py").write_text("import a_library_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnavailableError, match="a_library_that_nobody_has"):
        load_target("my_broken_target:TARGET")


def test_another_distribution_cannot_take_an_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    foreign = EntryPoint("numba", "elsewhere:TARGET", registry.GROUP)
    own = EntryPoint("numba", "statedrift.targets.numba:TARGET", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: (foreign, own))
    assert load_target("numba").name == "numba"


def test_an_entry_point_that_leads_nowhere_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    broken = EntryPoint("mine", "statedrift.targets.numba:GONE", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: (broken,))
    with pytest.raises(UnavailableError, match="mine is not available"):
        load_target("mine")
