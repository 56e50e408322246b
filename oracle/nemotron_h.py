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
from ..spec.families.family import head_size
from ..spec.families.mamba2 import mixer_dimensions
from ..spec.families.nemotron_h import NEMOTRON_H, NORM_EPSILON, mlp_layers
from . import mamba2
from .blocks import masked_attention, root_mean_square_norm
from .forest import Forest
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = ("q_projection", "k_projection", "v_projection", "mlp_up", "mlp_down")


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
    """The weights as the forward uses them: those of Mamba-2 layers as mamba2 does, and matrices [in, out]."""
    result = mamba2.prepared(mixer_dimensions(dimensions), weights)
    return result | {name: weight.T.contiguous() for name, weight in weights.items() if name.rsplit(".", 1)[-1] in MATRICES}


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
            part = _attention(dimensions, weights, prefix, normed, forest, layer, trace)
        elif layer in mlp:
            part = functional.relu(normed @ weights[prefix + "mlp_up"]).square() @ weights[prefix + "mlp_down"]
        else:
            part = mamba2.mixer(of_mixer, weights, prefix, normed, forest, layer, trace)
        hidden = hidden + part
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
    return masked_attention(query, key, value, forest) @ weights[prefix + "out_projection"]
