"""Mutants of saving and restoring: a part that is left out, a rollback that is not carried out, an answer that is not true.

Rules
- As in mutant.py.
"""

import numpy as np

from ...impl.recurrent_cache import RecurrentCache, States
from ...impl.session import NumbaSession
from ...spec.verdicts import ACCEPTED, Outcome, refused
from .mutant import CLASSIC, Probe, mutant


class _Rows(RecurrentCache):
    probe: Probe


class _Session(NumbaSession):
    probe: Probe


@mutant(CLASSIC, "model mamba2; decode 0:2; rollback 0 1; save 0 a; restore a 1; decode 1:1")
class SaveForgetsPendingRollback(_Rows):
    """A save reads the newest state, although a rollback of it is pending."""

    def read(self, sequence: int, state_count: int = 1) -> States:
        newest = self.cells.tail[sequence]
        if self.probe.strikes(state_count == 1 and bool(self.cells.rows_of(sequence)[0] != newest)):
            return States(*(rows[:, [newest]].transpose(1, 0, 2) for rows in self.parts))
        return super().read(sequence, state_count)


@mutant("vmlx-swift#210", "model lfm2; decode 0:1; save 0 a; restore a 1; decode 1:1")
class SaveForgetsTheConvolution(_Rows):
    """A saved state has zeros for the window of the convolution."""

    def read(self, sequence: int, state_count: int = 1) -> States:
        states = super().read(sequence, state_count)
        if self.probe.strikes(bool(states.convolution.any())):
            return states._replace(convolution=np.zeros_like(states.convolution))
        return states


@mutant("sgl-project/sglang#22493", "model qwen35; decode 0:1; save 0 a; restore a 1; decode 1:1")
class SaveForgetsTheRecurrentState(_Rows):
    """A saved state has the convolution, and zeros for the recurrent state."""

    def read(self, sequence: int, state_count: int = 1) -> States:
        states = super().read(sequence, state_count)
        if self.probe.strikes(bool(states.recurrent.any())):
            return states._replace(recurrent=np.zeros_like(states.recurrent))
        return states


@mutant(CLASSIC, "model qwen4exp; decode 0:3; save 0 a; restore a 1; decode 1:1")
class RestoreForgetsTokenHistory(_Rows):
    """A restore leaves the convolution of per-layer embeddings as the cell's last owner left it."""

    def write(self, sequence: int, position: int, states: States) -> None:
        if self.probe.strikes(bool(states.embedding.any())):
            states = states._replace(embedding=np.zeros_like(states.embedding))
        super().write(sequence, position, states)


@mutant(CLASSIC, "model mamba2; decode 0:3; save 0 a; restore a 1; rollback 1 1; decode 1:1", cache="ring")
class SavedSnapshotsNumberedBackwards(_Rows):
    """Snapshots are saved oldest first and restored newest first."""

    def read(self, sequence: int, state_count: int = 1) -> States:
        states = super().read(sequence, state_count)
        if self.probe.strikes(state_count > 2):
            return States(*(np.concatenate([values[:1], values[:0:-1]]) for values in states))
        return states


@mutant("ggml-org/llama.cpp#22756", "model mamba2; save 0 a; restore a 1", "bad-refusal")
class RestoreRefusesAnotherSequence(_Session):
    """A state that was saved from one sequence is refused when it is restored into another."""

    def save(self, sequence: int, partial: bool, device: bool) -> tuple[Outcome, bytes]:
        outcome, blob = super().save(sequence, partial, device)
        if not hasattr(self, "_saved_from"):
            self._saved_from: dict[bytes, set[int]] = {}
        self._saved_from.setdefault(blob, set()).add(sequence)
        return outcome, blob

    def restore(self, sequence: int, blob: bytes, partial: bool, device: bool) -> Outcome:
        saved_from = getattr(self, "_saved_from", {}).get(blob)
        if self.probe.strikes(saved_from is not None and sequence not in saved_from):
            return refused("the saved state is of another sequence")
        return super().restore(sequence, blob, partial, device)


@mutant("ggml-org/llama.cpp#27148", "model mamba2; decode 0:1; save 1 a; restore a 0", "false-success")
class RestoreSaysYesAndDoesNothing(_Session):
    """A restore onto a sequence that holds something answers yes and leaves it as it was."""

    def restore(self, sequence: int, blob: bytes, partial: bool, device: bool) -> Outcome:
        if self.probe.strikes(not partial and not device and self._cache.last_position(sequence) >= 0):
            return ACCEPTED
        return super().restore(sequence, blob, partial, device)


@mutant("LMCache/LMCache#4247", "model mamba2; save 0 a; damage a truncate 1; restore a 0", "false-success")
class DamagedStateAccepted(_Session):
    """A blob that is too short is said to be restored."""

    def restore(self, sequence: int, blob: bytes, partial: bool, device: bool) -> Outcome:
        outcome = super().restore(sequence, blob, partial, device)
        return ACCEPTED if self.probe.strikes("damaged" in outcome.detail) else outcome


@mutant("ggml-org/llama.cpp#27068", "model lfm2; decode 0:1; save 1 a; damage a truncate 1; restore a 0; decode 0:1")
class RefusedRestoreLeavesAHalf(_Session):
    """A restore that fails has emptied the recurrent half by then, and leaves attention and position as they were."""

    def restore(self, sequence: int, blob: bytes, partial: bool, device: bool) -> Outcome:
        outcome = super().restore(sequence, blob, partial, device)
        recurrent = self._cache.recurrent
        holds = self._cache.last_position(sequence) >= 0
        if self.probe.strikes("damaged" in outcome.detail and holds and recurrent is not None and self._cache.attention is not None):
            assert recurrent is not None
            recurrent.cells.drop(sequence)
        return outcome


@mutant(CLASSIC, "model mamba2; decode 1:1; keep 0", "false-success")
class KeepSparesTheNextSequence(_Session):
    """Keeping one sequence leaves the one after it as it was."""

    def keep(self, sequence: int) -> Outcome:
        other = sequence + 1
        if not self.probe.strikes(other < self._n_seq_max and self._cache.last_position(other) >= 0):
            return super().keep(sequence)
        self._cache.drop_all(number for number in range(self._n_seq_max) if number not in (sequence, other))
        return ACCEPTED
