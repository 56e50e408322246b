"""The incremental forward of rwkv7.

Rules
- As that of rwkv6, with which it shares the shapes of its rows and the preparation of common weights.
- The values of layer 0 are kept through a call: later layers blend theirs with them.
Sources: Peng et al. 2025 (arXiv:2503.14456); the `rwkv` package's RWKV_x070 class for the order of the parts.
"""

import math
from typing import NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.rwkv6 import HEAD_NORM_EPSILON, NORM_EPSILON
from ..spec.families.rwkv7 import BLENDS, DECAY_LEAST
from .batches import SplitBatch
from .cells import Plan
from .forwards import Memory, Sights
from .kernels import kernel
from .kernels.arithmetic import exponential, sigmoid
from .kernels.dense import add_rows, embed, layer_norm, linear, multiply_rows, squared_relu, sum_of_products, write_wanted_layer_norm_rows
from .kernels.rwkv7_wkv import rwkv7_wkv
from .kernels.token_shift import blend, token_shift
from .memory import aligned
from .rwkv6 import CHANNEL_MIX, TIME_MIX, Norm, normed_embedding, norms, shapes, stacked, through_tanh
from .ubatches import begin_ubatch

_EPSILON, _HEAD_EPSILON = np.float32(NORM_EPSILON), np.float32(HEAD_NORM_EPSILON)
_DECAY_LEAST = np.float32(DECAY_LEAST)
_LENGTH_MIN = np.float32(1e-12)
_ONE = np.float32(1)

__all__ = ["forward", "prepare", "shapes"]


class LowRank(NamedTuple):
    """Projections in two steps, and what is added to them; float32. [layers, n_embd], [layers, n_embd, rank], [layers, rank, n_embd]."""

    base: np.ndarray
    down: np.ndarray
    up: np.ndarray


class Rwkv7Weights(NamedTuple):
    """Weights as the forward uses them, stacked over layers; matrices [in, out]. All float32."""

    embedding: np.ndarray  # [n_vocab, n_embd], after its norm
    time_mix_norm: Norm
    blends: np.ndarray  # [layers, BLENDS, 1, n_embd]
    decay: LowRank
    rate: LowRank
    value_residual: LowRank  # that of layer 0 is zero and not used
    gate: LowRank  # its base is zero
    key_removal: np.ndarray  # [layers, n_embd]
    key_rate: np.ndarray  # [layers, n_embd]
    first: np.ndarray  # [layers, heads, key channels]
    receptance_projection: np.ndarray  # [layers, n_embd, n_embd], as all projections of the time mix
    key_projection: np.ndarray
    value_projection: np.ndarray
    head_norm: Norm
    out_projection: np.ndarray
    channel_mix_norm: Norm
    channel_blend_key: np.ndarray  # [layers, 1, n_embd]
    channel_key_projection: np.ndarray  # [layers, n_embd, n_ff]
    channel_value_projection: np.ndarray  # [layers, n_ff, n_embd]
    output_norm: Norm
    output: np.ndarray  # [n_embd, n_vocab]


