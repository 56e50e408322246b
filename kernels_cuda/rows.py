"""State rows on a device, as in `impl/kernels/rows.py`: zero, copy, gather, scatter.

Rules
- `rows` is float32 [layers, n_rows, width] unless said otherwise; every function does all layers.
- The rows of a list are done side by side: none is in the list twice, and none that is read is written.
- Gather and scatter also pack a state into, and unpack it from, what is copied to or from the host.
"""

from typing import Any

import numpy as np

from . import for_each
from .arrays import Twin

_ALL_IN_TURN = np.zeros(0, np.int64)


@for_each
def _zero(place: Any, rows: Any, row_list: Any) -> None:
    count, width = np.uint64(row_list.size), np.uint64(rows.shape[2])
    layer, i, k = place // (count * width), place // width % count, place % width
    row = row_list[i]
    if row >= 0:
        rows[layer, np.uint64(row), k] = np.float32(0)


def zero_rows(rows: Any, row_list: Any) -> None:
    """Overwrite rows with zero: a zeroed row is the state of a sequence without tokens, whatever the memory held (it may be NaN).

    rows      float32 [layers, n_rows, width], written
    row_list  int64 [any]; negative entries are passed over
    """
    _zero(rows.shape[0] * row_list.size * rows.shape[2], rows, row_list)


@for_each
def _copy(place: Any, source: Any, source_list: Any, target: Any, target_list: Any) -> None:
    """target[:, target_list[i]] = source[:, source_list[i]]; a list without elements stands for 0, 1, 2, ..."""
    width = np.uint64(source.shape[2])
    count = np.uint64(max(source_list.size, target_list.size))
    layer, i, k = place // (count * width), place // width % count, place % width
    source_row = np.uint64(source_list[i]) if source_list.size > 0 else i
    target_row = np.uint64(target_list[i]) if target_list.size > 0 else i
    target[layer, target_row, k] = source[layer, source_row, k]


def copy_rows(rows: Any, source_list: Any, target_list: Any) -> None:
    """rows[:, target_list[i]] = rows[:, source_list[i]].

    rows                      float32 [layers, n_rows, width], read and written
    source_list, target_list  int64 [n]
    """
    _copy(rows.shape[0] * source_list.size * rows.shape[2], rows, source_list, rows, target_list)


def gather_rows(rows: Any, row_list: Any, y: Any) -> None:
    """y[:, i] = rows[:, row_list[i]].

    rows      float32 [layers, n_rows, width]
    row_list  int64 [n]
    y         float32 [layers, n, width], written
    """
    _copy(rows.shape[0] * row_list.size * rows.shape[2], rows, row_list, y, Twin(_ALL_IN_TURN))


def scatter_rows(x: Any, row_list: Any, rows: Any) -> None:
    """rows[:, row_list[i]] = x[:, i].

    x         float32 [layers, n, width]
    row_list  int64 [n]
    rows      float32 [layers, n_rows, width], written
    """
    _copy(rows.shape[0] * row_list.size * rows.shape[2], x, Twin(_ALL_IN_TURN), rows, row_list)


@for_each
def _copy_all(place: Any, source: Any, target: Any) -> None:
    channels = np.uint64(source.shape[1])
    target[place // channels, place % channels] = source[place // channels, place % channels]


def copy_rows_of(source: Any, target: Any) -> None:
    """target = source, float32 [n, width] both."""
    _copy_all(source.size, source, target)
