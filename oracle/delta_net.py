"""A gated delta net with its convolution, in float64: the plain recurrence, multiplied out over all paths of a forest at once.

Rules
- The delta rule has no closed parallel form that is exact: delta_rule.py takes it token by token, for all paths at once.
- The layer's norm and its residual are the caller's.
Source: Transformers' Qwen3_5ForCausalLM for names and the order of parts.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.delta_net import NORM_EPSILON, convolution_channels, inner_channels
from .blocks import causal_convolution, root_mean_square_norm
from .delta_rule import Levels, gated_delta_rule
from .forest import Forest
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = ("qkv_projection", "gate_projection", "beta_projection", "step_projection", "out_projection")
"""Weights that `delta_net` uses as [in, out]; convolution taps as [taps, channels], newest first, and a_log as -exp(a_log)."""


def delta_net_channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token.

    A state is wider, but only those of one depth are held: a quarter of its width stands for it.
    """
    return max(inner_channels(dimensions) * dimensions["d_state"] // 4, convolution_channels(dimensions))


def delta_net(
    dimensions: Dimensions,
    weights: Tensors,
    prefix: str,
    x: torch.Tensor,
    key_heads: tuple[int, ...],
    forest: Forest,
    levels: Levels,
    layer: int,
    trace: Trace | None,
    gate: Callable[[torch.Tensor], torch.Tensor] = functional.silu,
) -> torch.Tensor:
    """One layer's output, float64 [nodes, n_embd], of its normed input x, the same.

    key_heads  in the order in which they serve value heads, beginning again after the last
    trace      takes down conv [channels, d_conv - 1] and recurrent [value heads, head_dim, d_state]
    gate       what the gate's projection goes through
    """
    n_group, n_value_head, d_state = (dimensions[name] for name in ("n_group", "n_value_head", "d_state"))
    inputs = x @ weights[prefix + "qkv_projection"]
    convolved = functional.silu(causal_convolution(inputs, weights[prefix + "convolution"], forest)).view(
        -1, 2 * n_group + n_value_head, d_state
    )
    query, key, value = torch.split_with_sizes(convolved, (n_group, n_group, n_value_head), dim=1)
    serving = torch.tensor(key_heads).repeat(n_value_head // len(key_heads))
    query, key = (_unit_length(heads).index_select(1, serving) for heads in (query, key))
    # From threshold on torch takes softplus(x) = x; 50 makes that exact in float64.
    step = functional.softplus(x @ weights[prefix + "step_projection"] + weights[prefix + "dt_bias"], threshold=50)
    decay = (step * weights[prefix + "a_log"]).exp()
    beta = (x @ weights[prefix + "beta_projection"]).sigmoid()
    y, states = gated_delta_rule(query / math.sqrt(d_state), key, value, decay, beta, levels, None if trace is None else trace.nodes)
    if trace is not None:
        trace.convolution(layer, inputs, dimensions["d_conv"] - 1)
        trace.recurrent(layer, states)
    y = root_mean_square_norm(y, weights[prefix + "gated_norm"], NORM_EPSILON).view(-1, n_value_head * d_state)
    return (y * gate(x @ weights[prefix + "gate_projection"])) @ weights[prefix + "out_projection"]


def _unit_length(x: torch.Tensor) -> torch.Tensor:
    """x / |x| over the last axis, with the norms' epsilon under the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
