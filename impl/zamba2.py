"""The incremental forward of zamba2.

Rules
- One call does one ubatch through all layers. Keys and values of all its tokens are written before any of them attends; a token sees only
  positions up to its own. Each use of a shared block has attention cells of its own.
- A mixer is `mamba2_mixer.mix`; in a hybrid layer it reads the stream with the block's result added, which the stream does not keep.
- Scores are scaled by 1 / sqrt(half the size of a head), and `attend` scales by 1 / sqrt(size): the rest is in the query's matrices.
Source: Transformers' Zamba2ForCausalLM.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.mamba2 import mixer_dimensions
from ..spec.families.zamba2 import NORM_EPSILON, ROPE_THETA, block_of_use, head_size, hybrid_layers
from .batches import SplitBatch
from .cells import Plan
from .forwards import FULL, Memory, Sights
from .kernels import kernel
from .kernels.attention import remember_and_attend
from .kernels.dense import add_rows, embed, gated_gelu_unit, linear, rms_norm, rotary_table, rotate, write_wanted_rows
from .kernels.rows import copy_row
from .mamba2_mixer import MixerWeights, mix, mixer_room, mixer_shapes, prepare_mixer
from .memory import aligned
from .ubatches import begin_ubatch

_EPSILON = np.float32(NORM_EPSILON)


class Adapted(NamedTuple):
    """A projection that the uses of a block share, and the adapter of each use. All float32."""

    shared: np.ndarray  # [blocks, in, out]
    adapter_in: np.ndarray  # [uses, in, rank]
    adapter_out: np.ndarray  # [uses, rank, out]


class Zamba2Weights(NamedTuple):
    """Weights as the forward uses them; matrices [in, out]. Layers, uses and blocks are stacked apart. All float32 but use and block."""

    use: np.ndarray  # int64 [layers], index among the hybrid layers, -1 for the others
    block: np.ndarray  # int64 [uses], the block of each use
    embedding: np.ndarray  # [n_vocab, n_embd]
    norm: np.ndarray  # [layers, 1, n_embd]
    mixer: MixerWeights
    input_norm: np.ndarray  # [blocks, 1, 2 * n_embd]
    query: Adapted  # 2 * n_embd to 2 * n_embd
    key: Adapted
    value: Adapted
    attention_out: np.ndarray  # [blocks, 2 * n_embd, n_embd]
    ffn_norm: np.ndarray  # [blocks, 1, n_embd]
    ffn_gate: Adapted  # n_embd to n_ff
    ffn_up: Adapted
    ffn_down: np.ndarray  # [blocks, n_ff, n_embd]
    block_projection: np.ndarray  # [uses, n_embd, n_embd]
    output_norm: np.ndarray  # [1, n_embd]
    output: np.ndarray  # [n_embd, n_vocab], the embedding again


def prepare(dimensions: Dimensions, weights: Weights) -> Zamba2Weights:
    """Lay the family's weights out for `forward`."""
    layers, hybrid, of_use = tuple(range(dimensions["n_layer"])), hybrid_layers(dimensions), block_of_use(dimensions)
    n_embd, n_ff, rank = dimensions["n_embd"], dimensions["n_ff"], dimensions["adapter_rank"]
    blocks = [f"blocks.{block}." for block in sorted(set(of_use))]
    uses = [f"layers.{layer}." for layer in hybrid]

    def matrices(prefixes: list[str], name: str, n_in: int, n_out: int, outputs: slice = slice(None)) -> np.ndarray:
        arrays = [weights[prefix + name][outputs].T for prefix in prefixes]
        return np.stack(arrays) if arrays else np.zeros((0, n_in, n_out), np.float32)

    def vectors(prefixes: list[str], name: str, channels: int) -> np.ndarray:
        arrays = [weights[prefix + name][None, :] for prefix in prefixes]
        return aligned(np.stack(arrays) if arrays else np.zeros((0, 1, channels), np.float32))

    def adapted(shared: str, adapter: str, n_in: int, n_out: int, outputs: slice = slice(None), factor: float = 1.0) -> Adapted:
        return Adapted(
            aligned(factor * matrices(blocks, shared, n_in, n_out, outputs).astype(np.float64)),
            aligned(matrices(uses, adapter + "_adapter_in", n_in, rank)),
            aligned(factor * matrices(uses, adapter + "_adapter_out", rank, n_out, outputs).astype(np.float64)),
        )

    return Zamba2Weights(
        use=np.array([hybrid.index(layer) if layer in hybrid else -1 for layer in layers], np.int64),
        block=np.array(of_use, np.int64),
        embedding=aligned(weights["token_embedding"]),
        norm=vectors([f"layers.{layer}." for layer in layers], "norm", n_embd),
        mixer=prepare_mixer(mixer_dimensions(dimensions), weights, layers),
        input_norm=vectors(blocks, "input_norm", 2 * n_embd),
        query=adapted("q_projection", "q", 2 * n_embd, 2 * n_embd, factor=math.sqrt(2)),
        key=adapted("k_projection", "k", 2 * n_embd, 2 * n_embd),
        value=adapted("v_projection", "v", 2 * n_embd, 2 * n_embd),
        attention_out=aligned(matrices(blocks, "attention_out", 2 * n_embd, n_embd)),
        ffn_norm=vectors(blocks, "ffn_norm", n_embd),
        ffn_gate=adapted("ffn_gate_up", "ffn", n_embd, n_ff, slice(None, n_ff)),
        ffn_up=adapted("ffn_gate_up", "ffn", n_embd, n_ff, slice(n_ff, None)),
        ffn_down=aligned(matrices(blocks, "ffn_down", n_ff, n_embd)),
        block_projection=aligned(matrices(uses, "block_projection", n_embd, n_embd)),
        output_norm=aligned(weights["output_norm"][None, :]),
        output=aligned(weights["token_embedding"].T),
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows and attention cells."""
    attention = {"key_heads": dimensions["n_head"], "head_dim": head_size(dimensions), "rope_theta": ROPE_THETA}
    return mixer_shapes(mixer_dimensions(dimensions)) | attention


@kernel
def _side_by_side(x: np.ndarray, y: np.ndarray, both: np.ndarray) -> None:
    """both = x and y next to each other; float32 [tokens, channels] x and y, [tokens, 2 * channels] both, written."""
    channels = x.shape[1]
    for token in range(x.shape[0]):
        copy_row(x[token], both[token, :channels])
        copy_row(y[token], both[token, channels:])


@kernel
def _project(weights: Adapted, block: int, use: int, x: np.ndarray, y: np.ndarray) -> None:
    """y = what a use makes of x: the shared matrix's product, and the adapter's on top; float32 [tokens, in] and [tokens, out]."""
    narrow = np.empty((x.shape[0], weights.adapter_in.shape[2]), np.float32)
    adapted = np.empty(y.shape, np.float32)
    linear(x, weights.shared[block], y)
    linear(x, weights.adapter_in[use], narrow)
    linear(narrow, weights.adapter_out[use], adapted)
    add_rows(adapted, y)


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
    n_embd, n_ff = weights.embedding.shape[1], weights.ffn_down.shape[1]
    keys, values = memory.keys[FULL], memory.values[FULL]
    heads, head_dim = keys.shape[2], keys.shape[3]

    embedded = np.empty((tokens, n_embd), np.float32)
    stream = np.empty((tokens, n_embd), np.float32)
    normed = np.empty((tokens, n_embd), np.float32)
    both = np.empty((tokens, 2 * n_embd), np.float32)
    query = np.empty((tokens, 2 * n_embd), np.float32)
    key = np.empty((tokens, 2 * n_embd), np.float32)
    value = np.empty((tokens, 2 * n_embd), np.float32)
    attended = np.empty((tokens, 2 * n_embd), np.float32)
    gate = np.empty((tokens, n_ff), np.float32)
    inner = np.empty((tokens, n_ff), np.float32)
    cosine = np.empty((tokens, head_dim // 2), np.float32)
    sine = np.empty((tokens, head_dim // 2), np.float32)
    room = mixer_room(weights.mixer, tokens)

    if keys.shape[0] > 0:
        rotary_table(batch.positions[start:end], head_dim // 2, ROPE_THETA, cosine, sine)
    embed(batch.tokens[start:end], weights.embedding, embedded)
    embed(batch.tokens[start:end], weights.embedding, stream)
    for layer in range(weights.use.size):
        use = weights.use[layer]
        if use >= 0:
            block = weights.block[use]
            _side_by_side(stream, embedded, both)
            rms_norm(both, weights.input_norm[block], _EPSILON, both)
            _project(weights.query, block, use, both, query)
            _project(weights.key, block, use, both, key)
            _project(weights.value, block, use, both, value)
            query_heads = query.reshape((tokens, heads, head_dim))
            new_keys = key.reshape((tokens, heads, head_dim))
            rotate(query_heads, cosine, sine)
            rotate(new_keys, cosine, sine)
            new_values = value.reshape((tokens, heads, head_dim))
            attended_heads = attended.reshape((tokens, heads, head_dim))
            remember_and_attend(query_heads, new_keys, new_values, keys[use], values[use], sights[FULL], start, attended_heads)
            linear(attended, weights.attention_out[block], normed)
            rms_norm(normed, weights.ffn_norm[block], _EPSILON, normed)
            _project(weights.ffn_gate, block, use, normed, gate)
            _project(weights.ffn_up, block, use, normed, inner)
            gated_gelu_unit(gate, inner)
            mixed = both[:, :n_embd]
            linear(inner, weights.ffn_down[block], mixed)
            linear(mixed, weights.block_projection[use], normed)
            add_rows(stream, normed)
            rms_norm(normed, weights.norm[layer], _EPSILON, normed)
        else:
            rms_norm(stream, weights.norm[layer], _EPSILON, normed)
        mix(weights.mixer, layer, memory, segment_start, source_row, plane_row, room, normed, normed)
        add_rows(normed, stream)
    write_wanted_rows(stream, batch.output_row[start:end], weights.output_norm, _EPSILON, weights.output, hidden, y)
