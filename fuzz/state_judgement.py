"""Judge what sessions showed of their state: every row against the recompute of the log it belongs to, for many programs at once.

Rules
- A row `y` against its recompute `r`, both as one flat vector: err = max|y - r| / (1 + rms(r)), right only if err <= tolerance.
- Missing and additional rows and wrong shapes are wrong states, too; an empty log must show no rows.
- Layers with an attention window may show fewer tokens than the log has: the newest, and all that the next token sees.
- The same log with the same bytes is judged once, over all runs of a model.
- A state that hangs on a selection with a margin under MARGIN_MIN is not judged, as in judgement.py.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..oracle.recompute import MARGIN_MIN, Traced, recompute_of
from ..oracle.trace import PER_TOKEN, TracedPart
from ..spec.families import dimensions_of, family_of
from ..spec.models import Model
from ..spec.verdicts import Verdict
from .execution import Run
from .inspection import Inspection, Shown, state_verdict

StateLog = tuple[int, ...]
Key = tuple[StateLog, Shown]


class RowFault(NamedTuple):
    """The first wrong row of what was shown of a sequence.

    error   None: the row is missing, is one too many, or has another shape, as `reason` says; not finite: so is the row
    """

    layer: int
    part: str
    error: float | None
    reason: str


class StateJudgement(NamedTuple):
    """What is wrong with each of some shown states (None: nothing), and the largest finite error of all rows; NaN when there is none."""

    faults: dict[Key, RowFault | None]
    worst_error: float


def judge_states(model: Model, keys: Sequence[Key], tolerance: float) -> StateJudgement:
    """Compare shown states with the recompute of their logs; keys may repeat."""
    unique = list(dict.fromkeys(keys))
    faults: dict[Key, RowFault | None] = {key: None if key[0] else _shown_for_nothing(key) for key in unique}
    by_log: dict[StateLog, list[Shown]] = defaultdict(list)
    for log, shown in unique:
        if log:
            by_log[log].append(shown)
    logs = list(by_log)
    worst = float("nan")
    family, dimensions = family_of(model), dimensions_of(model)
    window = family.attention_window(dimensions)
    for traced in recompute_of(model).traced(logs):
        sure = [(place, number) for place, number in enumerate(traced.logs) if traced.margins[place] >= MARGIN_MIN]
        work = [(place, (logs[number], shown)) for place, number in sure for shown in by_log[logs[number]]]
        fitting = []
        for place, key in work:
            fault = _layout_fault(traced, place, key[1], window)
            if fault is None:
                fitting.append((place, key))
            faults[key] = fault
        errors = _errors(traced, fitting)
        if errors.size:
            worst = float(np.fmax(worst, np.max(errors, where=np.isfinite(errors), initial=-np.inf)))
            for column in np.flatnonzero(~np.all(errors <= tolerance, axis=0)).tolist():
                row = int(np.argmax(~(errors[:, column] <= tolerance)))
                faults[fitting[column][1]] = _row_fault(traced.parts[_order(traced)[row]], float(errors[row, column]), tolerance)
    return StateJudgement(faults, worst if worst >= 0 else float("nan"))


def _order(traced: Traced) -> list[int]:
    """The parts as they are shown: by layer, then by name."""
    return sorted(range(len(traced.parts)), key=lambda number: (traced.parts[number].layer, traced.parts[number].part))


def _shown_for_nothing(key: Key) -> RowFault | None:
    if not key[1].layout:
        return None
    layer, part, shape = key[1].layout[0]
    return RowFault(layer, part, None, f"an empty sequence shows a {part} state {list(shape)} in layer {layer}")


def _row_fault(part: TracedPart, error: float, tolerance: float) -> RowFault:
    where = f"{part.part} state of layer {part.layer}"
    if not np.isfinite(error):
        return RowFault(part.layer, part.part, error, f"{where} is not finite where the recompute is")
    return RowFault(part.layer, part.part, error, f"{where} off by {error:.3g} (tolerance {tolerance:.2g})")


def _shape(part: TracedPart, token_count: int) -> tuple[int, ...]:
    shape = part.values.shape
    return (shape[0], token_count, *shape[2:]) if part.part in PER_TOKEN else shape[1:]


def _layout_fault(traced: Traced, place: int, shown: Shown, window: int) -> RowFault | None:
    """The first row that is missing, too many, or of another shape than the log at `place` has."""
    token_count = len(traced.paths[place])
    expected = tuple((part.layer, part.part, _shape(part, token_count)) for part in (traced.parts[number] for number in _order(traced)))
    if shown.layout == expected:
        return None
    given = {(layer, part): shape for layer, part, shape in shown.layout}
    for layer, part, shape in expected:
        own = given.pop((layer, part), None)
        if own is None:
            return RowFault(layer, part, None, f"no {part} state of layer {layer} is shown")
        if own != shape and not (part == "attention" and window and _is_windowed(own, shape, window)):
            return RowFault(layer, part, None, f"{part} state of layer {layer} has shape {list(own)}, not {list(shape)}")
    if given or len(shown.layout) != len(expected):
        at, name = min(given, default=shown.layout[0][:2])
        return RowFault(at, name, None, f"a {name} state of layer {at} is shown that the model does not have")
    return None


def _is_windowed(own: tuple[int, ...], shape: tuple[int, ...], window: int) -> bool:
    """Whether the newest tokens are shown, at least those that the next token sees."""
    return len(own) == len(shape) and own[:1] + own[2:] == shape[:1] + shape[2:] and min(shape[1], window - 1) <= own[1] <= shape[1]


def _errors(traced: Traced, fitting: Sequence[tuple[int, Key]]) -> np.ndarray:
    """err of every row, float64 [parts in order, shown states]."""
    errors = np.zeros((len(traced.parts), len(fitting)))
    if not fitting:
        return errors
    places = np.array([place for place, _ in fitting])
    for row, number in enumerate(_order(traced)):
        part = traced.parts[number]
        given = np.frombuffer(b"".join(key[1].rows[row] for _, key in fitting), np.float32)
        if part.part in PER_TOKEN:
            tokens = [key[1].layout[row][2][1] for _, key in fitting]
            errors[row] = _token_errors(traced, part, places, tokens, given)
        else:
            truth = part.values.reshape(len(part.values), -1)[places]
            errors[row] = _flat_errors(given.reshape(truth.shape), truth)
    return errors


def _flat_errors(given: np.ndarray, truth: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        scale = 1.0 + np.sqrt(np.mean(truth * truth, axis=1))
        result: np.ndarray = np.max(np.abs(given - truth), axis=1) / scale
    return result


def _token_errors(traced: Traced, part: TracedPart, places: np.ndarray, tokens: Sequence[int], given: np.ndarray) -> np.ndarray:
    """Every shown state holds so many kinds of rows (keys, and values where they are kept) of its newest `tokens`."""
    kinds, node_count = part.values.shape[:2]
    flat = part.values.reshape(kinds * node_count, -1)
    nodes = []
    for place, count in zip(places.tolist(), tokens, strict=True):
        newest = traced.paths[place][len(traced.paths[place]) - count :]
        nodes += [newest + kind * node_count for kind in range(kinds)]
    counts = kinds * np.array(tokens)
    filled = np.flatnonzero(counts)
    result = np.zeros(len(places))
    if len(filled):
        truth = flat[np.concatenate(nodes)]
        starts = (np.cumsum(counts) - counts)[filled]
        with np.errstate(all="ignore"):
            worst = np.maximum.reduceat(np.max(np.abs(given.reshape(truth.shape) - truth), axis=1), starts)
            mean_square = np.add.reduceat(np.sum(truth * truth, axis=1), starts) / (counts[filled] * flat.shape[1])
        result[filled] = worst / (1.0 + np.sqrt(mean_square))
    return result


def state_verdicts(model: Model, runs: Sequence[Run], tolerance: float) -> list[Verdict | None]:
    """For every run the verdict on the first operation after which a state was wrong, or None; of several wrong rows the lowest layer's."""
    keys = [(inspection.log, inspection.shown) for run in runs for inspection in run.inspections]
    faults = judge_states(model, keys, tolerance).faults if keys else {}
    return [_first_fault(run, faults, tolerance) for run in runs]


