"""One Mamba-1 layer over one ubatch: what the families with such layers share.

Rules
- The weights of all Mamba-1 layers of a model are stacked; `place` is a layer's index among them, and among the recurrent layers of the memory.
- Projections of several parts are kept as one matrix a part, so that every part is contiguous.
- Step, B and C go through norms of their own where the weights have them (Jamba).
- The layer's norm and its residual are the caller's.
Sources: Gu and Dao 2023 (arXiv:2312.00752); Transformers' MambaForCausalLM and JambaForCausalLM for the order of the parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.mamba import NORM_EPSILON, inner_channels
from .forwards import Memory
from .kernels import kernel
from .kernels.causal_convolution import causal_convolution
from .kernels.dense import gated_linear_unit, linear, rms_norm, silu_rows
from .kernels.mamba1_scan import mamba1_scan
from .kernels.mixer_parts import skip_channels, softplus_rows
from .memory import aligned
from .stacking import stacked, stacked_matrices, stacked_norms

_EPSILON = np.float32(NORM_EPSILON)


class MixerWeights(NamedTuple):
    """Weights as `mix` uses them, stacked over the Mamba-1 layers; matrices [in, out]. All float32."""

    inputs_projection: np.ndarray  # [layers, n_embd, d_inner]
    gate_projection: np.ndarray  # [layers, n_embd, d_inner]
    taps: np.ndarray  # [layers, d_conv, d_inner]
    taps_bias: np.ndarray  # [layers, d_inner]
    narrow_projection: np.ndarray  # [layers, d_inner, dt_rank]
    b_projection: np.ndarray  # [layers, d_inner, d_state]
    c_projection: np.ndarray  # [layers, d_inner, d_state]
    dt_norm: np.ndarray  # [layers, 1, dt_rank], or no layers: then there are no norms
    b_norm: np.ndarray  # [layers, 1, d_state]
    c_norm: np.ndarray  # [layers, 1, d_state]
    step_projection: np.ndarray  # [layers, dt_rank, d_inner]
    step_bias: np.ndarray  # [layers, d_inner]
    a: np.ndarray  # [layers, d_state, d_inner], negative
    d: np.ndarray  # [layers, d_inner]
    out_projection: np.ndarray  # [layers, d_inner, n_embd]


class MixerRoom(NamedTuple):
    """Arrays that `mix` works in, for one ubatch; float32 [tokens, channels of its own]."""

    gate: np.ndarray
    inputs: np.ndarray
    value: np.ndarray
    narrow: np.ndarray
    b: np.ndarray
    c: np.ndarray
    step: np.ndarray
    mixed: np.ndarray


def prepare_mixer(dimensions: Dimensions, weights: Weights, layers: tuple[int, ...]) -> MixerWeights:
    """Lay the weights of the Mamba-1 layers `layers` out; `dimensions` in mamba's names."""
    n_embd, d_inner, d_state, rank = dimensions["n_embd"], inner_channels(dimensions), dimensions["d_state"], dimensions["dt_rank"]
    normed = tuple(layer for layer in layers if f"layers.{layer}.dt_norm" in weights)
    projection = stacked_matrices(weights, "in_projection", layers, 2 * d_inner, n_embd)
    narrow = stacked_matrices(weights, "x_projection", layers, rank + 2 * d_state, d_inner)
    return MixerWeights(
        inputs_projection=aligned(projection[:, :, :d_inner]),
        gate_projection=aligned(projection[:, :, d_inner:]),
        taps=stacked_matrices(weights, "convolution", layers, d_inner, dimensions["d_conv"]),
        taps_bias=aligned(stacked(weights, "convolution_bias", layers, d_inner)),
        narrow_projection=aligned(narrow[:, :, :rank]),
        b_projection=aligned(narrow[:, :, rank : rank + d_state]),
        c_projection=aligned(narrow[:, :, rank + d_state :]),
        dt_norm=stacked_norms(weights, "dt_norm", normed, rank),
        b_norm=stacked_norms(weights, "b_norm", normed, d_state),
        c_norm=stacked_norms(weights, "c_norm", normed, d_state),
        step_projection=stacked_matrices(weights, "dt_projection", layers, d_inner, rank),
        step_bias=aligned(stacked(weights, "dt_bias", layers, d_inner)),
        a=aligned(-np.exp(stacked_matrices(weights, "a_log", layers, d_inner, d_state).astype(np.float64))),
        d=aligned(stacked(weights, "d", layers, d_inner)),
        out_projection=stacked_matrices(weights, "out_projection", layers, n_embd, d_inner),
    )


def mixer_shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a Mamba-1 layer's state rows; `dimensions` in mamba's names. A state is one head of d_inner channels."""
    d_inner = inner_channels(dimensions)
    return {"convolution_shape": (dimensions["d_conv"] - 1, d_inner), "recurrent_shape": (1, dimensions["d_state"], d_inner)}


@kernel
def mixer_room(weights: MixerWeights, tokens: int) -> MixerRoom:
    """Room for `mix` over `tokens` tokens, unwritten."""
    d_state, d_inner, rank = weights.a.shape[1], weights.a.shape[2], weights.step_projection.shape[1]
    return MixerRoom(
        np.empty((tokens, d_inner), np.float32),
        np.empty((tokens, d_inner), np.float32),
        np.empty((tokens, d_inner), np.float32),
        np.empty((tokens, rank), np.float32),
        np.empty((tokens, d_state), np.float32),
        np.empty((tokens, d_state), np.float32),
        np.empty((tokens, d_inner), np.float32),
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
    source_row     int64 [segments], plane_row int64 [segments, planes]: see `kernels.mamba1_scan`
    room           written
    x, y           float32 [tokens, n_embd]; y written. y may be x
    """
    taps, d_inner = weights.taps.shape[1:]
    n_rows = memory.convolution_rows.shape[1]
    value, narrow, b, c, step = room.value, room.narrow, room.b, room.c, room.step
    linear(x, weights.inputs_projection[place], room.inputs)
    linear(x, weights.gate_projection[place], room.gate)
    windows = memory.convolution_rows[place].reshape((n_rows, taps - 1, d_inner))
    causal_convolution(room.inputs, weights.taps[place], weights.taps_bias[place], windows, segment_start, source_row, plane_row, value)
    silu_rows(value)
    linear(value, weights.narrow_projection[place], narrow)
    linear(value, weights.b_projection[place], b)
    linear(value, weights.c_projection[place], c)
    if weights.dt_norm.shape[0] > 0:
        rms_norm(narrow, weights.dt_norm[place], _EPSILON, narrow)
        rms_norm(b, weights.b_norm[place], _EPSILON, b)
        rms_norm(c, weights.c_norm[place], _EPSILON, c)
    linear(narrow, weights.step_projection[place], step)
    softplus_rows(step, weights.step_bias[place])
    states = memory.recurrent_rows[place].reshape((n_rows, weights.a.shape[1], d_inner))
    mamba1_scan(value, step, weights.a[place], b, c, states, segment_start, source_row, plane_row, room.mixed)
    skip_channels(value, weights.d[place], room.mixed)
    gated_linear_unit(room.gate, room.mixed)
    linear(room.mixed, weights.out_projection[place], y)
