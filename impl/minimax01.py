"""The incremental forward of minimax01.

Rules
- One call does one ubatch through all layers, reading each sequence's state from its source row and writing its snapshots. Keys and values
  of all its tokens are written before any of them attends; a token sees only positions up to its own.
- The projection to queries, keys and values of a lightning layer is kept as three matrices, so that every part is contiguous.
- There is no convolution: the memory's rows of that part have no elements.
Sources: MiniMax 2025 (arXiv:2501.08313); Transformers' MiniMaxForCausalLM for the order of the parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.minimax01 import ATTENTION, MINIMAX01, NORM_EPSILON, RESIDUAL_SCALE, inner_channels, rates
from .batches import SplitBatch
from .cells import Plan
from .forwards import Memory, Sights
from .grouped_attention import AttentionWeights, attend, attention_room, attention_shapes, prepare_attention
from .kernels import kernel
from .kernels.dense import embed, gate_by_sigmoid, linear, rms_norm, silu_rows, write_wanted_rows
from .kernels.experts import expert_mixture, softmax_shares
from .kernels.lightning_attention import lightning_attention
from .memory import aligned
from .stacking import places, stacked, stacked_experts, stacked_matrices, stacked_norms
from .ubatches import begin_ubatch

_EPSILON = np.float32(NORM_EPSILON)
_RESIDUAL_SCALE = np.float32(RESIDUAL_SCALE)


class Minimax01Weights(NamedTuple):
    """Weights as the forward uses them; matrices [in, out]. Layers of a kind are stacked apart, a lightning layer's queries and a softmax
    layer's together (`place` says which). All float32 but place."""

    place: np.ndarray  # int64 [layers], index among the lightning layers, or -1 - index among the attention layers
    embedding: np.ndarray  # [n_vocab, n_embd]
    input_norm: np.ndarray  # [layers, 1, n_embd]
    lightning_projection: np.ndarray  # [3 (query, key, value), lightning layers, n_embd, d_inner]
    gate_projection: np.ndarray  # [lightning layers, n_embd, d_inner]
    loss: np.ndarray  # [lightning layers, heads], decay - 1
    lightning_norm: np.ndarray  # [lightning layers, 1, d_inner]
    attention: AttentionWeights
    out_projection: np.ndarray  # [layers, d_inner, n_embd]
    ffn_norm: np.ndarray  # [layers, 1, n_embd]
    router: np.ndarray  # [layers, n_embd, experts]
    ffn_gate: np.ndarray  # [layers, experts, n_embd, n_ff]
    ffn_up: np.ndarray  # [layers, experts, n_embd, n_ff]
    ffn_down: np.ndarray  # [layers, experts, n_ff, n_embd]
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab]


