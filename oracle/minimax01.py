"""MiniMax-01 in float64: lightning attention as a masked quadratic form, softmax attention as a masked softmax, all experts of every token.

Rules
- Lightning attention is the oracle's own masked quadratic form of Mamba-2 with a step of 1 and decays that depend on head and layer alone.
- Only the first n_rot channels of a head are rotated.
Source: Transformers' MiniMaxForCausalLM for names and the order of parts.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.minimax01 import ATTENTION, MINIMAX01, NORM_EPSILON, RESIDUAL_SCALE, inner_channels, rates
from . import grouped_attention as grouped_attention_block
from .blocks import expert_mixture, laid_out, root_mean_square_norm
from .forest import Forest
from .grouped_attention import grouped_attention
from .mamba2 import masked_quadratic_form, states_after
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = (*grouped_attention_block.MATRICES, "qkv_projection", "gate_projection", "router", "output")


def window(dimensions: Dimensions) -> int:
    """There is no convolution: a token looks at itself."""
    return 1


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token."""
    return max(3 * inner_channels(dimensions), dimensions["n_expert"] * (2 * dimensions["n_ff"] + dimensions["n_embd"]))


def heads(dimensions: Dimensions) -> int:
    """Heads of the widest query-by-key form."""
    return dimensions["n_head"]


def prepared(dimensions: Dimensions, weights: Tensors) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them (`laid_out`); experts stay as they are."""
    return laid_out(weights, MATRICES)


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None = None) -> torch.Tensor:
    """The hidden state of every node before the final norm; float64 [nodes, n_embd].

    trace  takes down the states of its logs: recurrent [heads, head_dim, head_dim], the key's channels last, or attention
           [n_head_kv, head_dim] a token, K before its rotation
    """
    attention_layers = MINIMAX01.attention_layers(dimensions)
    hidden = weights["token_embedding"].index_select(0, forest.tokens)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        hidden = root_mean_square_norm(hidden, weights[prefix + "input_norm"], NORM_EPSILON)
        if layer in attention_layers:
            mixed = grouped_attention(ATTENTION, dimensions, weights, prefix, hidden, forest, layer, trace)
        else:
            mixed = _lightning_attention(dimensions, weights, prefix, hidden, forest, layer, trace)
        hidden = RESIDUAL_SCALE * hidden + mixed @ weights[prefix + "out_projection"]
        hidden = root_mean_square_norm(hidden, weights[prefix + "ffn_norm"], NORM_EPSILON)
        shares = (hidden @ weights[prefix + "router"]).softmax(-1)
        experts = (weights[prefix + name] for name in ("ffn_gate", "ffn_up", "ffn_down"))
        hidden = RESIDUAL_SCALE * hidden + expert_mixture(hidden, shares, *experts)
    return hidden


def final_norm(weights: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    """The norm before the output projection; float64 [nodes, n_embd]."""
    return root_mean_square_norm(hidden, weights["output_norm"], NORM_EPSILON)


def _lightning_attention(
    dimensions: Dimensions, weights: Tensors, prefix: str, x: torch.Tensor, forest: Forest, layer: int, trace: Trace | None
) -> torch.Tensor:
    n_head, head_dim = dimensions["n_head"], dimensions["head_dim"]
    # Every head's query, key and value stand side by side.
    query, key, value = functional.silu(x @ weights[prefix + "qkv_projection"]).view(-1, n_head, 3, head_dim).unbind(2)
    value = value.reshape(-1, n_head * head_dim)
    step = x.new_ones(x.shape[0], n_head)
    decay = -torch.from_numpy(rates(dimensions, layer)) * step
    if trace is not None:
        trace.recurrent(layer, states_after(value, step, decay, key, trace))
    y = masked_quadratic_form(value, step, decay, key, query, forest)
    y = root_mean_square_norm(y, weights[prefix + "lightning_norm"], NORM_EPSILON)
    return y * (x @ weights[prefix + "gate_projection"]).sigmoid()
