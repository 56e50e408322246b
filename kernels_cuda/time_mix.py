"""What the time mixes of RWKV-6 and RWKV-7 do to single numbers and heads, as in `impl/kernels/time_mix.py`.

Rules
- A token's result depends on its own row alone, in a fixed order of summation.
"""

from typing import Any

import numpy as np

from . import for_each
from .arithmetic import exponential, hyperbolic_tangent, sigmoid, square_root
from .dense import sum_of_products

_LENGTH_MIN = np.float32(1e-12)
_ZERO, _ONE = np.float32(0), np.float32(1)


@for_each
def _through_tanh(place: Any, x: Any) -> None:
    channels = np.uint64(x.shape[1])
    token, i = place // channels, place % channels
    x[token, i] = hyperbolic_tangent(x[token, i])


def through_tanh(x: Any) -> None:
    """x = tanh(x) in place, float32 [tokens, channels]."""
    _through_tanh(x.size, x)


@for_each
def _add_to_rows(place: Any, x: Any, y: Any) -> None:
    channels = np.uint64(y.shape[1])
    token, i = place // channels, place % channels
    y[token, i] += x[i]


def add_to_rows(x: Any, y: Any) -> None:
    """y += x, x float32 [channels] to every row of y, float32 [tokens, channels]."""
    _add_to_rows(y.size, x, y)


@for_each
def _to_double_exponential_decay(place: Any, x: Any, base: Any) -> None:
    channels = np.uint64(x.shape[1])
    token, i = place // channels, place % channels
    x[token, i] = exponential(-exponential(base[i] + x[token, i]))


def to_double_exponential_decay(x: Any, base: Any) -> None:
    """x = exp(-exp(base + x)) in place, float32 [tokens, channels]; base float32 [channels]. RWKV-6."""
    _to_double_exponential_decay(x.size, x, base)


@for_each
def _to_bounded_decay(place: Any, x: Any, rate_max: Any) -> None:
    channels = np.uint64(x.shape[1])
    token, i = place // channels, place % channels
    x[token, i] = exponential(-rate_max * x[token, i])


def to_bounded_decay(x: Any, rate_max: Any) -> None:
    """x = exp(-rate_max * x) in place, float32 [tokens, channels]. RWKV-7, of x between 0 and 1."""
    _to_bounded_decay(x.size, x, rate_max)


@for_each
def _squash(place: Any, base: Any, x: Any) -> None:
    channels = np.uint64(x.shape[1])
    token, i = place // channels, place % channels
    x[token, i] = sigmoid(base[i] + x[token, i])


def squash(base: Any, x: Any) -> None:
    """x = sigmoid(base + x) in place, float32 [tokens, channels]; base float32 [channels]."""
    _squash(x.size, base, x)


@for_each
def _removals(place: Any, key: Any, factor: Any, heads: Any, removal: Any) -> None:
    count = np.uint64(heads)
    token, size = place // count, np.uint64(key.shape[1]) // count
    start = place % count * size
    part = removal[token, start : start + size]
    for i in range(part.size):
        part[np.uint64(i)] = key[token, start + np.uint64(i)] * factor[start + np.uint64(i)]
    length = square_root(sum_of_products(part, part))
    scale = _ONE / (length if length > _LENGTH_MIN else _LENGTH_MIN)
    for i in range(part.size):
        part[np.uint64(i)] *= scale


def removals(key: Any, factor: Any, heads: Any, removal: Any) -> None:
    """removal = key * factor, brought to length 1 head by head.

    key, removal  float32 [tokens, channels]; removal written
    factor        float32 [channels]
    """
    _removals(key.shape[0] * heads, key, factor, heads, removal)


@for_each
def _slow_keys(place: Any, rate: Any, factor: Any, key: Any) -> None:
    channels = np.uint64(key.shape[1])
    token, i = place // channels, place % channels
    key[token, i] *= _ONE + (rate[token, i] - _ONE) * factor[i]


def slow_keys(rate: Any, factor: Any, key: Any) -> None:
    """key *= 1 + (rate - 1) * factor: a key is taken in as fast as its channel forgets.

    rate, key  float32 [tokens, channels]
    factor     float32 [channels]
    """
    _slow_keys(key.size, rate, factor, key)


@for_each
def _add_own(place: Any, receptance: Any, key: Any, value: Any, first: Any, y: Any) -> None:
    heads = np.uint64(y.shape[1])
    token, head = place // heads, place % heads
    total = _ZERO
    for i in range(y.shape[2]):
        total += receptance[token, head, np.uint64(i)] * (key[token, head, np.uint64(i)] * first[head, np.uint64(i)])
    for i in range(y.shape[2]):
        y[token, head, np.uint64(i)] += value[token, head, np.uint64(i)] * total


def add_own(receptance: Any, key: Any, value: Any, first: Any, y: Any) -> None:
    """y += value * sum(receptance * key * first), head by head.

    receptance, key, value, y  float32 [tokens, heads, head size]
    first                      float32 [heads, head size]
    """
    _add_own(y.shape[0] * y.shape[1], receptance, key, value, first, y)
