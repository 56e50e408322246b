"""minimax01: a hybrid of lightning attention and softmax attention, each followed by a mixture of experts (MiniMax-Text-01).

Every `attention_period`-th layer, the first of them at index attention_period - 1, is softmax attention; the others are lightning
attention: linear attention whose state loses a part a token that depends on head and layer alone, with no convolution before it.

- A head's rate is 2^(-8 (head + 1) / n_head), times a factor that falls from 1 in the first layer to nothing in the last. Transformers keeps
  what follows from the rates as buffers, a part of its state dict; it is given ours, which are those of the paper's code and of llama.cpp.
- The residual is taken after the norm, and scaled: x = norm(x); x = RESIDUAL_SCALE x + layer(x).
- All experts are used (n_expert_used = n_expert), so that nothing is selected.
- Transformers rotates whole heads: n_rot below head_dim is llama.cpp's alone.

The weights are drawn so that every state row shows: mixers outweigh what passes by them; queries, keys and values are small, so that
their SiLU leans to no side and slow heads do not drown the quick ones; softmax attention is mild and its values large. And so that rounding
does not: where a lightning layer's output is close to zero, its norm's epsilon is the bound. tests/quality/test_sensitivity.py holds them to it.

Sources: MiniMax 2025 (arXiv:2501.08313); Transformers' MiniMaxForCausalLM; llama.cpp's src/models/minimax-01.cpp.
"""

import math
from typing import Any

import numpy as np

from ..errors import UsageError
from ..state_sizes import StateLayers
from .attention import Attention, attention_state, attention_tensors
from .family import Dimensions, Family, GgufTensor, RowWidths, TensorFact, Weights, other_layers, periodic_layers
from .model_ends import MODEL_ENDS_GGUF, model_ends, model_gguf_metadata

NORM_EPSILON = 1e-6
"""Of every norm, that of lightning attention included (where Transformers has no other)."""
ROPE_THETA = 10000.0
ATTENTION = Attention(ROPE_THETA)
RESIDUAL_SCALE = 1.5
BLOCK_SIZE = 16
"""Tokens that Transformers takes at once."""


def inner_channels(dimensions: Dimensions) -> int:
    """Channels of all heads."""
    return dimensions["n_head"] * dimensions["head_dim"]


def rates(dimensions: Dimensions, layer: int) -> np.ndarray:
    """How fast the states of a lightning layer fade: a token multiplies them by exp(-rate). float64 [n_head]."""
    of_head = 2.0 ** (-8 * np.arange(1, dimensions["n_head"] + 1) / dimensions["n_head"])
    return np.asarray(of_head * (1 - layer / max(1, dimensions["n_layer"] - 1) + 1e-5))


def _check(dimensions: Dimensions) -> None:
    if dimensions["n_head"] % dimensions["n_head_kv"]:
        raise UsageError("minimax01 needs n_head divisible by n_head_kv")
    if dimensions["n_rot"] % 2 or dimensions["n_rot"] > dimensions["head_dim"]:
        raise UsageError("minimax01 needs an even n_rot, at most head_dim")


def _state_layers(dimensions: Dimensions) -> tuple[StateLayers, ...]:
    lightning = {name: dimensions[name] for name in ("n_head", "head_dim")}
    return (
        StateLayers(len(other_layers(dimensions)), "lightning_attention", lightning),
        StateLayers(len(periodic_layers(dimensions)), "attention", attention_state(dimensions)),
    )


