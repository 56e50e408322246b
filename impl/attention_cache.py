"""The attention side of a cache: keys and values of every token, in cells.

Rules
- The cells of a sequence are listed in the order of its positions, from 0: entry i is the cell of position i. What is not listed is not read.
- Unified: all sequences draw from one pool, and sharing a sequence shares its cells (a cell is written once, so sharers stay independent).
  Per sequence: every sequence has n_ctx cells of its own, and sharing copies them.
- A batch that does not fit is refused before anything changes.
- Keys are stored after rotation by their position.
- Layers with a window keep their own keys and values, in the same cells as the others: a window limits what is seen, not what is kept, so
  that a rollback and the restore of a partial save hold beyond it.
Source: llama.cpp's llama-kv-cache.cpp, for streams and the unified pool.
"""

import numpy as np

from .batches import SplitBatch
from .forwards import Sights
from .kernels import kernel
from .kernels.attention import NO_SIGHT, Sight
from .memory import Allocate, allocate


@kernel
def _append(
    segment_sequence: np.ndarray,
    segment_start: np.ndarray,
    cell_of: np.ndarray,
    length: np.ndarray,
    reference_count: np.ndarray,
    free_cells: np.ndarray,
    free_count: int,
) -> int:
    """List a cell for every token of a batch, from the pool; returns the new count of free cells."""
    for i in range(segment_sequence.size):
        sequence = segment_sequence[i]
        for _ in range(segment_start[i + 1] - segment_start[i]):
            free_count -= 1
            cell = free_cells[free_count]
            reference_count[cell] = 1
            cell_of[sequence, length[sequence]] = cell
            length[sequence] += 1
    return free_count


@kernel
def _release(cells: np.ndarray, reference_count: np.ndarray, free_cells: np.ndarray, free_count: int) -> int:
    """Give up one reference to each of `cells`; returns the new count of free cells."""
    for i in range(cells.size - 1, -1, -1):
        cell = cells[i]
        reference_count[cell] -= 1
        if reference_count[cell] == 0:
            free_cells[free_count] = cell
            free_count += 1
    return free_count


@kernel
def _acquire(cells: np.ndarray, reference_count: np.ndarray) -> None:
    for i in range(cells.size):
        reference_count[cells[i]] += 1


@kernel
def _grow(segment_sequence: np.ndarray, segment_start: np.ndarray, length: np.ndarray) -> None:
    for i in range(segment_sequence.size):
        length[segment_sequence[i]] += segment_start[i + 1] - segment_start[i]


@kernel
def _first_too_long(segment_sequence: np.ndarray, segment_start: np.ndarray, length: np.ndarray, n_ctx: int) -> int:
    """The first sequence that a batch would make longer than n_ctx, or -1."""
    added = np.empty(length.size, np.int64)  # only the batch's own sequences have a meaning: the cost follows the batch
    for i in range(segment_sequence.size):
        added[segment_sequence[i]] = 0
    for i in range(segment_sequence.size):
        sequence = segment_sequence[i]
        added[sequence] += segment_start[i + 1] - segment_start[i]
        if length[sequence] + added[sequence] > n_ctx:
            return int(sequence)
    return -1


def attention_bytes(
    layer_count: int,
    key_heads: int,
    head_dim: int,
    n_seq_max: int,
    n_ctx: int,
    unified: bool,
    keeps_values: bool = True,
    index_width: int = 0,
) -> int:
    """Bytes that a cache will allocate."""
    n_cells = n_seq_max * n_ctx
    lists = n_seq_max * (n_cells if unified else n_ctx)
    return layer_count * n_cells * ((1 + keeps_values) * key_heads * head_dim + index_width) * 4 + lists * 4 + n_cells * 12


@kernel
def _sight(segment_sequence: np.ndarray, segment_start: np.ndarray, length: np.ndarray, cell_of: np.ndarray, window: int) -> Sight:
    """What the tokens of a batch write and see, once their cells are listed; window 0: everything before them."""
    tokens = segment_start[segment_sequence.size]
    cell, first, count = np.empty(tokens, np.int64), np.empty(tokens, np.int64), np.empty(tokens, np.int64)
    left = np.empty(length.size, np.int64)  # tokens of a sequence of the batch that are still to come
    for i in range(segment_sequence.size):
        left[segment_sequence[i]] = 0
    for i in range(segment_sequence.size):
        left[segment_sequence[i]] += segment_start[i + 1] - segment_start[i]
    for i in range(segment_sequence.size):
        sequence = segment_sequence[i]
        for place in range(segment_start[i], segment_start[i + 1]):
            position = length[sequence] - left[sequence]
            left[sequence] -= 1
            seen = position + 1 if window == 0 else min(position + 1, window)
            cell[place] = cell_of[sequence, position]
            count[place] = seen
            first[place] = sequence * cell_of.shape[1] + position + 1 - seen
    # not a constant, which would be read-only: both sights of a model are of one type
    return Sight(cell, first, count, cell_of.ravel(), np.empty((0, 2), np.int64))


