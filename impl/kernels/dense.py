"""Dense parts of a token's way through a layer: products with a matrix, norms, rotary positions.

Rules
- Tokens are rows; a token's result depends on its own row alone, in a fixed order of summation.
- Matrices are stored [in, out], so that the inner loop runs over outputs and needs no split sum.
Sources: Zhang and Sennrich 2019 (RMS norm, arXiv:1910.07467); Su et al. 2021 (rotary positions, arXiv:2104.09864).
"""

import math

import numpy as np

from . import kernel
from .arithmetic import gelu, sigmoid, silu

_INPUTS_AT_ONCE = 8


@kernel
def linear(x: np.ndarray, matrix: np.ndarray, y: np.ndarray) -> None:
    """y = x @ matrix: every output sums its inputs from the first to the last.

    x       float32 [tokens, in]
    matrix  float32 [in, out]
    y       float32 [tokens, out], written
    """
    n_in, n_out = matrix.shape
    whole = n_in // _INPUTS_AT_ONCE * _INPUTS_AT_ONCE
    for token in range(x.shape[0]):
        source = x[token]
        result = y[token]
        for o in range(n_out):
            result[o] = np.float32(0)
        # Eight inputs a pass: the same additions in the same order, with an eighth of the loads and stores of the running sums.
        for i in range(0, whole, _INPUTS_AT_ONCE):
            x0, x1, x2, x3 = source[i], source[i + 1], source[i + 2], source[i + 3]
            x4, x5, x6, x7 = source[i + 4], source[i + 5], source[i + 6], source[i + 7]
            m0, m1, m2, m3 = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
            m4, m5, m6, m7 = matrix[i + 4], matrix[i + 5], matrix[i + 6], matrix[i + 7]
            for o in range(n_out):
                total = result[o] + x0 * m0[o] + x1 * m1[o] + x2 * m2[o] + x3 * m3[o]
                result[o] = total + x4 * m4[o] + x5 * m5[o] + x6 * m6[o] + x7 * m7[o]
        for i in range(whole, n_in):
            xi = source[i]
            row = matrix[i]
            for o in range(n_out):
                result[o] = result[o] + xi * row[o]


@kernel
def add_rows(x: np.ndarray, y: np.ndarray) -> None:
    """y += x, float32 [tokens, channels] both."""
    for token in range(x.shape[0]):
        source = x[token]
        result = y[token]
        for i in range(source.size):
            result[i] = result[i] + source[i]


@kernel
def add_to_scaled_rows(x: np.ndarray, kept: np.ndarray, scale: np.float32, y: np.ndarray) -> None:
    """y = scale * kept + x, float32 [tokens, channels] all."""
    for token in range(y.shape[0]):
        own, source, result = x[token], kept[token], y[token]
        for i in range(result.size):
            result[i] = scale * source[i] + own[i]


@kernel
def sum_of_products(x: np.ndarray, y: np.ndarray) -> np.float32:
    """The sum of x[i] * y[i], float32: four running sums, of every fourth product each, that are added at the end.

    x, y  float32 [channels]
    """
    whole = x.size // 4 * 4
    s0 = s1 = s2 = s3 = np.float32(0)
    for i in range(0, whole, 4):
        s0 += x[i] * y[i]
        s1 += x[i + 1] * y[i + 1]
        s2 += x[i + 2] * y[i + 2]
        s3 += x[i + 3] * y[i + 3]
    for i in range(whole, x.size):
        s0 += x[i] * y[i]
    return (s0 + s1) + (s2 + s3)


@kernel
def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: np.float32, y: np.ndarray) -> None:
    """y = x / sqrt(mean(x^2) + epsilon) * weight, over whole rows. y may be x.

    x, y     float32 [rows, channels]; y written
    weight   float32 [groups, channels]; rows take the groups in turn
    epsilon  float32
    """
    channels = x.shape[1]
    for row in range(x.shape[0]):
        source = x[row]
        squares = sum_of_products(source, source)
        scale = np.float32(1) / np.float32(math.sqrt(squares / np.float32(channels) + epsilon))
        result = y[row]
        factor = weight[row % weight.shape[0]]
        for i in range(channels):
            result[i] = source[i] * scale * factor[i]


@kernel
def to_length(x: np.ndarray, length: np.float32, epsilon: np.float32) -> None:
    """x = length * x / sqrt(sum(x^2) + epsilon) in place, over whole rows; float32 [rows, channels]."""
    for row in range(x.shape[0]):
        source = x[row]
        scale = length / np.float32(math.sqrt(sum_of_products(source, source) + epsilon))
        for i in range(source.size):
            source[i] = source[i] * scale


@kernel
def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, epsilon: np.float32, y: np.ndarray) -> None:
    """y = (x - mean) / sqrt(mean((x - mean)^2) + epsilon) * weight + bias, over whole rows. y may be x.

    x, y          float32 [rows, channels]; y written
    weight, bias  float32 [groups, channels]; rows take the groups in turn
    epsilon       float32
    """
    channels = x.shape[1]
    for row in range(x.shape[0]):
        source, result = x[row], y[row]
        mean = _sum(source) / np.float32(channels)
        for i in range(channels):
            result[i] = source[i] - mean
        squares = sum_of_products(result, result)
        scale = np.float32(1) / np.float32(math.sqrt(squares / np.float32(channels) + epsilon))
        factor, summand = weight[row % weight.shape[0]], bias[row % bias.shape[0]]
        for i in range(channels):
            result[i] = result[i] * scale * factor[i] + summand[i]


