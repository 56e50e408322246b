"""Grouped-query attention in float64: a masked softmax over whole paths.

Rules
- Positions are those of the log, from 0: rotary embedding is relative, so a shifted sequence has the same outputs. Each half of what is rotated of a
  head turns against the other (the form of GPT-NeoX). Without a rotation only the mask says what came before.
- The layer's norm, its projection out and its residual are the caller's.
Sources: Ainslie et al. 2023 (arXiv:2305.13245); Su et al. 2021 (arXiv:2104.09864).
"""

from collections.abc import Mapping

import torch

from ..spec.families import Dimensions
from ..spec.families.attention import Attention, head_channels
from .blocks import masked_attention, partly_rotated, root_mean_square_norm
from .forest import Forest
from .trace import Trace

MATRICES = ("q_projection", "k_projection", "v_projection", "out_projection")
"""Weights that are used as [in, out], the projection out included."""


def grouped_attention(
    facts: Attention,
    dimensions: Dimensions,
    weights: Mapping[str, torch.Tensor],
    prefix: str,
    x: torch.Tensor,
    forest: Forest,
    layer: int,
    trace: Trace | None,
) -> torch.Tensor:
    """What the heads of one layer make of its normed input x, float64 [nodes, n_embd]; float64 [nodes, heads * head_dim].

    trace  takes down attention [n_head_kv, head_dim] a token, K after its norm where there is one, and before its rotation
    """
    size = head_channels(dimensions)
    query, key, value = ((x @ weights[f"{prefix}{name}_projection"]).view(len(x), -1, size) for name in "qkv")
    if prefix + "q_norm" in weights:
        query = root_mean_square_norm(query, weights[prefix + "q_norm"], facts.norm_epsilon)
        key = root_mean_square_norm(key, weights[prefix + "k_norm"], facts.norm_epsilon)
    if trace is not None:
        trace.attention(layer, key, value)
    if facts.rope_theta:
        rotated_channels = dimensions.get("n_rot", size)
        query, key = (partly_rotated(heads, forest.depths, facts.rope_theta, rotated_channels) for heads in (query, key))
    return masked_attention(query, key, value, forest, facts.window(dimensions))
