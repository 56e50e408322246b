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
    count   int64 [tokens], how many they are
    listed  int32 [any], cells
    """

    cell: np.ndarray
    first: np.ndarray
    count: np.ndarray
    listed: np.ndarray


NO_SIGHT = Sight(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32))


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
    cells         int32 [seen], the cells it sees
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
    key, value    float32 [tokens, key_heads, head_dim]
    keys, values  float32 [n_cells, key_heads, head_dim], the layer's, written
    sight         of the whole batch
    start         place of the ubatch's first token
    y             float32 [tokens, heads, head_dim], written
    """
    tokens = query.shape[0]
    cells = sight.cell[start : start + tokens]
    write_cells(key, cells, keys)
    write_cells(value, cells, values)
    for token in range(tokens):
        first = sight.first[start + token]
        attend(query[token], keys, values, sight.listed[first : first + sight.count[start + token]], y[token])
