"""Attention of tokens over the cells of their own sequences.

Rules
- A sequence's cells are listed in the order of their positions, so causality is a count: a token sees the first `position + 1` of them.
  A cell that is not seen is not read: it may hold NaN.
- Sums run in the order of positions, wherever the cells lie: bitwise the same for every placement, split and order of sequences.
"""

import numpy as np

from . import kernel
from .arithmetic import exponential
from .dense import sum_of_products
from .rows import copy_row


@kernel
def locate_tokens(
    segment_sequence: np.ndarray,
    segment_start: np.ndarray,
    positions: np.ndarray,
    cell_of: np.ndarray,
    sequence_of: np.ndarray,
    cells: np.ndarray,
) -> None:
    """The sequence and the cell of every token of a ubatch.

    segment_sequence    int64 [segments]
    segment_start       int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    positions           int64 [tokens]
    cell_of             int32 [sequences, most tokens of a sequence], the cell of every position
    sequence_of, cells  int64 [tokens], written
    """
    for segment in range(segment_sequence.size):
        sequence = segment_sequence[segment]
        for token in range(segment_start[segment] - segment_start[0], segment_start[segment + 1] - segment_start[0]):
            sequence_of[token] = sequence
            cells[token] = cell_of[sequence, positions[token]]


@kernel
def write_cells(x: np.ndarray, cells: np.ndarray, rows: np.ndarray) -> None:
    """rows[cells[i]] = x[i].

    x      float32 [tokens, heads, head_dim]
    cells  int64 [tokens]
    rows   float32 [n_cells, heads, head_dim], written
    """
    for token in range(cells.size):
        for head in range(x.shape[1]):
            copy_row(x[token, head], rows[cells[token], head])


@kernel
def attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray, cells: np.ndarray, y: np.ndarray) -> None:
    """Softmax attention of one token; scores are scaled by 1 / sqrt(head_dim).

    query         float32 [heads, head_dim]
    keys, values  float32 [n_cells, key_heads, head_dim]; heads / key_heads neighbouring heads share a key head
    cells         int32 [seen], the cells it sees, in the order of their positions, its own last
    y             float32 [heads, head_dim], written
    """
    heads, head_dim = query.shape
    sharers = heads // keys.shape[1]
    scale = np.float32(1) / np.float32(np.sqrt(np.float32(head_dim)))
    weights = np.empty(cells.size, np.float32)
    for head in range(heads):
        key_head = head // sharers
        own_query = query[head]
        largest = np.float32(-np.inf)
        for i in range(cells.size):
            score = sum_of_products(own_query, keys[cells[i], key_head]) * scale
            weights[i] = score
            # Written so that a NaN score becomes the largest and stays seen.
            largest = largest if score <= largest else score
        for i in range(weights.size):
            weights[i] = exponential(weights[i] - largest)
        total = np.float32(0)
        result = y[head]
        for k in range(head_dim):
            result[k] = np.float32(0)
        for i in range(cells.size):
            weight = weights[i]
            total = total + weight
            value = values[cells[i], key_head]
            for k in range(head_dim):
                result[k] = result[k] + weight * value[k]
        for k in range(head_dim):
            result[k] = result[k] / total


@kernel
def attend_each(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    cell_of: np.ndarray,
    sequence_of: np.ndarray,
    positions: np.ndarray,
    y: np.ndarray,
) -> None:
    """Every token of a ubatch attends to its own sequence, up to its own position; all their keys and values are written before.

    query         float32 [tokens, heads, head_dim]
    keys, values  float32 [n_cells, key_heads, head_dim]
    cell_of       int32 [sequences, most tokens of a sequence]
    sequence_of, positions  int64 [tokens]
    y             float32 [tokens, heads, head_dim], written
    """
    for token in range(query.shape[0]):
        attend(query[token], keys, values, cell_of[sequence_of[token], : positions[token] + 1], y[token])
