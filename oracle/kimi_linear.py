"""Kimi Linear in float64: Kimi Delta Attention multiplied out over all paths at once, and latent attention with every head's keys and values
written out.

Rules
- The delta rule has no closed parallel form that is exact: delta_rule.py takes it token by token, for all paths at once.
- Latents are expanded before they are attended to, as Transformers does it; what a cache keeps of a token is the latent itself.
Source: Transformers' KimiLinearForCausalLM for names and the order of parts.
"""

import math
from collections.abc import Mapping

import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.kimi_linear import EXPERT_SCALE, KIMI_LINEAR, NORM_EPSILON, inner_channels, key_size
from .blocks import causal_convolution, expert_mixture, masked_attention, root_mean_square_norm
from .delta_rule import Levels, gated_delta_rule, levels_of
from .forest import Forest
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]


def window(dimensions: Dimensions) -> int:
    """Tokens that a convolution looks at, the current one included."""
    return dimensions["d_conv"]


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token.

    A state is wider, but only those of one depth are held: a quarter of its width stands for it.
    """
    d_inner = inner_channels(dimensions)
    delta = max(d_inner * dimensions["head_dim"] // 4, 3 * d_inner)
    latent = dimensions["n_head"] * max(key_size(dimensions), dimensions["value_dim"])
    experts = dimensions["n_expert"] * max(2 * dimensions["n_ff_expert"], dimensions["n_embd"])
    return max(delta, latent, experts, 2 * dimensions["n_ff"])


def heads(dimensions: Dimensions) -> int:
    """Heads of the widest query-by-key form."""
    return dimensions["n_head"]


def prepared(dimensions: Dimensions, weights: Tensors) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them: matrices [in, out], convolution taps [taps, channels] newest first, decay rates -exp(a_log);
    experts and expansions of latents stay as they are."""
    result = {}
    for name, weight in weights.items():
        kind = name.rsplit(".", 1)[-1]
        if kind.endswith("_convolution"):
            result[name] = weight.flip(1).T.contiguous()
        elif kind == "a_log":
            result[name] = -weight.exp()
        else:
            result[name] = weight.T.contiguous() if weight.dim() == 2 and kind != "token_embedding" else weight
    return result


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None = None) -> torch.Tensor:
    """The hidden state of every node before the final norm; float64 [nodes, n_embd].

    trace  takes down the states of its logs: conv [3 * heads * head_dim, d_conv - 1] and recurrent [heads, head_dim, head_dim], or attention
           [1, kv_lora_rank + qk_rope_dim] a token: its normed latent, and the key that heads share
    """
    attention_layers = KIMI_LINEAR.attention_layers(dimensions)
    levels = levels_of(forest)
    hidden = weights["token_embedding"].index_select(0, forest.tokens)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        normed = root_mean_square_norm(hidden, weights[prefix + "input_norm"], NORM_EPSILON)
        if layer in attention_layers:
            hidden = hidden + _latent_attention(dimensions, weights, prefix, normed, forest, layer, trace)
        else:
            hidden = hidden + _delta_attention(dimensions, weights, prefix, normed, forest, levels, layer, trace)
        normed = root_mean_square_norm(hidden, weights[prefix + "ffn_norm"], NORM_EPSILON)
        if layer < dimensions["n_dense"]:
            hidden = hidden + _gated_linear_unit(weights, prefix + "ffn", normed)
        else:
            shares = (normed @ weights[prefix + "router"]).sigmoid()
            shares = shares / shares.sum(-1, keepdim=True) * EXPERT_SCALE
            mixed = expert_mixture(normed, shares, *(weights[f"{prefix}expert_{part}"] for part in ("gate", "up", "down")))
            hidden = hidden + mixed + _gated_linear_unit(weights, prefix + "shared", normed)
    return hidden


def final_norm(weights: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    """The norm before the output projection; float64 [nodes, n_embd]."""
    return root_mean_square_norm(hidden, weights["output_norm"], NORM_EPSILON)


def _delta_attention(
    dimensions: Dimensions,
    weights: Tensors,
    prefix: str,
    x: torch.Tensor,
    forest: Forest,
    levels: Levels,
    layer: int,
    trace: Trace | None,
) -> torch.Tensor:
    by_head = (-1, dimensions["n_head"], dimensions["head_dim"])
    inputs = [x @ weights[f"{prefix}{part}_projection"] for part in "qkv"]
    query, key, value = (
        functional.silu(causal_convolution(part_inputs, weights[f"{prefix}{part}_convolution"], forest)).view(by_head)
        for part, part_inputs in zip("qkv", inputs, strict=True)
    )
    query, key = _unit_length(query) / math.sqrt(dimensions["head_dim"]), _unit_length(key)
    # From threshold on torch takes softplus(x) = x; 50 makes that exact in float64.
    step = x @ weights[prefix + "decay_in_projection"] @ weights[prefix + "decay_out_projection"] + weights[prefix + "dt_bias"]
    decay = (functional.softplus(step, threshold=50).view(by_head) * weights[prefix + "a_log"][:, None]).exp()
    beta = (x @ weights[prefix + "beta_projection"]).sigmoid()
    y, states = gated_delta_rule(query, key, value, decay, beta, levels, None if trace is None else trace.nodes)
    if trace is not None:
        trace.convolution(layer, torch.cat(inputs, dim=1), dimensions["d_conv"] - 1)
        trace.recurrent(layer, states)
    y = root_mean_square_norm(y, weights[prefix + "gated_norm"], NORM_EPSILON).view(-1, inner_channels(dimensions))
    gate = (x @ weights[prefix + "gate_in_projection"] @ weights[prefix + "gate_out_projection"]).sigmoid()
    return (y * gate) @ weights[prefix + "out_projection"]


def _latent_attention(
    dimensions: Dimensions, weights: Tensors, prefix: str, x: torch.Tensor, forest: Forest, layer: int, trace: Trace | None
) -> torch.Tensor:
    n_head, rank = dimensions["n_head"], dimensions["kv_lora_rank"]
    query = (x @ weights[prefix + "q_projection"]).view(-1, n_head, key_size(dimensions))
    latent, shared_key = (x @ weights[prefix + "latent_projection"]).split_with_sizes((rank, dimensions["qk_rope_dim"]), dim=1)
    latent = root_mean_square_norm(latent, weights[prefix + "latent_norm"], NORM_EPSILON)
    if trace is not None:
        trace.attention(layer, torch.cat((latent, shared_key), dim=1)[:, None])
    own_key = torch.einsum("nr,hrc->nhc", latent, weights[prefix + "k_expansion"])
    value = torch.einsum("nr,hcr->nhc", latent, weights[prefix + "v_expansion"])
    key = torch.cat((own_key, shared_key[:, None].expand(-1, n_head, -1)), dim=2)
    return masked_attention(query, key, value, forest) @ weights[prefix + "out_projection"]


def _gated_linear_unit(weights: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return (functional.silu(x @ weights[name + "_gate"]) * (x @ weights[name + "_up"])) @ weights[name + "_down"]


def _unit_length(x: torch.Tensor) -> torch.Tensor:
    """x / |x| over the last axis, with the norms' epsilon under the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
