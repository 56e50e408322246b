"""jamba: a hybrid of Mamba-1 mixers and attention without rotary positions, each followed by a SwiGLU feed-forward layer.

Every `attention_period`-th layer, the first of them at index attention_period - 1, is attention; the others are Mamba-1 mixers whose step,
B and C go through norms of their own. Feed-forward layers are dense: Jamba's mixtures of experts stand where `num_experts` says so, and here
it says one.

The weights are drawn so that every state row shows: mixers as in mamba.py; attention is mild (small queries and keys) and its values
large, so that each single cell of a long log weighs in. tests/quality/test_sensitivity.py holds them to it.

Sources: Lieber et al. 2024 (arXiv:2403.19887); Transformers' JambaForCausalLM; llama.cpp's src/models/jamba.cpp and mamba-base.cpp.
"""

from typing import Any

import numpy as np

from ..errors import UsageError
from ..state_sizes import StateLayers
from .attention import Attention, attention_state, attention_tensors, head_channels
from .family import Dimensions, Family, GgufTensor, TensorFact, Weights, other_layers, periodic_layers
from .mamba import (
    NORM_EPSILON,
    mixer_gguf_metadata,
    mixer_gguf_tensors,
    mixer_row_widths,
    mixer_state,
    mixer_state_dict,
    mixer_tensors,
)
from .model_ends import MODEL_ENDS_GGUF, feed_forward_tensors, model_ends, model_gguf_metadata

_NAMES = {
    "input_norm": ("attn_norm", "input_layernorm"),
    "q_projection": ("attn_q", "self_attn.q_proj"),
    "k_projection": ("attn_k", "self_attn.k_proj"),
    "v_projection": ("attn_v", "self_attn.v_proj"),
    "attention_out_projection": ("attn_output", "self_attn.o_proj"),
    "ffn_norm": ("ffn_norm", "pre_ff_layernorm"),
    "ffn_gate": ("ffn_gate", "feed_forward.gate_proj"),
    "ffn_up": ("ffn_up", "feed_forward.up_proj"),
    "ffn_down": ("ffn_down", "feed_forward.down_proj"),
}
"""Of everything but the mixers: llama.cpp's names and Transformers'."""


ATTENTION = Attention()


def _check(dimensions: Dimensions) -> None:
    if dimensions["n_embd"] % dimensions["n_head"] or dimensions["n_head"] % dimensions["n_head_kv"]:
        raise UsageError("jamba needs n_embd divisible by n_head, and n_head divisible by n_head_kv")


def _state_layers(dimensions: Dimensions) -> tuple[StateLayers, ...]:
    return (
        StateLayers(len(other_layers(dimensions)), "mamba1", mixer_state(dimensions)),
        StateLayers(len(periodic_layers(dimensions)), "attention", attention_state(dimensions)),
    )


def _tensors(dimensions: Dimensions) -> tuple[TensorFact, ...]:
    attention = periodic_layers(dimensions)
    facts = model_ends(dimensions, 1.2)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        facts.append(TensorFact(prefix + "input_norm", (dimensions["n_embd"],), "normal", 0.1, 1.0))
        if layer in attention:
            facts += attention_tensors(dimensions, prefix, 0.6, 8, 4, "attention_out_projection")
        else:
            facts += mixer_tensors(dimensions, prefix, 0.5, 2.5 * min(1.5**layer, 4.0), is_normed=True)
        facts += feed_forward_tensors(dimensions, prefix, 1.0, 0.3)
    return tuple(facts)


def _gguf_metadata(dimensions: Dimensions) -> dict[str, Any]:
    attention = periodic_layers(dimensions)
    # A layer without key heads is recurrent.
    return model_gguf_metadata(dimensions, "jamba") | {
        "jamba.feed_forward_length": dimensions["n_ff"],
        "jamba.attention.head_count": dimensions["n_head"],
        "jamba.attention.head_count_kv": [
            dimensions["n_head_kv"] if layer in attention else 0 for layer in range(dimensions["n_layer"])
        ],
        "jamba.attention.key_length": head_channels(dimensions),
        "jamba.attention.value_length": head_channels(dimensions),
        "jamba.attention.layer_norm_rms_epsilon": NORM_EPSILON,
    } | mixer_gguf_metadata(dimensions, "jamba")  # fmt: skip


def _gguf_tensors(dimensions: Dimensions) -> tuple[GgufTensor, ...]:
    tensors = [*MODEL_ENDS_GGUF]
    recurrent = other_layers(dimensions)
    for layer in range(dimensions["n_layer"]):
        tensors += [
            GgufTensor(f"blk.{layer}.{theirs}.weight", f"layers.{layer}.{ours}")
            for ours, (theirs, _) in _NAMES.items()
            if layer not in recurrent or not ours.endswith("projection")
        ]
        if layer in recurrent:
            tensors += mixer_gguf_tensors(layer, is_normed=True)
    return tuple(tensors)


def _transformers_configuration(dimensions: Dimensions) -> dict[str, Any]:
    return {
        "vocab_size": dimensions["n_vocab"],
        "hidden_size": dimensions["n_embd"],
        "intermediate_size": dimensions["n_ff"],
        "num_hidden_layers": dimensions["n_layer"],
        "num_attention_heads": dimensions["n_head"],
        "num_key_value_heads": dimensions["n_head_kv"],
        "attn_layer_period": dimensions["attention_period"],
        "attn_layer_offset": dimensions["attention_period"] - 1,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": dimensions["d_state"],
        "mamba_d_conv": dimensions["d_conv"],
        "mamba_expand": 2,
        "mamba_dt_rank": dimensions["dt_rank"],
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "rms_norm_eps": NORM_EPSILON,
        "tie_word_embeddings": False,
    }


def _state_dict(dimensions: Dimensions, weights: Weights) -> dict[str, np.ndarray]:
    state = {
        "model.embed_tokens.weight": weights["token_embedding"],
        "model.final_layernorm.weight": weights["output_norm"],
        "lm_head.weight": weights["output"],
    }
    for layer in range(dimensions["n_layer"]):
        source, target = f"layers.{layer}.", f"model.layers.{layer}."
        state |= {f"{target}{theirs}.weight": weights[source + ours] for ours, (_, theirs) in _NAMES.items() if source + ours in weights}
        if layer in other_layers(dimensions):
            state |= mixer_state_dict(weights, source, target + "mamba.")
    return state


JAMBA = Family(
    name="jamba",
    title="Jamba: hybrid, Mamba-1 mixers with norms of step, B and C, and attention without positions",
    defaults={
        "n_vocab": 64, "n_embd": 32, "n_layer": 4, "n_head": 2, "n_head_kv": 1, "n_ff": 48, "d_conv": 4, "d_state": 8, "dt_rank": 4,
        "attention_period": 3,
    },
    bounds={"n_vocab": (8, 65536), "n_layer": (1, 64), "d_conv": (2, 8), "attention_period": (1, 64)},
    check=_check,
    tensors=_tensors,
    recurrent_layers=other_layers,
    attention_layers=periodic_layers,
    row_widths=mixer_row_widths,
    state_layers=_state_layers,
    doubled=("n_embd",),
    gguf_metadata=_gguf_metadata,
    gguf_tensors=_gguf_tensors,
    transformers_class="JambaForCausalLM",
    transformers_configuration=_transformers_configuration,
    state_dict=_state_dict,
)  # fmt: skip
