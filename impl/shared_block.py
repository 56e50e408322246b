"""A transformer block whose weights are shared by all its uses, over one ubatch: attention and a gated MLP without residuals.

Rules
- Blocks and uses are stacked apart; `use` is the index of a layer among those that use a block, and among the attention layers of the memory: each
  use has cells of its own, and adapters of its own beside the shared matrices.
- Keys and values of all tokens are written before any of them attends; a token sees only positions up to its own.
- Scores are scaled by 1 / sqrt(half the size of a head), and `attend` scales by 1 / sqrt(size): the rest is in the query's matrices.
Source: Transformers' Zamba2ForCausalLM.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ..spec.families.family import Dimensions, Weights
from ..spec.families.zamba2 import NORM_EPSILON, ROPE_THETA, block_of_use, head_size, hybrid_layers
from .forwards import FULL, Memory, Sights
from .kernels import kernel
from .kernels.attention import remember_and_attend
from .kernels.dense import add_rows, gated_gelu_unit, linear, rms_norm, rotary_table, rotate
from .kernels.mixer_parts import join_rows
from .memory import aligned

_EPSILON = np.float32(NORM_EPSILON)


class Adapted(NamedTuple):
    """A projection that the uses of a block share, and the adapter of each use. All float32."""

    shared: np.ndarray  # [blocks, in, out]
    adapter_in: np.ndarray  # [uses, in, rank]
    adapter_out: np.ndarray  # [uses, rank, out]


class BlockWeights(NamedTuple):
    """Weights as `use_block` uses them; matrices [in, out]. Uses and blocks are stacked apart. All float32 but block."""

    block: np.ndarray  # int64 [uses], the block of each use
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


class BlockRoom(NamedTuple):
    """Arrays that `use_block` works in, for one ubatch; float32 [tokens, channels of its own]; cosine and sine are of its positions."""

    both: np.ndarray
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    attended: np.ndarray
    gate: np.ndarray
    inner: np.ndarray
    cosine: np.ndarray
    sine: np.ndarray


def prepare_blocks(dimensions: Dimensions, weights: Weights) -> BlockWeights:
    """Lay the weights of the blocks and of their uses out."""
    of_use = block_of_use(dimensions)
    n_embd, n_ff, rank = dimensions["n_embd"], dimensions["n_ff"], dimensions["adapter_rank"]
    blocks = [f"blocks.{block}." for block in sorted(set(of_use))]
    uses = [f"layers.{layer}." for layer in hybrid_layers(dimensions)]

    def matrices(prefixes: list[str], name: str, n_in: int, n_out: int, outputs: slice = slice(None)) -> np.ndarray:
        arrays = [weights[prefix + name][outputs].T for prefix in prefixes]
        return np.stack(arrays) if arrays else np.zeros((0, n_in, n_out), np.float32)

    def vectors(name: str, channels: int) -> np.ndarray:
        arrays = [weights[prefix + name][None, :] for prefix in blocks]
        return aligned(np.stack(arrays) if arrays else np.zeros((0, 1, channels), np.float32))

    def adapted(shared: str, adapter: str, n_in: int, n_out: int, outputs: slice = slice(None), factor: float = 1.0) -> Adapted:
        return Adapted(
            aligned(factor * matrices(blocks, shared, n_in, n_out, outputs).astype(np.float64)),
            aligned(matrices(uses, adapter + "_adapter_in", n_in, rank)),
            aligned(factor * matrices(uses, adapter + "_adapter_out", rank, n_out, outputs).astype(np.float64)),
        )

    return BlockWeights(
        block=np.array(of_use, np.int64),
        input_norm=vectors("input_norm", 2 * n_embd),
        query=adapted("q_projection", "q", 2 * n_embd, 2 * n_embd, factor=math.sqrt(2)),
        key=adapted("k_projection", "k", 2 * n_embd, 2 * n_embd),
        value=adapted("v_projection", "v", 2 * n_embd, 2 * n_embd),
        attention_out=aligned(matrices(blocks, "attention_out", 2 * n_embd, n_embd)),
        ffn_norm=vectors("ffn_norm", n_embd),
        ffn_gate=adapted("ffn_gate_up", "ffn", n_embd, n_ff, slice(None, n_ff)),
        ffn_up=adapted("ffn_gate_up", "ffn", n_embd, n_ff, slice(n_ff, None)),
        ffn_down=aligned(matrices(blocks, "ffn_down", n_ff, n_embd)),
        block_projection=aligned(matrices(uses, "block_projection", n_embd, n_embd)),
    )


def block_shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shape of a use's attention cells."""
    return {"key_heads": dimensions["n_head"], "head_dim": head_size(dimensions), "rope_theta": ROPE_THETA}


@kernel
def block_room(weights: BlockWeights, memory: Memory, positions: np.ndarray) -> BlockRoom:
    """Room for `use_block` over tokens at int64 `positions`; unwritten but for what depends on positions."""
    tokens, width, n_ff, half = positions.size, weights.attention_out.shape[1], weights.ffn_down.shape[1], memory.keys[FULL].shape[3] // 2
    room = BlockRoom(
        np.empty((tokens, width), np.float32),
        np.empty((tokens, width), np.float32),
        np.empty((tokens, width), np.float32),
        np.empty((tokens, width), np.float32),
        np.empty((tokens, width), np.float32),
        np.empty((tokens, n_ff), np.float32),
        np.empty((tokens, n_ff), np.float32),
        np.empty((tokens, half), np.float32),
        np.empty((tokens, half), np.float32),
    )
    if weights.block.size > 0:
        rotary_table(positions, half, ROPE_THETA, room.cosine, room.sine)
    return room


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
def use_block(
    weights: BlockWeights,
    use: int,
    memory: Memory,
    sights: Sights,
    start: int,
    room: BlockRoom,
    stream: np.ndarray,
    embedded: np.ndarray,
    y: np.ndarray,
) -> None:
    """One use of its block: keys and values of its tokens are written, and each token attends to the cells that it sees.

    use               which of the uses
    memory            its cells of layer `use` are read and written
    sights            of the attention layers without and with a window; these have none
    start             place of the ubatch's first token in the batch
    room              written
    stream, embedded  float32 [tokens, n_embd]: what the block reads, side by side
    y                 float32 [tokens, n_embd], written; neither of them
    """
    keys, values, block = memory.keys[FULL][use], memory.values[FULL][use], weights.block[use]
    shape = (stream.shape[0], keys.shape[1], keys.shape[2])
    join_rows(stream, embedded, room.both)
    rms_norm(room.both, weights.input_norm[block], _EPSILON, room.both)
    _project(weights.query, block, use, room.both, room.query)
    _project(weights.key, block, use, room.both, room.key)
    _project(weights.value, block, use, room.both, room.value)
    query_heads, new_keys, new_values = room.query.reshape(shape), room.key.reshape(shape), room.value.reshape(shape)
    rotate(query_heads, room.cosine, room.sine)
    rotate(new_keys, room.cosine, room.sine)
    remember_and_attend(query_heads, new_keys, new_values, keys, values, sights[FULL], start, room.attended.reshape(shape))
    linear(room.attended, weights.attention_out[block], y)
    rms_norm(y, weights.ffn_norm[block], _EPSILON, y)
    _project(weights.ffn_gate, block, use, y, room.gate)
    _project(weights.ffn_up, block, use, y, room.inner)
    gated_gelu_unit(room.gate, room.inner)
    mixed = room.both[:, : y.shape[1]]
    linear(room.inner, weights.ffn_down[block], mixed)
    linear(mixed, weights.block_projection[use], y)
