"""Judge runs: compare every output row with the full recompute, for many programs at once.

Rules
- The first operation that went wrong decides, be it by its answer, a position or a row.
- An output row `y` against its recompute `r`: err = max|y - r| / (1 + rms(r)); it is right only if err <= tolerance, so NaN is wrong.
- Logs of all runs of one model go through one recompute.
- A row that hangs on a selection with a margin under MARGIN_MIN is not judged: rounding decides what was selected. Its error counts as 0.
- Where a truth cannot be had (`truth.NoTruth`), a program that is not wrong before is `unknown`.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ..oracle.recompute import MARGIN_MIN, Request, recompute_of
from ..spec.families import family_of
from ..spec.models import Model
from ..spec.verdicts import Verdict
from .execution import Run
from .state_judgement import state_verdicts
from .truth import NoTruth

Truths = Sequence[Sequence[np.ndarray | NoTruth]]
"""For every run and every one of its spans the true rows, float64 [rows, width]."""


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


def span_errors(model: Model, runs: Sequence[Run], truths: Truths | None = None) -> list[list[np.ndarray]]:
    """For every run and every one of its spans, the errors of its rows; no row has one where there is no truth. `truths` None: our own recompute."""
    answers = recompute_of(model).answers(_requests(runs)) if truths is None or _selects(model) else []
    flat: list[np.ndarray | NoTruth]
    flat = [answer.rows for answer in answers] if truths is None else [truth for own in truths for truth in own]
    rows = []
    for run in runs:
        decodes = {index: np.frombuffer(data, np.float32).reshape(-1, width) for index, (data, width) in run.rows.items()}
        rows += [decodes[span.operation_index][list(span.places)] for span in run.spans]
    known = [number for number, truth in enumerate(flat) if len(rows[number]) and not isinstance(truth, NoTruth)]
    together = _errors_together(
        [rows[number] for number in known], [truth for truth in flat if not isinstance(truth, NoTruth) and len(truth)]
    )
    for number, own in zip(known, together, strict=True):
        if answers:
            own[(answers[number].margins < MARGIN_MIN) & np.isfinite(own)] = 0.0
    found = dict(zip(known, together, strict=True))
    errors = iter([found.get(number, np.zeros(0)) for number in range(len(rows))])
    return [[next(errors) for _ in run.spans] for run in runs]


def unjudged_rows(model: Model, runs: Sequence[Run]) -> tuple[int, int]:
    """How many rows of all runs are not judged because a selection was too close, and how many rows there are."""
    if not _selects(model):
        return 0, sum(len(span.indices) for run in runs for span in run.spans)
    answers = recompute_of(model).answers(_requests(runs))
    margins = np.concatenate([answer.margins for answer in answers]) if answers else np.zeros(0)
    return int(np.count_nonzero(margins < MARGIN_MIN)), len(margins)


def _requests(runs: Sequence[Run]) -> list[Request]:
    return [Request(span.log, span.indices, span.hidden) for run in runs for span in run.spans]


def _selects(model: Model) -> bool:
    """Whether rows may hang on a selection; of an architecture that only an engine knows nothing is known."""
    return family_of(model).is_modelled and recompute_of(model).selects


def _errors_together(rows: Sequence[np.ndarray], truths: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`row_errors` of every pair, with one call for all pairs of one width."""
    errors = [np.zeros(0)] * len(rows)
    by_width: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (own, truth) in enumerate(zip(rows, truths, strict=True)):
        by_width[own.shape[1], truth.shape[1]].append(number)
    for numbers in by_width.values():
        together = row_errors(np.concatenate([rows[number] for number in numbers]), np.concatenate([truths[number] for number in numbers]))
        start = 0
        for number in numbers:
            end = start + len(rows[number])
            errors[number] = together[start:end]
            start = end
    return errors


def judge(
    model: Model, runs: Sequence[Run], tolerance: float, state_tolerance: float | None = None, truths: Truths | None = None
) -> list[Verdict]:
    """The verdict of every run; all runs are of programs of `model`. `state_tolerance` is that of state rows, `tolerance` where it is None.

    Where an operation's rows and the state after it are wrong, the state decides: it says in which layer.
    """
    verdicts = [_judge_run(run, errors, tolerance) for run, errors in zip(runs, span_errors(model, runs, truths), strict=True)]
    if truths is not None:
        verdicts = [_as_far_as_known(run, own, verdict) for run, own, verdict in zip(runs, truths, verdicts, strict=True)]
    states = state_verdicts(model, runs, tolerance if state_tolerance is None else state_tolerance)
    return [_earlier(state, verdict) for state, verdict in zip(states, verdicts, strict=True)]


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
        (span.operation_index, span.sequence, truth.reason)
        for span, truth in zip(run.spans, truths, strict=True)
        if isinstance(truth, NoTruth)
    ]
    if not unknown:
        return verdict
    index, sequence, reason = min(unknown)
    if verdict.is_divergence and (verdict.operation_index is None or verdict.operation_index <= index):
        return verdict
    return Verdict("unknown", index, sequence, reason=f"could not test: the target's own recompute of the log failed: {reason}"[:300])


def _judge_run(run: Run, errors: Sequence[np.ndarray], tolerance: float) -> Verdict:
    wrong: list[tuple[int, int]] = []  # operation index, span number
    for number, (span, span_error) in enumerate(zip(run.spans, errors, strict=True)):
        if not np.all(span_error <= tolerance):
            wrong.append((span.operation_index, number))
    if not wrong:
        return run.verdict or Verdict("ok", error=_largest(errors), tolerance=tolerance)
    operation_index = min(wrong)[0]
    if run.verdict and run.verdict.operation_index is not None and run.verdict.operation_index < operation_index:
        return run.verdict
    numbers = [number for index, number in wrong if index == operation_index]
    span_number = max(numbers, key=lambda number: _badness(errors[number]))
    return _wrong_rows(run, span_number, errors[span_number], tolerance)


def _badness(errors: np.ndarray) -> float:
    return float("inf") if not np.all(np.isfinite(errors)) else float(errors.max())


def _largest(errors: Sequence[np.ndarray]) -> float:
    return max((float(span_error.max()) for span_error in errors if len(span_error)), default=0.0)


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
