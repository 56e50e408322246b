"""A session on our own caches: the target protocol over a hybrid cache and a forward.

Rules
- Every call either does its whole effect or says no and changes nothing.
- Arguments are checked here, and named when they are bad; nothing below checks them again.
- What is not declared is refused: cancel, device saves, shares of a range; divided positions where a model has attention.
- The policy is the class of the recurrent side's cells: `StrictCells` or `RingCells`.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from ..spec.configuration import CacheConfiguration
from ..spec.errors import UsageError
from ..spec.models import Model
from ..spec.operations import OPEN
from ..spec.pictures import Reading, Snapshot, SnapshotCell
from ..spec.target import Batch, Capabilities, Decoded, StateRow
from ..spec.verdicts import ACCEPTED, Outcome, refused
from .batches import OK, POSITION_NOT_NEXT, SEQUENCE_OUT_OF_RANGE, SplitBatch, split, ubatch_tokens
from .cells import NONE, Cells, Plan, StrictCells
from .coupled import Phase, phases_of
from .forwards import Sights, turned_keys
from .hybrid_cache import POSITION_MAX
from .model import SIDES, Sides, check_session, open_cache, prepared
from .ring import RingCells
from .saved_state import pack, pack_session, unpack, unpack_session
from .snapshots import digests, recurrent_rows

N_BATCH = 4096
ANSWER_ELEMENTS_MAX = 1 << 26
"""Most elements of a decode's answer: a large vocabulary makes the largest batch smaller."""

_NO_ROWS = np.zeros(0, np.int64)
_NO_PLAN = Plan(_NO_ROWS, _NO_ROWS, np.zeros((0, 1), np.int64), _NO_ROWS)
_REFUSED = {
    word: refused(f"this target has no {word}")
    for word in ("cancel", "division of positions under attention", "device save", "share of a range")
}


