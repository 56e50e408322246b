"""LFM2 in float64, with a window of attention or without: short convolutions as window sums, attention as a masked softmax.

Rules
- The projection out of a layer is the same for both kinds.
Source: Transformers' Lfm2ForCausalLM for names and the order of parts.
"""

from collections.abc import Mapping

import torch

from ..spec.families import Dimensions
from ..spec.families.lfm2 import ATTENTION, LFM2, NORM_EPSILON
from . import grouped_attention as grouped_attention_block
from .blocks import FEED_FORWARD_MATRICES, causal_convolution, gated_feed_forward, laid_out, root_mean_square_norm
from .forest import Forest
from .grouped_attention import grouped_attention
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = (*grouped_attention_block.MATRICES, *FEED_FORWARD_MATRICES, "in_projection", "output")


def window(dimensions: Dimensions) -> int:
    """Tokens that a convolution looks at, the current one included."""
    return dimensions["l_cache"]


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token."""
    return max(3 * dimensions["n_embd"], 2 * dimensions["n_ff"])


def heads(dimensions: Dimensions) -> int:
    """Heads of the widest query-by-key form."""
    return dimensions["n_head"]


def prepared(dimensions: Dimensions, weights: Tensors) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them (`laid_out`)."""
    return laid_out(weights, MATRICES)


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None = None) -> torch.Tensor:
    """The hidden state of every node before the final norm; float64 [nodes, n_embd].

    trace  takes down the states of its logs: conv [n_embd, l_cache - 1], or attention [n_head_kv, head_dim] a token, K after its norm
           and before its rotation
    """
    attention_layers = LFM2.attention_layers(dimensions)
    hidden = weights["token_embedding"].index_select(0, forest.tokens)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        normed = root_mean_square_norm(hidden, weights[prefix + "operator_norm"], NORM_EPSILON)
        if layer in attention_layers:
            mixed = grouped_attention(ATTENTION, dimensions, weights, prefix, normed, forest, layer, trace)
        else:
            mixed = _short_convolution(dimensions, weights, prefix, normed, forest, layer, trace)
        hidden = hidden + mixed @ weights[prefix + "out_projection"]
        normed = root_mean_square_norm(hidden, weights[prefix + "ffn_norm"], NORM_EPSILON)
        hidden = hidden + gated_feed_forward(normed, weights, prefix)
    return hidden


def final_norm(weights: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    """The norm before the output projection; float64 [nodes, n_embd]."""
    return root_mean_square_norm(hidden, weights["output_norm"], NORM_EPSILON)


def _short_convolution(
    dimensions: Dimensions, weights: Tensors, prefix: str, x: torch.Tensor, forest: Forest, layer: int, trace: Trace | None
) -> torch.Tensor:
    before, after, value = (x @ weights[prefix + "in_projection"]).chunk(3, dim=-1)
    inputs = before * value
    if trace is not None:
        trace.convolution(layer, inputs, dimensions["l_cache"] - 1)
    return after * causal_convolution(inputs, weights[prefix + "convolution"], forest)
