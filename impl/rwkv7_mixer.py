"""One time mix of RWKV-7 over one ubatch.

Rules
- Weights are stacked over all layers of a model, which are the recurrent layers of the memory.
- The values of layer 0 are kept through a call: later layers blend theirs with them.
- The residual is the caller's; the layer norm is not.
Sources: Peng et al. 2025 (arXiv:2503.14456); the `rwkv` package's RWKV_x070 class for the order of the parts.
"""

from typing import NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.rwkv7 import BLENDS, DECAY_LEAST
from .forwards import Memory
from .kernels import kernel
from .kernels.dense import layer_norm, linear, multiply_rows
from .kernels.rows import copy_rows_of
from .kernels.rwkv7_wkv import rwkv7_wkv
from .kernels.time_mix import add_own, removals, slow_keys, squash, through_tanh, to_bounded_decay
from .kernels.token_shift import blend, token_shift
from .memory import aligned
from .rwkv import EPSILON, HEAD_EPSILON, TIME_MIX, Norm, norms, stacked

_DECAY_LEAST = np.float32(DECAY_LEAST)


class LowRank(NamedTuple):
    """Projections in two steps, and what is added to them; float32. [layers, n_embd], [layers, n_embd, rank], [layers, rank, n_embd]."""

    base: np.ndarray
    down: np.ndarray
    up: np.ndarray


class TimeMixWeights(NamedTuple):
    """Weights as `mix_time` uses them, stacked over layers; matrices [in, out]. All float32."""

    norm: Norm
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


def prepare_time_mix(dimensions: Dimensions, weights: Weights) -> TimeMixWeights:
    """Lay the weights of all time mixes out."""
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

    return TimeMixWeights(
        norm=norms(dimensions, weights, "time_mix_norm"),
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
    )


@kernel
def mix_time(
    weights: TimeMixWeights,
    layer: int,
    memory: Memory,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    x: np.ndarray,
    first_value: np.ndarray,
    y: np.ndarray,
) -> None:
    """One layer: each sequence's state is read from its source row, and its snapshots are written.

    memory         its rows of layer `layer` are read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments], plane_row int64 [segments, planes]: see `kernels.rwkv7_wkv`
    x              float32 [tokens, n_embd]
    first_value    float32 [tokens, n_embd], the values of layer 0: written by it, read by the others
    y              float32 [tokens, n_embd], written; not x
    """
    (tokens, n_embd), (heads, head_size) = x.shape, weights.first.shape[1:]
    n_rows = memory.convolution_rows.shape[1]
    shape = (tokens, heads, head_size)
    normed = np.empty(x.shape, np.float32)
    before = np.empty(x.shape, np.float32)
    blended = np.empty(x.shape, np.float32)
    receptance = np.empty(x.shape, np.float32)
    decay = np.empty(x.shape, np.float32)
    key = np.empty(x.shape, np.float32)
    value = np.empty(x.shape, np.float32)
    pull = np.empty(x.shape, np.float32)
    rate = np.empty(x.shape, np.float32)
    gate = np.empty(x.shape, np.float32)
    removal = np.empty(x.shape, np.float32)
    mixed = np.empty(x.shape, np.float32)
    decay_inner = np.empty((tokens, weights.decay.up.shape[1]), np.float32)
    rate_inner = np.empty((tokens, weights.rate.up.shape[1]), np.float32)
    residual_inner = np.empty((tokens, weights.value_residual.up.shape[1]), np.float32)
    gate_inner = np.empty((tokens, weights.gate.up.shape[1]), np.float32)
    no_base = np.zeros(gate_inner.shape[1], np.float32)
    shifts = memory.convolution_rows[layer].reshape((n_rows, 2, n_embd))
    blends = weights.blends[layer]
    layer_norm(x, weights.norm.weight[layer], weights.norm.bias[layer], EPSILON, normed)
    token_shift(normed, TIME_MIX, shifts, segment_start, source_row, plane_row, before)
    blend(normed, before, blends[0], blended)
    linear(blended, weights.receptance_projection[layer], receptance)
    blend(normed, before, blends[1], blended)
    linear(blended, weights.decay.down[layer], decay_inner)
    through_tanh(decay_inner)
    linear(decay_inner, weights.decay.up[layer], decay)
    squash(weights.decay.base[layer], decay)
    to_bounded_decay(decay, _DECAY_LEAST)
    blend(normed, before, blends[2], blended)
    linear(blended, weights.key_projection[layer], key)
    blend(normed, before, blends[3], blended)
    linear(blended, weights.value_projection[layer], value)
    if layer == 0:
        copy_rows_of(value, first_value)
    else:
        linear(blended, weights.value_residual.down[layer], residual_inner)
        linear(residual_inner, weights.value_residual.up[layer], pull)
        squash(weights.value_residual.base[layer], pull)
        blend(value, first_value, pull, value)
    blend(normed, before, blends[4], blended)
    linear(blended, weights.rate.down[layer], rate_inner)
    linear(rate_inner, weights.rate.up[layer], rate)
    squash(weights.rate.base[layer], rate)
    blend(normed, before, blends[5], blended)
    linear(blended, weights.gate.down[layer], gate_inner)
    squash(no_base, gate_inner)
    linear(gate_inner, weights.gate.up[layer], gate)
    removals(key, weights.key_removal[layer], heads, removal)
    slow_keys(rate, weights.key_rate[layer], key)
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
    layer_norm(heads_apart, weights.head_norm.weight[layer], weights.head_norm.bias[layer], HEAD_EPSILON, heads_apart)
    add_own(receptance.reshape(shape), key.reshape(shape), value.reshape(shape), weights.first[layer], mixed.reshape(shape))
    multiply_rows(gate, mixed)
    linear(mixed, weights.out_projection[layer], y)
