"""What the two sides of a forward agree on: the memory it works in, and the fixed parts of a model.

Rules
- Every family has one forward with the same arguments, so that a session does not know families.
- Absent parts are arrays without elements, never None: a compiled function has one type.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np


class Memory(NamedTuple):
    """The arrays of a session's caches.

    convolution_rows  float32 [recurrent layers, n_rows, convolution width]
    recurrent_rows    float32 [recurrent layers, n_rows, recurrent width]
    keys, values      float32 [attention layers, cells, key heads, head_dim]
    cell_of           int32 [sequences, most tokens of a sequence], the cell of every position
    """

    convolution_rows: np.ndarray
    recurrent_rows: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    cell_of: np.ndarray


class PreparedModel(msgspec.Struct, frozen=True):
    """A model ready to run; it is shared by all its sessions.

    fingerprint        of everything its states depend on
    dimensions         all of them
    weights            the family's own tuple of float32 arrays
    forward            compiled: forward(weights, memory, batch, plan, ubatch, hidden, y) fills the wanted rows of one ubatch in y
    recurrent_layers, attention_layers
    convolution_shape  (window, channels) of a convolution row
    recurrent_shape    (heads, d_state, head_dim) of a recurrent row; (0,) when there is none
    key_heads, head_dim  of an attention cell; 0 without attention
    rope_theta         base of the rotation of keys, 0 without
    rotated_channels   the channels of a key that are rotated, its first ones; 0 for all
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
