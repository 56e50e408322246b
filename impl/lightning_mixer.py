"""One layer of lightning attention over one ubatch.

Rules
- The weights of all such layers of a model are stacked; `place` is a layer's index among them, and among the recurrent layers of the memory.
- The projection to queries, keys and values is kept as three matrices, so that every part is contiguous.
- There is no convolution: the memory's rows of that part have no elements.
- The layer's norm, its projection out and its residual are the caller's.
Sources: MiniMax 2025 (arXiv:2501.08313); Transformers' MiniMaxForCausalLM for the order of the parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.minimax01 import NORM_EPSILON, inner_channels, rates
from .forwards import Memory
from .kernels import kernel
from .kernels.dense import gate_by_sigmoid, linear, rms_norm, silu_rows
from .kernels.lightning_attention import lightning_attention
from .memory import aligned
from .stacking import stacked, stacked_matrices, stacked_norms

_EPSILON = np.float32(NORM_EPSILON)


class LightningWeights(NamedTuple):
    """Weights as `mix_lightning` uses them, stacked over the lightning layers; matrices [in, out]. All float32."""

    projection: np.ndarray  # [3 (query, key, value), layers, n_embd, d_inner]
    gate_projection: np.ndarray  # [layers, n_embd, d_inner]
    loss: np.ndarray  # [layers, heads], decay - 1
    norm: np.ndarray  # [layers, 1, d_inner]


class LightningRoom(NamedTuple):
    """Arrays that `mix_lightning` works in, for one ubatch; float32 [tokens, d_inner]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    gate: np.ndarray


def prepare_lightning(dimensions: Dimensions, weights: Weights, layers: tuple[int, ...]) -> LightningWeights:
    """Lay the weights of the lightning layers `layers` out."""
    n_embd, n_head, head_dim = dimensions["n_embd"], dimensions["n_head"], dimensions["head_dim"]
    d_inner = inner_channels(dimensions)
    # Every head's query, key and value stand side by side: [layers, heads, 3, head_dim, n_embd].
    projections = stacked(weights, "qkv_projection", layers, 3 * d_inner, n_embd).reshape(len(layers), n_head, 3, head_dim, n_embd)
    loss = [np.expm1(-rates(dimensions, layer)) for layer in layers]
    return LightningWeights(
        projection=aligned(projections.transpose(2, 0, 4, 1, 3).reshape(3, len(layers), n_embd, d_inner)),
        gate_projection=stacked_matrices(weights, "gate_projection", layers, d_inner, n_embd),
        loss=aligned(np.array(loss).reshape(len(layers), n_head)),
        norm=stacked_norms(weights, "lightning_norm", layers, d_inner),
    )


def lightning_shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a lightning layer's state rows."""
    return {"convolution_shape": (0, 0), "recurrent_shape": (dimensions["n_head"], dimensions["head_dim"], dimensions["head_dim"])}


@kernel
def lightning_room(weights: LightningWeights, tokens: int) -> LightningRoom:
    """Room for `mix_lightning` over `tokens` tokens, unwritten."""
    d_inner = weights.gate_projection.shape[2]
    return LightningRoom(
        np.empty((tokens, d_inner), np.float32),
        np.empty((tokens, d_inner), np.float32),
        np.empty((tokens, d_inner), np.float32),
        np.empty((tokens, d_inner), np.float32),
    )


@kernel
def mix_lightning(
    weights: LightningWeights,
    place: int,
    memory: Memory,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    room: LightningRoom,
    x: np.ndarray,
    y: np.ndarray,
) -> None:
    """One layer: each sequence's state is read from its source row, and its snapshots are written.

    place          which of the stacked layers
    memory         its rows of layer `place` are read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments], plane_row int64 [segments, planes]: see `kernels.lightning_attention`
    room           written
    x              float32 [tokens, n_embd]
    y              float32 [tokens, d_inner], written; not x
    """
    tokens, heads, d_inner = x.shape[0], weights.loss.shape[1], y.shape[1]
    shape = (tokens, heads, d_inner // heads)
    for i, projected in enumerate((room.query, room.key, room.value)):
        linear(x, weights.projection[i, place], projected)
        silu_rows(projected)
    linear(x, weights.gate_projection[place], room.gate)
    lightning_attention(
        room.query.reshape(shape),
        room.key.reshape(shape),
        room.value.reshape(shape),
        weights.loss[place],
        memory.recurrent_rows[place].reshape((memory.recurrent_rows.shape[1], heads, shape[2], shape[2])),
        segment_start,
        source_row,
        plane_row,
        y.reshape(shape),
    )
    rms_norm(y, weights.norm[place], _EPSILON, y)
    gate_by_sigmoid(room.gate, y)
