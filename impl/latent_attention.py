"""One layer of multi-head latent attention over one ubatch, its latents never expanded.

Rules
- The weights of all such layers of a model are stacked; `place` is a layer's index among them, and among the attention layers of the memory.
- One row a token is kept, for all heads: the normed latent, and the part of a key that heads share. A head's query is turned into the space
  of latents, which are keys and values at once; what it has read is turned back afterwards. Nothing is rotated.
- Rows of all tokens are written before any of them attends; a token sees only positions up to its own.
- The layer's norm and its residual are the caller's.
Sources: DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1; Transformers' KimiLinearForCausalLM.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.kimi_linear import NORM_EPSILON, key_size
from .forwards import FULL, Memory, Sights
from .kernels import kernel
from .kernels.attention import remember_and_attend
from .kernels.dense import linear, rms_norm
from .kernels.mixer_parts import copy_last_channels, join_rows, multiply_heads
from .memory import aligned
from .stacking import stacked, stacked_matrices, stacked_norms

_EPSILON = np.float32(NORM_EPSILON)


class LatentAttentionWeights(NamedTuple):
    """Weights as `attend_latent` uses them, stacked over the attention layers; matrices [in, out]. All float32.

    q_projection is larger by the root of a row's width over a key's: attention divides scores by the root of what it sees, a row.
    """

    q_projection: np.ndarray  # [layers, n_embd, heads * (own + shared key channels)]
    latent_projection: np.ndarray  # [layers, n_embd, rank]
    shared_key_projection: np.ndarray  # [layers, n_embd, shared key channels]
    latent_norm: np.ndarray  # [layers, 1, rank]
    to_latent: np.ndarray  # [layers, heads, own key channels, rank]
    from_latent: np.ndarray  # [layers, heads, rank, value channels]
    out_projection: np.ndarray  # [layers, heads * value channels, n_embd]


class LatentAttentionRoom(NamedTuple):
    """Arrays that `attend_latent` works in, for one ubatch; float32 [tokens, channels of its own]."""

    projected: np.ndarray
    query: np.ndarray
    latent: np.ndarray
    shared_key: np.ndarray
    row: np.ndarray
    read: np.ndarray
    mixed: np.ndarray


def prepare_latent_attention(dimensions: Dimensions, weights: Weights, layers: tuple[int, ...]) -> LatentAttentionWeights:
    """Lay the weights of the attention layers `layers` out."""
    n_embd, n_head, rank, n_shared = (dimensions[name] for name in ("n_embd", "n_head", "kv_lora_rank", "qk_rope_dim"))
    n_own, n_value, size = dimensions["qk_nope_dim"], dimensions["value_dim"], key_size(dimensions)
    query = stacked(weights, "q_projection", layers, n_head * size, n_embd).transpose(0, 2, 1)
    latent = stacked(weights, "latent_projection", layers, rank + n_shared, n_embd).transpose(0, 2, 1)
    return LatentAttentionWeights(
        q_projection=aligned(query.astype(np.float64) * math.sqrt((rank + n_shared) / size)),
        latent_projection=aligned(latent[:, :, :rank]),
        shared_key_projection=aligned(latent[:, :, rank:]),
        latent_norm=stacked_norms(weights, "latent_norm", layers, rank),
        to_latent=aligned(stacked(weights, "k_expansion", layers, n_head, rank, n_own).transpose(0, 1, 3, 2)),
        from_latent=aligned(stacked(weights, "v_expansion", layers, n_head, n_value, rank).transpose(0, 1, 3, 2)),
        out_projection=stacked_matrices(weights, "out_projection", layers, n_embd, n_head * n_value),
    )


def latent_attention_shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shape of a layer's attention cells."""
    return {
        "key_heads": 1,
        "head_dim": dimensions["kv_lora_rank"] + dimensions["qk_rope_dim"],
        "rope_theta": 0.0,
        "keeps_values": False,
    }


@kernel
def latent_attention_room(weights: LatentAttentionWeights, tokens: int) -> LatentAttentionRoom:
    """Room for `attend_latent` over `tokens` tokens, unwritten."""
    heads, rank, shared = weights.to_latent.shape[1], weights.to_latent.shape[3], weights.shared_key_projection.shape[2]
    return LatentAttentionRoom(
        np.empty((tokens, weights.q_projection.shape[2]), np.float32),
        np.empty((tokens, heads * (rank + shared)), np.float32),
        np.empty((tokens, rank), np.float32),
        np.empty((tokens, shared), np.float32),
        np.empty((tokens, rank + shared), np.float32),
        np.empty((tokens, heads * rank), np.float32),
        np.empty((tokens, weights.out_projection.shape[1]), np.float32),
    )


@kernel
def attend_latent(
    weights: LatentAttentionWeights,
    place: int,
    memory: Memory,
    sights: Sights,
    start: int,
    room: LatentAttentionRoom,
    x: np.ndarray,
    y: np.ndarray,
) -> None:
    """One layer: its tokens' rows are written, and each token attends to the cells that it sees.

    place   which of the stacked layers
    memory  its cells of layer `place` are read and written
    sights  of the attention layers without and with a window; these have none
    start   place of the ubatch's first token in the batch
    room    written
    x, y    float32 [tokens, n_embd]; y written. y may be x
    """
    tokens = x.shape[0]
    heads, rank, shared = weights.to_latent.shape[1], weights.to_latent.shape[3], weights.shared_key_projection.shape[2]
    linear(x, weights.q_projection[place], room.projected)
    linear(x, weights.latent_projection[place], room.latent)
    linear(x, weights.shared_key_projection[place], room.shared_key)
    rms_norm(room.latent, weights.latent_norm[place], _EPSILON, room.latent)
    join_rows(room.latent, room.shared_key, room.row)
    projected = room.projected.reshape((tokens, heads, room.projected.shape[1] // heads))
    query = room.query.reshape((tokens, heads, rank + shared))
    multiply_heads(projected, weights.to_latent[place], query)
    copy_last_channels(projected, shared, query)
    rows, cells = room.row.reshape((tokens, 1, rank + shared)), memory.keys[FULL][place]
    read = room.read.reshape((tokens, heads, rank))
    # A row is its own value: attention reads as many of its first channels as a result has.
    remember_and_attend(query, rows, rows, cells, cells, sights[FULL], start, read)
    multiply_heads(read, weights.from_latent[place], room.mixed.reshape((tokens, heads, room.mixed.shape[1] // heads)))
    linear(room.mixed, weights.out_projection[place], y)