class AttentionCache:
    """Keys and values, and which cells hold whose.

    keys, values     of the layers without and with a window: float32 [layers, cells, key heads, head_dim] each; values have no channels
                     where they are parts of keys
    index_rows       what an indexer keeps of a token, in the same cells: float32 [layers of both kinds, cells, index width]
    cell_of          int32 [sequences, most tokens of a sequence]
    length           int64 [sequences], tokens of a sequence
    reference_count  int32 [cells], sequences that list a cell (unified only)
    free_cells       int64 [cells], a stack of which the first `free_count` are free (unified only)
    """

    def __init__(
        self,
        is_windowed: tuple[bool, ...],
        window: int,
        key_heads: int,
        head_dim: int,
        n_seq_max: int,
        n_ctx: int,
        unified: bool,
        poison: bool = False,
        keeps_values: bool = True,
        index_width: int = 0,
        allocate: Allocate = allocate,
    ) -> None:
        """is_windowed: of every attention layer, in order; window: newest tokens that such a layer sees."""
        n_cells = n_seq_max * n_ctx
        self.window = window
        # where the arrays of an attention layer are: which of the two, and which of its layers
        self._homes = [(int(windowed), is_windowed[:layer].count(windowed)) for layer, windowed in enumerate(is_windowed)]
        self.n_ctx = n_ctx
        self.unified = unified
        full, windowed = ((is_windowed.count(kind), n_cells, key_heads, head_dim) for kind in (False, True))
        self.keys = (allocate(full, poison), allocate(windowed, poison))
        value_dim = head_dim if keeps_values else 0
        self.values = (allocate((*full[:-1], value_dim), poison), allocate((*windowed[:-1], value_dim), poison))
        self.index_rows = allocate((len(is_windowed), n_cells, index_width), poison)
        self.length = np.zeros(n_seq_max, np.int64)
        if unified:
            self.cell_of = np.empty((n_seq_max, n_cells), np.int32)
            self.reference_count = np.zeros(n_cells, np.int32)
            self.free_cells = np.arange(n_cells - 1, -1, -1, dtype=np.int64)
            self.free_count = n_cells
        else:
            self.cell_of = np.arange(n_cells, dtype=np.int32).reshape(n_seq_max, n_ctx)

    def cells(self, sequence: int) -> np.ndarray:
        """The cells of `sequence`, in the order of positions; int32 [tokens], a view."""
        return self.cell_of[sequence, : self.length[sequence]]

    def prepare(self, batch: SplitBatch) -> str | None:
        """The reason why `batch` does not fit, or None. Changes nothing."""
        if self.unified:
            if len(batch.tokens) > self.free_count:
                return f"{len(batch.tokens)} tokens need more than the {self.free_count} attention cells that are free"
            return None
        sequence = _first_too_long(batch.segment_sequence, batch.segment_start, self.length, self.n_ctx)
        return None if sequence < 0 else f"sequence {sequence} would be longer than n_ctx={self.n_ctx}"

    def refuses_tokens(self, added: dict[int, int], cell_count: int) -> str | None:
        """The reason why sequences cannot be given so many tokens, `cell_count` different ones altogether, or None."""
        if self.unified:
            return (
                None
                if cell_count <= self.free_count
                else f"{cell_count} tokens need more than the {self.free_count} attention cells that are free"
            )
        for sequence, count in added.items():
            if self.length[sequence] + count > self.n_ctx:
                return f"sequence {sequence} would be longer than n_ctx={self.n_ctx}"
        return None

    def follow(self, leader: int, follower: int, token_count: int) -> None:
        """Give `follower` the newest `token_count` tokens of `leader`: their cells when unified, else copies."""
        new = self.cells(leader)[len(self.cells(leader)) - token_count :]
        start = int(self.length[follower])
        own = self.cell_of[follower, start : start + token_count]
        if self.unified:
            _acquire(new, self.reference_count)
            own[:] = new
        else:
            self._copy(int(new[0]), int(own[0]), token_count)
        self.length[follower] = start + token_count

    def _copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` neighbouring cells."""
        for rows in (*self.keys, *self.values, self.index_rows):
            rows[:, target : target + count] = rows[:, source : source + count]

    def apply(self, batch: SplitBatch) -> None:
        """List a cell for every token of a batch that fits."""
        if self.unified:
            self.free_count = _append(
                batch.segment_sequence,
                batch.segment_start,
                self.cell_of,
                self.length,
                self.reference_count,
                self.free_cells,
                self.free_count,
            )
        else:
            _grow(batch.segment_sequence, batch.segment_start, self.length)

    def sights(self, batch: SplitBatch) -> Sights:
        """What the tokens of an applied batch write and see, for layers without and with a window."""
        full, windowed = (
            _sight(batch.segment_sequence, batch.segment_start, self.length, self.cell_of, window) if len(keys) else NO_SIGHT
            for keys, window in zip(self.keys, (0, self.window), strict=True)
        )
        return full, windowed

    def remove_tail(self, sequence: int, token_count: int) -> None:
        """Forget the newest `token_count` tokens, at most all."""
        if self.unified:
            gone = self.cells(sequence)[len(self.cells(sequence)) - token_count :]
            self.free_count = _release(gone, self.reference_count, self.free_cells, self.free_count)
        self.length[sequence] -= token_count

    def drop(self, sequence: int) -> None:
        """Forget all tokens of the sequence."""
        self.remove_tail(sequence, int(self.length[sequence]))

    def share(self, source: int, destination: int) -> None:
        """Make `destination` hold what `source` holds; what it held is dropped."""
        if source == destination:
            return
        self.drop(destination)
        cells = self.cells(source)
        length = len(cells)
        if self.unified:
            _acquire(cells, self.reference_count)
            self.cell_of[destination, :length] = cells
        elif length:
            self._copy(int(self.cell_of[source, 0]), int(self.cell_of[destination, 0]), length)
        self.length[destination] = length

    def refuses(self, sequence: int, token_count: int) -> str | None:
        """The reason why `token_count` tokens cannot replace what `sequence` holds, or None."""
        room = self.n_ctx
        if self.unified:
            own = int(np.count_nonzero(self.reference_count[self.cells(sequence)] == 1))
            room = self.free_count + own
        return (
            None
            if token_count <= room
            else f"{token_count} tokens need more attention cells than the {room} that sequence {sequence} can have"
        )

    def read(self, sequence: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys and values in the order of positions, float32 [layers, tokens, key heads, head_dim], and index rows, [layers, tokens, index
        width]; copied."""
        return self._gathered(self.cells(sequence))

    def _gathered(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        keys = [self.keys[kind][place, cells] for kind, place in self._homes]
        values = [self.values[kind][place, cells] for kind, place in self._homes]
        return np.stack(keys), np.stack(values), self.index_rows[:, cells]

    def write(self, sequence: int, keys: np.ndarray, values: np.ndarray, index: np.ndarray) -> None:
        """Replace what `sequence` holds by what `read` gave; `refuses` must have said None."""
        self.drop(sequence)
        length = keys.shape[1]
        if self.unified:
            self.free_count -= length
            cells = self.free_cells[self.free_count : self.free_count + length][::-1]
            self.reference_count[cells] = 1
            self.cell_of[sequence, :length] = cells
        self.length[sequence] = length
        self._scatter(self.cells(sequence), keys, values, index)

    def _scatter(self, cells: np.ndarray, keys: np.ndarray, values: np.ndarray, index: np.ndarray) -> None:
        self.index_rows[:, cells] = index
        for layer, (kind, place) in enumerate(self._homes):
            self.keys[kind][place, cells] = keys[layer]
            self.values[kind][place, cells] = values[layer]

    def read_all(self) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray, np.ndarray]:
        """For every sequence int64 [tokens], which of the keys and values are its own; keys, values and index rows of every cell in use, once.

        Keys and values are float32 [layers, cells, key heads, head_dim], index rows [layers, cells, index width].
        """
        listed = np.concatenate([self.cells(sequence) for sequence in range(len(self.length))])
        used, first, places = np.unique(listed, return_index=True, return_inverse=True)
        order = np.argsort(first)  # of first mention: what is saved does not depend on where it lay
        own = np.split(np.argsort(order)[places], np.cumsum(self.length)[:-1])
        return tuple(own), *self._gathered(used[order])

    def refuses_all(self, cells: tuple[np.ndarray, ...]) -> str | None:
        """The reason why sequences with these cells cannot replace what all of them hold, or None."""
        longest = max(len(own) for own in cells)
        if self.unified:
            used, room = len(np.unique(np.concatenate(cells))), len(self.free_cells)
            return None if used <= room else f"{used} tokens need more than the {room} attention cells that there are"
        return None if longest <= self.n_ctx else f"a sequence of {longest} tokens would be longer than n_ctx={self.n_ctx}"

    def write_all(self, cells: tuple[np.ndarray, ...], keys: np.ndarray, values: np.ndarray, index: np.ndarray) -> None:
        """Give every sequence, all of them being empty, its cells, as `read_all` told them; `refuses_all` must have said None."""
        if self.unified:
            self.free_count -= keys.shape[1]
            placed = self.free_cells[self.free_count : self.free_count + keys.shape[1]].copy()
            self._scatter(placed, keys, values, index)
        for sequence, own in enumerate(cells):
            self.length[sequence] = len(own)
            if self.unified:
                self.cell_of[sequence, : len(own)] = placed[own]
                _acquire(self.cells(sequence), self.reference_count)
            else:
                self._scatter(self.cells(sequence), keys[:, own], values[:, own], index[:, own])

    def zero(self) -> None:
        """Overwrite all memory with zero."""
        for rows in (*self.keys, *self.values, self.index_rows):
            rows.fill(0)
