"""The incremental forward of qwen3next.

Rules
- One call does one ubatch through all layers: a delta net is `delta_net_mixer.mix_delta_net`, attention `gated_attention.attend_gated`.
- The shared expert is added to the mixture of the others, times its own share.
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
from .forwards import Memory, Sights
from .gated_attention import GatedAttentionWeights, attend_gated, gated_attention_room, gated_attention_shapes, prepare_gated_attention
from .kernels import kernel
from .kernels.arithmetic import sigmoid
from .kernels.dense import add_rows, embed, gated_linear_unit, linear, rms_norm, write_wanted_rows
from .kernels.experts import expert_mixture, softmax_shares
from .kernels.rows import zero_rows
from .memory import aligned
from .stacking import stacked, stacked_matrices, stacked_norms

_EPSILON = np.float32(NORM_EPSILON)


class Qwen3NextWeights(NamedTuple):
    """Weights as the forward uses them; matrices [in, out]. Delta-net and attention layers are stacked apart. All float32 but place."""

    place: np.ndarray  # int64 [layers], index among the delta-net layers, or -1 - index among the attention layers
    embedding: np.ndarray  # [n_vocab, n_embd]
    input_norm: np.ndarray  # [layers, 1, n_embd]
    delta_net: DeltaNetWeights
    attention: GatedAttentionWeights
    ffn_norm: np.ndarray  # [layers, 1, n_embd]
    router: np.ndarray  # [layers, n_embd, experts]
    expert_gate: np.ndarray  # [layers, experts, n_embd, n_ff_expert]
    expert_up: np.ndarray  # [layers, experts, n_embd, n_ff_expert]
    expert_down: np.ndarray  # [layers, experts, n_ff_expert, n_embd]
    shared_router: np.ndarray  # [layers, n_embd, 1]
    shared_gate: np.ndarray  # [layers, n_embd, n_ff_shared]
    shared_up: np.ndarray  # [layers, n_embd, n_ff_shared]
    shared_down: np.ndarray  # [layers, n_ff_shared, n_embd]
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab]


def prepare(dimensions: Dimensions, weights: Weights) -> Qwen3NextWeights:
    """Lay the family's weights out for `forward`."""
    every = tuple(range(dimensions["n_layer"]))
    recurrent, attention = QWEN3NEXT.recurrent_layers(dimensions), QWEN3NEXT.attention_layers(dimensions)
    n_embd, n_ff_shared, n_expert = (dimensions[name] for name in ("n_embd", "n_ff_shared", "n_expert"))
    apart = dict(weights)
    for layer in recurrent:
        prefix = f"layers.{layer}."
        apart[prefix + "beta_projection"], apart[prefix + "step_projection"] = split_rates(dimensions, weights[prefix + "rates_projection"])
    place = [recurrent.index(layer) if layer in recurrent else -1 - attention.index(layer) for layer in every]

    def experts(name: str) -> np.ndarray:
        return aligned(stacked(weights, name, every).transpose(0, 1, 3, 2))

    return Qwen3NextWeights(
        place=np.array(place, np.int64),
        embedding=aligned(weights["token_embedding"]),
        input_norm=stacked_norms(weights, "input_norm", every, n_embd),
        delta_net=prepare_delta_nets(dimensions, apart, recurrent, key_heads_side_by_side(dimensions)),
        attention=prepare_gated_attention(dimensions, weights, attention),
        ffn_norm=stacked_norms(weights, "ffn_norm", every, n_embd),
        router=stacked_matrices(weights, "router", every, n_expert, n_embd),
        expert_gate=experts("expert_gate"),
        expert_up=experts("expert_up"),
        expert_down=experts("expert_down"),
        shared_router=stacked_matrices(weights, "shared_router", every, 1, n_embd),
        shared_gate=stacked_matrices(weights, "shared_gate", every, n_ff_shared, n_embd),
        shared_up=stacked_matrices(weights, "shared_up", every, n_ff_shared, n_embd),
        shared_down=stacked_matrices(weights, "shared_down", every, n_embd, n_ff_shared),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["output"].T),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows and attention cells."""
    return delta_net_shapes(dimensions) | gated_attention_shapes(dimensions)


@kernel
def _add_by_sigmoid(x: np.ndarray, score: np.ndarray, y: np.ndarray) -> None:
    """y += x * sigmoid(score); x, y float32 [tokens, channels], score float32 [tokens, 1]."""
    for token in range(x.shape[0]):
        share, source, result = sigmoid(score[token, 0]), x[token], y[token]
        for i in range(source.size):
            result[i] = result[i] + share * source[i]


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
    first, last = batch.ubatch_start[ubatch], batch.ubatch_start[ubatch + 1]
    segment_start = batch.segment_start[first : last + 1]
    start, end = segment_start[0], segment_start[last - first]
    source_row, plane_row = plan.source_row[first:last], plan.plane_row[first:last]
    zero_rows(memory.convolution_rows, plan.zero_row[first:last])
    zero_rows(memory.recurrent_rows, plan.zero_row[first:last])

    tokens = end - start
    n_embd, n_ff_shared = weights.embedding.shape[1], weights.shared_down.shape[1]
    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    mixed = np.empty((tokens, n_embd), np.float32)
    shares = np.empty((tokens, weights.router.shape[2]), np.float32)
    score = np.empty((tokens, 1), np.float32)
    inner = np.empty((tokens, n_ff_shared), np.float32)
    inner_gate = np.empty((tokens, n_ff_shared), np.float32)
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
        linear(normed, weights.router[layer], shares)
        softmax_shares(shares)
        expert_mixture(normed, shares, weights.expert_gate[layer], weights.expert_up[layer], weights.expert_down[layer], mixed)
        linear(normed, weights.shared_router[layer], score)
        linear(normed, weights.shared_gate[layer], inner_gate)
        linear(normed, weights.shared_up[layer], inner)
        gated_linear_unit(inner_gate, inner)
        linear(inner, weights.shared_down[layer], normed)
        _add_by_sigmoid(normed, score, mixed)
        add_rows(mixed, stream)

    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
