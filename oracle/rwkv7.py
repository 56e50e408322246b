"""RWKV-7 in float64: token shifts as window sums, the generalised delta rule multiplied out over all paths at once (wkv.py).

Source: the `rwkv` package's RWKV_x070 class for the order of parts.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.rwkv7 import BLENDS, DECAY_LEAST
from .blocks import windows
from .delta_rule import Levels, levels_of
from .forest import Forest
from .rwkv import blended, final_norm, head_norm, heads, layer_norm, prepared, window
from .trace import Trace
from .wkv import wkv7

Tensors = Mapping[str, torch.Tensor]

__all__ = ["channels", "final_norm", "heads", "hidden_states", "prepared", "window"]


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token; of the states, a quarter stands for all, since only those of one depth are held."""
    state = dimensions["n_embd"] * dimensions["wkv_head_size"]
    return max(state // 4, 2 * BLENDS * dimensions["n_embd"], 2 * dimensions["n_ff"])


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None = None) -> torch.Tensor:
    """The hidden state of every node before the final norm; float64 [nodes, n_embd].

    trace  takes down the states of its logs: conv [n_embd, 2], the inputs of time mix and channel mix, and recurrent [heads, value
           channels, key channels]
    """
    levels = levels_of(forest)
    hidden = weights["token_embedding"].index_select(0, forest.tokens)
    first_value = None
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        time_input = layer_norm(hidden, weights, prefix + "time_mix_norm")
        mixed, first_value, states = _time_mix(dimensions, weights, prefix, time_input, first_value, forest, levels, trace)
        hidden = hidden + mixed
        channel_input = layer_norm(hidden, weights, prefix + "channel_mix_norm")
        hidden = hidden + _channel_mix(weights, prefix, channel_input, forest)
        if trace is not None:
            trace.token_shift(layer, time_input, channel_input)
            trace.recurrent(layer, states)
    return hidden


def _time_mix(
    dimensions: Dimensions,
    weights: Tensors,
    prefix: str,
    x: torch.Tensor,
    first_value: torch.Tensor | None,
    forest: Forest,
    levels: Levels,
    trace: Trace | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mixer's output, the values of layer 0 (None when this is it), and the states of the trace's logs."""
    shape = (-1, dimensions["n_embd"] // dimensions["wkv_head_size"], dimensions["wkv_head_size"])
    before = windows(x, forest, 1, 1)[0]
    for_receptance, for_decay, for_key, for_value, for_rate, for_gate = blended(x, before, weights[prefix + "blends"][:, None])
    receptance = (for_receptance @ weights[prefix + "receptance_projection"]).view(shape)
    log_decay = weights[prefix + "decay_base"] + (for_decay @ weights[prefix + "decay_down"]).tanh() @ weights[prefix + "decay_up"]
    rate = _squashed(weights, prefix, "rate", for_rate)
    key = for_key @ weights[prefix + "key_projection"]
    removal = functional.normalize((key * weights[prefix + "key_removal"]).view(shape), dim=-1)
    key = (key * (1 + (rate - 1) * weights[prefix + "key_rate"])).view(shape)
    value = for_value @ weights[prefix + "value_projection"]
    if first_value is None:
        first_value = value
    else:
        value = blended(value, first_value, _squashed(weights, prefix, "value_residual", for_value))
    values = value.view(shape)
    decay = (-DECAY_LEAST * log_decay.sigmoid()).exp().view(shape)
    y, states = wkv7(receptance, key, values, decay, removal, rate.view(shape), levels, None if trace is None else trace.nodes)
    own = (receptance * key * weights[prefix + "first"].view(shape[1:])).sum(-1, keepdim=True) * values
    gate = (for_gate @ weights[prefix + "gate_down"]).sigmoid() @ weights[prefix + "gate_up"]
    mixed = (head_norm(weights, prefix, y) + own.flatten(1)) * gate
    return mixed @ weights[prefix + "out_projection"], first_value, states


def _squashed(weights: Tensors, prefix: str, name: str, x: torch.Tensor) -> torch.Tensor:
    """The logistic function of a base and a projection in two steps."""
    return (weights[f"{prefix}{name}_base"] + x @ weights[f"{prefix}{name}_down"] @ weights[f"{prefix}{name}_up"]).sigmoid()


def _channel_mix(weights: Tensors, prefix: str, x: torch.Tensor, forest: Forest) -> torch.Tensor:
    key = blended(x, windows(x, forest, 1, 1)[0], weights[prefix + "channel_blend_key"]) @ weights[prefix + "channel_key_projection"]
    return key.relu().square() @ weights[prefix + "channel_value_projection"]
