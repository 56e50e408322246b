"""nemotron_h: a hybrid whose layers are one thing each: a Mamba-2 mixer, attention without rotary positions, or a squared-ReLU MLP.

Every `attention_period`-th layer, the first of them at index attention_period - 1, is attention; the layer before it is an MLP when the
period is 3 or more; the others are Mamba-2. By default the layers are M - * M - in the letters of NVIDIA's pattern. A layer is a norm,
its one part, and a residual.
The weights are drawn so that every state row shows: the Mamba-2 layers as in mamba2.py, with faster decays; attention is mild (small
queries and keys) and its values large, so that each single cell of a long log weighs in; the MLPs are small beside what passes by them.
tests/quality/test_sensitivity.py holds them to it.
Sources: NVIDIA 2025, Nemotron-H (arXiv:2504.03624); Transformers' NemotronHForCausalLM; llama.cpp's src/models/nemotron-h.cpp.
"""

import math
from typing import Any

import numpy as np

from ..errors import UsageError
from ..state_sizes import StateLayers
from .attention import Attention, attention_state, attention_tensors, head_channels
from .family import Dimensions, Family, GgufTensor, TensorFact, Weights, periodic_layers
from .mamba2 import (
    mixer_dimensions,
    mixer_gguf_metadata,
    mixer_gguf_tensors,
    mixer_row_widths,
    mixer_state,
    mixer_state_dict,
    mixer_tensors,
)
from .model_ends import MODEL_ENDS_GGUF, model_ends, model_gguf_metadata

NORM_EPSILON = 1e-5
ATTENTION = Attention()
TIME_STEP_MIN = 1e-30
"""Transformers clamps dt from below and takes the logarithm of the bound: the bound is what no dt reaches."""


def _check(dimensions: Dimensions) -> None:
    if dimensions["d_inner"] % dimensions["n_head_ssm"] or dimensions["n_head_ssm"] % dimensions["n_group"]:
        raise UsageError("nemotron_h needs d_inner divisible by n_head_ssm, and n_head_ssm divisible by n_group")
    if dimensions["n_embd"] % (2 * dimensions["n_head"]) or dimensions["n_head"] % dimensions["n_head_kv"]:
        raise UsageError("nemotron_h needs n_embd divisible by 2 * n_head, and n_head divisible by n_head_kv")


def mlp_layers(dimensions: Dimensions) -> tuple[int, ...]:
    """Indices of the layers that are an MLP, and keep no state."""
    period = dimensions["attention_period"]
    return tuple(layer for layer in range(dimensions["n_layer"]) if period >= 3 and (layer + 2) % period == 0)


def _recurrent_layers(dimensions: Dimensions) -> tuple[int, ...]:
    others = {*periodic_layers(dimensions), *mlp_layers(dimensions)}
    return tuple(layer for layer in range(dimensions["n_layer"]) if layer not in others)


def _state_layers(dimensions: Dimensions) -> tuple[StateLayers, ...]:
    return (
        StateLayers(len(_recurrent_layers(dimensions)), "mamba2", mixer_state(dimensions)),
        StateLayers(len(periodic_layers(dimensions)), "attention", attention_state(dimensions)),
    )


def _tensors(dimensions: Dimensions) -> tuple[TensorFact, ...]:
    n_embd, n_ff = dimensions["n_embd"], dimensions["n_ff"]
    scale = 1 / math.sqrt(n_embd)
    attention, mlp = periodic_layers(dimensions), mlp_layers(dimensions)
    facts = model_ends(dimensions, 1.3)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        norm = TensorFact(prefix + "norm", (n_embd,), "normal", 0.1, 1.0)
        if layer in attention:
            facts += [norm, *attention_tensors(dimensions, prefix, 0.6, 8, 2.2)]
        elif layer in mlp:
            facts += [
                norm,
                TensorFact(prefix + "mlp_up", (n_ff, n_embd), "normal", scale),
                TensorFact(prefix + "mlp_down", (n_embd, n_ff), "normal", 0.35 / math.sqrt(n_ff)),
            ]
        else:
            facts += mixer_tensors(mixer_dimensions(dimensions), prefix, 0.5, 3 * min(1.33**layer, 3.0), -1.6)
    return tuple(facts)


def _gguf_metadata(dimensions: Dimensions) -> dict[str, Any]:
    attention, mlp = periodic_layers(dimensions), mlp_layers(dimensions)
    layers = range(dimensions["n_layer"])
    # A layer without key heads and without an MLP is recurrent.
    return (
        model_gguf_metadata(dimensions, "nemotron_h")
        | {
            "nemotron_h.feed_forward_length": [dimensions["n_ff"] if layer in mlp else 0 for layer in layers],
            "nemotron_h.attention.head_count": dimensions["n_head"],
            "nemotron_h.attention.head_count_kv": [dimensions["n_head_kv"] if layer in attention else 0 for layer in layers],
            "nemotron_h.attention.key_length": head_channels(dimensions),
            "nemotron_h.attention.value_length": head_channels(dimensions),
            "nemotron_h.attention.layer_norm_epsilon": NORM_EPSILON,
            "nemotron_h.attention.layer_norm_rms_epsilon": NORM_EPSILON,
        }
        | mixer_gguf_metadata(mixer_dimensions(dimensions), "nemotron_h")
    )


