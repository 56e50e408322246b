"""RWKV-6 in float64: token shifts as window sums, the recurrence multiplied out over all paths at once (wkv.py).

Source: the `rwkv` package's RWKV class (version 6.0) for the order of parts.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.rwkv6 import BLENDS, HEAD_NORM_EPSILON, NORM_EPSILON
from .blocks import windows
from .delta_rule import Levels, levels_of
from .forest import Forest
from .trace import Trace
from .wkv import wkv6

Tensors = Mapping[str, torch.Tensor]
UNTURNED = ("token_embedding", "blends")


def window(dimensions: Dimensions) -> int:
    """Tokens that a token shift looks at, the current one included."""
    return 2


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token; of the states, a quarter stands for all, since only those of one depth are held."""
    state = dimensions["n_embd"] * dimensions["wkv_head_size"]
    return max(state // 4, 2 * BLENDS * dimensions["n_embd"], 2 * dimensions["n_ff"])


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


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None = None) -> torch.Tensor:
    """The hidden state of every node before the final norm; float64 [nodes, n_embd].

    trace  takes down the states of its logs: conv [n_embd, 2], the inputs of time mix and channel mix, and recurrent [heads, value
           channels, key channels]
    """
    levels = levels_of(forest)
    hidden = weights["token_embedding"].index_select(0, forest.tokens)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        time_input = layer_norm(hidden, weights, prefix + "time_mix_norm")
        mixed, states = _time_mix(dimensions, weights, prefix, time_input, forest, levels, trace)
        hidden = hidden + mixed
        channel_input = layer_norm(hidden, weights, prefix + "channel_mix_norm")
        hidden = hidden + _channel_mix(weights, prefix, channel_input, forest)
        if trace is not None:
            trace.token_shift(layer, time_input, channel_input)
            trace.recurrent(layer, states)
    return hidden


def final_norm(weights: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    """The norm before the output projection; float64 [nodes, n_embd]."""
    return layer_norm(hidden, weights, "output_norm")


def _time_mix(
    dimensions: Dimensions, weights: Tensors, prefix: str, x: torch.Tensor, forest: Forest, levels: Levels, trace: Trace | None
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (-1, dimensions["n_embd"] // dimensions["wkv_head_size"], dimensions["wkv_head_size"])
    before = windows(x, forest, 1, 1)[0]
    inner = (blended(x, before, weights[prefix + "blend_base"]) @ weights[prefix + "blend_down"]).tanh()
    moved = torch.einsum("nbi,bic->bnc", inner.view(len(x), BLENDS, -1), weights[prefix + "blend_up"])
    for_decay, for_key, for_value, for_receptance, for_gate = blended(x, before, weights[prefix + "blends"][:, None] + moved)
    log_decay = weights[prefix + "decay_base"] + (for_decay @ weights[prefix + "decay_down"]).tanh() @ weights[prefix + "decay_up"]
    y, states = wkv6(
        (for_receptance @ weights[prefix + "receptance_projection"]).view(shape),
        (for_key @ weights[prefix + "key_projection"]).view(shape),
        (for_value @ weights[prefix + "value_projection"]).view(shape),
        (-log_decay.exp()).exp().view(shape),
        weights[prefix + "first"].view(shape[1:]),
        levels,
        None if trace is None else trace.nodes,
    )
    gate = functional.silu(for_gate @ weights[prefix + "gate_projection"])
    return (head_norm(weights, prefix, y) * gate) @ weights[prefix + "out_projection"], states


def _channel_mix(weights: Tensors, prefix: str, x: torch.Tensor, forest: Forest) -> torch.Tensor:
    before = windows(x, forest, 1, 1)[0]
    key = blended(x, before, weights[prefix + "channel_blend_key"]) @ weights[prefix + "channel_key_projection"]
    receptance = blended(x, before, weights[prefix + "channel_blend_receptance"]) @ weights[prefix + "channel_receptance_projection"]
    return receptance.sigmoid() * (key.relu().square() @ weights[prefix + "channel_value_projection"])
