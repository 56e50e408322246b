"""The incremental forward of minimax01.

Rules
- One call does one ubatch through all layers, reading each sequence's state from its source row and writing its snapshots. Keys and values
  of all its tokens are written before any of them attends; a token sees only positions up to its own.
- A lightning layer is `lightning_mixer.mix_lightning`, softmax attention is `grouped_attention.attend`; the projection out is theirs in turn.
Sources: MiniMax 2025 (arXiv:2501.08313); Transformers' MiniMaxForCausalLM for the order of the parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.minimax01 import ATTENTION, MINIMAX01, NORM_EPSILON, RESIDUAL_SCALE, inner_channels
from .batches import SplitBatch
from .cells import Plan
from .forwards import Memory, Sights
from .grouped_attention import AttentionWeights, attend, attention_room, attention_shapes, prepare_attention
from .kernels import kernel
from .kernels.dense import add_to_scaled_rows, embed, linear, rms_norm, write_wanted_rows
from .kernels.experts import expert_mixture, softmax_shares
from .lightning_mixer import LightningWeights, lightning_room, lightning_shapes, mix_lightning, prepare_lightning
from .memory import aligned
from .stacking import places, stacked_experts, stacked_matrices, stacked_norms
from .ubatches import begin_ubatch

_EPSILON = np.float32(NORM_EPSILON)
_RESIDUAL_SCALE = np.float32(RESIDUAL_SCALE)


class Minimax01Weights(NamedTuple):
    """Weights as the forward uses them; matrices [in, out]. Lightning and attention layers are stacked apart. All float32 but place."""

    place: np.ndarray  # int64 [layers], index among the lightning layers, or -1 - index among the attention layers
    embedding: np.ndarray  # [n_vocab, n_embd]
    input_norm: np.ndarray  # [layers, 1, n_embd]
    lightning: LightningWeights
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
    n_embd, n_expert, n_ff, d_inner = dimensions["n_embd"], dimensions["n_expert"], dimensions["n_ff"], inner_channels(dimensions)
    return Minimax01Weights(
        place=places(dimensions["n_layer"], lightning, attention),
        embedding=aligned(weights["token_embedding"]),
        input_norm=stacked_norms(weights, "input_norm", every, n_embd),
        lightning=prepare_lightning(dimensions, weights, lightning),
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
    return lightning_shapes(dimensions) | attention_shapes(ATTENTION, dimensions)


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
    n_embd = weights.embedding.shape[1]
    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    part = np.empty((tokens, n_embd), np.float32)
    mixed = np.empty((tokens, weights.out_projection.shape[1]), np.float32)
    shares = np.empty((tokens, weights.router.shape[2]), np.float32)
    own_attention_room = attention_room(weights.attention, batch.positions[start:end])
    own_lightning_room = lightning_room(weights.lightning, tokens)

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(weights.place.size):
        rms_norm(stream, weights.input_norm[layer], _EPSILON, normed)
        place = weights.place[layer]
        if place >= 0:
            mix_lightning(weights.lightning, place, memory, segment_start, source_row, plane_row, own_lightning_room, normed, mixed)
        else:
            attend(weights.attention, -1 - place, memory, sights, start, own_attention_room, normed, mixed)
        linear(mixed, weights.out_projection[layer], part)
        add_to_scaled_rows(part, normed, _RESIDUAL_SCALE, stream)
        rms_norm(stream, weights.ffn_norm[layer], _EPSILON, normed)
        linear(normed, weights.router[layer], shares)
        softmax_shares(shares)
        expert_mixture(normed, shares, weights.ffn_gate[layer], weights.ffn_up[layer], weights.ffn_down[layer], part)
        add_to_scaled_rows(part, normed, _RESIDUAL_SCALE, stream)

    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
