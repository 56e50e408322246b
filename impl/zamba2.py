"""The incremental forward of zamba2.

Rules
- One call does one ubatch through all layers. A use of a shared block is `shared_block.use_block`.
- A mixer is `mamba2_mixer.mix`; in a hybrid layer it reads the stream with the block's result added, which the stream does not keep.
Source: Transformers' Zamba2ForCausalLM.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.mamba2 import mixer_dimensions
from ..spec.families.zamba2 import NORM_EPSILON, hybrid_layers
from .batches import SplitBatch
from .cells import Plan
from .forwards import Memory, Sights
from .kernels import kernel
from .kernels.dense import add_rows, embed, rms_norm, write_wanted_rows
from .mamba2_mixer import MixerWeights, mix, mixer_room, mixer_shapes, prepare_mixer
from .memory import aligned
from .shared_block import BlockWeights, block_room, block_shapes, prepare_blocks, use_block
from .stacking import stacked_norms
from .ubatches import begin_ubatch

_EPSILON = np.float32(NORM_EPSILON)


class Zamba2Weights(NamedTuple):
    """Weights as the forward uses them; matrices [in, out]. All float32 but use."""

    use: np.ndarray  # int64 [layers], index among the hybrid layers, -1 for the others
    embedding: np.ndarray  # [n_vocab, n_embd]
    norm: np.ndarray  # [layers, 1, n_embd]
    mixer: MixerWeights
    blocks: BlockWeights
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab], the embedding again


def prepare(dimensions: Dimensions, weights: Weights) -> Zamba2Weights:
    """Lay the family's weights out for `forward`."""
    layers, hybrid = tuple(range(dimensions["n_layer"])), hybrid_layers(dimensions)
    return Zamba2Weights(
        use=np.array([hybrid.index(layer) if layer in hybrid else -1 for layer in layers], np.int64),
        embedding=aligned(weights["token_embedding"]),
        norm=stacked_norms(weights, "norm", layers, dimensions["n_embd"]),
        mixer=prepare_mixer(mixer_dimensions(dimensions), weights, layers),
        blocks=prepare_blocks(dimensions, weights),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["token_embedding"].T),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows and attention cells."""
    return mixer_shapes(mixer_dimensions(dimensions)) | block_shapes(dimensions)


@kernel
def forward(
    weights: Zamba2Weights, memory: Memory, batch: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray
) -> None:
    """One ubatch through the model.

    weights, memory, batch, plan  Zamba2Weights, Memory, SplitBatch, Plan
    sights                        of the attention layers without and with a window
    ubatch                        which of the batch's ubatches
    hidden                        True: the final norm's output instead of logits
    y                             float32 [wanted rows, n_vocab or n_embd], its rows of this ubatch written
    """
    start, end, segment_start, source_row, plane_row = begin_ubatch(memory, batch, plan, ubatch)
    tokens = end - start
    n_embd = weights.embedding.shape[1]
    embedded = np.empty((tokens, n_embd), np.float32)
    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    room, own_block_room = mixer_room(weights.mixer, tokens), block_room(weights.blocks, memory, batch.positions[start:end])

    embed(batch.tokens[start:end], weights.embedding, embedded)
    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(weights.use.size):
        use = weights.use[layer]
        if use >= 0:
            use_block(weights.blocks, use, memory, sights, start, own_block_room, stream, embedded, normed)
            add_rows(stream, normed)
            rms_norm(normed, weights.norm[layer], _EPSILON, normed)
        else:
            rms_norm(stream, weights.norm[layer], _EPSILON, normed)
        mix(weights.mixer, layer, memory, segment_start, source_row, plane_row, room, normed, normed)
        add_rows(normed, stream)
    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
