"""What the recomputes of RWKV-6 and RWKV-7 share: weights, norms with a bias, blends with the token before.

Source: the `rwkv` package's RWKV and RWKV_x070 classes for the order of parts.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.rwkv import HEAD_NORM_EPSILON, NORM_EPSILON

Tensors = Mapping[str, torch.Tensor]
UNTURNED = ("token_embedding", "blends")


def window(dimensions: Dimensions) -> int:
    """Tokens that a token shift looks at, the current one included."""
    return 2


def heads(dimensions: Dimensions) -> int:
    """Heads of the widest query-by-key form: there is none."""
    return 1


def prepared(dimensions: Dimensions, weights: Tensors) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them: matrices [in, out], alone or stacked, and embeddings after their norm."""
    result = {}
    for name, weight in weights.items():
        is_matrix = weight.dim() > 1 and name.rsplit(".", 1)[-1] not in UNTURNED
        result[name] = weight.transpose(-1, -2).contiguous() if is_matrix else weight
    result["token_embedding"] = layer_norm(weights["token_embedding"], weights, "embedding_norm")
    return result


def layer_norm(x: torch.Tensor, weights: Tensors, name: str) -> torch.Tensor:
    """The layer norm `name` of x, with its bias; float64 [nodes, channels]."""
    return functional.layer_norm(x, x.shape[-1:], weights[name], weights[name + "_bias"], NORM_EPSILON)


def head_norm(weights: Tensors, prefix: str, y: torch.Tensor) -> torch.Tensor:
    """The norm of every head's output by itself; float64 [nodes, heads, head size] -> [nodes, n_embd]."""
    bias = weights[prefix + "head_norm_bias"]
    return functional.group_norm(y.flatten(1), y.shape[1], weights[prefix + "head_norm"], bias, HEAD_NORM_EPSILON)


def blended(x: torch.Tensor, before: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """x with `share` of it replaced by `before`, channel by channel."""
    return x + (before - x) * share


def final_norm(weights: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    """The norm before the output projection; float64 [nodes, n_embd]."""
    return layer_norm(hidden, weights, "output_norm")
