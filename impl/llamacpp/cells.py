"""Cells as llama.cpp keeps them: whose state is in which cell, and where a ubatch reads and writes.

Rules
- A cell belongs to a set of sequences. Position is the cell's, shared by its owners; the rollback index is the sequence's.
- cells[sequence].tail, the sequence's cell, is kept in a cell of that number, whoever that cell belongs to: `tail` is a list of its own here.
- A slot is a run of cells, `head` to `head + count - 1`: those of the ubatch first, swapped into its order, then those that lie between.
- `source` is what a later batch must read a cell from; `batch_source` is what this ubatch reads it from. Placing a ubatch changes both.
- Placing can be tried: `prepare` restores cells, head and count of used cells, and nothing else.
Weaknesses of the real class are the methods under "what goes wrong".
Source: llama.cpp's src/llama-memory-recurrent.cpp.
"""

from collections.abc import Sequence

from ...spec.errors import EngineAbort
from .batches import Ubatch
from .saved_state import BlobReader, BlobWriter
from .switches import Switches

NONE = -1
POSITION_END = (1 << 31) - 1
CELLS_STEP = 256


def required(condition: bool, what: str) -> None:
    """Raise EngineAbort unless the engine's own assertion holds."""
    if not condition:
        raise EngineAbort(f"GGML_ASSERT({what}) failed")


