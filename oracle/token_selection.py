"""Attention to selected tokens in float64: which keys every node of a forest sees, and how close the choice was.

Rules
- A path is cut into blocks from its root on. A node scores the whole blocks on its own path by the mean of their raw keys, and sees the
  best of them, and the nodes after the last whole one.
- The margin of a node is the difference between the worst score that is taken and the best that is not; infinite where all are taken.
  Where it is tiny, rounding decides which block is right.
Sources: Transformers' Qwen4ExpForCausalLM; DeepSeek-AI 2025 (DeepSeek-V3.2, arXiv:2512.02556), eq. 1, for the score, here without weights.
"""

from collections.abc import Callable

import torch

from .blocks import gather
from .delta_rule import Levels
from .forest import Forest, PathBatch

Finish = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Makes keys of means, float64 [blocks, size], and the places of the blocks' first nodes in their paths, int64 [blocks]."""


def selected_keys(
    query: torch.Tensor, raw_key: torch.Tensor, finish: Finish, forest: Forest, block_size: int, block_count: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Which keys every node sees when it may choose block_count blocks of block_size nodes.

    query    float64 [nodes, heads, size], ready to be multiplied
    raw_key  float64 [nodes, size]
    Returns for each of the forest's batches bool [pieces, queries, keys], and the margin of every node, float64 [nodes].
    """
    margins = query.new_empty(query.shape[0])
    selected = []
    for batch in forest.batches:
        keys = _block_keys(raw_key, finish, batch, block_size)
        scores = torch.einsum("pqhc,pbc->pqhb", gather(query, batch.query), keys).relu().sum(2)
        seen, margin = _best(scores, batch.allowed, block_size, block_count)
        selected.append(seen)
        margins.index_copy_(0, batch.node, margin.reshape(-1).index_select(0, batch.place))
    return selected, margins


def _block_keys(raw_key: torch.Tensor, finish: Finish, batch: PathBatch, block_size: int) -> torch.Tensor:
    """The keys of all whole blocks of the batch's paths, float64 [pieces, blocks, size]."""
    piece_count, key_count = batch.key.shape
    blocks, size = key_count // block_size, raw_key.shape[1]
    means = gather(raw_key, batch.key[:, : blocks * block_size]).reshape(piece_count * blocks, block_size, size).mean(1)
    starts = torch.arange(0, blocks * block_size, block_size).repeat(piece_count)
    return finish(means, starts).view(piece_count, blocks, size)


def _best(scores: torch.Tensor, allowed: torch.Tensor, block_size: int, block_count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [pieces, queries, keys] and margins [pieces, queries], of scores [pieces, queries, blocks]."""
    blocks = scores.shape[2]
    is_whole = allowed[:, :, block_size - 1 : blocks * block_size : block_size]
    scores = scores.masked_fill(~is_whole, float("-inf"))
    margin = scores.new_full(scores.shape[:2], float("inf"))
    taken = is_whole
    if blocks > block_count:
        best = scores.topk(block_count + 1, dim=-1)
        # Fewer whole blocks than may be taken: nothing is left out, and minus infinity is no score.
        cut = best.values[:, :, -2] - best.values[:, :, -1]
        margin = torch.where(torch.isfinite(best.values[:, :, -1]), cut, margin)
        taken = torch.zeros_like(is_whole).scatter_(2, best.indices[:, :, :-1], True) & is_whole
    in_block = torch.zeros_like(allowed)
    in_block[:, :, : blocks * block_size] = is_whole.repeat_interleave(block_size, dim=2)
    seen = allowed & ~in_block
    seen[:, :, : blocks * block_size] |= taken.repeat_interleave(block_size, dim=2)
    return seen, margin


def smallest_so_far(margins: torch.Tensor, levels: Levels) -> torch.Tensor:
    """For every node the smallest of its own margin and its ancestors'; float64 [nodes]."""
    result = margins.clone()
    start, before = 0, result[:0]
    for depth, count in enumerate(levels.counts):
        nodes = levels.order[start : start + count]
        own = result[nodes]
        if depth:
            parent = levels.parent[depth - 1]
            own = torch.minimum(own, before if parent is None else before[parent])
            result[nodes] = own
        before, start = own, start + count
    return result
