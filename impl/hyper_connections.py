"""Residual streams side by side: what a block is given of them, and how they take what it gives.

Rules
- Streams are float32 [tokens, streams * n_embd]. A token's result depends on its own row alone.
- The weights of all mixers of a kind are stacked; `place` is a layer's index among them.
Sources: Zhu et al. 2024 (hyper-connections, arXiv:2409.19606); Transformers' Qwen4ExpForCausalLM, for this form of them.
"""

from typing import NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from .kernels import kernel
from .kernels.dense import linear, rms_norm
from .kernels.streams import gated_mean, silu_of_scaled_rows, twice_sigmoid_of_scaled_rows
from .memory import aligned


class MixerWeights(NamedTuple):
    """Weights of some mixers; matrices [in, out], float32."""

    norm: np.ndarray  # [mixers, streams, n_embd]
    down: np.ndarray  # [mixers, channels of all streams, rank]
    up: np.ndarray  # [mixers, rank, channels of all streams]
    inject: np.ndarray  # [mixers, channels of all streams, streams]; no mixer where nothing is given back


def prepare_mixers(dimensions: Dimensions, weights: Weights, prefixes: list[str]) -> MixerWeights:
    """Lay out the mixers whose weights' names begin with `prefixes`."""
    streams, n_embd = dimensions["hyper_connections"], dimensions["n_embd"]

    def matrices(name: str) -> np.ndarray:
        found = [weights[prefix + name].T for prefix in prefixes if prefix + name in weights]
        return aligned(np.stack(found)) if found else aligned(np.zeros((0, streams * n_embd, streams)))

    norm = np.stack([weights[prefix + "mix_norm"].reshape(streams, n_embd) for prefix in prefixes])
    return MixerWeights(aligned(norm), matrices("mix_down"), matrices("mix_up"), matrices("inject"))


@kernel
def norm_streams(streams: np.ndarray, weight: np.ndarray, epsilon: np.float32, y: np.ndarray) -> None:
    """Every stream normed by itself. y may be streams.

    streams, y  float32 [tokens, streams * n_embd]; y written
    weight      float32 [streams, n_embd]
    """
    rows = streams.shape[0] * weight.shape[0]
    rms_norm(streams.reshape((rows, weight.shape[1])), weight, epsilon, y.reshape((rows, weight.shape[1])))


@kernel
def mix_streams(
    weights: MixerWeights, place: int, streams: np.ndarray, epsilon: np.float32, normed: np.ndarray, shares: np.ndarray, y: np.ndarray
) -> None:
    """What a block is given: every channel of every normed stream weighed, and the mean over streams.

    streams  float32 [tokens, channels of all streams]
    normed   float32, the same, written
    shares   float32 [tokens, streams], each stream's share of what the block gives, written unless the mixer has none
    y        float32 [tokens, n_embd], written
    """
    tokens, channels = streams.shape
    scale = np.float32(1) / np.float32(weights.norm.shape[1])
    norm_streams(streams, weights.norm[place], epsilon, normed)
    low = np.empty((tokens, weights.down.shape[2]), np.float32)
    gate = np.empty((tokens, channels), np.float32)
    linear(normed, weights.down[place], low)
    silu_of_scaled_rows(scale, low)
    linear(low, weights.up[place], gate)
    gated_mean(normed, gate, scale, y)
    if weights.inject.shape[0] > 0:
        linear(normed, weights.inject[place], shares)
        twice_sigmoid_of_scaled_rows(scale, shares)
