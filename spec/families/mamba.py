"""mamba: a pure recurrent model (Mamba-1), every layer a causal convolution and a selective scan.

Every channel has a step of its own, made in two products through a narrow one of `dt_rank` channels, and a decay rate for each of its
d_state numbers; B and C are made from the convolved channels. d_inner is twice n_embd: llama.cpp runs no other.

The weights are drawn so that every state row shows: what the convolution gives leans to one side (a positive bias), and B and C with it,
so that no token leaves the recurrent state alone; states lose about a third a token, so that one that is a token late differs; each mixer
outweighs what passes by it. tests/quality/test_sensitivity.py holds them to it.

Sources: Gu and Dao 2023 (arXiv:2312.00752); Transformers' MambaForCausalLM; llama.cpp's src/models/mamba.cpp and mamba-base.cpp.
"""

import math
from typing import Any

import numpy as np

from ..state_sizes import StateLayers
from .family import Dimensions, Family, GgufTensor, RowWidths, TensorFact, Weights
from .model_ends import MODEL_ENDS_GGUF, model_ends, model_gguf_metadata

NORM_EPSILON = 1e-5

_GGUF_NAMES = {
    "in_projection": "ssm_in.weight", "convolution": "ssm_conv1d.weight", "convolution_bias": "ssm_conv1d.bias",
    "x_projection": "ssm_x.weight", "dt_norm": "ssm_dt_norm.weight", "b_norm": "ssm_b_norm.weight", "c_norm": "ssm_c_norm.weight",
    "dt_projection": "ssm_dt.weight", "dt_bias": "ssm_dt.bias", "a_log": "ssm_a", "d": "ssm_d", "out_projection": "ssm_out.weight",
}  # fmt: skip
_TRANSFORMERS_NAMES = {
    "in_projection": "in_proj.weight", "convolution": "conv1d.weight", "convolution_bias": "conv1d.bias", "x_projection": "x_proj.weight",
    "dt_norm": "dt_layernorm.weight", "b_norm": "b_layernorm.weight", "c_norm": "c_layernorm.weight", "dt_projection": "dt_proj.weight",
    "dt_bias": "dt_proj.bias", "a_log": "A_log", "d": "D", "out_projection": "out_proj.weight",
}  # fmt: skip


def inner_channels(dimensions: Dimensions) -> int:
    """Channels of a mixer."""
    return 2 * dimensions["n_embd"]


def mixer_row_widths(dimensions: Dimensions) -> RowWidths:
    """The widths of the state rows of one Mamba-1 layer."""
    return RowWidths((dimensions["d_conv"] - 1) * inner_channels(dimensions), dimensions["d_state"] * inner_channels(dimensions))


def mixer_state(dimensions: Dimensions) -> dict[str, int]:
    """The dimensions that a Mamba-1 layer's state depends on."""
    return {"d_inner": inner_channels(dimensions), "d_state": dimensions["d_state"], "d_conv": dimensions["d_conv"]}


def mixer_tensors(dimensions: Dimensions, prefix: str, in_gain: float, out_gain: float, is_normed: bool) -> list[TensorFact]:
    """The weights of one Mamba-1 mixer, without the layer's norm.

    in_gain, out_gain  root mean square of what the projections make of inputs of 1
    is_normed          step, B and C go through norms of their own
    """
    n_embd, d_inner, d_state, rank = dimensions["n_embd"], inner_channels(dimensions), dimensions["d_state"], dimensions["dt_rank"]
    norms = (("dt_norm", rank), ("b_norm", d_state), ("c_norm", d_state)) if is_normed else ()
    return [
        TensorFact(prefix + "in_projection", (2 * d_inner, n_embd), "normal", in_gain / math.sqrt(n_embd)),
        TensorFact(prefix + "convolution", (d_inner, dimensions["d_conv"]), "normal", 0.4),
        TensorFact(prefix + "convolution_bias", (d_inner,), "normal", 0.05, 0.7),
        TensorFact(prefix + "x_projection", (rank + 2 * d_state, d_inner), "normal", 0.7 / math.sqrt(d_inner)),
        *(TensorFact(prefix + name, (size,), "normal", 0.1, 1.0) for name, size in norms),
        TensorFact(prefix + "dt_projection", (d_inner, rank), "normal", 0.3 / math.sqrt(rank)),
        TensorFact(prefix + "dt_bias", (d_inner,), "uniform", 0.7, 1.0),
        TensorFact(prefix + "a_log", (d_inner, d_state), "uniform", 0.9, -2.0),
        TensorFact(prefix + "d", (d_inner,), "normal", 0.1, 0.5),
        TensorFact(prefix + "out_projection", (n_embd, d_inner), "normal", out_gain / math.sqrt(d_inner)),
    ]


