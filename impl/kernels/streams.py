"""Residual streams side by side, and what n-grams give them.

Rules
- Streams are float32 [tokens, streams * n_embd]. A token's result depends on its own row alone, in a fixed order of summation.
Sources: Zhu et al. 2024 (hyper-connections, arXiv:2409.19606); Transformers' Qwen4ExpForCausalLM.
"""

import math

import numpy as np

from . import kernel
from .arithmetic import sigmoid, silu
from .dense import linear, sum_of_products
from .rows import copy_row

_SMALLEST_MATCH = np.float32(1e-6)


@kernel
def repeat_rows(x: np.ndarray, streams: np.ndarray) -> None:
    """Every stream = x; float32 [tokens, n_embd], streams written."""
    n_embd = x.shape[1]
    for token in range(x.shape[0]):
        for stream in range(streams.shape[1] // n_embd):
            copy_row(x[token], streams[token, stream * n_embd : (stream + 1) * n_embd])


@kernel
def silu_of_scaled_rows(scale: np.float32, x: np.ndarray) -> None:
    """x = silu(scale * x) in place, float32 [tokens, channels]."""
    for token in range(x.shape[0]):
        row = x[token]
        for i in range(row.size):
            row[i] = silu(row[i] * scale)


@kernel
def gated_mean(streams: np.ndarray, gate: np.ndarray, scale: np.float32, y: np.ndarray) -> None:
    """y = scale * sum over streams of stream * sigmoid(gate).

    streams, gate  float32 [tokens, streams * n_embd]
    scale          float32, one over the number of streams
    y              float32 [tokens, n_embd], written
    """
    n_embd = y.shape[1]
    for token in range(y.shape[0]):
        result = y[token]
        for i in range(n_embd):
            result[i] = np.float32(0)
        for stream in range(streams.shape[1] // n_embd):
            own, own_gate = streams[token, stream * n_embd : (stream + 1) * n_embd], gate[token, stream * n_embd : (stream + 1) * n_embd]
            for i in range(n_embd):
                result[i] = result[i] + own[i] * sigmoid(own_gate[i])
        for i in range(n_embd):
            result[i] = result[i] * scale


@kernel
def twice_sigmoid_of_scaled_rows(scale: np.float32, x: np.ndarray) -> None:
    """x = 2 * sigmoid(scale * x) in place, float32 [tokens, streams]."""
    for token in range(x.shape[0]):
        row = x[token]
        for i in range(row.size):
            row[i] = np.float32(2) * sigmoid(row[i] * scale)


@kernel
def inject(x: np.ndarray, shares: np.ndarray, streams: np.ndarray) -> None:
    """Add x to every stream by its share.

    x        float32 [tokens, n_embd]
    shares   float32 [tokens, streams]
    streams  float32 [tokens, streams * n_embd], written
    """
    n_embd = x.shape[1]
    for token in range(x.shape[0]):
        source = x[token]
        for stream in range(shares.shape[1]):
            share = shares[token, stream]
            result = streams[token, stream * n_embd : (stream + 1) * n_embd]
            for i in range(n_embd):
                result[i] = result[i] + source[i] * share


@kernel
def values_by_match(query: np.ndarray, value: np.ndarray, key: np.ndarray) -> None:
    """key = value * sigmoid of the signed root of how well stream's query and key match, stream by stream.

    query, key  float32 [tokens, streams * n_embd]; key written
    value       float32 [tokens, n_embd]
    """
    n_embd = value.shape[1]
    scale = np.float32(1) / np.float32(math.sqrt(np.float32(n_embd)))
    for token in range(value.shape[0]):
        source = value[token]
        for stream in range(key.shape[1] // n_embd):
            own = key[token, stream * n_embd : (stream + 1) * n_embd]
            match = sum_of_products(own, query[token, stream * n_embd : (stream + 1) * n_embd]) * scale
            size = np.float32(math.sqrt(max(abs(match), _SMALLEST_MATCH)))
            share = sigmoid(size if match > np.float32(0) else (-size if match < np.float32(0) else match))
            for i in range(n_embd):
                own[i] = source[i] * share


@kernel
def add_with_silu(added: np.ndarray, past: np.ndarray, streams: np.ndarray) -> None:
    """streams += added + silu(past); float32 [tokens, channels] all."""
    for token in range(streams.shape[0]):
        result, own, own_past = streams[token], added[token], past[token]
        for i in range(result.size):
            result[i] = result[i] + (own[i] + silu(own_past[i]))


@kernel
def write_tokens(tokens: np.ndarray, cells: np.ndarray, index_rows: np.ndarray) -> None:
    """Put tokens into the last column of their cells, in every layer.

    tokens, cells  int64 [tokens]
    index_rows     float32 [layers, n_cells, index width], written; whole numbers up to 2^24 are exact
    """
    for layer in range(index_rows.shape[0]):
        for token in range(tokens.size):
            index_rows[layer, cells[token], index_rows.shape[2] - 1] = np.float32(tokens[token])


@kernel
def write_raw_keys(x: np.ndarray, cells: np.ndarray, index_rows: np.ndarray) -> None:
    """The first channels of index_rows[cells[i]] = x[i]; float32 [tokens, size], int64 [tokens], float32 [n_cells, at least size] written."""
    for token in range(cells.size):
        copy_row(x[token], index_rows[cells[token], : x.shape[1]])


@kernel
def write_wanted_products(x: np.ndarray, output_row: np.ndarray, output: np.ndarray, hidden: bool, y: np.ndarray) -> None:
    """The end of a model without a final norm: the rows of x that are wanted, or their logits; arguments as in `dense.write_wanted_rows`."""
    for token in range(output_row.size):
        row = output_row[token]
        if row >= 0:
            if hidden:
                copy_row(x[token], y[row])
            else:
                linear(x[token : token + 1], output, y[row : row + 1])
