"""A mixture of experts, every one of them used: gated linear units, added up by shares.

Rules
- Nothing is selected, so that a token's result is a continuous function of its row; a share is a number between 0 and 1.
- Experts are added in their order; a token's result depends on its own row alone.
Source: Shazeer et al. 2017 (arXiv:1701.06538), eq. 1.
"""

import numpy as np

from . import kernel
from .arithmetic import exponential, sigmoid
from .dense import gated_linear_unit, linear


@kernel
def softmax_shares(scores: np.ndarray) -> None:
    """scores = softmax of each row, in place; float32 [tokens, experts]."""
    for token in range(scores.shape[0]):
        row = scores[token]
        largest = row[0]
        for expert in range(1, row.size):
            largest = max(largest, row[expert])
        total = np.float32(0)
        for expert in range(row.size):
            row[expert] = exponential(row[expert] - largest)
            total += row[expert]
        for expert in range(row.size):
            row[expert] = row[expert] / total


@kernel
def sigmoid_shares(scores: np.ndarray, scale: np.float32) -> None:
    """scores = sigmoid of each number over its row's sum, times `scale`, in place; float32 [tokens, experts]."""
    for token in range(scores.shape[0]):
        row = scores[token]
        total = np.float32(0)
        for expert in range(row.size):
            row[expert] = sigmoid(row[expert])
            total += row[expert]
        for expert in range(row.size):
            row[expert] = row[expert] / total * scale


@kernel
def expert_mixture(x: np.ndarray, shares: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, y: np.ndarray) -> None:
    """y = sum over experts e of shares[:, e] * ((silu(x @ gate[e]) * (x @ up[e])) @ down[e]).

    x, y      float32 [tokens, n_embd]; y written, it may not be x
    shares    float32 [tokens, experts]
    gate, up  float32 [experts, n_embd, n_ff]
    down      float32 [experts, n_ff, n_embd]
    """
    tokens, n_embd = x.shape
    inner = np.empty((tokens, up.shape[2]), np.float32)
    inner_gate = np.empty((tokens, up.shape[2]), np.float32)
    own = np.empty((tokens, n_embd), np.float32)
    for token in range(tokens):
        result = y[token]
        for i in range(n_embd):
            result[i] = np.float32(0)
    for expert in range(up.shape[0]):
        linear(x, gate[expert], inner_gate)
        linear(x, up[expert], inner)
        gated_linear_unit(inner_gate, inner)
        linear(inner, down[expert], own)
        for token in range(tokens):
            share, source, result = shares[token, expert], own[token], y[token]
            for i in range(n_embd):
                result[i] = result[i] + share * source[i]
