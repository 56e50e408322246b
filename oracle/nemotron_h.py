"""Nemotron-H in float64: Mamba-2 layers as masked quadratic forms, attention as a masked softmax, MLPs token by token.

Rules
- Attention knows no positions: only the mask says what came before.
- A Mamba-2 layer is the oracle's own mamba2 mixer.
Source: Transformers' NemotronHForCausalLM for names and the order of parts.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.mamba2 import mixer_dimensions
from ..spec.families.nemotron_h import ATTENTION, NEMOTRON_H, NORM_EPSILON, mlp_layers
from . import grouped_attention as grouped_attention_block
from . import mamba2
from .blocks import root_mean_square_norm
from .forest import Forest
from .grouped_attention import grouped_attention
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = (*grouped_attention_block.MATRICES, "mlp_up", "mlp_down")


def window(dimensions: Dimensions) -> int:
    """Tokens that a convolution looks at, the current one included."""
    return mamba2.window(dimensions)


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token."""
    return max(mamba2.channels(mixer_dimensions(dimensions)), dimensions["n_ff"])


def heads(dimensions: Dimensions) -> int:
    """Heads of the widest query-by-key form."""
    return max(dimensions["n_head"], dimensions["n_head_ssm"])


def prepared(dimensions: Dimensions, weights: Tensors) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them, as mamba2 does."""
    return mamba2.prepared(mixer_dimensions(dimensions), weights, MATRICES)


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None = None) -> torch.Tensor:
    """The hidden state of every node before the final norm; float64 [nodes, n_embd].

    trace  takes down the states of its logs: conv and recurrent as in mamba2, or attention [n_head_kv, head_dim] a token
    """
    attention, mlp, of_mixer = NEMOTRON_H.attention_layers(dimensions), mlp_layers(dimensions), mixer_dimensions(dimensions)
    hidden = weights["token_embedding"].index_select(0, forest.tokens)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        normed = root_mean_square_norm(hidden, weights[prefix + "norm"], NORM_EPSILON)
        if layer in attention:
            attended = grouped_attention(ATTENTION, dimensions, weights, prefix, normed, forest, layer, trace)
            part = attended @ weights[prefix + "out_projection"]
        elif layer in mlp:
            part = functional.relu(normed @ weights[prefix + "mlp_up"]).square() @ weights[prefix + "mlp_down"]
        else:
            part = mamba2.mixer(of_mixer, weights, prefix, normed, forest, layer, trace)
        hidden = hidden + part
    return hidden


def final_norm(weights: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    """The norm before the output projection; float64 [nodes, n_embd]."""
    return root_mean_square_norm(hidden, weights["output_norm"], NORM_EPSILON)
