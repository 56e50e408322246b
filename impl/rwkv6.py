"""The incremental forward of rwkv6.

Rules
- One call does one ubatch through all layers, reading each sequence's state from its source row and writing its snapshots.
- State rows, norms and most of the channel mix are as in rwkv.py.
Sources: Peng et al. 2024 (arXiv:2404.05892); the `rwkv` package's RWKV class (version 6.0) for the order of the parts.
"""

from typing import NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.rwkv6 import BLENDS
from .batches import SplitBatch
from .cells import Plan
from .forwards import Memory, Sights
from .kernels import kernel
from .kernels.dense import (
    add_rows,
    embed,
    gate_by_sigmoid,
    gated_linear_unit,
    layer_norm,
    linear,
    write_wanted_layer_norm_rows,
)
from .kernels.rwkv6_wkv import rwkv6_wkv
from .kernels.time_mix import add_to_rows, through_tanh, to_double_exponential_decay
from .kernels.token_shift import blend, token_shift
from .memory import aligned
from .rwkv import (
    EPSILON,
    HEAD_EPSILON,
    TIME_MIX,
    ChannelMixWeights,
    Norm,
    mix_channels,
    normed_embedding,
    norms,
    output_norm,
    prepare_channel_mix,
    shapes,
    stacked,
)
from .ubatches import begin_ubatch

__all__ = ["forward", "prepare", "shapes"]


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
    channel_mix: ChannelMixWeights
    channel_blend_receptance: np.ndarray  # [layers, 1, n_embd]
    channel_receptance_projection: np.ndarray  # [layers, n_embd, n_embd]
    output_norm: Norm
    output: np.ndarray  # [n_embd, n_vocab]


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
        channel_mix=prepare_channel_mix(dimensions, weights),
        channel_blend_receptance=vectors("channel_blend_receptance", 1, n_embd),
        channel_receptance_projection=matrices("channel_receptance_projection"),
        output_norm=output_norm(weights),
        output=aligned(weights["output"].T),
    )


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

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(layers):
        shifts = memory.convolution_rows[layer].reshape((n_rows, 2, n_embd))
        layer_norm(stream, weights.time_mix_norm.weight[layer], weights.time_mix_norm.bias[layer], EPSILON, normed)
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
                to_double_exponential_decay(inputs[part], weights.decay_base[layer])
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
        layer_norm(heads_apart, weights.head_norm.weight[layer], weights.head_norm.bias[layer], HEAD_EPSILON, heads_apart)
        gated_linear_unit(inputs[4], mixed)
        linear(mixed, weights.out_projection[layer], normed)
        add_rows(normed, stream)

        mix_channels(weights.channel_mix, layer, shifts, segment_start, source_row, plane_row, stream, normed, before, mixed)
        blend(normed, before, weights.channel_blend_receptance[layer], blended)
        linear(blended, weights.channel_receptance_projection[layer], share)
        gate_by_sigmoid(share, mixed)
        add_rows(mixed, stream)
    norm = weights.output_norm
    write_wanted_layer_norm_rows(stream, batch.output_row[start:end], norm.weight, norm.bias, EPSILON, weights.output, hidden, y)
