"""Qwen3.5 in float64: gated delta nets (delta_net.py), gated attention (gated_attention.py), and SwiGLU feed-forward layers.

Rules
- Positions are those of the log, the same in every part of a position.
Source: Transformers' Qwen3_5ForCausalLM for names and the order of parts.
"""

from collections.abc import Mapping

import torch

from ..spec.families import Dimensions
from ..spec.families.delta_net import NORM_EPSILON, key_heads_in_turn
from ..spec.families.qwen35 import QWEN35
from . import delta_net as delta_net_block
from . import gated_attention as attention_block
from .blocks import FEED_FORWARD_MATRICES, gated_feed_forward, laid_out, root_mean_square_norm
from .delta_net import delta_net, delta_net_channels
from .delta_rule import levels_of
from .forest import Forest
from .gated_attention import gated_attention, gated_attention_channels
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = {*delta_net_block.MATRICES, *attention_block.MATRICES, *FEED_FORWARD_MATRICES, "output"}


def window(dimensions: Dimensions) -> int:
    """Tokens that a convolution looks at, the current one included."""
    return dimensions["d_conv"]


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token."""
    return max(delta_net_channels(dimensions), gated_attention_channels(dimensions), 2 * dimensions["n_ff"])


def heads(dimensions: Dimensions) -> int:
    """Heads of the widest query-by-key form."""
    return dimensions["n_head"]


def prepared(dimensions: Dimensions, weights: Tensors) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them (`laid_out`)."""
    return laid_out(weights, MATRICES)


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None = None) -> torch.Tensor:
    """The hidden state of every node before the final norm; float64 [nodes, n_embd].

    trace  takes down the states of its logs, as `delta_net` and `gated_attention` say
    """
    attention_layers, key_heads = QWEN35.attention_layers(dimensions), key_heads_in_turn(dimensions)
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
        hidden = hidden + gated_feed_forward(normed, weights, prefix)
    return hidden


def final_norm(weights: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    """The norm before the output projection; float64 [nodes, n_embd]."""
    return root_mean_square_norm(hidden, weights["output_norm"], NORM_EPSILON)
