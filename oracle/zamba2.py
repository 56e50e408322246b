"""Zamba2 in float64: Mamba-2 layers as masked quadratic forms, and shared blocks of a masked softmax and an MLP.

Rules
- A mixer is the oracle's own mamba2 mixer; in a hybrid layer it reads the stream with the block's result added, which the stream itself
  does not keep.
- Adapters are applied as what they are: two matrices, one after the other, beside the shared one.
- Scores are scaled by 1 / sqrt(half the size of a head); keys and queries are rotated by position; the MLP's gate is a GELU with erf.
Source: Transformers' Zamba2ForCausalLM for names and the order of parts.
"""

import math
from collections.abc import Mapping

import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.mamba2 import mixer_dimensions
from ..spec.families.zamba2 import NORM_EPSILON, ROPE_THETA, block_of_use, head_size, hybrid_layers
from . import mamba2
from .blocks import masked_attention, root_mean_square_norm, rotated
from .forest import Forest
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = ("q_projection", "k_projection", "v_projection", "attention_out", "ffn_gate_up", "ffn_down", "block_projection")
ADAPTER_MATRICES = ("adapter_in", "adapter_out")


def window(dimensions: Dimensions) -> int:
    """Tokens that a convolution looks at, the current one included."""
    return mamba2.window(dimensions)


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token."""
    return max(mamba2.channels(mixer_dimensions(dimensions)), 2 * dimensions["n_ff"], 2 * dimensions["n_embd"])


def heads(dimensions: Dimensions) -> int:
    """Heads of the widest query-by-key form."""
    return max(dimensions["n_head"], dimensions["n_head_ssm"])


def prepared(dimensions: Dimensions, weights: Tensors) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them: those of the mixers as mamba2 does, and matrices [in, out]; the embedding's again as `output`."""
    result = mamba2.prepared(mixer_dimensions(dimensions), weights) | {"output": weights["token_embedding"].T.contiguous()}
    return result | {name: weight.T.contiguous() for name, weight in weights.items() if name.endswith(MATRICES + ADAPTER_MATRICES)}


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None = None) -> torch.Tensor:
    """The hidden state of every node before the final norm; float64 [nodes, n_embd].

    trace  takes down the states of its logs: conv and recurrent as in mamba2, and attention [n_head, head_dim] a token in hybrid layers, K
           before its rotation
    """
    of_mixer, block_of = mixer_dimensions(dimensions), dict(zip(hybrid_layers(dimensions), block_of_use(dimensions), strict=True))
    embedded = weights["token_embedding"].index_select(0, forest.tokens)
    hidden = embedded
    for layer in range(dimensions["n_layer"]):
        prefix, inputs = f"layers.{layer}.", hidden
        if layer in block_of:
            both = torch.cat((hidden, embedded), dim=-1)
            inputs = hidden + _block(dimensions, weights, f"blocks.{block_of[layer]}.", prefix, both, forest, layer, trace)
        normed = root_mean_square_norm(inputs, weights[prefix + "norm"], NORM_EPSILON)
        hidden = hidden + mamba2.mixer(of_mixer, weights, prefix, normed, forest, layer, trace)
    return hidden


def final_norm(weights: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    """The norm before the output projection; float64 [nodes, n_embd]."""
    return root_mean_square_norm(hidden, weights["output_norm"], NORM_EPSILON)


def _adapted(weights: Tensors, shared: str, adapter: str, x: torch.Tensor) -> torch.Tensor:
    """A shared projection with the adapter of one use."""
    return x @ weights[shared] + x @ weights[adapter + "_adapter_in"] @ weights[adapter + "_adapter_out"]


def _block(
    dimensions: Dimensions, weights: Tensors, block: str, prefix: str, both: torch.Tensor, forest: Forest, layer: int, trace: Trace | None
) -> torch.Tensor:
    """A shared block as layer `layer` uses it: of float64 [nodes, 2 * n_embd], [nodes, n_embd]. Its weights begin with `block`, the layer's own with `prefix`."""
    n_head, size = dimensions["n_head"], head_size(dimensions)
    x = root_mean_square_norm(both, weights[block + "input_norm"], NORM_EPSILON)
    query, key, value = (_adapted(weights, f"{block}{name}_projection", prefix + name, x).view(-1, n_head, size) for name in "qkv")
    if trace is not None:
        trace.attention(layer, key, value)
    query, key = rotated(query, forest.depths, ROPE_THETA), rotated(key, forest.depths, ROPE_THETA)
    # `masked_attention` scales scores by 1 / sqrt(size).
    attended = masked_attention(query * math.sqrt(2), key, value, forest) @ weights[block + "attention_out"]
    x = root_mean_square_norm(attended, weights[block + "ffn_norm"], NORM_EPSILON)
    gate, up = _adapted(weights, block + "ffn_gate_up", prefix + "ffn", x).chunk(2, dim=-1)
    return (functional.gelu(gate) * up) @ weights[block + "ffn_down"] @ weights[prefix + "block_projection"]
