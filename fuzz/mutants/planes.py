"""Mutants of the cells with planes: which state a sequence reads, where it writes, and how far back it can go.

Rules
- As in mutant.py. Every row number that a mutant gives is one that the sound plan could have given for some sequence.
Source: the reports that are named at each.
"""

import numpy as np

from ...impl.batches import SplitBatch
from ...impl.cells import NONE, Copies, Plan, StrictCells
from .mutant import CLASSIC, Probe, mutant


class _Planes(StrictCells):
    probe: Probe


def _continues(batch: SplitBatch) -> np.ndarray:
    """Of every segment whether the one before it is of the same sequence; bool [segments]."""
    sequence = batch.segment_sequence
    return np.concatenate([[False], sequence[1:] == sequence[:-1]])


@mutant("ggml-org/llama.cpp#26695", "model mamba2; decode 0:1; decode 0:1; rollback 0 1; decode 0:1")
class RollbackBeyondWhatWasWritten(_Planes):
    """A rollback is accepted within the budget, although the last batch never wrote the plane."""

    def reach(self, sequence: int) -> int:
        written = super().reach(sequence)
        claimed = min(self.planes - 1, int(self.position[sequence])) - int(self.pending[sequence])
        return claimed if self.probe.strikes(claimed > written) else written


@mutant("ggml-org/llama.cpp#29117", "model mamba2; decode 0:2; decode 0:1; rollback 0 1; decode 0:1")
class DeeperPlanesKeptByShorterBatch(_Planes):
    """A batch that rewrites only the first planes leaves the deeper ones of an older batch readable."""

    def apply(self, batch: SplitBatch, plan: Plan) -> Copies:
        before, tails = self.valid_planes.copy(), self.tail.copy()
        copies = super().apply(batch, plan)
        for sequence in set(batch.segment_sequence.tolist()):
            cell = self.tail[sequence]
            if self.probe.strikes(cell == tails[sequence] and before[cell] > self.valid_planes[cell]):
                self.valid_planes[cell] = before[cell]
        return copies


@mutant("ggml-org/llama.cpp#26617", "model mamba2; decode 0:2; rollback 0 1; decode 0:1; decode 0:1")
class RollbackAppliedTwice(_Planes):
    """The read index of a rollback outlives the decode that used it."""

    def apply(self, batch: SplitBatch, plan: Plan) -> Copies:
        pending = self.pending.copy()
        copies = super().apply(batch, plan)
        for sequence in set(batch.segment_sequence.tolist()):
            if self.probe.strikes(pending[sequence] > 0):
                self.pending[sequence] = pending[sequence]
        return copies


@mutant(CLASSIC, "model mamba2; decode 0:2; rollback 0 1; share 0 1; decode 1:1")
class PendingRollbackLostOnShare(_Planes):
    """A share copies the cell, but not the rollback that is pending on it."""

    def share(self, source: int, destination: int) -> None:
        super().share(source, destination)
        if self.probe.strikes(source != destination and self.pending[destination] > 0):
            self.pending[destination] = 0


@mutant(CLASSIC, "model mamba2; decode 0:2; share 0 1; rollback 0 1; decode 1:1")
class RollbackBindsSharers(_Planes):
    """The pending rollback is kept with the cell: who shares it is taken back, too."""

    def _go_back(self, sequence: int, token_count: int) -> None:
        super()._go_back(sequence, token_count)
        sharers = (self.tail == self.tail[sequence]) & (np.arange(len(self.tail)) != sequence)
        if self.probe.strikes(bool(sharers.any())):
            self.pending[sharers] = self.pending[sequence]


@mutant("ggml-org/llama.cpp#13834", "model mamba2; decode 0:1; share 0 1; decode 0:1; decode 1:1")
class SharedCellWrittenInPlace(_Planes):
    """A sequence that goes on writes in the cell that another one still reads."""

    def plan(self, batch: SplitBatch) -> Plan:
        plan = super().plan(batch)
        old = self.tail[batch.segment_sequence]
        leaves = (old != NONE) & (plan.cell != old)
        if self.probe.strikes(bool(leaves.any())):
            moved = np.where(leaves, old - plan.cell, 0)
            source = plan.source_row + np.where(_continues(batch), moved, 0)
            planes = np.where(plan.plane_row == NONE, NONE, plan.plane_row + moved[:, None])
            return Plan(plan.cell + moved, source, planes, plan.zero_row)
        return plan


