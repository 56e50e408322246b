"""mamba2: a pure recurrent model (Mamba-2), every layer a causal convolution and a state-space scan.

The weights are drawn so that every state row shows: B, C and x lean to one side (a positive convolution bias), so that no token leaves the
recurrent state alone; decays halve a state in about two to four tokens, so that a state one token late differs; each mixer outweighs
what passes by it. tests/quality/test_sensitivity.py holds them to it.

Sources: Dao and Gu 2024 (arXiv:2405.21060); Transformers' Mamba2ForCausalLM; llama.cpp's src/models/mamba2.cpp and mamba-base.cpp.
"""

import math
from typing import Any

import numpy as np

from ..errors import UsageError
from ..state_sizes import StateLayers
from .family import Dimensions, Family, GgufTensor, RowWidths, TensorFact, Weights
from .model_ends import MODEL_ENDS_GGUF, model_ends, model_gguf_metadata

NORM_EPSILON = 1e-5


def mixer_dimensions(dimensions: Dimensions) -> dict[str, int]:
    """A hybrid's dimensions of its Mamba-2 mixers in this family's names: their `n_head` is the hybrid's `n_head_ssm`."""
    return {name: dimensions[name] for name in ("n_embd", "d_conv", "d_inner", "d_state", "n_group")} | {"n_head": dimensions["n_head_ssm"]}


def convolution_channels(dimensions: Dimensions) -> int:
    """Channels of the causal convolution: x, B and C side by side."""
    return dimensions["d_inner"] + 2 * dimensions["n_group"] * dimensions["d_state"]


def mixer_row_widths(dimensions: Dimensions) -> RowWidths:
    """The widths of the state rows of one Mamba-2 layer."""
    return RowWidths((dimensions["d_conv"] - 1) * convolution_channels(dimensions), dimensions["d_state"] * dimensions["d_inner"])


def mixer_state(dimensions: Dimensions) -> dict[str, int]:
    """The dimensions that a Mamba-2 layer's state depends on."""
    return {name: dimensions[name] for name in ("d_inner", "d_state", "n_group", "d_conv")}


def _check(dimensions: Dimensions) -> None:
    if dimensions["d_inner"] % dimensions["n_head"] or dimensions["n_head"] % dimensions["n_group"]:
        raise UsageError("mamba2 needs d_inner divisible by n_head, and n_head divisible by n_group")
    if dimensions["d_inner"] % dimensions["n_embd"]:
        raise UsageError("mamba2 needs d_inner divisible by n_embd")


def mixer_tensors(
    dimensions: Dimensions, prefix: str, in_gain: float, out_gain: float, a_log_least: float, has_gated_norm: bool = True
) -> list[TensorFact]:
    """The weights of one Mamba-2 layer, its norm included.

    in_gain, out_gain  root mean square of what the projections make of inputs of 1
    a_log_least        a_log is drawn from here to 0.9 above
    has_gated_norm     False: what is gated goes into the out-projection as it is
    """
    n_embd, d_inner, n_head = dimensions["n_embd"], dimensions["d_inner"], dimensions["n_head"]
    channels = convolution_channels(dimensions)
    facts = [
        TensorFact(prefix + "norm", (n_embd,), "normal", 0.1, 1.0),
        TensorFact(prefix + "in_projection", (d_inner + channels + n_head, n_embd), "normal", in_gain / math.sqrt(n_embd)),
        TensorFact(prefix + "convolution", (channels, dimensions["d_conv"]), "normal", 0.7),
        TensorFact(prefix + "convolution_bias", (channels,), "normal", 0.05, 0.7),
        TensorFact(prefix + "dt_bias", (n_head,), "uniform", 0.7, 1.0),
        TensorFact(prefix + "a_log", (n_head,), "uniform", 0.9, a_log_least),
        TensorFact(prefix + "d", (n_head,), "normal", 0.1, 0.5),
        TensorFact(prefix + "out_projection", (n_embd, d_inner), "normal", out_gain / math.sqrt(d_inner)),
    ]
    if has_gated_norm:
        facts.append(TensorFact(prefix + "gated_norm", (d_inner,), "normal", 0.1, 1.0))
    return facts


def _tensors(dimensions: Dimensions) -> tuple[TensorFact, ...]:
    facts = model_ends(dimensions, 1.0)
    for layer in range(dimensions["n_layer"]):
        facts += mixer_tensors(dimensions, f"layers.{layer}.", 0.7, 2.5 * min(1.6**layer, 4.0), -2.2)
    return tuple(facts)


def mixer_gguf_metadata(dimensions: Dimensions, architecture: str) -> dict[str, Any]:
    """llama.cpp's keys for the Mamba-2 layers of an architecture."""
    return {
        f"{architecture}.ssm.conv_kernel": dimensions["d_conv"],
        f"{architecture}.ssm.inner_size": dimensions["d_inner"],
        f"{architecture}.ssm.state_size": dimensions["d_state"],
        f"{architecture}.ssm.time_step_rank": dimensions["n_head"],
        f"{architecture}.ssm.group_count": dimensions["n_group"],
    }


