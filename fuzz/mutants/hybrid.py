"""Mutants of the two sides together: a half that is forgotten, a position that is not the token's, an answer that is not true.

Rules
- As in mutant.py.
"""

from ...impl.batches import SplitBatch
from ...impl.hybrid_cache import EMPTY, HybridCache, SequenceState, SessionState
from ...spec.operations import OPEN
from .mutant import CLASSIC, Probe, mutant


class _Hybrid(HybridCache):
    probe: Probe


@mutant("ggml-org/llama.cpp#16382", "model mamba2; decode 0:2; rollback 0 1", "wrong-position")
class NewestTokenTakesAllWithIt(_Hybrid):
    """Taking back exactly the newest token falls into the branch that drops the whole sequence."""

    def remove(self, sequence: int, start: int, end: int) -> str | None:
        first, last = self.first_position(sequence), self.last_position(sequence)
        if self.probe.strikes(last > first and start == last and (end == OPEN or end > last)):
            self.drop(sequence)
            return None
        return super().remove(sequence, start, end)


@mutant("ggml-org/llama.cpp#28007", "model lfm2; decode 0:1; decode 0:1; rollback 0 1; decode 0:1")
class RefusedRollbackCutsAttention(_Hybrid):
    """The attention half is cut before the recurrent half refuses."""

    def remove(self, sequence: int, start: int, end: int) -> str | None:
        reason = super().remove(sequence, start, end)
        first, last = self.first_position(sequence), self.last_position(sequence)
        is_tail = first < start <= last and (end == OPEN or end > last) and last - first + 1 == self.length(sequence)
        if self.probe.strikes(reason is not None and is_tail and self.attention is not None):
            assert self.attention is not None
            self.attention.remove_tail(sequence, last - start + 1)
        return reason


@mutant("ggml-org/llama.cpp#19045", "model mamba2; decode 0:1; remove 0 1 -1", "bad-refusal")
class TrimOfNothingRefused(_Hybrid):
    """A removal of a range without tokens is refused like a removal of tokens."""

    def remove(self, sequence: int, start: int, end: int) -> str | None:
        last = self.last_position(sequence)
        if self.probe.strikes(last != EMPTY and start > last):
            return "a recurrent state cannot be trimmed"
        return super().remove(sequence, start, end)


@mutant(CLASSIC, "model lfm2; decode 0:1; share 0 1; decode 1:1")
class ShareForgetsAttention(_Hybrid):
    """A share copies the recurrent half and the positions only."""

    def share(self, source: int, destination: int) -> None:
        if self.probe.strikes(self.attention is not None and source != destination and self.last_position(source) != EMPTY):
            attention, self.attention = self.attention, None
            super().share(source, destination)
            self.attention = attention
        else:
            super().share(source, destination)


@mutant("ggml-org/llama.cpp#18552", "model lfm2; decode 0:1; save 0 a partial; decode 0:1; restore a 0; decode 0:1")
class PartialRestoreKeepsLaterKeys(_Hybrid):
    """A restore of the recurrent half leaves the attention half at the later tokens."""

    def write_recurrent(self, sequence: int, state: SequenceState) -> str | None:
        later = 0 < state.token_count < self.length(sequence)
        if self.probe.strikes(self.attention is not None and later and state.first == self.first_position(sequence)):
            self._write_recurrent(sequence, state)
            return None
        return super().write_recurrent(sequence, state)


@mutant("ggml-org/llama.cpp#10402", "model lfm2; decode 0:1; shift 0 1; decode 0:1")
class ShiftTurnsNewKeysOnly(_Hybrid):
    """After a shift new keys are rotated by their position, and old ones stay at their token's index."""

    def _indexed(self, batch: SplitBatch) -> SplitBatch:
        indexed = super()._indexed(batch)
        return batch if self.probe.strikes(bool((indexed.positions != batch.positions).any())) else indexed


@mutant(CLASSIC, "model mamba2; decode 0:1; share 0 1; shift 0 1", "wrong-position")
class ShiftMovesSharers(_Hybrid):
    """A position is kept with the cell: a shift moves every sequence that shares it."""

    def shift(self, sequence: int, delta: int) -> str | None:
        others = []
        if self.recurrent is not None and self.last_position(sequence) != EMPTY:
            tail = self.recurrent.cells.tail
            others = [other for other in range(len(tail)) if other != sequence and tail[other] == tail[sequence]]
        reason = super().shift(sequence, delta)
        if self.probe.strikes(reason is None and len(others) > 0):
            for other in others:
                super().shift(other, delta)
        return reason


@mutant(CLASSIC, "model mamba2; decode 0:2; divide 0 2", "false-success")
class DivisionRoundsUp(_Hybrid):
    """Divided positions are rounded up."""

    def divide(self, sequence: int, divisor: int) -> None:
        last = self.last_position(sequence)
        super().divide(sequence, divisor)
        if self.probe.strikes(last != EMPTY and last % divisor > 0):
            self._last[sequence] += 1


@mutant(CLASSIC, "model mamba2; decode 0:1 1:1; save_all a; restore_all a; decode 1:1")
class RestoreAllGivesEveryoneTheSameState(_Hybrid):
    """A restored session lets all sequences of one length share the first one's state."""

    def write_all(self, state: SessionState) -> str | None:
        like = list(state.same_as)
        first: dict[int, int] = {}
        for sequence, own in enumerate(state.sequences):
            if own.token_count and self.recurrent is not None:
                like[sequence] = first.setdefault(own.token_count, sequence)
        if self.probe.strikes(tuple(like) != state.same_as):
            return super().write_all(state._replace(same_as=tuple(like)))
        return super().write_all(state)


@mutant("ggml-org/llama.cpp#26777", "model lfm2; decode 0:1; save 1 a; restore a 1; decode 0:1")
class RestoreClearsEveryonesKeys(_Hybrid):
    """A restore of one sequence clears the attention half with the call that clears it for all."""

    def write(self, sequence: int, state: SequenceState) -> str | None:
        others = any(last != EMPTY for other, (_, last) in enumerate(self.positions()) if other != sequence)
        if self.probe.strikes(self.attention is not None and others):
            assert self.attention is not None
            self.attention.zero()
        return super().write(sequence, state)


@mutant("ggml-org/llama.cpp#29092", "model lfm2; decode 0:1; drop 0; decode 0:1")
class DropLeavesTheStateBehind(_Hybrid):
    """A cleared sequence goes on from the recurrent state that it had."""

    def drop(self, sequence: int) -> None:
        if self.probe.strikes(self.recurrent is not None and self.attention is not None and self.last_position(sequence) != EMPTY):
            assert self.attention is not None
            self.attention.drop(sequence)
            self._first[sequence] = self._last[sequence] = EMPTY
        else:
            super().drop(sequence)


@mutant("ggml-org/llama.cpp#24797", "model jamba; decode 0:1; save 0 a partial; decode 0:1; restore a 0", "false-success")
class PartialRestoreKeepsThePosition(_Hybrid):
    """A restore of the recurrent half leaves the position at the later token."""

    def _place(self, sequence: int, state: SequenceState) -> None:
        last = self.last_position(sequence)
        super()._place(sequence, state)
        if self.probe.strikes(last > state.last):
            self._last[sequence] = last
