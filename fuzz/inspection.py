"""What a session shows of its state rows, and what a refusal did to them.

Rules
- A sequence's rows are asked for after every operation that was sent; what was shown before of the same log, bit by bit, is not kept again.
- Nothing here knows the truth, or imports torch: this also runs in the child process of a native target.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from ..oracle.ledger import Log
from ..spec.operations import AnyOperation, Restore, RestoreAll, operation_name, sequences_of
from ..spec.target import StateRow
from ..spec.verdicts import Relation, Verdict

Layout = tuple[tuple[int, str, tuple[int, ...]], ...]
"""Layer, part and shape of every row."""


class Shown(msgspec.Struct, frozen=True):
    """The state rows of one sequence, as a session showed them.

    layout  layer, part and shape of every row, in order
    rows    their float32 numbers, C order
    """

    layout: Layout
    rows: tuple[bytes, ...]


NOTHING = Shown((), ())


class Inspection(msgspec.Struct, frozen=True):
    """What was shown of one sequence after an operation.

    log       the tokens that it holds
    position  of the last of them; -1 when there is none
    relation  whether the operation named the sequence
    """

    operation_index: int
    sequence: int
    log: tuple[int, ...]
    position: int
    relation: Relation
    shown: Shown


def shown(rows: Sequence[StateRow]) -> Shown:
    """Rows by layer and part. Raises TypeError for what are no rows of float32."""
    for row in rows:
        if not isinstance(row, StateRow):
            raise TypeError(f"inspect must show StateRows, not {type(row).__name__}")
        if not isinstance(row.values, np.ndarray) or row.values.dtype != np.float32:
            raise TypeError(f"the {row.part} row of layer {row.layer} must be an array of float32")
    ordered = sorted(rows, key=lambda row: (row.layer, row.part)) if len(rows) > 1 else rows
    return Shown(tuple((row.layer, row.part, row.values.shape) for row in ordered), tuple(row.values.tobytes() for row in ordered))


def relation_to(operation: AnyOperation, sequence: int) -> Relation:
    """Whether an operation named a sequence; one that names none concerns all."""
    named = sequences_of(operation)
    return "self" if sequence in named or not named else "other"


class Inspector:
    """What one session has shown so far, beside the logs."""

    def __init__(self) -> None:
        self.inspections: list[Inspection] = []
        self._before: dict[int, tuple[tuple[int, ...], Shown]] = {}
        self._kept: set[tuple[tuple[int, ...], Shown]] = set()

    def forget(self) -> None:
        """A new session has shown nothing yet."""
        self._before = {}

    def look(self, index: int, operation: AnyOperation, is_refused: bool, sequence: int, log: Log, now: Shown) -> Verdict | None:
        """Take down what is shown of a sequence after operation number `index`; the verdict when a refusal changed it."""
        before = self._before.get(sequence)
        self._before[sequence] = (log.tokens, now)
        if before == (log.tokens, now):
            return None
        is_emptied = isinstance(operation, Restore | RestoreAll) and not log.tokens and now == NOTHING
        if is_refused and before is not None and before[1] != now and not is_emptied:
            return _changed_by_refusal(index, operation, sequence, log, before[1], now)
        key = (log.tokens, now)
        if not log.silent and key not in self._kept:
            self._kept.add(key)
            self.inspections.append(Inspection(index, sequence, log.tokens, log.position, relation_to(operation, sequence), now))
        return None

    def skip(self, sequence: int) -> None:
        """Of an unchecked sequence nothing is asked."""
        self._before.pop(sequence, None)


def _changed_by_refusal(index: int, operation: AnyOperation, sequence: int, log: Log, before: Shown, now: Shown) -> Verdict:
    rows = dict(zip([entry[:2] for entry in before.layout], zip(before.layout, before.rows, strict=True), strict=True))
    rows_now = dict(zip([entry[:2] for entry in now.layout], zip(now.layout, now.rows, strict=True), strict=True))
    layer, part = min(key for key in rows.keys() | rows_now.keys() if rows.get(key) != rows_now.get(key))
    reason = f"{operation_name(operation)} was refused, but the {part} state of sequence {sequence} in layer {layer} changed"
    return state_verdict("partial-effect", index, sequence, log.position, relation_to(operation, sequence), layer, part, reason)


def state_verdict(
    kind: Literal["partial-effect", "wrong-state", "nonfinite"], index: int, sequence: int, position: int, relation: Relation,
    layer: int, part: str, reason: str, error: float | None = None, tolerance: float | None = None,
) -> Verdict:  # fmt: skip
    """A verdict on one state row."""
    return Verdict(kind, index, sequence, position, relation, error, tolerance, part, reason, layer)
