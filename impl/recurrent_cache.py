"""The recurrent side of a cache: cells and the rows they stand for.

Rules
- Rows are float32 [layers, n_rows, width], one array for the convolution part and one for the recurrent part; a part that the model does
  not have has width 0.
- What a row holds is the model's affair; here rows are only zeroed, read and written whole.
Source: llama.cpp's r and s tensors, n_rows = cells * (1 + n_rs_seq).
"""

import numpy as np

from .cells import StrictCells
from .memory import allocate


class RecurrentCache:
    """Cells, and their memory.

    convolution_rows  float32 [layers, n_rows, convolution width]
    recurrent_rows    float32 [layers, n_rows, recurrent width]
    """

    def __init__(
        self, layer_count: int, convolution_width: int, recurrent_width: int, n_seq_max: int, n_rs_seq: int, poison: bool = False
    ) -> None:
        self.cells = StrictCells(n_seq_max, n_rs_seq)
        self.convolution_rows = allocate((layer_count, self.cells.row_count, convolution_width), poison)
        self.recurrent_rows = allocate((layer_count, self.cells.row_count, recurrent_width), poison)

    def read(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        """The logical state of a sequence that is not empty: float32 [layers, width] of the convolution and of the recurrent part."""
        row = self.cells.logical_row(sequence)
        return self.convolution_rows[:, row], self.recurrent_rows[:, row]

    def write(self, sequence: int, position: int, convolution: np.ndarray, recurrent: np.ndarray) -> None:
        """Make this the state of `sequence`, whatever it held; float32 [layers, width] each."""
        row = self.cells.place(sequence, position)
        self.convolution_rows[:, row] = convolution
        self.recurrent_rows[:, row] = recurrent

    def zero(self) -> None:
        """Overwrite all memory with zero."""
        self.convolution_rows.fill(0)
        self.recurrent_rows.fill(0)
