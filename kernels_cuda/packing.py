"""Rows of several arrays, on their way between the device and the host as one: what a save and a restore move.

Rules
- One launch for each array packs its rows into one buffer, and one copy takes the buffer across; unpacking is the reverse.
- A row is packed once for each time that it is listed; no row is unpacked into twice.
"""

import math
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from .rows import gather_rows, scatter_rows


class Piece(NamedTuple):
    """Rows of one array.

    rows      float32 [layers, n_rows, width], on the device
    row_list  int64 [n], on both sides
    """

    rows: Any
    row_list: Any

    @property
    def shape(self) -> tuple[int, int, int]:
        """[layers, n, width] of these rows alone."""
        return int(self.rows.shape[0]), self.row_list.size, int(self.rows.shape[2])


def pack(pieces: list[Piece]) -> list[np.ndarray]:
    """The rows of every piece, float32 [layers, n, width] each, on the host."""
    full, starts = _laid_out(pieces)
    found = {}
    if full:
        buffer = cuda.device_array(starts[-1], np.float32)
        for place, (start, end) in zip(full, pairwise(starts), strict=True):
            piece = pieces[place]
            gather_rows(piece.rows, piece.row_list, buffer[start:end].reshape(piece.shape))
        on_host = buffer.copy_to_host()
        found = {place: on_host[start:end].reshape(pieces[place].shape) for place, (start, end) in zip(full, pairwise(starts), strict=True)}
    return [found.get(place, np.zeros(piece.shape, np.float32)) for place, piece in enumerate(pieces)]


def unpack(pieces: list[Piece], values: list[np.ndarray]) -> None:
    """Write what `pack` gives into the rows of every piece."""
    full, starts = _laid_out(pieces)
    if full:
        buffer = cuda.to_device(np.concatenate([np.ravel(values[place]) for place in full]).astype(np.float32, copy=False))
        for place, (start, end) in zip(full, pairwise(starts), strict=True):
            piece = pieces[place]
            scatter_rows(buffer[start:end].reshape(piece.shape), piece.row_list, piece.rows)


def _laid_out(pieces: list[Piece]) -> tuple[list[int], list[int]]:
    """The pieces that are not empty, and where each of them starts in a buffer; its end follows."""
    full = [place for place, piece in enumerate(pieces) if math.prod(piece.shape)]
    return full, [0, *accumulate(math.prod(pieces[place].shape) for place in full)]
