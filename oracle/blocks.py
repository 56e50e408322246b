"""Building blocks of the recompute that several families use, in float64 over the flat nodes of a forest.

Rules
- Every block is the plain textbook form; nothing here keeps a state or runs token by token.
- Nodes are the first axis; a node's history is reached only through the forest.
"""

import math
from collections.abc import Container, Mapping, Sequence

import torch

from .forest import Forest, PathBatch


def root_mean_square_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / rms(x) * weight over the last axis; float64 [..., channels]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def laid_out(
    weights: Mapping[str, torch.Tensor], matrices: Container[str], convolutions: Container[str] = ("convolution",)
) -> dict[str, torch.Tensor]:
    """Weights as forwards use them, by the last word of their names: `matrices` [in, out], `convolutions` [taps, channels] with the newest tap
    first, decay rates `a_log` as -exp(a_log); the others as they are."""
    result = {}
    for name, weight in weights.items():
        kind = name.rsplit(".", 1)[-1]
        if kind in matrices:
            result[name] = weight.T.contiguous()
        elif kind in convolutions:
            result[name] = weight.flip(1).T.contiguous()
        else:
            result[name] = -weight.exp() if kind == "a_log" else weight
    return result


FEED_FORWARD_MATRICES = ("ffn_gate", "ffn_up", "ffn_down")
"""Weights of `gated_feed_forward`, used as [in, out]."""


def gated_feed_forward(x: torch.Tensor, weights: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor:
    """A gated linear unit (SwiGLU) of the layer whose weights begin with `prefix`; float64 [nodes, n_embd] in and out."""
    inner = torch.nn.functional.silu(x @ weights[prefix + "ffn_gate"]) * (x @ weights[prefix + "ffn_up"])
    return inner @ weights[prefix + "ffn_down"]


def expert_mixture(x: torch.Tensor, shares: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Every expert's gated linear unit, added up by shares: all experts are used, so that nothing is selected.

    x         float64 [nodes, n_embd]
    shares    float64 [nodes, experts]
    gate, up  float64 [experts, n_ff, n_embd]
    down      float64 [experts, n_embd, n_ff]
    """
    inner = torch.nn.functional.silu(torch.einsum("nc,efc->nef", x, gate)) * torch.einsum("nc,efc->nef", x, up)
    return torch.einsum("nef,ecf,ne->nc", inner, down, shares)


def mixture_beside_a_shared_expert(x: torch.Tensor, weights: Mapping[str, torch.Tensor], prefix: str, shared_share: str) -> torch.Tensor:
    """Experts by softmax shares, and one that every node uses by the sigmoid of a score of its own; float64 [nodes, n_embd] in and out.

    prefix        of the layer's weights: router, expert_gate, expert_up, expert_down (as in `expert_mixture`), shared_gate, shared_up, shared_down
    shared_share  what the projection to the shared expert's score is called
    """
    shares = (x @ weights[prefix + "router"]).softmax(-1)
    mixed = expert_mixture(x, shares, *(weights[prefix + name] for name in ("expert_gate", "expert_up", "expert_down")))
    inner = torch.nn.functional.silu(x @ weights[prefix + "shared_gate"]) * (x @ weights[prefix + "shared_up"])
    return mixed + (x @ weights[prefix + shared_share]).sigmoid() * (inner @ weights[prefix + "shared_down"])


def windows(x: torch.Tensor, forest: Forest, first: int, count: int) -> list[torch.Tensor]:
    """The values `first`, `first + 1`, ... tokens before each node, zero before the log began; float64 [nodes, channels] each."""
    padded = torch.cat((x, x.new_zeros(1, x.shape[1])))
    return [x if back == 0 else padded.index_select(0, forest.ancestors[back]) for back in range(first, first + count)]


def causal_convolution(x: torch.Tensor, weight: torch.Tensor, forest: Forest) -> torch.Tensor:
    """Depthwise causal convolution as a sum over each node's window.

    x       float64 [nodes, channels]
    weight  float64 [taps, channels], newest tap first; taps is at most the forest's window
    """
    taps = weight.shape[0]
    result = x * weight[0]
    for back, value in enumerate(windows(x, forest, 1, taps - 1), start=1):
        result.addcmul_(value, weight[back])
    return result


def gather(x: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """Rows of x by node; [nodes, *rest] -> [*nodes.shape, *rest]."""
    return x.index_select(0, nodes.reshape(-1)).reshape(*nodes.shape, *x.shape[1:])


def scatter(result: torch.Tensor, batch: PathBatch, y: torch.Tensor) -> None:
    """Write a batch's query rows, y [pieces, queries, channels], to their nodes in result [nodes, channels]."""
    result.index_copy_(0, batch.node, y.reshape(-1, y.shape[-1]).index_select(0, batch.place))


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    forest: Forest,
    window: int = 0,
    selected: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Softmax attention of every node over the path from its root to itself, as a masked product; scores are scaled by 1 / sqrt(size).

    query     float64 [nodes, heads, size]
    key       float64 [nodes, key heads, size]; a key head serves heads / key heads neighbouring heads
    value     float64 [nodes, key heads, value size]
    window    how many nodes at the path's end are seen, the node itself included; 0: all
    selected  for each of the forest's batches bool [pieces, queries, keys], the keys that are seen instead; None: the window's
    Returns float64 [nodes, heads * value size].
    """
    n_head, n_head_kv, size, value_size = query.shape[1], key.shape[1], query.shape[2], value.shape[2]
    result = query.new_empty(query.shape[0], n_head * value_size)
    for number, batch in enumerate(forest.batches):
        piece_count, query_count, key_count = batch.allowed.shape
        seen = _seen(batch, forest, window) if selected is None else selected[number]
        # Heads that share a key head stand next to each other: [pieces, key heads, sharers * queries, size].
        q = gather(query, batch.query).view(piece_count, query_count, n_head_kv, -1, size).permute(0, 2, 3, 1, 4)
        k, v = gather(key, batch.key).permute(0, 2, 3, 1), gather(value, batch.key).transpose(1, 2)
        scores = (q.reshape(piece_count, n_head_kv, -1, size) @ k).div_(math.sqrt(size))
        scores = scores.view(piece_count, n_head, query_count, key_count).masked_fill_(~seen[:, None], float("-inf"))
        y = scores.softmax(-1).view(piece_count, n_head_kv, -1, key_count) @ v
        scatter(result, batch, y.view(piece_count, n_head, query_count, value_size).transpose(1, 2).reshape(piece_count, query_count, -1))
    return result


def _seen(batch: PathBatch, forest: Forest, window: int) -> torch.Tensor:
    """bool [pieces, queries, keys], True where the key is the query or an ancestor of it, fewer than `window` tokens back (0: any)."""
    if not window:
        return batch.allowed
    tokens_back = forest.depths[batch.query][:, :, None] - torch.arange(batch.key.shape[1])  # a path's keys begin at its root
    return batch.allowed & (tokens_back < window)


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary position embedding of x, float64 [nodes, heads, size], at int64 positions [nodes]; pair i turns by theta^(-2 i / size) a token.

    Source: Su et al. 2021 (arXiv:2104.09864), in the half-against-half form of GPT-NeoX.
    """
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[..., :half], x[..., half:]
    cosine, sine = angle.cos(), angle.sin()
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def partly_rotated(x: torch.Tensor, positions: torch.Tensor, theta: float, channels: int) -> torch.Tensor:
    """`rotated` for the first `channels` of each head; the others stay as they are."""
    return torch.cat((rotated(x[..., :channels], positions, theta), x[..., channels:]), dim=-1)
