"""The incremental forward of lfm2, and of lfm2_swa, whose attention layers have a window.

Rules
- One call does one ubatch through all layers. Keys and values of all its tokens are written before any of them attends; a token sees only
  positions up to its own.
- The short convolution's in-projection is kept as three matrices, so that every part is contiguous.
Sources: Transformers' Lfm2ForCausalLM; llama.cpp's src/models/lfm2.cpp.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights, head_size
from ..spec.families.lfm2 import LFM2, NORM_EPSILON, ROPE_THETA, attention_window
from .batches import SplitBatch
from .cells import Plan
from .forwards import FULL, WINDOWED, Memory, Sights
from .kernels import kernel
from .kernels.attention import remember_and_attend
from .kernels.causal_convolution import causal_convolution
from .kernels.dense import add_rows, embed, gated_linear_unit, linear, multiply_rows, rms_norm, rotary_table, rotate, write_wanted_rows
from .kernels.rows import zero_rows
from .memory import aligned
from .stacking import places, stacked, stacked_matrices, stacked_norms

_EPSILON = np.float32(NORM_EPSILON)


class Lfm2Weights(NamedTuple):
    """Weights as the forward uses them; matrices [in, out]. Convolution and attention layers are stacked apart. All float32 but place and sight."""

    place: np.ndarray  # int64 [layers], index among the convolution layers, or -1 - index among the attention layers
    sight: int  # FULL or WINDOWED: what the attention layers see, all of them the same
    embedding: np.ndarray  # [n_vocab, n_embd]
    operator_norm: np.ndarray  # [layers, 1, n_embd]
    before_projection: np.ndarray  # [convolution layers, n_embd, n_embd]
    after_projection: np.ndarray  # [convolution layers, n_embd, n_embd]
    value_projection: np.ndarray  # [convolution layers, n_embd, n_embd]
    taps: np.ndarray  # [convolution layers, l_cache, n_embd]
    no_bias: np.ndarray  # [n_embd], zero
    q_projection: np.ndarray  # [attention layers, n_embd, n_embd]
    k_projection: np.ndarray  # [attention layers, n_embd, n_embd_kv]
    v_projection: np.ndarray  # [attention layers, n_embd, n_embd_kv]
    q_norm: np.ndarray  # [attention layers, 1, head_dim]
    k_norm: np.ndarray  # [attention layers, 1, head_dim]
    out_projection: np.ndarray  # [layers, n_embd, n_embd]
    ffn_norm: np.ndarray  # [layers, 1, n_embd]
    ffn_gate: np.ndarray  # [layers, n_embd, n_ff]
    ffn_up: np.ndarray  # [layers, n_embd, n_ff]
    ffn_down: np.ndarray  # [layers, n_ff, n_embd]
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab]


def prepare(dimensions: Dimensions, weights: Weights) -> Lfm2Weights:
    """Lay the family's weights out for `forward`."""
    every = tuple(range(dimensions["n_layer"]))
    convolution, attention = LFM2.recurrent_layers(dimensions), LFM2.attention_layers(dimensions)
    n_embd, head_dim = dimensions["n_embd"], head_size(dimensions)
    n_embd_kv = head_dim * dimensions["n_head_kv"]

    projection = stacked(weights, "in_projection", convolution, 3 * n_embd, n_embd).transpose(0, 2, 1)
    return Lfm2Weights(
        place=places(dimensions["n_layer"], convolution, attention),
        sight=WINDOWED if attention_window(dimensions) else FULL,
        embedding=aligned(weights["token_embedding"]),
        operator_norm=stacked_norms(weights, "operator_norm", every, n_embd),
        before_projection=aligned(projection[:, :, :n_embd]),
        after_projection=aligned(projection[:, :, n_embd : 2 * n_embd]),
        value_projection=aligned(projection[:, :, 2 * n_embd :]),
        taps=stacked_matrices(weights, "convolution", convolution, n_embd, dimensions["l_cache"]),
        no_bias=aligned(np.zeros(n_embd, np.float32)),
        q_projection=stacked_matrices(weights, "q_projection", attention, n_embd, n_embd),
        k_projection=stacked_matrices(weights, "k_projection", attention, n_embd_kv, n_embd),
        v_projection=stacked_matrices(weights, "v_projection", attention, n_embd_kv, n_embd),
        q_norm=stacked_norms(weights, "q_norm", attention, head_dim),
        k_norm=stacked_norms(weights, "k_norm", attention, head_dim),
        out_projection=stacked_matrices(weights, "out_projection", every, n_embd, n_embd),
        ffn_norm=stacked_norms(weights, "ffn_norm", every, n_embd),
        ffn_gate=stacked_matrices(weights, "ffn_gate", every, dimensions["n_ff"], n_embd),
        ffn_up=stacked_matrices(weights, "ffn_up", every, dimensions["n_ff"], n_embd),
        ffn_down=stacked_matrices(weights, "ffn_down", every, n_embd, dimensions["n_ff"]),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["output"].T),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows and attention cells, and what attention sees."""
    window = attention_window(dimensions)
    return {
        "convolution_shape": (dimensions["l_cache"] - 1, dimensions["n_embd"]),
        "recurrent_shape": (0,),
        "key_heads": dimensions["n_head_kv"],
        "head_dim": head_size(dimensions),
        "rope_theta": ROPE_THETA,
        "window": window,
        "windowed_layers": LFM2.attention_layers(dimensions) if window else (),
    }


@kernel
def forward(
    weights: Lfm2Weights, memory: Memory, batch: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray
) -> None:
    """One ubatch through the model.

    weights, memory, batch, plan  Lfm2Weights, Memory, SplitBatch, Plan
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

    tokens = end - start
    n_embd = weights.embedding.shape[1]
    taps = weights.taps.shape[1]
    n_ff = weights.ffn_down.shape[1]
    keys, values, sight = memory.keys[weights.sight], memory.values[weights.sight], sights[weights.sight]
    key_heads, head_dim = keys.shape[2], keys.shape[3]
    n_rows = memory.convolution_rows.shape[1]
    positions = batch.positions[start:end]

    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    inputs = np.empty((tokens, n_embd), np.float32)
    mixed = np.empty((tokens, n_embd), np.float32)
    gate = np.empty((tokens, n_ff), np.float32)
    inner = np.empty((tokens, n_ff), np.float32)
    key = np.empty((tokens, key_heads * head_dim), np.float32)
    value = np.empty((tokens, key_heads * head_dim), np.float32)
    cosine = np.empty((tokens, head_dim // 2), np.float32)
    sine = np.empty((tokens, head_dim // 2), np.float32)

    if keys.shape[0] > 0:
        rotary_table(positions, head_dim // 2, ROPE_THETA, cosine, sine)

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(weights.place.size):
        rms_norm(stream, weights.operator_norm[layer], _EPSILON, normed)
        place = weights.place[layer]
        if place >= 0:
            linear(normed, weights.before_projection[place], inputs)
            linear(normed, weights.value_projection[place], mixed)
            multiply_rows(mixed, inputs)
            windows = memory.convolution_rows[place].reshape((n_rows, taps - 1, n_embd))
            causal_convolution(inputs, weights.taps[place], weights.no_bias, windows, segment_start, source_row, plane_row, mixed)
            linear(normed, weights.after_projection[place], inputs)
            multiply_rows(inputs, mixed)
        else:
            place = -1 - place
            heads = n_embd // head_dim
            linear(normed, weights.q_projection[place], inputs)
            linear(normed, weights.k_projection[place], key)
            linear(normed, weights.v_projection[place], value)
            query_rows = inputs.reshape((tokens * heads, head_dim))
            key_rows = key.reshape((tokens * key_heads, head_dim))
            rms_norm(query_rows, weights.q_norm[place], _EPSILON, query_rows)
            rms_norm(key_rows, weights.k_norm[place], _EPSILON, key_rows)
            query_heads = inputs.reshape((tokens, heads, head_dim))
            new_keys = key.reshape((tokens, key_heads, head_dim))
            rotate(query_heads, cosine, sine)
            rotate(new_keys, cosine, sine)
            mixed_heads = mixed.reshape((tokens, heads, head_dim))
            new_values = value.reshape((tokens, key_heads, head_dim))
            remember_and_attend(query_heads, new_keys, new_values, keys[place], values[place], sight, start, mixed_heads)
        linear(mixed, weights.out_projection[layer], normed)
        add_rows(normed, stream)
        rms_norm(stream, weights.ffn_norm[layer], _EPSILON, normed)
        linear(normed, weights.ffn_gate[layer], gate)
        linear(normed, weights.ffn_up[layer], inner)
        gated_linear_unit(gate, inner)
        linear(inner, weights.ffn_down[layer], normed)
        add_rows(normed, stream)

    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
