"""The incremental forward of kimi_linear.

Rules
- One call does one ubatch through all layers: Kimi Delta Attention is `kimi_delta_mixer.mix_kimi_delta`, latent attention
  `latent_attention.attend_latent`.
- Layers that are followed by experts are stacked apart from those that are followed by a dense layer, which come first.
Source: Transformers' KimiLinearForCausalLM for the order of the parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.kimi_linear import EXPERT_SCALE, KIMI_LINEAR, NORM_EPSILON
from .batches import SplitBatch
from .cells import Plan
from .forwards import Memory, Sights
from .kernels import kernel
from .kernels.dense import add_rows, embed, gated_linear_unit, linear, rms_norm, write_wanted_rows
from .kernels.experts import expert_mixture, sigmoid_shares
from .kimi_delta_mixer import KimiDeltaWeights, kimi_delta_room, kimi_delta_shapes, mix_kimi_delta, prepare_kimi_delta
from .latent_attention import (
    LatentAttentionWeights,
    attend_latent,
    latent_attention_room,
    latent_attention_shapes,
    prepare_latent_attention,
)
from .memory import aligned
from .stacking import places, stacked_experts, stacked_matrices, stacked_norms
from .ubatches import begin_ubatch

_EPSILON = np.float32(NORM_EPSILON)
_EXPERT_SCALE = np.float32(EXPERT_SCALE)


class KimiLinearWeights(NamedTuple):
    """Weights as the forward uses them; matrices [in, out]. Layers of a kind are stacked apart. All float32 but place."""

    place: np.ndarray  # int64 [layers], index among the delta-attention layers, or -1 - index among the latent-attention layers
    embedding: np.ndarray  # [n_vocab, n_embd]
    input_norm: np.ndarray  # [layers, 1, n_embd]
    delta: KimiDeltaWeights
    attention: LatentAttentionWeights
    ffn_norm: np.ndarray  # [layers, 1, n_embd]
    ffn_gate: np.ndarray  # [dense layers, n_embd, n_ff]
    ffn_up: np.ndarray  # [dense layers, n_embd, n_ff]
    ffn_down: np.ndarray  # [dense layers, n_ff, n_embd]
    router: np.ndarray  # [other layers, n_embd, experts]
    expert_gate: np.ndarray  # [other layers, experts, n_embd, n_ff_expert]
    expert_up: np.ndarray  # [other layers, experts, n_embd, n_ff_expert]
    expert_down: np.ndarray  # [other layers, experts, n_ff_expert, n_embd]
    shared_gate: np.ndarray  # [other layers, n_embd, n_ff_expert]
    shared_up: np.ndarray  # [other layers, n_embd, n_ff_expert]
    shared_down: np.ndarray  # [other layers, n_ff_expert, n_embd]
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab]


def prepare(dimensions: Dimensions, weights: Weights) -> KimiLinearWeights:
    """Lay the family's weights out for `forward`."""
    every = tuple(range(dimensions["n_layer"]))
    recurrent, attention = KIMI_LINEAR.recurrent_layers(dimensions), KIMI_LINEAR.attention_layers(dimensions)
    dense, sparse = every[: dimensions["n_dense"]], every[dimensions["n_dense"] :]
    n_embd, n_ff, n_expert, n_ff_expert = (dimensions[name] for name in ("n_embd", "n_ff", "n_expert", "n_ff_expert"))

    return KimiLinearWeights(
        place=places(dimensions["n_layer"], recurrent, attention),
        embedding=aligned(weights["token_embedding"]),
        input_norm=stacked_norms(weights, "input_norm", every, n_embd),
        delta=prepare_kimi_delta(dimensions, weights, recurrent),
        attention=prepare_latent_attention(dimensions, weights, attention),
        ffn_norm=stacked_norms(weights, "ffn_norm", every, n_embd),
        ffn_gate=stacked_matrices(weights, "ffn_gate", dense, n_ff, n_embd),
        ffn_up=stacked_matrices(weights, "ffn_up", dense, n_ff, n_embd),
        ffn_down=stacked_matrices(weights, "ffn_down", dense, n_embd, n_ff),
        router=stacked_matrices(weights, "router", sparse, n_expert, n_embd),
        expert_gate=stacked_experts(weights, "expert_gate", sparse, n_expert, n_ff_expert, n_embd),
        expert_up=stacked_experts(weights, "expert_up", sparse, n_expert, n_ff_expert, n_embd),
        expert_down=stacked_experts(weights, "expert_down", sparse, n_expert, n_embd, n_ff_expert),
        shared_gate=stacked_matrices(weights, "shared_gate", sparse, n_ff_expert, n_embd),
        shared_up=stacked_matrices(weights, "shared_up", sparse, n_ff_expert, n_embd),
        shared_down=stacked_matrices(weights, "shared_down", sparse, n_embd, n_ff_expert),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["output"].T),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows and attention cells."""
    return kimi_delta_shapes(dimensions) | latent_attention_shapes(dimensions)


@kernel
def forward(
    weights: KimiLinearWeights, memory: Memory, batch: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray
) -> None:
    """One ubatch through the model.

    weights, memory, batch, plan  KimiLinearWeights, Memory, SplitBatch, Plan
    sights                        of the attention layers without and with a window
    ubatch                        which of the batch's ubatches
    hidden                        True: the final norm's output instead of logits
    y                             float32 [wanted rows, n_vocab or n_embd], its rows of this ubatch written
    """
    start, end, segment_start, source_row, plane_row = begin_ubatch(memory, batch, plan, ubatch)
    tokens = end - start
    n_embd, dense_layers = weights.embedding.shape[1], weights.ffn_down.shape[0]
    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    mixed = np.empty((tokens, n_embd), np.float32)
    inner = np.empty((tokens, weights.ffn_down.shape[1]), np.float32)
    inner_gate = np.empty((tokens, weights.ffn_down.shape[1]), np.float32)
    shares = np.empty((tokens, weights.router.shape[2]), np.float32)
    shared = np.empty((tokens, weights.shared_down.shape[1]), np.float32)
    shared_gate = np.empty((tokens, weights.shared_down.shape[1]), np.float32)
    delta_room = kimi_delta_room(weights.delta, tokens)
    attention_room = latent_attention_room(weights.attention, tokens)

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(weights.place.size):
        rms_norm(stream, weights.input_norm[layer], _EPSILON, normed)
        place = weights.place[layer]
        if place >= 0:
            mix_kimi_delta(weights.delta, place, memory, segment_start, source_row, plane_row, delta_room, normed, normed)
        else:
            attend_latent(weights.attention, -1 - place, memory, sights, start, attention_room, normed, normed)
        add_rows(normed, stream)
        rms_norm(stream, weights.ffn_norm[layer], _EPSILON, normed)
        if layer < dense_layers:
            linear(normed, weights.ffn_gate[layer], inner_gate)
            linear(normed, weights.ffn_up[layer], inner)
            gated_linear_unit(inner_gate, inner)
            linear(inner, weights.ffn_down[layer], normed)
        else:
            own = layer - dense_layers
            linear(normed, weights.router[own], shares)
            sigmoid_shares(shares, _EXPERT_SCALE)
            expert_mixture(normed, shares, weights.expert_gate[own], weights.expert_up[own], weights.expert_down[own], mixed)
            linear(normed, weights.shared_gate[own], shared_gate)
            linear(normed, weights.shared_up[own], shared)
            gated_linear_unit(shared_gate, shared)
            linear(shared, weights.shared_down[own], normed)
            add_rows(mixed, normed)
        add_rows(normed, stream)

    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
