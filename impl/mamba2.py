"""The incremental forward of mamba2.

Rules
- One call does one ubatch through all layers, reading each sequence's state from its source row and writing its snapshots.
- The in-projection is kept as three matrices (gate, convolution inputs, step), so that every part is contiguous.
Sources: Dao and Gu 2024 (arXiv:2405.21060); Transformers' Mamba2ForCausalLM for the order of the parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.mamba2 import NORM_EPSILON, convolution_channels
from .batches import SplitBatch
from .cells import Plan
from .forwards import Memory
from .kernels import kernel
from .kernels.arithmetic import silu, softplus
from .kernels.causal_convolution import causal_convolution
from .kernels.dense import add_rows, embed, gated_linear_unit, linear, rms_norm
from .kernels.mamba2_scan import mamba2_scan
from .kernels.rows import zero_rows
from .memory import aligned

_EPSILON = np.float32(NORM_EPSILON)


class Mamba2Weights(NamedTuple):
    """Weights as the forward uses them, stacked over layers; matrices [in, out]. All float32."""

    embedding: np.ndarray  # [n_vocab, n_embd]
    norm: np.ndarray  # [layers, 1, n_embd]
    gate_projection: np.ndarray  # [layers, n_embd, d_inner]
    convolution_projection: np.ndarray  # [layers, n_embd, channels]
    step_projection: np.ndarray  # [layers, n_embd, heads]
    taps: np.ndarray  # [layers, d_conv, channels]
    taps_bias: np.ndarray  # [layers, channels]
    step_bias: np.ndarray  # [layers, heads]
    a: np.ndarray  # [layers, heads], negative
    d: np.ndarray  # [layers, heads]
    gated_norm: np.ndarray  # [layers, groups, d_inner / groups]
    out_projection: np.ndarray  # [layers, d_inner, n_embd]
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab]
    groups: int
    d_state: int


def prepare(dimensions: Dimensions, weights: Weights) -> Mamba2Weights:
    """Lay the family's weights out for `forward`."""
    layers = range(dimensions["n_layer"])
    d_inner, channels = dimensions["d_inner"], convolution_channels(dimensions)

    def stacked(name: str) -> np.ndarray:
        return np.stack([weights[f"layers.{layer}.{name}"] for layer in layers])

    projection = stacked("in_projection").transpose(0, 2, 1)
    return Mamba2Weights(
        embedding=aligned(weights["token_embedding"]),
        norm=aligned(stacked("norm")[:, None, :]),
        gate_projection=aligned(projection[:, :, :d_inner]),
        convolution_projection=aligned(projection[:, :, d_inner : d_inner + channels]),
        step_projection=aligned(projection[:, :, d_inner + channels :]),
        taps=aligned(stacked("convolution").transpose(0, 2, 1)),
        taps_bias=aligned(stacked("convolution_bias")),
        step_bias=aligned(stacked("dt_bias")),
        a=aligned(-np.exp(stacked("a_log").astype(np.float64))),
        d=aligned(stacked("d")),
        gated_norm=aligned(stacked("gated_norm").reshape(len(layers), dimensions["n_group"], -1)),
        out_projection=aligned(stacked("out_projection").transpose(0, 2, 1)),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["output"].T),
        groups=dimensions["n_group"],
        d_state=dimensions["d_state"],
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows."""
    return {
        "convolution_shape": (dimensions["d_conv"] - 1, convolution_channels(dimensions)),
        "recurrent_shape": (dimensions["n_head"], dimensions["d_state"], dimensions["d_inner"] // dimensions["n_head"]),
        "key_heads": 0,
        "head_dim": 0,
        "rope_theta": 0.0,
    }


@kernel
def _activate(convolved: np.ndarray, value: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Split the convolution's output into value, B and C, with SiLU; float32 [tokens, channels] each, the last three written."""
    d_inner, width = value.shape[1], b.shape[1]
    for token in range(convolved.shape[0]):
        source = convolved[token]
        own_value, own_b, own_c = value[token], b[token], c[token]
        x_part, b_part, c_part = source[:d_inner], source[d_inner : d_inner + width], source[d_inner + width :]
        for i in range(d_inner):
            own_value[i] = silu(x_part[i])
        for i in range(width):
            own_b[i] = silu(b_part[i])
            own_c[i] = silu(c_part[i])