class NumbaSession:
    """One opened cache of one model. See `spec.target.Session` for what the calls mean."""

    def __init__(
        self,
        model: Model,
        configuration: CacheConfiguration,
        cells_class: type[Cells] = StrictCells,
        saves_snapshots: bool = False,
        sides: Sides = SIDES,
    ) -> None:
        """saves_snapshots: a save takes along the states that its sequence can go back to. sides: classes of the caches.

        Raises UsageError for a model or a configuration that cannot be had.
        """
        self._model = prepared(model)
        check_session(self._model, configuration)
        self._cache, self._memory = open_cache(self._model, configuration, cells_class, sides)
        self._n_seq_max = configuration.n_seq_max
        self._unified = bool(configuration.unified)
        self._is_open = True
        self._n_vocab = self._model.dimensions["n_vocab"]
        self._n_embd = self._model.dimensions["n_embd"]
        recurrent, attention = bool(self._model.recurrent_layers), bool(self._model.attention_layers)
        self._tail_size = self._cache.recurrent.cells.tail_size if self._cache.recurrent is not None else 1
        self._ubatch_size = ubatch_tokens(configuration.n_ubatch, self._tail_size)
        self._saves_snapshots = recurrent and saves_snapshots
        self.capabilities = Capabilities(
            guarantee=cells_class.guarantee if recurrent else "all",
            n_rs_seq=configuration.n_rs_seq if recurrent else 0,
            n_batch=max(1, min(N_BATCH, ANSWER_ELEMENTS_MAX // self._n_vocab)),
            n_ctx=configuration.n_ctx if attention else 0,
            recurrent=recurrent,
            attention=attention,
            windowed=bool(self._model.windowed_layers),
            coupled=True,
            shift=True,
            divide=not attention,
            save_all=True,
            partial=True,
            embeddings=True,
            inspect=True,
            saves_snapshots=self._saves_snapshots,
        )

    def decode(self, batch: Batch) -> Decoded:
        """Append the batch's tokens. Refused: a position that does not follow, tokens of sequences that differ in length, no room.
        Raises UsageError for bad tokens or ids."""
        token_count = len(batch.tokens)
        sequences = self._sequences_of(batch)
        if token_count > self.capabilities.n_batch:
            return Decoded(refused(f"a batch has at most {self.capabilities.n_batch} tokens, not {token_count}"))
        if max(batch.positions.tolist()) > POSITION_MAX:  # of a few numbers quicker than by NumPy
            return Decoded(refused(f"positions end at {POSITION_MAX}"))
        if sequences is None:
            return self._decode_coupled(batch)
        tokens, positions = np.ascontiguousarray(batch.tokens, np.int64), np.ascontiguousarray(batch.positions, np.int64)
        wanted = np.ascontiguousarray(batch.wanted, np.bool_)
        code, wrong, ordered = self._split(tokens, positions, sequences, wanted)
        if code != OK:
            return Decoded(self._bad_token(batch, code, wrong))
        plan = self._cache.prepare(ordered)
        if isinstance(plan, str):
            return Decoded(refused(plan))
        return Decoded(ACCEPTED, self._run(ordered, plan, wanted, batch.outputs == "embeddings"))

    def _split(self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, wanted: np.ndarray) -> tuple[int, int, SplitBatch]:
        return split(tokens, positions, sequences, wanted, self._cache.last_positions(), self._n_vocab, self._ubatch_size, self._tail_size)

    def _run(self, ordered: SplitBatch, plan: Plan | None, wanted: np.ndarray, hidden: bool) -> np.ndarray:
        """Apply a batch that both sides can hold and run it; returns its wanted rows."""
        ordered = self._cache.apply(ordered, plan)
        sights = self._cache.sights(ordered)
        y = np.empty((int(np.count_nonzero(wanted)), self._n_embd if hidden else self._n_vocab), np.float32)
        self._run_ubatches(ordered, plan or _NO_PLAN, sights, hidden, y)
        return y

    def _run_ubatches(self, ordered: SplitBatch, plan: Plan, sights: Sights, hidden: bool, y: np.ndarray) -> None:
        """Run an applied batch, one ubatch after the other; `y` is its answer."""
        for ubatch in range(ordered.ubatch_count):
            self._run_ubatch(ordered, plan, sights, ubatch, hidden, y)

    def _run_ubatch(self, ordered: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray) -> None:
        """Run one ubatch of an applied batch: its states and attention cells are written, and its wanted rows of `y`."""
        self._model.forward(self._model.weights, self._memory, ordered, plan, sights, ubatch, hidden, y)

    def _decode_coupled(self, batch: Batch) -> Decoded:
        """The same for a batch with tokens of several sequences: phase by phase, once the whole of it is known to be right."""
        token_sets = [tuple(sorted(members)) for members in batch.sequences]
        reason = self._refuses_coupled(batch, token_sets)
        if reason is not None:
            return Decoded(refused(reason))
        hidden = batch.outputs == "embeddings"
        wanted = np.array(batch.wanted, np.bool_)
        row_of = np.cumsum(wanted) - 1
        y = np.empty((int(np.count_nonzero(wanted)), self._n_embd if hidden else self._n_vocab), np.float32)
        for phase in phases_of(token_sets):
            places = np.array(phase.places, np.int64)
            y[row_of[places[wanted[places]]]] = self._run_phase(batch, phase, token_sets, places, hidden)
        return Decoded(ACCEPTED, y)

    def _refuses_coupled(self, batch: Batch, token_sets: Sequence[tuple[int, ...]]) -> str | None:
        """The reason why a batch cannot be had, or None. Raises UsageError for bad tokens."""
        for place, token in enumerate(batch.tokens.tolist()):
            if not 0 <= token < self._n_vocab:
                raise UsageError(f"`tokens` must be from 0 to {self._n_vocab - 1}, not {token} (token {place})")
        added: dict[int, int] = {}
        for position, members in zip(batch.positions.tolist(), token_sets, strict=True):
            lengths = set()
            for sequence in members:
                given = added.get(sequence, 0)
                last = self._cache.last_position(sequence) + given
                if position != last + 1:
                    return f"position {position} of sequence {sequence} does not follow; its last position is {last}"
                lengths.add(self._cache.length(sequence) + given)
                added[sequence] = given + 1
            if len(lengths) > 1:
                return f"sequences {' and '.join(map(str, members))} hold different numbers of tokens; a token cannot follow on all of them"
        return self._cache.refuses(added, len(token_sets))

    def _run_phase(self, batch: Batch, phase: Phase, token_sets: Sequence[tuple[int, ...]], places: np.ndarray, hidden: bool) -> np.ndarray:
        """Run one phase's tokens for the leaders of their sets, and let the others follow; returns the wanted rows."""
        leaders = {members: max(members, key=self._cache.reach) for members in phase.counts}
        followers = {members: [other for other in members if other != leader] for members, leader in leaders.items()}
        for other in chain.from_iterable(followers.values()):
            self._cache.detach(other)
        sequences = np.array([leaders[token_sets[place]] for place in phase.places], np.int64)
        wanted = np.array(batch.wanted, np.bool_)[places]
        code, _, ordered = self._split(batch.tokens[places].astype(np.int64), batch.positions[places].astype(np.int64), sequences, wanted)
        plan = self._cache.prepare(ordered)
        assert code == OK
        assert not isinstance(plan, str)
        y = self._run(ordered, plan, wanted, hidden)
        for members, leader in leaders.items():
            for other in followers[members]:
                self._cache.follow(leader, other, phase.counts[members])
        return y

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
        first, last = self._cache.first_position(source), self._cache.last_position(source)
        if last >= 0 and (start > first or (end != OPEN and end <= last)):
            return _REFUSED["share of a range"]
        self._cache.share(source, destination)
        return ACCEPTED

    def keep(self, sequence: int) -> Outcome:
        """Empty every other sequence."""
        self._check_sequence("sequence", sequence)
        self._cache.drop_all(other for other in range(self._n_seq_max) if other != sequence)
        return ACCEPTED

    def shift(self, sequence: int, delta: int) -> Outcome:
        """Add `delta` to every position of `sequence`. Refused: a position that would become negative, or larger than POSITION_MAX."""
        self._check_sequence("sequence", sequence)
        return _outcome(self._cache.shift(sequence, delta))

    def divide(self, sequence: int, divisor: int) -> Outcome:
        """Divide every position of `sequence`, rounding down. Refused where the model has attention."""
        self._check_sequence("sequence", sequence)
        if divisor < 1:
            raise UsageError(f"`divisor` must be at least 1, not {divisor}")
        if not self.capabilities.divide:
            return _REFUSED["division of positions under attention"]
        self._cache.divide(sequence, divisor)
        return ACCEPTED

    def save(self, sequence: int, partial: bool, device: bool) -> tuple[Outcome, bytes]:
        """The logical state of `sequence` as a blob; `partial`: its recurrent half, at the end of its log."""
        self._check_sequence("sequence", sequence)
        if device:
            return _REFUSED["device save"], b""
        read = self._cache.read_recurrent if partial else self._cache.read
        return ACCEPTED, pack(self._model, read(sequence, self._saves_snapshots), partial)

    def restore(self, sequence: int, blob: bytes, partial: bool, device: bool) -> Outcome:
        """Make what `blob` holds the state of `sequence`. Refused, with nothing changed: a blob that is damaged or foreign, or no room; a
        recurrent half where there are fewer tokens, or others' positions."""
        self._check_sequence("sequence", sequence)
        if device:
            return _REFUSED["device save"]
        state = unpack(self._model, blob, partial)
        if isinstance(state, str):
            return refused(state)
        return _outcome(self._cache.write_recurrent(sequence, state) if partial else self._cache.write(sequence, state))

    def save_all(self) -> tuple[Outcome, bytes]:
        """The logical state of every sequence as one blob; what sequences share is in it once."""
        self._check_sequence("sequence", 0)
        return ACCEPTED, pack_session(self._model, self._cache.read_all(self._saves_snapshots), self._unified)

    def restore_all(self, blob: bytes) -> Outcome:
        """Make what `blob` holds the state of every sequence. Refused, with nothing changed: a blob that is damaged or foreign, one of
        another number of sequences or `unified`, or no room."""
        self._check_sequence("sequence", 0)
        state = unpack_session(self._model, blob, self._n_seq_max, self._unified)
        return refused(state) if isinstance(state, str) else _outcome(self._cache.write_all(state))

    def clear(self, data: bool) -> Outcome:
        """Empty every sequence; with `data` overwrite the memory with zero too."""
        self._check_sequence("sequence", 0)
        self._cache.drop_all(range(self._n_seq_max))
        if data:
            self._cache.zero()
        return ACCEPTED

    def positions(self) -> Sequence[tuple[int, int]]:
        """First and last position of every sequence: logs start at 0 unless they were shifted."""
        self._check_sequence("sequence", 0)
        return self._cache.positions()

    def inspect(self, sequence: int) -> Sequence[StateRow]:
        """The logical state, layer by layer: conv and embedding [channels, window] oldest first, recurrent [heads, head_dim, d_state],
        attention [2, tokens, key heads, head_dim]: keys before rotation, then values; [1, ...] where values are parts of keys; index [1,
        tokens, 1, index_dim]: an indexer's raw keys. Empty for an empty sequence."""
        self._check_sequence("sequence", sequence)
        state = self._cache.read(sequence)
        model = self._model
        rows = []
        for index, layer in enumerate(model.embedding_layers if state.states is not None else ()):
            assert state.states is not None
            rows.append(StateRow(layer, "embedding", state.states.embedding[0, index].reshape(model.embedding_shape).T.copy()))
        if state.states is not None:
            rows += recurrent_rows(model, state.states.convolution[0], state.states.recurrent[0])
        for index, layer in enumerate(model.attention_layers if state.keys is not None else ()):
            assert state.keys is not None
            assert state.values is not None
            kept = (turned_keys(state.keys[index], -np.arange(state.token_count), model), state.values[index])
            rows.append(StateRow(layer, "attention", np.stack(kept[: 1 + model.keeps_values])))
            if model.index_width:
                assert state.index_rows is not None
                rows.append(StateRow(layer, "index", state.index_rows[index][None, :, None, :-1].copy()))
        return sorted(rows, key=lambda row: row.layer)

    def snapshot(self) -> Snapshot:
        """The cells of the recurrent side, what their planes hold, and where every sequence is read from next."""
        self._check_sequence("sequence", 0)
        side = self._cache.recurrent
        attention = tuple(self._cache.positions()) if self.capabilities.attention else ()
        if side is None:
            return Snapshot((), (), (), attention)
        cells, is_ring = side.cells, isinstance(side.cells, RingCells)
        count = len(cells.tail)
        held = digests(side.parts, cells.row_count)
        owners = [tuple(np.flatnonzero(cells.tail == cell).tolist()) for cell in range(count)]
        shown = [
            SnapshotCell(own, max((int(cells.position[sequence]) for sequence in own), default=-1), tuple(held[cell::count]))
            for cell, own in enumerate(owners)
        ]
        readings = []
        for sequence in np.flatnonzero(cells.tail != NONE).tolist():
            plane, cell = divmod(int(cells.rows_of(sequence)[0]), count)
            readings.append(Reading(sequence, cell, plane, 0 if is_ring else plane))
        rows = [reading.plane * count + reading.cell for reading in readings]
        states = [tuple(recurrent_rows(self._model, side.convolution_rows[:, row], side.recurrent_rows[:, row])) for row in rows]
        return Snapshot(tuple(shown), tuple(readings), tuple(states), attention, is_ring)

    def close(self) -> None:
        """Give the memory back; every later call is an error."""
        if self._is_open:
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
            for place, members in enumerate(batch.sequences):
                for sequence in members:
                    self._check_sequence("sequences", sequence)
                if len(set(members)) != len(members):
                    raise UsageError(f"`sequences` of token {place} names a sequence twice: {members}")
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
