"""The incremental forward of rwkv7.

Rules
- A layer is `rwkv7_mixer.mix_time` and `rwkv.mix_channels`; the values of layer 0 are kept through a call.
Sources: Peng et al. 2025 (arXiv:2503.14456); the `rwkv` package's RWKV_x070 class for the order of the parts.
"""

from typing import NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from .batches import SplitBatch
from .cells import Plan
from .forwards import Memory, Sights
from .kernels import kernel
from .kernels.dense import add_rows, embed, write_wanted_layer_norm_rows
from .memory import aligned
from .rwkv import EPSILON, ChannelMixWeights, Norm, mix_channels, normed_embedding, output_norm, prepare_channel_mix, shapes
from .rwkv7_mixer import TimeMixWeights, mix_time, prepare_time_mix
from .ubatches import begin_ubatch

__all__ = ["forward", "prepare", "shapes"]


class Rwkv7Weights(NamedTuple):
    """Weights as the forward uses them, stacked over layers; matrices [in, out]. All float32."""

    embedding: np.ndarray  # [n_vocab, n_embd], after its norm
    time_mix: TimeMixWeights
    channel_mix: ChannelMixWeights
    output_norm: Norm
    output: np.ndarray  # [n_embd, n_vocab]


def prepare(dimensions: Dimensions, weights: Weights) -> Rwkv7Weights:
    """Lay the family's weights out for `forward`."""
    return Rwkv7Weights(
        embedding=normed_embedding(weights),
        time_mix=prepare_time_mix(dimensions, weights),
        channel_mix=prepare_channel_mix(dimensions, weights),
        output_norm=output_norm(weights),
        output=aligned(weights["output"].T),
    )


@kernel
def forward(
    weights: Rwkv7Weights, memory: Memory, batch: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray
) -> None:
    """One ubatch through the model.

    weights, memory, batch, plan  Rwkv7Weights, Memory, SplitBatch, Plan
    sights                        of the attention layers without and with a window
    ubatch                        which of the batch's ubatches
    hidden                        True: the final norm's output instead of logits
    y                             float32 [wanted rows, n_vocab or n_embd], its rows of this ubatch written
    """
    start, end, segment_start, source_row, plane_row = begin_ubatch(memory, batch, plan, ubatch)
    tokens = end - start
    n_embd, n_rows = weights.embedding.shape[1], memory.convolution_rows.shape[1]
    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    before = np.empty((tokens, n_embd), np.float32)
    mixed = np.empty((tokens, n_embd), np.float32)
    first_value = np.empty((tokens, n_embd), np.float32)

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(memory.recurrent_rows.shape[0]):
        mix_time(weights.time_mix, layer, memory, segment_start, source_row, plane_row, stream, first_value, normed)
        add_rows(normed, stream)

        shifts = memory.convolution_rows[layer].reshape((n_rows, 2, n_embd))
        mix_channels(weights.channel_mix, layer, shifts, segment_start, source_row, plane_row, stream, normed, before, mixed)
        add_rows(mixed, stream)
    norm = weights.output_norm
    write_wanted_layer_norm_rows(stream, batch.output_row[start:end], norm.weight, norm.bias, EPSILON, weights.output, hidden, y)
