"""A session on our own caches: the target protocol over a hybrid cache and a forward.

Rules
- Every call either does its whole effect or says no and changes nothing.
- Arguments are checked here, and named when they are bad; nothing below checks them again.
- What is not declared is refused: coupled tokens, cancel, shift, divide, whole-session saves, partial and device saves.
"""

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np

from ..spec.configuration import CacheConfiguration
from ..spec.errors import UsageError
from ..spec.models import Model
from ..spec.operations import OPEN
from ..spec.target import Batch, Capabilities, Decoded, StateRow
from ..spec.verdicts import ACCEPTED, Outcome, refused
from .batches import OK, POSITION_NOT_NEXT, SEQUENCE_OUT_OF_RANGE, split, ubatch_tokens
from .cells import Plan
from .forwards import PreparedModel
from .model import check_session, open_cache, prepared
from .saved_state import pack, unpack

N_BATCH = 4096
ANSWER_ELEMENTS_MAX = 1 << 26
"""Most elements of a decode's answer: a large vocabulary makes the largest batch smaller."""

_NO_ROWS = np.zeros(0, np.int64)
_NO_PLAN = Plan(_NO_ROWS, _NO_ROWS, np.zeros((0, 1), np.int64), _NO_ROWS)
_REFUSED = {
    word: refused(f"this target has no {word}")
    for word in ("coupled tokens", "cancel", "shift", "divide", "whole-session save", "partial save", "device save", "share of a range")
}