@mutant("EricLBuehler/mistral.rs#2306", "model mamba2; decode 0:1; share 0 1; drop 0; decode 2:1; decode 1:1")
class SharedCellFreedWithItsFirstOwner(_Planes):
    """Dropping one of a cell's owners puts the cell on the free list, which hands it out a second time."""

    def drop(self, sequence: int) -> None:
        cell = int(self.tail[sequence])
        if self.probe.is_faulty:
            self.free_count = min(self.free_count, len(self.free_cells) - 1)  # nor have more of them than there are
        super().drop(sequence)
        listed = self.free_cells[: self.free_count]
        if self.probe.strikes(cell != NONE and cell not in listed and self.free_count < len(self.free_cells)):
            self.free_cells[self.free_count] = cell
            self.free_count += 1

    def plan(self, batch: SplitBatch) -> Plan:
        self._refill(len(set(batch.segment_sequence.tolist())))
        return super().plan(batch)

    def place(self, sequence: int, position: int, depth: int = 0) -> np.ndarray:
        self._refill(1)
        return super().place(sequence, position, depth)

    def _refill(self, cell_count: int) -> None:
        """Cells are counted wrongly by now: never run out of them, which would be a crash and not a wrong answer."""
        if self.probe.is_faulty and self.free_count < cell_count:
            self.free_cells[:] = np.arange(len(self.free_cells))
            self.free_count = len(self.free_cells)


@mutant("sgl-project/sglang#24717", "model mamba; decode 0:1; drop 0; decode 0:1")
class NewOwnerNotZeroed(_Planes):
    """A new sequence starts from what its cell's last owner left there."""

    def plan(self, batch: SplitBatch) -> Plan:
        plan = super().plan(batch)
        if self.probe.strikes(bool((plan.zero_row != NONE).any())):
            return plan._replace(zero_row=np.full_like(plan.zero_row, NONE))
        return plan


@mutant("huggingface/transformers#45513", "model mamba2; cache n_ubatch=4; decode 0:5")
class ZeroedAgainInEveryUbatch(_Planes):
    """The second ubatch of a batch starts from an empty state."""

    def plan(self, batch: SplitBatch) -> Plan:
        plan = super().plan(batch)
        continues = _continues(batch)
        if self.probe.strikes(bool(continues.any())):
            return plan._replace(zero_row=np.where(continues, plan.source_row, plan.zero_row))
        return plan


@mutant("huggingface/transformers#45513", "model jamba; decode 0:1; decode 0:2")
class SeveralTokensForgetThePast(_Planes):
    """More than one token on top of a state takes the path of a first prompt, which starts from zero."""

    def plan(self, batch: SplitBatch) -> Plan:
        plan = super().plan(batch)
        several = np.diff(batch.segment_start) > 1
        own = (plan.source_row % len(self.tail) == plan.cell) & (plan.zero_row == NONE)
        if self.probe.strikes(bool((several & own).any())):
            return plan._replace(zero_row=np.where(several & own, plan.source_row, plan.zero_row))
        return plan


@mutant(CLASSIC, "model mamba2; decode 0:3; rollback 0 1; decode 0:1")
class SnapshotsNumberedBackwards(_Planes):
    """Snapshots are written oldest first, and read newest first."""

    def plan(self, batch: SplitBatch) -> Plan:
        plan = super().plan(batch)
        tokens = np.diff(batch.segment_start)
        if self.probe.strikes(bool((np.minimum(tokens, self.planes) > 2).any())):
            planes = plan.plane_row.copy()
            for row in planes:
                written = int(np.count_nonzero(row != NONE))
                row[1:written] = row[1:written][::-1].copy()
            return plan._replace(plane_row=planes)
        return plan