def padded(cells: int) -> int:
    """A number of attention cells, rounded up to the engine's step."""
    return -(-cells // CELLS_STEP) * CELLS_STEP


def open_range(start: int, end: int) -> tuple[int, int]:
    """Negative ends of a range of positions are open."""
    return max(start, 0), POSITION_END if end < 0 else end


class LlamaCells:
    """The bookkeeping of one recurrent memory of `n_seq_max` cells.

    position, source, batch_source  of every cell, -1 for none
    owners          of every cell, the sequences whose state it holds
    tail            of every sequence, its cell
    rollback_index  of every sequence, the plane that its state is read from
    head, count     the slot of the last ubatch
    zero_cell       the cell that serves the last ubatch as the zero state, -1 for none
    """

    def __init__(self, n_seq_max: int, n_rs_seq: int, switches: Switches) -> None:
        self.size = n_seq_max
        self.n_rs_seq = n_rs_seq
        self._switches = switches
        self.batch_source = [NONE] * n_seq_max
        self.clear()

    def clear(self) -> None:
        """Every cell is empty."""
        self.position = [NONE] * self.size
        self.source = [NONE] * self.size
        self.owners: list[set[int]] = [set() for _ in range(self.size)]
        self.tail = [NONE] * self.size
        self.rollback_index = [0] * self.size
        self.head = self.count = self._used = 0
        self.zero_cell = NONE

    def bounds(self, sequence: int) -> tuple[int, int]:
        """First and last position: a cell knows one."""
        positions = [position for position, owners in zip(self.position, self.owners, strict=True) if sequence in owners]
        return (min(positions), max(max(positions), NONE)) if positions else (NONE, NONE)

    # --- placing a ubatch ------------------------------------------------------------------------------------------------

    def prepare(self, ubatches: Sequence[Ubatch]) -> bool:
        """Whether the ubatches can be placed one after the other; tried, and undone."""
        lists = (self.position, self.source, self.batch_source, self.tail)
        before = [list(values) for values in lists], [set(owners) for owners in self.owners], self._used, self.head
        fits = all(self.place(ubatch) for ubatch in ubatches)
        (self.position, self.source, self.batch_source, self.tail), self.owners, self._used, self.head = before
        return fits

    def place(self, ubatch: Ubatch) -> bool:
        """Find a slot for the ubatch and say where its sets read; whether it was found."""
        firsts = [ubatch.owners[number * ubatch.set_tokens] for number in range(ubatch.set_count)]
        if self.head > self._used + 2 * len(firsts):
            self.head = 0
        for owners in firsts:
            for other in owners[1:]:
                self._leave(other)
        low, high = self._give_cells([owners[0] for owners in firsts])
        self._gather([owners[0] for owners in firsts], low)
        for number, owners in enumerate(firsts):
            cell = low + number
            self.position[cell] = ubatch.positions[(number + 1) * ubatch.set_tokens - 1]
            self.owners[cell] = set(owners)
            for sequence in owners:
                self.tail[sequence] = cell
        self._stage_sources(low, high)
        self.head, self.count = low, high - low + 1
        self._used = sum(map(bool, self.owners))
        return self.count >= len(firsts)

    def _leave(self, sequence: int) -> None:
        """The sequence has no cell any more; an empty one is forgotten."""
        cell = self.tail[sequence]
        if cell >= 0:
            self.owners[cell].discard(sequence)
            self.tail[sequence] = NONE
            if not self.owners[cell]:
                self.position[cell] = self.source[cell] = NONE
                self._used -= 1

    def _next_empty(self, cell: int) -> int:
        """The first empty cell from `cell` on, around the end; `cell` itself when all are full."""
        return next((place % self.size for place in range(cell, cell + self.size) if not self.owners[place % self.size]), cell % self.size)

    def _give_cells(self, sequences: Sequence[int]) -> tuple[int, int]:
        """A cell of its own for every first sequence of a set; the lowest and the highest."""
        low, high = self.size - 1, 0
        empty = self._next_empty(self.head)
        for number, sequence in enumerate(sequences):
            old = self.tail[sequence]
            required(old < 0 or sequence in self.owners[old], "cell.has_seq_id(seq_id)")
            if old < 0 or len(self.owners[old]) != 1:
                required(not self.owners[empty], "empty_cell.is_empty()")
                if old >= 0:  # what it inherits is read when the ubatch is computed
                    self.position[empty], self.source[empty] = self.position[old], self.source[old]
                    self.owners[old].discard(sequence)
                    self.owners[empty].add(sequence)
                self.tail[sequence] = empty
                if number + 1 < len(sequences):
                    empty = self._next_empty(empty + 1)
            low, high = min(low, self.tail[sequence]), max(high, self.tail[sequence])
        return low, high

    def _gather(self, sequences: Sequence[int], low: int) -> None:
        """Swap the cells of the sets to `low`, `low + 1`, ... in the ubatch's order."""
        for number, sequence in enumerate(sequences):
            here, there = low + number, self.tail[sequence]
            if here == there:
                continue
            for values in (self.position, self.source):
                values[here], values[there] = values[there], values[here]
            self.owners[here], self.owners[there] = self.owners[there], self.owners[here]
            swapped = {here: there, there: here}
            self.tail = [swapped.get(cell, cell) for cell in self.tail]

    def _stage_sources(self, low: int, high: int) -> None:
        """What every cell of the slot is read from; the zero cell is the first of them that no cell refers to."""
        referred = set(self.source)
        self.zero_cell = next((cell for cell in range(low, high + 1) if cell not in referred), NONE)
        for cell in range(low, high + 1):
            if self.source[cell] < 0:
                required(self.zero_cell >= 0, "rs_z >= 0")
                self.batch_source[cell] = self.zero_cell
            else:
                self.batch_source[cell] = self.source[cell]
            self.source[cell] = cell

    # --- what goes wrong ---------------------------------------------------------------------------------------------------

    def read_row(self, cell: int) -> int:
        """The row that a cell of the slot is read from. Reading consumes the rollback, and only the lowest owner is asked for it: the
        rollback of another owner stays, and is applied to whatever it reads next."""
        plane = 0
        if self.n_rs_seq and self.owners[cell]:
            sequence = min(self.owners[cell])
            plane, self.rollback_index[sequence] = self.rollback_index[sequence], 0
        return plane * self.size + self.batch_source[cell]

    def remove(self, sequence: int, start: int, end: int) -> bool:
        """Forget positions start..end-1.

        A tail is taken back when the planes are as many as its tokens, whether or not they were written since; the position moves for
        every owner of the cell, the rollback index for one. A middle range is answered with yes, and nothing. A removal of everything
        keeps the rollback index unless both ends are open.
        """
        start, end = open_range(start, end)
        if start == 0 and end == POSITION_END:
            self.rollback_index[sequence] = 0
        cell = self.tail[sequence]
        if cell >= 0:
            last = self.position[cell]
            if 0 < start <= last < end:
                return self._take_back(sequence, cell, last - start + 1)
            if start <= last < end:
                self.tail[sequence] = NONE
        self._forget(sequence, start, end)
        return True

    def _take_back(self, sequence: int, cell: int, token_count: int) -> bool:
        if self.rollback_index[sequence] or token_count > self.n_rs_seq:
            return False
        if self._switches.refuses_shared_rollback and len(self.owners[cell]) > 1:
            return False
        self.rollback_index[sequence] = token_count
        self.position[cell] -= token_count
        return True

    def _forget(self, sequence: int, start: int, end: int) -> None:
        first_freed = self.size
        for cell in range(self.size):
            if not start <= self.position[cell] < end or sequence not in self.owners[cell]:
                continue
            self.owners[cell].discard(sequence)
            if not self.owners[cell]:
                self._used -= self.position[cell] >= 0
                self.position[cell] = self.source[cell] = NONE
                first_freed = min(first_freed, cell)
        self.head = min(self.head, first_freed)

    def share(self, source: int, destination: int) -> None:
        """Make `destination` an owner of the source's cell. The pending rollback of the source is not shared, that of the destination
        stays, and the range that was asked for is not looked at."""
        if source == destination:
            return
        self._leave(destination)
        cell = self.tail[source]
        if cell >= 0:
            self.owners[cell].add(destination)
            self.tail[destination] = cell

    def keep(self, sequence: int) -> None:
        """Empty every other sequence; their rollback indices stay."""
        first_freed = self.size
        for cell in range(self.size):
            if cell != sequence:
                self.tail[cell] = NONE
            if sequence in self.owners[cell]:
                self.owners[cell] = {sequence}
                continue
            self._used -= self.position[cell] >= 0
            self.position[cell] = self.source[cell] = NONE
            self.owners[cell] = set()
            first_freed = min(first_freed, cell)
        self.head = min(self.head, first_freed)

    def shift(self, sequence: int, delta: int) -> None:
        """Move the position of the sequence's cell, for every owner."""
        cell = self.tail[sequence]
        if cell >= 0 and self.position[cell] >= 0 and sequence in self.owners[cell]:
            self.position[cell] += delta

    def divide(self, sequence: int, divisor: int) -> None:
        """Divide the position of the sequence's cell, for every owner."""
        cell = self.tail[sequence]
        if cell >= 0 and self.position[cell] >= 0 and sequence in self.owners[cell]:
            self.position[cell] //= divisor

    # --- saved states ------------------------------------------------------------------------------------------------------

    def write_fields(self, writer: BlobWriter, sequence: int) -> list[int]:
        """Write the cells of a sequence (-1: all); the rows that hold their states. Raises EngineAbort for owners with different
        rollback indices in a save of the whole session."""
        cells = [cell for cell in range(self.size) if (self.owners[cell] if sequence < 0 else sequence in self.owners[cell])]
        rows = []
        for cell in cells:
            planes = {self.rollback_index[owner] for owner in (self.owners[cell] if sequence < 0 else (sequence,))}
            if not self.n_rs_seq:
                planes = {0}
            if len(planes) > 1:
                raise EngineAbort("cannot write shared recurrent state with different rollback indices")
            rows.append(planes.pop() * self.size + (self.source[cell] if self.source[cell] >= 0 else cell))
        if writer.is_device and sum(cell - 1 not in cells for cell in cells) > 1:
            raise EngineAbort("cannot save/load multiple ranges of cells to/from device memory")
        writer.write("I", len(cells))
        for cell in cells:
            owners = sorted(self.owners[cell]) if sequence < 0 else []
            writer.write(f"iI{len(owners)}i", self.position[cell], len(owners), *owners)
        return rows

    def read_fields(self, reader: BlobReader, sequence: int, cell_count: int) -> bool:
        """Place the cells of a blob; whether they could be. They are `head` and those after it. Raises BlobError at the end of the bytes."""
        if cell_count > self.size:
            return False
        if sequence < 0:
            return self._read_all_fields(reader, cell_count)
        self.remove(sequence, NONE, NONE)
        if cell_count == 0:
            return True
        positions = []
        for _ in range(cell_count):
            position, owner_count = reader.read("iI")
            if owner_count:
                return False
            positions.append(position)
        blank = (0,) * cell_count
        # the sequence is named for the first token only, which is all that placing looks at
        if not self.place(Ubatch(blank, tuple(positions), ((sequence,),) * cell_count, blank, 1)):
            return False
        required(self.head + cell_count <= self.size, "head + cell_count <= size")
        last = self.head + cell_count - 1
        required(self.position[self.head] == positions[0], "cells[head].pos == ubatch.pos[0]")
        required(self.position[last] == positions[-1], "cells[head + cell_count - 1].pos == ubatch.pos[cell_count - 1]")
        required(sequence in self.owners[self.head] and sequence in self.owners[last], "cells[head].has_seq_id(dest_seq_id)")
        self._settle(cell_count)
        return True

    def _read_all_fields(self, reader: BlobReader, cell_count: int) -> bool:
        for cell in range(cell_count):
            self.position[cell], owner_count = reader.read("iI")
            for _ in range(owner_count):
                (owner,) = reader.read("i")
                if not 0 <= owner < self.size:
                    return False
                self.owners[cell].add(owner)
                if self.tail[owner] != NONE:
                    return False
                self.tail[owner] = cell
        self.head, self._used = 0, cell_count
        self._settle(cell_count)
        return True

    def _settle(self, cell_count: int) -> None:
        """Restored cells are read from themselves."""
        for cell in range(self.head, self.head + cell_count):
            self.source[cell] = cell
