"""One layer of gated attention over one ubatch: what the families with such layers share.

Rules
- The weights of all such layers of a model are stacked; `place` is a layer's index among them, and among the attention layers of the memory.
- The projection of queries and their gates is kept as two matrices, so that every part is contiguous.
- Keys and values of all tokens are written before any of them attends; a token sees only positions up to its own.
- The layer's norm and its residual are the caller's.
Source: Transformers' Qwen3NextForCausalLM and Qwen3_5ForCausalLM for the order of the parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.delta_net import NORM_EPSILON
from ..spec.families.family import Dimensions, Weights
from ..spec.families.gated_attention import ROPE_THETA
from .forwards import FULL, Memory, Sights
from .kernels import kernel
from .kernels.attention import remember_and_attend
from .kernels.dense import gate_by_sigmoid, linear, rms_norm, rotary_table, rotate
from .memory import aligned
from .stacking import stacked, stacked_matrices, stacked_norms

_EPSILON = np.float32(NORM_EPSILON)


class GatedAttentionWeights(NamedTuple):
    """Weights as `attend_gated` uses them, stacked over the attention layers; matrices [in, out]. All float32."""

    q_projection: np.ndarray  # [layers, n_embd, heads * head_dim]
    q_gate_projection: np.ndarray  # [layers, n_embd, heads * head_dim]
    k_projection: np.ndarray  # [layers, n_embd, key heads * head_dim]
    v_projection: np.ndarray  # [layers, n_embd, key heads * head_dim]
    q_norm: np.ndarray  # [layers, 1, head_dim]
    k_norm: np.ndarray  # [layers, 1, head_dim]
    out_projection: np.ndarray  # [layers, heads * head_dim, n_embd]
    rotated_channels: int


class GatedAttentionRoom(NamedTuple):
    """Arrays that `attend_gated` works in, for one ubatch; float32 [tokens, channels of its own]; cosine and sine are of its positions."""

    query: np.ndarray
    gate: np.ndarray
    key: np.ndarray
    value: np.ndarray
    mixed: np.ndarray
    cosine: np.ndarray
    sine: np.ndarray


def prepare_gated_attention(dimensions: Dimensions, weights: Weights, layers: tuple[int, ...]) -> GatedAttentionWeights:
    """Lay the weights of the attention layers `layers` out."""
    n_embd, n_head, head_dim = dimensions["n_embd"], dimensions["n_head"], dimensions["head_dim"]
    n_embd_q, n_embd_kv = n_head * head_dim, dimensions["n_head_kv"] * head_dim
    # Every head's query stands before its gate: [layers, heads, 2, head_dim, n_embd].
    query_and_gate = stacked(weights, "q_projection", layers, 2 * n_embd_q, n_embd).reshape(len(layers), n_head, 2, head_dim, n_embd)
    query, query_gate = (query_and_gate[:, :, part].reshape(len(layers), n_embd_q, n_embd).transpose(0, 2, 1) for part in (0, 1))
    return GatedAttentionWeights(
        q_projection=aligned(query),
        q_gate_projection=aligned(query_gate),
        k_projection=stacked_matrices(weights, "k_projection", layers, n_embd_kv, n_embd),
        v_projection=stacked_matrices(weights, "v_projection", layers, n_embd_kv, n_embd),
        q_norm=stacked_norms(weights, "q_norm", layers, head_dim),
        k_norm=stacked_norms(weights, "k_norm", layers, head_dim),
        out_projection=stacked_matrices(weights, "out_projection", layers, n_embd, n_embd_q),
        rotated_channels=dimensions["n_rot"],
    )


def gated_attention_shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shape of a layer's attention cells."""
    return {
        "key_heads": dimensions["n_head_kv"],
        "head_dim": dimensions["head_dim"],
        "rope_theta": ROPE_THETA,
        "rotated_channels": dimensions["n_rot"],
    }


@kernel
def gated_attention_room(weights: GatedAttentionWeights, positions: np.ndarray) -> GatedAttentionRoom:
    """Room for `attend_gated` over tokens at int64 `positions`; unwritten but for what depends on positions."""
    tokens, half = positions.size, weights.rotated_channels // 2
    n_embd_q, n_embd_kv = weights.q_projection.shape[2], weights.k_projection.shape[2]
    room = GatedAttentionRoom(
        np.empty((tokens, n_embd_q), np.float32),
        np.empty((tokens, n_embd_q), np.float32),
        np.empty((tokens, n_embd_kv), np.float32),
        np.empty((tokens, n_embd_kv), np.float32),
        np.empty((tokens, n_embd_q), np.float32),
        np.empty((tokens, half), np.float32),
        np.empty((tokens, half), np.float32),
    )
    if weights.q_projection.shape[0] > 0:
        rotary_table(positions, half, ROPE_THETA, room.cosine, room.sine)
    return room


@kernel
def attend_gated(
    weights: GatedAttentionWeights,
    place: int,
    memory: Memory,
    sights: Sights,
    start: int,
    room: GatedAttentionRoom,
    x: np.ndarray,
    y: np.ndarray,
) -> None:
    """One layer: its tokens' keys and values are written, and each token attends to the cells that it sees.

    place   which of the stacked layers
    memory  its cells of layer `place` are read and written
    sights  of the attention layers without and with a window; these have none
    start   place of the ubatch's first token in the batch
    room    written
    x, y    float32 [tokens, n_embd]; y written. y may be x
    """
    tokens, key_heads, head_dim = x.shape[0], memory.keys[FULL].shape[2], memory.keys[FULL].shape[3]
    heads = weights.q_projection.shape[2] // head_dim
    linear(x, weights.q_projection[place], room.query)
    linear(x, weights.q_gate_projection[place], room.gate)
    linear(x, weights.k_projection[place], room.key)
    linear(x, weights.v_projection[place], room.value)
    query_rows = room.query.reshape((tokens * heads, head_dim))
    key_rows = room.key.reshape((tokens * key_heads, head_dim))
    rms_norm(query_rows, weights.q_norm[place], _EPSILON, query_rows)
    rms_norm(key_rows, weights.k_norm[place], _EPSILON, key_rows)
    query_heads = room.query.reshape((tokens, heads, head_dim))
    new_keys = room.key.reshape((tokens, key_heads, head_dim))
    rotate(query_heads, room.cosine, room.sine)
    rotate(new_keys, room.cosine, room.sine)
    new_values = room.value.reshape((tokens, key_heads, head_dim))
    mixed_heads = room.mixed.reshape((tokens, heads, head_dim))
    remember_and_attend(
        query_heads, new_keys, new_values, memory.keys[FULL][place], memory.values[FULL][place], sights[FULL], start, mixed_heads
    )
    gate_by_sigmoid(room.gate, room.mixed)
    linear(room.mixed, weights.out_projection[place], y)
