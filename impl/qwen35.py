"""The incremental forward of qwen35.

Rules
- One call does one ubatch through all layers, reading each sequence's state from its source row and writing its snapshots. Keys and values
  of all its tokens are written before any of them attends; a token sees only positions up to its own.
- The projection of queries and their gates is kept as two matrices, so that every part is contiguous; that to q, k and v of a delta net
  stays one, since the convolution takes it whole.
Sources: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464); Transformers' Qwen3_5ForCausalLM for the order of the parts.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.qwen35 import NORM_EPSILON, QWEN35, ROPE_THETA, convolution_channels, inner_channels
from .batches import SplitBatch
from .cells import Plan
from .forwards import FULL, Memory, Sights
from .kernels import kernel
from .kernels.arithmetic import sigmoid, silu, softplus
from .kernels.attention import remember_and_attend
from .kernels.causal_convolution import causal_convolution
from .kernels.dense import (
    add_rows,
    embed,
    gate_by_sigmoid,
    gated_linear_unit,
    linear,
    rms_norm,
    rotary_table,
    rotate,
    sum_of_products,
    write_wanted_rows,
)
from .kernels.gated_delta_net import gated_delta_net
from .kernels.rows import zero_rows
from .memory import aligned

_EPSILON = np.float32(NORM_EPSILON)
_ONE = np.float32(1)


class Qwen35Weights(NamedTuple):
    """Weights as the forward uses them; matrices [in, out]. Delta-net and attention layers are stacked apart. All float32 but place."""

    place: np.ndarray  # int64 [layers], index among the delta-net layers, or -1 - index among the attention layers
    embedding: np.ndarray  # [n_vocab, n_embd]
    input_norm: np.ndarray  # [layers, 1, n_embd]
    qkv_projection: np.ndarray  # [delta-net layers, n_embd, channels]
    gate_projection: np.ndarray  # [delta-net layers, n_embd, d_inner]
    beta_projection: np.ndarray  # [delta-net layers, n_embd, value heads]
    step_projection: np.ndarray  # [delta-net layers, n_embd, value heads]
    taps: np.ndarray  # [delta-net layers, d_conv, channels]
    no_bias: np.ndarray  # [channels], zero
    step_bias: np.ndarray  # [delta-net layers, value heads]
    a: np.ndarray  # [delta-net layers, value heads], negative
    gated_norm: np.ndarray  # [delta-net layers, 1, d_state]
    delta_out_projection: np.ndarray  # [delta-net layers, d_inner, n_embd]
    q_projection: np.ndarray  # [attention layers, n_embd, heads * head_dim]
    q_gate_projection: np.ndarray  # [attention layers, n_embd, heads * head_dim]
    k_projection: np.ndarray  # [attention layers, n_embd, key heads * head_dim]
    v_projection: np.ndarray  # [attention layers, n_embd, key heads * head_dim]
    q_norm: np.ndarray  # [attention layers, 1, head_dim]
    k_norm: np.ndarray  # [attention layers, 1, head_dim]
    attention_out_projection: np.ndarray  # [attention layers, heads * head_dim, n_embd]
    ffn_norm: np.ndarray  # [layers, 1, n_embd]
    ffn_gate: np.ndarray  # [layers, n_embd, n_ff]
    ffn_up: np.ndarray  # [layers, n_embd, n_ff]
    ffn_down: np.ndarray  # [layers, n_ff, n_embd]
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab]
    groups: int
    rotated_channels: int


def prepare(dimensions: Dimensions, weights: Weights) -> Qwen35Weights:
    """Lay the family's weights out for `forward`."""
    every = tuple(range(dimensions["n_layer"]))
    recurrent, attention = QWEN35.recurrent_layers(dimensions), QWEN35.attention_layers(dimensions)
    n_embd, n_ff, n_value_head, head_dim = (dimensions[name] for name in ("n_embd", "n_ff", "n_value_head", "head_dim"))
    channels, d_inner = convolution_channels(dimensions), inner_channels(dimensions)
    n_embd_q, n_embd_kv = dimensions["n_head"] * head_dim, dimensions["n_head_kv"] * head_dim

    def stacked(name: str, layers: tuple[int, ...], *shape: int) -> np.ndarray:
        arrays = [weights[f"layers.{layer}.{name}"] for layer in layers]
        return np.stack(arrays) if arrays else np.zeros((0, *shape), np.float32)

    def matrices(name: str, layers: tuple[int, ...], n_out: int, n_in: int) -> np.ndarray:
        return aligned(stacked(name, layers, n_out, n_in).transpose(0, 2, 1))

    def norms(name: str, layers: tuple[int, ...], size: int) -> np.ndarray:
        return aligned(stacked(name, layers, size)[:, None, :])

    # Every head's query stands before its gate: [layers, heads, 2, head_dim, n_embd].
    query_and_gate = stacked("q_projection", attention, 2 * n_embd_q, n_embd).reshape(
        len(attention), dimensions["n_head"], 2, head_dim, n_embd
    )
    query, query_gate = (query_and_gate[:, :, part].reshape(len(attention), n_embd_q, n_embd).transpose(0, 2, 1) for part in (0, 1))
    place = [recurrent.index(layer) if layer in recurrent else -1 - attention.index(layer) for layer in every]
    return Qwen35Weights(
        place=np.array(place, np.int64),
        embedding=aligned(weights["token_embedding"]),
        input_norm=norms("input_norm", every, n_embd),
        qkv_projection=matrices("qkv_projection", recurrent, channels, n_embd),
        gate_projection=matrices("gate_projection", recurrent, d_inner, n_embd),
        beta_projection=matrices("beta_projection", recurrent, n_value_head, n_embd),
        step_projection=matrices("step_projection", recurrent, n_value_head, n_embd),
        taps=matrices("convolution", recurrent, channels, dimensions["d_conv"]),
        no_bias=aligned(np.zeros(channels, np.float32)),
        step_bias=aligned(stacked("dt_bias", recurrent, n_value_head)),
        a=aligned(-np.exp(stacked("a_log", recurrent, n_value_head).astype(np.float64))),
        gated_norm=norms("gated_norm", recurrent, dimensions["d_state"]),
        delta_out_projection=matrices("out_projection", recurrent, n_embd, d_inner),
        q_projection=aligned(query),
        q_gate_projection=aligned(query_gate),
        k_projection=matrices("k_projection", attention, n_embd_kv, n_embd),
        v_projection=matrices("v_projection", attention, n_embd_kv, n_embd),
        q_norm=norms("q_norm", attention, head_dim),
        k_norm=norms("k_norm", attention, head_dim),
        attention_out_projection=matrices("out_projection", attention, n_embd, n_embd_q),
        ffn_norm=norms("ffn_norm", every, n_embd),
        ffn_gate=matrices("ffn_gate", every, n_ff, n_embd),
        ffn_up=matrices("ffn_up", every, n_ff, n_embd),
        ffn_down=matrices("ffn_down", every, n_embd, n_ff),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["output"].T),
        groups=dimensions["n_group"],
        rotated_channels=dimensions["n_rot"],
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows and attention cells."""
    return {
        "convolution_shape": (dimensions["d_conv"] - 1, convolution_channels(dimensions)),
        "recurrent_shape": (dimensions["n_value_head"], dimensions["d_state"], dimensions["d_state"]),
        "key_heads": dimensions["n_head_kv"],
        "head_dim": dimensions["head_dim"],
        "rope_theta": ROPE_THETA,
        "rotated_channels": dimensions["n_rot"],
    }


@kernel
def _activate(convolved: np.ndarray, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    """Split the convolution's output into q, k and v, with SiLU; float32 [tokens, channels] each, the last three written."""
    width, d_inner = query.shape[1], value.shape[1]
    for token in range(convolved.shape[0]):
        source = convolved[token]
        own_query, own_key, own_value = query[token], key[token], value[token]
        q_part, k_part, v_part = source[:width], source[width : 2 * width], source[2 * width :]
        for i in range(width):
            own_query[i] = silu(q_part[i])
            own_key[i] = silu(k_part[i])
        for i in range(d_inner):
            own_value[i] = silu(v_part[i])


