"""The recurrences of RWKV-6 and RWKV-7 in float64, multiplied out: plain, over all paths of a forest at once.

Rules
- Nodes of the same depth are one step: each takes its parent's state, whichever leaf that belongs to. A shared prefix is computed once.
- Only the states of one depth are held: [nodes of that depth * heads, key channels, value channels].
- What a token reads of its own outer product does not need the state, and is done for all tokens at once.
Sources: Peng et al. 2024 (arXiv:2404.05892), the recurrence of Finch; Peng et al. 2025 (arXiv:2503.14456), the generalised delta rule.
"""

from collections.abc import Callable

import torch

from .delta_rule import Levels

Step = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]
"""From the states before some nodes, and which rows of the operands are theirs, to the states after them and what is read of them."""


def wkv6(
    receptance: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    first: torch.Tensor,
    levels: Levels,
    wanted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y[t] = (S[t-1] + first k[t] v[t]^T)^T r[t];  S[t] = decay[t] S[t-1] + k[t] v[t]^T, head by head along every path.

    receptance, key, decay  float64 [nodes, heads, key channels]; decays are factors
    value                   float64 [nodes, heads, value channels]
    first                   float64 [heads, key channels]
    wanted                  int64 [some], nodes
    Returns y, float64 [nodes, heads, value channels], and the states after the wanted nodes, [some, heads, value channels, key channels].
    """
    r, k, v, w = (_by_depth(x, levels) for x in (receptance, key, value, decay))
    r, k, v, w = r[:, None, :], k[:, :, None], v[:, None, :], w[:, :, None]

    def step(state: torch.Tensor, here: slice) -> tuple[torch.Tensor, torch.Tensor]:
        read = r[here] @ state
        return (state * w[here]).addcmul_(k[here], v[here]), read

    read, states = _along_paths(step, value, key.shape[2], levels, wanted)
    return read + (receptance * first * key).sum(-1, keepdim=True) * value, states


def wkv7(
    receptance: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    removal: torch.Tensor,
    rate: torch.Tensor,
    levels: Levels,
    wanted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S[t] = decay[t] S[t-1] - (rate[t] removal[t]) (S[t-1]^T removal[t])^T + k[t] v[t]^T;  y[t] = S[t]^T r[t], head by head along every path.

    receptance, key, decay, removal, rate  float64 [nodes, heads, key channels]; decays are factors, removals have length 1
    value                                  float64 [nodes, heads, value channels]
    wanted                                 int64 [some], nodes
    Returns y, float64 [nodes, heads, value channels], and the states after the wanted nodes, [some, heads, value channels, key channels].
    """
    operands = (receptance, key, value, decay, removal, rate * removal)
    r, k, v, w, away, forgotten = (_by_depth(x, levels) for x in operands)
    r, k, v, w, away, forgotten = r[:, None, :], k[:, :, None], v[:, None, :], w[:, :, None], away[:, None, :], forgotten[:, :, None]

    def step(state: torch.Tensor, here: slice) -> tuple[torch.Tensor, torch.Tensor]:
        held = away[here] @ state
        after = (state * w[here]).addcmul_(forgotten[here], held, value=-1).addcmul_(k[here], v[here])
        return after, r[here] @ after

    return _along_paths(step, value, key.shape[2], levels, wanted)


def _by_depth(x: torch.Tensor, levels: Levels) -> torch.Tensor:
    """[nodes, heads, channels] -> [nodes * heads, channels], nodes of depth 0 first."""
    return x.index_select(0, levels.order).flatten(0, 1)


def _along_paths(
    step: Step, value: torch.Tensor, key_channels: int, levels: Levels, wanted: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take `step` from depth to depth, states beginning at zero. Returns what it reads of every node, and the states after `wanted`."""
    node_count, n_head, value_channels = value.shape
    read = value.new_empty(node_count, n_head, value_channels)
    wanted = levels.order[:0] if wanted is None else wanted
    states = value.new_empty(len(wanted), n_head, key_channels, value_channels)
    depths = torch.empty_like(levels.order)
    depths[levels.order] = torch.repeat_interleave(torch.arange(len(levels.counts)), torch.tensor(levels.counts))
    asked = depths[wanted]
    state = value.new_zeros(levels.counts[0] * n_head, key_channels, value_channels)
    start = 0
    for depth, count in enumerate(levels.counts):
        if depth and (parent := levels.parent[depth - 1]) is not None:
            state = state.view(-1, n_head, key_channels, value_channels).index_select(0, parent).flatten(0, 1)
        state, rows = step(state, slice(start * n_head, (start + count) * n_head))
        read[levels.order[start : start + count]] = rows.view(count, n_head, value_channels)
        if len(wanted) and len(here := torch.nonzero(asked == depth).flatten()):
            states[here] = state.view(count, n_head, key_channels, value_channels)[levels.place[wanted[here]]]
        start += count
    return read, states.transpose(2, 3)
