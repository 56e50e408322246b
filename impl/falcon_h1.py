"""The incremental forward of falcon_h1.

Rules
- One call does one ubatch through all layers. Keys and values of all its tokens are written before any of them attends; a token sees only
  positions up to its own.
- In a layer `mamba2_mixer.mix` and `grouped_attention.attend` read the same normed inputs, and their outputs are added.
Sources: Transformers' FalconH1ForCausalLM; llama.cpp's src/models/falcon-h1.cpp.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.falcon_h1 import ATTENTION, NORM_EPSILON
from ..spec.families.family import Dimensions, Weights
from ..spec.families.mamba2 import mixer_dimensions
from .batches import SplitBatch
from .cells import Plan
from .feed_forward import FeedForwardWeights, feed_forward, prepare_feed_forward
from .forwards import Memory, Sights
from .grouped_attention import AttentionWeights, attend, attention_room, attention_shapes, prepare_attention
from .kernels import kernel
from .kernels.dense import add_rows, embed, linear, rms_norm, write_wanted_rows
from .mamba2_mixer import MixerWeights, mix, mixer_room, mixer_shapes, prepare_mixer
from .memory import aligned
from .stacking import stacked_matrices, stacked_norms
from .ubatches import begin_ubatch

_EPSILON = np.float32(NORM_EPSILON)


class FalconH1Weights(NamedTuple):
    """Weights as the forward uses them, stacked over layers; matrices [in, out]. All float32."""

    embedding: np.ndarray  # [n_vocab, n_embd]
    norm: np.ndarray  # [layers, 1, n_embd]
    mixer: MixerWeights
    attention: AttentionWeights
    attention_out: np.ndarray  # [layers, n_embd, n_embd]
    ffn_norm: np.ndarray  # [layers, 1, n_embd]
    ffn: FeedForwardWeights
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab]


def prepare(dimensions: Dimensions, weights: Weights) -> FalconH1Weights:
    """Lay the family's weights out for `forward`."""
    layers = tuple(range(dimensions["n_layer"]))
    n_embd = dimensions["n_embd"]
    return FalconH1Weights(
        embedding=aligned(weights["token_embedding"]),
        norm=stacked_norms(weights, "norm", layers, n_embd),
        mixer=prepare_mixer(mixer_dimensions(dimensions), weights, layers),
        attention=prepare_attention(ATTENTION, dimensions, weights, layers),
        attention_out=stacked_matrices(weights, "attention_out", layers, n_embd, n_embd),
        ffn_norm=stacked_norms(weights, "ffn_norm", layers, n_embd),
        ffn=prepare_feed_forward(dimensions, weights, layers),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["output"].T),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows and attention cells."""
    return mixer_shapes(mixer_dimensions(dimensions)) | attention_shapes(ATTENTION, dimensions)


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
    start, end, segment_start, source_row, plane_row = begin_ubatch(memory, batch, plan, ubatch)
    tokens = end - start
    n_embd = weights.embedding.shape[1]
    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    attended = np.empty((tokens, n_embd), np.float32)
    part = np.empty((tokens, n_embd), np.float32)
    room, own_attention_room = mixer_room(weights.mixer, tokens), attention_room(weights.attention, batch.positions[start:end])

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(weights.norm.shape[0]):
        rms_norm(stream, weights.norm[layer], _EPSILON, normed)
        attend(weights.attention, layer, memory, sights, start, own_attention_room, normed, attended)
        mix(weights.mixer, layer, memory, segment_start, source_row, plane_row, room, normed, normed)
        linear(attended, weights.attention_out[layer], part)
        add_rows(part, normed)
        add_rows(normed, stream)
        rms_norm(stream, weights.ffn_norm[layer], _EPSILON, normed)
        feed_forward(weights.ffn, layer, normed, normed)
        add_rows(normed, stream)
    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
