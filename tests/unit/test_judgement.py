"""Judging rows: the error formula, what is not finite, and which of several wrong things decides.

Rules
- A right run is made from the truth itself, as float32; tests then change its rows.
"""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from statedrift.fuzz.execution import Run
from statedrift.fuzz.judgement import row_errors, span_errors, worst_error
from statedrift.oracle.recompute import Request, recompute_of
from statedrift.spec.models import Model
from statedrift.spec.verdicts import Verdict

from tests.judging import verdicts_of
from tests.scripted_target import walk

MODEL = Model("mamba2", 0, (("n_layer", 1),))
TOLERANCE = 1e-3
TEXT = "model mamba2 n_layer=1; decode 0:3 1:2; decode 0:2 outputs=embeddings; rollback 1 1; decode 1:2/1 0:1"

# --- the formula ---------------------------------------------------------------------------------------------------------------


def test_the_error_is_the_largest_difference_over_one_plus_the_root_mean_square() -> None:
    truth = np.array([[3.0, -4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    rows = np.array([[3.0, -4.5, 0.25, 0.0], [0.0, 0.125, 0.0, 0.0]], np.float32)
    assert row_errors(rows, truth).tolist() == [0.5 / (1 + 2.5), 0.125]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_has_no_finite_error(value: float) -> None:
    rows = np.zeros((2, 3), np.float32)
    rows[1, 2] = value
    errors = row_errors(rows, np.ones((2, 3)))
    assert np.isfinite(errors).tolist() == [True, False]


def test_rows_of_another_width_have_no_error_that_passes() -> None:
    assert np.isnan(row_errors(np.zeros((2, 3), np.float32), np.zeros((2, 4)))).all()


def test_differences_are_taken_in_double_precision() -> None:
    truth = np.full((1, 2), 1.0 + 2.0**-30)
    assert row_errors(np.ones((1, 2), np.float32), truth)[0] > 0


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8))
def test_a_row_is_no_further_from_itself_than_rounding(values: list[float]) -> None:
    row = np.array([values], np.float32)
    assert row_errors(row, row.astype(np.float64)).tolist() == [0.0]


# --- runs ----------------------------------------------------------------------------------------------------------------------


def right_run(text: str = TEXT) -> Run:
    """A run whose rows are the truth."""
    run, _ = walk(text)
    truths = recompute_of(MODEL).rows([Request(span.log, span.indices, span.hidden) for span in run.spans])
    rows = dict(run.rows)
    for span, truth in zip(run.spans, truths, strict=True):
        data, width = rows[span.operation_index]
        table = np.frombuffer(data, np.float32).reshape(-1, width).copy()
        table[list(span.places)] = truth.astype(np.float32)
        rows[span.operation_index] = (table.tobytes(), width)
    return msgspec.structs.replace(run, rows=rows)


def spoiled(run: Run, *changes: tuple[int, int, float]) -> Run:
    """A run with another first value in some rows: operation, row, what is added to it."""
    rows = dict(run.rows)
    for operation, row, amount in changes:
        data, width = rows[operation]
        table = np.frombuffer(data, np.float32).reshape(-1, width).copy()
        table[row, 0] += amount
        rows[operation] = (table.tobytes(), width)
    return msgspec.structs.replace(run, rows=rows)


def verdict_of(run: Run, tolerance: float = TOLERANCE) -> Verdict:
    (verdict,) = verdicts_of(MODEL, [run], tolerance)
    return verdict


def test_a_right_run_is_ok_and_says_its_largest_error() -> None:
    verdict = verdict_of(right_run())
    assert (verdict.kind, verdict.operation_index, verdict.tolerance) == ("ok", None, TOLERANCE)
    assert verdict.error is not None
    assert 0 < verdict.error < 1e-6
    assert verdict.error == worst_error(MODEL, [right_run()])


def test_a_wrong_row_names_operation_sequence_position_relation_and_error() -> None:
    verdict = verdict_of(spoiled(right_run(), (3, 1, 5.0)))
    assert (verdict.kind, verdict.operation_index, verdict.sequence, verdict.position) == ("wrong-output", 3, 1, 2)
    assert verdict.relation == "self"
    assert verdict.error is not None
    assert verdict.error > TOLERANCE
    assert verdict.tolerance == TOLERANCE
    assert "logits" in verdict.reason


def test_a_wrong_row_of_a_sequence_that_the_last_operation_did_not_name_is_other() -> None:
    verdict = verdict_of(spoiled(right_run(), (3, 2, 5.0)))
    assert (verdict.sequence, verdict.position, verdict.relation) == (0, 5, "other")


def test_hidden_states_are_judged_as_hidden_states() -> None:
    verdict = verdict_of(spoiled(right_run(), (1, 0, 5.0)))
    assert (verdict.kind, verdict.operation_index, verdict.position) == ("wrong-output", 1, 3)
    assert "hidden states" in verdict.reason


def test_the_first_wrong_row_gives_the_position_and_the_worst_gives_the_error() -> None:
    verdict = verdict_of(spoiled(right_run(), (0, 1, 0.5), (0, 2, 9.0)))
    assert verdict.position == 1
    assert verdict.error is not None
    assert verdict.error > 1


def test_of_several_wrong_sequences_in_one_decode_the_worst_is_named() -> None:
    assert verdict_of(spoiled(right_run(), (0, 0, 1.0), (0, 4, 9.0))).sequence == 1
    assert verdict_of(spoiled(right_run(), (0, 0, 9.0), (0, 4, 1.0))).sequence == 0


def test_the_first_wrong_operation_decides_however_wrong_a_later_one_is() -> None:
    verdict = verdict_of(spoiled(right_run(), (1, 0, 0.5), (3, 0, 99.0), (3, 1, float("nan"))))
    assert (verdict.kind, verdict.operation_index) == ("wrong-output", 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_called_so(value: float) -> None:
    verdict = verdict_of(spoiled(right_run(), (0, 2, value)))
    assert (verdict.kind, verdict.sequence, verdict.position, verdict.error) == ("nonfinite", 0, 2, None)
    assert verdict.is_divergence


def test_nonfinite_outweighs_wrong_rows_of_the_same_decode() -> None:
    verdict = verdict_of(spoiled(right_run(), (0, 0, 99.0), (0, 4, float("nan"))))
    assert (verdict.kind, verdict.sequence) == ("nonfinite", 1)


def test_an_error_equal_to_the_tolerance_is_fine_and_the_next_larger_one_is_not() -> None:
    run = spoiled(right_run(), (0, 2, 0.25))
    largest = worst_error(MODEL, [run])
    assert verdict_of(run, largest).kind == "ok"
    assert verdict_of(run, float(np.nextafter(largest, 0))).kind == "wrong-output"


def test_a_row_at_the_tolerance_is_not_the_first_wrong_one() -> None:
    run = spoiled(right_run(), (0, 1, 0.25))
    verdict = verdict_of(spoiled(run, (0, 2, 9.0)), worst_error(MODEL, [run]))
    assert verdict.position == 2


def test_a_tolerance_that_is_no_number_lets_nothing_pass() -> None:
    assert verdict_of(right_run(), float("nan")).kind == "wrong-output"


# --- beside verdicts of answers and positions -----------------------------------------------------------------------------------

EARLIER = Verdict("wrong-position", 0, 0, 1, "self", reason="scripted")


@pytest.mark.parametrize(
    ("answered_at", "wrong_rows", "kind", "index"),
    [
        (4, (), "wrong-position", 4),
        (4, ((3, 0, 5.0),), "wrong-output", 3),
        (4, ((0, 0, 5.0), (3, 0, 5.0)), "wrong-output", 0),
        (2, ((3, 0, 5.0),), "wrong-position", 2),
        (2, ((1, 0, 5.0), (3, 0, 5.0)), "wrong-output", 1),
        (3, ((3, 0, 5.0),), "wrong-output", 3),  # rows come with the answer, before positions are asked
    ],
)
def test_the_earlier_of_a_wrong_answer_and_a_wrong_row_decides(answered_at: int, wrong_rows: Any, kind: str, index: int) -> None:
    said = Verdict("wrong-position", answered_at, 0, 1, "self", reason="scripted")
    verdict = verdict_of(msgspec.structs.replace(spoiled(right_run(), *wrong_rows), verdict=said))
    assert (verdict.kind, verdict.operation_index) == (kind, index)


def test_a_run_without_rows_is_judged_by_its_answers() -> None:
    run, _ = walk("model mamba2 n_layer=1; drop 0")
    assert verdict_of(run).kind == "ok"
    assert verdict_of(run).error == 0.0
    assert verdict_of(msgspec.structs.replace(run, verdict=EARLIER)) == EARLIER


# --- many runs ------------------------------------------------------------------------------------------------------------------


def test_runs_are_judged_together_as_they_are_alone() -> None:
    second = right_run("model mamba2 n_layer=1; cache outputs=last; decode 2:4; share 2 0; decode 0:1 2:3")
    runs = [
        right_run(),
        spoiled(right_run(), (3, 1, 5.0)),
        second,
        spoiled(second, (2, 0, float("nan"))),
        spoiled(right_run(), (1, 1, 2.0)),
    ]
    together, alone = verdicts_of(MODEL, runs, TOLERANCE), [verdict_of(run) for run in runs]
    for one, other in zip(together, alone, strict=True):  # the recompute rounds otherwise in another batch
        assert (one.error or 0.0) == pytest.approx(other.error or 0.0, rel=1e-6)
        assert msgspec.structs.replace(one, error=None) == msgspec.structs.replace(other, error=None)
    assert [verdict_of(run).kind for run in runs] == ["ok", "wrong-output", "ok", "nonfinite", "wrong-output"]


def test_errors_come_span_by_span_in_the_order_of_the_runs() -> None:
    errors = span_errors(MODEL, [right_run(), spoiled(right_run(), (0, 4, 9.0))])
    assert [[len(span) for span in run] for run in errors] == [[3, 2, 2, 2, 1]] * 2
    assert [index for index, span in enumerate(errors[1]) if span.max() > TOLERANCE] == [1]


def test_rows_that_do_not_stand_together_are_those_of_their_own_sequence() -> None:
    run = right_run(TEXT.replace("decode 0:3", "cache interleave=1; decode 0:3", 1))
    assert [span.places for span in run.spans][:2] == [(0, 2, 4), (1, 3)]
    for row, (sequence, position) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]):
        verdict = verdict_of(spoiled(run, (0, row, 9.0)))
        assert (verdict.kind, verdict.sequence, verdict.position) == ("wrong-output", sequence, position)


def test_a_right_run_says_the_row_that_is_nearest_to_its_own_tolerance() -> None:
    run = spoiled(right_run(), (0, 4, 0.25), (3, 0, 0.125))
    errors = span_errors(MODEL, [run])[0]
    assert errors[1].max() > errors[3].max() > 10 * max(errors[number].max() for number in (0, 2, 4))
    for tolerances, nearest in (([1.0] * 5, 1), ([1.0, 1.0, 1.0, 0.2, 1.0], 3)):
        (verdict,) = verdicts_of(MODEL, [run], 1.0, tolerances=[tolerances])
        assert (verdict.kind, verdict.error, verdict.tolerance) == ("ok", float(errors[nearest].max()), tolerances[nearest])


def test_the_worst_error_leaves_out_rows_that_are_not_finite() -> None:
    spoiled_run = spoiled(right_run(), (1, 0, float("nan")))
    assert worst_error(MODEL, [right_run(), spoiled_run]) == worst_error(MODEL, [right_run()])
    assert worst_error(MODEL, []) == 0.0
