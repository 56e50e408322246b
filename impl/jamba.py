"""The incremental forward of jamba.

Rules
- One call does one ubatch through all layers. Keys and values of all its tokens are written before any of them attends; a token sees only
  positions up to its own, and nothing else of a position: keys are stored as they are, without rotation.
- A Mamba-1 layer is `mamba1_mixer.mix`, attention is `grouped_attention.attend`.
Sources: Lieber et al. 2024 (arXiv:2403.19887); Transformers' JambaForCausalLM for the order of the parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.jamba import ATTENTION, JAMBA
from ..spec.families.mamba import NORM_EPSILON
from .batches import SplitBatch
from .cells import Plan
from .feed_forward import FeedForwardWeights, feed_forward, prepare_feed_forward
from .forwards import Memory, Sights
from .grouped_attention import AttentionWeights, attend, attention_room, attention_shapes, prepare_attention
from .kernels import kernel
from .kernels.dense import add_rows, embed, linear, rms_norm, write_wanted_rows
from .mamba1_mixer import MixerWeights, mix, mixer_room, mixer_shapes, prepare_mixer
from .memory import aligned
from .stacking import places, stacked_matrices, stacked_norms
from .ubatches import begin_ubatch

_EPSILON = np.float32(NORM_EPSILON)


class JambaWeights(NamedTuple):
    """Weights as the forward uses them; matrices [in, out]. Mamba-1 and attention layers are stacked apart. All float32 but place."""

    place: np.ndarray  # int64 [layers], index among the Mamba-1 layers, or -1 - index among the attention layers
    embedding: np.ndarray  # [n_vocab, n_embd]
    input_norm: np.ndarray  # [layers, 1, n_embd]
    mixer: MixerWeights
    attention: AttentionWeights
    attention_out: np.ndarray  # [attention layers, n_embd, n_embd]
    ffn_norm: np.ndarray  # [layers, 1, n_embd]
    ffn: FeedForwardWeights
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab]


def prepare(dimensions: Dimensions, weights: Weights) -> JambaWeights:
    """Lay the family's weights out for `forward`."""
    every = tuple(range(dimensions["n_layer"]))
    recurrent, attention = JAMBA.recurrent_layers(dimensions), JAMBA.attention_layers(dimensions)
    n_embd = dimensions["n_embd"]
    return JambaWeights(
        place=places(dimensions["n_layer"], recurrent, attention),
        embedding=aligned(weights["token_embedding"]),
        input_norm=stacked_norms(weights, "input_norm", every, n_embd),
        mixer=prepare_mixer(dimensions, weights, recurrent),
        attention=prepare_attention(ATTENTION, dimensions, weights, attention),
        attention_out=stacked_matrices(weights, "attention_out_projection", attention, n_embd, n_embd),
        ffn_norm=stacked_norms(weights, "ffn_norm", every, n_embd),
        ffn=prepare_feed_forward(dimensions, weights, every),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["output"].T),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows and attention cells."""
    return mixer_shapes(dimensions) | attention_shapes(ATTENTION, dimensions)


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
    start, end, segment_start, source_row, plane_row = begin_ubatch(memory, batch, plan, ubatch)
    tokens = end - start
    n_embd = weights.embedding.shape[1]
    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    mixed = np.empty((tokens, n_embd), np.float32)
    room, own_attention_room = mixer_room(weights.mixer, tokens), attention_room(weights.attention, batch.positions[start:end])

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(weights.place.size):
        rms_norm(stream, weights.input_norm[layer], _EPSILON, normed)
        place = weights.place[layer]
        if place >= 0:
            mix(weights.mixer, place, memory, segment_start, source_row, plane_row, room, normed, normed)
        else:
            attend(weights.attention, -1 - place, memory, sights, start, own_attention_room, normed, mixed)
            linear(mixed, weights.attention_out[-1 - place], normed)
        add_rows(normed, stream)
        rms_norm(stream, weights.ffn_norm[layer], _EPSILON, normed)
        feed_forward(weights.ffn, layer, normed, normed)
        add_rows(normed, stream)
    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