@mutant("vllm-project/vllm#39273", "model qwen35; decode 0:2; rollback 0 1; decode 0:1")
class PendingRollbackIgnored(_Planes):
    """The decode after a rollback reads the newest state, as if nothing had been taken back."""

    def plan(self, batch: SplitBatch) -> Plan:
        plan = super().plan(batch)
        pending = (self.pending[batch.segment_sequence] > 0) & ~_continues(batch)
        if self.probe.strikes(bool(pending.any())):
            newest = self.tail[batch.segment_sequence]
            return plan._replace(source_row=np.where(pending, newest, plan.source_row))
        return plan


@mutant("vllm-project/vllm#55504", "model mamba2; decode 0:2; rollback 0 1; decode 0:1 1:1")
class PendingRollbackIgnoredAmongOthers(_Planes):
    """In a batch of several sequences the read index of the first one is used for all: rollbacks of the others count for nothing."""

    def plan(self, batch: SplitBatch) -> Plan:
        plan = super().plan(batch)
        pending = (self.pending[batch.segment_sequence] > 0) & ~_continues(batch)
        several = len(set(batch.segment_sequence.tolist())) > 1
        if self.probe.strikes(several and bool(pending.any())):
            newest = self.tail[batch.segment_sequence]
            return plan._replace(source_row=np.where(pending, newest, plan.source_row))
        return plan


@mutant("ggml-org/llama.cpp#23269", "model mamba2; decode 0:2 1:2; rollback 0 1; decode 0:1")
class SnapshotsOfNeighboursExchanged(_Planes):
    """With several sequences in a batch their snapshots do not line up with them."""

    def plan(self, batch: SplitBatch) -> Plan:
        plan = super().plan(batch)
        deep = np.flatnonzero((np.diff(batch.segment_start) > 1) & (plan.plane_row.shape[1] > 1))
        if self.probe.strikes(len(deep) > 1):
            planes = plan.plane_row.copy()
            planes[deep, 1] = np.roll(plan.plane_row[deep, 1], 1)
            return plan._replace(plane_row=planes)
        return plan


@mutant("ggml-org/llama.cpp#25278", "model mamba2; cache n_ubatch=4; decode 0:5; rollback 0 1; decode 0:1")
class TailCutByUbatch(_Planes):
    """The newest tokens of a sequence are cut by the end of a ubatch, and only those of the last one have snapshots."""

    @property
    def tail_size(self) -> int:
        return 1 if self.probe.is_faulty else super().tail_size

    def plan(self, batch: SplitBatch) -> Plan:
        continues = _continues(batch)
        self.probe.strikes(bool((continues & (np.diff(batch.segment_start) < self.planes)).any()))
        return super().plan(batch)


@mutant("ggml-org/llama.cpp#29117", "model mamba2; decode 0:2 1:2; save 0 a; restore a 1; rollback 1 1; decode 1:1")
class RestoredCellKeepsOldPlanes(_Planes):
    """After a restore the planes that the cell's last owner wrote can be gone back to."""

    def _begin(self, sequence: int, depth: int) -> None:
        kept = int(self.valid_planes[self.tail[sequence]])
        super()._begin(sequence, max(depth, kept) if self.probe.strikes(kept > depth) else depth)


@mutant("ml-explore/mlx-lm#1253", "model lfm2; decode 0:1; decode 0:1; rollback 0 1; decode 0:1")
class RollbackResetsTheState(_Planes):
    """A rollback that the snapshots do not reach resets the recurrent half to zero, while attention keeps the prefix."""

    def rollback(self, sequence: int, token_count: int) -> str | None:
        reason = super().rollback(sequence, token_count)
        if self.probe.strikes(reason is not None):
            position = self.position[sequence]
            self.drop(sequence)
            self.position[sequence] = position - token_count
            return None
        return reason


@mutant(CLASSIC, "model rwkv7; decode 0:2; rollback 0 1; decode 0:1")
class RollbackOnePlaneShort(_Planes):
    """A rollback of n tokens reads the plane of n - 1."""

    def _go_back(self, sequence: int, token_count: int) -> None:
        super()._go_back(sequence, token_count - self.probe.strikes(True))
