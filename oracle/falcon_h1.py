"""Falcon-H1 in float64: in every layer a masked quadratic form and a masked softmax of the same inputs, added; then SwiGLU.

Rules
- The mixer is the oracle's own mamba2 mixer; without `ssm_norm` it has no gated norm.
- Keys and queries are rotated by position.
Source: Transformers' FalconH1ForCausalLM for names and the order of parts; its multipliers are in the weights.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.falcon_h1 import NORM_EPSILON, ROPE_THETA
from ..spec.families.family import head_size
from ..spec.families.mamba2 import mixer_dimensions
from . import mamba2
from .blocks import masked_attention, root_mean_square_norm, rotated
from .forest import Forest
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = ("q_projection", "k_projection", "v_projection", "attention_out", "ffn_gate", "ffn_up", "ffn_down")


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
    """The weights as the forward uses them: those of the mixers as mamba2 does, and matrices [in, out]."""
    result = mamba2.prepared(mixer_dimensions(dimensions), weights)
    return result | {name: weight.T.contiguous() for name, weight in weights.items() if name.rsplit(".", 1)[-1] in MATRICES}


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
        hidden = hidden + mixed + _attention(dimensions, weights, prefix, normed, forest, layer, trace)
        normed = root_mean_square_norm(hidden, weights[prefix + "ffn_norm"], NORM_EPSILON)
        inner = functional.silu(normed @ weights[prefix + "ffn_gate"]) * (normed @ weights[prefix + "ffn_up"])
        hidden = hidden + inner @ weights[prefix + "ffn_down"]
    return hidden


def final_norm(weights: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    """The norm before the output projection; float64 [nodes, n_embd]."""
    return root_mean_square_norm(hidden, weights["output_norm"], NORM_EPSILON)


def _attention(
    dimensions: Dimensions, weights: Tensors, prefix: str, x: torch.Tensor, forest: Forest, layer: int, trace: Trace | None
) -> torch.Tensor:
    n_head, n_head_kv, size = dimensions["n_head"], dimensions["n_head_kv"], head_size(dimensions)
    query = (x @ weights[prefix + "q_projection"]).view(-1, n_head, size)
    key = (x @ weights[prefix + "k_projection"]).view(-1, n_head_kv, size)
    value = (x @ weights[prefix + "v_projection"]).view(-1, n_head_kv, size)
    if trace is not None:
        trace.attention(layer, key, value)
    query, key = rotated(query, forest.depths, ROPE_THETA), rotated(key, forest.depths, ROPE_THETA)
    return masked_attention(query, key, value, forest) @ weights[prefix + "attention_out"]
