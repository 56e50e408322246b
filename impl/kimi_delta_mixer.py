"""One layer of Kimi Delta Attention over one ubatch.

Rules
- The weights of all such layers of a model are stacked; `place` is a layer's index among them, and among the recurrent layers of the memory.
- The projections to q, k and v are one matrix, and so are their convolutions: a row of the convolution has the three side by side.
- The layer's norm and its residual are the caller's.
Sources: Kimi Team 2025 (arXiv:2510.26692); Transformers' KimiLinearForCausalLM for the order of the parts.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.kimi_linear import NORM_EPSILON, inner_channels
from .forwards import Memory
from .kernels import kernel
from .kernels.causal_convolution import causal_convolution
from .kernels.dense import gate_by_sigmoid, linear, rms_norm, to_length
from .kernels.kimi_delta_attention import kimi_delta_attention
from .kernels.mixer_parts import kimi_delta_rates, split_kimi_delta
from .memory import aligned
from .stacking import stacked, stacked_matrices, stacked_norms

_EPSILON = np.float32(NORM_EPSILON)
_ONE = np.float32(1)


class KimiDeltaWeights(NamedTuple):
    """Weights as `mix_kimi_delta` uses them, stacked over the layers; matrices [in, out]. All float32."""

    qkv_projection: np.ndarray  # [layers, n_embd, 3 * d_inner]
    taps: np.ndarray  # [layers, d_conv, 3 * d_inner]
    no_bias: np.ndarray  # [3 * d_inner], zero
    decay_in_projection: np.ndarray  # [layers, n_embd, head_dim]
    decay_out_projection: np.ndarray  # [layers, head_dim, d_inner]
    step_bias: np.ndarray  # [layers, d_inner]
    a: np.ndarray  # [layers, heads], negative
    beta_projection: np.ndarray  # [layers, n_embd, heads]
    gate_in_projection: np.ndarray  # [layers, n_embd, head_dim]
    gate_out_projection: np.ndarray  # [layers, head_dim, d_inner]
    gated_norm: np.ndarray  # [layers, 1, head_dim]
    out_projection: np.ndarray  # [layers, d_inner, n_embd]


class KimiDeltaRoom(NamedTuple):
    """Arrays that `mix_kimi_delta` works in, for one ubatch; float32 [tokens, channels of its own]."""

    inputs: np.ndarray
    convolved: np.ndarray
    low: np.ndarray
    decay: np.ndarray
    beta: np.ndarray
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    gate: np.ndarray
    mixed: np.ndarray


def prepare_kimi_delta(dimensions: Dimensions, weights: Weights, layers: tuple[int, ...]) -> KimiDeltaWeights:
    """Lay the weights of the layers `layers` out."""
    n_embd, n_head, head_dim, d_inner = dimensions["n_embd"], dimensions["n_head"], dimensions["head_dim"], inner_channels(dimensions)

    def side_by_side(name: str, n_in: int) -> np.ndarray:
        return aligned(np.concatenate([stacked_matrices(weights, f"{part}_{name}", layers, d_inner, n_in) for part in "qkv"], axis=2))

    return KimiDeltaWeights(
        qkv_projection=side_by_side("projection", n_embd),
        taps=side_by_side("convolution", dimensions["d_conv"]),
        no_bias=aligned(np.zeros(3 * d_inner, np.float32)),
        decay_in_projection=stacked_matrices(weights, "decay_in_projection", layers, head_dim, n_embd),
        decay_out_projection=stacked_matrices(weights, "decay_out_projection", layers, d_inner, head_dim),
        step_bias=aligned(stacked(weights, "dt_bias", layers, d_inner)),
        a=aligned(-np.exp(stacked(weights, "a_log", layers, n_head).astype(np.float64))),
        beta_projection=stacked_matrices(weights, "beta_projection", layers, n_head, n_embd),
        gate_in_projection=stacked_matrices(weights, "gate_in_projection", layers, head_dim, n_embd),
        gate_out_projection=stacked_matrices(weights, "gate_out_projection", layers, d_inner, head_dim),
        gated_norm=stacked_norms(weights, "gated_norm", layers, head_dim),
        out_projection=stacked_matrices(weights, "out_projection", layers, n_embd, d_inner),
    )


def kimi_delta_shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows."""
    return {
        "convolution_shape": (dimensions["d_conv"] - 1, 3 * inner_channels(dimensions)),
        "recurrent_shape": (dimensions["n_head"], dimensions["head_dim"], dimensions["head_dim"]),
    }


