"""The recurrent side of the policy `llamacpp`: cells, their rows, and what a ubatch moves before it is computed.

Rules
- Rows are float32 [layers, n_rows + cells, width]: plane p of cell c is row p * cells + c, and the last `cells` rows are room for the states
  that a ubatch reads, gathered before anything is written, as the real graph does.
- In a ubatch, layer by layer and part by part: the zero cell is zeroed, the slot's states are read, those that only travel along are
  written to their new cells, then the ubatch's own are computed and written.
- A state travels without its snapshots: only plane 0 is written.
- Rows that nothing wrote are zero.
Source: llama.cpp's src/llama-graph.cpp (build_rs), src/models/*.cpp for the snapshots, src/llama-memory-recurrent.cpp for saved states.
"""

import math

import numpy as np

from ..cells import Plan
from ..forwards import PreparedModel
from ..memory import allocate
from .architectures import Architecture
from .batches import Ubatch
from .cells import NONE, LlamaCells
from .saved_state import FLOAT32_TYPE, BlobError, BlobReader, BlobWriter, Land
from .switches import Switches


class LlamaRecurrentMemory:
    """Cells and their memory.

    convolution_rows  float32 [layers, n_rows + cells, window * channels]
    recurrent_rows    float32 [layers, n_rows + cells, heads * d_state * head_dim]
    """

    def __init__(self, model: PreparedModel, n_seq_max: int, n_rs_seq: int, architecture: Architecture, switches: Switches) -> None:
        self.cells = LlamaCells(n_seq_max, n_rs_seq, switches)
        self._planes = 1 + n_rs_seq
        self._n_rows = self._planes * n_seq_max
        self._fills_windows = architecture.fills_windows and n_rs_seq > 0
        self._model_layer_count = model.dimensions["n_layer"]
        shapes = model.convolution_shape, model.recurrent_shape if len(model.recurrent_shape) > 1 else (0, 0)
        self.convolution_rows, self.recurrent_rows = (
            allocate((len(model.recurrent_layers), self._n_rows + n_seq_max, math.prod(shape))) for shape in shapes
        )
        is_turned = not architecture.own_windows, not architecture.own_states
        self._parts = tuple(zip((self.convolution_rows, self.recurrent_rows), shapes, is_turned, strict=True))

    def clear(self, data: bool) -> None:
        """Every cell is empty; with `data` every row is zero."""
        self.cells.clear()
        if data:
            self.convolution_rows.fill(0)
            self.recurrent_rows.fill(0)

    def stage(self, ubatch: Ubatch) -> Plan:
        """Place a prepared ubatch, gather what it reads, and move what only travels along; where its sets then read and write."""
        cells, size, sets = self.cells, self.cells.size, ubatch.set_count
        cells.place(ubatch)
        slot = range(cells.head, cells.head + cells.count)
        sources = [cells.read_row(cell) for cell in slot]
        room = [self._n_rows + number for number in range(len(sources))]
        for rows in (self.convolution_rows, self.recurrent_rows):
            if cells.zero_cell != NONE:
                rows[:, cells.zero_cell] *= 0  # as the engine does it: what is not finite stays so
            rows[:, room] = rows[:, sources]
            rows[:, slot[sets:]] = rows[:, room[sets:]]
        plane_row = np.full((sets, self._planes), NONE, np.int64)
        written = self._planes if self._fills_windows else min(ubatch.set_tokens, self._planes)
        for plane in range(written):
            plane_row[:, plane] = plane * size + cells.head + np.arange(sets)
        return Plan(np.array(slot[:sets], np.int64), np.array(room[:sets], np.int64), plane_row, np.full(sets, NONE, np.int64))

    # --- saved states ------------------------------------------------------------------------------------------------------

    def write(self, writer: BlobWriter, sequence: int) -> None:
        """Write the states of a sequence, or of all (-1), as the engine does."""
        rows = self.cells.write_fields(writer, sequence)
        writer.write("II", 0, self._model_layer_count)
        for part, shape, is_turned in self._parts:
            for layer in range(len(part)):
                writer.write("iQ", FLOAT32_TYPE, 4 * part.shape[2])
                if rows:
                    values = part[layer, rows].reshape(len(rows), *shape)
                    writer.write_tensor(_turned(values) if is_turned else values)

    def read(self, reader: BlobReader, sequence: int) -> None:
        """Restore the states of a sequence, or of all (-1). Raises BlobError when they cannot be, with what is left of it as the engine
        leaves it."""
        (cell_count,) = reader.read("I")
        if sequence < 0 and cell_count <= self.cells.size:
            self.clear(True)
        is_placed = self.cells.read_fields(reader, sequence, cell_count)
        head = self.cells.head
        if not (is_placed and self._read_data(reader, head, cell_count)):
            self._clear_failed(sequence, head, cell_count if is_placed else 0)
            raise BlobError("failed to restore the recurrent memory")
        if self.cells.n_rs_seq:
            for other in range(self.cells.size) if sequence < 0 else (sequence,):
                self.cells.rollback_index[other] = 0

    def _read_data(self, reader: BlobReader, head: int, cell_count: int) -> bool:
        try:
            is_transposed, layer_count = reader.read("II")
            if layer_count != self._model_layer_count or cell_count > self.cells.size or is_transposed:
                return False
            for part, shape, is_turned in self._parts:
                for layer in range(len(part)):
                    if reader.read("iQ") != (FLOAT32_TYPE, 4 * part.shape[2]):
                        return False
                    if cell_count:
                        reader.read_tensor(cell_count * part.shape[2], self._landing(part[layer], shape, is_turned, head, cell_count))
        except BlobError:
            return False
        return True

    def _clear_failed(self, sequence: int, head: int, cell_count: int) -> None:
        if sequence < 0:
            self.clear(True)
            return
        self.cells.remove(sequence, NONE, NONE)
        for part in (self.convolution_rows, self.recurrent_rows):
            part[:, head : head + cell_count] = 0

    @staticmethod
    def _landing(rows: np.ndarray, shape: tuple[int, ...], is_turned: bool, head: int, cell_count: int) -> Land:
        def land(values: np.ndarray) -> None:
            if not is_turned:
                rows[head : head + cell_count] = values.reshape(cell_count, -1)
                return
            rows[head : head + cell_count] = _turned(values.reshape(cell_count, *shape[:-2], *shape[:-3:-1])).reshape(cell_count, -1)

        return land


def _turned(rows: np.ndarray) -> np.ndarray:
    """Rows with the last two axes exchanged: the engine has the taps of a channel together, and the state channels of a head's channel."""
    return rows.swapaxes(-1, -2)