def _gguf_metadata(dimensions: Dimensions) -> dict[str, Any]:
    return (
        model_gguf_metadata(dimensions, "mamba2")
        | {
            "mamba2.feed_forward_length": 0,
            "mamba2.attention.head_count": 0,
            "mamba2.attention.layer_norm_rms_epsilon": NORM_EPSILON,
        }
        | mixer_gguf_metadata(dimensions, "mamba2")
    )


def mixer_gguf_tensors(dimensions: Dimensions, layer: int, has_gated_norm: bool = True) -> list[GgufTensor]:
    """llama.cpp's tensors of one Mamba-2 layer, its norm included."""
    n_head, n_group = dimensions["n_head"], dimensions["n_group"]
    ours, theirs = f"layers.{layer}.", f"blk.{layer}."
    tensors = [
        GgufTensor(theirs + "attn_norm.weight", ours + "norm"),
        GgufTensor(theirs + "ssm_in.weight", ours + "in_projection"),
        GgufTensor(theirs + "ssm_conv1d.weight", ours + "convolution"),
        GgufTensor(theirs + "ssm_conv1d.bias", ours + "convolution_bias"),
        GgufTensor(theirs + "ssm_dt.bias", ours + "dt_bias"),
        GgufTensor(theirs + "ssm_a", ours + "a_log", (n_head, 1), "negative exponential"),
        GgufTensor(theirs + "ssm_d", ours + "d", (n_head, 1)),
        GgufTensor(theirs + "ssm_out.weight", ours + "out_projection"),
    ]
    if has_gated_norm:
        tensors.append(GgufTensor(theirs + "ssm_norm.weight", ours + "gated_norm", (n_group, dimensions["d_inner"] // n_group)))
    return tensors


def _gguf_tensors(dimensions: Dimensions) -> tuple[GgufTensor, ...]:
    tensors = [*MODEL_ENDS_GGUF]
    for layer in range(dimensions["n_layer"]):
        tensors += mixer_gguf_tensors(dimensions, layer)
    return tuple(tensors)


def _transformers_configuration(dimensions: Dimensions) -> dict[str, Any]:
    return {
        "vocab_size": dimensions["n_vocab"],
        "hidden_size": dimensions["n_embd"],
        "expand": dimensions["d_inner"] // dimensions["n_embd"],
        "num_heads": dimensions["n_head"],
        "head_dim": dimensions["d_inner"] // dimensions["n_head"],
        "state_size": dimensions["d_state"],
        "n_groups": dimensions["n_group"],
        "conv_kernel": dimensions["d_conv"],
        "num_hidden_layers": dimensions["n_layer"],
        "layer_norm_epsilon": NORM_EPSILON,
        "use_conv_bias": True,
        "use_bias": False,
        "tie_word_embeddings": False,
        "chunk_size": 8,
    }


def mixer_state_dict(weights: Weights, source: str, target: str, norm: str = "norm", mixer: str = "mixer") -> dict[str, np.ndarray]:
    """Transformers' weights of one Mamba-2 layer, its norm included: ours begin with `source`, theirs with `target`.

    norm, mixer  what Transformers calls the layer's norm and its mixer
    """
    state = {
        f"{target}{norm}.weight": weights[source + "norm"],
        f"{target}{mixer}.in_proj.weight": weights[source + "in_projection"],
        f"{target}{mixer}.conv1d.weight": weights[source + "convolution"][:, None, :],
        f"{target}{mixer}.conv1d.bias": weights[source + "convolution_bias"],
        f"{target}{mixer}.dt_bias": weights[source + "dt_bias"],
        f"{target}{mixer}.A_log": weights[source + "a_log"],
        f"{target}{mixer}.D": weights[source + "d"],
        f"{target}{mixer}.out_proj.weight": weights[source + "out_projection"],
    }
    if source + "gated_norm" in weights:
        state[f"{target}{mixer}.norm.weight"] = weights[source + "gated_norm"]
    return state


def _state_dict(dimensions: Dimensions, weights: Weights) -> dict[str, np.ndarray]:
    state = {
        "backbone.embeddings.weight": weights["token_embedding"],
        "backbone.norm_f.weight": weights["output_norm"],
        "lm_head.weight": weights["output"],
    }
    for layer in range(dimensions["n_layer"]):
        state |= mixer_state_dict(weights, f"layers.{layer}.", f"backbone.layers.{layer}.")
    return state


MAMBA2 = Family(
    name="mamba2",
    title="Mamba-2: pure recurrent, convolution and state-space scan in every layer",
    defaults={"n_vocab": 64, "n_embd": 32, "n_layer": 3, "d_conv": 4, "d_inner": 64, "d_state": 16, "n_head": 4, "n_group": 1},
    bounds={"n_vocab": (8, 65536), "n_layer": (1, 64), "d_conv": (2, 8)},
    check=_check,
    tensors=_tensors,
    recurrent_layers=lambda dimensions: tuple(range(dimensions["n_layer"])),
    attention_layers=lambda dimensions: (),
    row_widths=mixer_row_widths,
    state_layers=lambda dimensions: (StateLayers(dimensions["n_layer"], "mamba2", mixer_state(dimensions)),),
    doubled=("n_embd", "d_inner", "n_head"),
    gguf_metadata=_gguf_metadata,
    gguf_tensors=_gguf_tensors,
    transformers_class="Mamba2ForCausalLM",
    transformers_configuration=_transformers_configuration,
    state_dict=_state_dict,
)
