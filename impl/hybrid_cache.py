"""Both sides of a model's memory behind one interface: recurrent states and attention cells.

Rules
- Either side may be absent: a pure recurrent model has no attention cache, an attention-only one no recurrent cache.
- Prepared on the recurrent side first; nothing is applied before both sides can hold the batch.
- A removal asks the side that may refuse first. A refusal changes neither side.
- A restore is checked on both sides before either is written.
- The last position of a sequence is the smaller of the two sides'; they never differ between operations.
Source: llama.cpp's llama-memory-hybrid.cpp, for the order of the sides.
"""

from typing import NamedTuple

import numpy as np

from ..spec.operations import OPEN
from .attention_cache import AttentionCache
from .batches import SplitBatch
from .cells import Plan
from .forwards import Sights
from .kernels.attention import NO_SIGHT
from .recurrent_cache import RecurrentCache


class SequenceState(NamedTuple):
    """The logical state of one sequence; parts of an absent side, or of an empty sequence, are None.

    position     of its last token, -1 when empty
    convolution  float32 [recurrent layers, width]
    recurrent    float32 [recurrent layers, width]
    keys, values float32 [attention layers, position + 1, key heads, head_dim]
    """

    position: int
    convolution: np.ndarray | None = None
    recurrent: np.ndarray | None = None
    keys: np.ndarray | None = None
    values: np.ndarray | None = None


class HybridCache:
    """A recurrent cache, an attention cache, or both."""

    def __init__(self, recurrent: RecurrentCache | None, attention: AttentionCache | None) -> None:
        self.recurrent = recurrent
        self.attention = attention

    def last_positions(self) -> np.ndarray:
        """The last position of every sequence, -1 when empty; int64 [sequences], not to be written."""
        if self.attention is None:
            assert self.recurrent is not None
            return self.recurrent.cells.position
        if self.recurrent is None:
            return self.attention.length - 1
        return np.minimum(self.recurrent.cells.position, self.attention.length - 1)

    def last_position(self, sequence: int) -> int:
        """The last position of one sequence."""
        if self.attention is None:
            assert self.recurrent is not None
            return int(self.recurrent.cells.position[sequence])
        last = int(self.attention.length[sequence]) - 1
        return last if self.recurrent is None else min(last, int(self.recurrent.cells.position[sequence]))

    def prepare(self, batch: SplitBatch) -> Plan | str | None:
        """The recurrent side's plan (None without one) when both sides can hold `batch`, else the reason. Changes nothing."""
        plan = None if self.recurrent is None else self.recurrent.cells.plan(batch)
        reason = None if self.attention is None else self.attention.prepare(batch)
        return plan if reason is None else reason

    def apply(self, batch: SplitBatch, plan: Plan | None) -> None:
        """Make a prepared batch true on both sides."""
        if self.recurrent is not None and plan is not None:
            self.recurrent.cells.apply(batch, plan)
        if self.attention is not None:
            self.attention.apply(batch)

    def sights(self, batch: SplitBatch) -> Sights:
        """What the tokens of an applied batch write and see on the attention side."""
        return (NO_SIGHT, NO_SIGHT) if self.attention is None else self.attention.sights(batch)

    def remove(self, sequence: int, start: int, end: int) -> str | None:
        """Forget positions start..end-1 (end -1: open; start -1: from the first); the reason when it is refused."""
        last = self.last_position(sequence)
        start = max(start, 0)
        if end == OPEN or end > last:
            end = last + 1
        if start >= end:
            return None
        if end <= last:
            return f"positions {start} to {end - 1} cannot be forgotten while position {last} stays"
        if start == 0:
            self.drop(sequence)
            return None
        token_count = end - start
        if self.recurrent is not None:
            reason = self.recurrent.cells.rollback(sequence, token_count)
            if reason is not None:
                return reason
        if self.attention is not None:
            self.attention.remove_tail(sequence, token_count)
        return None

    def drop(self, sequence: int) -> None:
        """Empty one sequence."""
        if self.recurrent is not None:
            self.recurrent.cells.drop(sequence)
        if self.attention is not None:
            self.attention.drop(sequence)

    def share(self, source: int, destination: int) -> None:
        """Make `destination` hold what `source` holds; what it held is dropped. Onto itself it does nothing."""
        if self.recurrent is not None:
            self.recurrent.cells.share(source, destination)
        if self.attention is not None:
            self.attention.share(source, destination)

    def zero(self) -> None:
        """Overwrite all memory with zero; only when every sequence is empty."""
        if self.recurrent is not None:
            self.recurrent.zero()
        if self.attention is not None:
            self.attention.zero()

    def read(self, sequence: int) -> SequenceState:
        """The logical state of `sequence`, as if a pending rollback had been carried out."""
        position = self.last_position(sequence)
        if position < 0:
            return SequenceState(position)
        convolution, recurrent = (None, None) if self.recurrent is None else self.recurrent.read(sequence)
        keys, values = (None, None) if self.attention is None else self.attention.read(sequence)
        return SequenceState(position, convolution, recurrent, keys, values)

    def write(self, sequence: int, state: SequenceState) -> str | None:
        """Make `state` what `sequence` holds; the reason, with nothing changed, when there is no room."""
        if self.attention is not None:
            reason = self.attention.refuses(sequence, state.position + 1)
            if reason is not None:
                return reason
        self.drop(sequence)
        if state.position < 0:
            return None
        if self.recurrent is not None:
            assert state.convolution is not None
            assert state.recurrent is not None
            self.recurrent.write(sequence, state.position, state.convolution, state.recurrent)
        if self.attention is not None:
            assert state.keys is not None
            assert state.values is not None
            self.attention.write(sequence, state.keys, state.values)
        return None
