"""The incremental forward of jamba.

Rules
- One call does one ubatch through all layers. Keys and values of all its tokens are written before any of them attends; a token sees only
  positions up to its own, and nothing else of a position: keys are stored as they are, without rotation.
- A Mamba-1 layer is `mamba1_mixer.mix`.
Sources: Lieber et al. 2024 (arXiv:2403.19887); Transformers' JambaForCausalLM for the order of the parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights, head_size
from ..spec.families.jamba import JAMBA
from ..spec.families.mamba import NORM_EPSILON
from .batches import SplitBatch
from .cells import Plan
from .forwards import FULL, Memory, Sights
from .kernels import kernel
from .kernels.attention import remember_and_attend
from .kernels.dense import add_rows, embed, gated_linear_unit, linear, rms_norm, write_wanted_rows
from .kernels.rows import zero_rows
from .mamba1_mixer import MixerWeights, mix, mixer_room, mixer_shapes, prepare_mixer
from .memory import aligned
from .stacking import places, stacked_matrices, stacked_norms

_EPSILON = np.float32(NORM_EPSILON)


class JambaWeights(NamedTuple):
    """Weights as the forward uses them; matrices [in, out]. Mamba-1 and attention layers are stacked apart. All float32 but place."""

    place: np.ndarray  # int64 [layers], index among the Mamba-1 layers, or -1 - index among the attention layers
    embedding: np.ndarray  # [n_vocab, n_embd]
    input_norm: np.ndarray  # [layers, 1, n_embd]
    mixer: MixerWeights
    q_projection: np.ndarray  # [attention layers, n_embd, n_embd]
    k_projection: np.ndarray  # [attention layers, n_embd, n_embd_kv]
    v_projection: np.ndarray  # [attention layers, n_embd, n_embd_kv]
    attention_out_projection: np.ndarray  # [attention layers, n_embd, n_embd]
    ffn_norm: np.ndarray  # [layers, 1, n_embd]
    ffn_gate: np.ndarray  # [layers, n_embd, n_ff]
    ffn_up: np.ndarray  # [layers, n_embd, n_ff]
    ffn_down: np.ndarray  # [layers, n_ff, n_embd]
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab]


def prepare(dimensions: Dimensions, weights: Weights) -> JambaWeights:
    """Lay the family's weights out for `forward`."""
    every = tuple(range(dimensions["n_layer"]))
    recurrent, attention = JAMBA.recurrent_layers(dimensions), JAMBA.attention_layers(dimensions)
    n_embd, n_ff, n_embd_kv = dimensions["n_embd"], dimensions["n_ff"], head_size(dimensions) * dimensions["n_head_kv"]

    return JambaWeights(
        place=places(dimensions["n_layer"], recurrent, attention),
        embedding=aligned(weights["token_embedding"]),
        input_norm=stacked_norms(weights, "input_norm", every, n_embd),
        mixer=prepare_mixer(dimensions, weights, recurrent),
        q_projection=stacked_matrices(weights, "q_projection", attention, n_embd, n_embd),
        k_projection=stacked_matrices(weights, "k_projection", attention, n_embd_kv, n_embd),
        v_projection=stacked_matrices(weights, "v_projection", attention, n_embd_kv, n_embd),
        attention_out_projection=stacked_matrices(weights, "attention_out_projection", attention, n_embd, n_embd),
        ffn_norm=stacked_norms(weights, "ffn_norm", every, n_embd),
        ffn_gate=stacked_matrices(weights, "ffn_gate", every, n_ff, n_embd),
        ffn_up=stacked_matrices(weights, "ffn_up", every, n_ff, n_embd),
        ffn_down=stacked_matrices(weights, "ffn_down", every, n_embd, n_ff),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["output"].T),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows and attention cells."""
    attention = {"key_heads": dimensions["n_head_kv"], "head_dim": head_size(dimensions), "rope_theta": 0.0}
    return mixer_shapes(dimensions) | attention


@kernel
def forward(
    weights: JambaWeights, memory: Memory, batch: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray
) -> None:
    """One ubatch through the model.

    weights, memory, batch, plan  JambaWeights, Memory, SplitBatch, Plan
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
    n_embd, n_ff = weights.embedding.shape[1], weights.ffn_down.shape[1]
    key_heads, head_dim = memory.keys[FULL].shape[2], memory.keys[FULL].shape[3]

    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    query = np.empty((tokens, n_embd), np.float32)
    mixed = np.empty((tokens, n_embd), np.float32)
    key = np.empty((tokens, key_heads * head_dim), np.float32)
    value = np.empty((tokens, key_heads * head_dim), np.float32)
    inner = np.empty((tokens, n_ff), np.float32)
    inner_gate = np.empty((tokens, n_ff), np.float32)
    room = mixer_room(weights.mixer, tokens)

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(weights.place.size):
        rms_norm(stream, weights.input_norm[layer], _EPSILON, normed)
        place = weights.place[layer]
        if place >= 0:
            mix(weights.mixer, place, memory, segment_start, source_row, plane_row, room, normed, normed)
        else:
            place = -1 - place
            linear(normed, weights.q_projection[place], query)
            linear(normed, weights.k_projection[place], key)
            linear(normed, weights.v_projection[place], value)
            query_heads = query.reshape((tokens, n_embd // head_dim, head_dim))
            mixed_heads = mixed.reshape((tokens, n_embd // head_dim, head_dim))
            new_keys = key.reshape((tokens, key_heads, head_dim))
            new_values = value.reshape((tokens, key_heads, head_dim))
            remember_and_attend(
                query_heads, new_keys, new_values, memory.keys[FULL][place], memory.values[FULL][place], sights[FULL], start, mixed_heads
            )
            linear(mixed, weights.attention_out_projection[place], normed)
        add_rows(normed, stream)
        rms_norm(stream, weights.ffn_norm[layer], _EPSILON, normed)
        linear(normed, weights.ffn_gate[layer], inner_gate)
        linear(normed, weights.ffn_up[layer], inner)
        gated_linear_unit(inner_gate, inner)
        linear(inner, weights.ffn_down[layer], normed)
        add_rows(normed, stream)
    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