class NumbaSession:
    """One opened cache of one model. See `spec.target.Session` for what the calls mean."""

    def __init__(self, model: Model, configuration: CacheConfiguration) -> None:
        """Raises UsageError for a model or a configuration that cannot be had."""
        self._model = prepared(model)
        check_session(self._model, configuration)
        self._cache, self._memory = open_cache(self._model, configuration)
        self._n_seq_max = configuration.n_seq_max
        self._is_open = True
        self._n_vocab = self._model.dimensions["n_vocab"]
        self._n_embd = self._model.dimensions["n_embd"]
        recurrent, attention = bool(self._model.recurrent_layers), bool(self._model.attention_layers)
        n_rs_seq = configuration.n_rs_seq if recurrent else 0
        self._tail_size = 1 + n_rs_seq
        self._ubatch_size = ubatch_tokens(configuration.n_ubatch, n_rs_seq)
        self.capabilities = Capabilities(
            guarantee="draft" if recurrent else "all",
            n_rs_seq=n_rs_seq,
            n_batch=max(1, min(N_BATCH, ANSWER_ELEMENTS_MAX // self._n_vocab)),
            n_ctx=configuration.n_ctx if attention else 0,
            recurrent=recurrent,
            attention=attention,
            embeddings=True,
            inspect=True,
        )

    def decode(self, batch: Batch) -> Decoded:
        """Append the batch's tokens. Refused: a position that does not follow, coupled tokens, no room. Raises UsageError for bad tokens or ids."""
        token_count = len(batch.tokens)
        sequences = self._sequences_of(batch)
        if sequences is None:
            return Decoded(_REFUSED["coupled tokens"])
        if token_count > self.capabilities.n_batch:
            return Decoded(refused(f"a batch has at most {self.capabilities.n_batch} tokens, not {token_count}"))
        code, wrong, ordered = split(
            np.ascontiguousarray(batch.tokens, np.int64), np.ascontiguousarray(batch.positions, np.int64), sequences,
            np.ascontiguousarray(batch.wanted, np.bool_), self._cache.last_positions(), self._n_vocab, self._ubatch_size, self._tail_size,
        )  # fmt: skip
        if code != OK:
            return Decoded(self._bad_token(batch, code, wrong))
        plan = self._cache.prepare(ordered)
        if isinstance(plan, str):
            return Decoded(refused(plan))
        self._cache.apply(ordered, plan)
        hidden = batch.outputs == "embeddings"
        sights = self._cache.sights(ordered)
        y = np.empty((int(np.count_nonzero(batch.wanted)), self._n_embd if hidden else self._n_vocab), np.float32)
        for ubatch in range(ordered.ubatch_count):
            self._model.forward(self._model.weights, self._memory, ordered, plan or _NO_PLAN, sights, ubatch, hidden, y)
        return Decoded(ACCEPTED, y)

    def cancel(self, batch: Batch, at: int) -> Decoded:
        """Refused: a decode here cannot be aborted."""
        return Decoded(_REFUSED["cancel"])

    def remove(self, sequence: int, start: int, end: int) -> Outcome:
        """Forget positions start..end-1: a tail (a rollback), everything, or a range without tokens. Refused: anything that leaves a later token,
        and a rollback to a state that was not kept."""
        self._check_sequence("sequence", sequence)
        if start < -1:
            raise UsageError(f"`start` must be a position, or -1, not {start}")
        if end < OPEN:
            raise UsageError(f"`end` must be a position, or -1 for an open end, not {end}")
        return _outcome(self._cache.remove(sequence, start, end))

    def share(self, source: int, destination: int, start: int, end: int) -> Outcome:
        """Make `destination` a copy of `source`; what it held is dropped. Refused: a range that does not cover the source."""
        self._check_sequence("source", source)
        self._check_sequence("destination", destination)
        last = self._cache.last_position(source)
        if start > 0 or (end != OPEN and end <= last):
            return _REFUSED["share of a range"]
        self._cache.share(source, destination)
        return ACCEPTED

    def keep(self, sequence: int) -> Outcome:
        """Empty every other sequence."""
        self._check_sequence("sequence", sequence)
        for other in range(self._n_seq_max):
            if other != sequence:
                self._cache.drop(other)
        return ACCEPTED

    def shift(self, sequence: int, delta: int) -> Outcome:
        """Refused: positions here do not move."""
        return _REFUSED["shift"]

    def divide(self, sequence: int, divisor: int) -> Outcome:
        """Refused: positions here do not move."""
        return _REFUSED["divide"]

    def save(self, sequence: int, partial: bool, device: bool) -> tuple[Outcome, bytes]:
        """The logical state of `sequence` as a blob."""
        self._check_sequence("sequence", sequence)
        if partial or device:
            return _REFUSED["partial save" if partial else "device save"], b""
        return ACCEPTED, pack(self._model, self._cache.read(sequence))

    def restore(self, sequence: int, blob: bytes, partial: bool, device: bool) -> Outcome:
        """Make what `blob` holds the state of `sequence`. Refused, with nothing changed: a blob that is damaged or foreign, or no room."""
        self._check_sequence("sequence", sequence)
        if partial or device:
            return _REFUSED["partial save" if partial else "device save"]
        state = unpack(self._model, blob)
        return refused(state) if isinstance(state, str) else _outcome(self._cache.write(sequence, state))

    def save_all(self) -> tuple[Outcome, bytes]:
        """Refused: sequences are saved one by one."""
        return _REFUSED["whole-session save"], b""

    def restore_all(self, blob: bytes) -> Outcome:
        """Refused: sequences are saved one by one."""
        return _REFUSED["whole-session save"]

    def clear(self, data: bool) -> Outcome:
        """Empty every sequence; with `data` overwrite the memory with zero too."""
        self._check_sequence("sequence", 0)
        for sequence in range(self._n_seq_max):
            self._cache.drop(sequence)
        if data:
            self._cache.zero()
        return ACCEPTED

    def positions(self) -> Sequence[tuple[int, int]]:
        """First and last position of every sequence: logs start at 0."""
        self._check_sequence("sequence", 0)
        return [(0, last) if last >= 0 else (-1, -1) for last in self._cache.last_positions().tolist()]

    def inspect(self, sequence: int) -> Sequence[StateRow]:
        """The logical state, layer by layer: conv [channels, window] oldest first, recurrent [heads, head_dim, d_state],
        attention [2, tokens, key heads, head_dim]: keys before rotation, then values. Empty for an empty sequence."""
        self._check_sequence("sequence", sequence)
        state = self._cache.read(sequence)
        if state.position < 0:
            return []
        rows = []
        model = self._model
        for index, layer in enumerate(model.recurrent_layers):
            assert state.convolution is not None
            assert state.recurrent is not None
            rows.append(StateRow(layer, "conv", state.convolution[index].reshape(model.convolution_shape).T.copy()))
            if math.prod(model.recurrent_shape):
                rows.append(StateRow(layer, "recurrent", state.recurrent[index].reshape(model.recurrent_shape).transpose(0, 2, 1).copy()))
        for index, layer in enumerate(model.attention_layers):
            assert state.keys is not None
            assert state.values is not None
            rows.append(StateRow(layer, "attention", np.stack([_rotated_back(state.keys[index], model), state.values[index]])))
        return sorted(rows, key=lambda row: row.layer)

    def close(self) -> None:
        """Give the memory back; every later call is an error."""
        self._is_open = False
        del self._cache, self._memory

    def _check_sequence(self, name: str, sequence: int) -> None:
        if not self._is_open:
            raise UsageError("the session is closed; open a new one")
        if not 0 <= sequence < self._n_seq_max:
            raise UsageError(f"`{name}` must be from 0 to {self._n_seq_max - 1}, not {sequence}")

    def _sequences_of(self, batch: Batch) -> np.ndarray | None:
        """The sequence of every token, int64 [tokens]; None when a token has several. Raises UsageError for a batch that does not fit together."""
        token_count = len(batch.tokens)
        if not self._is_open:
            raise UsageError("the session is closed; open a new one")
        if token_count == 0:
            raise UsageError("`tokens` is empty; a decode needs at least one token")
        if not token_count == len(batch.positions) == len(batch.sequences) == len(batch.wanted):
            raise UsageError("`tokens`, `positions`, `sequences` and `wanted` must have the same length")
        if batch.outputs not in ("all", "last", "embeddings"):
            raise UsageError(f"`outputs` must be all, last or embeddings, not {batch.outputs}")
        flat = list(chain.from_iterable(batch.sequences))
        if len(flat) != token_count or () in batch.sequences:
            if () in batch.sequences:
                raise UsageError(f"`sequences` of token {batch.sequences.index(())} is empty; every token belongs to a sequence")
            for sequence in flat:
                self._check_sequence("sequences", sequence)
            return None
        try:
            return np.array(flat, np.int64)
        except OverflowError:
            raise UsageError(f"`sequences` must be from 0 to {self._n_seq_max - 1}, not {max(flat, key=abs)}") from None

    def _bad_token(self, batch: Batch, code: int, index: int) -> Outcome:
        """What `split` found: an outcome for a position that does not follow; else raises UsageError."""
        sequence = batch.sequences[index][0]
        if code == POSITION_NOT_NEXT:
            last = self._cache.last_position(sequence)
            return refused(f"position {batch.positions[index]} of sequence {sequence} does not follow; its last position is {last}")
        if code == SEQUENCE_OUT_OF_RANGE:
            raise UsageError(f"`sequences` of token {index} must be from 0 to {self._n_seq_max - 1}, not {sequence}")
        raise UsageError(f"`tokens` must be from 0 to {self._n_vocab - 1}, not {batch.tokens[index]} (token {index})")


def _outcome(reason: str | None) -> Outcome:
    return ACCEPTED if reason is None else refused(reason)


def _rotated_back(keys: np.ndarray, model: PreparedModel) -> np.ndarray:
    """Keys [tokens, key heads, head_dim] before their rotation by position; float32. Without a theta they were never rotated."""
    if not model.rope_theta:
        return keys
    rotated_channels = model.rotated_channels or keys.shape[-1]
    half = rotated_channels // 2
    angle = (np.arange(len(keys))[:, None] * model.rope_theta ** (-np.arange(half) / half))[:, None, :]
    first, second = keys[..., :half].astype(np.float64), keys[..., half:rotated_channels].astype(np.float64)
    cosine, sine = np.cos(angle), np.sin(angle)
    turned_back = [first * cosine + second * sine, second * cosine - first * sine]
    return np.concatenate([*turned_back, keys[..., rotated_channels:]], axis=-1).astype(np.float32)
