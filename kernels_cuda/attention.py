"""Attention of tokens over the cells that a cache lets them see, as in `impl/kernels/attention.py`.

Rules
- One thread takes one head of one token over its cells, in the order of the list. A cell that is not seen is not read.
- A cache of our own sweeps over no cells that a token does not see: `swept` is not looked at.
"""

from typing import Any

import numpy as np

from . import for_each
from .arithmetic import exponential, square_root
from .dense import sum_of_products

_ZERO, _ONE = np.float32(0), np.float32(1)
_LOWEST = np.float32(-np.inf)


@for_each
def _write_cells(place: Any, x: Any, cells: Any, rows: Any) -> None:
    heads, size = np.uint64(x.shape[1]), np.uint64(x.shape[2])
    token, head, i = place // (heads * size), place // size % heads, place % size
    rows[np.uint64(cells[token]), head, i] = x[token, head, i]


def write_cells(x: Any, cells: Any, rows: Any) -> None:
    """rows[cells[i]] = x[i].

    x      float32 [tokens, heads, head_dim]
    cells  int64 [tokens]
    rows   float32 [n_cells, heads, head_dim], written
    """
    _write_cells(x.size, x, cells, rows)


@for_each
def _attend(place: Any, query: Any, keys: Any, values: Any, first: Any, length: Any, listed: Any, y: Any) -> None:
    heads = np.uint64(query.shape[1])
    token, head = place // heads, place % heads
    key_head = head // (heads // np.uint64(keys.shape[1]))
    own, result = query[token, head], y[token, head]
    scale = _ONE / square_root(np.float32(query.shape[2]))
    start, end = np.uint64(first[token]), np.uint64(first[token] + length[token])
    largest = _LOWEST
    at = start
    while at < end:
        score = sum_of_products(own, keys[np.uint64(listed[at]), key_head]) * scale
        largest = largest if score <= largest else score  # a NaN score becomes the largest and stays seen
        at += np.uint64(1)
    for k in range(result.size):
        result[np.uint64(k)] = _ZERO
    total = _ZERO
    at = start
    while at < end:
        cell = np.uint64(listed[at])
        weight = exponential(sum_of_products(own, keys[cell, key_head]) * scale - largest)
        total += weight
        for k in range(result.size):
            result[np.uint64(k)] += weight * values[cell, key_head, np.uint64(k)]
        at += np.uint64(1)
    for k in range(result.size):
        result[np.uint64(k)] /= total


def remember_and_attend(query: Any, key: Any, value: Any, keys: Any, values: Any, sight: Any, start: Any, y: Any) -> None:
    """Write the keys and values of a ubatch into their cells, all of them, then let every token attend to the cells that it sees.

    query         float32 [tokens, heads, head_dim]
    key, value    float32 [tokens, key_heads, head_dim]; value may be key, where values are the keys' first channels
    keys, values  float32 [n_cells, key_heads, head_dim], the layer's, written; as in `attend`
    sight         of the whole batch
    start         place of the ubatch's first token
    y             float32 [tokens, heads, value channels], written
    """
    tokens = slice(start, start + query.shape[0])
    write_cells(key, sight.cell[tokens], keys)
    write_cells(value, sight.cell[tokens], values)
    _attend(query.shape[0] * query.shape[1], query, keys, values, sight.first[tokens], sight.length[tokens], sight.listed, y)
