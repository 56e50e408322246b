"""Qwen3.5 in float64: gated delta nets as the plain recurrence, multiplied out over all paths at once, and attention as a masked softmax.

Rules
- The delta rule has no closed parallel form that is exact: delta_rule.py takes it token by token, for all paths at once.
- Positions are those of the log, from 0, the same in every part of a position: rotary embedding is relative, and only the first n_rot
  channels of a head are rotated.
Source: Transformers' Qwen3_5ForCausalLM for names and the order of parts.
"""

import math
from collections.abc import Mapping

import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.qwen35 import NORM_EPSILON, QWEN35, ROPE_THETA, convolution_channels, inner_channels
from .blocks import causal_convolution, masked_attention, partly_rotated, root_mean_square_norm
from .delta_rule import Levels, gated_delta_rule, levels_of
from .forest import Forest
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = (
    "q_projection", "k_projection", "v_projection", "qkv_projection", "gate_projection", "beta_projection", "step_projection",
    "out_projection", "ffn_gate", "ffn_up", "ffn_down", "output",
)  # fmt: skip


def window(dimensions: Dimensions) -> int:
    """Tokens that a convolution looks at, the current one included."""
    return dimensions["d_conv"]


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token.

    A state is wider, but only those of one depth are held: a quarter of its width stands for it.
    """
    state = inner_channels(dimensions) * dimensions["d_state"]
    return max(state // 4, convolution_channels(dimensions), 2 * dimensions["n_head"] * dimensions["head_dim"], 2 * dimensions["n_ff"])


def heads(dimensions: Dimensions) -> int:
    """Heads of the widest query-by-key form."""
    return dimensions["n_head"]


def prepared(dimensions: Dimensions, weights: Tensors) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them: matrices [in, out], convolution taps [taps, channels] newest first, decay rates -exp(a_log)."""
    result = {}
    for name, weight in weights.items():
        kind = name.rsplit(".", 1)[-1]
        if kind in MATRICES:
            result[name] = weight.T.contiguous()
        elif kind == "convolution":
            result[name] = weight.flip(1).T.contiguous()
        elif kind == "a_log":
            result[name] = -weight.exp()
        else:
            result[name] = weight
    return result


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None = None) -> torch.Tensor:
    """The hidden state of every node before the final norm; float64 [nodes, n_embd].

    trace  takes down the states of its logs: conv [channels, d_conv - 1] and recurrent [value heads, head_dim, d_state], or attention
           [n_head_kv, head_dim] a token, K after its norm and before its rotation
    """
    attention_layers = QWEN35.attention_layers(dimensions)
    levels = levels_of(forest)
    hidden = weights["token_embedding"].index_select(0, forest.tokens)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        normed = root_mean_square_norm(hidden, weights[prefix + "input_norm"], NORM_EPSILON)
        if layer in attention_layers:
            hidden = hidden + _attention(dimensions, weights, prefix, normed, forest, layer, trace)
        else:
            hidden = hidden + _delta_net(dimensions, weights, prefix, normed, forest, levels, layer, trace)
        normed = root_mean_square_norm(hidden, weights[prefix + "ffn_norm"], NORM_EPSILON)
        inner = functional.silu(normed @ weights[prefix + "ffn_gate"]) * (normed @ weights[prefix + "ffn_up"])
        hidden = hidden + inner @ weights[prefix + "ffn_down"]
    return hidden


def final_norm(weights: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    """The norm before the output projection; float64 [nodes, n_embd]."""
    return root_mean_square_norm(hidden, weights["output_norm"], NORM_EPSILON)


def _delta_net(
    dimensions: Dimensions,
    weights: Tensors,
    prefix: str,
    x: torch.Tensor,
    forest: Forest,
    levels: Levels,
    layer: int,
    trace: Trace | None,
) -> torch.Tensor:
    n_group, n_value_head, d_state = (dimensions[name] for name in ("n_group", "n_value_head", "d_state"))
    inputs = x @ weights[prefix + "qkv_projection"]
    convolved = functional.silu(causal_convolution(inputs, weights[prefix + "convolution"], forest)).view(
        -1, 2 * n_group + n_value_head, d_state
    )
    query, key, value = torch.split_with_sizes(convolved, (n_group, n_group, n_value_head), dim=1)
    # Value head h is served by key head h modulo n_group.
    query, key = (_unit_length(heads).repeat(1, n_value_head // n_group, 1) for heads in (query, key))
    # From threshold on torch takes softplus(x) = x; 50 makes that exact in float64.
    step = functional.softplus(x @ weights[prefix + "step_projection"] + weights[prefix + "dt_bias"], threshold=50)
    decay = (step * weights[prefix + "a_log"]).exp()
    beta = (x @ weights[prefix + "beta_projection"]).sigmoid()
    y, states = gated_delta_rule(query / math.sqrt(d_state), key, value, decay, beta, levels, None if trace is None else trace.nodes)
    if trace is not None:
        trace.convolution(layer, inputs, dimensions["d_conv"] - 1)
        trace.recurrent(layer, states)
    y = root_mean_square_norm(y, weights[prefix + "gated_norm"], NORM_EPSILON).view(-1, n_value_head * d_state)
    return (y * functional.silu(x @ weights[prefix + "gate_projection"])) @ weights[prefix + "out_projection"]


def _attention(
    dimensions: Dimensions, weights: Tensors, prefix: str, x: torch.Tensor, forest: Forest, layer: int, trace: Trace | None
) -> torch.Tensor:
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
    y = masked_attention(query, key, value, forest) * gate.reshape(-1, n_head * head_dim).sigmoid()
    return y @ weights[prefix + "out_projection"]


def _unit_length(x: torch.Tensor) -> torch.Tensor:
    """x / |x| over the last axis, with the norms' epsilon under the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
