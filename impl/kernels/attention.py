"""Attention of tokens over the cells that a cache lets them see.

Rules
- What a token sees is a list of cells that the cache made: causality, windows and masks are the cache's affair.
  A cell that is not seen is not read: it may hold NaN.
- Sums run in the order of the list, wherever the cells lie: bitwise the same for every placement, split and order of sequences, as long
  as the list is in the order of positions.
"""

from typing import NamedTuple

import numpy as np

from . import kernel
from .arithmetic import exponential
from .dense import sum_of_products
from .rows import copy_row


class Sight(NamedTuple):
    """Which attention cells the tokens of a batch write and see, in the order of places.

    cell    int64 [tokens], the cell that takes a token's key and value
    first   int64 [tokens], where in `listed` the cells that it sees begin
    length  int64 [tokens], how many they are
    listed  int32 [any], cells
    swept   int64 [tokens, 2], first cell and number of cells that an engine gives the weight zero instead of passing them over: what is not
            finite in any of them spoils the token. [0, 2] when there are none
    """

    cell: np.ndarray
    first: np.ndarray
    length: np.ndarray
    listed: np.ndarray
    swept: np.ndarray


NOT_SWEPT = np.zeros((0, 2), np.int64)
NO_SIGHT = Sight(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32), NOT_SWEPT)


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

    query   float32 [heads, head_dim]
    keys    float32 [n_cells, key_heads, head_dim]; heads / key_heads neighbouring heads share a key head
    values  float32 [n_cells, key_heads, any]; as many of their first channels are read as y has. They may be the keys
    cells   int32 [seen], the cells it sees
    y       float32 [heads, value channels], written
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
        for k in range(result.size):
            result[k] = np.float32(0)
        for i in range(cells.size):
            weight = weights[i]
            total = total + weight
            value = values[cells[i], key_head]
            for k in range(result.size):
                result[k] = result[k] + weight * value[k]
        for k in range(result.size):
            result[k] = result[k] / total


@kernel
def remember_and_attend(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    sight: Sight,
    start: int,
    y: np.ndarray,
) -> None:
    """Write the keys and values of a ubatch into their cells, all of them, then let every token attend to the cells that it sees.

    query         float32 [tokens, heads, head_dim]
    key, value    float32 [tokens, key_heads, head_dim]; value may be key, where values are the keys' first channels
    keys, values  float32 [n_cells, key_heads, head_dim], the layer's, written; as in `attend`
    sight         of the whole batch
    start         place of the ubatch's first token
    y             float32 [tokens, heads, value channels], written
    """
    tokens = query.shape[0]
    cells = sight.cell[start : start + tokens]
    write_cells(key, cells, keys)
    write_cells(value, cells, values)
    swept_first, is_spoiled = -1, False
    for token in range(tokens):
        if sight.swept.size and sight.swept[start + token, 0] != swept_first:
            swept_first = sight.swept[start + token, 0]
            swept_end = swept_first + sight.swept[start + token, 1]
            is_spoiled = not (_is_finite(keys[swept_first:swept_end]) and _is_finite(values[swept_first:swept_end]))
        if is_spoiled:
            y[token] = np.float32(np.nan)
        else:
            first = sight.first[start + token]
            attend(query[token], keys, values, sight.listed[first : first + sight.length[start + token]], y[token])


@kernel
def _is_finite(rows: np.ndarray) -> bool:
    """Whether all of float32 [cells, heads, head_dim] is finite."""
    total = np.float32(0)
    flat = rows.ravel()
    for i in range(flat.size):
        total = total + flat[i] * np.float32(0)
    return bool(total == np.float32(0))
