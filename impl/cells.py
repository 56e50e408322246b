"""Cells: which cell holds which sequence's state, and where a batch must read it from. Policy `strict`.

Rules
- One cell holds one whole recurrent state, in 1 + n_rs_seq planes: plane p of cell c is row p * cells + c, and holds the state p tokens
  before the cell's last. Position and pending rollback are metadata of the sequence, not of the cell.
- Sharing makes several sequences point at one cell. A sequence that goes on while others point at its cell is given a cell of its own,
  which reads from the shared one; only a cell's last owner writes in it. As many cells as sequences therefore always suffice.
- A new sequence starts from zero: its cell's row is overwritten with zero before it is read.
- A rollback moves no data: it adds to the plane that is read next, and is refused unless that plane was written. It binds only its own
  sequence, so a sharer is not disturbed, and a share copies it.
- `plan` never changes anything: it returns a `Plan`; `apply` makes it true. Their cost follows the batch, not the tokens that are cached.
Source: llama.cpp's llama-memory-recurrent.cpp for the idea of cells, tails and planes; the count of valid planes is ours.
"""

from typing import NamedTuple

import numpy as np

from ..spec.target import Guarantee
from .batches import SplitBatch
from .kernels import kernel

NONE = -1
"""No cell, or no row."""


class Plan(NamedTuple):
    """Where the segments of a batch read and write; all arrays are int64.

    cell        [segments], the cell that holds the sequence afterwards
    source_row  [segments], read from
    plane_row   [segments, 1 + n_rs_seq], written to; -1 for a plane that is not
    zero_row    [segments], to be overwritten with zero before its ubatch, or -1
    """

    cell: np.ndarray
    source_row: np.ndarray
    plane_row: np.ndarray
    zero_row: np.ndarray


class Copies(NamedTuple):
    """Rows to copy before a batch runs, one after the other: int64 [copies] each."""

    source_row: np.ndarray
    target_row: np.ndarray


NO_COPIES = Copies(np.zeros(0, np.int64), np.zeros(0, np.int64))


@kernel
def _plan(
    segment_sequence: np.ndarray,
    segment_start: np.ndarray,
    tail: np.ndarray,
    pending: np.ndarray,
    reference_count: np.ndarray,
    free_cells: np.ndarray,
    free_count: int,
    planes: int,
) -> Plan:
    segments = segment_sequence.size
    n_cells = reference_count.size
    cell = np.empty(segments, np.int64)
    source_row = np.empty(segments, np.int64)
    plane_row = np.full((segments, planes), NONE, np.int64)
    zero_row = np.full(segments, NONE, np.int64)
    departed = np.empty(n_cells, np.int64)  # sequences of this batch that leave a shared cell; only the batch's own cells have a meaning
    for i in range(segments):
        if tail[segment_sequence[i]] != NONE:
            departed[tail[segment_sequence[i]]] = 0
    taken = 0
    for i in range(segments):
        sequence = segment_sequence[i]
        old = tail[sequence]
        if i > 0 and segment_sequence[i - 1] == sequence:
            cell[i] = cell[i - 1]
            source_row[i] = cell[i]
        elif old != NONE and reference_count[old] - departed[old] == 1:
            cell[i] = old
            source_row[i] = pending[sequence] * n_cells + old
        else:
            taken += 1
            cell[i] = free_cells[free_count - taken]
            if old == NONE:
                source_row[i] = cell[i]
                zero_row[i] = cell[i]
            else:
                departed[old] += 1
                source_row[i] = pending[sequence] * n_cells + old
        for plane in range(min(planes, segment_start[i + 1] - segment_start[i])):
            plane_row[i, plane] = plane * n_cells + cell[i]
    return Plan(cell, source_row, plane_row, zero_row)


@kernel
def _apply(
    segment_sequence: np.ndarray,
    segment_start: np.ndarray,
    cell: np.ndarray,
    tail: np.ndarray,
    position: np.ndarray,
    pending: np.ndarray,
    reference_count: np.ndarray,
    valid_planes: np.ndarray,
    free_count: int,
    planes: int,
) -> int:
    """Make a plan true in the arrays; returns the new count of free cells."""
    i = 0
    while i < segment_sequence.size:
        sequence = segment_sequence[i]
        first = segment_start[i]
        while i + 1 < segment_sequence.size and segment_sequence[i + 1] == sequence:
            i += 1
        tokens = segment_start[i + 1] - first
        old, new = tail[sequence], cell[i]
        if old != new:
            free_count -= 1
            if old != NONE:
                reference_count[old] -= 1
            reference_count[new] = 1
            tail[sequence] = new
        position[sequence] += tokens
        pending[sequence] = 0
        valid_planes[new] = min(tokens, planes) - 1
        i += 1
    return free_count


