"""Dense parts of a token's way through a layer, as in `impl/kernels/dense.py`: products with a matrix, norms, rotary positions.

Rules
- One thread makes one output, or norms one row, in the order in which the CPU does: this is for models of any family at small sizes, not
  for speed. (What a recurrent cache adds to a model is in the scans.)
- A row may be a part of a longer one.
"""

from typing import Any

import numpy as np
from numba import cuda

from . import device_function, for_each, simulated_by
from .arithmetic import gelu, sigmoid, silu, square_root

_ZERO, _ONE = np.float32(0), np.float32(1)


def _simulated_sum_of_products(x: Any, y: Any) -> Any:
    products = x * y
    whole = products.size // 4 * 4
    running = [_ZERO] * 4
    if whole:
        running = list(np.add.accumulate(products[:whole].reshape(-1, 4))[-1] + _ZERO)
    for value in products[whole:]:
        running[0] += value
    return (running[0] + running[1]) + (running[2] + running[3])


def _simulated_product(x: Any, matrix: Any, o: Any) -> Any:
    column = matrix[:, o]
    return np.add.accumulate(x[: column.size] * column)[-1] + _ZERO if column.size else _ZERO


@simulated_by(_simulated_sum_of_products)
def sum_of_products(x: Any, y: Any) -> Any:
    """The sum of x[i] * y[i], float32: four running sums, of every fourth product each, that are added at the end; x, y float32 [channels]."""
    s0 = s1 = s2 = s3 = _ZERO
    size = np.uint64(x.size)
    whole = size // np.uint64(4) * np.uint64(4)
    i = np.uint64(0)
    while i < whole:
        s0 += x[i] * y[i]
        s1 += x[i + np.uint64(1)] * y[i + np.uint64(1)]
        s2 += x[i + np.uint64(2)] * y[i + np.uint64(2)]
        s3 += x[i + np.uint64(3)] * y[i + np.uint64(3)]
        i += np.uint64(4)
    while i < size:
        s0 += x[i] * y[i]
        i += np.uint64(1)
    return (s0 + s1) + (s2 + s3)


@simulated_by(_simulated_product)
def product(x: Any, matrix: Any, o: Any) -> Any:
    """One output of x @ matrix: its inputs summed from the first to the last; x float32 [in or more], matrix float32 [in, out]."""
    total = _ZERO
    for i in range(matrix.shape[0]):
        total += x[np.uint64(i)] * matrix[np.uint64(i), o]
    return total


@for_each
def _linear(place: Any, x: Any, matrix: Any, y: Any) -> None:
    channels = np.uint64(y.shape[1])
    token, i = place // channels, place % channels
    y[token, i] = product(x[token], matrix, i)


def linear(x: Any, matrix: Any, y: Any) -> None:
    """y = x @ matrix: every output sums its inputs from the first to the last.

    x       float32 [tokens, in]
    matrix  float32 [in, out]
    y       float32 [tokens, out], written
    """
    _linear(y.size, x, matrix, y)


@for_each
def _add_rows(place: Any, x: Any, y: Any) -> None:
    channels = np.uint64(y.shape[1])
    token, i = place // channels, place % channels
    y[token, i] += x[token, i]


def add_rows(x: Any, y: Any) -> None:
    """y += x, float32 [tokens, channels] both."""
    _add_rows(y.size, x, y)


@for_each
def _add_to_scaled_rows(place: Any, x: Any, kept: Any, scale: Any, y: Any) -> None:
    channels = np.uint64(y.shape[1])
    token, i = place // channels, place % channels
    y[token, i] = scale * kept[token, i] + x[token, i]


def add_to_scaled_rows(x: Any, kept: Any, scale: Any, y: Any) -> None:
    """y = scale * kept + x, float32 [tokens, channels] all."""
    _add_to_scaled_rows(y.size, x, kept, scale, y)


@device_function
def norm_row(x: Any, factor: Any, epsilon: Any, y: Any) -> None:
    """y = x / sqrt(mean(x^2) + epsilon) * factor, one row: float32 [channels] each. y may be x."""
    scale = _ONE / square_root(sum_of_products(x, x) / np.float32(x.size) + epsilon)
    for i in range(x.size):
        y[np.uint64(i)] = x[np.uint64(i)] * scale * factor[np.uint64(i)]


@for_each
def _rms_norm(place: Any, x: Any, weight: Any, epsilon: Any, y: Any) -> None:
    norm_row(x[place], weight[place % np.uint64(weight.shape[0])], epsilon, y[place])


def rms_norm(x: Any, weight: Any, epsilon: Any, y: Any) -> None:
    """y = x / sqrt(mean(x^2) + epsilon) * weight, over whole rows. y may be x.

    x, y     float32 [rows, channels]; y written
    weight   float32 [groups, channels]; rows take the groups in turn
    epsilon  float32
    """
    _rms_norm(x.shape[0], x, weight, epsilon, y)


