"""The draft of a program: the operations so far, and what the generator believes they did.

Rules
- A belief is a guess (a target may refuse what it may refuse); it only makes most operations apply. It judges nothing.
- It believes what a cache with rollback guarantee `draft` does, and that optional operations are offered.
- `may_hold` is never wrong in one direction: a sequence without it is empty on every correct target.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from ..spec.configuration import CacheConfiguration
from ..spec.families import dimensions_of, family_of
from ..spec.models import Model
from ..spec.operations import AnyOperation, Item
from .choices import Choices

LONG_BUDGET_TOKENS = 150
"""After this many tokens a program's decodes are short: judging costs by the token."""
EXPLICIT_TOKENS_MAX = 6
_HEATS = (30, 60, 90)
_ACTIVE_SEQUENCES = (2, 1, 2, 3, 3, 4, 8)


class Track:
    """What is believed of one sequence.

    length    tokens in its log
    offset    position of its first token
    newest    tokens the last decode gave it alone, while a rollback may still count on them
    salt      of its tokens now
    log_id    equal for sequences that are believed to have equal logs; 0 when empty
    lost      it lost or exchanged tokens since the last decode: the next decode mostly takes a new salt
    pending   a rollback was accepted and no decode followed
    divided   its positions were divided
    may_hold  it may hold tokens
    """

    __slots__ = ("divided", "length", "log_id", "lost", "may_hold", "newest", "offset", "pending", "salt")

    def __init__(self) -> None:
        self.salt = 0
        self.empty()
        self.lost = False

    def empty(self) -> None:
        """Everything of it is gone."""
        self.length = self.offset = self.newest = self.log_id = 0
        self.lost = True
        self.pending = self.divided = self.may_hold = False

    def copied(self) -> "Copied":
        """What a share or a save takes along."""
        return Copied(self.length, self.offset, self.log_id, self.divided, self.may_hold)

    def take(self, copied: "Copied") -> None:
        """Its log is now another's."""
        self.length, self.offset, self.log_id, self.divided, self.may_hold = copied
        self.newest = 0
        self.lost = True

    @property
    def end_position(self) -> int:
        """Position of the next token."""
        return self.offset + self.length


class Copied(NamedTuple):
    """The part of a track that a share or a save takes along."""

    length: int
    offset: int
    log_id: int
    divided: bool
    may_hold: bool


class Saved:
    """What is believed of one slot; `shortest` is the least length that its sequence has had since (-1: its positions moved)."""

    __slots__ = ("copied", "damaged", "device", "n_seq_max", "partial", "sequence", "session", "shortest", "unified")

    def __init__(self, sequence: int, track: Track, cache: CacheConfiguration, session: int, partial: bool, device: bool) -> None:
        self.sequence = sequence
        self.copied = track.copied()
        self.n_seq_max, self.unified = cache.n_seq_max, cache.unified
        self.session = session
        self.partial, self.device = partial, device
        self.damaged = False
        self.shortest = track.length


class SavedSession:
    """What is believed of one slot that holds a whole session."""

    __slots__ = ("n_seq_max", "tracks", "unified")

    def __init__(self, tracks: Sequence[Track], cache: CacheConfiguration) -> None:
        self.tracks = [track.copied() for track in tracks]
        self.n_seq_max, self.unified = cache.n_seq_max, cache.unified


class ModelFacts(NamedTuple):
    """The size of the vocabulary; whether the model has an attention cache, which can be full; whether its attention has a window."""

    vocabulary_size: int
    has_attention: bool
    has_window: bool


@lru_cache(maxsize=64)
def model_facts(model: Model) -> ModelFacts:
    """What programs depend on of `model`. Raises UsageError for a bad model."""
    family, dimensions = family_of(model), dimensions_of(model)
    return ModelFacts(dimensions["n_vocab"], bool(family.attention_layers(dimensions)), bool(family.attention_window(dimensions)))


