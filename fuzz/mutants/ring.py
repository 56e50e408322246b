"""Mutants of the ring: where its planes begin, how deep it is, and what a sequence takes along.

Rules
- As in mutant.py. Planes are always taken modulo their number, so that no row is outside the arrays.
"""

import numpy as np

from ...impl.batches import SplitBatch
from ...impl.cells import NO_COPIES, NONE, Copies, Plan
from ...impl.ring import RingCells
from .mutant import CLASSIC, Probe, mutant


class _Ring(RingCells):
    probe: Probe


@mutant(CLASSIC, "model mamba2; decode 0:2; rollback 0 1; decode 0:1", cache="ring")
class RingRollbackOnePlaneOff(_Ring):
    """A rollback moves the ring's index one plane too little."""

    def _go_back(self, sequence: int, token_count: int) -> None:
        super()._go_back(sequence, token_count)
        if self.probe.strikes(self.planes > 1):
            self.base[sequence] = (self.base[sequence] + 1) % self.planes


@mutant(CLASSIC, "model mamba2; decode 0:1; share 0 1; decode 1:1; rollback 1 1; decode 1:1", cache="ring")
class RingLeavesItsStatesBehind(_Ring):
    """A sequence that leaves a shared cell takes along none of the states that it can go back to."""

    def apply(self, batch: SplitBatch, plan: Plan) -> Copies:
        copies = super().apply(batch, plan)
        return NO_COPIES if self.probe.strikes(len(copies.source_row) > 0) else copies


@mutant(CLASSIC, "model mamba2; decode 0:2; share 0 1; decode 1:1; rollback 1 2; decode 1:1", cache="ring")
class RingLeavesItsOldestStateBehind(_Ring):
    """A sequence that leaves a shared cell takes along all states that it can go back to but the oldest."""

    def apply(self, batch: SplitBatch, plan: Plan) -> Copies:
        copies = super().apply(batch, plan)
        if self.probe.strikes(len(copies.source_row) > 1):
            return Copies(copies.source_row[:-1], copies.target_row[:-1])
        return copies


@mutant("ggml-org/llama.cpp#26695", "model mamba2; cache n_rs_seq=1; decode 0:3; rollback 0 2; decode 0:1", cache="ring")
class RingDeeperThanItsPlanes(_Ring):
    """Depth is counted by tokens alone, so that a rollback goes round the ring to a state that was overwritten."""

    def apply(self, batch: SplitBatch, plan: Plan) -> Copies:
        before = np.where(self.tail == NONE, -1, self.depth)
        copies = super().apply(batch, plan)
        tokens = np.zeros_like(before)
        np.add.at(tokens, batch.segment_sequence, np.diff(batch.segment_start))
        counted = np.minimum(before + tokens, self.position)
        for sequence in set(batch.segment_sequence.tolist()):
            if self.probe.strikes(counted[sequence] > self.depth[sequence]):
                self.depth[sequence] = counted[sequence]
        return copies

    def rows_of(self, sequence: int, state_count: int = 1) -> np.ndarray:
        return super().rows_of(sequence, min(state_count, self.planes))


@mutant("ggml-org/llama.cpp#26617", "model mamba2; cache n_rs_seq=1; decode 0:3; rollback 0 1; rollback 0 1; decode 0:1", cache="ring")
class RingRollbackKeepsDepth(_Ring):
    """A rollback does not use up depth: repeated, it goes on to states that were overwritten."""

    def _go_back(self, sequence: int, token_count: int) -> None:
        before = int(self.depth[sequence])
        super()._go_back(sequence, token_count)
        if self.probe.strikes(True):
            self.depth[sequence] = before


@mutant(CLASSIC, "model mamba2; decode 0:2; share 0 1; decode 1:1", cache="ring")
class RingShareForgetsIndex(_Ring):
    """A share copies the cell and the depth, but not the plane that the state is in."""

    def share(self, source: int, destination: int) -> None:
        super().share(source, destination)
        if self.probe.strikes(source != destination and self.base[destination] != 0):
            self.base[destination] = 0


@mutant(CLASSIC, "model mamba2; cache n_ubatch=2; decode 0:3", cache="ring")
class RingUbatchStartsFromTheFirst(_Ring):
    """Every ubatch of a batch reads the state from before the whole batch."""

    def plan(self, batch: SplitBatch) -> Plan:
        plan = super().plan(batch)
        source = plan.source_row.copy()
        for i in range(1, len(source)):
            if batch.segment_sequence[i] == batch.segment_sequence[i - 1]:
                source[i] = source[i - 1]
        return plan._replace(source_row=source) if self.probe.strikes(not np.array_equal(source, plan.source_row)) else plan


@mutant(
    "ggml-org/llama.cpp#25913",
    "model mamba2; decode 0:2; save 0 a; restore a 1; rollback 1 1; decode 1:1",
    cache="ring without snapshots",
)
class RingRestoreClaimsDepth(_Ring):
    """A restore claims as much depth as its log could have, although the blob carries no older states."""

    def _begin(self, sequence: int, depth: int) -> None:
        super()._begin(sequence, depth)
        claimed = min(self.planes - 1, int(self.position[sequence]))
        if self.probe.strikes(claimed > depth):
            self.depth[sequence] = claimed


@mutant(CLASSIC, "model mamba2; decode 0:4; drop 0; decode 0:1", cache="ring")
class RingNewOwnerNotZeroed(_Ring):
    """A new sequence reads its first state from a plane that nobody cleared."""

    def plan(self, batch: SplitBatch) -> Plan:
        plan = super().plan(batch)
        if self.probe.strikes(bool((plan.zero_row != NONE).any())):
            return plan._replace(zero_row=np.full_like(plan.zero_row, NONE))
        return plan