def _first_fault(run: Run, faults: dict[Key, RowFault | None], tolerance: float) -> Verdict | None:
    first: tuple[int, int, int] | None = None
    verdict = None
    for inspection, fault in _faulty(run, faults):
        rank = (inspection.operation_index, fault.layer, inspection.sequence)
        if first is None or rank < first:
            first, verdict = rank, _verdict(inspection, fault, tolerance)
    return verdict


def _faulty(run: Run, faults: dict[Key, RowFault | None]) -> Iterator[tuple[Inspection, RowFault]]:
    for inspection in run.inspections:
        fault = faults[inspection.log, inspection.shown]
        if fault is not None:
            yield inspection, fault


def _verdict(inspection: Inspection, fault: RowFault, tolerance: float) -> Verdict:
    is_finite = fault.error is None or bool(np.isfinite(fault.error))
    return state_verdict(
        "wrong-state" if is_finite else "nonfinite", inspection.operation_index, inspection.sequence, inspection.position,
        inspection.relation, fault.layer, fault.part, fault.reason, fault.error if is_finite else None, tolerance,
    )  # fmt: skip


def worst_state_error(model: Model, runs: Sequence[Run]) -> float:
    """The largest finite error of all rows that were shown in some runs and have the right shape; NaN when there is none."""
    keys = [(inspection.log, inspection.shown) for run in runs for inspection in run.inspections]
    return judge_states(model, keys, float("inf")).worst_error
