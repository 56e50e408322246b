"""The incremental forward of rwkv6.

Rules
- One call does one ubatch through all layers, reading each sequence's state from its source row and writing its snapshots.
- A convolution row is [2, n_embd]: what the time mix and the channel mix took in at the newest token.
- The norm of the embeddings is taken when a model is prepared, in float64.
Sources: Peng et al. 2024 (arXiv:2404.05892); the `rwkv` package's RWKV class (version 6.0) for the order of the parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.rwkv6 import BLENDS, HEAD_NORM_EPSILON, NORM_EPSILON
from .batches import SplitBatch
from .cells import Plan
from .forwards import Memory, Sights
from .kernels import kernel
from .kernels.arithmetic import exponential, hyperbolic_tangent
from .kernels.dense import (
    add_rows,
    embed,
    gate_by_sigmoid,
    gated_linear_unit,
    layer_norm,
    linear,
    squared_relu,
    write_wanted_layer_norm_rows,
)
from .kernels.rwkv6_wkv import rwkv6_wkv
from .kernels.token_shift import blend, token_shift
from .memory import aligned
from .ubatches import begin_ubatch

_EPSILON, _HEAD_EPSILON = np.float32(NORM_EPSILON), np.float32(HEAD_NORM_EPSILON)
TIME_MIX, CHANNEL_MIX = 0, 1
"""Parts of a convolution row."""


class Norm(NamedTuple):
    """Layer norms with their bias, float32 [layers or 1, groups, channels] each."""

    weight: np.ndarray
    bias: np.ndarray


class Rwkv6Weights(NamedTuple):
    """Weights as the forward uses them, stacked over layers; matrices [in, out]. All float32."""

    embedding: np.ndarray  # [n_vocab, n_embd], after its norm
    time_mix_norm: Norm
    blend_base: np.ndarray  # [layers, 1, n_embd]
    blend_down: np.ndarray  # [layers, BLENDS, n_embd, rank]
    blend_up: np.ndarray  # [layers, BLENDS, rank, n_embd]
    blends: np.ndarray  # [layers, BLENDS, n_embd]
    decay_base: np.ndarray  # [layers, n_embd]
    decay_down: np.ndarray  # [layers, n_embd, rank]
    decay_up: np.ndarray  # [layers, rank, n_embd]
    first: np.ndarray  # [layers, heads, key channels]
    receptance_projection: np.ndarray  # [layers, n_embd, n_embd], as all projections of the time mix
    key_projection: np.ndarray
    value_projection: np.ndarray
    gate_projection: np.ndarray
    head_norm: Norm
    out_projection: np.ndarray
    channel_mix_norm: Norm
    channel_blend_key: np.ndarray  # [layers, 1, n_embd]
    channel_blend_receptance: np.ndarray  # [layers, 1, n_embd]
    channel_key_projection: np.ndarray  # [layers, n_embd, n_ff]
    channel_value_projection: np.ndarray  # [layers, n_ff, n_embd]
    channel_receptance_projection: np.ndarray  # [layers, n_embd, n_embd]
    output_norm: Norm
    output: np.ndarray  # [n_embd, n_vocab]


def stacked(dimensions: Dimensions, weights: Weights, name: str, *shape: int) -> np.ndarray:
    """The weight `name` of every layer, as vectors of the given shape where there is one, or as matrices turned to [in, out]."""
    arrays = np.stack([weights[f"layers.{layer}.{name}"] for layer in range(dimensions["n_layer"])])
    return aligned(arrays.reshape(len(arrays), *shape) if shape else arrays.swapaxes(-1, -2))


def norms(dimensions: Dimensions, weights: Weights, name: str, groups: int = 1) -> Norm:
    """The layer norm `name` of every layer."""
    size = dimensions["n_embd"] // groups
    return Norm(*(stacked(dimensions, weights, part, groups, size) for part in (name, name + "_bias")))


def normed_embedding(weights: Weights) -> np.ndarray:
    """The embeddings after their norm, float32 [n_vocab, n_embd]."""
    table = weights["token_embedding"].astype(np.float64)
    table = (table - table.mean(-1, keepdims=True)) / np.sqrt(table.var(-1, keepdims=True) + NORM_EPSILON)
    return aligned(table * weights["embedding_norm"] + weights["embedding_norm_bias"])


def prepare(dimensions: Dimensions, weights: Weights) -> Rwkv6Weights:
    """Lay the family's weights out for `forward`."""
    n_embd, head_size = dimensions["n_embd"], dimensions["wkv_head_size"]

    def matrices(name: str) -> np.ndarray:
        return stacked(dimensions, weights, name)

    def vectors(name: str, *shape: int) -> np.ndarray:
        return stacked(dimensions, weights, name, *shape)

    down = vectors("blend_down", BLENDS, dimensions["time_mix_extra_dim"], n_embd)
    return Rwkv6Weights(
        embedding=normed_embedding(weights),
        time_mix_norm=norms(dimensions, weights, "time_mix_norm"),
        blend_base=vectors("blend_base", 1, n_embd),
        blend_down=aligned(down.swapaxes(-1, -2)),
        blend_up=matrices("blend_up"),
        blends=vectors("blends", BLENDS, n_embd),
        decay_base=vectors("decay_base", n_embd),
        decay_down=matrices("decay_down"),
        decay_up=matrices("decay_up"),
        first=vectors("first", n_embd // head_size, head_size),
        receptance_projection=matrices("receptance_projection"),
        key_projection=matrices("key_projection"),
        value_projection=matrices("value_projection"),
        gate_projection=matrices("gate_projection"),
        head_norm=norms(dimensions, weights, "head_norm", n_embd // head_size),
        out_projection=matrices("out_projection"),
        channel_mix_norm=norms(dimensions, weights, "channel_mix_norm"),
        channel_blend_key=vectors("channel_blend_key", 1, n_embd),
        channel_blend_receptance=vectors("channel_blend_receptance", 1, n_embd),
        channel_key_projection=matrices("channel_key_projection"),
        channel_value_projection=matrices("channel_value_projection"),
        channel_receptance_projection=matrices("channel_receptance_projection"),
        output_norm=Norm(aligned(weights["output_norm"][None, :]), aligned(weights["output_norm_bias"][None, :])),
        output=aligned(weights["output"].T),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows, of RWKV-6 and RWKV-7."""
    head_size = dimensions["wkv_head_size"]
    return {
        "convolution_shape": (2, dimensions["n_embd"]),
        "recurrent_shape": (dimensions["n_embd"] // head_size, head_size, head_size),
        "key_heads": 0,
        "head_dim": 0,
        "rope_theta": 0.0,
    }


@kernel
def through_tanh(x: np.ndarray) -> None:
    """x = tanh(x) in place, float32 [tokens, channels]."""
    for token in range(x.shape[0]):
        row = x[token]
        for i in range(row.size):
            row[i] = hyperbolic_tangent(row[i])


@kernel
def _to_decay(x: np.ndarray, base: np.ndarray) -> None:
    """x = exp(-exp(base + x)) in place, float32 [tokens, channels]; base float32 [channels]."""
    for token in range(x.shape[0]):
        row = x[token]
        for i in range(row.size):
            row[i] = exponential(-exponential(base[i] + row[i]))


@kernel
def add_to_rows(x: np.ndarray, y: np.ndarray) -> None:
    """y += x, x float32 [channels] to every row of y, float32 [tokens, channels]."""
    for token in range(y.shape[0]):
        row = y[token]
        for i in range(row.size):
            row[i] = row[i] + x[i]


@kernel
def forward(
    weights: Rwkv6Weights, memory: Memory, batch: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray
) -> None:
    """One ubatch through the model.

    weights, memory, batch, plan  Rwkv6Weights, Memory, SplitBatch, Plan
    sights                        of the attention layers without and with a window
    ubatch                        which of the batch's ubatches
    hidden                        True: the final norm's output instead of logits
    y                             float32 [wanted rows, n_vocab or n_embd], its rows of this ubatch written
    """
    start, end, segment_start, source_row, plane_row = begin_ubatch(memory, batch, plan, ubatch)
    tokens = end - start
    layers, heads, head_size = weights.first.shape
    n_embd = heads * head_size
    n_rows = memory.convolution_rows.shape[1]
    shape = (tokens, heads, head_size)
    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    before = np.empty((tokens, n_embd), np.float32)
    blended = np.empty((tokens, n_embd), np.float32)
    share = np.empty((tokens, n_embd), np.float32)
    blend_inner = np.empty((tokens, weights.blend_up.shape[2]), np.float32)
    decay_inner = np.empty((tokens, weights.decay_up.shape[1]), np.float32)
    # In the order of the blends: decay, key, value, receptance, gate.
    inputs = np.empty((BLENDS, tokens, n_embd), np.float32)
    mixed = np.empty((tokens, n_embd), np.float32)
    inner = np.empty((tokens, weights.channel_key_projection.shape[2]), np.float32)

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(layers):
        shifts = memory.convolution_rows[layer].reshape((n_rows, 2, n_embd))
        layer_norm(stream, weights.time_mix_norm.weight[layer], weights.time_mix_norm.bias[layer], _EPSILON, normed)
        token_shift(normed, TIME_MIX, shifts, segment_start, source_row, plane_row, before)
        for part in range(BLENDS):
            blend(normed, before, weights.blend_base[layer], blended)
            linear(blended, weights.blend_down[layer, part], blend_inner)
            through_tanh(blend_inner)
            linear(blend_inner, weights.blend_up[layer, part], share)
            add_to_rows(weights.blends[layer, part], share)
            blend(normed, before, share, blended)
            if part == 0:
                linear(blended, weights.decay_down[layer], decay_inner)
                through_tanh(decay_inner)
                linear(decay_inner, weights.decay_up[layer], inputs[part])
                _to_decay(inputs[part], weights.decay_base[layer])
            elif part == 1:
                linear(blended, weights.key_projection[layer], inputs[part])
            elif part == 2:
                linear(blended, weights.value_projection[layer], inputs[part])
            elif part == 3:
                linear(blended, weights.receptance_projection[layer], inputs[part])
            else:
                linear(blended, weights.gate_projection[layer], inputs[part])
        rwkv6_wkv(
            inputs[3].reshape(shape),
            inputs[1].reshape(shape),
            inputs[2].reshape(shape),
            inputs[0].reshape(shape),
            weights.first[layer],
            memory.recurrent_rows[layer].reshape((n_rows, heads, head_size, head_size)),
            segment_start,
            source_row,
            plane_row,
            mixed.reshape(shape),
        )
        heads_apart = mixed.reshape((tokens * heads, head_size))
        layer_norm(heads_apart, weights.head_norm.weight[layer], weights.head_norm.bias[layer], _HEAD_EPSILON, heads_apart)
        gated_linear_unit(inputs[4], mixed)
        linear(mixed, weights.out_projection[layer], normed)
        add_rows(normed, stream)

        layer_norm(stream, weights.channel_mix_norm.weight[layer], weights.channel_mix_norm.bias[layer], _EPSILON, normed)
        token_shift(normed, CHANNEL_MIX, shifts, segment_start, source_row, plane_row, before)
        blend(normed, before, weights.channel_blend_key[layer], blended)
        linear(blended, weights.channel_key_projection[layer], inner)
        squared_relu(inner)
        linear(inner, weights.channel_value_projection[layer], mixed)
        blend(normed, before, weights.channel_blend_receptance[layer], blended)
        linear(blended, weights.channel_receptance_projection[layer], share)
        gate_by_sigmoid(share, mixed)
        add_rows(mixed, stream)
    norm = weights.output_norm
    write_wanted_layer_norm_rows(stream, batch.output_row[start:end], norm.weight, norm.bias, _EPSILON, weights.output, hidden, y)
