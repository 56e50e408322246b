"""What is rare in a program: counted from its run, and told to Hypothesis."""

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from statedrift.fuzz.execution import execute
from statedrift.fuzz.generation import programs
from statedrift.fuzz.rarities import Rarities, note_rarities, rarities_of
from statedrift.spec.programs import Program, parse_program

from tests.perfect_target import PerfectTarget

TARGET = PerfectTarget("draft")


def counted(text: str) -> Rarities:
    program = parse_program("model lfm2 seed=0; " + text)
    return rarities_of(program, execute(program, TARGET))


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("decode 0:4 1:4", 0),
        ("decode 0:4 1:4; rollback 0 1; decode 0:1; rollback 1 1", 1),
        ("decode 0:4 1:4; rollback 0 1; rollback 1 2", 2),
        ("decode 0:4; remove 0 2 -1; share 0 1", 2),
        ("decode 0:4; rollback 0 4", 0),
        ("decode 0:4; rollback 0 1; keep 1; share 1 2", 1),
        ("decode 0:4; save 0 a; rollback 0 1; restore a 0; decode 1:4; rollback 1 1", 1),
    ],
)
def test_pending_rollbacks(text: str, most: int) -> None:
    assert counted(text).pending_rollbacks == most


@pytest.mark.parametrize(
    ("text", "degree"),
    [
        ("decode 0:2 1:2", 0),
        ("decode 0:2; share 0 1; share 1 2", 3),
        ("decode 0:2; share 0 1; decode 1:1; share 1 2; decode 0:1", 2),
        ("cache unified=1; decode 0+1:3", 2),
        ("decode 0:2; share 0 0", 0),
        ("share 0 1", 0),
    ],
)
def test_the_sharing_degree(text: str, degree: int) -> None:
    assert counted(text).sharing_degree == degree


@pytest.mark.parametrize(("text", "holes"), [("decode 0:1", 0), ("decode 3:1", 3), ("decode 0:1 1:1 2:1 3:1; drop 1; drop 3; drop 0", 2)])
def test_holes_between_sequences(text: str, holes: int) -> None:
    assert counted(text).holes == holes


@pytest.mark.parametrize(
    ("text", "moves"),
    [
        ("decode 0:1; decode 1:1; decode 0:1 1:1", 0),
        ("decode 0:1; decode 1:1; decode 1:1 0:1", 1),
        ("decode 0:1; decode 1:1; decode 2:1; decode 0:1 2:1; decode 0:1 2:1", 1),
        ("decode 0:1; decode 1:1; drop 0; decode 2:1; decode 1:1 2:1", 0),
        ("decode 0:1; decode 1:1; share 0 2; decode 0:1 2:1", 1),
    ],
)
def test_moves_that_bring_the_cells_of_a_batch_together(text: str, moves: int) -> None:
    assert counted(text).slot_moves == moves


def test_refused_operations() -> None:
    assert counted("decode 0:4; remove 0 1 2; remove 0 1 2; restore a 0").refused_operations == 2  # the restore is skipped


def test_hypothesis_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    targets: dict[str, float] = {}
    monkeypatch.setattr(hypothesis, "event", events.append)
    monkeypatch.setattr(hypothesis, "target", lambda observation, *, label: targets.update({label: observation}))
    program = parse_program("model lfm2; decode 0:4; rollback 0 1; share 0 1; share 0 2; share 0 3")
    assert note_rarities(program, execute(program, TARGET)) == Rarities(4, 4, 0, 0, 0)
    assert "pending rollbacks: 3 or more" in events
    assert "holes: 0" in events
    assert targets == {"pending rollbacks": 4.0, "sharing degree": 4.0, "holes": 0.0, "slot moves": 0.0, "refused operations": 0.0}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(["lfm2"]))
def test_it_may_be_called_in_a_test(program: Program) -> None:
    assert min(note_rarities(program, execute(program, TARGET))) >= 0
