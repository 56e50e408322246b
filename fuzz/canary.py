"""A target that is wrong on purpose: our own cache, whose outputs are one percent off after a rollback.

A fuzzer that finds nothing in it is broken: `statedrift doctor` and the tests run it. It works on the outputs alone, so that it
needs nothing of the cache's inside.
"""

from typing import Any

import numpy as np

from ..spec.configuration import CacheConfiguration
from ..spec.models import Model
from ..spec.target import Batch, Decoded, Session, Undocumented
from ..spec.verdicts import ACCEPTED, Outcome
from ..targets.numba import TARGET as SOUND


class _WrongAfterRollback:
    """Everything as in the sound session, but the first decode of a sequence after a partial removal."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rolled_back: set[int] = set()
        self.capabilities = session.capabilities

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def remove(self, sequence: int, start: int, end: int) -> Outcome:
        before = self._session.positions()[sequence]
        outcome = self._session.remove(sequence, start, end)
        after = self._session.positions()[sequence]
        self._rolled_back.discard(sequence)
        if outcome == ACCEPTED and -1 < after[1] < before[1]:
            self._rolled_back.add(sequence)
        return outcome

    def decode(self, batch: Batch) -> Decoded:
        decoded = self._session.decode(batch)
        if decoded.rows is None:
            return decoded
        owners = [owners for owners, wanted in zip(batch.sequences, batch.wanted, strict=True) if wanted]
        wrong = [bool(self._rolled_back & set(owner)) for owner in owners]
        self._rolled_back -= {sequence for owner in batch.sequences for sequence in owner}
        factor = np.where(wrong, np.float32(1.01), np.float32(1.0)).astype(np.float32)
        return Decoded(decoded.outcome, decoded.rows * factor[:, None])


class CanaryTarget:
    """Our own cache with the planted fault."""

    name = "canary"
    isolated = False
    families = SOUND.families
    poison = SOUND.poison
    undocumented: tuple[Undocumented, ...] = ()

    def version(self) -> str:
        return SOUND.version()

    def describe(self) -> str:
        return "our own cache with a planted fault: outputs are one percent off after a rollback"

    def open(self, model: Model, configuration: CacheConfiguration) -> Session:
        return _WrongAfterRollback(SOUND.open(model, configuration))


TARGET = CanaryTarget()
