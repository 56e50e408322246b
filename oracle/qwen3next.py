"""Qwen3-Next in float64: gated delta nets (delta_net.py), gated attention (gated_attention.py), and mixtures of experts.

Source: Transformers' Qwen3NextForCausalLM for names and the order of parts.
"""

from collections.abc import Mapping

import torch

from ..spec.families import Dimensions
from ..spec.families.delta_net import NORM_EPSILON, key_heads_side_by_side
from ..spec.families.qwen3next import QWEN3NEXT, split_rates
from . import delta_net as delta_net_block
from . import gated_attention as attention_block
from .blocks import laid_out, mixture_beside_a_shared_expert, root_mean_square_norm
from .delta_net import delta_net, delta_net_channels
from .delta_rule import levels_of
from .forest import Forest
from .gated_attention import gated_attention, gated_attention_channels
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = {
    *delta_net_block.MATRICES, *attention_block.MATRICES, "router", "shared_router", "shared_gate", "shared_up", "shared_down", "output",
}  # fmt: skip


def window(dimensions: Dimensions) -> int:
    """Tokens that a convolution looks at, the current one included."""
    return dimensions["d_conv"]


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token."""
    experts = dimensions["n_expert"] * max(2 * dimensions["n_ff_expert"], dimensions["n_embd"])
    return max(delta_net_channels(dimensions), gated_attention_channels(dimensions), experts, 2 * dimensions["n_ff_shared"])


def heads(dimensions: Dimensions) -> int:
    """Heads of the widest query-by-key form."""
    return dimensions["n_head"]


def prepared(dimensions: Dimensions, weights: Tensors) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them (`laid_out`), those to beta and to the step apart; experts stay as they are."""
    apart = {}
    for name, weight in weights.items():
        place, _, kind = name.rpartition(".")
        if kind == "rates_projection":
            apart[f"{place}.beta_projection"], apart[f"{place}.step_projection"] = split_rates(dimensions, weight)
        else:
            apart[name] = weight
    return laid_out(apart, MATRICES)


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None = None) -> torch.Tensor:
    """The hidden state of every node before the final norm; float64 [nodes, n_embd].

    trace  takes down the states of its logs, as `delta_net` and `gated_attention` say
    """
    attention_layers, key_heads = QWEN3NEXT.attention_layers(dimensions), key_heads_side_by_side(dimensions)
    levels = levels_of(forest)
    hidden = weights["token_embedding"].index_select(0, forest.tokens)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        normed = root_mean_square_norm(hidden, weights[prefix + "input_norm"], NORM_EPSILON)
        if layer in attention_layers:
            hidden = hidden + gated_attention(dimensions, weights, prefix, normed, forest, layer, trace)
        else:
            hidden = hidden + delta_net(dimensions, weights, prefix, normed, key_heads, forest, levels, layer, trace)
        normed = root_mean_square_norm(hidden, weights[prefix + "ffn_norm"], NORM_EPSILON)
        hidden = hidden + mixture_beside_a_shared_expert(normed, weights, prefix, "shared_router")
    return hidden


def final_norm(weights: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    """The norm before the output projection; float64 [nodes, n_embd]."""
    return root_mean_square_norm(hidden, weights["output_norm"], NORM_EPSILON)
