"""Falcon-H1 in float64: in every layer a masked quadratic form and a masked softmax of the same inputs, added; then SwiGLU.

Rules
- The mixer is the oracle's own mamba2 mixer; without `ssm_norm` it has no gated norm.
- Keys and queries are rotated by position.
Source: Transformers' FalconH1ForCausalLM for names and the order of parts; its multipliers are in the weights.
"""

from collections.abc import Mapping

import torch

from ..spec.families import Dimensions
from ..spec.families.falcon_h1 import ATTENTION, NORM_EPSILON
from ..spec.families.mamba2 import mixer_dimensions
from . import grouped_attention as grouped_attention_block
from . import mamba2
from .blocks import FEED_FORWARD_MATRICES, gated_feed_forward, root_mean_square_norm
from .forest import Forest
from .grouped_attention import grouped_attention
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = (*grouped_attention_block.MATRICES, "attention_out", *FEED_FORWARD_MATRICES)


def window(dimensions: Dimensions) -> int:
    """Tokens that a convolution looks at, the current one included."""
    return mamba2.window(dimensions)


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token."""
    return max(mamba2.channels(mixer_dimensions(dimensions)), 2 * dimensions["n_ff"])


def heads(dimensions: Dimensions) -> int:
    """Heads of the widest query-by-key form."""
    return max(dimensions["n_head"], dimensions["n_head_ssm"])


def prepared(dimensions: Dimensions, weights: Tensors) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them, as mamba2 does."""
    return mamba2.prepared(mixer_dimensions(dimensions), weights, MATRICES)


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None = None) -> torch.Tensor:
    """The hidden state of every node before the final norm; float64 [nodes, n_embd].

    trace  takes down the states of its logs: conv and recurrent as in mamba2, and attention [n_head_kv, head_dim] a token, K before its rotation
    """
    of_mixer = mixer_dimensions(dimensions)
    hidden = weights["token_embedding"].index_select(0, forest.tokens)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        normed = root_mean_square_norm(hidden, weights[prefix + "norm"], NORM_EPSILON)
        mixed = mamba2.mixer(of_mixer, weights, prefix, normed, forest, layer, trace)
        attended = grouped_attention(ATTENTION, dimensions, weights, prefix, normed, forest, layer, trace)
        hidden = hidden + mixed + attended @ weights[prefix + "attention_out"]
        normed = root_mean_square_norm(hidden, weights[prefix + "ffn_norm"], NORM_EPSILON)
        hidden = hidden + gated_feed_forward(normed, weights, prefix)
    return hidden


def final_norm(weights: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    """The norm before the output projection; float64 [nodes, n_embd]."""
    return root_mean_square_norm(hidden, weights["output_norm"], NORM_EPSILON)
