"""docs/families.md names every family, and every truth that it is held to; docs/add-a-family.md, all that a family consists of."""

import re

import msgspec
import pytest
from statedrift.impl.model import FamilyModule
from statedrift.oracle.recompute import FamilyForward
from statedrift.spec.families import FAMILIES, Family

from tests.conformance.table import PAGE, TRUTHS, faults

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_is_as_the_families_and_the_conformance_models_are() -> None:
    assert faults(TEXT) == [], "write it again: python -m tests.conformance.table"


def test_every_family_has_an_outside_truth() -> None:
    assert {model.family for truth in TRUTHS for model in truth.models} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_page_without_a_family_is_not_right(family: str) -> None:
    lines = TEXT.splitlines()
    assert faults("\n".join(line for line in lines if not line.startswith(f"| {family} ")))
    assert faults("\n".join(line for line in lines if not line.startswith(f"- **{family}**")))


@pytest.mark.parametrize("truth", TRUTHS, ids=lambda truth: truth.column)
def test_a_page_without_a_truth_is_not_right(truth) -> None:
    assert any(truth.column in fault for fault in faults(TEXT.replace(f" {truth.column} |", " another |")))


def test_an_error_that_is_not_within_its_bound_is_said() -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith("| lfm2 ") and "models," in line)
    for wrong in ("1.0e+00", "nan"):
        cells = row.split("|")
        cells[3] = f" {wrong} {cells[3].split(maxsplit=1)[1]}"
        assert any("differs by" in fault for fault in faults(TEXT.replace(row, "|".join(cells))))


def test_another_number_of_models_is_said() -> None:
    assert any("models of it" in fault for fault in faults(TEXT.replace("models,", "1 models,", 3)))


RECIPE = (PAGE.parent / "add-a-family.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [field.name for field in msgspec.structs.fields(Family)])
def test_the_recipe_explains_every_fact_of_a_family(name: str) -> None:
    assert re.search(rf"^\|[^|]*`{name}`", RECIPE, re.MULTILINE)


@pytest.mark.parametrize("protocol", [FamilyForward, FamilyModule])
def test_the_recipe_explains_every_function_of_a_forward(protocol: type) -> None:
    names = [name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")]
    assert names
    assert [name for name in names if not re.search(rf"^\|[^|]*`{name}`", RECIPE, re.MULTILINE)] == []


def test_the_files_that_the_recipe_names_are_there() -> None:
    root = PAGE.parents[1]
    named = set(re.findall(r"`((?:spec|oracle|impl|tests|docs)/[\w/.]+)`", RECIPE))
    assert len(named) > 10
    assert sorted(path for path in named if not (root / path).exists()) == []