@kernel
def _to_length(x: np.ndarray, length: np.float32) -> None:
    """x = length * x / sqrt(sum(x^2) + epsilon) in place, over whole rows; float32 [rows, channels]."""
    for row in range(x.shape[0]):
        source = x[row]
        scale = length / np.float32(math.sqrt(sum_of_products(source, source) + _EPSILON))
        for i in range(source.size):
            source[i] = source[i] * scale


@kernel
def _rates(step: np.ndarray, step_bias: np.ndarray, a: np.ndarray, beta: np.ndarray) -> None:
    """step = a * softplus(step + step_bias), the logarithm of the decay; beta = sigmoid(beta). In place, float32 [tokens, value heads]."""
    for token in range(step.shape[0]):
        for head in range(step.shape[1]):
            step[token, head] = a[head] * softplus(step[token, head] + step_bias[head])
            beta[token, head] = sigmoid(beta[token, head])


@kernel
def forward(
    weights: Qwen35Weights, memory: Memory, batch: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray
) -> None:
    """One ubatch through the model.

    weights, memory, batch, plan  Qwen35Weights, Memory, SplitBatch, Plan
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
    n_embd, n_ff = weights.embedding.shape[1], weights.ffn_down.shape[1]
    taps, channels = weights.taps.shape[1], weights.taps.shape[2]
    value_heads, d_state, groups = weights.a.shape[1], weights.gated_norm.shape[2], weights.groups
    n_embd_q, key_heads, head_dim = weights.q_projection.shape[2], memory.keys[FULL].shape[2], memory.keys[FULL].shape[3]
    half = weights.rotated_channels // 2
    n_rows = memory.convolution_rows.shape[1]
    positions = batch.positions[start:end]

    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    inputs = np.empty((tokens, channels), np.float32)
    convolved = np.empty((tokens, channels), np.float32)
    step = np.empty((tokens, value_heads), np.float32)
    beta = np.empty((tokens, value_heads), np.float32)
    delta_query = np.empty((tokens, groups * d_state), np.float32)
    delta_key = np.empty((tokens, groups * d_state), np.float32)
    delta_value = np.empty((tokens, value_heads * d_state), np.float32)
    delta_gate = np.empty((tokens, value_heads * d_state), np.float32)
    delta_mixed = np.empty((tokens, value_heads * d_state), np.float32)
    query = np.empty((tokens, n_embd_q), np.float32)
    query_gate = np.empty((tokens, n_embd_q), np.float32)
    key = np.empty((tokens, key_heads * head_dim), np.float32)
    value = np.empty((tokens, key_heads * head_dim), np.float32)
    mixed = np.empty((tokens, n_embd_q), np.float32)
    cosine = np.empty((tokens, half), np.float32)
    sine = np.empty((tokens, half), np.float32)
    inner = np.empty((tokens, n_ff), np.float32)
    inner_gate = np.empty((tokens, n_ff), np.float32)

    if memory.keys[FULL].shape[0] > 0:
        rotary_table(positions, half, ROPE_THETA, cosine, sine)

    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(weights.place.size):
        rms_norm(stream, weights.input_norm[layer], _EPSILON, normed)
        place = weights.place[layer]
        if place >= 0:
            linear(normed, weights.qkv_projection[place], inputs)
            linear(normed, weights.gate_projection[place], delta_gate)
            linear(normed, weights.step_projection[place], step)
            linear(normed, weights.beta_projection[place], beta)
            _rates(step, weights.step_bias[place], weights.a[place], beta)
            windows = memory.convolution_rows[place].reshape((n_rows, taps - 1, channels))
            causal_convolution(inputs, weights.taps[place], weights.no_bias, windows, segment_start, source_row, plane_row, convolved)
            _activate(convolved, delta_query, delta_key, delta_value)
            _to_length(delta_query.reshape((tokens * groups, d_state)), _ONE / np.float32(math.sqrt(np.float32(d_state))))
            _to_length(delta_key.reshape((tokens * groups, d_state)), _ONE)
            gated_delta_net(
                delta_query.reshape((tokens, groups, d_state)),
                delta_key.reshape((tokens, groups, d_state)),
                delta_value.reshape((tokens, value_heads, d_state)),
                step,
                beta,
                memory.recurrent_rows[place].reshape((n_rows, value_heads, d_state, d_state)),
                segment_start,
                source_row,
                plane_row,
                delta_mixed.reshape((tokens, value_heads, d_state)),
            )
            heads_apart = delta_mixed.reshape((tokens * value_heads, d_state))
            rms_norm(heads_apart, weights.gated_norm[place], _EPSILON, heads_apart)
            gated_linear_unit(delta_gate, delta_mixed)
            linear(delta_mixed, weights.delta_out_projection[place], normed)
        else:
            place = -1 - place
            heads = n_embd_q // head_dim
            linear(normed, weights.q_projection[place], query)
            linear(normed, weights.q_gate_projection[place], query_gate)
            linear(normed, weights.k_projection[place], key)
            linear(normed, weights.v_projection[place], value)
            query_rows = query.reshape((tokens * heads, head_dim))
            key_rows = key.reshape((tokens * key_heads, head_dim))
            rms_norm(query_rows, weights.q_norm[place], _EPSILON, query_rows)
            rms_norm(key_rows, weights.k_norm[place], _EPSILON, key_rows)
            query_heads = query.reshape((tokens, heads, head_dim))
            new_keys = key.reshape((tokens, key_heads, head_dim))
            rotate(query_heads, cosine, sine)
            rotate(new_keys, cosine, sine)
            mixed_heads = mixed.reshape((tokens, heads, head_dim))
            new_values = value.reshape((tokens, key_heads, head_dim))
            remember_and_attend(
                query_heads, new_keys, new_values, memory.keys[FULL][place], memory.values[FULL][place], sights[FULL], start, mixed_heads
            )
            gate_by_sigmoid(query_gate, mixed)
            linear(mixed, weights.attention_out_projection[place], normed)
        add_rows(normed, stream)
        rms_norm(stream, weights.ffn_norm[layer], _EPSILON, normed)
        linear(normed, weights.ffn_gate[layer], inner_gate)
        linear(normed, weights.ffn_up[layer], inner)
        gated_linear_unit(inner_gate, inner)
        linear(inner, weights.ffn_down[layer], normed)
        add_rows(normed, stream)

    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
