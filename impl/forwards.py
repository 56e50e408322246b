"""What the two sides of a forward agree on: the memory it works in, and the fixed parts of a model.

Rules
- Every family has one forward with the same arguments, so that a session does not know families.
- Absent parts are arrays without elements, never None: a compiled function has one type.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from .kernels.attention import Sight

FULL, WINDOWED = 0, 1
"""Attention layers that see the whole past, and those that see a window of it."""

Sights = tuple[Sight, Sight]
"""For the layers of both kinds."""


class Memory(NamedTuple):
    """The arrays of a session's caches.

    convolution_rows  float32 [recurrent layers, n_rows, convolution width]
    recurrent_rows    float32 [recurrent layers, n_rows, recurrent width]
    keys, values      of the attention layers without and with a window: float32 [layers, cells, key heads, head_dim] each; values have no
                      channels, or no layers, where the model keeps none
    embedding_rows    float32 [layers with per-layer embeddings, n_rows, width of their convolution]
    index_rows        float32 [attention layers, cells, index width], what an indexer keeps of a token
    """

    convolution_rows: np.ndarray
    recurrent_rows: np.ndarray
    keys: tuple[np.ndarray, np.ndarray]
    values: tuple[np.ndarray, np.ndarray]
    embedding_rows: np.ndarray
    index_rows: np.ndarray


class PreparedModel(msgspec.Struct, frozen=True):
    """A model ready to run; it is shared by all its sessions.

    fingerprint        of everything its states depend on
    dimensions         all of them
    weights            the family's own tuple of float32 arrays
    forward            compiled: forward(weights, memory, batch, plan, sights, ubatch, hidden, y) fills the wanted rows of one ubatch in y
    recurrent_layers, attention_layers
    convolution_shape  (window, channels) of a convolution row; (0, 0) when there is none
    recurrent_shape    (heads, d_state, head_dim) of a recurrent row; (0,) when there is none
    embedding_shape    (window, channels) of a row of the convolution of per-layer embeddings; (0,) when there is none
    embedding_layers   those of recurrent_layers that have it
    index_width        numbers that an indexer keeps of a token, beside its key and value: its raw key, and then the token itself; 0: none
    key_heads, head_dim  of an attention cell; 0 without attention
    keeps_values       False: a value is a part of its key, and none is kept
    rope_theta         base of the rotation of keys, 0 without
    rotated_channels   the channels of a key that are rotated, its first ones; 0 for all
    window             newest tokens that a windowed attention layer sees, its own included; 0: no layer has a window
    windowed_layers    those of attention_layers that have it
    """

    fingerprint: str
    dimensions: dict[str, int]
    weights: Any
    forward: Callable[..., None]
    recurrent_layers: tuple[int, ...]
    attention_layers: tuple[int, ...]
    convolution_shape: tuple[int, int]
    recurrent_shape: tuple[int, ...]
    key_heads: int
    head_dim: int
    rope_theta: float
    rotated_channels: int = 0
    window: int = 0
    windowed_layers: tuple[int, ...] = ()
    embedding_shape: tuple[int, ...] = (0,)
    keeps_values: bool = True
    embedding_layers: tuple[int, ...] = ()
    index_width: int = 0


def turned_keys(keys: np.ndarray, positions: np.ndarray, model: PreparedModel) -> np.ndarray:
    """Keys turned on by so many positions, as if their tokens stood there; without a theta they are never turned.

    keys       float32 [..., tokens, key heads, head_dim]
    positions  int64 [tokens], may be negative
    """
    if not model.rope_theta:
        return keys
    channels = model.rotated_channels or keys.shape[-1]
    half = channels // 2
    angle = (positions[:, None] * model.rope_theta ** (-np.arange(half) / half))[:, None, :]
    first, second = keys[..., :half].astype(np.float64), keys[..., half:channels].astype(np.float64)
    cosine, sine = np.cos(angle), np.sin(angle)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return np.concatenate([*turned, keys[..., channels:]], axis=-1).astype(np.float32)
