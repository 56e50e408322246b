"""Jamba in float64: Mamba-1 layers as masked forms, attention as a masked softmax, a gated feed-forward layer after each.

Rules
- Attention knows no positions: only the mask says what came before.
- A Mamba-1 layer is the oracle's own mamba mixer, with norms of step, B and C.
Source: Transformers' JambaForCausalLM for names and the order of parts.
"""

from collections.abc import Mapping

import torch

from ..spec.families import Dimensions
from ..spec.families.jamba import ATTENTION, JAMBA
from ..spec.families.mamba import NORM_EPSILON
from . import grouped_attention as grouped_attention_block
from . import mamba
from .blocks import FEED_FORWARD_MATRICES, gated_feed_forward, laid_out, root_mean_square_norm
from .forest import Forest
from .grouped_attention import grouped_attention
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = (*grouped_attention_block.MATRICES, "attention_out_projection", *FEED_FORWARD_MATRICES)


def window(dimensions: Dimensions) -> int:
    """Tokens that a convolution looks at, the current one included."""
    return mamba.window(dimensions)


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token."""
    return max(mamba.channels(dimensions), 2 * dimensions["n_ff"])


def heads(dimensions: Dimensions) -> int:
    """Heads of the widest query-by-key form."""
    return dimensions["n_head"]


def prepared(dimensions: Dimensions, weights: Tensors) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them (`laid_out`)."""
    return laid_out(weights, (*mamba.MATRICES, *MATRICES))


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None = None) -> torch.Tensor:
    """The hidden state of every node before the final norm; float64 [nodes, n_embd].

    trace  takes down the states of its logs: conv and recurrent as in mamba, or attention [n_head_kv, head_dim] a token
    """
    attention_layers = JAMBA.attention_layers(dimensions)
    hidden = weights["token_embedding"].index_select(0, forest.tokens)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        normed = root_mean_square_norm(hidden, weights[prefix + "input_norm"], NORM_EPSILON)
        if layer in attention_layers:
            attended = grouped_attention(ATTENTION, dimensions, weights, prefix, normed, forest, layer, trace)
            hidden = hidden + attended @ weights[prefix + "attention_out_projection"]
        else:
            hidden = hidden + mamba.mixer(dimensions, weights, prefix, normed, forest, layer, trace)
        normed = root_mean_square_norm(hidden, weights[prefix + "ffn_norm"], NORM_EPSILON)
        hidden = hidden + gated_feed_forward(normed, weights, prefix)
    return hidden


def final_norm(weights: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    """The norm before the output projection; float64 [nodes, n_embd]."""
    return root_mean_square_norm(hidden, weights["output_norm"], NORM_EPSILON)
