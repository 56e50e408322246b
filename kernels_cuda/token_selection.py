"""Which of the cells that it sees a token attends to, as in `impl/kernels/token_selection.py`.

Rules
- How many cells each token takes follows from how many it sees, and is known on the host; which ones is known on the device only.
- One thread makes the key of one block, and one thread chooses for one token.
- A block that scores the same as another is the better one if it is older. NaN is the best: it must show.
"""

import math
from typing import Any

import numpy as np
from numba import cuda

from . import for_each
from .arithmetic import square_root
from .arrays import Twin
from .dense import rotary_table, rotate, sum_of_products

_ZERO, _ONE = np.float32(0), np.float32(1)


def selected_sight(
    query: Any,
    raw_keys: Any,
    sight: Any,
    segment_start: Any,
    block_size: int,
    block_count: int,
    norm: Any,
    epsilon: Any,
    theta: float,
    half: int,
) -> Any:
    """What the tokens of a ubatch see after the selection: a sight of its own, whose places begin with the ubatch.

    query          float32 [tokens, heads, size], normed and rotated
    raw_keys       float32 [n_cells, at least size]; those of the ubatch's tokens are written
    sight          of the whole batch
    segment_start  int64 [segments + 1], places
    block_size     tokens of a block; block_count: blocks that a token may take
    norm           float32 [1, size], of block keys
    half, theta    of the rotation
    """
    ends = segment_start.host
    tokens = slice(int(ends[0]), int(ends[-1]))
    seen = sight.length.host[tokens]
    newest = ends[1:] - 1
    blocks = sight.length.host[newest] // block_size
    block_start = np.concatenate([[0], np.cumsum(blocks)])
    whole = seen // block_size
    length = np.where(whole <= block_count, seen, block_count * block_size + seen % block_size)
    first = np.concatenate([[0], np.cumsum(length)])
    block_total = int(block_start[-1])
    keys = cuda.device_array((block_total, norm.shape[1]), np.float32)
    segment_of_block = Twin(np.repeat(np.arange(len(newest)), blocks))
    place_of_block = np.arange(block_total) - np.repeat(block_start[:-1], blocks)
    _block_keys(
        block_total, raw_keys, segment_of_block, Twin(block_start), sight.first[newest], sight.listed, block_size, norm, epsilon, keys
    )
    cosine, sine = (cuda.device_array((block_total, half), np.float32) for _ in range(2))
    rotary_table(Twin(place_of_block * block_size), half, theta, cosine, sine)
    rotate(keys.reshape((block_total, 1, norm.shape[1])), cosine, sine)
    listed = cuda.device_array(max(1, int(first[-1])), np.int32)
    first_block = Twin(np.repeat(block_start[:-1], np.diff(ends)))
    scores = cuda.device_array((query.shape[0], max(1, int(blocks.max(initial=0)))), np.float32)
    oldest = sight.first[np.repeat(newest, np.diff(ends))]
    _choose(
        query.shape[0], query, keys, first_block, Twin(seen), oldest, sight.listed, block_size, block_count, scores, Twin(first[:-1]), listed
    )  # fmt: skip
    return type(sight)(sight.cell[tokens], Twin(first[:-1]), Twin(length), listed, sight.swept)


@for_each
def _block_keys(
    place: Any,
    raw_keys: Any,
    segment_of_block: Any,
    block_start: Any,
    first: Any,
    listed: Any,
    block_size: Any,
    norm: Any,
    epsilon: Any,
    keys: Any,
) -> None:
    """The mean of one block's raw keys, normed."""
    segment = np.uint64(segment_of_block[place])
    oldest = np.int64(place) - block_start[segment]
    oldest *= block_size
    own = keys[place]
    share = _ONE / np.float32(block_size)
    for i in range(own.size):
        total = _ZERO
        for at in range(block_size):
            total += raw_keys[np.uint64(listed[np.uint64(first[segment] + oldest + at)]), np.uint64(i)]
        own[np.uint64(i)] = total * share
    scale = _ONE / square_root(sum_of_products(own, own) / np.float32(own.size) + epsilon)
    for i in range(own.size):
        own[np.uint64(i)] = own[np.uint64(i)] * scale * norm[np.uint64(0), np.uint64(i)]


@for_each
def _choose(
    place: Any,
    query: Any,
    keys: Any,
    first_block: Any,
    seen: Any,
    oldest: Any,
    cells: Any,
    block_size: Any,
    block_count: Any,
    scores: Any,
    first: Any,
    listed: Any,
) -> None:
    """List the cells of one token: those of the best of its whole blocks, in their order, and those after the last whole one."""
    own, blocks = scores[place], seen[place] // block_size
    for block in range(blocks):
        total = _ZERO
        for head in range(query.shape[1]):
            product = sum_of_products(query[place, np.uint64(head)], keys[np.uint64(first_block[place] + block)])
            total += _ZERO if product < _ZERO else product
        own[np.uint64(block)] = total
    filled = first[place]
    for block in range(blocks):
        score, better = own[np.uint64(block)], 0
        for other in range(blocks):
            rival = own[np.uint64(other)]
            is_equal = rival == score or (math.isnan(rival) and math.isnan(score))
            is_larger = not is_equal and (math.isnan(rival) or rival > score)
            if is_larger or (is_equal and other < block):
                better += 1
        if better < block_count or blocks <= block_count:
            for at in range(block * block_size, (block + 1) * block_size):
                listed[np.uint64(filled)] = cells[np.uint64(oldest[place] + at)]
                filled += 1
    for at in range(blocks * block_size, seen[place]):
        listed[np.uint64(filled)] = cells[np.uint64(oldest[place] + at)]
        filled += 1
