"""A target that is trivially right: it keeps nothing but token logs, and computes every answer again from them."""

import json
import zlib
from collections.abc import Sequence

import numpy as np
from statedrift.oracle.recompute import Request, recompute_of
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.errors import UsageError
from statedrift.spec.families import FAMILIES, dimensions_of, family_of
from statedrift.spec.models import Model, model_text
from statedrift.spec.operations import OPEN
from statedrift.spec.target import Batch, Capabilities, Decoded, StateRow, Undocumented
from statedrift.spec.verdicts import ACCEPTED, Outcome, refused

Log = list[tuple[int, int]]  # (token, position), the oldest first
KNOWN: dict[tuple[Model, bool, tuple[int, ...]], np.ndarray] = {}  # rows that were computed, by what they are a function of


def tokens_of(log: Log) -> tuple[int, ...]:
    return tuple(token for token, _ in log)


def rows_after(model: Model, logs: list[tuple[int, ...]], is_hidden: bool) -> np.ndarray:
    """The output row after the last token of every log: float32 [logs, width]."""
    if len(KNOWN) > 20_000:
        KNOWN.clear()
    new = [log for log in logs if (model, is_hidden, log) not in KNOWN]
    for log, row in zip(new, recompute_of(model).rows([Request(log, [len(log) - 1], is_hidden) for log in new]), strict=True):
        KNOWN[model, is_hidden, log] = row[0].astype(np.float32)
    return np.stack([KNOWN[model, is_hidden, log] for log in logs])


class RecomputeSession:
    def __init__(self, model: Model, configuration: CacheConfiguration) -> None:
        family, dimensions = family_of(model), dimensions_of(model)
        self.model, self.n_vocab = model, dimensions["n_vocab"]
        self.logs: list[Log] = [[] for _ in range(configuration.n_seq_max)]
        self.capabilities = Capabilities(
            guarantee="all", n_rs_seq=0, n_batch=4096, n_ctx=0,  # every rollback can be served; logs have no limit
            recurrent=bool(family.recurrent_layers(dimensions)), attention=bool(family.attention_layers(dimensions)),
            coupled=True, cancel=True, shift=True, divide=True, save_all=True, embeddings=True, inspect=True,
        )  # fmt: skip

    def _log(self, sequence: int) -> Log:
        if not 0 <= sequence < len(self.logs):  # -1 would be the last log in Python
            raise UsageError(f"`sequence` must be from 0 to {len(self.logs) - 1}, not {sequence}")
        return self.logs[sequence]

    def _append(self, batch: Batch, count: int) -> list[tuple[int, ...]] | None:
        """Take the first `count` tokens; the logs up to each wanted one. None, and nothing changed, when one is not the next."""
        if len(batch.tokens) and not 0 <= batch.tokens.min() <= batch.tokens.max() < self.n_vocab:
            raise UsageError(f"`tokens` must be from 0 to {self.n_vocab - 1}")
        cells = list(zip(batch.tokens.tolist(), batch.positions.tolist(), batch.sequences, batch.wanted, strict=True))[:count]
        following = [last + 1 for _, last in self.positions()]
        for _, position, sequences, _ in cells:
            for sequence in sequences:
                self._log(sequence)
                if position != following[sequence]:
                    return None
                following[sequence] += 1
        wanted = []
        for token, position, sequences, is_wanted in cells:
            for sequence in sequences:
                self.logs[sequence].append((token, position))
            if is_wanted:
                wanted.append(tokens_of(self.logs[sequences[0]]))
        return wanted

    def decode(self, batch: Batch) -> Decoded:
        wanted = self._append(batch, len(batch.tokens))
        if wanted is None:
            return Decoded(refused("a token is not the next one of its sequence"))
        return Decoded(ACCEPTED, rows_after(self.model, wanted, batch.outputs == "embeddings"))

    def cancel(self, batch: Batch, at: int) -> Decoded:
        if at >= len(batch.tokens):
            return self.decode(batch)
        return Decoded(refused("a token is not the next one") if self._append(batch, at) is None else Outcome("cancelled"))

    def remove(self, sequence: int, start: int, end: int) -> Outcome:
        log = self._log(sequence)
        left = [cell for cell in log if cell[1] < start or (end != OPEN and cell[1] >= end)]
        if left != log[: len(left)]:
            return refused("a state cannot forget its middle")
        del log[len(left) :]
        return ACCEPTED

    def share(self, source: int, destination: int, start: int, end: int) -> Outcome:
        self._log(destination)
        self.logs[destination] = list(self._log(source))  # always the whole log: `partial_share` is not declared
        return ACCEPTED

    def keep(self, sequence: int) -> Outcome:
        kept = self._log(sequence)
        self.logs = [kept if number == sequence else [] for number in range(len(self.logs))]
        return ACCEPTED

    def shift(self, sequence: int, delta: int) -> Outcome:
        self._log(sequence)[:] = [(token, position + delta) for token, position in self._log(sequence)]
        return ACCEPTED

    def divide(self, sequence: int, divisor: int) -> Outcome:
        self._log(sequence)[:] = [(token, position // divisor) for token, position in self._log(sequence)]
        return ACCEPTED

    def _blob(self, logs: list[Log]) -> bytes:
        data = json.dumps([model_text(self.model), logs]).encode()
        return zlib.crc32(data).to_bytes(4, "big") + data

    def _restored(self, blob: bytes, destinations: Sequence[int]) -> Outcome:
        if zlib.crc32(blob[4:]).to_bytes(4, "big") != blob[:4]:
            return refused("the blob is damaged")
        model, logs = json.loads(blob[4:])
        if model != model_text(self.model) or len(logs) != len(destinations):
            return refused("the blob is of another model or configuration")
        for sequence, log in zip(destinations, logs, strict=True):
            self._log(sequence)[:] = [(token, position) for token, position in log]
        return ACCEPTED

    def save(self, sequence: int, partial: bool, device: bool) -> tuple[Outcome, bytes]:
        return ACCEPTED, self._blob([self._log(sequence)])  # `partial` and `device` are not declared: always False

    def restore(self, sequence: int, blob: bytes, partial: bool, device: bool) -> Outcome:
        return self._restored(blob, [sequence])

    def save_all(self) -> tuple[Outcome, bytes]:
        return ACCEPTED, self._blob(self.logs)

    def restore_all(self, blob: bytes) -> Outcome:
        return self._restored(blob, range(len(self.logs)))

    def clear(self, data: bool) -> Outcome:
        self.logs = [[] for _ in self.logs]  # no bytes lie behind a log, so `data` makes no difference
        return ACCEPTED

    def positions(self) -> Sequence[tuple[int, int]]:
        return [(log[0][1], log[-1][1]) if log else (-1, -1) for log in self.logs]

    def inspect(self, sequence: int) -> Sequence[StateRow]:
        log = self._log(sequence)
        return recompute_of(self.model).state_rows(tokens_of(log)) if log else ()

    def close(self) -> None:
        self.logs = []


class RecomputeTarget:
    name = "recompute"
    isolated = False
    families = tuple(FAMILIES)
    poison = False
    undocumented: tuple[Undocumented, ...] = ()

    def version(self) -> str:
        return "1"

    def describe(self) -> str:
        return "token logs and a full recompute, in this process"

    def open(self, model: Model, configuration: CacheConfiguration) -> RecomputeSession:
        return RecomputeSession(model, configuration)


TARGET = RecomputeTarget()
