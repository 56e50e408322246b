"""Ring: the same cells and rows, but the planes of a cell are a ring in which every token writes the next. Policy `ring`.

Rules
- A token overwrites nothing of the state before it: it reads plane b and writes plane b + 1, modulo the planes. So the newest states exist
  however the tokens came, one by one or many at once, and a batch may be cut anywhere.
- The plane of the present state (`base`), and how many states before it are kept (`depth`), are metadata of the sequence, not of the cell: a
  rollback moves them, can be repeated while depth lasts, and disturbs no sharer; a share copies them.
- A sequence that leaves a shared cell takes along the states that it can still go back to after the batch: they are copied into its own
  cell, plane by plane, before anything of the batch is written. Only a cell's last owner writes in it.
- Depth is arithmetic of the log: a batch of k tokens makes it the least of n_rs_seq and depth + k (k - 1 for a new sequence).
Source: ours; the cells, and the number of rows, are those of llama.cpp's llama-memory-recurrent.cpp.
"""

import numpy as np

from ..spec.target import Guarantee
from .batches import SplitBatch
from .cells import NONE, Cells, Copies, Plan
from .kernels import kernel


@kernel
def _plan(
    segment_sequence: np.ndarray,
    segment_start: np.ndarray,
    tail: np.ndarray,
    base: np.ndarray,
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
    plane = 0
    for i in range(segments):
        sequence = segment_sequence[i]
        old = tail[sequence]
        if i > 0 and segment_sequence[i - 1] == sequence:
            cell[i] = cell[i - 1]
            source_row[i] = plane * n_cells + cell[i]
        elif old == NONE:
            taken += 1
            cell[i] = free_cells[free_count - taken]
            plane = planes - 1
            source_row[i] = plane * n_cells + cell[i]
            zero_row[i] = source_row[i]
        else:
            plane = base[sequence]
            source_row[i] = plane * n_cells + old
            cell[i] = old
            if reference_count[old] - departed[old] > 1:
                departed[old] += 1
                taken += 1
                cell[i] = free_cells[free_count - taken]
        tokens = segment_start[i + 1] - segment_start[i]
        plane = (plane + tokens) % planes
        for back in range(min(planes, tokens)):
            plane_row[i, back] = (plane - back + planes) % planes * n_cells + cell[i]
    return Plan(cell, source_row, plane_row, zero_row)


@kernel
def _apply(
    segment_sequence: np.ndarray,
    segment_start: np.ndarray,
    cell: np.ndarray,
    tail: np.ndarray,
    position: np.ndarray,
    base: np.ndarray,
    depth: np.ndarray,
    reference_count: np.ndarray,
    free_count: int,
    planes: int,
) -> tuple[int, np.ndarray, np.ndarray]:
    """Make a plan true in the arrays; returns the new count of free cells, and the rows to copy: from, to."""
    n_cells = reference_count.size
    copies_max = 0
    for i in range(segment_sequence.size):
        if tail[segment_sequence[i]] != NONE and tail[segment_sequence[i]] != cell[i]:
            copies_max += planes
    source, target = np.empty(copies_max, np.int64), np.empty(copies_max, np.int64)
    copied = 0
    i = 0
    while i < segment_sequence.size:
        sequence = segment_sequence[i]
        first = segment_start[i]
        while i + 1 < segment_sequence.size and segment_sequence[i + 1] == sequence:
            i += 1
        tokens = segment_start[i + 1] - first
        old, new = tail[sequence], cell[i]
        if old == NONE:
            base[sequence] = planes - 1
            depth[sequence] = -1  # a new sequence has no state to go back to, not even an empty one
        kept = min(planes - 1, depth[sequence] + tokens)
        if old != new:
            free_count -= 1
            if old != NONE:
                reference_count[old] -= 1
                for back in range(kept - tokens + 1):
                    row = (base[sequence] - back + planes) % planes * n_cells
                    source[copied] = row + old
                    target[copied] = row + new
                    copied += 1
            reference_count[new] = 1
            tail[sequence] = new
        position[sequence] += tokens
        base[sequence] = (base[sequence] + tokens) % planes
        depth[sequence] = kept
        i += 1
    return free_count, source[:copied], target[:copied]


class RingCells(Cells):
    """A ring of planes.

    base   int64 [sequences], the plane that holds its state
    depth  int64 [sequences], how many tokens can be taken back
    """

    guarantee: Guarantee = "any"

    def __init__(self, n_seq_max: int, n_rs_seq: int) -> None:
        super().__init__(n_seq_max, n_rs_seq)
        self.base = np.zeros(n_seq_max, np.int64)
        self.depth = np.zeros(n_seq_max, np.int64)
        self.own = (self.base, self.depth)

    @property
    def tail_size(self) -> int:
        return 1

    def plan(self, batch: SplitBatch) -> Plan:
        plan: Plan = _plan(
            batch.segment_sequence, batch.segment_start, self.tail, self.base, self.reference_count, self.free_cells, self.free_count, self.planes
        )  # fmt: skip
        return plan

    def apply(self, batch: SplitBatch, plan: Plan) -> Copies:
        self.free_count, source, target = _apply(
            batch.segment_sequence, batch.segment_start, plan.cell, self.tail, self.position, self.base, self.depth,
            self.reference_count, self.free_count, self.planes,
        )  # fmt: skip
        return Copies(source, target)

    def reach(self, sequence: int) -> int:
        return int(self.depth[sequence])

    def rows_of(self, sequence: int, state_count: int = 1) -> np.ndarray:
        planes: np.ndarray = (int(self.base[sequence]) - np.arange(state_count)) % self.planes
        return planes * len(self.tail) + int(self.tail[sequence])

    def _go_back(self, sequence: int, token_count: int) -> None:
        self.base[sequence] = (self.base[sequence] - token_count) % self.planes
        self.depth[sequence] -= token_count

    def _begin(self, sequence: int, depth: int) -> None:
        self.base[sequence] = self.depth[sequence] = depth
