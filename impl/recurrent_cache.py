"""The recurrent side of a cache: cells and the rows they stand for.

Rules
- Rows are float32 [layers, n_rows, width], one array for each part: the convolution, the recurrent state, and the convolution of per-layer
  embeddings, which only some layers have. A part that the model does not have has width 0.
- What a row holds is the model's affair; here rows are only zeroed, copied, read and written whole.
- A forward zeroes the rows that a plan names, before the ubatch that reads them.
Source: llama.cpp's r, s and p tensors, n_rows = cells * (1 + n_rs_seq).
"""

from typing import NamedTuple

import numpy as np

from .batches import SplitBatch
from .cells import Cells, Plan
from .kernels.rows import copy_rows
from .memory import Allocate, allocate


class States(NamedTuple):
    """The newest states of one sequence, the present one first: float32 [states, layers with the part, width], one array for each part."""

    convolution: np.ndarray
    recurrent: np.ndarray
    embedding: np.ndarray


class RecurrentCache:
    """Cells, and their memory.

    convolution_rows  float32 [layers, n_rows, convolution width]
    recurrent_rows    float32 [layers, n_rows, recurrent width]
    embedding_rows    float32 [layers that have them, n_rows, width of the convolution of per-layer embeddings]
    """

    def __init__(
        self,
        cells: Cells,
        layer_count: int,
        convolution_width: int,
        recurrent_width: int,
        embedding_width: int = 0,
        embedding_layer_count: int = 0,
        poison: bool = False,
        allocate: Allocate = allocate,
    ) -> None:
        self.cells = cells
        self.convolution_rows = allocate((layer_count, cells.row_count, convolution_width), poison)
        self.recurrent_rows = allocate((layer_count, cells.row_count, recurrent_width), poison)
        self.embedding_rows = allocate((embedding_layer_count, cells.row_count, embedding_width), poison)

    @property
    def parts(self) -> States:
        """The rows of every part."""
        return States(self.convolution_rows, self.recurrent_rows, self.embedding_rows)

    def apply(self, batch: SplitBatch, plan: Plan) -> None:
        """Make a plan true, and copy what it takes along."""
        copies = self.cells.apply(batch, plan)
        if len(copies.source_row):
            for rows in self.parts:
                copy_rows(rows, copies.source_row, copies.target_row)

    def read(self, sequence: int, state_count: int = 1) -> States:
        """The newest states of a sequence that is not empty, at most 1 + what it can go back; copied."""
        row_list = self.cells.rows_of(sequence, state_count)
        return States(*(rows[:, row_list].transpose(1, 0, 2) for rows in self.parts))

    def write(self, sequence: int, position: int, states: States) -> None:
        """Make these the states of `sequence`, whatever it held; older ones than there are planes for are left out."""
        state_count = min(len(states.convolution), self.cells.planes)
        row_list = self.cells.place(sequence, position, state_count - 1)
        for rows, values in zip(self.parts, states, strict=True):
            rows[:, row_list] = values[:state_count].transpose(1, 0, 2)

    def zero(self) -> None:
        """Overwrite all memory with zero."""
        for rows in self.parts:
            rows.fill(0)
