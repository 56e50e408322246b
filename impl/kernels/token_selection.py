"""Which of the cells that it sees a token attends to: those of the best blocks, and those that make no whole block yet.

Rules
- Blocks are cut from the first cell that a token sees on, in the order of positions. The key of a block is the mean of the raw keys in it,
  normed, and rotated by the position of its first token.
- What is cached are raw keys: block keys are made again for every ubatch, so that they are right whatever was shared or taken back.
- A block that scores the same as another is the better one if it is older. NaN is the best: it must show.
- Every sum runs over one token's or one block's numbers in a written order: the same for every placement and every split.
Source: Transformers' Qwen4ExpForCausalLM.
"""

import math

import numpy as np

from . import kernel
from .attention import Sight
from .dense import rms_norm, rotary_table, rotate, sum_of_products


@kernel
def block_keys(
    raw_keys: np.ndarray, cells: np.ndarray, block_size: int, norm: np.ndarray, epsilon: np.float32, half: int, theta: float
) -> np.ndarray:
    """The keys of all whole blocks of `cells`; float32 [blocks, size].

    raw_keys  float32 [n_cells, at least size], what cells hold
    cells     int32 [any], in the order of positions, from 0
    norm      float32 [1, size]
    half      half of the channels that are rotated
    """
    blocks, size = cells.size // block_size, norm.shape[1]
    keys = np.empty((blocks, size), np.float32)
    share = np.float32(1) / np.float32(block_size)
    for block in range(blocks):
        own = keys[block]
        for i in range(size):
            own[i] = np.float32(0)
        for place in range(block * block_size, (block + 1) * block_size):
            raw = raw_keys[cells[place]]
            for i in range(size):
                own[i] = own[i] + raw[i]
        for i in range(size):
            own[i] = own[i] * share
    rms_norm(keys, norm, epsilon, keys)
    cosine, sine = np.empty((blocks, half), np.float32), np.empty((blocks, half), np.float32)
    rotary_table(np.arange(blocks) * block_size, half, theta, cosine, sine)
    rotate(keys.reshape((blocks, 1, size)), cosine, sine)
    return keys


@kernel
def take_best(query: np.ndarray, keys: np.ndarray, blocks: int, block_count: int, taken: np.ndarray) -> None:
    """Mark the `block_count` best of the first `blocks` blocks, or all of them.

    query  float32 [heads, size]
    keys   float32 [at least blocks, size]
    taken  bool [at least blocks], written
    """
    for block in range(blocks):
        taken[block] = blocks <= block_count
    if blocks <= block_count:
        return
    scores = np.empty(blocks, np.float32)
    for block in range(blocks):
        total = np.float32(0)
        for head in range(query.shape[0]):
            product = sum_of_products(query[head], keys[block])
            total += np.float32(0) if product < np.float32(0) else product
        scores[block] = total
    for _ in range(block_count):
        best = -1
        for block in range(blocks):
            # Written so that NaN is the best, once.
            if not taken[block] and (best < 0 or (not scores[block] <= scores[best] and not math.isnan(scores[best]))):
                best = block
        taken[best] = True


@kernel
def selected_sight(
    query: np.ndarray,
    raw_keys: np.ndarray,
    sight: Sight,
    segment_start: np.ndarray,
    block_size: int,
    block_count: int,
    norm: np.ndarray,
    epsilon: np.float32,
    theta: float,
    half: int,
) -> Sight:
    """What the tokens of a ubatch see after the selection: a sight of its own, whose places begin with the ubatch.

    query          float32 [tokens, heads, size], normed and rotated
    raw_keys       float32 [n_cells, at least size]; those of the ubatch's tokens are written
    sight          of the whole batch
    segment_start  int64 [segments + 1], places
    block_size     tokens of a block; block_count: blocks that a token may take
    norm           float32 [1, size], of block keys
    half, theta    of the rotation
    """
    start, tokens = segment_start[0], query.shape[0]
    room = 0
    for token in range(tokens):
        room += min(sight.length[start + token], block_size * (block_count + 1))
    listed = np.empty(room, np.int32)
    first, length = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
    filled = 0
    for segment in range(segment_start.size - 1):
        newest = segment_start[segment + 1] - 1
        cells = sight.listed[sight.first[newest] : sight.first[newest] + sight.length[newest]]
        keys = block_keys(raw_keys, cells, block_size, norm, epsilon, half, theta)
        taken = np.empty(keys.shape[0], np.bool_)
        for place in range(segment_start[segment], segment_start[segment + 1]):
            seen = sight.length[place]
            blocks = seen // block_size
            take_best(query[place - start], keys, blocks, block_count, taken)
            first[place - start] = filled
            for i in range(seen):
                if i >= blocks * block_size or taken[i // block_size]:
                    listed[filled] = cells[i]
                    filled += 1
            length[place - start] = filled - first[place - start]
    return Sight(sight.cell[start : start + tokens], first, length, listed, np.empty((0, 2), np.int64))
