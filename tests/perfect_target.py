"""A perfect target: plain lists of tokens that accept whatever the contract allows and refuse what it forbids.

Rules
- It computes nothing: output rows are zeros. It shows what programs do to a cache that makes no mistake in its answers.
- A blob is the log in JSON under a checksum; every kind of damage is noticed.
- `forgets` plants one fault, so that tests can see a checker object.
Source: docs/contract.md.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.families import FAMILIES, dimensions_of, family_of
from statedrift.spec.models import Model, model_text
from statedrift.spec.operations import OPEN
from statedrift.spec.target import Batch, Capabilities, Decoded, Guarantee, StateRow, Undocumented
from statedrift.spec.verdicts import ACCEPTED, Outcome, refused

N_BATCH = 4096
Fault = Literal["", "share-does-nothing", "drop-is-refused", "other-sequence-moves"]


class Cell(msgspec.Struct, frozen=True):
    """One token in the cache; shared tokens have the same mark."""

    token: int
    position: int
    mark: int


Cells = tuple[Cell, ...]


class Blob(msgspec.Struct, frozen=True):
    """What a save holds: the logs of one sequence, or of all."""

    model: str
    logs: tuple[Cells, ...]
    whole: bool
    n_seq_max: int


def _sealed(blob: Blob) -> bytes:
    data = msgspec.json.encode(blob)
    return hashlib.blake2b(data, digest_size=16).digest() + data


def _opened(data: bytes) -> Blob | None:
    return msgspec.json.decode(data[16:], type=Blob) if hashlib.blake2b(data[16:], digest_size=16).digest() == data[:16] else None


class PerfectSession:
    """An opened perfect cache."""

    def __init__(self, model: Model, configuration: CacheConfiguration, guarantee: Guarantee, optional: bool, fault: Fault) -> None:
        dimensions, family = dimensions_of(model), family_of(model)
        self.model = model
        self.cache = configuration
        self.fault = fault
        self.widths = {"all": dimensions["n_vocab"], "last": dimensions["n_vocab"], "embeddings": dimensions["n_embd"]}
        self.logs: list[Cells] = [()] * configuration.n_seq_max
        self._mark = 0
        attention = bool(family.attention_layers(dimensions))
        self.capabilities = Capabilities(
            guarantee=guarantee, n_rs_seq=configuration.n_rs_seq, n_batch=N_BATCH, n_ctx=configuration.n_ctx if attention else 0,
            recurrent=bool(family.recurrent_layers(dimensions)), attention=attention, coupled=optional, cancel=optional, shift=optional,
            divide=optional, save_all=optional, partial=optional, device=optional, embeddings=True, partial_share=optional,
        )  # fmt: skip

    def _new_mark(self) -> int:
        self._mark += 1
        return self._mark

    def _fits(self, logs: Sequence[Cells]) -> bool:
        n_ctx = self.capabilities.n_ctx
        if not n_ctx:
            return True
        if self.cache.unified:
            return len({cell.mark for log in logs for cell in log}) <= n_ctx * len(logs)
        return all(len(log) <= n_ctx for log in logs)

    def _appended(self, batch: Batch, count: int) -> list[Cells] | None:
        """The logs with the first `count` tokens of the batch; None when a token is not the next one of its sequences."""
        logs = list(self.logs)
        for token, position, sequences in list(zip(batch.tokens, batch.positions, batch.sequences, strict=True))[:count]:
            cell = Cell(int(token), int(position), self._new_mark())
            for sequence in sequences:
                if cell.position != (logs[sequence][-1].position + 1 if logs[sequence] else 0):
                    return None
                logs[sequence] = (*logs[sequence], cell)
        return logs

    def decode(self, batch: Batch) -> Decoded:
        logs = self._appended(batch, len(batch.tokens))
        if logs is None:
            return Decoded(refused("a token is not the next one"))
        if not self._fits(logs):
            return Decoded(refused("no room"))
        self.logs = logs
        return Decoded(ACCEPTED, np.zeros((int(batch.wanted.sum()), self.widths[batch.outputs]), np.float32))

    def cancel(self, batch: Batch, at: int) -> Decoded:
        if at >= len(batch.tokens):
            return self.decode(batch)
        logs = self._appended(batch, at)
        if logs is None or not self._fits(logs):
            return Decoded(refused("no room"))
        self.logs = logs
        return Decoded(Outcome("cancelled"))

    def remove(self, sequence: int, start: int, end: int) -> Outcome:
        log = self.logs[sequence]
        left = tuple(cell for cell in log if not (cell.position >= start and (end == OPEN or cell.position < end)))
        if self.fault == "drop-is-refused" and not left:
            return refused("planted")
        if left != log[: len(left)] and self.capabilities.recurrent:
            return refused("a state cannot forget its middle")
        self.logs[sequence] = left
        return ACCEPTED

    def share(self, source: int, destination: int, start: int, end: int) -> Outcome:
        log = self.logs[source]
        chosen = tuple(cell for cell in log if cell.position >= start and (end == OPEN or cell.position < end))
        if source == destination:
            return ACCEPTED
        if chosen != log and self.capabilities.recurrent:
            return refused("a state is the whole past")
        if self.fault != "share-does-nothing":
            self.logs[destination] = chosen
        return ACCEPTED

    def keep(self, sequence: int) -> Outcome:
        self.logs = [log if number == sequence else () for number, log in enumerate(self.logs)]
        return ACCEPTED

    def _moved(self, sequence: int, positions: Sequence[int]) -> Outcome:
        log = self.logs[sequence]
        self.logs[sequence] = tuple(Cell(cell.token, position, cell.mark) for cell, position in zip(log, positions, strict=True))
        return ACCEPTED

    def shift(self, sequence: int, delta: int) -> Outcome:
        return self._moved(sequence, [cell.position + delta for cell in self.logs[sequence]])

    def divide(self, sequence: int, divisor: int) -> Outcome:
        return self._moved(sequence, [cell.position // divisor for cell in self.logs[sequence]])

    def _blob(self, logs: Sequence[Cells], whole: bool) -> bytes:
        return _sealed(Blob(model_text(self.model), tuple(logs), whole, len(self.logs)))

    def save(self, sequence: int, partial: bool, device: bool) -> tuple[Outcome, bytes]:
        return ACCEPTED, self._blob([self.logs[sequence]], False)

    def save_all(self) -> tuple[Outcome, bytes]:
        return ACCEPTED, self._blob(self.logs, True)

    def _restored(self, data: bytes, destinations: Sequence[int], whole: bool, partial: bool = False) -> Outcome:
        blob = _opened(data)
        if blob is None:
            return refused("the checksum differs")
        if blob.model != model_text(self.model) or blob.whole != whole or len(blob.logs) != len(destinations):
            return refused("the blob is of another model or configuration")
        logs = list(self.logs)
        for sequence, log in zip(destinations, blob.logs, strict=True):
            logs[sequence] = tuple(Cell(cell.token, cell.position, self._new_mark()) for cell in log)
            if partial:  # the attention cells are there already
                logs[sequence] = self.logs[sequence][: len(log)]
        if not self._fits(logs):
            return refused("no room")
        self.logs = logs
        return ACCEPTED

    def restore(self, sequence: int, blob: bytes, partial: bool, device: bool) -> Outcome:
        return self._restored(blob, [sequence], False, partial)

    def restore_all(self, blob: bytes) -> Outcome:
        return self._restored(blob, range(len(self.logs)), True)

    def clear(self, data: bool) -> Outcome:
        self.logs = [()] * len(self.logs)
        return ACCEPTED

    def positions(self) -> Sequence[tuple[int, int]]:
        answer = [(log[0].position, log[-1].position) if log else (-1, -1) for log in self.logs]
        if self.fault == "other-sequence-moves" and len(answer) > 1 and self.logs[0]:
            answer[1] = answer[0]
        return answer

    def inspect(self, sequence: int) -> Sequence[StateRow]:
        return ()

    def close(self) -> None:
        self.logs = []


class PerfectTarget:
    """The perfect target.

    guarantee  what its sessions declare; they accept every rollback in any case
    optional   whether they declare the optional operations
    fault      one planted fault, or none
    """

    name = "perfect"
    isolated = False
    families = tuple(FAMILIES)
    poison = True
    undocumented: tuple[Undocumented, ...] = ()

    def __init__(self, guarantee: Guarantee = "all", optional: bool = True, fault: Fault = "") -> None:
        self.guarantee: Guarantee = guarantee
        self.optional = optional
        self.fault: Fault = fault

    def version(self) -> str:
        return "1"

    def describe(self) -> str:
        return "plain lists, in this process"

    def open(self, model: Model, configuration: CacheConfiguration) -> PerfectSession:
        return PerfectSession(model, configuration, self.guarantee, self.optional, self.fault)
