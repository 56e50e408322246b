"""The incremental forward of mamba.

Rules
- One call does one ubatch through all layers, reading each sequence's state from its source row and writing its snapshots.
- A layer is `mamba1_mixer.mix` between a norm and a residual.
Sources: Gu and Dao 2023 (arXiv:2312.00752); Transformers' MambaForCausalLM for the order of the parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.mamba import NORM_EPSILON
from .batches import SplitBatch
from .cells import Plan
from .forwards import Memory, Sights
from .kernels import kernel
from .kernels.dense import add_rows, embed, rms_norm, write_wanted_rows
from .mamba1_mixer import MixerWeights, mix, mixer_room, mixer_shapes, prepare_mixer
from .memory import aligned
from .ubatches import begin_ubatch

_EPSILON = np.float32(NORM_EPSILON)


class MambaWeights(NamedTuple):
    """Weights as the forward uses them, stacked over layers; matrices [in, out]. All float32."""

    embedding: np.ndarray  # [n_vocab, n_embd]
    norm: np.ndarray  # [layers, 1, n_embd]
    mixer: MixerWeights
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab]


def prepare(dimensions: Dimensions, weights: Weights) -> MambaWeights:
    """Lay the family's weights out for `forward`."""
    layers = tuple(range(dimensions["n_layer"]))
    return MambaWeights(
        embedding=aligned(weights["token_embedding"]),
        norm=aligned(np.stack([weights[f"layers.{layer}.norm"] for layer in layers])[:, None, :]),
        mixer=prepare_mixer(dimensions, weights, layers),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["output"].T),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows."""
    return mixer_shapes(dimensions) | {"key_heads": 0, "head_dim": 0, "rope_theta": 0.0}


@kernel
def forward(
    weights: MambaWeights, memory: Memory, batch: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray
) -> None:
    """One ubatch through the model.

    weights, memory, batch, plan  MambaWeights, Memory, SplitBatch, Plan
    sights                        of the attention layers without and with a window
    ubatch                        which of the batch's ubatches
    hidden                        True: the final norm's output instead of logits
    y                             float32 [wanted rows, n_vocab or n_embd], its rows of this ubatch written
    """
    start, end, segment_start, source_row, plane_row = begin_ubatch(memory, batch, plan, ubatch)
    tokens = end - start
    stream = np.empty((tokens, weights.embedding.shape[1]), np.float32)
    normed = np.empty((tokens, weights.embedding.shape[1]), np.float32)
    room = mixer_room(weights.mixer, tokens)

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(weights.norm.shape[0]):
        rms_norm(stream, weights.norm[layer], _EPSILON, normed)
        mix(weights.mixer, layer, memory, segment_start, source_row, plane_row, room, normed, normed)
        add_rows(normed, stream)
    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
