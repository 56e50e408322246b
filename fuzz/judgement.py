"""Judge runs: compare every output row with the full recompute, for many programs at once.

Rules
- The first operation that went wrong decides, be it by its answer, a position or a row.
- An output row `y` against its recompute `r`: err = max|y - r| / (1 + rms(r)); it is right only if err <= tolerance, so NaN is wrong.
- Logs of all runs of one model go through one recompute.
- A row that hangs on a selection with a margin under `margin_min` is not judged: rounding decides what was selected. Its error counts as 0.
- Where a truth cannot be had (`truth.NoTruth`, a row of NaN), a program that is not wrong before is `unknown`.
- Sessions of one program may differ in what they tolerate: every row is held to its own session's tolerance.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..oracle.recompute import MARGIN_MIN, Request, recompute_of
from ..spec.families import family_of
from ..spec.models import Model
from ..spec.verdicts import Verdict
from .execution import Run
from .state_judgement import state_verdicts
from .truth import NoTruth

Tolerances = Sequence[Sequence[float]]
"""For every run and every one of its spans the tolerance of its rows."""
Truths = Sequence[Sequence[np.ndarray | NoTruth]]
"""For every run and every one of its spans the true rows, float64 [rows, width]; a row of NaN is not known."""
MARGIN_TOLERANCES = 0.05


def margin_min(tolerance: float) -> float:
    """The smallest margin of a selection that is judged. A score may be off by as much as an output of a right engine is, a 20th of its
    tolerance: in single precision never by more than MARGIN_MIN, in half precision by more."""
    return max(MARGIN_MIN, MARGIN_TOLERANCES * tolerance)


def row_errors(rows: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """err of every row; NaN or infinity in `rows` gives NaN or infinity.

    rows   float32 [n, width], the target's
    truth  float64 [n, width], finite
    """
    if rows.shape != truth.shape:
        return np.full(len(rows), np.nan)
    with np.errstate(all="ignore"):
        scale = 1.0 + np.sqrt(np.mean(truth * truth, axis=1))
        errors: np.ndarray = np.max(np.abs(rows.astype(np.float64) - truth), axis=1) / scale
    return errors


def judged_errors(rows: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """`row_errors`, 0 where the truth is not known."""
    errors = row_errors(rows, truth)
    if len(truth) == len(errors):
        errors[~np.isfinite(truth).all(axis=1)] = 0.0
    return errors


def span_errors(
    model: Model, runs: Sequence[Run], truths: Truths | None = None, tolerances: Tolerances | None = None
) -> list[list[np.ndarray]]:
    """For every run and every one of its spans, the errors of its rows; no row has one where there is no truth. `truths` None: our own recompute.

    tolerances  how close a selection may be; None: as in single precision
    """
    answers = recompute_of(model).answers(_requests(runs)) if truths is None or _selects(model) else []
    flat: list[np.ndarray | NoTruth]
    flat = [answer.rows for answer in answers] if truths is None else [truth for own in truths for truth in own]
    rows = []
    for run in runs:
        decodes = {index: np.frombuffer(data, np.float32).reshape(-1, width) for index, (data, width) in run.rows.items()}
        rows += [_taken(decodes[span.operation_index], span.places) for span in run.spans]
    known = [number for number, truth in enumerate(flat) if len(rows[number]) and not isinstance(truth, NoTruth)]
    together = _errors_together(
        [rows[number] for number in known], [truth for truth in flat if not isinstance(truth, NoTruth) and len(truth)]
    )
    if answers and _selects(model):
        least = [margin_min(tolerance) for own in tolerances for tolerance in own] if tolerances else [MARGIN_MIN] * len(flat)
        for number, own in zip(known, together, strict=True):
            own[(answers[number].margins < least[number]) & np.isfinite(own)] = 0.0
    found = dict(zip(known, together, strict=True))
    errors = iter([found.get(number, np.zeros(0)) for number in range(len(rows))])
    return [[next(errors) for _ in run.spans] for run in runs]


def _taken(rows: np.ndarray, places: tuple[int, ...]) -> np.ndarray:
    """The rows at ascending places; those that stand together, which is what most are, are not copied."""
    count = len(places)
    if places and places[-1] - places[0] == count - 1:
        return rows[places[0] : places[0] + count]
    return rows[list(places)]


def unjudged_rows(model: Model, runs: Sequence[Run], tolerance: float = 0.0) -> tuple[int, int]:
    """How many rows of all runs are not judged because a selection was too close, and how many rows there are."""
    if not _selects(model):
        return 0, sum(len(span.indices) for run in runs for span in run.spans)
    answers = recompute_of(model).answers(_requests(runs))
    margins = np.concatenate([answer.margins for answer in answers]) if answers else np.zeros(0)
    return int(np.count_nonzero(margins < margin_min(tolerance))), len(margins)


def close_rows(model: Model, run: Run, tolerance: float) -> dict[int, list[int]]:
    """The rows of a run that are not judged because a selection was too close: operation index -> their places among its rows."""
    if not _selects(model):
        return {}
    close: dict[int, list[int]] = defaultdict(list)
    for span, answer in zip(run.spans, recompute_of(model).answers(_requests([run])), strict=True):
        places = np.asarray(span.places, np.int64)[answer.margins < margin_min(tolerance)]
        close[span.operation_index] += places.tolist()
    return close


def _requests(runs: Sequence[Run]) -> list[Request]:
    return [Request(span.log, span.indices, span.hidden) for run in runs for span in run.spans]


def _selects(model: Model) -> bool:
    """Whether rows may hang on a selection; of an architecture that only an engine knows nothing is known."""
    return family_of(model).is_modelled and recompute_of(model).selects


def _errors_together(rows: Sequence[np.ndarray], truths: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`judged_errors` of every pair, with one call for all pairs of one width."""
    errors = [np.zeros(0)] * len(rows)
    by_width: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (own, truth) in enumerate(zip(rows, truths, strict=True)):
        by_width[own.shape[1], truth.shape[1]].append(number)
    for numbers in by_width.values():
        together = judged_errors(
            np.concatenate([rows[number] for number in numbers]), np.concatenate([truths[number] for number in numbers])
        )
        start = 0
        for number in numbers:
            end = start + len(rows[number])
            errors[number] = together[start:end]
            start = end
    return errors


