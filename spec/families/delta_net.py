"""Facts of a gated delta net with a causal convolution over q, k and v: what the families with such layers share.

The weights are drawn so that every state row shows: a state loses about a third a token, so that one that is a token late differs. And so
that rounding does not: a delta net's output can be close to zero, and the norm after it would enlarge its rounding errors without bound;
convolutions are small, so that values are, and the norm's epsilon is the bound.
Sources: Yang, Kautz and Hatamizadeh 2024 (gated delta networks, arXiv:2412.06464); llama.cpp's src/models/delta-net-base.cpp.
"""

import math
from typing import Any

import numpy as np

from ..state_sizes import StateLayers
from .family import Dimensions, GgufTensor, RowWidths, TensorFact

NORM_EPSILON = 1e-6
"""Of every norm, that of q and k to unit length included (where Transformers has no other)."""

STATE_DICT_NAMES = {
    "qkv_projection": "in_proj_qkv.weight", "gate_projection": "in_proj_z.weight", "beta_projection": "in_proj_b.weight",
    "step_projection": "in_proj_a.weight", "convolution": "conv1d.weight", "dt_bias": "dt_bias", "a_log": "A_log",
    "gated_norm": "norm.weight", "out_projection": "out_proj.weight",
}  # fmt: skip
"""What Transformers calls the weights of a layer."""

GGUF_NAMES = {
    "qkv_projection": "attn_qkv.weight", "gate_projection": "attn_gate.weight", "beta_projection": "ssm_beta.weight",
    "step_projection": "ssm_alpha.weight", "convolution": "ssm_conv1d.weight", "dt_bias": "ssm_dt.bias", "a_log": "ssm_a",
    "gated_norm": "ssm_norm.weight", "out_projection": "ssm_out.weight",
}  # fmt: skip
"""What llama.cpp calls them."""


def inner_channels(dimensions: Dimensions) -> int:
    """Channels of all value heads."""
    return dimensions["n_value_head"] * dimensions["d_state"]


def convolution_channels(dimensions: Dimensions) -> int:
    """Channels of the causal convolution: q, k and v side by side."""
    return 2 * dimensions["n_group"] * dimensions["d_state"] + inner_channels(dimensions)


def key_heads_in_turn(dimensions: Dimensions) -> tuple[int, ...]:
    """Key heads in the order in which they serve value heads, beginning again after the last: value head h by key head h modulo n_group."""
    return tuple(range(dimensions["n_group"]))


def key_heads_side_by_side(dimensions: Dimensions) -> tuple[int, ...]:
    """The same where neighbouring value heads share a key head."""
    return tuple(head * dimensions["n_group"] // dimensions["n_value_head"] for head in range(dimensions["n_value_head"]))


def grouped_by_key_head(dimensions: Dimensions, array: np.ndarray) -> np.ndarray:
    """The first axis's value heads, in turn of their key heads here, side by side for every key head."""
    heads = array.reshape(-1, dimensions["n_group"], array.shape[0] // dimensions["n_value_head"], *array.shape[1:])
    return np.asarray(heads.swapaxes(0, 1).reshape(array.shape))


def delta_net_tensors(dimensions: Dimensions, prefix: str, out_scale: float) -> list[TensorFact]:
    """The weights of one layer but its norm; `out_scale` is the size of its output against its input's."""
    n_embd, n_value_head = dimensions["n_embd"], dimensions["n_value_head"]
    d_inner, channels = inner_channels(dimensions), convolution_channels(dimensions)
    scale = 1 / math.sqrt(n_embd)
    return [
        TensorFact(prefix + "qkv_projection", (channels, n_embd), "normal", 1 * scale),
        TensorFact(prefix + "gate_projection", (d_inner, n_embd), "normal", scale),
        TensorFact(prefix + "beta_projection", (n_value_head, n_embd), "normal", 0.7 * scale),
        TensorFact(prefix + "step_projection", (n_value_head, n_embd), "normal", 0.7 * scale),
        TensorFact(prefix + "convolution", (channels, dimensions["d_conv"]), "normal", 0.02),
        TensorFact(prefix + "dt_bias", (n_value_head,), "uniform", 0.7, 0.3),
        TensorFact(prefix + "a_log", (n_value_head,), "uniform", 0.7, -1.2),
        TensorFact(prefix + "gated_norm", (dimensions["d_state"],), "uniform", 0.4, 0.8),
        TensorFact(prefix + "out_projection", (n_embd, d_inner), "normal", out_scale / math.sqrt(d_inner)),
    ]


def delta_net_gguf_metadata(dimensions: Dimensions, architecture: str) -> dict[str, Any]:
    return {
        f"{architecture}.ssm.conv_kernel": dimensions["d_conv"],
        f"{architecture}.ssm.inner_size": inner_channels(dimensions),
        f"{architecture}.ssm.state_size": dimensions["d_state"],
        f"{architecture}.ssm.time_step_rank": dimensions["n_value_head"],
        f"{architecture}.ssm.group_count": dimensions["n_group"],
    }


def delta_net_gguf_tensors(layer: int) -> list[GgufTensor]:
    return [
        GgufTensor(f"blk.{layer}.{theirs}", f"layers.{layer}.{ours}", transform="negative exponential" if ours == "a_log" else "")
        for ours, theirs in GGUF_NAMES.items()
    ]


def delta_net_configuration(dimensions: Dimensions) -> dict[str, Any]:
    """Keyword arguments of a Transformers configuration."""
    return {
        "linear_conv_kernel_dim": dimensions["d_conv"],
        "linear_key_head_dim": dimensions["d_state"],
        "linear_value_head_dim": dimensions["d_state"],
        "linear_num_key_heads": dimensions["n_group"],
        "linear_num_value_heads": dimensions["n_value_head"],
    }


def delta_net_state(dimensions: Dimensions, name: str, array: np.ndarray) -> np.ndarray:
    """A weight in Transformers' form: value heads, in turn of their key heads here, grouped by key head; convolutions with an axis of one."""
    if name in ("gate_projection", "beta_projection", "step_projection", "dt_bias", "a_log"):
        return grouped_by_key_head(dimensions, array)
    if name in ("qkv_projection", "convolution"):
        key_channels = 2 * dimensions["n_group"] * dimensions["d_state"]
        array = np.concatenate([array[:key_channels], grouped_by_key_head(dimensions, array[key_channels:])])
        return array[:, None, :] if name == "convolution" else array
    return grouped_by_key_head(dimensions, array.T).T if name == "out_projection" else array


def delta_net_row_widths(dimensions: Dimensions) -> RowWidths:
    return RowWidths((dimensions["d_conv"] - 1) * convolution_channels(dimensions), dimensions["d_state"] * inner_channels(dimensions))


def delta_net_state_layers(dimensions: Dimensions, count: int) -> StateLayers:
    kept = {"d_inner": inner_channels(dimensions)} | {name: dimensions[name] for name in ("d_state", "n_group", "d_conv")}
    return StateLayers(count, "gated_delta_net", kept)
