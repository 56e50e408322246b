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
from .kernels.arithmetic import sigmoid, silu
from .kernels.dense import linear, rms_norm
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
    count, n_embd = weights.norm.shape[1], weights.norm.shape[2]
    scale = np.float32(1) / np.float32(count)
    norm_streams(streams, weights.norm[place], epsilon, normed)
    low = np.empty((tokens, weights.down.shape[2]), np.float32)
    gate = np.empty((tokens, channels), np.float32)
    linear(normed, weights.down[place], low)
    for token in range(tokens):
        row = low[token]
        for i in range(row.size):
            row[i] = silu(row[i] * scale)
    linear(low, weights.up[place], gate)
    for token in range(tokens):
        result = y[token]
        for i in range(n_embd):
            result[i] = np.float32(0)
        for stream in range(count):
            own, own_gate = normed[token, stream * n_embd : (stream + 1) * n_embd], gate[token, stream * n_embd : (stream + 1) * n_embd]
            for i in range(n_embd):
                result[i] = result[i] + own[i] * sigmoid(own_gate[i])
        for i in range(n_embd):
            result[i] = result[i] * scale
    if weights.inject.shape[0] > 0:
        linear(normed, weights.inject[place], shares)
        for token in range(tokens):
            row = shares[token]
            for i in range(count):
                row[i] = np.float32(2) * sigmoid(row[i] * scale)


@kernel
def inject(x: np.ndarray, shares: np.ndarray, streams: np.ndarray) -> None:
    """Add x to every stream by its share.

    x        float32 [tokens, n_embd]
    shares   float32 [tokens, streams]
    streams  float32 [tokens, streams * n_embd], written
    """
    n_embd = x.shape[1]
    for token in range(x.shape[0]):
        source = x[token]
        for stream in range(shares.shape[1]):
            share = shares[token, stream]
            result = streams[token, stream * n_embd : (stream + 1) * n_embd]
            for i in range(n_embd):
                result[i] = result[i] + source[i] * share
