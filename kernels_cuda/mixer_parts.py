"""What mixers do between their products with matrices, convolutions and scans, as in `impl/kernels/mixer_parts.py`.

Rules
- Tokens are rows; a token's result depends on its own row alone, in a fixed order of summation.
"""

from typing import Any

import numpy as np

from . import for_each
from .arithmetic import exponential, sigmoid, silu, softplus
from .dense import product


@for_each
def _softplus_rows(place: Any, step: Any, bias: Any) -> None:
    channels = np.uint64(step.shape[1])
    token, i = place // channels, place % channels
    step[token, i] = softplus(step[token, i] + bias[i])


def softplus_rows(step: Any, bias: Any) -> None:
    """step = softplus(step + bias) in place; float32 [tokens, channels], bias [channels]."""
    _softplus_rows(step.size, step, bias)


@for_each
def _skip_channels(place: Any, value: Any, d: Any, y: Any) -> None:
    channels = np.uint64(y.shape[1])
    token, i = place // channels, place % channels
    y[token, i] += d[i] * value[token, i]


def skip_channels(value: Any, d: Any, y: Any) -> None:
    """y += d * value, a factor for every channel; float32 [tokens, d_inner], d [d_inner]."""
    _skip_channels(y.size, value, d, y)


@for_each
def _split_mamba2(place: Any, convolved: Any, value: Any, b: Any, c: Any) -> None:
    channels = np.uint64(convolved.shape[1])
    token, i = place // channels, place % channels
    activated = silu(convolved[token, i])
    d_inner, width = np.uint64(value.shape[1]), np.uint64(b.shape[1])
    if i < d_inner:
        value[token, i] = activated
    elif i < d_inner + width:
        b[token, i - d_inner] = activated
    else:
        c[token, i - d_inner - width] = activated


def split_mamba2(convolved: Any, value: Any, b: Any, c: Any) -> None:
    """Split the convolution's output into value, B and C, with SiLU; float32 [tokens, channels] each, the last three written."""
    _split_mamba2(convolved.size, convolved, value, b, c)


@for_each
def _skip_heads(place: Any, value: Any, d: Any, y: Any) -> None:
    heads, size = np.uint64(y.shape[1]), np.uint64(y.shape[2])
    token, head, p = place // (heads * size), place // size % heads, place % size
    y[token, head, p] += d[head] * value[token, head, p]


def skip_heads(value: Any, d: Any, y: Any) -> None:
    """y += d * value, a factor for every head; float32 [tokens, heads, head_dim]."""
    _skip_heads(y.size, value, d, y)


