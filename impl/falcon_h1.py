"""The incremental forward of falcon_h1.

Rules
- One call does one ubatch through all layers. Keys and values of all its tokens are written before any of them attends; a token sees only
  positions up to its own.
- In a layer `mamba2_mixer.mix` and attention read the same normed inputs, and their outputs are added.
Sources: Transformers' FalconH1ForCausalLM; llama.cpp's src/models/falcon-h1.cpp.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.falcon_h1 import NORM_EPSILON, ROPE_THETA
from ..spec.families.family import Dimensions, Weights, head_size
from ..spec.families.mamba2 import mixer_dimensions
from .batches import SplitBatch
from .cells import Plan
from .forwards import FULL, Memory, Sights
from .kernels import kernel
from .kernels.attention import remember_and_attend
from .kernels.dense import add_rows, embed, gated_linear_unit, linear, rms_norm, rotary_table, rotate, write_wanted_rows
from .kernels.rows import zero_rows
from .mamba2_mixer import MixerWeights, mix, mixer_room, mixer_shapes, prepare_mixer
from .memory import aligned
from .stacking import stacked_matrices, stacked_norms

_EPSILON = np.float32(NORM_EPSILON)


class FalconH1Weights(NamedTuple):
    """Weights as the forward uses them, stacked over layers; matrices [in, out]. All float32."""

    embedding: np.ndarray  # [n_vocab, n_embd]
    norm: np.ndarray  # [layers, 1, n_embd]
    mixer: MixerWeights
    q_projection: np.ndarray  # [layers, n_embd, n_embd]
    k_projection: np.ndarray  # [layers, n_embd, n_embd_kv]
    v_projection: np.ndarray  # [layers, n_embd, n_embd_kv]
    attention_out: np.ndarray  # [layers, n_embd, n_embd]
    ffn_norm: np.ndarray  # [layers, 1, n_embd]
    ffn_gate: np.ndarray  # [layers, n_embd, n_ff]
    ffn_up: np.ndarray  # [layers, n_embd, n_ff]
    ffn_down: np.ndarray  # [layers, n_ff, n_embd]
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab]


def prepare(dimensions: Dimensions, weights: Weights) -> FalconH1Weights:
    """Lay the family's weights out for `forward`."""
    layers = tuple(range(dimensions["n_layer"]))
    n_embd, n_ff, n_embd_kv = dimensions["n_embd"], dimensions["n_ff"], head_size(dimensions) * dimensions["n_head_kv"]
    return FalconH1Weights(
        embedding=aligned(weights["token_embedding"]),
        norm=stacked_norms(weights, "norm", layers, n_embd),
        mixer=prepare_mixer(mixer_dimensions(dimensions), weights, layers),
        q_projection=stacked_matrices(weights, "q_projection", layers, n_embd, n_embd),
        k_projection=stacked_matrices(weights, "k_projection", layers, n_embd_kv, n_embd),
        v_projection=stacked_matrices(weights, "v_projection", layers, n_embd_kv, n_embd),
        attention_out=stacked_matrices(weights, "attention_out", layers, n_embd, n_embd),
        ffn_norm=stacked_norms(weights, "ffn_norm", layers, n_embd),
        ffn_gate=stacked_matrices(weights, "ffn_gate", layers, n_ff, n_embd),
        ffn_up=stacked_matrices(weights, "ffn_up", layers, n_ff, n_embd),
        ffn_down=stacked_matrices(weights, "ffn_down", layers, n_embd, n_ff),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["output"].T),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows and attention cells."""
    attention = {"key_heads": dimensions["n_head_kv"], "head_dim": head_size(dimensions), "rope_theta": ROPE_THETA}
    return mixer_shapes(mixer_dimensions(dimensions)) | attention


@kernel
def forward(
    weights: FalconH1Weights, memory: Memory, batch: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray
) -> None:
    """One ubatch through the model.

    weights, memory, batch, plan  FalconH1Weights, Memory, SplitBatch, Plan
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
    n_embd, n_ff = weights.embedding.shape[1], weights.ffn_up.shape[2]
    keys, values = memory.keys[FULL], memory.values[FULL]
    key_heads, head_dim = keys.shape[2], keys.shape[3]
    heads = n_embd // head_dim

    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    query = np.empty((tokens, n_embd), np.float32)
    attended = np.empty((tokens, n_embd), np.float32)
    key = np.empty((tokens, key_heads * head_dim), np.float32)
    value = np.empty((tokens, key_heads * head_dim), np.float32)
    gate = np.empty((tokens, n_ff), np.float32)
    inner = np.empty((tokens, n_ff), np.float32)
    cosine = np.empty((tokens, head_dim // 2), np.float32)
    sine = np.empty((tokens, head_dim // 2), np.float32)
    query_heads = query.reshape((tokens, heads, head_dim))
    attended_heads = attended.reshape((tokens, heads, head_dim))
    new_keys = key.reshape((tokens, key_heads, head_dim))
    new_values = value.reshape((tokens, key_heads, head_dim))
    room = mixer_room(weights.mixer, tokens)

    rotary_table(batch.positions[start:end], head_dim // 2, ROPE_THETA, cosine, sine)
    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(weights.norm.shape[0]):
        rms_norm(stream, weights.norm[layer], _EPSILON, normed)
        linear(normed, weights.q_projection[layer], query)
        linear(normed, weights.k_projection[layer], key)
        linear(normed, weights.v_projection[layer], value)
        rotate(query_heads, cosine, sine)
        rotate(new_keys, cosine, sine)
        remember_and_attend(query_heads, new_keys, new_values, keys[layer], values[layer], sights[FULL], start, attended_heads)
        mix(weights.mixer, layer, memory, segment_start, source_row, plane_row, room, normed, normed)
        linear(attended, weights.attention_out[layer], query)
        add_rows(query, normed)
        add_rows(normed, stream)
        rms_norm(stream, weights.ffn_norm[layer], _EPSILON, normed)
        linear(normed, weights.ffn_gate[layer], gate)
        linear(normed, weights.ffn_up[layer], inner)
        gated_linear_unit(gate, inner)
        linear(inner, weights.ffn_down[layer], normed)
        add_rows(normed, stream)
    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