@kernel
def kimi_delta_room(weights: KimiDeltaWeights, tokens: int) -> KimiDeltaRoom:
    """Room for `mix_kimi_delta` over `tokens` tokens, unwritten."""
    d_inner, heads, head_dim = weights.out_projection.shape[1], weights.a.shape[1], weights.gated_norm.shape[2]
    return KimiDeltaRoom(
        np.empty((tokens, 3 * d_inner), np.float32),
        np.empty((tokens, 3 * d_inner), np.float32),
        np.empty((tokens, head_dim), np.float32),
        np.empty((tokens, d_inner), np.float32),
        np.empty((tokens, heads), np.float32),
        np.empty((tokens, d_inner), np.float32),
        np.empty((tokens, d_inner), np.float32),
        np.empty((tokens, d_inner), np.float32),
        np.empty((tokens, d_inner), np.float32),
        np.empty((tokens, d_inner), np.float32),
    )


@kernel
def mix_kimi_delta(
    weights: KimiDeltaWeights,
    place: int,
    memory: Memory,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    room: KimiDeltaRoom,
    x: np.ndarray,
    y: np.ndarray,
) -> None:
    """One layer: each sequence's state is read from its source row, and its snapshots are written.

    place          which of the stacked layers
    memory         its rows of layer `place` are read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments], plane_row int64 [segments, planes]: see `kernels.kimi_delta_attention`
    room           written
    x, y           float32 [tokens, n_embd]; y written. y may be x
    """
    tokens, n_rows = x.shape[0], memory.convolution_rows.shape[1]
    taps, channels = weights.taps.shape[1], weights.taps.shape[2]
    heads, head_dim = weights.a.shape[1], weights.gated_norm.shape[2]
    linear(x, weights.qkv_projection[place], room.inputs)
    linear(x, weights.decay_in_projection[place], room.low)
    linear(room.low, weights.decay_out_projection[place], room.decay)
    linear(x, weights.beta_projection[place], room.beta)
    kimi_delta_rates(room.decay, weights.step_bias[place], weights.a[place], room.beta)
    linear(x, weights.gate_in_projection[place], room.low)
    linear(room.low, weights.gate_out_projection[place], room.gate)
    windows = memory.convolution_rows[place].reshape((n_rows, taps - 1, channels))
    causal_convolution(room.inputs, weights.taps[place], weights.no_bias, windows, segment_start, source_row, plane_row, room.convolved)
    split_kimi_delta(room.convolved, room.query, room.key, room.value)
    to_length(room.query.reshape((tokens * heads, head_dim)), _ONE / np.float32(math.sqrt(np.float32(head_dim))), _EPSILON)
    to_length(room.key.reshape((tokens * heads, head_dim)), _ONE, _EPSILON)
    kimi_delta_attention(
        room.query.reshape((tokens, heads, head_dim)),
        room.key.reshape((tokens, heads, head_dim)),
        room.value.reshape((tokens, heads, head_dim)),
        room.decay.reshape((tokens, heads, head_dim)),
        room.beta,
        memory.recurrent_rows[place].reshape((n_rows, heads, head_dim, head_dim)),
        segment_start,
        source_row,
        plane_row,
        room.mixed.reshape((tokens, heads, head_dim)),
    )
    heads_apart = room.mixed.reshape((tokens * heads, head_dim))
    rms_norm(heads_apart, weights.gated_norm[place], _EPSILON, heads_apart)
    gate_by_sigmoid(room.gate, room.mixed)
    linear(room.mixed, weights.out_projection[place], y)
