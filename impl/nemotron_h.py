"""The incremental forward of nemotron_h.

Rules
- One call does one ubatch through all layers. Keys and values of all its tokens are written before any of them attends; a token sees only
  positions up to its own, and nothing else of a position: keys are stored as they are, without rotation.
- A Mamba-2 layer is `mamba2_mixer.mix`, attention is `grouped_attention.attend`.
Sources: Transformers' NemotronHForCausalLM; llama.cpp's src/models/nemotron-h.cpp.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.mamba2 import mixer_dimensions
from ..spec.families.nemotron_h import ATTENTION, NEMOTRON_H, NORM_EPSILON, mlp_layers
from .batches import SplitBatch
from .cells import Plan
from .forwards import Memory, Sights
from .grouped_attention import AttentionWeights, attend, attention_room, attention_shapes, prepare_attention
from .kernels import kernel
from .kernels.dense import add_rows, embed, linear, rms_norm, squared_relu, write_wanted_rows
from .mamba2_mixer import MixerWeights, mix, mixer_room, mixer_shapes, prepare_mixer
from .memory import aligned
from .stacking import stacked_matrices, stacked_norms
from .ubatches import begin_ubatch

_EPSILON = np.float32(NORM_EPSILON)
_MIXER, _ATTENTION, _MLP = range(3)


class NemotronHWeights(NamedTuple):
    """Weights as the forward uses them; matrices [in, out]. Layers of a kind are stacked apart. All float32 but kind and place."""

    kind: np.ndarray  # int64 [layers], _MIXER, _ATTENTION or _MLP
    place: np.ndarray  # int64 [layers], index among the layers of its kind
    embedding: np.ndarray  # [n_vocab, n_embd]
    norm: np.ndarray  # [layers, 1, n_embd]
    mixer: MixerWeights
    attention: AttentionWeights
    attention_out: np.ndarray  # [attention layers, n_embd, n_embd]
    mlp_up: np.ndarray  # [MLP layers, n_embd, n_ff]
    mlp_down: np.ndarray  # [MLP layers, n_ff, n_embd]
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab]


def prepare(dimensions: Dimensions, weights: Weights) -> NemotronHWeights:
    """Lay the family's weights out for `forward`."""
    mixer, attention, mlp = NEMOTRON_H.recurrent_layers(dimensions), NEMOTRON_H.attention_layers(dimensions), mlp_layers(dimensions)
    n_embd, n_ff = dimensions["n_embd"], dimensions["n_ff"]
    kinds = {_MIXER: mixer, _ATTENTION: attention, _MLP: mlp}
    kind_and_place = {layer: (kind, place) for kind, layers in kinds.items() for place, layer in enumerate(layers)}
    kind, place = np.array([kind_and_place[layer] for layer in range(dimensions["n_layer"])], np.int64).T

    return NemotronHWeights(
        kind=kind.copy(),
        place=place.copy(),
        embedding=aligned(weights["token_embedding"]),
        norm=stacked_norms(weights, "norm", tuple(range(dimensions["n_layer"])), n_embd),
        mixer=prepare_mixer(mixer_dimensions(dimensions), weights, mixer),
        attention=prepare_attention(ATTENTION, dimensions, weights, attention),
        attention_out=stacked_matrices(weights, "out_projection", attention, n_embd, n_embd),
        mlp_up=stacked_matrices(weights, "mlp_up", mlp, n_ff, n_embd),
        mlp_down=stacked_matrices(weights, "mlp_down", mlp, n_embd, n_ff),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["output"].T),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows and attention cells."""
    return mixer_shapes(mixer_dimensions(dimensions)) | attention_shapes(ATTENTION, dimensions)


@kernel
def forward(
    weights: NemotronHWeights, memory: Memory, batch: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray
) -> None:
    """One ubatch through the model.

    weights, memory, batch, plan  NemotronHWeights, Memory, SplitBatch, Plan
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
    inner = np.empty((tokens, weights.mlp_up.shape[2]), np.float32)
    room, own_attention_room = mixer_room(weights.mixer, tokens), attention_room(weights.attention, batch.positions[start:end])

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(weights.kind.size):
        rms_norm(stream, weights.norm[layer], _EPSILON, normed)
        place = weights.place[layer]
        if weights.kind[layer] == _MIXER:
            mix(weights.mixer, place, memory, segment_start, source_row, plane_row, room, normed, normed)
        elif weights.kind[layer] == _ATTENTION:
            attend(weights.attention, place, memory, sights, start, own_attention_room, normed, mixed)
            linear(mixed, weights.attention_out[place], normed)
        else:
            linear(normed, weights.mlp_up[place], inner)
            squared_relu(inner)
            linear(inner, weights.mlp_down[place], normed)
        add_rows(normed, stream)
    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
