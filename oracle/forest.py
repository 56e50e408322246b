"""Forests: many token logs as one set of distinct prefixes, so that a recompute does each of them once.

Rules
- A *node* is one distinct non-empty prefix of the logs; its parent is the prefix without the last token. Nodes are numbered so that a
  parent comes before its children.
- Only *leaf* logs (no log extends them) are laid out. A leaf *owns* the nodes that the leaf before it, in sorted order, does not have.
- What is done token by token runs over the flat nodes, without padding. What looks at a whole path (attention, masked quadratic forms)
  runs over `PathBatch`es: queries are owned nodes, keys are the path from the root to the last of the queries.
- Memory is bounded: a forest has at most `node_max` nodes (or one log), a batch at most `pair_max` query-key pairs and
  `node_max` keys (or one query).
Nothing here knows a model.
"""

from collections.abc import Sequence
from itertools import chain, pairwise

import msgspec
import numpy as np
import torch

QUERY_MAX = 64
"""Most queries in one row of a batch: a long path is cut into pieces, each seeing only the keys up to its own end."""

PADDING_MAX_PAIRS = 12_000
"""A batch is closed when padding would waste more pairs than this: about what one more batch costs."""


class PathBatch(msgspec.Struct, frozen=True):
    """Queries and keys of some pieces of paths, padded on the right.

    query     int64 [pieces, queries], nodes
    key       int64 [pieces, keys], nodes: the path from its root on
    allowed   bool [pieces, queries, keys], True where the key is the query or an ancestor of it
    place     int64 [nodes of this batch], flat index into pieces * queries
    node      int64 [nodes of this batch], the node at that place
    """

    query: torch.Tensor
    key: torch.Tensor
    allowed: torch.Tensor
    place: torch.Tensor
    node: torch.Tensor


