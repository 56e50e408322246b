"""LFM2 in float64, with a window of attention or without: short convolutions as window sums, attention as a masked softmax.

Rules
- Positions are those of the log, from 0: rotary embedding is relative, so a shifted sequence has the same outputs.
- Each half of a head's channels is rotated against the other (the form of GPT-NeoX).
Source: Transformers' Lfm2ForCausalLM for names and the order of parts.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.family import head_size
from ..spec.families.lfm2 import LFM2, NORM_EPSILON, ROPE_THETA, attention_window
from .blocks import causal_convolution, laid_out, masked_attention, root_mean_square_norm, rotated
from .forest import Forest
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = (
    "in_projection", "out_projection", "q_projection", "k_projection", "v_projection", "ffn_gate", "ffn_up", "ffn_down", "output",
)  # fmt: skip


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
        operator = _attention if layer in attention_layers else _short_convolution
        normed = root_mean_square_norm(hidden, weights[prefix + "operator_norm"], NORM_EPSILON)
        hidden = hidden + operator(dimensions, weights, prefix, normed, forest, layer, trace)
        normed = root_mean_square_norm(hidden, weights[prefix + "ffn_norm"], NORM_EPSILON)
        inner = functional.silu(normed @ weights[prefix + "ffn_gate"]) * (normed @ weights[prefix + "ffn_up"])
        hidden = hidden + inner @ weights[prefix + "ffn_down"]
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
    return (after * causal_convolution(inputs, weights[prefix + "convolution"], forest)) @ weights[prefix + "out_projection"]


def _attention(
    dimensions: Dimensions, weights: Tensors, prefix: str, x: torch.Tensor, forest: Forest, layer: int, trace: Trace | None
) -> torch.Tensor:
    n_head, n_head_kv, size = dimensions["n_head"], dimensions["n_head_kv"], head_size(dimensions)
    query = root_mean_square_norm((x @ weights[prefix + "q_projection"]).view(-1, n_head, size), weights[prefix + "q_norm"], NORM_EPSILON)
    key = root_mean_square_norm((x @ weights[prefix + "k_projection"]).view(-1, n_head_kv, size), weights[prefix + "k_norm"], NORM_EPSILON)
    value = (x @ weights[prefix + "v_projection"]).view(-1, n_head_kv, size)
    if trace is not None:
        trace.attention(layer, key, value)
    query, key = rotated(query, forest.depths, ROPE_THETA), rotated(key, forest.depths, ROPE_THETA)
    return masked_attention(query, key, value, forest, attention_window(dimensions)) @ weights[prefix + "out_projection"]