@for_each
def _to_length(place: Any, x: Any, length: Any, epsilon: Any) -> None:
    own = x[place]
    scale = length / square_root(sum_of_products(own, own) + epsilon)
    for i in range(own.size):
        own[np.uint64(i)] *= scale


def to_length(x: Any, length: Any, epsilon: Any) -> None:
    """x = length * x / sqrt(sum(x^2) + epsilon) in place, over whole rows; float32 [rows, channels]."""
    _to_length(x.shape[0], x, length, epsilon)


@device_function
def layer_norm_row(x: Any, factor: Any, summand: Any, epsilon: Any, y: Any) -> None:
    """y = (x - mean) / sqrt(mean((x - mean)^2) + epsilon) * factor + summand, one row: float32 [channels] each. y may be x."""
    channels = np.float32(x.size)
    mean = _sum(x) / channels
    for i in range(x.size):
        y[np.uint64(i)] = x[np.uint64(i)] - mean
    scale = _ONE / square_root(sum_of_products(y, y) / channels + epsilon)
    for i in range(x.size):
        y[np.uint64(i)] = y[np.uint64(i)] * scale * factor[np.uint64(i)] + summand[np.uint64(i)]


@device_function
def _sum(x: Any) -> Any:
    """The sum of x, float32 [channels], added as in `sum_of_products`."""
    s0 = s1 = s2 = s3 = _ZERO
    size = np.uint64(x.size)
    whole = size // np.uint64(4) * np.uint64(4)
    i = np.uint64(0)
    while i < whole:
        s0 += x[i]
        s1 += x[i + np.uint64(1)]
        s2 += x[i + np.uint64(2)]
        s3 += x[i + np.uint64(3)]
        i += np.uint64(4)
    while i < size:
        s0 += x[i]
        i += np.uint64(1)
    return (s0 + s1) + (s2 + s3)


@for_each
def _layer_norm(place: Any, x: Any, weight: Any, bias: Any, epsilon: Any, y: Any) -> None:
    group = place % np.uint64(weight.shape[0])
    layer_norm_row(x[place], weight[group], bias[group], epsilon, y[place])


def layer_norm(x: Any, weight: Any, bias: Any, epsilon: Any, y: Any) -> None:
    """y = (x - mean) / sqrt(mean((x - mean)^2) + epsilon) * weight + bias, over whole rows. y may be x.

    x, y          float32 [rows, channels]; y written
    weight, bias  float32 [groups, channels]; rows take the groups in turn
    epsilon       float32
    """
    _layer_norm(x.shape[0], x, weight, bias, epsilon, y)


@for_each
def _silu_rows(place: Any, x: Any) -> None:
    channels = np.uint64(x.shape[1])
    token, i = place // channels, place % channels
    x[token, i] = silu(x[token, i])


def silu_rows(x: Any) -> None:
    """x = silu(x) in place, float32 [tokens, channels]."""
    _silu_rows(x.size, x)


@for_each
def _multiply_rows(place: Any, x: Any, y: Any) -> None:
    channels = np.uint64(y.shape[1])
    token, i = place // channels, place % channels
    y[token, i] *= x[token, i]


def multiply_rows(x: Any, y: Any) -> None:
    """y *= x, float32 [tokens, channels] both."""
    _multiply_rows(y.size, x, y)


@for_each
def _gated_linear_unit(place: Any, gate: Any, value: Any) -> None:
    channels = np.uint64(value.shape[1])
    token, i = place // channels, place % channels
    value[token, i] *= silu(gate[token, i])


def gated_linear_unit(gate: Any, value: Any) -> None:
    """value *= silu(gate), float32 [tokens, channels] both."""
    _gated_linear_unit(value.size, gate, value)


@for_each
def _gated_gelu_unit(place: Any, gate: Any, value: Any) -> None:
    channels = np.uint64(value.shape[1])
    token, i = place // channels, place % channels
    value[token, i] *= gelu(gate[token, i])


def gated_gelu_unit(gate: Any, value: Any) -> None:
    """value *= gelu(gate), float32 [tokens, channels] both."""
    _gated_gelu_unit(value.size, gate, value)


@for_each
def _gate_by_sigmoid(place: Any, gate: Any, value: Any) -> None:
    channels = np.uint64(value.shape[1])
    token, i = place // channels, place % channels
    value[token, i] *= sigmoid(gate[token, i])


def gate_by_sigmoid(gate: Any, value: Any) -> None:
    """value *= sigmoid(gate), float32 [tokens, channels] both."""
    _gate_by_sigmoid(value.size, gate, value)


@for_each
def _squared_relu(place: Any, x: Any) -> None:
    channels = np.uint64(x.shape[1])
    token, i = place // channels, place % channels
    x[token, i] = _ZERO if x[token, i] < _ZERO else x[token, i] * x[token, i]


