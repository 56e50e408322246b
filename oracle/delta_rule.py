"""The gated delta rule in float64, multiplied out: the plain recurrence over all paths of a forest at once.

Rules
- Nodes of the same depth are one step: each takes its parent's state, whichever leaf that belongs to. A shared prefix is computed once.
- Only the states of one depth are held.
- One token at a time: no chunks, no triangular system, no snapshot. Key and query read a state in one product, before it is updated.
Sources: Yang, Kautz and Hatamizadeh 2024 (gated delta networks, arXiv:2412.06464), eq. 10; with a decay for every channel of a key, Kimi
Team 2025 (arXiv:2510.26692), eq. 1.
"""

import msgspec
import numpy as np
import torch

from .forest import Forest


class Levels(msgspec.Struct, frozen=True):
    """The nodes of a forest by depth.

    order   int64 [nodes]: the nodes, those of depth 0 first
    counts  how many there are of each depth
    place   int64 [nodes]: the place of each node among those of its depth
    parent  for each depth but the first int64 [nodes of that depth]: the place of each node's parent in the depth before; None where
            every node is the child of the one at its own place, as on a single path
    """

    order: torch.Tensor
    counts: tuple[int, ...]
    place: torch.Tensor
    parent: tuple[torch.Tensor | None, ...]


def levels_of(forest: Forest) -> Levels:
    """The nodes of `forest` by depth. Its window must be 2 at least, so that it knows parents."""
    depths, parents = forest.depths.numpy(), forest.ancestors[1].numpy()
    order = np.argsort(depths, kind="stable")
    counts = np.bincount(depths)
    start = np.cumsum(counts) - counts
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - start[depths[order]]
    parent: list[torch.Tensor | None] = []
    for depth in range(1, len(counts)):
        own = place[parents[order[start[depth] : start[depth] + counts[depth]]]]
        is_own_place = counts[depth] == counts[depth - 1] and np.array_equal(own, np.arange(len(own)))
        parent.append(None if is_own_place else torch.from_numpy(own))
    return Levels(torch.from_numpy(order), tuple(counts.tolist()), torch.from_numpy(place), tuple(parent))


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    levels: Levels,
    wanted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """D = S[t-1] decay[t];  S[t] = D + beta[t] (v[t] - D k[t]) k[t]^T;  y[t] = S[t] q[t], head by head along every path.

    query, key   float64 [nodes, heads, d_state]
    value        float64 [nodes, heads, head_dim]
    decay        float64 [nodes, heads], or [nodes, heads, d_state] where every channel of a key has its own: factors
    beta         float64 [nodes, heads], factors
    wanted       int64 [some], nodes
    Returns y, float64 [nodes, heads, head_dim], and the states after the wanted nodes, [some, heads, head_dim, d_state].
    """
    node_count, n_head, d_state = key.shape
    head_dim = value.shape[2]
    by_depth = levels.order
    # Heads flattened: every step is a slice, and one small product for every node and head. States stand transposed, [d_state, head_dim].
    q, k, v = (x.index_select(0, by_depth).view(node_count * n_head, 1, -1) for x in (query, key, value))
    decay, beta = (x.index_select(0, by_depth).view(node_count * n_head, -1, 1) for x in (decay, beta))
    key_and_query, key_column, overlap = torch.cat((k, q), dim=1), k.transpose(1, 2), (k * q).sum(-1, keepdim=True)
    y = torch.empty_like(v)
    state = value.new_zeros(levels.counts[0] * n_head, d_state, head_dim)
    wanted = levels.order[:0] if wanted is None else wanted
    states = value.new_empty(len(wanted), n_head, d_state, head_dim)
    asked = _by_depth(wanted, levels)
    start = 0
    for depth, count in enumerate(levels.counts):
        here = slice(start * n_head, (start + count) * n_head)
        if depth and (parent := levels.parent[depth - 1]) is not None:
            state = state.view(-1, n_head, d_state, head_dim).index_select(0, parent).view(-1, d_state, head_dim)
        state.mul_(decay[here])
        held, read = (key_and_query[here] @ state).chunk(2, dim=1)
        added = (v[here] - held).mul_(beta[here])
        state.addcmul_(key_column[here], added)
        # What the query reads after the update: what it read before, and its share of what was added along the key.
        torch.addcmul(read, overlap[here], added, out=y[here])
        if asked and (here_asked := asked[depth]) is not None:
            states.index_copy_(0, here_asked, state.view(-1, n_head, d_state, head_dim).index_select(0, levels.place[wanted[here_asked]]))
        start += count
    result = torch.empty_like(y).view(node_count, n_head, head_dim)
    result.index_copy_(0, by_depth, y.view(node_count, n_head, head_dim))
    return result, states.transpose(2, 3)


def _by_depth(wanted: torch.Tensor, levels: Levels) -> list[torch.Tensor | None]:
    """For each depth which of the wanted nodes are of it, int64, or None; an empty list when none is wanted."""
    if not len(wanted):
        return []
    depth_of = torch.empty_like(levels.order)
    depth_of[levels.order] = torch.repeat_interleave(torch.arange(len(levels.counts)), torch.tensor(levels.counts))
    depths = depth_of[wanted]
    found: list[torch.Tensor | None] = [None] * len(levels.counts)
    for depth in sorted(set(depths.tolist())):
        found[depth] = torch.nonzero(depths == depth).flatten()
    return found
