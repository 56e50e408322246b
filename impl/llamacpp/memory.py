"""Both sides of the engine's memory: recurrent cells, and for a hybrid one or two sets of attention cells beside them.

Rules
- Batches are cut for the recurrent side, and prepared on it first; preparing is undone, applying is not.
- The first position is the larger and the last the smaller of the two sides'.
- With a window there are two sets of attention cells, of layers without and with it; only the windowed one is asked for positions, and only
  it goes into a partial save.
Source: llama.cpp's src/llama-memory-hybrid.cpp, src/llama-memory-hybrid-iswa.cpp, src/llama-kv-cache-iswa.cpp and src/llama-context.cpp.
"""

from typing import NamedTuple

from ...spec.configuration import CacheConfiguration
from ..cells import Plan
from ..forwards import FULL, WINDOWED, Memory, PreparedModel, Sights
from ..kernels.attention import NO_SIGHT
from ..memory import allocate
from .architectures import Architecture
from .attention_cells import LlamaAttentionCells, Slots
from .batches import LlamaBatch, Ubatch
from .cells import padded
from .recurrent_memory import LlamaRecurrentMemory
from .saved_state import BlobError, BlobReader, BlobWriter
from .switches import Switches

N_BATCH_MAX = 4096


class Placed(NamedTuple):
    """A ubatch, and the slots that were prepared for it in every set of attention cells."""

    ubatch: Ubatch
    slots: tuple[Slots, ...]