def squared_relu(x: Any) -> None:
    """x = max(x, 0)^2 in place, float32 [tokens, channels]. NaN stays NaN."""
    _squared_relu(x.size, x)


def rotary_table(positions: Any, half: Any, theta: Any, cosine: Any, sine: Any) -> None:
    """Cosine and sine of every token's rotation angles: position * theta^(-i / half).

    positions     int64 [tokens]
    half          channels of half a head
    cosine, sine  float32 [tokens, half], written; angles are taken in float64, since float32 loses digits with the position

    They are made on the host, which knows the positions: a device is slow at float64.
    """
    if cosine.size:
        angle = positions.host[:, None] * theta ** (-np.arange(half) / half)
        cosine.copy_to_device(np.cos(angle).astype(np.float32))
        sine.copy_to_device(np.sin(angle).astype(np.float32))


@for_each
def _rotate(place: Any, x: Any, cosine: Any, sine: Any) -> None:
    heads, half = np.uint64(x.shape[1]), np.uint64(cosine.shape[1])
    token, head, i = place // (heads * half), place // half % heads, place % half
    first, second = x[token, head, i], x[token, head, half + i]
    x[token, head, i] = first * cosine[token, i] - second * sine[token, i]
    x[token, head, half + i] = second * cosine[token, i] + first * sine[token, i]


def rotate(x: Any, cosine: Any, sine: Any) -> None:
    """Rotary positions in place: each half of a head against the other.

    x             float32 [tokens, heads, 2 * half]
    cosine, sine  float32 [tokens, half]
    """
    _rotate(x.shape[0] * x.shape[1] * cosine.shape[1], x, cosine, sine)


@for_each
def _embed(place: Any, tokens: Any, table: Any, y: Any) -> None:
    channels = np.uint64(y.shape[1])
    token, i = place // channels, place % channels
    y[token, i] = table[np.uint64(tokens[token]), i]


def embed(tokens: Any, table: Any, y: Any) -> None:
    """y[i] = table[tokens[i]].

    tokens  int64 [tokens]
    table   float32 [n_vocab, channels]
    y       float32 [tokens, channels], written
    """
    _embed(y.size, tokens, table, y)


@for_each
def _norm_wanted(place: Any, stream: Any, output_row: Any, norm: Any, epsilon: Any, hidden: Any, normed: Any, y: Any) -> None:
    row = output_row[place]
    if row >= 0:
        norm_row(stream[place], norm[np.uint64(0)], epsilon, y[np.uint64(row)] if hidden else normed[place])


@for_each
def _layer_norm_wanted(
    place: Any, stream: Any, output_row: Any, norm: Any, bias: Any, epsilon: Any, hidden: Any, normed: Any, y: Any
) -> None:
    row = output_row[place]
    if row >= 0:
        layer_norm_row(stream[place], norm[np.uint64(0)], bias[np.uint64(0)], epsilon, y[np.uint64(row)] if hidden else normed[place])


@for_each
def _multiply_wanted(place: Any, x: Any, output_row: Any, output: Any, y: Any) -> None:
    n_vocab = np.uint64(output.shape[1])
    token, o = place // n_vocab, place % n_vocab
    row = output_row[token]
    if row >= 0:
        y[np.uint64(row), o] = product(x[token], output, o)


def multiply_wanted_rows(x: Any, output_row: Any, output: Any, y: Any) -> None:
    """y[output_row[i]] = x[i] @ output where the row is not -1; x float32 [tokens, in], output float32 [in, out]."""
    _multiply_wanted(output_row.size * output.shape[1], x, output_row, output, y)


def write_wanted_rows(stream: Any, output_row: Any, norm: Any, epsilon: Any, output: Any, hidden: Any, y: Any) -> None:
    """The end of most models: the final norm of the tokens whose row is wanted, and their logits unless `hidden`.

    stream      float32 [tokens, n_embd]
    output_row  int64 [tokens], the row of y that a token fills, -1 for none
    norm        float32 [1, n_embd]
    output      float32 [n_embd, n_vocab]
    y           float32 [wanted rows, n_embd when hidden, else n_vocab], written
    """
    normed = cuda.device_array(stream.shape, np.float32)
    _norm_wanted(output_row.size, stream, output_row, norm, epsilon, hidden, normed, y)
    if not hidden:
        multiply_wanted_rows(normed, output_row, output, y)


def write_wanted_layer_norm_rows(
    stream: Any, output_row: Any, norm: Any, bias: Any, epsilon: Any, output: Any, hidden: Any, y: Any
) -> None:
    """The end of models whose final norm is a layer norm: `write_wanted_rows` with `layer_norm`; bias float32 [1, n_embd]."""
    normed = cuda.device_array(stream.shape, np.float32)
    _layer_norm_wanted(output_row.size, stream, output_row, norm, bias, epsilon, hidden, normed, y)
    if not hidden:
        multiply_wanted_rows(normed, output_row, output, y)
