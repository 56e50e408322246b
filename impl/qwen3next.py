"""The incremental forward of qwen3next.

Rules
- One call does one ubatch through all layers: a delta net is `delta_net_mixer.mix_delta_net`, attention `gated_attention.attend_gated`.
Source: Transformers' Qwen3NextForCausalLM for the order of the parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.delta_net import NORM_EPSILON, key_heads_side_by_side
from ..spec.families.family import Dimensions, Weights
from ..spec.families.qwen3next import QWEN3NEXT, split_rates
from .batches import SplitBatch
from .cells import Plan
from .delta_net_mixer import DeltaNetWeights, delta_net_room, delta_net_shapes, mix_delta_net, prepare_delta_nets
from .expert_layer import ExpertWeights, mix_experts, prepare_experts
from .forwards import Memory, Sights
from .gated_attention import GatedAttentionWeights, attend_gated, gated_attention_room, gated_attention_shapes, prepare_gated_attention
from .kernels import kernel
from .kernels.dense import add_rows, embed, rms_norm, write_wanted_rows
from .memory import aligned
from .stacking import places, stacked_norms
from .ubatches import begin_ubatch

_EPSILON = np.float32(NORM_EPSILON)


class Qwen3NextWeights(NamedTuple):
    """Weights as the forward uses them; matrices [in, out]. Delta-net and attention layers are stacked apart. All float32 but place."""

    place: np.ndarray  # int64 [layers], index among the delta-net layers, or -1 - index among the attention layers
    embedding: np.ndarray  # [n_vocab, n_embd]
    input_norm: np.ndarray  # [layers, 1, n_embd]
    delta_net: DeltaNetWeights
    attention: GatedAttentionWeights
    ffn_norm: np.ndarray  # [layers, 1, n_embd]
    experts: ExpertWeights
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab]


def prepare(dimensions: Dimensions, weights: Weights) -> Qwen3NextWeights:
    """Lay the family's weights out for `forward`."""
    every = tuple(range(dimensions["n_layer"]))
    recurrent, attention = QWEN3NEXT.recurrent_layers(dimensions), QWEN3NEXT.attention_layers(dimensions)
    n_embd = dimensions["n_embd"]
    apart = dict(weights)
    for layer in recurrent:
        prefix = f"layers.{layer}."
        apart[prefix + "beta_projection"], apart[prefix + "step_projection"] = split_rates(dimensions, weights[prefix + "rates_projection"])

    return Qwen3NextWeights(
        place=places(dimensions["n_layer"], recurrent, attention),
        embedding=aligned(weights["token_embedding"]),
        input_norm=stacked_norms(weights, "input_norm", every, n_embd),
        delta_net=prepare_delta_nets(dimensions, apart, recurrent, key_heads_side_by_side(dimensions)),
        attention=prepare_gated_attention(dimensions, weights, attention),
        ffn_norm=stacked_norms(weights, "ffn_norm", every, n_embd),
        experts=prepare_experts(dimensions, weights, every, dimensions["n_ff_expert"], "shared_router"),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["output"].T),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows and attention cells."""
    return delta_net_shapes(dimensions) | gated_attention_shapes(dimensions)


@kernel
def forward(
    weights: Qwen3NextWeights, memory: Memory, batch: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray
) -> None:
    """One ubatch through the model.

    weights, memory, batch, plan  Qwen3NextWeights, Memory, SplitBatch, Plan
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
    mixed = np.empty((tokens, n_embd), np.float32)
    delta_room = delta_net_room(weights.delta_net, tokens)
    attention_room = gated_attention_room(weights.attention, batch.positions[start:end])

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(weights.place.size):
        rms_norm(stream, weights.input_norm[layer], _EPSILON, normed)
        place = weights.place[layer]
        if place >= 0:
            mix_delta_net(weights.delta_net, place, memory, segment_start, source_row, plane_row, delta_room, normed, normed)
        else:
            attend_gated(weights.attention, -1 - place, memory, sights, start, attention_room, normed, normed)
        add_rows(normed, stream)
        rms_norm(stream, weights.ffn_norm[layer], _EPSILON, normed)
        mix_experts(weights.experts, layer, normed, mixed)
        add_rows(mixed, stream)

    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