@kernel
def _skip(value: np.ndarray, d: np.ndarray, y: np.ndarray) -> None:
    """y += d * value, a factor for every head; float32 [tokens, heads, head_dim]."""
    for token in range(y.shape[0]):
        for head in range(y.shape[1]):
            source, result = value[token, head], y[token, head]
            for p in range(result.size):
                result[p] = result[p] + d[head] * source[p]


@kernel
def forward(weights: Mamba2Weights, memory: Memory, batch: SplitBatch, plan: Plan, ubatch: int, hidden: bool, y: np.ndarray) -> None:
    """One ubatch through the model.

    weights, memory, batch, plan  Mamba2Weights, Memory, SplitBatch, Plan
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
    layers, taps, channels = weights.taps.shape
    n_embd = weights.embedding.shape[1]
    heads, d_inner, d_state, groups = weights.a.shape[1], weights.out_projection.shape[1], weights.d_state, weights.groups
    head_dim = d_inner // heads
    n_rows = memory.convolution_rows.shape[1]

    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    gate = np.empty((tokens, d_inner), np.float32)
    inputs = np.empty((tokens, channels), np.float32)
    convolved = np.empty((tokens, channels), np.float32)
    step = np.empty((tokens, heads), np.float32)
    value = np.empty((tokens, d_inner), np.float32)
    b = np.empty((tokens, groups * d_state), np.float32)
    c = np.empty((tokens, groups * d_state), np.float32)
    mixed = np.empty((tokens, d_inner), np.float32)

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(layers):
        rms_norm(stream, weights.norm[layer], _EPSILON, normed)
        linear(normed, weights.gate_projection[layer], gate)
        linear(normed, weights.convolution_projection[layer], inputs)
        linear(normed, weights.step_projection[layer], step)
        for token in range(tokens):
            for head in range(heads):
                step[token, head] = softplus(step[token, head] + weights.step_bias[layer, head])
        windows = memory.convolution_rows[layer].reshape((n_rows, taps - 1, channels))
        causal_convolution(inputs, weights.taps[layer], weights.taps_bias[layer], windows, segment_start, source_row, plane_row, convolved)
        _activate(convolved, value, b, c)
        value_heads = value.reshape((tokens, heads, head_dim))
        mixed_heads = mixed.reshape((tokens, heads, head_dim))
        mamba2_scan(
            value_heads,
            step,
            weights.a[layer],
            b.reshape((tokens, groups, d_state)),
            c.reshape((tokens, groups, d_state)),
            memory.recurrent_rows[layer].reshape((n_rows, heads, d_state, head_dim)),
            segment_start,
            source_row,
            plane_row,
            mixed_heads,
        )
        _skip(value_heads, weights.d[layer], mixed_heads)
        gated_linear_unit(gate, mixed)
        grouped = mixed.reshape((tokens * groups, d_inner // groups))
        rms_norm(grouped, weights.gated_norm[layer], _EPSILON, grouped)
        linear(mixed, weights.out_projection[layer], normed)
        add_rows(normed, stream)

    for token in range(tokens):
        row = batch.output_row[start + token]
        if row >= 0:
            if hidden:
                rms_norm(stream[token : token + 1], weights.output_norm, _EPSILON, y[row : row + 1])
            else:
                rms_norm(stream[token : token + 1], weights.output_norm, _EPSILON, normed[token : token + 1])
                linear(normed[token : token + 1], weights.output, y[row : row + 1])
