"""Residual streams side by side, and what n-grams give them, as in `impl/kernels/streams.py`.

Rules
- Streams are float32 [tokens, streams * n_embd]. A token's result depends on its own row alone, in a fixed order of summation.
"""

from typing import Any

import numpy as np

from . import for_each
from .arithmetic import sigmoid, silu, square_root
from .dense import multiply_wanted_rows, sum_of_products

_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)
_SMALLEST_MATCH = np.float32(1e-6)


@for_each
def _repeat_rows(place: Any, x: Any, streams: Any) -> None:
    channels = np.uint64(streams.shape[1])
    token, i = place // channels, place % channels
    streams[token, i] = x[token, i % np.uint64(x.shape[1])]


def repeat_rows(x: Any, streams: Any) -> None:
    """Every stream = x; float32 [tokens, n_embd], streams written."""
    _repeat_rows(streams.size, x, streams)


@for_each
def _silu_of_scaled_rows(place: Any, scale: Any, x: Any) -> None:
    channels = np.uint64(x.shape[1])
    token, i = place // channels, place % channels
    x[token, i] = silu(x[token, i] * scale)


def silu_of_scaled_rows(scale: Any, x: Any) -> None:
    """x = silu(scale * x) in place, float32 [tokens, channels]."""
    _silu_of_scaled_rows(x.size, scale, x)


@for_each
def _gated_mean(place: Any, streams: Any, gate: Any, scale: Any, y: Any) -> None:
    channels = np.uint64(y.shape[1])
    token, i = place // channels, place % channels
    total = _ZERO
    at = i
    while at < np.uint64(streams.shape[1]):
        total += streams[token, at] * sigmoid(gate[token, at])
        at += channels
    y[token, i] = total * scale


def gated_mean(streams: Any, gate: Any, scale: Any, y: Any) -> None:
    """y = scale * sum over streams of stream * sigmoid(gate).

    streams, gate  float32 [tokens, streams * n_embd]
    scale          float32, one over the number of streams
    y              float32 [tokens, n_embd], written
    """
    _gated_mean(y.size, streams, gate, scale, y)


@for_each
def _twice_sigmoid_of_scaled_rows(place: Any, scale: Any, x: Any) -> None:
    channels = np.uint64(x.shape[1])
    token, i = place // channels, place % channels
    x[token, i] = _TWO * sigmoid(x[token, i] * scale)


def twice_sigmoid_of_scaled_rows(scale: Any, x: Any) -> None:
    """x = 2 * sigmoid(scale * x) in place, float32 [tokens, streams]."""
    _twice_sigmoid_of_scaled_rows(x.size, scale, x)


@for_each
def _inject(place: Any, x: Any, shares: Any, streams: Any) -> None:
    channels = np.uint64(streams.shape[1])
    token, i = place // channels, place % channels
    n_embd = np.uint64(x.shape[1])
    streams[token, i] += x[token, i % n_embd] * shares[token, i // n_embd]


def inject(x: Any, shares: Any, streams: Any) -> None:
    """Add x to every stream by its share.

    x        float32 [tokens, n_embd]
    shares   float32 [tokens, streams]
    streams  float32 [tokens, streams * n_embd], written
    """
    _inject(streams.size, x, shares, streams)


@for_each
def _values_by_match(place: Any, query: Any, value: Any, key: Any) -> None:
    n_embd = np.uint64(value.shape[1])
    streams = np.uint64(key.shape[1]) // n_embd
    token, start = place // streams, place % streams * n_embd
    own, other = key[token, start : start + n_embd], query[token, start : start + n_embd]
    match = sum_of_products(own, other) * (_ONE / square_root(np.float32(value.shape[1])))
    size = square_root(max(abs(match), _SMALLEST_MATCH))
    share = sigmoid(size if match > _ZERO else (-size if match < _ZERO else match))
    for i in range(value.shape[1]):
        own[np.uint64(i)] = value[token, np.uint64(i)] * share


def values_by_match(query: Any, value: Any, key: Any) -> None:
    """key = value * sigmoid of the signed root of how well stream's query and key match, stream by stream.

    query, key  float32 [tokens, streams * n_embd]; key written
    value       float32 [tokens, n_embd]
    """
    _values_by_match(key.shape[0] * (key.shape[1] // value.shape[1]), query, value, key)


@for_each
def _add_with_silu(place: Any, added: Any, past: Any, streams: Any) -> None:
    channels = np.uint64(streams.shape[1])
    token, i = place // channels, place % channels
    streams[token, i] += added[token, i] + silu(past[token, i])


def add_with_silu(added: Any, past: Any, streams: Any) -> None:
    """streams += added + silu(past); float32 [tokens, channels] all."""
    _add_with_silu(streams.size, added, past, streams)


@for_each
def _write_tokens(place: Any, tokens: Any, cells: Any, index_rows: Any) -> None:
    count = np.uint64(tokens.size)
    layer, token = place // count, place % count
    index_rows[layer, np.uint64(cells[token]), np.uint64(index_rows.shape[2] - 1)] = np.float32(tokens[token])


def write_tokens(tokens: Any, cells: Any, index_rows: Any) -> None:
    """Put tokens into the last column of their cells, in every layer.

    tokens, cells  int64 [tokens]
    index_rows     float32 [layers, n_cells, index width], written; whole numbers up to 2^24 are exact
    """
    _write_tokens(index_rows.shape[0] * tokens.size, tokens, cells, index_rows)


@for_each
def _write_raw_keys(place: Any, x: Any, cells: Any, index_rows: Any) -> None:
    channels = np.uint64(x.shape[1])
    token, i = place // channels, place % channels
    index_rows[np.uint64(cells[token]), i] = x[token, i]


def write_raw_keys(x: Any, cells: Any, index_rows: Any) -> None:
    """The first channels of index_rows[cells[i]] = x[i]; float32 [tokens, size], int64 [tokens], float32 [n_cells, at least size] written."""
    _write_raw_keys(x.size, x, cells, index_rows)


@for_each
def _copy_wanted(place: Any, x: Any, output_row: Any, y: Any) -> None:
    channels = np.uint64(x.shape[1])
    token, i = place // channels, place % channels
    row = output_row[token]
    if row >= 0:
        y[np.uint64(row), i] = x[token, i]


def write_wanted_products(x: Any, output_row: Any, output: Any, hidden: Any, y: Any) -> None:
    """The end of a model without a final norm: the rows of x that are wanted, or their logits; arguments as in `dense.write_wanted_rows`."""
    if hidden:
        _copy_wanted(x.size, x, output_row, y)
    else:
        multiply_wanted_rows(x, output_row, output, y)
