"""docs/mutants.md lists every mutant as it is."""

from pathlib import Path

import pytest
from statedrift.fuzz.mutants import MUTANTS
from statedrift.fuzz.mutants.mutant import CLASSIC
from statedrift.fuzz.mutants.page import page_text

PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"


def test_the_page_is_as_the_mutants_are() -> None:
    command = "write it again: python -m statedrift.fuzz.mutants.page docs/mutants.md"
    assert PAGE.read_text(encoding="utf-8") == page_text(), command


def test_there_are_at_least_forty_and_most_come_from_a_report() -> None:
    assert len(MUTANTS) >= 40
    assert sum(mutant.report != CLASSIC for mutant in MUTANTS.values()) >= 40


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_says_what_is_wrong_and_what_it_overrides(name: str) -> None:
    mutant = MUTANTS[name]
    assert mutant.summary.endswith(".")
    assert mutant.overrides
    assert mutant.report == CLASSIC or mutant.report.rpartition("#")[2].isdigit()
