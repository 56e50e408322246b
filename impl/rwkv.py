"""What the forwards of RWKV-6 and RWKV-7 share: shapes of rows, norms with a bias, and the channel mix over one ubatch.

Rules
- A convolution row is [2, n_embd]: what the time mix and the channel mix took in at the newest token.
- The norm of the embeddings is taken when a model is prepared, in float64.
- Weights are stacked over all layers of a model; the residual is the caller's.
Sources: Peng et al. 2024 (arXiv:2404.05892) and 2025 (arXiv:2503.14456); the `rwkv` package for the order of the parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.rwkv import HEAD_NORM_EPSILON, NORM_EPSILON
from .kernels import kernel
from .kernels.dense import layer_norm, linear, squared_relu
from .kernels.token_shift import blend, token_shift
from .memory import aligned

EPSILON, HEAD_EPSILON = np.float32(NORM_EPSILON), np.float32(HEAD_NORM_EPSILON)
TIME_MIX, CHANNEL_MIX = 0, 1
"""Parts of a convolution row."""


class Norm(NamedTuple):
    """Layer norms with their bias, float32 [layers or 1, groups, channels] each."""

    weight: np.ndarray
    bias: np.ndarray


class ChannelMixWeights(NamedTuple):
    """Weights as `mix_channels` uses them, stacked over layers; matrices [in, out], float32."""

    norm: Norm
    blend_key: np.ndarray  # [layers, 1, n_embd]
    key_projection: np.ndarray  # [layers, n_embd, n_ff]
    value_projection: np.ndarray  # [layers, n_ff, n_embd]


def stacked(dimensions: Dimensions, weights: Weights, name: str, *shape: int) -> np.ndarray:
    """The weight `name` of every layer, as vectors of the given shape where there is one, or as matrices turned to [in, out]."""
    arrays = np.stack([weights[f"layers.{layer}.{name}"] for layer in range(dimensions["n_layer"])])
    return aligned(arrays.reshape(len(arrays), *shape) if shape else arrays.swapaxes(-1, -2))


def norms(dimensions: Dimensions, weights: Weights, name: str, groups: int = 1) -> Norm:
    """The layer norm `name` of every layer."""
    size = dimensions["n_embd"] // groups
    return Norm(*(stacked(dimensions, weights, part, groups, size) for part in (name, name + "_bias")))


def output_norm(weights: Weights) -> Norm:
    """The norm after the last layer."""
    return Norm(aligned(weights["output_norm"][None, :]), aligned(weights["output_norm_bias"][None, :]))


def normed_embedding(weights: Weights) -> np.ndarray:
    """The embeddings after their norm, float32 [n_vocab, n_embd]."""
    table = weights["token_embedding"].astype(np.float64)
    table = (table - table.mean(-1, keepdims=True)) / np.sqrt(table.var(-1, keepdims=True) + NORM_EPSILON)
    return aligned(table * weights["embedding_norm"] + weights["embedding_norm_bias"])


def prepare_channel_mix(dimensions: Dimensions, weights: Weights) -> ChannelMixWeights:
    """Lay the weights that both families have in their channel mixes out."""
    return ChannelMixWeights(
        norm=norms(dimensions, weights, "channel_mix_norm"),
        blend_key=stacked(dimensions, weights, "channel_blend_key", 1, dimensions["n_embd"]),
        key_projection=stacked(dimensions, weights, "channel_key_projection"),
        value_projection=stacked(dimensions, weights, "channel_value_projection"),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows."""
    head_size = dimensions["wkv_head_size"]
    return {
        "convolution_shape": (2, dimensions["n_embd"]),
        "recurrent_shape": (dimensions["n_embd"] // head_size, head_size, head_size),
        "key_heads": 0,
        "head_dim": 0,
        "rope_theta": 0.0,
    }


@kernel
def mix_channels(
    weights: ChannelMixWeights,
    layer: int,
    shifts: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    stream: np.ndarray,
    normed: np.ndarray,
    before: np.ndarray,
    y: np.ndarray,
) -> None:
    """One channel mix: a squared ReLU of blends with the token before.

    shifts          float32 [n_rows, 2, n_embd], the layer's convolution rows; their part CHANNEL_MIX is read and written
    segment_start   int64 [segments + 1], source_row int64 [segments], plane_row int64 [segments, planes]: see `kernels.token_shift`
    stream          float32 [tokens, n_embd]
    normed, before  float32 [tokens, n_embd], written: the mix's input, and that of the token before
    y               float32 [tokens, n_embd], written
    """
    blended = np.empty(stream.shape, np.float32)
    inner = np.empty((stream.shape[0], weights.key_projection.shape[2]), np.float32)
    layer_norm(stream, weights.norm.weight[layer], weights.norm.bias[layer], EPSILON, normed)
    token_shift(normed, CHANNEL_MIX, shifts, segment_start, source_row, plane_row, before)
    blend(normed, before, weights.blend_key[layer], blended)
    linear(blended, weights.key_projection[layer], inner)
    squared_relu(inner)
    linear(inner, weights.value_projection[layer], y)