class Cells:
    """The bookkeeping of one recurrent cache: what every policy has.

    tail             int64 [sequences], the cell of a sequence, -1 when empty
    position         int64 [sequences], the index of its last token, -1 when empty
    reference_count  int64 [cells], sequences that point at a cell
    free_cells       int64 [cells], a stack of which the first `free_count` are free

    A policy says how it plans and applies batches, how far back a sequence can go (`reach`), where its states are (`rows_of`), and
    what else it knows of a sequence (`own`): a share copies it, a drop makes it 0.
    """

    guarantee: Guarantee
    own: tuple[np.ndarray, ...]

    def __init__(self, n_seq_max: int, n_rs_seq: int) -> None:
        self.planes = 1 + n_rs_seq
        self.tail = np.full(n_seq_max, NONE, np.int64)
        self.position = np.full(n_seq_max, NONE, np.int64)
        self.reference_count = np.zeros(n_seq_max, np.int64)
        self.free_cells = np.arange(n_seq_max - 1, -1, -1, dtype=np.int64)
        self.free_count = n_seq_max

    @property
    def row_count(self) -> int:
        """Rows a layer."""
        return self.planes * len(self.tail)

    @property
    def tail_size(self) -> int:
        """Newest tokens of a sequence that a ubatch has to hold together."""
        raise NotImplementedError

    def plan(self, batch: SplitBatch) -> Plan:
        """Where every segment of `batch` reads and writes. It always fits."""
        raise NotImplementedError

    def apply(self, batch: SplitBatch, plan: Plan) -> Copies:
        """Make `plan`, made for `batch` from the present state, true. What is returned has to be copied before the batch runs."""
        raise NotImplementedError

    def reach(self, sequence: int) -> int:
        """How many tokens of `sequence` can be taken back."""
        raise NotImplementedError

    def rows_of(self, sequence: int, state_count: int = 1) -> np.ndarray:
        """The rows of the newest states of a sequence that is not empty, the present one first; int64 [state_count], at most 1 + reach."""
        raise NotImplementedError

    def rollback(self, sequence: int, token_count: int) -> str | None:
        """Take back the newest `token_count` tokens, fewer than there are; the reason when it is refused."""
        reach = self.reach(sequence)
        if token_count > reach:
            return f"cannot take back {token_count}: the snapshots of sequence {sequence} reach {reach} back"
        self._go_back(sequence, token_count)
        self.position[sequence] -= token_count
        return None

    def _go_back(self, sequence: int, token_count: int) -> None:
        """Let the present state be the one `token_count` tokens back, at most as far as it reaches."""
        raise NotImplementedError

    def drop(self, sequence: int) -> None:
        """Empty the sequence; its cell is free when nobody else points at it."""
        cell = self.tail[sequence]
        if cell == NONE:
            return
        self.reference_count[cell] -= 1
        if self.reference_count[cell] == 0:
            self.free_cells[self.free_count] = cell
            self.free_count += 1
        self.tail[sequence] = NONE
        self.position[sequence] = NONE
        for values in self.own:
            values[sequence] = 0

    def share(self, source: int, destination: int) -> None:
        """Point `destination` at what `source` holds, what it can go back to included; what it held is dropped."""
        if source == destination:
            return
        self.drop(destination)
        cell = self.tail[source]
        if cell != NONE:
            self.reference_count[cell] += 1
        self.tail[destination] = cell
        self.position[destination] = self.position[source]
        for values in self.own:
            values[destination] = values[source]

    def place(self, sequence: int, position: int, depth: int = 0) -> np.ndarray:
        """Give `sequence`, whatever it held, a cell of its own for a state at `position` and `depth` states before it; returns their rows, as `rows_of`."""
        self.drop(sequence)
        self.free_count -= 1
        cell = int(self.free_cells[self.free_count])
        self.reference_count[cell] = 1
        self.tail[sequence] = cell
        self.position[sequence] = position
        self._begin(sequence, depth)
        return self.rows_of(sequence, depth + 1)

    def _begin(self, sequence: int, depth: int) -> None:
        """Note that the sequence has `depth` states before its present one, in a cell of its own."""
        raise NotImplementedError


class StrictCells(Cells):
    """Planes.

    pending       int64 [sequences], the plane that is read next: how many tokens were taken back since the cell was written
    valid_planes  int64 [cells], snapshots beyond plane 0 that hold what their number says
    """

    guarantee: Guarantee = "draft"

    def __init__(self, n_seq_max: int, n_rs_seq: int) -> None:
        super().__init__(n_seq_max, n_rs_seq)
        self.pending = np.zeros(n_seq_max, np.int64)
        self.valid_planes = np.zeros(n_seq_max, np.int64)
        self.own = (self.pending,)

    @property
    def tail_size(self) -> int:
        return self.planes

    def plan(self, batch: SplitBatch) -> Plan:
        plan: Plan = _plan(
            batch.segment_sequence, batch.segment_start, self.tail, self.pending, self.reference_count, self.free_cells, self.free_count,
            self.planes,
        )  # fmt: skip
        return plan

    def apply(self, batch: SplitBatch, plan: Plan) -> Copies:
        self.free_count = _apply(
            batch.segment_sequence, batch.segment_start, plan.cell, self.tail, self.position, self.pending,
            self.reference_count, self.valid_planes, self.free_count, self.planes,
        )  # fmt: skip
        return NO_COPIES

    def reach(self, sequence: int) -> int:
        cell = self.tail[sequence]
        return 0 if cell == NONE else int(self.valid_planes[cell] - self.pending[sequence])

    def rows_of(self, sequence: int, state_count: int = 1) -> np.ndarray:
        return (int(self.pending[sequence]) + np.arange(state_count)) * len(self.tail) + int(self.tail[sequence])

    def _go_back(self, sequence: int, token_count: int) -> None:
        self.pending[sequence] += token_count

    def _begin(self, sequence: int, depth: int) -> None:
        self.valid_planes[self.tail[sequence]] = depth