def prepare(dimensions: Dimensions, weights: Weights) -> Rwkv7Weights:
    """Lay the family's weights out for `forward`."""
    n_embd, head_size, n_layer = dimensions["n_embd"], dimensions["wkv_head_size"], dimensions["n_layer"]

    def matrices(name: str) -> np.ndarray:
        return stacked(dimensions, weights, name)

    def vectors(name: str, *shape: int) -> np.ndarray:
        return stacked(dimensions, weights, name, *shape)

    def low_rank(name: str) -> LowRank:
        rank = dimensions[f"{name}_lora_rank"]

        def part(which: str, *shape: int) -> np.ndarray:
            arrays = [weights.get(f"layers.{layer}.{name}_{which}", np.zeros(shape, np.float32)) for layer in range(n_layer)]
            return np.stack(arrays)

        return LowRank(
            aligned(part("base", n_embd)),
            aligned(part("down", rank, n_embd).swapaxes(1, 2)),
            aligned(part("up", n_embd, rank).swapaxes(1, 2)),
        )

    return Rwkv7Weights(
        embedding=normed_embedding(weights),
        time_mix_norm=norms(dimensions, weights, "time_mix_norm"),
        blends=vectors("blends", BLENDS, 1, n_embd),
        decay=low_rank("decay"),
        rate=low_rank("rate"),
        value_residual=low_rank("value_residual"),
        gate=low_rank("gate"),
        key_removal=vectors("key_removal", n_embd),
        key_rate=vectors("key_rate", n_embd),
        first=vectors("first", n_embd // head_size, head_size),
        receptance_projection=matrices("receptance_projection"),
        key_projection=matrices("key_projection"),
        value_projection=matrices("value_projection"),
        head_norm=norms(dimensions, weights, "head_norm", n_embd // head_size),
        out_projection=matrices("out_projection"),
        channel_mix_norm=norms(dimensions, weights, "channel_mix_norm"),
        channel_blend_key=vectors("channel_blend_key", 1, n_embd),
        channel_key_projection=matrices("channel_key_projection"),
        channel_value_projection=matrices("channel_value_projection"),
        output_norm=Norm(aligned(weights["output_norm"][None, :]), aligned(weights["output_norm_bias"][None, :])),
        output=aligned(weights["output"].T),
    )


@kernel
def _squashed(base: np.ndarray, x: np.ndarray) -> None:
    """x = sigmoid(base + x) in place, float32 [tokens, channels]; base float32 [channels]."""
    for token in range(x.shape[0]):
        row = x[token]
        for i in range(row.size):
            row[i] = sigmoid(base[i] + row[i])


@kernel
def _to_decay(x: np.ndarray) -> None:
    """x = exp(-DECAY_LEAST * x) in place, float32 [tokens, channels]."""
    for token in range(x.shape[0]):
        row = x[token]
        for i in range(row.size):
            row[i] = exponential(-_DECAY_LEAST * row[i])


@kernel
def _removals(key: np.ndarray, factor: np.ndarray, heads: int, removal: np.ndarray) -> None:
    """removal = key * factor, brought to length 1 head by head.

    key, removal  float32 [tokens, channels]; removal written
    factor        float32 [channels]
    """
    size = key.shape[1] // heads
    for token in range(key.shape[0]):
        source, result = key[token], removal[token]
        for i in range(source.size):
            result[i] = source[i] * factor[i]
        for head in range(heads):
            part = result[head * size : (head + 1) * size]
            length = np.float32(math.sqrt(sum_of_products(part, part)))
            scale = _ONE / (length if length > _LENGTH_MIN else _LENGTH_MIN)
            for i in range(size):
                part[i] = part[i] * scale


@kernel
def _slow_keys(rate: np.ndarray, factor: np.ndarray, key: np.ndarray) -> None:
    """key *= 1 + (rate - 1) * factor: a key is taken in as fast as its channel forgets.

    rate, key  float32 [tokens, channels]
    factor     float32 [channels]
    """
    for token in range(key.shape[0]):
        speed, row = rate[token], key[token]
        for i in range(row.size):
            row[i] = row[i] * (_ONE + (speed[i] - _ONE) * factor[i])


@kernel
def _add_own(receptance: np.ndarray, key: np.ndarray, value: np.ndarray, first: np.ndarray, y: np.ndarray) -> None:
    """y += value * sum(receptance * key * first), head by head.

    receptance, key, value, y  float32 [tokens, heads, head size]
    first                      float32 [heads, head size]
    """
    weighted = np.empty(first.shape[1], np.float32)
    for token in range(y.shape[0]):
        for head in range(y.shape[1]):
            own_key, source, result = key[token, head], value[token, head], y[token, head]
            for i in range(weighted.size):
                weighted[i] = own_key[i] * first[head, i]
            total = sum_of_products(receptance[token, head], weighted)
            for i in range(weighted.size):
                result[i] = result[i] + source[i] * total


@kernel
def forward(
    weights: Rwkv7Weights, memory: Memory, batch: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray
) -> None:
    """One ubatch through the model.

    weights, memory, batch, plan  Rwkv7Weights, Memory, SplitBatch, Plan
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
    receptance = np.empty((tokens, n_embd), np.float32)
    decay = np.empty((tokens, n_embd), np.float32)
    key = np.empty((tokens, n_embd), np.float32)
    value = np.empty((tokens, n_embd), np.float32)
    first_value = np.empty((tokens, n_embd), np.float32)
    pull = np.empty((tokens, n_embd), np.float32)
    rate = np.empty((tokens, n_embd), np.float32)
    gate = np.empty((tokens, n_embd), np.float32)
    removal = np.empty((tokens, n_embd), np.float32)
    mixed = np.empty((tokens, n_embd), np.float32)
    decay_inner = np.empty((tokens, weights.decay.up.shape[1]), np.float32)
    rate_inner = np.empty((tokens, weights.rate.up.shape[1]), np.float32)
    residual_inner = np.empty((tokens, weights.value_residual.up.shape[1]), np.float32)
    gate_inner = np.empty((tokens, weights.gate.up.shape[1]), np.float32)
    no_base = np.zeros(gate_inner.shape[1], np.float32)
    inner = np.empty((tokens, weights.channel_key_projection.shape[2]), np.float32)

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(layers):
        shifts = memory.convolution_rows[layer].reshape((n_rows, 2, n_embd))
        blends = weights.blends[layer]
        layer_norm(stream, weights.time_mix_norm.weight[layer], weights.time_mix_norm.bias[layer], _EPSILON, normed)
        token_shift(normed, TIME_MIX, shifts, segment_start, source_row, plane_row, before)
        blend(normed, before, blends[0], blended)
        linear(blended, weights.receptance_projection[layer], receptance)
        blend(normed, before, blends[1], blended)
        linear(blended, weights.decay.down[layer], decay_inner)
        through_tanh(decay_inner)
        linear(decay_inner, weights.decay.up[layer], decay)
        _squashed(weights.decay.base[layer], decay)
        _to_decay(decay)
        blend(normed, before, blends[2], blended)
        linear(blended, weights.key_projection[layer], key)
        blend(normed, before, blends[3], blended)
        linear(blended, weights.value_projection[layer], value)
        if layer == 0:
            first_value[:] = value
        else:
            linear(blended, weights.value_residual.down[layer], residual_inner)
            linear(residual_inner, weights.value_residual.up[layer], pull)
            _squashed(weights.value_residual.base[layer], pull)
            blend(value, first_value, pull, value)
        blend(normed, before, blends[4], blended)
        linear(blended, weights.rate.down[layer], rate_inner)
        linear(rate_inner, weights.rate.up[layer], rate)
        _squashed(weights.rate.base[layer], rate)
        blend(normed, before, blends[5], blended)
        linear(blended, weights.gate.down[layer], gate_inner)
        _squashed(no_base, gate_inner)
        linear(gate_inner, weights.gate.up[layer], gate)
        _removals(key, weights.key_removal[layer], heads, removal)
        _slow_keys(rate, weights.key_rate[layer], key)
        rwkv7_wkv(
            receptance.reshape(shape),
            key.reshape(shape),
            value.reshape(shape),
            decay.reshape(shape),
            removal.reshape(shape),
            rate.reshape(shape),
            memory.recurrent_rows[layer].reshape((n_rows, heads, head_size, head_size)),
            segment_start,
            source_row,
            plane_row,
            mixed.reshape(shape),
        )
        heads_apart = mixed.reshape((tokens * heads, head_size))
        layer_norm(heads_apart, weights.head_norm.weight[layer], weights.head_norm.bias[layer], _HEAD_EPSILON, heads_apart)
        _add_own(receptance.reshape(shape), key.reshape(shape), value.reshape(shape), weights.first[layer], mixed.reshape(shape))
        multiply_rows(gate, mixed)
        linear(mixed, weights.out_projection[layer], normed)
        add_rows(normed, stream)

        layer_norm(stream, weights.channel_mix_norm.weight[layer], weights.channel_mix_norm.bias[layer], _EPSILON, normed)
        token_shift(normed, CHANNEL_MIX, shifts, segment_start, source_row, plane_row, before)
        blend(normed, before, weights.channel_blend_key[layer], blended)
        linear(blended, weights.channel_key_projection[layer], inner)
        squared_relu(inner)
        linear(inner, weights.channel_value_projection[layer], mixed)
        add_rows(mixed, stream)
    norm = weights.output_norm
    write_wanted_layer_norm_rows(stream, batch.output_row[start:end], norm.weight, norm.bias, _EPSILON, weights.output, hidden, y)
