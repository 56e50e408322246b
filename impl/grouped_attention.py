"""One layer of grouped-query attention over one ubatch: what the families with such layers share.

Rules
- The weights of all such layers of a model are stacked; `place` is a layer's index among them, and among the attention layers of the memory.
- Norms of queries and keys, and their rotation, are there where a family has them.
- Keys and values of all tokens are written before any of them attends; a token sees only positions up to its own.
- The layer's norm, its projection out and its residual are the caller's.
Sources: Ainslie et al. 2023 (arXiv:2305.13245); Su et al. 2021 (rotary positions, arXiv:2104.09864).
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.attention import Attention, head_channels
from ..spec.families.family import Dimensions, Weights
from .forwards import FULL, WINDOWED, Memory, Sights
from .kernels import kernel
from .kernels.attention import remember_and_attend
from .kernels.dense import linear, rms_norm, rotary_table, rotate
from .stacking import stacked_matrices, stacked_norms


class AttentionWeights(NamedTuple):
    """Weights as `attend` uses them, stacked over the attention layers; matrices [in, out]. All arrays float32."""

    q_projection: np.ndarray  # [layers, n_embd, heads * head_dim]
    k_projection: np.ndarray  # [layers, n_embd, key heads * head_dim]
    v_projection: np.ndarray  # [layers, n_embd, key heads * head_dim]
    q_norm: np.ndarray  # [layers, 1, head_dim]; [0, 1, head_dim] where there is none
    k_norm: np.ndarray  # the same
    epsilon: np.float32  # of these norms
    sight: int  # FULL or WINDOWED: what the layers see, all of them the same
    rope_theta: float
    rotated_channels: int  # 0: keys and queries stay as they are


class AttentionRoom(NamedTuple):
    """Arrays that `attend` works in, for one ubatch; float32 [tokens, channels of its own]; cosine and sine are of its positions."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    cosine: np.ndarray
    sine: np.ndarray


def prepare_attention(facts: Attention, dimensions: Dimensions, weights: Weights, layers: tuple[int, ...]) -> AttentionWeights:
    """Lay the weights of the attention layers `layers` out."""
    n_embd, head_dim = dimensions["n_embd"], head_channels(dimensions)
    n_embd_q, n_embd_kv = dimensions["n_head"] * head_dim, dimensions["n_head_kv"] * head_dim
    normed = tuple(layer for layer in layers if f"layers.{layer}.q_norm" in weights)
    return AttentionWeights(
        q_projection=stacked_matrices(weights, "q_projection", layers, n_embd_q, n_embd),
        k_projection=stacked_matrices(weights, "k_projection", layers, n_embd_kv, n_embd),
        v_projection=stacked_matrices(weights, "v_projection", layers, n_embd_kv, n_embd),
        q_norm=stacked_norms(weights, "q_norm", normed, head_dim),
        k_norm=stacked_norms(weights, "k_norm", normed, head_dim),
        epsilon=np.float32(facts.norm_epsilon),
        sight=WINDOWED if facts.window(dimensions) else FULL,
        rope_theta=facts.rope_theta,
        rotated_channels=dimensions.get("n_rot", head_dim) if facts.rope_theta else 0,
    )


def attention_shapes(facts: Attention, dimensions: Dimensions) -> dict[str, Any]:
    """The shape of a layer's attention cells."""
    return {
        "key_heads": dimensions["n_head_kv"],
        "head_dim": head_channels(dimensions),
        "rope_theta": facts.rope_theta,
        "rotated_channels": dimensions.get("n_rot", 0),
    }


@kernel
def attention_room(weights: AttentionWeights, positions: np.ndarray) -> AttentionRoom:
    """Room for `attend` over tokens at int64 `positions`; unwritten but for what depends on positions."""
    tokens, half = positions.size, weights.rotated_channels // 2
    room = AttentionRoom(
        np.empty((tokens, weights.q_projection.shape[2]), np.float32),
        np.empty((tokens, weights.k_projection.shape[2]), np.float32),
        np.empty((tokens, weights.v_projection.shape[2]), np.float32),
        np.empty((tokens, half), np.float32),
        np.empty((tokens, half), np.float32),
    )
    if weights.q_projection.shape[0] > 0:
        rotary_table(positions, half, weights.rope_theta, room.cosine, room.sine)
    return room


@kernel
def attend(
    weights: AttentionWeights,
    place: int,
    memory: Memory,
    sights: Sights,
    start: int,
    room: AttentionRoom,
    x: np.ndarray,
    y: np.ndarray,
) -> None:
    """One layer: its tokens' keys and values are written, and each token attends to the cells that it sees.

    place   which of the stacked layers
    memory  its cells of layer `place` are read and written
    sights  of the attention layers without and with a window
    start   place of the ubatch's first token in the batch
    room    written
    x       float32 [tokens, n_embd]
    y       float32 [tokens, heads * head_dim], written; not x
    """
    keys, values = memory.keys[weights.sight][place], memory.values[weights.sight][place]
    tokens, key_heads, head_dim = x.shape[0], keys.shape[1], keys.shape[2]
    heads = weights.q_projection.shape[2] // head_dim
    linear(x, weights.q_projection[place], room.query)
    linear(x, weights.k_projection[place], room.key)
    linear(x, weights.v_projection[place], room.value)
    if weights.q_norm.shape[0] > 0:
        query_rows, key_rows = room.query.reshape((tokens * heads, head_dim)), room.key.reshape((tokens * key_heads, head_dim))
        rms_norm(query_rows, weights.q_norm[place], weights.epsilon, query_rows)
        rms_norm(key_rows, weights.k_norm[place], weights.epsilon, key_rows)
    query_heads = room.query.reshape((tokens, heads, head_dim))
    new_keys = room.key.reshape((tokens, key_heads, head_dim))
    new_values = room.value.reshape((tokens, key_heads, head_dim))
    rotate(query_heads, room.cosine, room.sine)
    rotate(new_keys, room.cosine, room.sine)
    remember_and_attend(query_heads, new_keys, new_values, keys, values, sights[weights.sight], start, y.reshape((tokens, heads, head_dim)))
