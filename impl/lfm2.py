"""The incremental forward of lfm2, and of lfm2_swa, whose attention layers have a window.

Rules
- One call does one ubatch through all layers. Keys and values of all its tokens are written before any of them attends; a token sees only
  positions up to its own.
- The short convolution's in-projection is kept as three matrices, so that every part is contiguous.
Sources: Transformers' Lfm2ForCausalLM; llama.cpp's src/models/lfm2.cpp.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.lfm2 import ATTENTION, LFM2, NORM_EPSILON, attention_window
from .batches import SplitBatch
from .cells import Plan
from .feed_forward import FeedForwardWeights, feed_forward, prepare_feed_forward
from .forwards import Memory, Sights
from .grouped_attention import AttentionWeights, attend, attention_room, attention_shapes, prepare_attention
from .kernels import kernel
from .kernels.causal_convolution import causal_convolution
from .kernels.dense import add_rows, embed, linear, multiply_rows, rms_norm, write_wanted_rows
from .memory import aligned
from .stacking import places, stacked, stacked_matrices, stacked_norms
from .ubatches import begin_ubatch

_EPSILON = np.float32(NORM_EPSILON)


class Lfm2Weights(NamedTuple):
    """Weights as the forward uses them; matrices [in, out]. Convolution and attention layers are stacked apart. All float32 but place."""

    place: np.ndarray  # int64 [layers], index among the convolution layers, or -1 - index among the attention layers
    embedding: np.ndarray  # [n_vocab, n_embd]
    operator_norm: np.ndarray  # [layers, 1, n_embd]
    before_projection: np.ndarray  # [convolution layers, n_embd, n_embd]
    after_projection: np.ndarray  # [convolution layers, n_embd, n_embd]
    value_projection: np.ndarray  # [convolution layers, n_embd, n_embd]
    taps: np.ndarray  # [convolution layers, l_cache, n_embd]
    no_bias: np.ndarray  # [n_embd], zero
    attention: AttentionWeights
    out_projection: np.ndarray  # [layers, n_embd, n_embd]
    ffn_norm: np.ndarray  # [layers, 1, n_embd]
    ffn: FeedForwardWeights
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab]


def prepare(dimensions: Dimensions, weights: Weights) -> Lfm2Weights:
    """Lay the family's weights out for `forward`."""
    every = tuple(range(dimensions["n_layer"]))
    convolution, attention = LFM2.recurrent_layers(dimensions), LFM2.attention_layers(dimensions)
    n_embd = dimensions["n_embd"]
    projection = stacked(weights, "in_projection", convolution, 3 * n_embd, n_embd).transpose(0, 2, 1)
    return Lfm2Weights(
        place=places(dimensions["n_layer"], convolution, attention),
        embedding=aligned(weights["token_embedding"]),
        operator_norm=stacked_norms(weights, "operator_norm", every, n_embd),
        before_projection=aligned(projection[:, :, :n_embd]),
        after_projection=aligned(projection[:, :, n_embd : 2 * n_embd]),
        value_projection=aligned(projection[:, :, 2 * n_embd :]),
        taps=stacked_matrices(weights, "convolution", convolution, n_embd, dimensions["l_cache"]),
        no_bias=aligned(np.zeros(n_embd, np.float32)),
        attention=prepare_attention(ATTENTION, dimensions, weights, attention),
        out_projection=stacked_matrices(weights, "out_projection", every, n_embd, n_embd),
        ffn_norm=stacked_norms(weights, "ffn_norm", every, n_embd),
        ffn=prepare_feed_forward(dimensions, weights, every),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["output"].T),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows and attention cells, and what attention sees."""
    window = attention_window(dimensions)
    return {
        "convolution_shape": (dimensions["l_cache"] - 1, dimensions["n_embd"]),
        "recurrent_shape": (0,),
        "window": window,
        "windowed_layers": LFM2.attention_layers(dimensions) if window else (),
    } | attention_shapes(ATTENTION, dimensions)


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
    start, end, segment_start, source_row, plane_row = begin_ubatch(memory, batch, plan, ubatch)
    tokens = end - start
    n_embd, taps = weights.embedding.shape[1], weights.taps.shape[1]
    n_rows = memory.convolution_rows.shape[1]
    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    inputs = np.empty((tokens, n_embd), np.float32)
    mixed = np.empty((tokens, n_embd), np.float32)
    room = attention_room(weights.attention, batch.positions[start:end])

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
            attend(weights.attention, -1 - place, memory, sights, start, room, normed, mixed)
        linear(mixed, weights.out_projection[layer], normed)
        add_rows(normed, stream)
        rms_norm(stream, weights.ffn_norm[layer], _EPSILON, normed)
        feed_forward(weights.ffn, layer, normed, normed)
        add_rows(normed, stream)

    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
