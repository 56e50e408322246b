"""What restores leave behind: a refused one only its own destination empty, an accepted damaged one a sequence that is not judged.

Source: docs/contract.md, rows `restore`, refused `restore`, `restore` of a damaged blob; rule G1.
"""

from typing import Any

import pytest
from statedrift.fuzz.execution import Run
from statedrift.spec.verdicts import ACCEPTED, Outcome, refused

from tests.scripted_target import ATTENTION_ONLY, and_grow, do_nothing, put, refuse, walk

MAY_RESTORE = "decode 0:3 1:5; save 0 a; damage a header; restore a 1"
MAY_RESTORE_ALL = "decode 0:3 1:5; save_all a; damage a header; restore_all a"


def kind_of(run: Run) -> str | None:
    return run.verdict.kind if run.verdict else None


# --- refused -----------------------------------------------------------------------------------------------------------------

LEFT_BY_A_REFUSED_RESTORE = [
    # program, lengths left, kind
    (MAY_RESTORE, {}, None),
    (MAY_RESTORE, {1: 0}, None),
    (MAY_RESTORE, {1: 3}, "partial-effect"),
    (MAY_RESTORE, {1: 4}, "partial-effect"),
    (MAY_RESTORE, {0: 0}, "partial-effect"),
    (MAY_RESTORE, {0: 0, 1: 0}, "partial-effect"),
    (MAY_RESTORE, {2: 1}, "partial-effect"),
    (MAY_RESTORE_ALL, {}, None),
    (MAY_RESTORE_ALL, {1: 0}, None),
    (MAY_RESTORE_ALL, {0: 0, 1: 0}, None),
    (MAY_RESTORE_ALL, {0: 2}, "partial-effect"),
    (MAY_RESTORE_ALL, {2: 1}, "partial-effect"),
    ("decode 0:3 1:5; save 0 a; damage a truncate 7; restore a 1", {1: 0}, None),
    ("decode 0:3 1:5; save 0 a; damage a truncate 7; restore a 1", {1: 3}, "partial-effect"),
    ("decode 0:5; divide 0 2; divide 0 2", {0: 0}, "partial-effect"),  # no other refusal may empty anything
]  # fmt: skip


@pytest.mark.parametrize(("text", "left", "kind"), LEFT_BY_A_REFUSED_RESTORE)
def test_a_refused_restore_may_empty_its_destination_and_nothing_else(text: str, left: dict[int, int], kind: str | None) -> None:
    run, _ = walk(text, {-1: put(left, refused("scripted"))})
    assert kind_of(run) == kind


def test_a_partial_effect_names_the_sequence_and_whose_fault_it_is() -> None:
    run, _ = walk(MAY_RESTORE, {-1: put({0: 0}, refused())})
    assert run.verdict is not None
    assert (run.verdict.sequence, run.verdict.position, run.verdict.relation) == (0, -1, "other")


def test_after_a_refused_restore_that_emptied_it_a_sequence_goes_on_from_nothing() -> None:
    run, target = walk(MAY_RESTORE + "; decode 1:2", {3: put({1: 0}, refused())})
    assert run.verdict is None
    assert target.calls[-1][2][0].positions.tolist() == [0, 1]
    assert run.spans[-1].log == run.spans[-1].log[-2:]


def test_after_a_refused_restore_that_changed_nothing_a_sequence_goes_on_where_it_was() -> None:
    run, _ = walk(MAY_RESTORE + "; decode 1:2", {3: refuse})
    assert run.verdict is None
    assert len(run.spans[-1].log) == 7


def test_an_emptying_refusal_does_not_make_an_unchecked_sequence_known() -> None:
    text = MAY_RESTORE + "; restore a 1; decode 1:2"
    run, _ = walk(text, {3: put({1: 4}, ACCEPTED), 4: put({1: 0}, refused())})
    assert run.steps[-1].demand == "may"


# --- accepted, damaged -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 1, 3, 9])
def test_what_an_accepted_damaged_blob_leaves_is_not_judged(left: int) -> None:
    run, _ = walk(MAY_RESTORE + "; decode 1:2", {3: put({1: left}, ACCEPTED)})
    assert run.verdict is None
    assert run.steps[-1].demand == "may"
    assert [span.sequence for span in run.spans if span.operation_index == 4] == []