class LlamaMemory:
    """The memory of one context.

    arrays      what a forward works in
    n_batch, n_ubatch, n_ctx  as the engine makes them of what was asked; n_ctx is the cells of a stream
    n_rs_seq    snapshots as the engine really keeps them
    """

    def __init__(self, model: PreparedModel, configuration: CacheConfiguration, architecture: Architecture, switches: Switches) -> None:
        n_seq_max, self._unified = configuration.n_seq_max, bool(configuration.unified)
        self.is_hybrid = bool(model.attention_layers)
        self.has_window = bool(model.windowed_layers)
        pool = padded(configuration.n_ctx * n_seq_max) if self._unified else padded(configuration.n_ctx) * n_seq_max
        self.n_ctx = pool if self._unified else pool // n_seq_max
        self.n_batch = min(pool, N_BATCH_MAX) if self.is_hybrid else N_BATCH_MAX
        self.n_ubatch = min(self.n_batch, configuration.n_ubatch)
        self.n_rs_seq = configuration.n_rs_seq if architecture.keeps_snapshots else 0
        self.recurrent = LlamaRecurrentMemory(model, n_seq_max, self.n_rs_seq, architecture, switches)
        self.attention: list[LlamaAttentionCells] = []
        no_cells = allocate((0, 0, max(model.key_heads, 1), max(model.head_dim, 2)))
        keys, values = [no_cells, no_cells], [no_cells, no_cells]
        for kind in (FULL, WINDOWED)[: 1 + self.has_window] if self.is_hybrid else ():
            is_windowed = kind == WINDOWED
            layers = [layer for layer in model.attention_layers if (layer in model.windowed_layers) == is_windowed]
            size = self._window_size(model.window, n_seq_max, configuration) if is_windowed else self.n_ctx
            window = model.window if is_windowed else 0
            cells = LlamaAttentionCells(model, len(layers), window, n_seq_max, size, self._unified, architecture.leaps)
            self.attention.append(cells)
            keys[kind], values[kind] = cells.keys, cells.values
        nothing = allocate((0, 0, 0))
        rows = self.recurrent.convolution_rows, self.recurrent.recurrent_rows
        self.arrays = Memory(*rows, (keys[FULL], keys[WINDOWED]), (values[FULL], values[WINDOWED]), nothing, nothing)

    def _window_size(self, window: int, n_seq_max: int, configuration: CacheConfiguration) -> int:
        """Cells of a stream of the layers with a window."""
        needed = window * (n_seq_max if self._unified else 1) + self.n_ubatch
        return self.n_ctx if configuration.swa_full else padded(min(self.n_ctx, needed))

    def bounds(self, sequence: int) -> tuple[int, int]:
        """First and last position, -1 when there is none."""
        first, last = self.recurrent.cells.bounds(sequence)
        if not self.attention:
            return first, last
        own_first, own_last = self.attention[-1].bounds(sequence)
        return max(own_first, first), min(own_last, last)

    def prepare(self, batch: LlamaBatch, hidden: bool) -> list[Placed] | None:
        """The ubatches of a batch with their slots, or None when it cannot be cut or does not fit. hidden: hidden states are asked for."""
        ubatches = []
        keep_tail = self.n_rs_seq + 1 if self.n_rs_seq else 0
        sequential = not (self.attention and self._unified)
        while True:
            ubatch = batch.split_by_sequence(self.n_ubatch) if hidden else batch.split_equal(self.n_ubatch, sequential, keep_tail)
            if ubatch is None:
                break
            ubatches.append(ubatch)
        if not batch.is_used_up or not self.recurrent.cells.prepare(ubatches):
            return None
        slots = []
        for cells in self.attention:
            prepared = cells.prepare(ubatches)
            if prepared is None:
                return None
            slots.append(prepared)
        return [Placed(ubatch, tuple(own[number] for own in slots)) for number, ubatch in enumerate(ubatches)]

    def apply(self, placed: Placed) -> tuple[Plan, Sights]:
        """Put one prepared ubatch into its cells; where it reads and writes."""
        sights = [NO_SIGHT, NO_SIGHT]
        for kind, (cells, slots) in enumerate(zip(self.attention, placed.slots, strict=True)):
            cells.place(slots, placed.ubatch)
            sights[kind] = cells.sight(slots, placed.ubatch)
        return self.recurrent.stage(placed.ubatch), (sights[FULL], sights[WINDOWED])

    def update(self) -> None:
        """Do what the attention cells have queued."""
        for cells in self.attention:
            cells.update()

    def clear(self, data: bool) -> None:
        """Empty every sequence; with `data` zero all memory."""
        self.recurrent.clear(data)
        for cells in self.attention:
            cells.clear(data)

    def remove(self, sequence: int, start: int, end: int) -> bool:
        """Forget positions start..end-1; the recurrent side is asked first, and may say no."""
        if not self.recurrent.cells.remove(sequence, start, end):
            return False
        for cells in self.attention:
            cells.remove(sequence, start, end)
        return True

    def share(self, source: int, destination: int, start: int, end: int) -> None:
        """Share on both sides."""
        for cells in self.attention:
            cells.share(source, destination, start, end)
        self.recurrent.cells.share(source, destination)

    def keep(self, sequence: int) -> None:
        """Keep one sequence on both sides."""
        for cells in self.attention:
            cells.keep(sequence)
        self.recurrent.cells.keep(sequence)

    def shift(self, sequence: int, delta: int) -> None:
        """Move a sequence's positions on both sides."""
        for cells in self.attention:
            cells.move(sequence, delta)
        self.recurrent.cells.shift(sequence, delta)

    def divide(self, sequence: int, divisor: int) -> None:
        """Divide a sequence's positions on both sides."""
        for cells in self.attention:
            cells.divide(sequence, divisor)
        self.recurrent.cells.divide(sequence, divisor)

    def write(self, writer: BlobWriter, sequence: int, partial: bool) -> None:
        """Write a sequence, or all (-1); partial: the recurrent side, and the attention cells with a window."""
        for cells in self._saved(partial):
            cells.write(writer, sequence)
        self.recurrent.write(writer, sequence)

    def read(self, reader: BlobReader, sequence: int, partial: bool) -> None:
        """Restore a sequence, or all (-1). Raises BlobError when it cannot be; without a window the attention side is then emptied, with
        one it is left as it was read."""
        for cells in self._saved(partial):
            cells.read(reader, sequence)
        try:
            self.recurrent.read(reader, sequence)
        except BlobError:
            if not self.has_window:
                for cells in self._saved(partial):
                    cells.forget(sequence)
            raise

    def _saved(self, partial: bool) -> list[LlamaAttentionCells]:
        return self.attention[1:] if partial else self.attention
