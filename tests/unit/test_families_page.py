"""docs/families.md names every family, and every truth that it is held to."""

import pytest
from statedrift.spec.families import FAMILIES

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