def _tensors(dimensions: Dimensions) -> tuple[TensorFact, ...]:
    n_embd = dimensions["n_embd"]
    facts = model_ends(dimensions, 1.0)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        facts.append(TensorFact(prefix + "norm", (n_embd,), "normal", 0.1, 1.0))
        facts += mixer_tensors(dimensions, prefix, 0.7, 2.0 * min(1.5**layer, 4.0), is_normed=False)
    return tuple(facts)


def mixer_gguf_metadata(dimensions: Dimensions, architecture: str) -> dict[str, Any]:
    """llama.cpp's keys for the Mamba-1 layers of an architecture."""
    return {
        f"{architecture}.ssm.conv_kernel": dimensions["d_conv"],
        f"{architecture}.ssm.inner_size": inner_channels(dimensions),
        f"{architecture}.ssm.state_size": dimensions["d_state"],
        f"{architecture}.ssm.time_step_rank": dimensions["dt_rank"],
    }


def _gguf_metadata(dimensions: Dimensions) -> dict[str, Any]:
    return (
        model_gguf_metadata(dimensions, "mamba")
        | {
            "mamba.feed_forward_length": 0,
            "mamba.attention.head_count": 0,
            "mamba.attention.layer_norm_rms_epsilon": NORM_EPSILON,
        }
        | mixer_gguf_metadata(dimensions, "mamba")
    )


def mixer_gguf_tensors(layer: int, is_normed: bool) -> list[GgufTensor]:
    """llama.cpp's tensors of one Mamba-1 mixer."""
    return [
        GgufTensor(f"blk.{layer}.{theirs}", f"layers.{layer}.{ours}", transform="negative exponential" if ours == "a_log" else "")
        for ours, theirs in _GGUF_NAMES.items()
        if is_normed or not ours.endswith("_norm")
    ]


def _gguf_tensors(dimensions: Dimensions) -> tuple[GgufTensor, ...]:
    tensors = [*MODEL_ENDS_GGUF]
    for layer in range(dimensions["n_layer"]):
        tensors.append(GgufTensor(f"blk.{layer}.attn_norm.weight", f"layers.{layer}.norm"))
        tensors += mixer_gguf_tensors(layer, is_normed=False)
    return tuple(tensors)


def _transformers_configuration(dimensions: Dimensions) -> dict[str, Any]:
    return {
        "vocab_size": dimensions["n_vocab"],
        "hidden_size": dimensions["n_embd"],
        "expand": 2,
        "state_size": dimensions["d_state"],
        "conv_kernel": dimensions["d_conv"],
        "time_step_rank": dimensions["dt_rank"],
        "num_hidden_layers": dimensions["n_layer"],
        "layer_norm_epsilon": NORM_EPSILON,
        "use_conv_bias": True,
        "use_bias": False,
        "tie_word_embeddings": False,
    }


def mixer_state_dict(weights: Weights, source: str, target: str) -> dict[str, np.ndarray]:
    """Transformers' weights of one Mamba-1 mixer: ours begin with `source`, theirs with `target`."""
    state = {target + theirs: weights[source + ours] for ours, theirs in _TRANSFORMERS_NAMES.items() if source + ours in weights}
    return state | {target + "conv1d.weight": weights[source + "convolution"][:, None, :]}


def _state_dict(dimensions: Dimensions, weights: Weights) -> dict[str, np.ndarray]:
    state = {
        "backbone.embeddings.weight": weights["token_embedding"],
        "backbone.norm_f.weight": weights["output_norm"],
        "lm_head.weight": weights["output"],
    }
    for layer in range(dimensions["n_layer"]):
        state[f"backbone.layers.{layer}.norm.weight"] = weights[f"layers.{layer}.norm"]
        state |= mixer_state_dict(weights, f"layers.{layer}.", f"backbone.layers.{layer}.mixer.")
    return state


MAMBA = Family(
    name="mamba",
    title="Mamba-1: pure recurrent, convolution and selective scan in every layer",
    defaults={"n_vocab": 64, "n_embd": 32, "n_layer": 3, "d_conv": 4, "d_state": 8, "dt_rank": 4},
    bounds={"n_vocab": (8, 65536), "n_layer": (1, 64), "d_conv": (2, 8)},
    check=lambda dimensions: None,
    tensors=_tensors,
    recurrent_layers=lambda dimensions: tuple(range(dimensions["n_layer"])),
    attention_layers=lambda dimensions: (),
    row_widths=mixer_row_widths,
    state_layers=lambda dimensions: (StateLayers(dimensions["n_layer"], "mamba1", mixer_state(dimensions)),),
    doubled=("n_embd",),
    gguf_metadata=_gguf_metadata,
    gguf_tensors=_gguf_tensors,
    transformers_class="MambaForCausalLM",
    transformers_configuration=_transformers_configuration,
    state_dict=_state_dict,
)
