"""Both sides of a model's memory behind one interface: recurrent states and attention cells.

Rules
- Either side may be absent: a pure recurrent model has no attention cache, an attention-only one no recurrent cache.
- Prepared on the recurrent side first; nothing is applied before both sides can hold the batch.
- A removal asks the side that may refuse first. A refusal changes neither side.
- A restore is checked on both sides before either is written.
- Both sides count tokens of the log, from 0. What is reported outside are positions, metadata of the sequence: a shift or a division
  changes them and nothing else, and disturbs no sharer. Keys stay rotated by the token's index, since rotary positions are relative.
Source: llama.cpp's llama-memory-hybrid.cpp, for the order of the sides.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..spec.operations import OPEN
from .attention_cache import AttentionCache
from .batches import SplitBatch
from .cells import Plan
from .forwards import Sights
from .kernels import kernel
from .kernels.attention import NO_SIGHT
from .recurrent_cache import RecurrentCache, States

POSITION_MAX = (1 << 31) - 2
"""So that the position after it is still an int32."""

EMPTY = -1
"""Position of an empty sequence."""


class SequenceState(NamedTuple):
    """What one sequence holds; parts of an absent side, or of an empty sequence, are None.

    token_count   tokens of its log
    first, last   positions, -1 when empty
    states        the newest states, the present one first
    keys, values  float32 [attention layers, tokens, key heads, head_dim]
    index_rows    float32 [attention layers, tokens, index width]
    """

    token_count: int = 0
    first: int = EMPTY
    last: int = EMPTY
    states: States | None = None
    keys: np.ndarray | None = None
    values: np.ndarray | None = None
    index_rows: np.ndarray | None = None


class SessionState(NamedTuple):
    """What all sequences hold; what several of them share is there once.

    sequences     of every sequence, without keys, values and index rows; states are those of the sequence in which they are
    same_as       for every sequence, the first one whose states it has (itself, mostly)
    cells         for every sequence, int64 [tokens], the cells of its tokens, as indices into keys, values and index rows
    keys, values  float32 [attention layers, cells, key heads, head_dim], or None
    index_rows    float32 [attention layers, cells, index width], or None
    """

    sequences: tuple[SequenceState, ...]
    same_as: tuple[int, ...]
    cells: tuple[np.ndarray, ...]
    keys: np.ndarray | None = None
    values: np.ndarray | None = None
    index_rows: np.ndarray | None = None


@kernel
def _advance(segment_sequence: np.ndarray, segment_start: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
    for i in range(segment_sequence.size):
        sequence = segment_sequence[i]
        last[sequence] += segment_start[i + 1] - segment_start[i]
        first[sequence] = max(first[sequence], 0)


class HybridCache:
    """A recurrent cache, an attention cache, or both."""

    def __init__(self, recurrent: RecurrentCache | None, attention: AttentionCache | None) -> None:
        assert recurrent is not None or attention is not None
        self.recurrent = recurrent
        self.attention = attention
        n_seq_max = len(attention.length if recurrent is None else recurrent.cells.position)  # type: ignore[union-attr]
        self._first = np.full(n_seq_max, EMPTY, np.int64)
        self._last = np.full(n_seq_max, EMPTY, np.int64)
        self._moved = False  # whether positions may differ from indices

    def last_positions(self) -> np.ndarray:
        """The last position of every sequence, -1 when empty; int64 [sequences], not to be written."""
        return self._last

    def last_position(self, sequence: int) -> int:
        """The last position of one sequence, -1 when empty."""
        return int(self._last[sequence])

    def first_position(self, sequence: int) -> int:
        """The first position of one sequence, -1 when empty."""
        return int(self._first[sequence])

    def length(self, sequence: int) -> int:
        """Tokens in the log of `sequence`."""
        if self.attention is not None:
            return int(self.attention.length[sequence])
        assert self.recurrent is not None
        return int(self.recurrent.cells.position[sequence]) + 1

    def reach(self, sequence: int) -> int:
        """How many tokens of `sequence` can be taken back, one at least being left."""
        return max(0, self.length(sequence) - 1) if self.recurrent is None else self.recurrent.cells.reach(sequence)

    # --- decoding --------------------------------------------------------------------------------------------------------

    def prepare(self, batch: SplitBatch) -> Plan | str | None:
        """The recurrent side's plan (None without one) when both sides can hold `batch`, else the reason. Changes nothing."""
        plan = None if self.recurrent is None else self.recurrent.cells.plan(batch)
        reason = None if self.attention is None else self.attention.prepare(batch)
        return plan if reason is None else reason

    def apply(self, batch: SplitBatch, plan: Plan | None) -> SplitBatch:
        """Make a prepared batch true on both sides; returns it with its tokens' indices for their positions, which is what a forward wants."""
        if self.recurrent is not None and plan is not None:
            self.recurrent.apply(batch, plan)
        if self.attention is not None:
            self.attention.apply(batch)
        _advance(batch.segment_sequence, batch.segment_start, self._first, self._last)
        return self._indexed(batch) if self._moved else batch

    def _indexed(self, batch: SplitBatch) -> SplitBatch:
        offsets = [int(self._last[sequence]) - self.length(sequence) + 1 for sequence in batch.segment_sequence.tolist()]
        return batch._replace(positions=batch.positions - np.repeat(offsets, np.diff(batch.segment_start)))

    def sights(self, batch: SplitBatch) -> Sights:
        """What the tokens of an applied batch write and see on the attention side."""
        return (NO_SIGHT, NO_SIGHT) if self.attention is None else self.attention.sights(batch)

    def refuses(self, added: dict[int, int], cell_count: int) -> str | None:
        """The reason why sequences cannot be given so many tokens (`cell_count` different ones altogether), or None."""
        return None if self.attention is None else self.attention.refuses_tokens(added, cell_count)

    def detach(self, sequence: int) -> None:
        """Let go of the states of a sequence, which is to be given equal ones by `follow`."""
        if self.recurrent is not None:
            self.recurrent.cells.drop(sequence)

    def follow(self, leader: int, follower: int, token_count: int) -> None:
        """Give a detached sequence the newest `token_count` tokens of another one, and with them its states; before, their logs were equal."""
        if self.recurrent is not None:
            self.recurrent.cells.share(leader, follower)
        if self.attention is not None:
            self.attention.follow(leader, follower, token_count)
        self._first[follower], self._last[follower] = self._first[leader], self._last[leader]

    # --- forgetting, sharing, moving -------------------------------------------------------------------------------------

    def remove(self, sequence: int, start: int, end: int) -> str | None:
        """Forget positions start..end-1 (end -1: open; start -1: from the first); the reason when it is refused."""
        first, last = int(self._first[sequence]), int(self._last[sequence])
        lowest = max(start, first)
        highest = last if end == OPEN else min(end - 1, last)
        if last == EMPTY or lowest > highest:
            return None
        if highest < last:
            return f"positions {lowest} to {highest} cannot be forgotten while position {last} stays"
        if lowest == first:
            self.drop(sequence)
            return None
        if last - first + 1 != self.length(sequence):
            return f"the positions of sequence {sequence} were divided; only all of them can be forgotten"
        token_count = last - lowest + 1
        if self.recurrent is not None:
            reason = self.recurrent.cells.rollback(sequence, token_count)
            if reason is not None:
                return reason
        if self.attention is not None:
            self.attention.remove_tail(sequence, token_count)
        self._last[sequence] -= token_count
        return None

    def drop(self, sequence: int) -> None:
        """Empty one sequence."""
        if self.recurrent is not None:
            self.recurrent.cells.drop(sequence)
        if self.attention is not None:
            self.attention.drop(sequence)
        self._first[sequence] = self._last[sequence] = EMPTY

    def share(self, source: int, destination: int) -> None:
        """Make `destination` hold what `source` holds; what it held is dropped. Onto itself it does nothing."""
        if self.recurrent is not None:
            self.recurrent.cells.share(source, destination)
        if self.attention is not None:
            self.attention.share(source, destination)
        self._first[destination], self._last[destination] = self._first[source], self._last[source]

    def shift(self, sequence: int, delta: int) -> str | None:
        """Move every position of `sequence`; the reason when it is refused."""
        if self._last[sequence] == EMPTY:
            return None
        first, last = int(self._first[sequence]), int(self._last[sequence])
        if first + delta < 0:
            return f"the first position of sequence {sequence} is {first}; it would become negative"
        if last + delta > POSITION_MAX:
            return f"the last position of sequence {sequence} is {last}; it would become larger than {POSITION_MAX}"
        self._moved = True
        self._first[sequence] += delta
        self._last[sequence] += delta
        return None

    def divide(self, sequence: int, divisor: int) -> None:
        """Divide every position of `sequence`, rounding down."""
        if self._last[sequence] != EMPTY:
            self._moved = True
            self._first[sequence] = int(self._first[sequence]) // divisor
            self._last[sequence] = int(self._last[sequence]) // divisor

    def zero(self) -> None:
        """Overwrite all memory with zero; only when every sequence is empty."""
        if self.recurrent is not None:
            self.recurrent.zero()
        if self.attention is not None:
            self.attention.zero()

    # --- reading and writing whole states --------------------------------------------------------------------------------

    def read(self, sequence: int, snapshots: bool = False) -> SequenceState:
        """What `sequence` holds, as if a pending rollback had been carried out; with `snapshots` also the states that it can go back to."""
        state = self.read_recurrent(sequence, snapshots)
        if self.attention is None or not state.token_count:
            return state
        keys, values, index = self.attention.read(sequence)
        return state._replace(keys=keys, values=values, index_rows=index)

    def read_recurrent(self, sequence: int, snapshots: bool = False) -> SequenceState:
        """The same without the attention side."""
        if self._last[sequence] == EMPTY:
            return SequenceState()
        states = None
        if self.recurrent is not None:
            states = self.recurrent.read(sequence, 1 + (self.recurrent.cells.reach(sequence) if snapshots else 0))
        return SequenceState(self.length(sequence), int(self._first[sequence]), int(self._last[sequence]), states)

    def write(self, sequence: int, state: SequenceState) -> str | None:
        """Make `state` what `sequence` holds; the reason, with nothing changed, when there is no room."""
        if self.attention is not None:
            reason = self.attention.refuses(sequence, state.token_count)
            if reason is not None:
                return reason
        self.drop(sequence)
        if not state.token_count:
            return None
        self._write_recurrent(sequence, state)
        if self.attention is not None:
            assert state.keys is not None
            assert state.values is not None
            assert state.index_rows is not None
            self.attention.write(sequence, state.keys, state.values, state.index_rows)
        return None

    def write_recurrent(self, sequence: int, state: SequenceState) -> str | None:
        """Go back to the end of a log that `sequence` still holds the attention side of: its states are placed, what came later is forgotten.
        The reason, with nothing changed, when it holds fewer tokens or other positions."""
        length = self.length(sequence)
        if state.token_count > length:
            return f"the saved state is of {state.token_count} tokens; sequence {sequence} holds only {length}"
        if state.token_count and state.first != self._first[sequence]:
            return f"the saved state begins at position {state.first}, sequence {sequence} at {self._first[sequence]}"
        if not state.token_count:
            self.drop(sequence)
            return None
        if self.attention is not None:
            self.attention.remove_tail(sequence, length - state.token_count)
        self._write_recurrent(sequence, state)
        return None

    def _write_recurrent(self, sequence: int, state: SequenceState) -> None:
        if self.recurrent is not None:
            assert state.states is not None
            self.recurrent.write(sequence, state.token_count - 1, state.states)
        self._place(sequence, state)

    def _place(self, sequence: int, state: SequenceState) -> None:
        self._first[sequence], self._last[sequence] = state.first, state.last
        self._moved = self._moved or state.last != state.token_count - 1

    def read_all(self, snapshots: bool = False) -> SessionState:
        """What all sequences hold. Sequences have the same states when they are at the same row and can go equally far back."""
        every = range(len(self._last))
        found: dict[tuple[int, int], int] = {}
        same_as = []
        sequences = []
        for sequence in every:
            like = sequence
            if self.recurrent is not None and self._last[sequence] != EMPTY:
                cells = self.recurrent.cells
                like = found.setdefault((int(cells.rows_of(sequence)[0]), cells.reach(sequence) if snapshots else 0), sequence)
            same_as.append(like)
            state = self.read_recurrent(sequence, snapshots)
            sequences.append(state if like == sequence else state._replace(states=None))
        if self.attention is None:
            return SessionState(tuple(sequences), tuple(same_as), ())
        return SessionState(tuple(sequences), tuple(same_as), *self.attention.read_all())

    def write_all(self, state: SessionState) -> str | None:
        """Make `state` what all sequences hold; the reason, with nothing changed, when there is no room."""
        if self.attention is not None:
            reason = self.attention.refuses_all(state.cells)
            if reason is not None:
                return reason
        self.drop_all(range(len(self._last)))
        for sequence, (own, like) in enumerate(zip(state.sequences, state.same_as, strict=True)):
            if own.token_count and like == sequence:
                self._write_recurrent(sequence, own)
            elif own.token_count:
                assert self.recurrent is not None
                self.recurrent.cells.share(like, sequence)
                self._place(sequence, own)
        if self.attention is not None:
            assert state.keys is not None
            assert state.values is not None
            assert state.index_rows is not None
            self.attention.write_all(state.cells, state.keys, state.values, state.index_rows)
        return None

    def drop_all(self, sequences: Iterable[int]) -> None:
        """Empty several sequences."""
        for sequence in sequences:
            self.drop(sequence)

    def positions(self) -> Sequence[tuple[int, int]]:
        """First and last position of every sequence, (-1, -1) when empty."""
        return list(zip(self._first.tolist(), self._last.tolist(), strict=True))
