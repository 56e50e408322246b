"""What the time mixes of RWKV-6 and RWKV-7 do to single numbers and heads, beside their recurrences.

Rules
- A token's result depends on its own row alone, in a fixed order of summation.
Sources: Peng et al. 2024 (arXiv:2404.05892) and 2025 (arXiv:2503.14456); the `rwkv` package.
"""

import math

import numpy as np

from . import kernel
from .arithmetic import exponential, hyperbolic_tangent, sigmoid
from .dense import sum_of_products

_LENGTH_MIN = np.float32(1e-12)
_ONE = np.float32(1)


@kernel
def through_tanh(x: np.ndarray) -> None:
    """x = tanh(x) in place, float32 [tokens, channels]."""
    for token in range(x.shape[0]):
        row = x[token]
        for i in range(row.size):
            row[i] = hyperbolic_tangent(row[i])


@kernel
def add_to_rows(x: np.ndarray, y: np.ndarray) -> None:
    """y += x, x float32 [channels] to every row of y, float32 [tokens, channels]."""
    for token in range(y.shape[0]):
        row = y[token]
        for i in range(row.size):
            row[i] = row[i] + x[i]


@kernel
def to_double_exponential_decay(x: np.ndarray, base: np.ndarray) -> None:
    """x = exp(-exp(base + x)) in place, float32 [tokens, channels]; base float32 [channels]. RWKV-6."""
    for token in range(x.shape[0]):
        row = x[token]
        for i in range(row.size):
            row[i] = exponential(-exponential(base[i] + row[i]))


@kernel
def to_bounded_decay(x: np.ndarray, rate_max: np.float32) -> None:
    """x = exp(-rate_max * x) in place, float32 [tokens, channels]. RWKV-7, of x between 0 and 1."""
    for token in range(x.shape[0]):
        row = x[token]
        for i in range(row.size):
            row[i] = exponential(-rate_max * row[i])


@kernel
def squash(base: np.ndarray, x: np.ndarray) -> None:
    """x = sigmoid(base + x) in place, float32 [tokens, channels]; base float32 [channels]."""
    for token in range(x.shape[0]):
        row = x[token]
        for i in range(row.size):
            row[i] = sigmoid(base[i] + row[i])


@kernel
def removals(key: np.ndarray, factor: np.ndarray, heads: int, removal: np.ndarray) -> None:
    """removal = key * factor, brought to length 1 head by head.

    key, removal  float32 [tokens, channels]; removal written
    factor        float32 [channels]
    """
    size = key.shape[1] // heads
    for token in range(key.shape[0]):
        source, result = key[token], removal[token]
        for i in range(source.size):
            result[i] = source[i] * factor[i]
        for head in range(heads):
            part = result[head * size : (head + 1) * size]
            length = np.float32(math.sqrt(sum_of_products(part, part)))
            scale = _ONE / (length if length > _LENGTH_MIN else _LENGTH_MIN)
            for i in range(size):
                part[i] = part[i] * scale


@kernel
def slow_keys(rate: np.ndarray, factor: np.ndarray, key: np.ndarray) -> None:
    """key *= 1 + (rate - 1) * factor: a key is taken in as fast as its channel forgets.

    rate, key  float32 [tokens, channels]
    factor     float32 [channels]
    """
    for token in range(key.shape[0]):
        speed, row = rate[token], key[token]
        for i in range(row.size):
            row[i] = row[i] * (_ONE + (speed[i] - _ONE) * factor[i])


@kernel
def add_own(receptance: np.ndarray, key: np.ndarray, value: np.ndarray, first: np.ndarray, y: np.ndarray) -> None:
    """y += value * sum(receptance * key * first), head by head.

    receptance, key, value, y  float32 [tokens, heads, head size]
    first                      float32 [heads, head size]
    """
    weighted = np.empty(first.shape[1], np.float32)
    for token in range(y.shape[0]):
        for head in range(y.shape[1]):
            own_key, source, result = key[token, head], value[token, head], y[token, head]
            for i in range(weighted.size):
                weighted[i] = own_key[i] * first[head, i]
            total = sum_of_products(receptance[token, head], weighted)
            for i in range(weighted.size):
                result[i] = result[i] + source[i] * total