def _gguf_tensors(dimensions: Dimensions) -> tuple[GgufTensor, ...]:
    tensors = [*MODEL_ENDS_GGUF]
    attention_names = {
        "norm": "attn_norm", "q_projection": "attn_q", "k_projection": "attn_k", "v_projection": "attn_v", "out_projection": "attn_output",
    }  # fmt: skip
    mlp_names = {"norm": "attn_norm", "mlp_up": "ffn_up", "mlp_down": "ffn_down"}
    attention, mlp = periodic_layers(dimensions), mlp_layers(dimensions)
    for layer in range(dimensions["n_layer"]):
        if layer in attention or layer in mlp:
            names = attention_names if layer in attention else mlp_names
            tensors += [GgufTensor(f"blk.{layer}.{theirs}.weight", f"layers.{layer}.{ours}") for ours, theirs in names.items()]
        else:
            tensors += mixer_gguf_tensors(mixer_dimensions(dimensions), layer)
    return tuple(tensors)


def _transformers_configuration(dimensions: Dimensions) -> dict[str, Any]:
    attention, mlp = periodic_layers(dimensions), mlp_layers(dimensions)
    return {
        "vocab_size": dimensions["n_vocab"],
        "hidden_size": dimensions["n_embd"],
        "layers_block_type": [
            "full_attention" if layer in attention else "mlp" if layer in mlp else "linear_attention"
            for layer in range(dimensions["n_layer"])
        ],
        "num_attention_heads": dimensions["n_head"],
        "num_key_value_heads": dimensions["n_head_kv"],
        "head_dim": head_channels(dimensions),
        "intermediate_size": dimensions["n_ff"],
        "mamba_num_heads": dimensions["n_head_ssm"],
        "mamba_head_dim": dimensions["d_inner"] // dimensions["n_head_ssm"],
        "ssm_state_size": dimensions["d_state"],
        "n_groups": dimensions["n_group"],
        "conv_kernel": dimensions["d_conv"],
        "layer_norm_epsilon": NORM_EPSILON,
        "time_step_min": TIME_STEP_MIN,
        "chunk_size": 8,
        "tie_word_embeddings": False,
    }


def _state_dict(dimensions: Dimensions, weights: Weights) -> dict[str, np.ndarray]:
    state = {
        "model.embeddings.weight": weights["token_embedding"],
        "model.norm_f.weight": weights["output_norm"],
        "lm_head.weight": weights["output"],
    }
    names = {
        "norm": "norm", "q_projection": "mixer.q_proj", "k_projection": "mixer.k_proj", "v_projection": "mixer.v_proj",
        "out_projection": "mixer.o_proj", "mlp_up": "mixer.up_proj", "mlp_down": "mixer.down_proj",
    }  # fmt: skip
    recurrent = _recurrent_layers(dimensions)
    for layer in range(dimensions["n_layer"]):
        source, target = f"layers.{layer}.", f"model.layers.{layer}."
        if layer in recurrent:
            state |= mixer_state_dict(weights, source, target)
        else:
            state |= {f"{target}{theirs}.weight": weights[source + ours] for ours, theirs in names.items() if source + ours in weights}
    return state


NEMOTRON_H = Family(
    name="nemotron_h",
    title="Nemotron-H: hybrid, each layer a Mamba-2 mixer, attention without positions, or an MLP",
    defaults={
        "n_vocab": 64, "n_embd": 32, "n_layer": 5, "n_head": 2, "n_head_kv": 1, "n_ff": 48, "d_conv": 4, "d_inner": 64, "d_state": 16,
        "n_head_ssm": 4, "n_group": 1, "attention_period": 3,
    },
    bounds={"n_vocab": (8, 65536), "n_layer": (1, 64), "d_conv": (2, 8), "attention_period": (1, 64)},
    check=_check,
    tensors=_tensors,
    recurrent_layers=_recurrent_layers,
    attention_layers=periodic_layers,
    row_widths=lambda dimensions: mixer_row_widths(mixer_dimensions(dimensions)),
    state_layers=_state_layers,
    doubled=("n_embd", "d_inner", "n_head_ssm"),
    gguf_metadata=_gguf_metadata,
    gguf_tensors=_gguf_tensors,
    transformers_class="NemotronHForCausalLM",
    transformers_configuration=_transformers_configuration,
    state_dict=_state_dict,
)  # fmt: skip