def test_beside_an_unchecked_sequence_all_others_stay_checked() -> None:
    run, _ = walk(MAY_RESTORE, {3: put({1: 9, 0: 2}, ACCEPTED)})
    assert run.verdict is not None
    assert (run.verdict.kind, run.verdict.sequence, run.verdict.relation) == ("wrong-position", 0, "other")
    run, _ = walk(MAY_RESTORE + "; decode 0:1 1:1", {3: put({1: 9}, ACCEPTED)})
    assert [span.sequence for span in run.spans if span.operation_index == 4] == [0]


def test_an_unchecked_sequence_goes_on_from_the_position_that_the_target_says() -> None:
    _, target = walk(MAY_RESTORE + "; decode 1:2", {3: put({1: 9}, ACCEPTED)})
    assert target.calls[-1][2][0].positions.tolist() == [9, 10]


EMPTYING = ["drop 1", "keep 0", "clear", "rollback 1 99", "remove 1 0 -1", "remove 1 -1 50", "reopen"]


@pytest.mark.parametrize("operation", EMPTYING)
def test_an_unchecked_sequence_is_judged_again_when_it_was_emptied(operation: str) -> None:
    run, _ = walk(f"{MAY_RESTORE}; {operation}; decode 1:2", {3: put({1: 9}, ACCEPTED)})
    assert run.verdict is None
    assert run.steps[-1].demand == "must-accept"
    assert run.spans[-1].sequence == 1


STAYING = [
    "rollback 1 2",
    "remove 1 0 3",
    "remove 1 2 -1",
    "remove 1 0 9",
    "decode 1:3",
    "shift 1 2",
    "save 1 b",
    "share 1 2",
    "divide 1 2",
]


@pytest.mark.parametrize("operation", STAYING)
def test_an_unchecked_sequence_stays_so_as_long_as_something_may_be_left(operation: str) -> None:
    run, _ = walk(f"{MAY_RESTORE}; {operation}; decode 1:2", {3: put({1: 12}, ACCEPTED)})
    assert run.verdict is None
    assert run.steps[-1].demand == "may"


@pytest.mark.parametrize("carrying", ["share 1 2", "save 1 b; restore b 2", "save_all b; restore_all b; share 1 2", "share 1 2 0 3"])
def test_what_comes_from_an_unchecked_sequence_is_unchecked(carrying: str) -> None:
    run, _ = walk(f"{MAY_RESTORE}; {carrying}; decode 2:1", {3: put({1: 9}, ACCEPTED)}, **ATTENTION_ONLY)
    assert run.verdict is None
    assert run.steps[-1].demand == "may"


@pytest.mark.parametrize("carrying", ["share 1 2", "save 1 b; restore b 2"])
def test_also_when_what_was_saved_was_empty(carrying: str) -> None:
    text = f"save 0 a; damage a header; restore a 1; {carrying}; decode 2:1"
    run, _ = walk(text, {2: put({1: 4}, ACCEPTED)})
    assert run.verdict is None
    assert run.steps[-1].demand == "may"


def test_an_unchecked_sequence_is_not_shifted_below_zero() -> None:
    run, _ = walk(MAY_RESTORE + "; shift 1 -1", {3: put({1: 9}, ACCEPTED)})
    assert run.steps[-1].demand == "skip"


def test_a_rollback_of_an_unchecked_sequence_never_names_a_negative_position() -> None:
    _, target = walk(MAY_RESTORE + "; decode 1:2; rollback 1 4", {3: put({1: 0}, ACCEPTED)})
    assert target.calls[-1][1:] == ("remove", (1, 0, -1))


def test_a_coupled_token_of_an_unchecked_sequence_is_skipped() -> None:
    run, _ = walk(MAY_RESTORE + "; decode 0+1:1", {3: do_nothing})
    assert run.steps[-1].demand == "skip"


def test_a_cancel_that_empties_an_unchecked_sequence_does_not_make_it_known() -> None:
    text = MAY_RESTORE + "; cancel 1:2 at=0; decode 1:1"
    run, _ = walk(text, {3: put({1: 9}, ACCEPTED), 4: put({1: 0}, Outcome("cancelled"))})
    assert run.verdict is None
    assert run.steps[-1].demand == "may"


# --- accepted, right ---------------------------------------------------------------------------------------------------------

