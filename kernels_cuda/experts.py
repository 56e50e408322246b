"""A mixture of experts, every one of them used, as in `impl/kernels/experts.py`.

Rules
- Nothing is selected; experts are added in their order. A token's result depends on its own row alone.
"""

from typing import Any

import numpy as np
from numba import cuda

from . import for_each
from .arithmetic import exponential, sigmoid
from .dense import gated_linear_unit, linear

_ZERO = np.float32(0)


@for_each
def _softmax(place: Any, scores: Any) -> None:
    row = scores[place]
    largest = row[np.uint64(0)]
    for expert in range(1, row.size):
        largest = max(largest, row[np.uint64(expert)])
    total = _ZERO
    for expert in range(row.size):
        row[np.uint64(expert)] = exponential(row[np.uint64(expert)] - largest)
        total += row[np.uint64(expert)]
    for expert in range(row.size):
        row[np.uint64(expert)] = row[np.uint64(expert)] / total


def softmax_shares(scores: Any) -> None:
    """scores = softmax of each row, in place; float32 [tokens, experts]."""
    _softmax(scores.shape[0], scores)


@for_each
def _sigmoids(place: Any, scores: Any, scale: Any) -> None:
    row = scores[place]
    total = _ZERO
    for expert in range(row.size):
        row[np.uint64(expert)] = sigmoid(row[np.uint64(expert)])
        total += row[np.uint64(expert)]
    for expert in range(row.size):
        row[np.uint64(expert)] = row[np.uint64(expert)] / total * scale


def sigmoid_shares(scores: Any, scale: Any) -> None:
    """scores = sigmoid of each number over its row's sum, times `scale`, in place; float32 [tokens, experts]."""
    _sigmoids(scores.shape[0], scores, scale)


@for_each
def _add_share(place: Any, own: Any, shares: Any, expert: Any, y: Any) -> None:
    channels, which = np.uint64(y.shape[1]), np.uint64(expert)
    token, i = place // channels, place % channels
    added = shares[token, which] * own[token, i]
    y[token, i] = added if which == np.uint64(0) else y[token, i] + added


def expert_mixture(x: Any, shares: Any, gate: Any, up: Any, down: Any, y: Any) -> None:
    """y = sum over experts e of shares[:, e] * ((silu(x @ gate[e]) * (x @ up[e])) @ down[e]).

    x, y      float32 [tokens, n_embd]; y written, it may not be x
    shares    float32 [tokens, experts]
    gate, up  float32 [experts, n_embd, n_ff]
    down      float32 [experts, n_ff, n_embd]
    """
    inner = cuda.device_array((x.shape[0], up.shape[2]), np.float32)
    inner_gate = cuda.device_array((x.shape[0], up.shape[2]), np.float32)
    own = cuda.device_array(x.shape, np.float32)
    for expert in range(up.shape[0]):
        linear(x, gate[expert], inner_gate)
        linear(x, up[expert], inner)
        gated_linear_unit(inner_gate, inner)
        linear(inner, down[expert], own)
        _add_share(y.size, own, shares, expert, y)