def _tensors(dimensions: Dimensions) -> tuple[TensorFact, ...]:
    n_embd, n_ff, n_expert = dimensions["n_embd"], dimensions["n_ff"], dimensions["n_expert"]
    d_inner = inner_channels(dimensions)
    scale, inner_scale = 1 / math.sqrt(n_embd), 1 / math.sqrt(d_inner)
    attention = periodic_layers(dimensions)
    facts = model_ends(dimensions, 1.2)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        facts.append(TensorFact(prefix + "input_norm", (n_embd,), "normal", 0.1, 1.0))
        if layer in attention:
            facts += attention_tensors(dimensions, prefix, 0.6, 3.2, 3)
        else:
            facts += [
                TensorFact(prefix + "qkv_projection", (3 * d_inner, n_embd), "normal", 0.1 * scale),
                TensorFact(prefix + "gate_projection", (d_inner, n_embd), "normal", 0.5 * scale),
                TensorFact(prefix + "lightning_norm", (d_inner,), "normal", 0.1, 1.0),
                TensorFact(prefix + "out_projection", (n_embd, d_inner), "normal", 4.2 * min(1.2**layer, 1.5) * inner_scale),
            ]
        facts += [
            TensorFact(prefix + "ffn_norm", (n_embd,), "normal", 0.1, 1.0),
            TensorFact(prefix + "router", (n_expert, n_embd), "normal", scale),
            TensorFact(prefix + "ffn_gate", (n_expert, n_ff, n_embd), "normal", scale),
            TensorFact(prefix + "ffn_up", (n_expert, n_ff, n_embd), "normal", scale),
            TensorFact(prefix + "ffn_down", (n_expert, n_embd, n_ff), "normal", 1 / math.sqrt(n_ff)),
        ]
    return tuple(facts)


def _gguf_metadata(dimensions: Dimensions) -> dict[str, Any]:
    return model_gguf_metadata(dimensions, "minimax-01") | {
        "minimax-01.feed_forward_length": dimensions["n_ff"],
        "minimax-01.expert_count": dimensions["n_expert"],
        "minimax-01.expert_used_count": dimensions["n_expert"],
        "minimax-01.attention.head_count": dimensions["n_head"],
        "minimax-01.attention.head_count_kv": dimensions["n_head_kv"],
        "minimax-01.attention.key_length": dimensions["head_dim"],
        "minimax-01.attention.value_length": dimensions["head_dim"],
        "minimax-01.attention.layer_norm_rms_epsilon": NORM_EPSILON,
        "minimax-01.full_attention_interval": dimensions["attention_period"],
        "minimax-01.residual_scale": RESIDUAL_SCALE,
        "minimax-01.rope.freq_base": ROPE_THETA,
        "minimax-01.rope.dimension_count": dimensions["n_rot"],
    }


def _gguf_tensors(dimensions: Dimensions) -> tuple[GgufTensor, ...]:
    tensors = [*MODEL_ENDS_GGUF]
    every = {
        "input_norm": "attn_norm", "out_projection": "attn_output", "ffn_norm": "ffn_norm", "router": "ffn_gate_inp",
        "ffn_gate": "ffn_gate_exps", "ffn_up": "ffn_up_exps", "ffn_down": "ffn_down_exps",
    }  # fmt: skip
    attention = {"q_projection": "attn_q", "k_projection": "attn_k", "v_projection": "attn_v"}
    lightning = {"qkv_projection": "attn_qkv", "gate_projection": "attn_gate", "lightning_norm": "attn_norm_2"}
    attention_layers = periodic_layers(dimensions)
    for layer in range(dimensions["n_layer"]):
        names = every | (attention if layer in attention_layers else lightning)
        tensors += [GgufTensor(f"blk.{layer}.{theirs}.weight", f"layers.{layer}.{ours}") for ours, theirs in names.items()]
    return tuple(tensors)


def _transformers_configuration(dimensions: Dimensions) -> dict[str, Any]:
    attention = periodic_layers(dimensions)
    factors = ("full_attn_alpha_factor", "linear_attn_alpha_factor", "mlp_alpha_factor")
    return {
        "vocab_size": dimensions["n_vocab"],
        "hidden_size": dimensions["n_embd"],
        "intermediate_size": dimensions["n_ff"],
        "num_hidden_layers": dimensions["n_layer"],
        "num_attention_heads": dimensions["n_head"],
        "num_key_value_heads": dimensions["n_head_kv"],
        "head_dim": dimensions["head_dim"],
        "num_local_experts": dimensions["n_expert"],
        "num_experts_per_tok": dimensions["n_expert"],
        "rms_norm_eps": NORM_EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "block_size": BLOCK_SIZE,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention" if layer in attention else "linear_attention" for layer in range(dimensions["n_layer"])],
    } | dict.fromkeys(factors, RESIDUAL_SCALE)