class Judged(NamedTuple):
    """A run's verdict, and how close each of its rows came to its tolerance: error / tolerance, float64 [rows]."""

    verdict: Verdict
    closeness: np.ndarray


def judge(
    model: Model,
    runs: Sequence[Run],
    tolerance: float,
    state_tolerance: float | None = None,
    truths: Truths | None = None,
    tolerances: Tolerances | None = None,
) -> list[Judged]:
    """The verdict of every run; all runs are of programs of `model`. `state_tolerance` is that of state rows, `tolerance` where it is None;
    `tolerances` those of the runs' spans, `tolerance` where it is None.

    Where an operation's rows and the state after it are wrong, the state decides: it says in which layer.
    """
    of_spans = [[tolerance] * len(run.spans) for run in runs] if tolerances is None else tolerances
    errors = span_errors(model, runs, truths, of_spans)
    verdicts = [_judge_run(run, own, allowed, tolerance) for run, own, allowed in zip(runs, errors, of_spans, strict=True)]
    if truths is not None:
        verdicts = [_as_far_as_known(run, own, verdict) for run, own, verdict in zip(runs, truths, verdicts, strict=True)]
    states = state_verdicts(model, runs, tolerance if state_tolerance is None else state_tolerance)
    closeness = [_closeness(own, allowed) for own, allowed in zip(errors, of_spans, strict=True)]
    return [Judged(_earlier(state, verdict), close) for state, verdict, close in zip(states, verdicts, closeness, strict=True)]


def _closeness(errors: Sequence[np.ndarray], tolerances: Sequence[float]) -> np.ndarray:
    if not errors:
        return np.zeros(0)
    return np.concatenate(errors) / np.repeat(np.array(tolerances, np.float64), [len(own) for own in errors])


def _earlier(state: Verdict | None, verdict: Verdict) -> Verdict:
    """The verdict on the earlier operation; -1 stands for the opening."""
    if state is None or state.operation_index is None:
        return verdict
    if not verdict.is_divergence:
        return state
    return state if state.operation_index <= (-1 if verdict.operation_index is None else verdict.operation_index) else verdict


