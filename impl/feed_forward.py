"""Gated feed-forward layers (SwiGLU) over one ubatch: what the families with such layers share.

Rules
- The weights of all such layers of a model are stacked; `layer` is a layer's index among them.
- The layer's norm and its residual are the caller's.
Source: Shazeer 2020 (arXiv:2002.05202), SwiGLU.
"""

from typing import NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from .kernels import kernel
from .kernels.dense import gated_linear_unit, linear
from .stacking import stacked_matrices


class FeedForwardWeights(NamedTuple):
    """Weights as `feed_forward` uses them, stacked over the layers; matrices [in, out], float32."""

    gate: np.ndarray  # [layers, n_embd, n_ff]
    up: np.ndarray  # [layers, n_embd, n_ff]
    down: np.ndarray  # [layers, n_ff, n_embd]


def prepare_feed_forward(dimensions: Dimensions, weights: Weights, layers: tuple[int, ...]) -> FeedForwardWeights:
    """Lay the weights `ffn_gate`, `ffn_up` and `ffn_down` of `layers` out."""
    n_embd, n_ff = dimensions["n_embd"], dimensions["n_ff"]
    return FeedForwardWeights(
        gate=stacked_matrices(weights, "ffn_gate", layers, n_ff, n_embd),
        up=stacked_matrices(weights, "ffn_up", layers, n_ff, n_embd),
        down=stacked_matrices(weights, "ffn_down", layers, n_embd, n_ff),
    )


@kernel
def feed_forward(weights: FeedForwardWeights, layer: int, x: np.ndarray, y: np.ndarray) -> None:
    """y = (silu(x @ gate) * (x @ up)) @ down; float32 [tokens, n_embd], y written. y may be x."""
    gate = np.empty((x.shape[0], weights.gate.shape[2]), np.float32)
    inner = np.empty((x.shape[0], weights.up.shape[2]), np.float32)
    linear(x, weights.gate[layer], gate)
    linear(x, weights.up[layer], inner)
    gated_linear_unit(gate, inner)
    linear(inner, weights.down[layer], y)
