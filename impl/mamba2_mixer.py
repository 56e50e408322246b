"""One Mamba-2 layer over one ubatch: what the families with such layers share.

Rules
- The weights of all Mamba-2 layers of a model are stacked; `place` is a layer's index among them, and among the recurrent layers of the memory.
- The in-projection is kept as three matrices (gate, convolution inputs, step), so that every part is contiguous.
- The layer's norm and its residual are the caller's.
Sources: Dao and Gu 2024 (arXiv:2405.21060); Transformers' Mamba2ForCausalLM for the order of the parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.mamba2 import NORM_EPSILON, convolution_channels
from .forwards import Memory
from .kernels import kernel
from .kernels.causal_convolution import causal_convolution
from .kernels.dense import gated_linear_unit, linear, rms_norm
from .kernels.mamba2_scan import mamba2_scan
from .kernels.mixer_parts import skip_heads, softplus_rows, split_mamba2
from .memory import aligned
from .stacking import stacked, stacked_matrices

_EPSILON = np.float32(NORM_EPSILON)


class MixerWeights(NamedTuple):
    """Weights as `mix` uses them, stacked over the Mamba-2 layers; matrices [in, out]. All float32."""

    gate_projection: np.ndarray  # [layers, n_embd, d_inner]
    convolution_projection: np.ndarray  # [layers, n_embd, channels]
    step_projection: np.ndarray  # [layers, n_embd, heads]
    taps: np.ndarray  # [layers, d_conv, channels]
    taps_bias: np.ndarray  # [layers, channels]
    step_bias: np.ndarray  # [layers, heads]
    a: np.ndarray  # [layers, heads], negative
    d: np.ndarray  # [layers, heads]
    gated_norm: np.ndarray  # [layers, groups, d_inner / groups]; [layers, 0, ...] where there is none
    out_projection: np.ndarray  # [layers, d_inner, n_embd]
    groups: int
    d_state: int


class MixerRoom(NamedTuple):
    """Arrays that `mix` works in, for one ubatch; float32 [tokens, channels of its own]."""

    gate: np.ndarray
    inputs: np.ndarray
    convolved: np.ndarray
    step: np.ndarray
    value: np.ndarray
    b: np.ndarray
    c: np.ndarray
    mixed: np.ndarray


def prepare_mixer(dimensions: Dimensions, weights: Weights, layers: tuple[int, ...]) -> MixerWeights:
    """Lay the weights of the Mamba-2 layers `layers` out; `dimensions` in mamba2's names."""
    n_embd, d_inner, n_head = dimensions["n_embd"], dimensions["d_inner"], dimensions["n_head"]
    channels = convolution_channels(dimensions)

    has_gated_norm = all(f"layers.{layer}.gated_norm" in weights for layer in layers)
    gated_norm = stacked(weights, "gated_norm", layers, d_inner) if has_gated_norm else np.zeros((len(layers), 0), np.float32)
    projection = stacked(weights, "in_projection", layers, d_inner + channels + n_head, n_embd).transpose(0, 2, 1)
    return MixerWeights(
        gate_projection=aligned(projection[:, :, :d_inner]),
        convolution_projection=aligned(projection[:, :, d_inner : d_inner + channels]),
        step_projection=aligned(projection[:, :, d_inner + channels :]),
        taps=stacked_matrices(weights, "convolution", layers, channels, dimensions["d_conv"]),
        taps_bias=aligned(stacked(weights, "convolution_bias", layers, channels)),
        step_bias=aligned(stacked(weights, "dt_bias", layers, n_head)),
        a=aligned(-np.exp(stacked(weights, "a_log", layers, n_head).astype(np.float64))),
        d=aligned(stacked(weights, "d", layers, n_head)),
        gated_norm=aligned(gated_norm.reshape(len(layers), -1 if layers else 0, d_inner // dimensions["n_group"])),
        out_projection=stacked_matrices(weights, "out_projection", layers, n_embd, d_inner),
        groups=dimensions["n_group"],
        d_state=dimensions["d_state"],
    )


def mixer_shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a Mamba-2 layer's state rows; `dimensions` in mamba2's names."""
    return {
        "convolution_shape": (dimensions["d_conv"] - 1, convolution_channels(dimensions)),
        "recurrent_shape": (dimensions["n_head"], dimensions["d_state"], dimensions["d_inner"] // dimensions["n_head"]),
    }


@kernel
def mixer_room(weights: MixerWeights, tokens: int) -> MixerRoom:
    """Room for `mix` over `tokens` tokens, unwritten."""
    d_inner, channels, heads = weights.out_projection.shape[1], weights.taps.shape[2], weights.a.shape[1]
    return MixerRoom(
        np.empty((tokens, d_inner), np.float32),
        np.empty((tokens, channels), np.float32),
        np.empty((tokens, channels), np.float32),
        np.empty((tokens, heads), np.float32),
        np.empty((tokens, d_inner), np.float32),
        np.empty((tokens, weights.groups * weights.d_state), np.float32),
        np.empty((tokens, weights.groups * weights.d_state), np.float32),
        np.empty((tokens, d_inner), np.float32),
    )


@kernel
def mix(
    weights: MixerWeights,
    place: int,
    memory: Memory,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    room: MixerRoom,
    x: np.ndarray,
    y: np.ndarray,
) -> None:
    """One layer: each sequence's state is read from its source row, and its snapshots are written.

    place          which of the stacked layers
    memory         its rows of layer `place` are read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments], plane_row int64 [segments, planes]: see `kernels.mamba2_scan`
    room           written
    x, y           float32 [tokens, n_embd]; y written. y may be x
    """
    tokens = x.shape[0]
    taps, channels = weights.taps.shape[1:]
    heads, d_inner, d_state, groups = weights.a.shape[1], weights.out_projection.shape[1], weights.d_state, weights.groups
    head_dim = d_inner // heads
    n_rows = memory.convolution_rows.shape[1]
    step = room.step
    linear(x, weights.gate_projection[place], room.gate)
    linear(x, weights.convolution_projection[place], room.inputs)
    linear(x, weights.step_projection[place], step)
    softplus_rows(step, weights.step_bias[place])
    windows = memory.convolution_rows[place].reshape((n_rows, taps - 1, channels))
    causal_convolution(
        room.inputs, weights.taps[place], weights.taps_bias[place], windows, segment_start, source_row, plane_row, room.convolved
    )
    split_mamba2(room.convolved, room.value, room.b, room.c)
    value_heads = room.value.reshape((tokens, heads, head_dim))
    mixed_heads = room.mixed.reshape((tokens, heads, head_dim))
    mamba2_scan(
        value_heads,
        step,
        weights.a[place],
        room.b.reshape((tokens, groups, d_state)),
        room.c.reshape((tokens, groups, d_state)),
        memory.recurrent_rows[place].reshape((n_rows, heads, d_state, head_dim)),
        segment_start,
        source_row,
        plane_row,
        mixed_heads,
    )
    skip_heads(value_heads, weights.d[place], mixed_heads)
    gated_linear_unit(room.gate, room.mixed)
    if weights.gated_norm.shape[1] > 0:
        grouped = room.mixed.reshape((tokens * groups, d_inner // groups))
        rms_norm(grouped, weights.gated_norm[place], _EPSILON, grouped)
    linear(room.mixed, weights.out_projection[place], y)
