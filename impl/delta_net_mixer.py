"""One gated delta net with its convolution over one ubatch: what the families with such layers share.

Rules
- The weights of all delta nets of a model are stacked; `place` is a layer's index among them, and among the recurrent layers of the memory.
- The projection to q, k and v stays one matrix, since the convolution takes it whole.
- The layer's norm and its residual are the caller's.
Sources: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464); Transformers' Qwen3_5ForCausalLM for the order of the parts.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ..spec.families.delta_net import NORM_EPSILON, convolution_channels, inner_channels
from ..spec.families.family import Dimensions, Weights
from .forwards import Memory
from .kernels import kernel
from .kernels.causal_convolution import causal_convolution
from .kernels.dense import gate_by_sigmoid, gated_linear_unit, linear, rms_norm, to_length
from .kernels.gated_delta_net import gated_delta_net
from .kernels.mixer_parts import delta_net_rates, split_delta_net
from .memory import aligned
from .stacking import stacked, stacked_matrices, stacked_norms

_EPSILON = np.float32(NORM_EPSILON)
_ONE = np.float32(1)


class DeltaNetWeights(NamedTuple):
    """Weights as `mix_delta_net` uses them, stacked over the delta nets; matrices [in, out]. All float32 but key_heads."""

    qkv_projection: np.ndarray  # [layers, n_embd, channels]
    gate_projection: np.ndarray  # [layers, n_embd, d_inner]
    beta_projection: np.ndarray  # [layers, n_embd, value heads]
    step_projection: np.ndarray  # [layers, n_embd, value heads]
    taps: np.ndarray  # [layers, d_conv, channels]
    no_bias: np.ndarray  # [channels], zero
    step_bias: np.ndarray  # [layers, value heads]
    a: np.ndarray  # [layers, value heads], negative
    gated_norm: np.ndarray  # [layers, 1, d_state]
    out_projection: np.ndarray  # [layers, d_inner, n_embd]
    key_heads: np.ndarray  # int64 [some], key heads in the order in which they serve value heads, beginning again after the last
    groups: int
    gates_by_sigmoid: bool  # else by SiLU


class DeltaNetRoom(NamedTuple):
    """Arrays that `mix_delta_net` works in, for one ubatch; float32 [tokens, channels of its own]."""

    inputs: np.ndarray
    convolved: np.ndarray
    step: np.ndarray
    beta: np.ndarray
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    gate: np.ndarray
    mixed: np.ndarray


def prepare_delta_nets(
    dimensions: Dimensions, weights: Weights, layers: tuple[int, ...], key_heads: tuple[int, ...], gates_by_sigmoid: bool = False
) -> DeltaNetWeights:
    """Lay the weights of the delta nets `layers` out; `key_heads` as in spec/families/delta_net.py."""
    n_embd, n_value_head = dimensions["n_embd"], dimensions["n_value_head"]
    channels, d_inner = convolution_channels(dimensions), inner_channels(dimensions)
    return DeltaNetWeights(
        qkv_projection=stacked_matrices(weights, "qkv_projection", layers, channels, n_embd),
        gate_projection=stacked_matrices(weights, "gate_projection", layers, d_inner, n_embd),
        beta_projection=stacked_matrices(weights, "beta_projection", layers, n_value_head, n_embd),
        step_projection=stacked_matrices(weights, "step_projection", layers, n_value_head, n_embd),
        taps=stacked_matrices(weights, "convolution", layers, channels, dimensions["d_conv"]),
        no_bias=aligned(np.zeros(channels, np.float32)),
        step_bias=aligned(stacked(weights, "dt_bias", layers, n_value_head)),
        a=aligned(-np.exp(stacked(weights, "a_log", layers, n_value_head).astype(np.float64))),
        gated_norm=stacked_norms(weights, "gated_norm", layers, dimensions["d_state"]),
        out_projection=stacked_matrices(weights, "out_projection", layers, n_embd, d_inner),
        key_heads=np.array(key_heads, np.int64),
        groups=dimensions["n_group"],
        gates_by_sigmoid=gates_by_sigmoid,
    )


def delta_net_shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a delta net's state rows."""
    return {
        "convolution_shape": (dimensions["d_conv"] - 1, convolution_channels(dimensions)),
        "recurrent_shape": (dimensions["n_value_head"], dimensions["d_state"], dimensions["d_state"]),
    }


