"""RWKV-6 in float64: token shifts as window sums, the recurrence multiplied out over all paths at once (wkv.py).

Source: the `rwkv` package's RWKV class (version 6.0) for the order of parts.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.rwkv6 import BLENDS
from .blocks import windows
from .delta_rule import Levels, levels_of
from .forest import Forest
from .rwkv import blended, final_norm, head_norm, heads, layer_norm, prepared, window
from .trace import Trace
from .wkv import wkv6

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