def _state_dict(dimensions: Dimensions, weights: Weights) -> dict[str, np.ndarray]:
    state = {
        "model.embed_tokens.weight": weights["token_embedding"],
        "model.norm.weight": weights["output_norm"],
        "lm_head.weight": weights["output"],
    }
    every = {"input_norm": "input_layernorm.weight", "ffn_norm": "post_attention_layernorm.weight", "router": "mlp.gate.weight"}
    attention = {
        "q_projection": "self_attn.q_proj.weight", "k_projection": "self_attn.k_proj.weight", "v_projection": "self_attn.v_proj.weight",
        "out_projection": "self_attn.o_proj.weight",
    }  # fmt: skip
    lightning = {
        "qkv_projection": "self_attn.qkv_proj.weight", "gate_projection": "self_attn.output_gate.weight",
        "lightning_norm": "self_attn.norm.weight", "out_projection": "self_attn.out_proj.weight",
    }  # fmt: skip
    attention_layers = periodic_layers(dimensions)
    for layer in range(dimensions["n_layer"]):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        names = every | (attention if layer in attention_layers else lightning)
        state |= {theirs + their_name: weights[ours + name] for name, their_name in names.items()}
        state[theirs + "mlp.experts.gate_up_proj"] = np.concatenate([weights[ours + "ffn_gate"], weights[ours + "ffn_up"]], axis=1)
        state[theirs + "mlp.experts.down_proj"] = weights[ours + "ffn_down"]
        if layer not in attention_layers:
            state |= {f"{theirs}self_attn.{name}": buffer for name, buffer in _decay_buffers(rates(dimensions, layer)).items()}
    return state


def _decay_buffers(rate: np.ndarray) -> dict[str, np.ndarray]:
    """What Transformers keeps of the rates of a layer, for blocks of tokens: float64, with heads as the first axis of more than one."""
    rate = rate[:, None, None]
    place = np.arange(BLOCK_SIZE)[:, None]
    tokens_back = place - place.T
    return {
        "slope_rate": rate,
        "query_decay": np.exp(-rate * (place + 1)),
        "key_decay": np.exp(-rate * (BLOCK_SIZE - 1 - place)),
        "diagonal_decay": np.where(tokens_back >= 0, np.exp(-rate * np.maximum(tokens_back, 0)), 0.0)[None],
    }


MINIMAX01 = Family(
    name="minimax01",
    title="MiniMax-01: hybrid, lightning attention and softmax attention with experts",
    defaults={
        "n_vocab": 64, "n_embd": 32, "n_layer": 4, "n_head": 8, "n_head_kv": 2, "head_dim": 8, "n_rot": 8, "n_ff": 32, "n_expert": 3,
        "attention_period": 4,
    },
    bounds={"n_vocab": (8, 65536), "n_layer": (1, 64), "n_expert": (1, 64), "attention_period": (1, 64), "n_rot": (2, 4096)},
    check=_check,
    tensors=_tensors,
    recurrent_layers=other_layers,
    attention_layers=periodic_layers,
    row_widths=lambda dimensions: RowWidths(0, inner_channels(dimensions) * dimensions["head_dim"]),
    state_layers=_state_layers,
    doubled=("n_embd", "n_head", "n_head_kv"),
    gguf_metadata=_gguf_metadata,
    gguf_tensors=_gguf_tensors,
    transformers_class="MiniMaxForCausalLM",
    transformers_configuration=_transformers_configuration,
    state_dict=_state_dict,
)  # fmt: skip
