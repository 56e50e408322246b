"""Gated attention in float64: a masked softmax over whole paths, whose output is multiplied by a gate.

Rules
- Positions are those of the log, from 0: rotary embedding is relative, and only the first n_rot channels of a head are rotated.
- The layer's norm and its residual are the caller's.
Source: Transformers' Qwen3NextForCausalLM and Qwen3_5ForCausalLM for names and the order of parts.
"""

from collections.abc import Mapping, Sequence

import torch

from ..spec.families import Dimensions
from ..spec.families.delta_net import NORM_EPSILON
from ..spec.families.gated_attention import ROPE_THETA
from .blocks import masked_attention, partly_rotated, root_mean_square_norm
from .forest import Forest
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = ("q_projection", "k_projection", "v_projection", "out_projection")
"""Weights that `gated_attention` uses as [in, out]."""


def gated_attention_channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token."""
    return 2 * dimensions["n_head"] * dimensions["head_dim"]


def gated_attention(
    dimensions: Dimensions,
    weights: Tensors,
    prefix: str,
    x: torch.Tensor,
    forest: Forest,
    layer: int,
    trace: Trace | None,
    selected: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """One layer's output, float64 [nodes, n_embd], of its normed input x, the same.

    trace      takes down attention [n_head_kv, head_dim] a token, K after its norm and before its rotation
    selected   the keys that are seen, as `masked_attention` has them; None: all before a node
    """
    n_head, n_head_kv, head_dim = dimensions["n_head"], dimensions["n_head_kv"], dimensions["head_dim"]
    # Every head's query stands before its gate.
    query, gate = (x @ weights[prefix + "q_projection"]).view(-1, n_head, 2 * head_dim).chunk(2, dim=-1)
    query = root_mean_square_norm(query, weights[prefix + "q_norm"], NORM_EPSILON)
    key = root_mean_square_norm(
        (x @ weights[prefix + "k_projection"]).view(-1, n_head_kv, head_dim), weights[prefix + "k_norm"], NORM_EPSILON
    )
    value = (x @ weights[prefix + "v_projection"]).view(-1, n_head_kv, head_dim)
    if trace is not None:
        trace.attention(layer, key, value)
    query, key = (partly_rotated(heads, forest.depths, ROPE_THETA, dimensions["n_rot"]) for heads in (query, key))
    y = masked_attention(query, key, value, forest, selected=selected) * gate.reshape(-1, n_head * head_dim).sigmoid()
    return y @ weights[prefix + "out_projection"]
