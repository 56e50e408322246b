"""lfm2: a hybrid of gated short convolutions and grouped-query attention with q/k norm, RoPE and SwiGLU feed-forward layers.

Every `attention_period`-th layer, the first of them at index attention_period - 1, is attention; the others are short convolutions.
The weights are drawn so that every state row shows: attention is mild (small q and k norms) and its values large, so that each single cell
of a long log weighs in. tests/quality/test_sensitivity.py holds them to it.
Sources: Transformers' Lfm2ForCausalLM; llama.cpp's src/models/lfm2.cpp.
"""

import math
from typing import Any

import numpy as np

from ..errors import UsageError
from ..state_sizes import StateLayers
from .attention import Attention, attention_state, attention_tensors, head_channels
from .family import Dimensions, Family, GgufTensor, RowWidths, TensorFact, Weights, other_layers, periodic_layers
from .model_ends import feed_forward_tensors, model_ends, model_gguf_metadata

NORM_EPSILON = 1e-5
ROPE_THETA = 10000.0


def attention_window(dimensions: Dimensions) -> int:
    """Newest tokens that an attention layer sees, its own included; 0: all. Only lfm2_swa has the dimension."""
    return dimensions.get("n_swa", 0)


ATTENTION = Attention(ROPE_THETA, NORM_EPSILON, attention_window)


def _check(dimensions: Dimensions) -> None:
    if dimensions["n_embd"] % (2 * dimensions["n_head"]) or dimensions["n_head"] % dimensions["n_head_kv"]:
        raise UsageError("lfm2 and lfm2_swa need n_embd divisible by 2 * n_head, and n_head divisible by n_head_kv")


def _state_layers(dimensions: Dimensions) -> tuple[StateLayers, ...]:
    return (
        StateLayers(len(other_layers(dimensions)), "short_convolution", {name: dimensions[name] for name in ("n_embd", "l_cache")}),
        StateLayers(len(periodic_layers(dimensions)), "attention", attention_state(dimensions)),
    )


def _tensors(dimensions: Dimensions) -> tuple[TensorFact, ...]:
    n_embd = dimensions["n_embd"]
    scale = 1 / math.sqrt(n_embd)
    attention = periodic_layers(dimensions)
    facts = model_ends(dimensions, 1.0)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        facts.append(TensorFact(prefix + "operator_norm", (n_embd,), "normal", 0.1, 1.0))
        if layer in attention:
            facts += [
                *attention_tensors(dimensions, prefix, 1, 8, 2),
                TensorFact(prefix + "q_norm", (head_channels(dimensions),), "normal", 0.1, 0.6),
                TensorFact(prefix + "k_norm", (head_channels(dimensions),), "normal", 0.1, 0.6),
            ]
        else:
            facts += [
                TensorFact(prefix + "in_projection", (3 * n_embd, n_embd), "normal", scale),
                TensorFact(prefix + "convolution", (n_embd, dimensions["l_cache"]), "normal", 0.9),
                TensorFact(prefix + "out_projection", (n_embd, n_embd), "normal", scale),
            ]
        facts += feed_forward_tensors(dimensions, prefix, 1.0, 1.0)
    return tuple(facts)


def gguf_metadata(dimensions: Dimensions) -> dict[str, Any]:
    attention = periodic_layers(dimensions)
    return model_gguf_metadata(dimensions, "lfm2") | {
        "lfm2.feed_forward_length": dimensions["n_ff"],
        "lfm2.attention.head_count": dimensions["n_head"],
        "lfm2.attention.head_count_kv": [dimensions["n_head_kv"] if layer in attention else 0 for layer in range(dimensions["n_layer"])],
        "lfm2.attention.layer_norm_rms_epsilon": NORM_EPSILON,
        "lfm2.rope.freq_base": ROPE_THETA,
        "lfm2.shortconv.l_cache": dimensions["l_cache"],
    }


def _gguf_tensors(dimensions: Dimensions) -> tuple[GgufTensor, ...]:
    tensors = [
        GgufTensor("token_embd.weight", "token_embedding"),
        GgufTensor("token_embd_norm.weight", "output_norm"),
        GgufTensor("output.weight", "output"),
    ]
    feed_forward = {
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "ffn_gate",
        "ffn_up": "ffn_up",
        "ffn_down": "ffn_down",
    }
    attention = {
        "q_projection": "attn_q", "k_projection": "attn_k", "v_projection": "attn_v", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
        "out_projection": "attn_output",
    }  # fmt: skip
    short_convolution = {"in_projection": "shortconv.in_proj", "convolution": "shortconv.conv", "out_projection": "shortconv.out_proj"}
    attention_layers = periodic_layers(dimensions)
    for layer in range(dimensions["n_layer"]):
        names = feed_forward | (attention if layer in attention_layers else short_convolution)
        tensors += [GgufTensor(f"blk.{layer}.{theirs}.weight", f"layers.{layer}.{ours}") for ours, theirs in names.items()]
    return tuple(tensors)


def _transformers_configuration(dimensions: Dimensions) -> dict[str, Any]:
    attention = periodic_layers(dimensions)
    return {
        "vocab_size": dimensions["n_vocab"],
        "hidden_size": dimensions["n_embd"],
        "intermediate_size": dimensions["n_ff"],
        "num_hidden_layers": dimensions["n_layer"],
        "num_attention_heads": dimensions["n_head"],
        "num_key_value_heads": dimensions["n_head_kv"],
        "norm_eps": NORM_EPSILON,
        "rope_theta": ROPE_THETA,
        "conv_L_cache": dimensions["l_cache"],
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention" if layer in attention else "conv" for layer in range(dimensions["n_layer"])],
    }


def _state_dict(dimensions: Dimensions, weights: Weights) -> dict[str, np.ndarray]:
    state = {
        "model.embed_tokens.weight": weights["token_embedding"],
        "model.embedding_norm.weight": weights["output_norm"],
        "lm_head.weight": weights["output"],
    }
    names = {
        "operator_norm": "operator_norm", "q_projection": "self_attn.q_proj", "k_projection": "self_attn.k_proj",
        "v_projection": "self_attn.v_proj", "q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm",
        "in_projection": "conv.in_proj", "convolution": "conv.conv", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
    }  # fmt: skip
    attention = periodic_layers(dimensions)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        for name, their_name in (names | {"out_projection": "self_attn.out_proj" if layer in attention else "conv.out_proj"}).items():
            if prefix + name in weights:
                array = weights[prefix + name]
                state[f"model.{prefix}{their_name}.weight"] = array[:, None, :] if name == "convolution" else array
    return state


LFM2 = Family(
    name="lfm2",
    title="LFM2: hybrid, gated short convolutions and grouped-query attention",
    defaults={"n_vocab": 64, "n_embd": 32, "n_layer": 4, "n_head": 2, "n_head_kv": 1, "n_ff": 48, "l_cache": 3, "attention_period": 3},
    bounds={"n_vocab": (8, 65536), "n_layer": (1, 64), "l_cache": (2, 8), "attention_period": (1, 64)},
    check=_check,
    tensors=_tensors,
    recurrent_layers=other_layers,
    attention_layers=periodic_layers,
    row_widths=lambda dimensions: RowWidths(dimensions["n_embd"] * (dimensions["l_cache"] - 1), 0),
    state_layers=_state_layers,
    doubled=("n_embd",),
    gguf_metadata=gguf_metadata,
    gguf_tensors=_gguf_tensors,
    transformers_class="Lfm2ForCausalLM",
    transformers_configuration=_transformers_configuration,
    state_dict=_state_dict,
    attention_window=attention_window,
)
