"""Attention cells as llama.cpp keeps them, with the keys and values in them.

Rules
- Not unified: every sequence has a stream of `size` cells of its own; unified: all share one.
- A cell has a position, the sequences that see it, and a shift that its key still has to be turned by.
- Cells for a ubatch are the first usable ones from the stream's `head` on: empty ones, and with a window those that nobody sees any more.
- What was queued is done before the next decode, not before: copies of whole streams in the order of the queue, then shifts.
- A token sees the cells of its first sequence at positions up to its own, as far as the window reaches.
Source: llama.cpp's src/llama-kv-cache.cpp and src/llama-kv-cells.h.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...spec.errors import EngineAbort
from ..forwards import PreparedModel, turned_keys
from ..kernels.attention import Sight
from ..memory import allocate
from .batches import Ubatch
from .cells import NONE, open_range, padded, required
from .saved_state import FLOAT32_TYPE, BlobError, BlobReader, BlobWriter, Land


class Slots(NamedTuple):
    """Where a ubatch goes: for every stream that it touches, cells of that stream."""

    streams: list[int]
    cells: list[np.ndarray]


class LlamaAttentionCells:
    """The cells of some attention layers, and their memory.

    keys, values  float32 [layers, streams * size, key heads, head_dim]; values have no layers where they are parts of keys
    position      int64 [streams, size], -1 for an empty cell
    shift         int64 [streams, size], what a key has still to be turned by
    owned         bool [streams, size, sequences]
    token         int32 [streams, size], what llama_kv_cell_ext keeps
    heads         of every stream, where the search for cells begins
    """

    def __init__(self, model: PreparedModel, layer_count: int, window: int, n_seq_max: int, size: int, unified: bool, tags: bool) -> None:
        """window: newest positions that are seen, 0 for all; tags: every cell keeps its token and a position in the plane (M-RoPE)."""
        streams = 1 if unified else n_seq_max
        self.size = size
        self.stream_of = [0 if unified else sequence for sequence in range(n_seq_max)]
        self._window = window
        self._tags = tags
        self._model = model
        self.keys = allocate((layer_count, streams * size, model.key_heads, model.head_dim))
        self.values = allocate((layer_count * model.keeps_values, streams * size, model.key_heads, model.head_dim))
        self.position = np.full((streams, size), NONE, np.int64)
        self.shift = np.zeros((streams, size), np.int64)
        self.owned = np.zeros((streams, size, n_seq_max), bool)
        self.token = np.zeros((streams, size), np.int32)
        self.heads = [0] * streams
        self._queued_copies: list[tuple[int, int]] = []
        self._has_shift = [False] * streams

    def clear(self, data: bool) -> None:
        """Every cell is empty; with `data` keys and values are zero. What is queued stays queued."""
        for stream in range(len(self.heads)):
            self._reset(stream)
            self.heads[stream] = 0
        if data:
            self.keys.fill(0)
            self.values.fill(0)

    def _reset(self, stream: int) -> None:
        self.position[stream] = NONE
        self.shift[stream] = 0
        self.owned[stream] = False
        self._has_shift[stream] = False

    def bounds(self, sequence: int) -> tuple[int, int]:
        """First and last position of a sequence, -1 when it has none."""
        stream = self.stream_of[sequence]
        positions = self.position[stream][self.owned[stream, :, sequence]]
        return (int(positions.min()), int(positions.max())) if positions.size else (NONE, NONE)

    def _within(self, stream: int, sequence: int, start: int, end: int) -> np.ndarray:
        """Cells of a sequence with positions start..end-1, ascending."""
        position = self.position[stream]
        return np.flatnonzero(self.owned[stream, :, sequence] & (position >= start) & (position < end))

    def _free(self, stream: int, cells: np.ndarray) -> None:
        self.position[stream, cells] = NONE
        self.shift[stream, cells] = 0
        self.owned[stream, cells] = False

    def _release(self, stream: int, cells: np.ndarray) -> np.ndarray:
        """Forget cells that no sequence sees; which they were."""
        freed: np.ndarray = cells[~self.owned[stream, cells].any(axis=1)]
        self._free(stream, freed)
        return freed

    # --- placing a ubatch ------------------------------------------------------------------------------------------------

    def prepare(self, ubatches: Sequence[Ubatch]) -> list[Slots] | None:
        """Slots for the ubatches one after the other, or None; tried, and undone.

        Undone are the cells that were placed, not those that a window purged, and the heads of the first streams instead of those used.
        """
        tables: tuple[np.ndarray, ...] = (self.position, self.owned, self.token)
        placed: list[tuple[Slots, list[int], list[tuple[np.ndarray, ...]]]] = []
        fits = True
        for ubatch in ubatches:
            slots = self._find(ubatch)
            if slots is None:
                fits = False
                break
            before = [
                tuple(values[stream, cells].copy() for values in tables) for stream, cells in zip(slots.streams, slots.cells, strict=True)
            ]
            placed.append((slots, list(self.heads), before))
            self.place(slots, ubatch)
        for slots, heads, before in reversed(placed):
            for number, (stream, cells) in enumerate(zip(slots.streams, slots.cells, strict=True)):
                for values, old in zip(tables, before[number], strict=True):
                    values[stream, cells] = old
                self.heads[stream] = heads[number]
        return [slots for slots, _, _ in placed] if fits else None

    def _find(self, ubatch: Ubatch) -> Slots | None:
        sequences = ubatch.sequences
        token_count = len(ubatch.positions)
        if len(self.heads) > 1:
            required(token_count % len(sequences) == 0, "n_tokens % ubatch.n_seqs_unq == 0")
            token_count //= len(sequences)
        else:
            sequences = sequences[:1]
        slots = Slots([], [])
        for number, sequence in enumerate(sequences):
            if len(self.heads) > 1:
                required(ubatch.owners[number * token_count] == (sequence,), "ubatch.seq_id[s*n_tokens][0] == seq_id")
            cells = self._usable(self.stream_of[sequence], token_count)
            if cells is None:
                return None
            slots.streams.append(self.stream_of[sequence])
            slots.cells.append(cells)
        return slots

    def _usable(self, stream: int, token_count: int) -> np.ndarray | None:
        """The first usable cells from the head on, around the end."""
        position = self.position[stream]
        head = self.heads[stream]
        if head > int(np.count_nonzero(position != NONE)) + 2 * token_count:
            head = 0
        usable = position == NONE
        if self._window:
            owned = self.owned[stream]
            for cell in np.flatnonzero(~usable & (owned.sum(axis=1) == 1)):
                newest = int(position[owned[:, int(np.argmax(owned[cell]))]].max())
                usable[cell] = newest + 1 - position[cell] >= self._window
        order = np.concatenate([np.arange(head, self.size), np.arange(head)])
        cells: np.ndarray = order[usable[order]][:token_count]
        return cells if len(cells) == token_count else None

    def place(self, slots: Slots, ubatch: Ubatch) -> None:
        """Put the tokens of a ubatch into their cells; positions below one that is overwritten are forgotten."""
        overwritten: dict[int, int] = {}
        place = 0
        for stream, cells in zip(slots.streams, slots.cells, strict=True):
            for cell in cells:
                if self.position[stream, cell] != NONE:
                    old = int(np.argmax(self.owned[stream, cell]))
                    overwritten[old] = max(overwritten.get(old, NONE), int(self.position[stream, cell]))
                    self._free(stream, np.array([cell]))
                self.position[stream, cell] = ubatch.positions[place]
                self.owned[stream, cell, list(ubatch.owners[place])] = True
                self.token[stream, cell] = ubatch.tokens[place]
                place += 1
        for sequence, last in sorted(overwritten.items()):
            first = self.bounds(sequence)[0]
            if first <= last:
                self.remove(sequence, first, last + 1)
        for stream, cells in zip(slots.streams, slots.cells, strict=True):
            self.heads[stream] = int(cells[-1]) + 1

    def sight(self, slots: Slots, ubatch: Ubatch) -> Sight:
        """What the tokens of a placed ubatch write and see."""
        # cells up to the last used one, in the engine's steps, are all computed with; those that are not seen get the weight zero
        used = max(int(np.flatnonzero(self.position[stream] != NONE)[-1]) + 1 for stream in slots.streams)
        swept_count = min(self.size, padded(used))
        written = np.concatenate([stream * self.size + cells for stream, cells in zip(slots.streams, slots.cells, strict=True)])
        seen = []
        for position, owners in zip(ubatch.positions, ubatch.owners, strict=True):
            stream = self.stream_of[owners[0]]
            lowest = max(position - self._window + 1, 0) if self._window else 0
            seen.append(stream * self.size + self._within(stream, owners[0], lowest, position + 1))
        count = np.array([len(cells) for cells in seen], np.int64)
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(count)[:-1]])
        swept = np.array([(self.stream_of[owners[0]] * self.size, swept_count) for owners in ubatch.owners], np.int64)
        return Sight(written.astype(np.int64), first, count, np.concatenate(seen).astype(np.int32), swept)

    # --- operations --------------------------------------------------------------------------------------------------------

    def remove(self, sequence: int, start: int, end: int) -> None:
        """Forget positions start..end-1 of a sequence; the head is pulled back to the first cell that this frees."""
        start, end = open_range(start, end)
        stream = self.stream_of[sequence]
        cells = self._within(stream, sequence, start, end)
        self.owned[stream, cells, sequence] = False
        self._pull_head(stream, self._release(stream, cells))

    def _pull_head(self, stream: int, freed: np.ndarray) -> None:
        if freed.size:
            self.heads[stream] = min(self.heads[stream], int(freed[0]))

    def share(self, source: int, destination: int, start: int, end: int) -> None:
        """Let `destination` see the source's cells. In one stream it keeps what it had; across streams its stream becomes a copy of the
        whole other one, in the metadata at once, in the data before the next decode. Raises EngineAbort for a part across streams."""
        here, there = self.stream_of[source], self.stream_of[destination]
        if here != there:
            self._queue_copy(source, destination, start, end)
        elif source != destination:
            self.owned[here, self._within(here, source, *open_range(start, end)), destination] = True

    def _queue_copy(self, source: int, destination: int, start: int, end: int) -> None:
        here, there = self.stream_of[source], self.stream_of[destination]
        if any(place > 0 and place + 1 < self.size for place in (start, end)):
            raise EngineAbort('GGML_ASSERT(is_full && "seq_cp() is only supported for full KV buffers") failed')
        self._queued_copies.append((here, there))
        cells = np.flatnonzero(self.owned[here, :, source])
        self._reset(there)
        for values in (self.position, self.shift, self.token):
            values[there, cells] = values[here, cells]
        self.owned[there, cells, destination] = True
        self._has_shift[there] = bool(self.shift[there].any())
        self.heads[there] = self.heads[here]

    def keep(self, sequence: int) -> None:
        """Empty every other sequence of the kept one's stream; other streams are not touched."""
        stream = self.stream_of[sequence]
        held = self.owned[stream, :, sequence].copy()
        others = np.flatnonzero(self.owned[stream].any(axis=1) & ~held)
        self.owned[stream] = False
        self.owned[stream, held, sequence] = True
        self._pull_head(stream, self._release(stream, others))

    def move(self, sequence: int, delta: int) -> None:
        """Add `delta` to every position of a sequence, for every sequence that sees the cell; keys turn before the next decode."""
        if delta == 0:
            return
        stream = self.stream_of[sequence]
        cells = self._within(stream, sequence, *open_range(NONE, NONE))
        self.position[stream, cells] += delta
        self.shift[stream, cells] += delta
        self._has_shift[stream] |= bool(cells.size)
        gone = cells[self.position[stream, cells] < 0]
        self._free(stream, gone)
        self.heads[stream] = int(gone[0]) if gone.size else 0

    def divide(self, sequence: int, divisor: int) -> None:
        """Divide every position of a sequence; the keys are to be turned by what the positions lost, in the wrong direction."""
        if divisor == 1:
            return
        stream = self.stream_of[sequence]
        cells = self._within(stream, sequence, *open_range(NONE, NONE))
        old = self.position[stream, cells]
        self.position[stream, cells] = old // divisor
        self.shift[stream, cells] += old - old // divisor
        self._has_shift[stream] |= bool(cells.size)

    def update(self) -> None:
        """Do what is queued: copies of streams, then shifts of all keys that have one. Raises EngineAbort for shifts without a layer whose
        keys could be turned: the graph then has no use for its input, which gets no memory."""
        for here, there in self._queued_copies:
            for rows in (self.keys, self.values):
                rows[:, there * self.size : (there + 1) * self.size] = rows[:, here * self.size : (here + 1) * self.size]
        self._queued_copies.clear()
        if any(self._has_shift):
            required(not self._model.rope_theta or len(self.keys) > 0, "buffer")
            self._turn_keys()
            self.shift[:] = 0
            self._has_shift = [False] * len(self._has_shift)

    def _turn_keys(self) -> None:
        moved = np.flatnonzero(self.shift.ravel() * (self.position.ravel() != NONE))
        self.keys[:, moved] = turned_keys(self.keys[:, moved], self.shift.ravel()[moved], self._model)

    # --- saved states ------------------------------------------------------------------------------------------------------

    def write(self, writer: BlobWriter, sequence: int) -> None:
        """Write the cells of a sequence, or of all (-1), as the engine does: without those that its window hides."""
        writer.write("I", len(self.heads))
        for stream in range(len(self.heads)):
            chosen = self.position[stream] != NONE
            if sequence >= 0:
                chosen &= self.owned[stream, :, sequence]
                if self._window and chosen.any():
                    chosen &= self.bounds(sequence)[1] - self.position[stream] < self._window
            cells = np.flatnonzero(chosen)
            writer.write("I", len(cells))
            if cells.size:
                self._write_fields(writer, stream, cells, sequence)
                self._write_data(writer, stream * self.size + cells)

    def _write_fields(self, writer: BlobWriter, stream: int, cells: np.ndarray, sequence: int) -> None:
        for cell in cells:
            owners = [sequence] if sequence >= 0 else np.flatnonzero(self.owned[stream, cell]).tolist()
            position = int(self.position[stream, cell])
            writer.write("iI", position, len(owners))
            if self._tags:
                writer.write("iii", position, position, int(self.token[stream, cell]))
            writer.write(f"{len(owners)}i", *owners)

    def _write_data(self, writer: BlobWriter, rows: np.ndarray) -> None:
        width = self._model.key_heads * self._model.head_dim
        writer.write("II", 1, len(self.keys))  # values are kept transposed
        for keys in self.keys:
            writer.write("iQ", FLOAT32_TYPE, 4 * width)
            writer.write_tensor(keys[rows])
        for values in self.values:
            writer.write("iII", FLOAT32_TYPE, 4, width)
            writer.write_tensor(values[rows].reshape(len(rows), width).T)

    def read(self, reader: BlobReader, sequence: int) -> None:
        """Restore the cells of a sequence, or of all (-1). Raises BlobError when they cannot be, with what is left of it as the engine
        leaves it."""
        if reader.read("I") != (len(self.heads),):
            raise BlobError("n_stream mismatch")
        if sequence < 0:
            self.clear(True)
        for saved_stream in range(len(self.heads)):
            (cell_count,) = reader.read("I")
            if cell_count == 0:
                continue
            stream = saved_stream if sequence < 0 else self.stream_of[sequence]
            cells = self._read_fields(reader, stream, sequence, cell_count)
            if cells is None or not self._read_data(reader, stream * self.size + cells):
                self._clear_failed(sequence, cells)
                raise BlobError("failed to restore the attention cells")

    def _read_fields(self, reader: BlobReader, stream: int, sequence: int, cell_count: int) -> np.ndarray | None:
        """Where the cells of a blob are placed; None when they cannot be. Raises BlobError at the end of the bytes."""
        if cell_count > self.size:
            return None
        if sequence < 0:
            return self._read_all_fields(reader, stream, cell_count)
        self.remove(sequence, NONE, NONE)
        positions, tokens = [], []
        for _ in range(cell_count):
            position, owner_count = reader.read("iI")
            if owner_count != 1:
                return None
            tokens.append(reader.read("iii")[2] if self._tags else 0)
            reader.read("i")
            positions.append(position)
        ubatch = Ubatch(tuple(tokens), tuple(positions), ((sequence,),) * cell_count, (0,) * cell_count, 1)
        slots = self._find(ubatch)
        if slots is None:
            return None
        self.place(slots, ubatch)
        cells = slots.cells[0]
        required(bool(np.all(self.position[stream, cells] == positions)), "cells.pos_get(idx) == ubatch.pos[i]")
        required(bool(np.all(self.owned[stream, cells, sequence])), "cells.seq_has(idx, dest_seq_id)")
        return cells

    def _read_all_fields(self, reader: BlobReader, stream: int, cell_count: int) -> np.ndarray | None:
        for cell in range(cell_count):
            self.position[stream, cell], owner_count = reader.read("iI")
            if self._tags:
                self.token[stream, cell] = reader.read("iii")[2]
            for _ in range(owner_count):
                (owner,) = reader.read("i")
                if not 0 <= owner < len(self.stream_of):
                    return None
                self.owned[stream, cell, owner] = True
        self.heads[stream] = 0
        return np.arange(cell_count)

    def _read_data(self, reader: BlobReader, rows: np.ndarray) -> bool:
        width = self._model.key_heads * self._model.head_dim
        try:
            is_transposed, layer_count = reader.read("II")
            if not is_transposed or layer_count != len(self.keys):
                return False
            for keys in self.keys:
                if reader.read("iQ") != (FLOAT32_TYPE, 4 * width):
                    return False
                reader.read_tensor(len(rows) * width, self._landing(keys, rows, False))
            for values in self.values:
                if reader.read("iII") != (FLOAT32_TYPE, 4, width):
                    return False
                reader.read_tensor(len(rows) * width, self._landing(values, rows, True))
        except BlobError:
            return False
        return True

    @staticmethod
    def _landing(target: np.ndarray, rows: np.ndarray, is_transposed: bool) -> Land:
        def land(data: np.ndarray) -> None:
            target[rows] = (data.reshape(-1, len(rows)).T if is_transposed else data).reshape(len(rows), *target.shape[1:])

        return land

    def forget(self, sequence: int) -> None:
        """Undo a restore because the other side failed: remove a sequence, and zero the cells that only it saw."""
        if sequence < 0:
            self.clear(True)
            return
        owned = self.owned[self.stream_of[sequence]]
        self._clear_failed(sequence, np.flatnonzero(owned[:, sequence] & (owned.sum(axis=1) == 1)))

    def _clear_failed(self, sequence: int, cells: np.ndarray | None) -> None:
        if sequence < 0:
            self.clear(True)
            return
        self.remove(sequence, NONE, NONE)
        if cells is not None:
            rows = self.stream_of[sequence] * self.size + cells
            self.keys[:, rows] = self.values[:, rows] = 0
