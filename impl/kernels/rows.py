"""State rows: zero, copy, gather, scatter.

Rules
- A row is one state part of one layer; plane p of cell c is row p * cells + c.
- `rows` is float32 [layers, n_rows, width] unless said otherwise; every function does all layers.
"""

import numpy as np

from . import kernel


@kernel
def zero_rows(rows: np.ndarray, row_list: np.ndarray) -> None:
    """Overwrite rows with zero: a zeroed row is the state of a sequence without tokens, whatever the memory held (it may be NaN).

    rows      float32 [layers, n_rows, width], written
    row_list  int64 [any]; negative entries are passed over
    """
    for i in range(row_list.size):
        row = row_list[i]
        if row >= 0:
            for layer in range(rows.shape[0]):
                target = rows[layer, row]
                for k in range(target.size):
                    target[k] = np.float32(0)


@kernel
def copy_row(source: np.ndarray, target: np.ndarray) -> None:
    """target = source, one row: float32 [width] both. The same row twice is nothing."""
    for k in range(target.size):
        target[k] = source[k]


@kernel
def copy_rows_of(source: np.ndarray, target: np.ndarray) -> None:
    """target = source, float32 [n, width] both."""
    for n in range(target.shape[0]):
        copy_row(source[n], target[n])


@kernel
def copy_rows(rows: np.ndarray, source_list: np.ndarray, target_list: np.ndarray) -> None:
    """rows[:, target_list[i]] = rows[:, source_list[i]], one after the other.

    rows                      float32 [layers, n_rows, width], read and written
    source_list, target_list  int64 [n]
    """
    for i in range(source_list.size):
        for layer in range(rows.shape[0]):
            copy_row(rows[layer, source_list[i]], rows[layer, target_list[i]])


@kernel
def gather_rows(rows: np.ndarray, row_list: np.ndarray, y: np.ndarray) -> None:
    """y[:, i] = rows[:, row_list[i]].

    rows      float32 [layers, n_rows, width]
    row_list  int64 [n]
    y         float32 [layers, n, width], written
    """
    for i in range(row_list.size):
        for layer in range(rows.shape[0]):
            copy_row(rows[layer, row_list[i]], y[layer, i])


@kernel
def scatter_rows(x: np.ndarray, row_list: np.ndarray, rows: np.ndarray) -> None:
    """rows[:, row_list[i]] = x[:, i].

    x         float32 [layers, n, width]
    row_list  int64 [n]
    rows      float32 [layers, n_rows, width], written
    """
    for i in range(row_list.size):
        for layer in range(rows.shape[0]):
            copy_row(x[layer, i], rows[layer, row_list[i]])