@kernel
def _sum(x: np.ndarray) -> np.float32:
    """The sum of x, float32 [channels], added as in `sum_of_products`."""
    whole = x.size // 4 * 4
    s0 = s1 = s2 = s3 = np.float32(0)
    for i in range(0, whole, 4):
        s0 += x[i]
        s1 += x[i + 1]
        s2 += x[i + 2]
        s3 += x[i + 3]
    for i in range(whole, x.size):
        s0 += x[i]
    return (s0 + s1) + (s2 + s3)


@kernel
def silu_rows(x: np.ndarray) -> None:
    """x = silu(x) in place, float32 [tokens, channels]."""
    for token in range(x.shape[0]):
        row = x[token]
        for i in range(row.size):
            row[i] = silu(row[i])


@kernel
def multiply_rows(x: np.ndarray, y: np.ndarray) -> None:
    """y *= x, float32 [tokens, channels] both."""
    for token in range(x.shape[0]):
        source, result = x[token], y[token]
        for i in range(source.size):
            result[i] = result[i] * source[i]


@kernel
def gated_linear_unit(gate: np.ndarray, value: np.ndarray) -> None:
    """value *= silu(gate), float32 [tokens, channels] both."""
    for token in range(gate.shape[0]):
        source = gate[token]
        result = value[token]
        for i in range(source.size):
            result[i] = result[i] * silu(source[i])


@kernel
def gated_gelu_unit(gate: np.ndarray, value: np.ndarray) -> None:
    """value *= gelu(gate), float32 [tokens, channels] both."""
    for token in range(gate.shape[0]):
        source, result = gate[token], value[token]
        for i in range(source.size):
            result[i] = result[i] * gelu(source[i])


@kernel
def gate_by_sigmoid(gate: np.ndarray, value: np.ndarray) -> None:
    """value *= sigmoid(gate), float32 [tokens, channels] both."""
    for token in range(gate.shape[0]):
        source, result = gate[token], value[token]
        for i in range(source.size):
            result[i] = result[i] * sigmoid(source[i])


@kernel
def squared_relu(x: np.ndarray) -> None:
    """x = max(x, 0)^2 in place, float32 [tokens, channels]. NaN stays NaN."""
    for token in range(x.shape[0]):
        row = x[token]
        for i in range(row.size):
            row[i] = np.float32(0) if row[i] < np.float32(0) else row[i] * row[i]


@kernel
def rotary_table(positions: np.ndarray, half: int, theta: float, cosine: np.ndarray, sine: np.ndarray) -> None:
    """Cosine and sine of every token's rotation angles: position * theta^(-i / half).

    positions     int64 [tokens]
    half          channels of half a head
    cosine, sine  float32 [tokens, half], written; angles are taken in float64, since float32 loses digits with the position
    """
    for i in range(half):
        frequency = theta ** (-i / half)
        for token in range(positions.size):
            angle = positions[token] * frequency
            cosine[token, i] = math.cos(angle)
            sine[token, i] = math.sin(angle)


@kernel
def rotate(x: np.ndarray, cosine: np.ndarray, sine: np.ndarray) -> None:
    """Rotary positions in place: each half of a head against the other.

    x             float32 [tokens, heads, 2 * half]
    cosine, sine  float32 [tokens, half]
    """
    half = cosine.shape[1]
    for token in range(x.shape[0]):
        for head in range(x.shape[1]):
            for i in range(half):
                first = x[token, head, i]
                second = x[token, head, half + i]
                x[token, head, i] = first * cosine[token, i] - second * sine[token, i]
                x[token, head, half + i] = second * cosine[token, i] + first * sine[token, i]


@kernel
def embed(tokens: np.ndarray, table: np.ndarray, y: np.ndarray) -> None:
    """y[i] = table[tokens[i]].

    tokens  int64 [tokens]
    table   float32 [n_vocab, channels]
    y       float32 [tokens, channels], written
    """
    for token in range(tokens.size):
        source = table[tokens[token]]
        result = y[token]
        for i in range(source.size):
            result[i] = source[i]


@kernel
def write_wanted_rows(
    stream: np.ndarray, output_row: np.ndarray, norm: np.ndarray, epsilon: np.float32, output: np.ndarray, hidden: bool, y: np.ndarray
) -> None:
    """The end of most models: the final norm of the tokens whose row is wanted, and their logits unless `hidden`.

    stream      float32 [tokens, n_embd]
    output_row  int64 [tokens], the row of y that a token fills, -1 for none
    norm        float32 [1, n_embd]
    output      float32 [n_embd, n_vocab]
    y           float32 [wanted rows, n_embd when hidden, else n_vocab], written
    """
    normed = np.empty((1, stream.shape[1]), np.float32)
    for token in range(output_row.size):
        row = output_row[token]
        if row >= 0:
            if hidden:
                rms_norm(stream[token : token + 1], norm, epsilon, y[row : row + 1])
            else:
                rms_norm(stream[token : token + 1], norm, epsilon, normed)
                linear(normed, output, y[row : row + 1])


@kernel
def write_wanted_layer_norm_rows(
    stream: np.ndarray,
    output_row: np.ndarray,
    norm: np.ndarray,
    bias: np.ndarray,
    epsilon: np.float32,
    output: np.ndarray,
    hidden: bool,
    y: np.ndarray,
) -> None:
    """The end of models whose final norm is a layer norm: `write_wanted_rows` with `layer_norm`; bias float32 [1, n_embd]."""
    normed = np.empty((1, stream.shape[1]), np.float32)
    for token in range(output_row.size):
        row = output_row[token]
        if row >= 0:
            if hidden:
                layer_norm(stream[token : token + 1], norm, bias, epsilon, y[row : row + 1])
            else:
                layer_norm(stream[token : token + 1], norm, bias, epsilon, normed)
                linear(normed, output, y[row : row + 1])