class Forest(msgspec.Struct, frozen=True):
    """The nodes of some logs.

    tokens     int64 [nodes], the last token of each prefix
    depths     int64 [nodes], its position, from 0
    ancestors  int64 [window, nodes]; row k holds the node k tokens before, `nodes` (one too many) where there is none
    paths      int64 [leaves, longest], the node of every prefix of every leaf; 0 beyond its end
    batches    every node is a query of exactly one
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    paths: np.ndarray
    batches: tuple[PathBatch, ...]

    @property
    def node_count(self) -> int:
        return int(self.tokens.shape[0])


def leaf_logs(logs: Sequence[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], dict[tuple[int, ...], int]]:
    """The logs that no other log extends, sorted; and for every log the index of a leaf that starts with it.

    Sorting puts a log right before those that extend it, so one look at the next log finds the leaves.
    """
    ordered = sorted(set(logs))
    leaves: list[tuple[int, ...]] = []
    leaf_index: dict[tuple[int, ...], int] = {}
    for log, following in pairwise([*ordered, ()]):
        leaf_index[log] = len(leaves)
        if following[: len(log)] != log:
            leaves.append(log)
    return leaves, leaf_index


def plan(leaves: Sequence[tuple[int, ...]], window: int, node_max: int, pair_max: int) -> list[Forest]:
    """Lay sorted leaves out as forests of at most `node_max` nodes each (or a single log); leaf order is kept.

    window    how many ancestors, itself included, a convolution looks at
    pair_max  most query-key pairs of one batch (or a single query)
    """
    lengths = np.fromiter(map(len, leaves), np.int64, len(leaves))
    shared = _shared_with_previous(leaves, lengths)
    forests, first, node_count = [], 0, 0
    for index, (length, common) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        owned = length - common
        if index > first and node_count + owned > node_max:
            forests.append(_forest(leaves[first:index], lengths[first:index], shared[first:index], window, node_max, pair_max))
            first, node_count, owned = index, 0, length
        node_count += owned
    forests.append(_forest(leaves[first:], lengths[first:], shared[first:], window, node_max, pair_max))
    return forests


def _shared_with_previous(leaves: Sequence[tuple[int, ...]], lengths: np.ndarray) -> np.ndarray:
    """How many tokens each leaf has in common with the one before it; int64 [leaves]."""
    shared = np.zeros(len(leaves), np.int64)
    rows_max = max(2, (1 << 20) // int(lengths.max()))
    for first in range(0, len(leaves) - 1, rows_max - 1):
        grid = _grid(leaves[first : first + rows_max], lengths[first : first + rows_max])
        # No leaf extends another, so two neighbours differ somewhere.
        shared[first + 1 : first + len(grid)] = (grid[1:] != grid[:-1]).argmax(axis=1)
    return shared


def _grid(logs: Sequence[tuple[int, ...]], lengths: np.ndarray) -> np.ndarray:
    """The logs side by side, int64 [logs, longest], -1 beyond their ends."""
    grid = np.full((len(logs), int(lengths.max())), -1, np.int64)
    grid[np.arange(grid.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(logs), np.int64, int(lengths.sum()))
    return grid


def _forest(
    leaves: Sequence[tuple[int, ...]], lengths: np.ndarray, shared: np.ndarray, window: int, node_max: int, pair_max: int
) -> Forest:
    shared = shared.copy()
    shared[0] = 0
    grid = _grid(leaves, lengths)
    places = np.arange(grid.shape[1])
    owned = (places >= shared[:, None]) & (places < lengths[:, None])
    # The owner of a place is the last leaf so far that did not take it over from the leaf before.
    owner = np.maximum.accumulate(np.where(places >= shared[:, None], np.arange(len(leaves))[:, None], 0), axis=0)
    start = np.cumsum(lengths - shared) - (lengths - shared)
    paths = np.where(places < lengths[:, None], (start - shared)[owner] + places, 0)
    leaf, depth = np.nonzero(owned)
    node_count = len(leaf)
    ancestors = np.full((window, node_count), node_count, np.int64)
    for back in range(window):
        inside = depth >= back
        ancestors[back, inside] = paths[leaf[inside], depth[inside] - back]
    return Forest(
        tokens=torch.from_numpy(grid[owned]),
        depths=torch.from_numpy(depth),
        ancestors=torch.from_numpy(ancestors),
        paths=paths,
        batches=tuple(_batches(paths, lengths, shared, node_max, pair_max)),
    )


def _batches(paths: np.ndarray, lengths: np.ndarray, shared: np.ndarray, node_max: int, pair_max: int) -> list[PathBatch]:
    """Cut every leaf's owned nodes into pieces, and put pieces of similar shape together."""
    pieces = []
    for leaf, (length, common) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        query_max = max(1, min(QUERY_MAX, pair_max // length))
        pieces += [(leaf, first, min(first + query_max, length)) for first in range(common, length, query_max)]
    # Similar numbers of queries first (in steps of about a half), then similar path lengths.
    pieces.sort(key=lambda piece: ((piece[2] - piece[1]).bit_length(), piece[2]))
    batches, group = [], [pieces[0]]
    queries, keys, pairs = pieces[0][2] - pieces[0][1], pieces[0][2], (pieces[0][2] - pieces[0][1]) * pieces[0][2]
    for piece in pieces[1:]:
        own, path = piece[2] - piece[1], piece[2]
        queries_after, keys_after, pairs_after = max(queries, own), max(keys, path), pairs + own * path
        keys_padded = (len(group) + 1) * keys_after
        padded = keys_padded * queries_after
        if keys_padded > node_max or padded > pair_max or padded - pairs_after > PADDING_MAX_PAIRS + pairs_after:
            batches.append(_batch(paths, group, queries, keys))
            group, queries_after, keys_after, pairs_after = [], own, path, own * path
        group.append(piece)
        queries, keys, pairs = queries_after, keys_after, pairs_after
    batches.append(_batch(paths, group, queries, keys))
    return batches


def _batch(paths: np.ndarray, pieces: Sequence[tuple[int, int, int]], query_count: int, key_count: int) -> PathBatch:
    leaf, first, end = np.array(pieces, np.int64).T
    depth = first[:, None] + np.arange(query_count)
    true = depth < end[:, None]
    depth = np.minimum(depth, end[:, None] - 1)
    query = paths[leaf[:, None], depth]
    return PathBatch(
        query=torch.from_numpy(query),
        key=torch.from_numpy(np.ascontiguousarray(paths[leaf, :key_count])),
        allowed=torch.from_numpy(np.arange(key_count) <= depth[:, :, None]),
        place=torch.from_numpy(np.flatnonzero(true)),
        node=torch.from_numpy(query[true]),
    )
