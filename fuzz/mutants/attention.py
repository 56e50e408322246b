"""Mutants of the attention side: which keys and values a token sees, who may free a cell, and what a copy forgets.

Rules
- As in mutant.py. A cell may be freed too early, but the free list never holds more than there are.
"""

import numpy as np

from ...impl.attention_cache import AttentionCache
from ...impl.batches import SplitBatch
from ...impl.forwards import Sights
from .mutant import CLASSIC, Probe, mutant


class _Attention(AttentionCache):
    probe: Probe


@mutant("llama.cpp (unsloth fork)#111", "model lfm2_swa; decode 0:1; share 0 1; decode 1:1")
class ShareForgetsWindowedLayers(_Attention):
    """A share between streams copies the layers that see everything, and not those with a window."""

    def _copy(self, source: int, target: int, count: int) -> None:
        kept = self.keys[1][:, target : target + count].copy(), self.values[1][:, target : target + count].copy()
        super()._copy(source, target, count)
        if self.probe.strikes(len(self.keys[1]) > 0):
            self.keys[1][:, target : target + count], self.values[1][:, target : target + count] = kept


@mutant("sgl-project/sglang#39156", "model qwen4exp; decode 0:4; share 0 1; decode 1:1")
class ShareForgetsIndexRows(_Attention):
    """A share copies keys and values, and not what the indexer keeps of a token."""

    def _copy(self, source: int, target: int, count: int) -> None:
        kept = self.index_rows[:, target : target + count].copy()
        super()._copy(source, target, count)
        if self.probe.strikes(kept.size > 0):
            self.index_rows[:, target : target + count] = kept


@mutant(CLASSIC, "model lfm2; decode 0:1; share 0 1; decode 1:1")
class ShareLeavesOutTheNewestToken(_Attention):
    """A share copies every cell but the newest."""

    def _copy(self, source: int, target: int, count: int) -> None:
        super()._copy(source, target, count - self.probe.strikes(count > 0))


@mutant(CLASSIC, "model lfm2; decode 0+1:1; decode 1:1")
class CoupledTokenReachesOneSequence(_Attention):
    """The keys of a token that belongs to several sequences are written for the first of them only."""

    def follow(self, leader: int, follower: int, token_count: int) -> None:
        start = int(self.length[follower])
        super().follow(leader, follower, token_count)
        if self.probe.strikes(not self.unified):
            cells = self.cell_of[follower, start : start + token_count]
            for rows in (*self.keys, *self.values):
                rows[:, cells] = 0


@mutant("sgl-project/sglang#27038", "model lfm2; cache unified=1; decode 0:1; share 0 1; drop 0; decode 1:1")
class SharedCellsNotCounted(_Attention):
    """A share lists cells without counting itself as their owner: they are free as soon as the other sequence is dropped."""

    def share(self, source: int, destination: int) -> None:
        super().share(source, destination)
        if self.probe.strikes(self.unified and source != destination and self.length[destination] > 0):
            self.reference_count[self.cells(destination)] -= 1


@mutant("ggml-org/llama.cpp#28007", "model lfm2; decode 0:2; rollback 0 1; decode 0:1")
class RollbackLeavesKeysBehind(_Attention):
    """A rollback takes back the recurrent half, and attention goes on seeing the tokens that are gone."""

    def remove_tail(self, sequence: int, token_count: int) -> None:
        if not self.probe.strikes(0 < token_count < self.length[sequence]):
            super().remove_tail(sequence, token_count)


@mutant(CLASSIC, "model lfm2_swa; decode 0:8")
class WindowOneShort(_Attention):
    """A window of n tokens shows the n - 1 newest."""

    def sights(self, batch: SplitBatch) -> Sights:
        full, windowed = super().sights(batch)
        short = windowed.length == self.window
        if self.probe.strikes(self.window > 0 and bool(short.any())):
            windowed = windowed._replace(first=windowed.first + short, length=windowed.length - short)
        return full, windowed


@mutant(CLASSIC, "model lfm2_swa; decode 0:9")
class WindowOneLong(_Attention):
    """A window of n tokens shows the n + 1 newest."""

    def sights(self, batch: SplitBatch) -> Sights:
        full, windowed = super().sights(batch)
        # there is one more to see where the window does not begin at its sequence's first token
        longer = (windowed.length == self.window) & (windowed.first % self.cell_of.shape[1] > 0)
        if self.probe.strikes(self.window > 0 and bool(longer.any())):
            windowed = windowed._replace(first=windowed.first - longer, length=windowed.length + longer)
        return full, windowed


@mutant(CLASSIC, "model lfm2; cache n_seq_max=1 n_ctx=16 unified=1; decode 0:16", "bad-refusal")
class PoolRefusesItsLastCell(_Attention):
    """The last free cell of the unified pool is held back, and a batch that would just fit is refused."""

    def prepare(self, batch: SplitBatch) -> str | None:
        reason = super().prepare(batch)
        if self.probe.strikes(self.unified and reason is None and len(batch.tokens) == self.free_count):
            return "no cell is left"
        return reason


@mutant("vmlx-swift#210", "model falcon_h1; decode 0:1; save 0 a; restore a 1; decode 1:1")
class RestoredToTheWrongLayer(_Attention):
    """A restore hands keys and values to each layer from its neighbour."""

    def write(self, sequence: int, keys: np.ndarray, values: np.ndarray, index: np.ndarray) -> None:
        if self.probe.strikes(len(keys) > 1):
            keys, values = np.roll(keys, 1, axis=0), np.roll(values, 1, axis=0)
        super().write(sequence, keys, values, index)


@mutant("sgl-project/sglang#39156", "model qwen4exp; decode 0:4; save 0 a; restore a 1; decode 1:1")
class SaveForgetsIndexRows(_Attention):
    """A saved state holds keys and values, and zeros for what the indexer keeps of a token."""

    def read(self, sequence: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        keys, values, index = super().read(sequence)
        return keys, values, np.zeros_like(index) if self.probe.strikes(index.size > 0) else index


@mutant(CLASSIC, "model jamba; decode 0:2; save 0 a; restore a 1; decode 1:1")
class RestoredValuesBesideOtherKeys(_Attention):
    """A restore places values one cell further than their keys."""

    def write(self, sequence: int, keys: np.ndarray, values: np.ndarray, index: np.ndarray) -> None:
        if self.probe.strikes(values.shape[1] > 1):
            values = np.roll(values, 1, axis=1)
        super().write(sequence, keys, values, index)