@kernel
def delta_net_room(weights: DeltaNetWeights, tokens: int) -> DeltaNetRoom:
    """Room for `mix_delta_net` over `tokens` tokens, unwritten."""
    channels, value_heads, d_state = weights.taps.shape[2], weights.a.shape[1], weights.gated_norm.shape[2]
    return DeltaNetRoom(
        np.empty((tokens, channels), np.float32),
        np.empty((tokens, channels), np.float32),
        np.empty((tokens, value_heads), np.float32),
        np.empty((tokens, value_heads), np.float32),
        np.empty((tokens, weights.key_heads.size * d_state), np.float32),
        np.empty((tokens, weights.key_heads.size * d_state), np.float32),
        np.empty((tokens, value_heads * d_state), np.float32),
        np.empty((tokens, value_heads * d_state), np.float32),
        np.empty((tokens, value_heads * d_state), np.float32),
    )


@kernel
def mix_delta_net(
    weights: DeltaNetWeights,
    place: int,
    memory: Memory,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    room: DeltaNetRoom,
    x: np.ndarray,
    y: np.ndarray,
) -> None:
    """One layer: each sequence's state is read from its source row, and its snapshots are written.

    place          which of the stacked layers
    memory         its rows of layer `place` are read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments], plane_row int64 [segments, planes]: see `kernels.gated_delta_net`
    room           written
    x, y           float32 [tokens, n_embd]; y written. y may be x
    """
    tokens, n_rows = x.shape[0], memory.convolution_rows.shape[1]
    taps, channels = weights.taps.shape[1], weights.taps.shape[2]
    key_heads, value_heads, d_state = weights.key_heads.size, weights.a.shape[1], weights.gated_norm.shape[2]
    linear(x, weights.qkv_projection[place], room.inputs)
    linear(x, weights.gate_projection[place], room.gate)
    linear(x, weights.step_projection[place], room.step)
    linear(x, weights.beta_projection[place], room.beta)
    delta_net_rates(room.step, weights.step_bias[place], weights.a[place], room.beta)
    windows = memory.convolution_rows[place].reshape((n_rows, taps - 1, channels))
    causal_convolution(room.inputs, weights.taps[place], weights.no_bias, windows, segment_start, source_row, plane_row, room.convolved)
    split_delta_net(room.convolved, weights.groups, weights.key_heads, room.query, room.key, room.value)
    to_length(room.query.reshape((tokens * key_heads, d_state)), _ONE / np.float32(math.sqrt(np.float32(d_state))), _EPSILON)
    to_length(room.key.reshape((tokens * key_heads, d_state)), _ONE, _EPSILON)
    gated_delta_net(
        room.query.reshape((tokens, key_heads, d_state)),
        room.key.reshape((tokens, key_heads, d_state)),
        room.value.reshape((tokens, value_heads, d_state)),
        room.step,
        room.beta,
        memory.recurrent_rows[place].reshape((n_rows, value_heads, d_state, d_state)),
        segment_start,
        source_row,
        plane_row,
        room.mixed.reshape((tokens, value_heads, d_state)),
    )
    heads_apart = room.mixed.reshape((tokens * value_heads, d_state))
    rms_norm(heads_apart, weights.gated_norm[place], _EPSILON, heads_apart)
    if weights.gates_by_sigmoid:
        gate_by_sigmoid(room.gate, room.mixed)
    else:
        gated_linear_unit(room.gate, room.mixed)
    linear(room.mixed, weights.out_projection[place], y)