@for_each
def _lay_out_heads(place: Any, convolved: Any, start: Any, key_heads: Any, y: Any) -> None:
    channels, d_state = np.uint64(y.shape[1]), np.uint64(y.shape[1]) // np.uint64(key_heads.size)
    token, i = place // channels, place % channels
    y[token, i] = silu(convolved[token, np.uint64(start) + np.uint64(key_heads[i // d_state]) * d_state + i % d_state])


@for_each
def _activate_part(place: Any, convolved: Any, start: Any, y: Any) -> None:
    channels = np.uint64(y.shape[1])
    token, i = place // channels, place % channels
    y[token, i] = silu(convolved[token, np.uint64(start) + i])


def split_delta_net(convolved: Any, groups: Any, key_heads: Any, query: Any, key: Any, value: Any) -> None:
    """Split the convolution's output into q, k and v, with SiLU, and lay the heads of q and k out in the order of `key_heads`.

    convolved   float32 [tokens, (2 * groups + value heads) * d_state]
    query, key  float32 [tokens, len(key_heads) * d_state], written
    value       float32 [tokens, value heads * d_state], written
    """
    width = groups * (query.shape[1] // key_heads.size)
    _lay_out_heads(query.size, convolved, 0, key_heads, query)
    _lay_out_heads(key.size, convolved, width, key_heads, key)
    _activate_part(value.size, convolved, 2 * width, value)


@for_each
def _delta_net_rates(place: Any, step: Any, step_bias: Any, a: Any, beta: Any) -> None:
    channels = np.uint64(step.shape[1])
    token, i = place // channels, place % channels
    step[token, i] = a[i] * softplus(step[token, i] + step_bias[i])
    beta[token, i] = sigmoid(beta[token, i])


def delta_net_rates(step: Any, step_bias: Any, a: Any, beta: Any) -> None:
    """step = a * softplus(step + step_bias), the logarithm of the decay; beta = sigmoid(beta). In place, float32 [tokens, value heads]."""
    _delta_net_rates(step.size, step, step_bias, a, beta)


def split_kimi_delta(convolved: Any, query: Any, key: Any, value: Any) -> None:
    """Split the convolution's output into q, k and v, with SiLU; float32 [tokens, channels] each, the last three written."""
    width = query.shape[1]
    for part, y in enumerate((query, key, value)):
        _activate_part(y.size, convolved, part * width, y)


@for_each
def _decays(place: Any, decay: Any, step_bias: Any, a: Any) -> None:
    channels = np.uint64(decay.shape[1])
    token, i, head_dim = place // channels, place % channels, channels // np.uint64(a.size)
    decay[token, i] = exponential(a[i // head_dim] * softplus(decay[token, i] + step_bias[i]))


@for_each
def _sigmoids(place: Any, x: Any) -> None:
    channels = np.uint64(x.shape[1])
    x[place // channels, place % channels] = sigmoid(x[place // channels, place % channels])


def kimi_delta_rates(decay: Any, step_bias: Any, a: Any, beta: Any) -> None:
    """decay = exp(a * softplus(decay + step_bias)), a factor; beta = sigmoid(beta). In place.

    decay      float32 [tokens, heads * head_dim]
    step_bias  float32 [heads * head_dim]
    a          float32 [heads]
    beta       float32 [tokens, heads]
    """
    _decays(decay.size, decay, step_bias, a)
    _sigmoids(beta.size, beta)


@for_each
def _multiply_heads(place: Any, x: Any, matrices: Any, y: Any) -> None:
    heads, n_out = np.uint64(x.shape[1]), np.uint64(matrices.shape[2])
    token, head, o = place // (heads * n_out), place // n_out % heads, place % n_out
    y[token, head, o] = product(x[token, head], matrices[head], o)


def multiply_heads(x: Any, matrices: Any, y: Any) -> None:
    """y = x @ the head's matrix: every output sums its inputs from the first to the last.

    x         float32 [tokens, heads, in or more], its first channels are read
    matrices  float32 [heads, in, out]
    y         float32 [tokens, heads, out or more], its first channels are written
    """
    _multiply_heads(x.shape[0] * x.shape[1] * matrices.shape[2], x, matrices, y)


@for_each
def _copy_last(place: Any, x: Any, count: Any, y: Any) -> None:
    heads, size = np.uint64(x.shape[1]), np.uint64(count)
    token, head, i = place // (heads * size), place // size % heads, place % size
    y[token, head, np.uint64(y.shape[2]) - size + i] = x[token, head, np.uint64(x.shape[2]) - size + i]


def copy_last_channels(x: Any, count: Any, y: Any) -> None:
    """The last `count` channels of y = those of x; float32 [tokens, heads, channels], as many or not."""
    _copy_last(x.shape[0] * x.shape[1] * count, x, count, y)


@for_each
def _join_rows(place: Any, first: Any, second: Any, y: Any) -> None:
    channels = np.uint64(y.shape[1])
    token, i = place // channels, place % channels
    size = np.uint64(first.shape[1])
    y[token, i] = first[token, i] if i < size else second[token, i - size]


def join_rows(first: Any, second: Any, y: Any) -> None:
    """y = first and second side by side; float32 [tokens, channels]."""
    _join_rows(y.size, first, second, y)


@for_each
def _scale_rows_by_sigmoid(place: Any, share: Any, x: Any) -> None:
    channels = np.uint64(x.shape[1])
    token, i = place // channels, place % channels
    x[token, i] *= sigmoid(share[token, np.uint64(0)])


def scale_rows_by_sigmoid(share: Any, x: Any) -> None:
    """x *= sigmoid(share), a factor for every row, in place; float32 [tokens, channels], share [tokens, 1]."""
    _scale_rows_by_sigmoid(x.size, share, x)
