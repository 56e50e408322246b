"""Mixtures of experts beside one that every token uses, over one ubatch: what the families with such layers share.

Rules
- The weights of all such layers of a model are stacked; `layer` is a layer's index among them.
- The shared expert's output is multiplied by the sigmoid of a score of its own.
- The layer's norm and its residual are the caller's.
Source: Transformers' Qwen3NextForCausalLM for the order of the parts.
"""

from typing import NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from .kernels import kernel
from .kernels.dense import add_rows, gated_linear_unit, linear
from .kernels.experts import expert_mixture, softmax_shares
from .kernels.mixer_parts import scale_rows_by_sigmoid
from .stacking import stacked_experts, stacked_matrices


class ExpertWeights(NamedTuple):
    """Weights as `mix_experts` uses them, stacked over the layers; matrices [in, out], float32."""

    router: np.ndarray  # [layers, n_embd, experts]
    gate: np.ndarray  # [layers, experts, n_embd, n_ff]
    up: np.ndarray  # [layers, experts, n_embd, n_ff]
    down: np.ndarray  # [layers, experts, n_ff, n_embd]
    shared_share: np.ndarray  # [layers, n_embd, 1]
    shared_gate: np.ndarray  # [layers, n_embd, n_ff of the shared expert]
    shared_up: np.ndarray  # [layers, n_embd, n_ff of the shared expert]
    shared_down: np.ndarray  # [layers, n_ff of the shared expert, n_embd]


def prepare_experts(dimensions: Dimensions, weights: Weights, layers: tuple[int, ...], n_ff: int, shared_share: str) -> ExpertWeights:
    """Lay the experts of `layers` out.

    n_ff          channels within an expert
    shared_share  what the projection to the shared expert's score is called
    """
    n_embd, n_expert, n_ff_shared = (dimensions[name] for name in ("n_embd", "n_expert", "n_ff_shared"))
    return ExpertWeights(
        router=stacked_matrices(weights, "router", layers, n_expert, n_embd),
        gate=stacked_experts(weights, "expert_gate", layers, n_expert, n_ff, n_embd),
        up=stacked_experts(weights, "expert_up", layers, n_expert, n_ff, n_embd),
        down=stacked_experts(weights, "expert_down", layers, n_expert, n_embd, n_ff),
        shared_share=stacked_matrices(weights, shared_share, layers, 1, n_embd),
        shared_gate=stacked_matrices(weights, "shared_gate", layers, n_ff_shared, n_embd),
        shared_up=stacked_matrices(weights, "shared_up", layers, n_ff_shared, n_embd),
        shared_down=stacked_matrices(weights, "shared_down", layers, n_embd, n_ff_shared),
    )


@kernel
def mix_experts(weights: ExpertWeights, layer: int, x: np.ndarray, y: np.ndarray) -> None:
    """The experts and the shared one; x and y float32 [tokens, n_embd], y written."""
    tokens = x.shape[0]
    shares, share = np.empty((tokens, weights.router.shape[2]), np.float32), np.empty((tokens, 1), np.float32)
    inner, gate = (
        np.empty((tokens, weights.shared_up.shape[2]), np.float32),
        np.empty((tokens, weights.shared_up.shape[2]), np.float32),
    )
    shared = np.empty(x.shape, np.float32)
    linear(x, weights.router[layer], shares)
    softmax_shares(shares)
    expert_mixture(x, shares, weights.gate[layer], weights.up[layer], weights.down[layer], y)
    linear(x, weights.shared_gate[layer], gate)
    linear(x, weights.shared_up[layer], inner)
    gated_linear_unit(gate, inner)
    linear(inner, weights.shared_down[layer], shared)
    linear(x, weights.shared_share[layer], share)
    scale_rows_by_sigmoid(share, shared)
    add_rows(shared, y)