def prepare(dimensions: Dimensions, weights: Weights) -> Minimax01Weights:
    """Lay the family's weights out for `forward`."""
    every = tuple(range(dimensions["n_layer"]))
    lightning, attention = MINIMAX01.recurrent_layers(dimensions), MINIMAX01.attention_layers(dimensions)
    n_embd, n_head, head_dim, n_expert, n_ff = (dimensions[name] for name in ("n_embd", "n_head", "head_dim", "n_expert", "n_ff"))
    d_inner = inner_channels(dimensions)

    # Every head's query, key and value stand side by side: [layers, heads, 3, head_dim, n_embd].
    projections = stacked(weights, "qkv_projection", lightning, 3 * d_inner, n_embd).reshape(len(lightning), n_head, 3, head_dim, n_embd)
    projections = projections.transpose(2, 0, 4, 1, 3).reshape(3, len(lightning), n_embd, d_inner)
    loss = [np.expm1(-rates(dimensions, layer)) for layer in lightning]
    return Minimax01Weights(
        place=places(dimensions["n_layer"], lightning, attention),
        embedding=aligned(weights["token_embedding"]),
        input_norm=stacked_norms(weights, "input_norm", every, n_embd),
        lightning_projection=aligned(projections),
        gate_projection=stacked_matrices(weights, "gate_projection", lightning, d_inner, n_embd),
        loss=aligned(np.array(loss).reshape(len(lightning), n_head)),
        lightning_norm=stacked_norms(weights, "lightning_norm", lightning, d_inner),
        attention=prepare_attention(ATTENTION, dimensions, weights, attention),
        out_projection=stacked_matrices(weights, "out_projection", every, n_embd, d_inner),
        ffn_norm=stacked_norms(weights, "ffn_norm", every, n_embd),
        router=stacked_matrices(weights, "router", every, n_expert, n_embd),
        ffn_gate=stacked_experts(weights, "ffn_gate", every, n_expert, n_ff, n_embd),
        ffn_up=stacked_experts(weights, "ffn_up", every, n_expert, n_ff, n_embd),
        ffn_down=stacked_experts(weights, "ffn_down", every, n_expert, n_embd, n_ff),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["output"].T),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows and attention cells."""
    return {
        "convolution_shape": (0, 0),
        "recurrent_shape": (dimensions["n_head"], dimensions["head_dim"], dimensions["head_dim"]),
    } | attention_shapes(ATTENTION, dimensions)


@kernel
def _add_to_residual(part: np.ndarray, residual: np.ndarray, y: np.ndarray) -> None:
    """y = RESIDUAL_SCALE * residual + part, float32 [tokens, channels] all."""
    for token in range(y.shape[0]):
        own, kept, result = part[token], residual[token], y[token]
        for i in range(result.size):
            result[i] = _RESIDUAL_SCALE * kept[i] + own[i]


@kernel
def forward(
    weights: Minimax01Weights, memory: Memory, batch: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray
) -> None:
    """One ubatch through the model.

    weights, memory, batch, plan  Minimax01Weights, Memory, SplitBatch, Plan
    sights                        of the attention layers without and with a window
    ubatch                        which of the batch's ubatches
    hidden                        True: the final norm's output instead of logits
    y                             float32 [wanted rows, n_vocab or n_embd], its rows of this ubatch written
    """
    start, end, segment_start, source_row, plane_row = begin_ubatch(memory, batch, plan, ubatch)
    tokens = end - start
    n_embd, d_inner, heads = weights.embedding.shape[1], weights.out_projection.shape[1], weights.loss.shape[1]
    head_dim = d_inner // heads
    n_rows = memory.recurrent_rows.shape[1]

    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    part = np.empty((tokens, n_embd), np.float32)
    query = np.empty((tokens, d_inner), np.float32)
    key = np.empty((tokens, d_inner), np.float32)
    value = np.empty((tokens, d_inner), np.float32)
    gate = np.empty((tokens, d_inner), np.float32)
    mixed = np.empty((tokens, d_inner), np.float32)
    shares = np.empty((tokens, weights.router.shape[2]), np.float32)
    room = attention_room(weights.attention, batch.positions[start:end])
    query_heads = query.reshape((tokens, heads, head_dim))
    mixed_heads = mixed.reshape((tokens, heads, head_dim))

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(weights.place.size):
        rms_norm(stream, weights.input_norm[layer], _EPSILON, normed)
        place = weights.place[layer]
        if place >= 0:
            for i, projected in enumerate((query, key, value)):
                linear(normed, weights.lightning_projection[i, place], projected)
                silu_rows(projected)
            linear(normed, weights.gate_projection[place], gate)
            lightning_attention(
                query_heads,
                key.reshape((tokens, heads, head_dim)),
                value.reshape((tokens, heads, head_dim)),
                weights.loss[place],
                memory.recurrent_rows[place].reshape((n_rows, heads, head_dim, head_dim)),
                segment_start,
                source_row,
                plane_row,
                mixed_heads,
            )
            rms_norm(mixed, weights.lightning_norm[place], _EPSILON, mixed)
            gate_by_sigmoid(gate, mixed)
        else:
            attend(weights.attention, -1 - place, memory, sights, start, room, normed, mixed)
        linear(mixed, weights.out_projection[layer], part)
        _add_to_residual(part, normed, stream)
        rms_norm(stream, weights.ffn_norm[layer], _EPSILON, normed)
        linear(normed, weights.router[layer], shares)
        softmax_shares(shares)
        expert_mixture(normed, shares, weights.ffn_gate[layer], weights.ffn_up[layer], weights.ffn_down[layer], part)
        _add_to_residual(part, normed, stream)

    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