def _as_far_as_known(run: Run, truths: Sequence[np.ndarray | NoTruth], verdict: Verdict) -> Verdict:
    """The verdict, or `unknown` when the truth of rows before it cannot be had."""
    unknown = [
        (span.operation_index, span.sequence, reason)
        for span, truth in zip(run.spans, truths, strict=True)
        if (reason := why_unknown(truth)) is not None
    ]
    if not unknown:
        return verdict
    index, sequence, reason = min(unknown)
    if verdict.is_divergence and (verdict.operation_index is None or verdict.operation_index <= index):
        return verdict
    return without_truth(index, sequence, reason)


def without_truth(index: int | None, sequence: int | None, reason: str) -> Verdict:
    """The verdict where the truth of an operation's rows cannot be had."""
    return Verdict("unknown", index, sequence, reason=f"could not test: the target's own recompute of the log failed: {reason}"[:300])


def why_unknown(truth: np.ndarray | NoTruth) -> str | None:
    """Why a truth, or a row of it, cannot be had; None when it is known."""
    if isinstance(truth, NoTruth):
        return truth.reason
    return None if np.all(np.isfinite(truth)) else "its output rows are not finite"


def _judge_run(run: Run, errors: Sequence[np.ndarray], tolerances: Sequence[float], tolerance: float) -> Verdict:
    """`tolerance` is said where there are no rows."""
    together = np.concatenate(errors) if errors else np.zeros(0)
    allowed = np.repeat(np.array(tolerances, np.float64), np.array([len(own) for own in errors], np.int64))
    if np.all(together <= allowed):
        error, held_to = _nearest(together, allowed, tolerance)
        return run.verdict or Verdict("ok", error=error, tolerance=held_to)
    wrong = [  # operation index, span number
        (span.operation_index, number)
        for number, (span, own) in enumerate(zip(run.spans, errors, strict=True))
        if not np.all(own <= tolerances[number])
    ]
    operation_index = min(wrong)[0]
    if run.verdict and run.verdict.operation_index is not None and run.verdict.operation_index < operation_index:
        return run.verdict
    numbers = [number for index, number in wrong if index == operation_index]
    span_number = max(numbers, key=lambda number: _badness(errors[number]))
    return _wrong_rows(run, span_number, errors[span_number], tolerances[span_number])


def _badness(errors: np.ndarray) -> float:
    return float("inf") if not np.all(np.isfinite(errors)) else float(errors.max())


def _nearest(errors: np.ndarray, tolerances: np.ndarray, tolerance: float) -> tuple[float, float]:
    """The error of the row that is nearest to its tolerance, and that tolerance; 0 and `tolerance` where there is none."""
    if not len(errors):
        return 0.0, tolerance
    nearest = np.lexsort((errors, errors / tolerances))[-1]
    return float(errors[nearest]), float(tolerances[nearest])


def _wrong_rows(run: Run, span_number: int, errors: np.ndarray, tolerance: float) -> Verdict:
    """The verdict for the worst span of the first wrong operation; its first wrong row gives the position."""
    span = run.spans[span_number]
    first = int(np.argmax(~(errors <= tolerance)))
    finite = bool(np.all(np.isfinite(errors)))
    what = "hidden states" if span.hidden else "logits"
    error = float(errors.max()) if finite else float("nan")
    reason = f"{what} off by {error:.3g} (tolerance {tolerance:.2g})" if finite else f"{what} are not finite where the recompute is"
    return Verdict(
        "wrong-output" if finite else "nonfinite",
        span.operation_index,
        span.sequence,
        span.offset + span.indices[first],
        span.relation,
        error if finite else None,
        tolerance,
        reason=reason,
    )


def worst_error(model: Model, runs: Sequence[Run], truths: Truths | None = None) -> float:
    """The largest finite error over all rows of all runs; NaN when there are rows and none is finite."""
    flat = [errors for run_errors in span_errors(model, runs, truths) for errors in run_errors if len(errors)]
    if not flat:
        return 0.0
    errors = np.concatenate(flat)
    finite = errors[np.isfinite(errors)]
    return float(finite.max()) if len(finite) else float("nan")
