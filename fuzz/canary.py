"""Targets that are wrong on purpose: our own cache, whose outputs are one percent off after something rare, or something common.

A fuzzer that finds nothing in them is broken. They work on calls, positions and outputs alone, so that they need nothing of the cache's
inside.

- `TARGET`, the canary: what was saved while a rollback was pending is wrong when it is restored. About one generated program in a
  hundred shows it, and only one that rolls back, saves, restores and decodes in that order: `statedrift doctor` and every campaign watch
  that it is found (fuzz/canary_watch.py).
- `FREQUENT`: wrong after every rollback; about every sixth program shows it. For tests that need a finding at once.
"""

from typing import Any

import numpy as np

from ..spec.configuration import CacheConfiguration
from ..spec.models import Model
from ..spec.target import Batch, Decoded, Session, Undocumented
from ..spec.verdicts import ACCEPTED, Outcome
from ..targets.numba import TARGET as SOUND

FACTOR = np.float32(1.01)


class _OnePercentOff:
    """Everything as in the sound session, but the first decode of a marked sequence."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._marked: dict[int, int] = {}
        """Sequence -> its last position when it was marked; at another one it is not marked any more."""
        self.capabilities = session.capabilities

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def _last_position(self, sequence: int) -> int:
        return self._session.positions()[sequence][1]

    def _removed_tail(self, sequence: int, start: int, end: int) -> tuple[Outcome, bool]:
        """Remove, and whether that took back the end of a log and left a part of it."""
        before = self._last_position(sequence)
        outcome = self._session.remove(sequence, start, end)
        return outcome, outcome == ACCEPTED and -1 < self._last_position(sequence) < before

    def _mark(self, sequence: int) -> None:
        self._marked[sequence] = self._last_position(sequence)

    def decode(self, batch: Batch) -> Decoded:
        marked = {sequence for sequence, last in self._marked.items() if self._last_position(sequence) == last}
        decoded = self._session.decode(batch)
        if decoded.rows is None:
            return decoded
        for sequence in {sequence for owner in batch.sequences for sequence in owner}:
            self._marked.pop(sequence, None)
        owners = [owners for owners, wanted in zip(batch.sequences, batch.wanted, strict=True) if wanted]
        factor = np.where([bool(marked & set(owner)) for owner in owners], FACTOR, np.float32(1.0)).astype(np.float32)
        return Decoded(decoded.outcome, decoded.rows * factor[:, None])


class _WrongAfterRollback(_OnePercentOff):
    def remove(self, sequence: int, start: int, end: int) -> Outcome:
        outcome, is_tail = self._removed_tail(sequence, start, end)
        self._marked.pop(sequence, None)
        if is_tail:
            self._mark(sequence)
        return outcome


class _WrongAfterPendingSave(_OnePercentOff):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._pending: dict[int, int] = {}  # as _marked
        self._wrong_blobs: set[bytes] = set()

    def remove(self, sequence: int, start: int, end: int) -> Outcome:
        outcome, is_tail = self._removed_tail(sequence, start, end)
        if is_tail:
            self._pending[sequence] = self._last_position(sequence)
        return outcome

    def decode(self, batch: Batch) -> Decoded:
        for sequence in {sequence for owner in batch.sequences for sequence in owner}:
            self._pending.pop(sequence, None)
        return super().decode(batch)

    def save(self, sequence: int, partial: bool, device: bool) -> tuple[Outcome, bytes]:
        outcome, blob = self._session.save(sequence, partial, device)
        if outcome == ACCEPTED and self._pending.get(sequence) == self._last_position(sequence):
            self._wrong_blobs.add(blob)
        return outcome, blob

    def restore(self, sequence: int, blob: bytes, partial: bool, device: bool) -> Outcome:
        outcome = self._session.restore(sequence, blob, partial, device)
        self._marked.pop(sequence, None)
        self._pending.pop(sequence, None)
        if outcome == ACCEPTED and blob in self._wrong_blobs:
            self._mark(sequence)
        return outcome


class CanaryTarget:
    """Our own cache with a planted fault that is rarely seen."""

    name = "canary"
    isolated = False
    families = SOUND.families
    poison = SOUND.poison
    undocumented: tuple[Undocumented, ...] = ()
    _fault: type[_OnePercentOff] = _WrongAfterPendingSave
    _after = "a restore of what was saved while a rollback was pending"

    def version(self) -> str:
        return SOUND.version()

    def describe(self) -> str:
        return f"our own cache with a planted fault: outputs are one percent off after {self._after}"

    def open(self, model: Model, configuration: CacheConfiguration) -> Session:
        session: Any = self._fault(SOUND.open(model, configuration))
        return session  # type: ignore[no-any-return]  # what it does not do itself is the sound session's


class FrequentCanaryTarget(CanaryTarget):
    """Our own cache with a planted fault that is often seen."""

    name = "frequent-canary"
    _fault = _WrongAfterRollback
    _after = "a rollback"


TARGET = CanaryTarget()
FREQUENT = FrequentCanaryTarget()