CONTINUED: list[tuple[str, int]] = [
    # program; length of the log of the last decode
    ("decode 0:3; save 0 a; decode 0:4; restore a 0; decode 0:1", 4),
    ("decode 0:3 1:5; save 0 a; restore a 1; decode 1:1", 4),
    ("decode 0:3; save 0 a; reopen n_rs_seq=0; restore a 2; decode 2:1", 4),
    ("decode 0:3; save 0 a; reopen n_seq_max=2; restore a 1; decode 1:1", 4),
    ("decode 0:3; rollback 0 1; save 0 a; decode 0:9; restore a 0; decode 0:1", 3),
    ("decode 0:3; save 0 a partial; decode 0:2; restore a 0; decode 0:1", 4),
    ("decode 0:3 1:2; save_all a; decode 2:3; restore_all a; decode 0:1", 4),
    ("decode 0:3 1:2; save_all a; decode 2:3; restore_all a; decode 2:1", 1),
    ("decode 0:3; save 0 a; shift 0 4; save 0 b; restore a 0; decode 0:1", 4),
]


@pytest.mark.parametrize(("text", "length"), CONTINUED)
def test_a_restored_sequence_goes_on_from_the_saved_log(text: str, length: int) -> None:
    run, _ = walk(text)
    assert run.verdict is None
    assert len(run.spans[-1].log) == length


def test_a_restore_brings_back_the_positions_that_were_saved() -> None:
    run, target = walk("decode 0:3; shift 0 4; save 0 a; clear; restore a 1; decode 1:1")
    assert run.verdict is None
    assert target.calls[-1][2][0].positions.tolist() == [7]


def test_a_whole_session_restored_into_fewer_sequences_keeps_those_there_are() -> None:
    text = "decode 0:3 3:2; save_all a; reopen n_seq_max=2; restore_all a; decode 0:1"
    run, _ = walk(text, {3: put({0: 3}, ACCEPTED)})
    assert run.verdict is None
    assert len(run.spans[-1].log) == 4


def test_a_restore_of_another_configuration_that_is_accepted_must_be_right() -> None:
    text = "decode 0:3; save 0 a; reopen n_seq_max=2; restore a 1"
    accepted: dict[int, Any] = {3: put({1: 3}, ACCEPTED)}
    assert kind_of(walk(text, accepted)[0]) is None
    assert kind_of(walk(text, {3: put({1: 2}, ACCEPTED)})[0]) == "wrong-position"
    assert kind_of(walk(text, {3: do_nothing})[0]) == "false-success"


# --- divided positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "is_silent"), [("lfm2", True), ("mamba2", False)])
def test_outputs_after_a_divide_are_judged_only_without_attention(model: str, is_silent: bool) -> None:
    run, _ = walk(f"model {model}; decode 0:5; divide 0 2; decode 0:1")
    assert run.verdict is None
    assert [span.operation_index for span in run.spans] == [0] if is_silent else [0, 2]


@pytest.mark.parametrize("operations", ["share 0 1", "save 0 a; restore a 1", "save_all a; restore_all a; share 0 1"])
def test_silence_goes_along_with_the_log(operations: str) -> None:
    run, _ = walk(f"decode 0:5; divide 0 2; {operations}; decode 1:1")
    assert run.verdict is None
    assert len(run.spans) == 1


@pytest.mark.parametrize("operations", ["drop 0", "clear", "keep 1", "share 1 0"])
def test_silence_ends_when_the_log_is_empty(operations: str) -> None:
    run, _ = walk(f"decode 0:5; divide 0 2; {operations}; decode 0:1")
    assert run.verdict is None
    assert len(run.spans) == 2


def test_positions_after_a_divide_are_judged() -> None:
    run, _ = walk("decode 0:5; divide 0 2; decode 0:1", {2: and_grow(0)})
    assert kind_of(run) == "wrong-position"
    run, target = walk("decode 0:6; divide 0 2; decode 0:1")
    assert target.calls[-1][2][0].positions.tolist() == [3]


def test_the_position_of_a_span_counts_from_the_divided_position() -> None:
    run, _ = walk("model mamba2; decode 0:6; divide 0 3; decode 0:2")
    span = run.spans[-1]
    assert [span.offset + index for index in span.indices] == [2, 3]