@lru_cache(maxsize=256)
def _sizes(n_rs_seq: int, n_ubatch: int) -> tuple[int, ...]:
    """Sizes of decode items, the simplest first, the interesting ones repeated."""
    edges = [n_rs_seq, n_rs_seq + 1, n_rs_seq + 1, n_rs_seq + 2]
    ubatch_edges = [n_ubatch - 1, n_ubatch, n_ubatch + 1]
    small = [1, 1, 1, 2, 2, 3, 4, 5, 7]
    if n_ubatch > 16:  # such sizes cost many tokens: half as often
        small, edges = 2 * small, 2 * edges
    return tuple(sorted(max(1, size) for size in small + edges + ubatch_edges))


class Draft:
    """A program being made."""

    def __init__(self, choices: Choices, model: Model, cache: CacheConfiguration, operations_max: int) -> None:
        self.choices = choices
        self.vocabulary_size, self.has_attention, _ = model_facts(model)
        self.operations_max = operations_max
        self.operations: list[AnyOperation] = []
        self.slots: dict[str, Saved] = {}
        self.session_slots: dict[str, SavedSession] = {}
        self.couples = True  # tokens may belong to several sequences
        self.damaged_slot: str | None = None  # a restore of it is to follow
        self.token_count = 0
        self.session = 0
        self._salt = 0
        self._log_id = 0
        self._heat = choices.pick(_HEATS)
        self._active = choices.pick(_ACTIVE_SEQUENCES)
        self.open(cache)

    def open(self, cache: CacheConfiguration) -> None:
        """A new session: every sequence is empty."""
        self.cache = cache
        self.tracks = [Track() for _ in range(cache.n_seq_max)]
        self.sizes = _sizes(cache.n_rs_seq, cache.n_ubatch)
        self.active = range(min(self._active, cache.n_seq_max))
        self.hot = self.choices.integer(0, len(self.active) - 1)
        for track in self.tracks:  # what the last session held may still lie in memory
            track.lost = self.session > 0

    # --- choosing ---------------------------------------------------------------------------------------------------------

    def one_of(self, sequences: Sequence[int]) -> int:
        """One of these sequences: one with a rollback pending often, the hot one often, else any."""
        choices = self.choices
        if len(sequences) == 1:
            return sequences[0]
        if choices.leans(35):
            pending = [sequence for sequence in sequences if self.tracks[sequence].pending]
            if pending:
                return choices.pick(pending)
        if self.hot in sequences and choices.leans(self._heat):
            return self.hot
        return choices.pick(sequences)

    def any_sequence(self) -> int:
        """Any sequence of the session, the active ones mostly."""
        if len(self.active) < len(self.tracks) and self.choices.chance(5):
            return self.choices.integer(0, len(self.tracks) - 1)
        return self.one_of(self.active)

    def is_rollback_pending(self) -> bool:
        """Whether some sequence was rolled back and not decoded since."""
        return any([track.pending for track in self.tracks])  # noqa: C419 - a list is faster here

    def filled(self) -> list[int]:
        """Sequences that are believed to hold tokens."""
        return [sequence for sequence, track in enumerate(self.tracks) if track.length]

    def filled_sequence(self) -> int:
        """A sequence that is believed to hold tokens, mostly."""
        filled = self.filled()
        if not filled or self.choices.chance(3):
            return self.any_sequence()
        return self.one_of(filled)

    def size_tokens(self) -> int:
        """How many tokens an item gets."""
        if self.token_count > LONG_BUDGET_TOKENS:
            return self.choices.integer(1, 3)
        return self.choices.pick(self.sizes)

    def room_tokens(self, sequence: int) -> int:
        """How many tokens a sequence is believed to have room for."""
        if not self.has_attention:
            return 1 << 30
        if self.cache.unified:
            return self.cache.n_ctx * self.cache.n_seq_max - sum([track.length for track in self.tracks])
        return self.cache.n_ctx - self.tracks[sequence].length

    def new_salt(self) -> int:
        """A salt that no operation has used."""
        self._salt += 1
        return self._salt

    def item(self, sequence: int, token_count: int) -> Item:
        """An item for one sequence: a new salt after a loss (15 of 16), the salt it had otherwise, explicit tokens seldom."""
        choices, track = self.choices, self.tracks[sequence]
        if token_count <= EXPLICIT_TOKENS_MAX and choices.chance(3):
            return Item((sequence,), token_count, 0, self.explicit_tokens(token_count))
        if (track.lost and not choices.chance(6)) or choices.chance(3):
            track.salt = self.new_salt()
        return Item((sequence,), token_count, track.salt)

    def explicit_tokens(self, token_count: int) -> tuple[int, ...]:
        """Tokens to be spelled out."""
        return tuple([self.choices.integer(0, self.vocabulary_size - 1) for _ in range(token_count)])

    # --- believing --------------------------------------------------------------------------------------------------------

    def new_log_id(self) -> int:
        """The identity of a log that equals no other so far."""
        self._log_id += 1
        return self._log_id

    def appended(self, sequence: int, token_count: int) -> None:
        """A decode gave the sequence these tokens alone."""
        track = self.tracks[sequence]
        track.length += token_count
        track.newest = token_count
        track.lost = track.pending = False
        track.may_hold = True
        track.log_id = self.new_log_id()
        self.token_count += token_count

    def cancelled(self, sequence: int) -> None:
        """A decode with tokens for the sequence was asked to stop: any prefix may have been kept, or nothing of the sequence."""
        track = self.tracks[sequence]
        track.may_hold = True
        track.lost = True
        track.newest = 0
        track.pending = False
        track.log_id = self.new_log_id() if track.length else 0

    def emptied(self, sequence: int) -> None:
        """The sequence was dropped."""
        self.tracks[sequence].empty()
        self.shortened(sequence)

    def cut(self, sequence: int, token_count: int) -> None:
        """A rollback of so many tokens was asked for; only a promised one is believed to have happened."""
        track = self.tracks[sequence]
        if token_count >= track.length:
            may_hold = track.may_hold  # the log may be longer than believed
            self.emptied(sequence)
            track.may_hold = may_hold
            return
        track.lost = True
        if not track.divided and token_count <= min(self.cache.n_rs_seq, track.newest - 1):
            track.length -= token_count
            track.newest = 0
            track.pending = True
            track.log_id = self.new_log_id()
            self.shortened(sequence)

    def shared(self, source: int, destination: int) -> None:
        """The destination is a copy of the source."""
        track, copy = self.tracks[source], self.tracks[destination]
        copy.take(track.copied())
        copy.pending = track.pending
        track.newest = 0
        self.shortened(destination)

    def restored(self, sequence: int, copied: Copied, is_promised: bool) -> None:
        """A restore into the sequence was asked for; only a promised one is believed to have happened."""
        track = self.tracks[sequence]
        may_hold = track.may_hold or copied.may_hold
        track.lost = True
        if is_promised:
            track.take(copied)
            track.pending = False
            self.shortened(sequence)
        track.may_hold = may_hold

    def shortened(self, sequence: int) -> None:
        """Partial saves of the sequence learn how short it is."""
        for slot in self.slots.values():
            if slot.partial and slot.sequence == sequence and slot.shortest > self.tracks[sequence].length:
                slot.shortest = self.tracks[sequence].length

    def moved(self, sequence: int) -> None:
        """Positions of the sequence changed: its partial saves do not fit any more, rollbacks are not promised any more."""
        self.tracks[sequence].newest = 0
        for slot in self.slots.values():
            if slot.partial and slot.sequence == sequence:
                slot.shortest = -1

    def reopened(self, changes: dict[str, int | str]) -> None:
        """A new session with changed keys."""
        self.session += 1
        cache: CacheConfiguration = msgspec.structs.replace(self.cache, **changes)
        self.open(cache)
