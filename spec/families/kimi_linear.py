"""kimi_linear: a hybrid of Kimi Delta Attention and multi-head latent attention, followed by a feed-forward layer or a mixture of experts.

Every `attention_period`-th layer, the first of them at index attention_period - 1, is latent attention; the others are Kimi Delta Attention:
causal convolutions over q, k and v, each with a kernel of its own, then a gated delta rule whose state decays in every channel of its keys at
a rate of its own. The first `n_dense` layers are followed by a SwiGLU layer, the others by experts.

- q, k and v stand side by side in a row of the convolution.
- Latent attention has no rotation, and keeps one row a token for all heads: the normed latent, of which each head makes its key and its
  value, and the part of a key that all heads share. Transformers has the two expansions of the latent in one matrix, head by head.
- All experts are used, so that nothing is selected; their shares are sigmoids over their sum, times a scale. The router's bias is for the
  selection alone, and moves nothing here. A shared expert is added.

The weights are drawn so that every state row shows and rounding does not: as in delta_net.py; attention is mild and its values large; later
mixers outweigh what passes by them. tests/quality/test_sensitivity.py holds them to it.

Sources: Kimi Team 2025 (arXiv:2510.26692); Transformers' KimiLinearForCausalLM; llama.cpp's src/models/kimi-linear.cpp.
"""

import math
from typing import Any

import numpy as np

from ..errors import UsageError
from ..state_sizes import StateLayers
from .family import Dimensions, Family, GgufTensor, RowWidths, TensorFact, Weights, other_layers, periodic_layers
from .model_ends import MODEL_ENDS_GGUF

NORM_EPSILON = 1e-6
"""Of every norm, that of q and k to unit length included (where Transformers has no other)."""
EXPERT_SCALE = 1.5
"""What the shares of all experts add up to."""
_SIGMOID_GATING = 2
"""llama.cpp's LLAMA_EXPERT_GATING_FUNC_TYPE_SIGMOID."""

DELTA_NAMES = {
    "q_projection": ("attn_q.weight", "q_proj.weight"), "k_projection": ("attn_k.weight", "k_proj.weight"),
    "v_projection": ("attn_v.weight", "v_proj.weight"), "decay_in_projection": ("ssm_f_a.weight", "forget_gate.f_a_proj.weight"),
    "decay_out_projection": ("ssm_f_b.weight", "forget_gate.f_b_proj.weight"), "dt_bias": ("ssm_dt.bias", "forget_gate.dt_bias"),
    "a_log": ("ssm_a", "forget_gate.A_log"), "beta_projection": ("ssm_beta.weight", "b_proj.weight"),
    "gate_in_projection": ("ssm_g_a.weight", "g_a_proj.weight"), "gate_out_projection": ("ssm_g_b.weight", "g_b_proj.weight"),
    "gated_norm": ("ssm_norm.weight", "o_norm.weight"), "out_projection": ("attn_output.weight", "o_proj.weight"),
}  # fmt: skip
"""Weights of Kimi Delta Attention that llama.cpp and Transformers both have as they are, and what they call them."""
LATENT_NAMES = {
    "q_projection": ("attn_q.weight", "q_proj.weight"), "latent_projection": ("attn_kv_a_mqa.weight", "kv_a_proj_with_mqa.weight"),
    "latent_norm": ("attn_kv_a_norm.weight", "kv_a_layernorm.weight"), "out_projection": ("attn_output.weight", "o_proj.weight"),
}  # fmt: skip
"""Those of latent attention."""
DENSE_NAMES = {
    "ffn_gate": ("ffn_gate.weight", "gate_proj.weight"), "ffn_up": ("ffn_up.weight", "up_proj.weight"),
    "ffn_down": ("ffn_down.weight", "down_proj.weight"),
}  # fmt: skip
EXPERT_NAMES = {
    "router": ("ffn_gate_inp.weight", "gate.weight"), "router_bias": ("exp_probs_b.bias", "gate.e_score_correction_bias"),
    "expert_down": ("ffn_down_exps.weight", "experts.down_proj"), "shared_gate": ("ffn_gate_shexp.weight", "shared_experts.gate_proj.weight"),
    "shared_up": ("ffn_up_shexp.weight", "shared_experts.up_proj.weight"),
    "shared_down": ("ffn_down_shexp.weight", "shared_experts.down_proj.weight"),
}  # fmt: skip


def inner_channels(dimensions: Dimensions) -> int:
    """Channels of all heads of Kimi Delta Attention."""
    return dimensions["n_head"] * dimensions["head_dim"]


def key_size(dimensions: Dimensions) -> int:
    """Channels of a head's key in latent attention: its own part, then the one that all heads share."""
    return dimensions["qk_nope_dim"] + dimensions["qk_rope_dim"]


def _check(dimensions: Dimensions) -> None:
    if dimensions["n_dense"] > dimensions["n_layer"]:
        raise UsageError("kimi_linear needs n_dense at most n_layer")


def _state_layers(dimensions: Dimensions) -> tuple[StateLayers, ...]:
    return (
        StateLayers(
            len(other_layers(dimensions)),
            "kimi_delta_attention",
            {name: dimensions[name] for name in ("n_head", "head_dim", "d_conv")},
        ),
        StateLayers(
            len(periodic_layers(dimensions)), "latent_attention", {name: dimensions[name] for name in ("kv_lora_rank", "qk_rope_dim")}
        ),
    )


def _delta_tensors(dimensions: Dimensions, prefix: str, out_scale: float) -> list[TensorFact]:
    n_embd, n_head, head_dim, d_inner = dimensions["n_embd"], dimensions["n_head"], dimensions["head_dim"], inner_channels(dimensions)
    scale, scale_in = 1 / math.sqrt(n_embd), 1 / math.sqrt(head_dim)
    return [
        *(TensorFact(f"{prefix}{part}_projection", (d_inner, n_embd), "normal", scale) for part in "qkv"),
        *(TensorFact(f"{prefix}{part}_convolution", (d_inner, dimensions["d_conv"]), "normal", 0.02) for part in "qkv"),
        TensorFact(prefix + "decay_in_projection", (head_dim, n_embd), "normal", scale),
        TensorFact(prefix + "decay_out_projection", (d_inner, head_dim), "normal", 0.7 * scale_in),
        TensorFact(prefix + "dt_bias", (d_inner,), "uniform", 0.7, 0.3),
        TensorFact(prefix + "a_log", (n_head,), "uniform", 0.7, -1.4),
        TensorFact(prefix + "beta_projection", (n_head, n_embd), "normal", 0.7 * scale),
        TensorFact(prefix + "gate_in_projection", (head_dim, n_embd), "normal", scale),
        TensorFact(prefix + "gate_out_projection", (d_inner, head_dim), "normal", scale_in),
        TensorFact(prefix + "gated_norm", (head_dim,), "uniform", 0.4, 0.8),
        TensorFact(prefix + "out_projection", (n_embd, d_inner), "normal", out_scale / math.sqrt(d_inner)),
    ]


def _latent_tensors(dimensions: Dimensions, prefix: str) -> list[TensorFact]:
    n_embd, n_head, rank, n_nope, n_value = (dimensions[name] for name in ("n_embd", "n_head", "kv_lora_rank", "qk_nope_dim", "value_dim"))
    scale = 1 / math.sqrt(n_embd)
    return [
        TensorFact(prefix + "q_projection", (n_head * key_size(dimensions), n_embd), "normal", 0.6 * scale),
        TensorFact(prefix + "latent_projection", (rank + dimensions["qk_rope_dim"], n_embd), "normal", scale),
        TensorFact(prefix + "latent_norm", (rank,), "uniform", 0.4, 0.8),
        TensorFact(prefix + "k_expansion", (n_head, rank, n_nope), "normal", 0.6 / math.sqrt(rank)),
        TensorFact(prefix + "v_expansion", (n_head, n_value, rank), "normal", 8 / math.sqrt(rank)),
        TensorFact(prefix + "out_projection", (n_embd, n_head * n_value), "normal", 2 / math.sqrt(n_head * n_value)),
    ]


def _feed_forward_tensors(dimensions: Dimensions, prefix: str, is_dense: bool) -> list[TensorFact]:
    n_embd, n_ff, n_expert, n_ff_expert = (dimensions[name] for name in ("n_embd", "n_ff", "n_expert", "n_ff_expert"))
    scale, scale_inner = 1 / math.sqrt(n_embd), 1 / math.sqrt(n_ff_expert)
    if is_dense:
        return [
            TensorFact(prefix + "ffn_gate", (n_ff, n_embd), "normal", scale),
            TensorFact(prefix + "ffn_up", (n_ff, n_embd), "normal", scale),
            TensorFact(prefix + "ffn_down", (n_embd, n_ff), "normal", 0.5 / math.sqrt(n_ff)),
        ]
    return [
        TensorFact(prefix + "router", (n_expert, n_embd), "normal", scale),
        TensorFact(prefix + "router_bias", (n_expert,), "uniform", 0.1),
        TensorFact(prefix + "expert_gate", (n_expert, n_ff_expert, n_embd), "normal", scale),
        TensorFact(prefix + "expert_up", (n_expert, n_ff_expert, n_embd), "normal", scale),
        TensorFact(prefix + "expert_down", (n_expert, n_embd, n_ff_expert), "normal", 0.4 * scale_inner),
        TensorFact(prefix + "shared_gate", (n_ff_expert, n_embd), "normal", scale),
        TensorFact(prefix + "shared_up", (n_ff_expert, n_embd), "normal", scale),
        TensorFact(prefix + "shared_down", (n_embd, n_ff_expert), "normal", 0.4 * scale_inner),
    ]


def _tensors(dimensions: Dimensions) -> tuple[TensorFact, ...]:
    n_embd = dimensions["n_embd"]
    attention = periodic_layers(dimensions)
    facts = [TensorFact("token_embedding", (dimensions["n_vocab"], n_embd), "normal", 1.0)]
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        facts.append(TensorFact(prefix + "input_norm", (n_embd,), "uniform", 0.4, 0.8))
        if layer in attention:
            facts += _latent_tensors(dimensions, prefix)
        else:
            facts += _delta_tensors(dimensions, prefix, 2.5 * min(1.5**layer, 4.0))
        facts.append(TensorFact(prefix + "ffn_norm", (n_embd,), "uniform", 0.4, 0.8))
        facts += _feed_forward_tensors(dimensions, prefix, layer < dimensions["n_dense"])
    facts += [
        TensorFact("output_norm", (n_embd,), "uniform", 0.4, 0.8),
        TensorFact("output", (dimensions["n_vocab"], n_embd), "normal", 1 / math.sqrt(n_embd)),
    ]
    return tuple(facts)


def _gguf_metadata(dimensions: Dimensions) -> dict[str, Any]:
    attention, kept = periodic_layers(dimensions), dimensions["kv_lora_rank"]
    values = {
        "vocab_size": dimensions["n_vocab"],
        "context_length": 1 << 20,
        "embedding_length": dimensions["n_embd"],
        "block_count": dimensions["n_layer"],
        "feed_forward_length": dimensions["n_ff"],
        "attention.head_count": dimensions["n_head"],
        # A layer without key heads is recurrent; one row serves all heads of the others.
        "attention.head_count_kv": [int(layer in attention) for layer in range(dimensions["n_layer"])],
        "attention.layer_norm_rms_epsilon": NORM_EPSILON,
        "attention.kv_lora_rank": kept,
        "attention.key_length": kept + dimensions["qk_rope_dim"],
        "attention.value_length": kept,
        "attention.key_length_mla": key_size(dimensions),
        "attention.value_length_mla": dimensions["value_dim"],
        "rope.dimension_count": dimensions["qk_rope_dim"],
        "ssm.conv_kernel": dimensions["d_conv"],
        "kda.head_dim": dimensions["head_dim"],
        "leading_dense_block_count": dimensions["n_dense"],
        "expert_count": dimensions["n_expert"],
        "expert_used_count": dimensions["n_expert"],
        "expert_shared_count": 1,
        "expert_feed_forward_length": dimensions["n_ff_expert"],
        "expert_gating_func": _SIGMOID_GATING,
        "expert_weights_scale": EXPERT_SCALE,
    }
    return {"general.architecture": "kimi-linear"} | {f"kimi-linear.{key}": value for key, value in values.items()}


def _layer_names(dimensions: Dimensions, layer: int) -> dict[str, tuple[str, str]]:
    """What a layer's weights that need no more than a name are called in llama.cpp and in Transformers, after the layer's prefix."""
    mixer = LATENT_NAMES if layer in periodic_layers(dimensions) else DELTA_NAMES
    ffn = DENSE_NAMES if layer < dimensions["n_dense"] else EXPERT_NAMES
    norms = {
        "input_norm": ("attn_norm.weight", "input_layernorm.weight"),
        "ffn_norm": ("ffn_norm.weight", "post_attention_layernorm.weight"),
    }
    return (
        norms
        | {ours: (llama, f"self_attn.{theirs}") for ours, (llama, theirs) in mixer.items()}
        | {ours: (llama, f"mlp.{theirs}") for ours, (llama, theirs) in ffn.items()}
    )


def _gguf_tensors(dimensions: Dimensions) -> tuple[GgufTensor, ...]:
    tensors = [*MODEL_ENDS_GGUF]
    for layer in range(dimensions["n_layer"]):
        ours, theirs = f"layers.{layer}.", f"blk.{layer}."
        for name, (their_name, _) in _layer_names(dimensions, layer).items():
            if name == "a_log":
                tensors.append(GgufTensor(theirs + their_name, ours + name, (1, 1, dimensions["n_head"], 1), "negative exponential"))
            else:
                tensors.append(GgufTensor(theirs + their_name, ours + name))
        if layer in periodic_layers(dimensions):
            tensors += [GgufTensor(f"{theirs}attn_{part}_b.weight", f"{ours}{part}_expansion") for part in "kv"]
        else:
            shape = (1, inner_channels(dimensions), 1, dimensions["d_conv"])
            tensors += [GgufTensor(f"{theirs}ssm_conv1d_{part}.weight", f"{ours}{part}_convolution", shape) for part in "qkv"]
        if layer >= dimensions["n_dense"]:
            tensors += [GgufTensor(f"{theirs}ffn_{part}_exps.weight", f"{ours}expert_{part}") for part in ("gate", "up")]
    return tuple(tensors)


def _transformers_configuration(dimensions: Dimensions) -> dict[str, Any]:
    attention, layers = periodic_layers(dimensions), range(dimensions["n_layer"])
    return {
        "vocab_size": dimensions["n_vocab"],
        "hidden_size": dimensions["n_embd"],
        "intermediate_size": dimensions["n_ff"],
        "num_hidden_layers": dimensions["n_layer"],
        "num_attention_heads": dimensions["n_head"],
        "num_key_value_heads": dimensions["n_head"],
        "rms_norm_eps": NORM_EPSILON,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "q_lora_rank": None,
        "kv_lora_rank": dimensions["kv_lora_rank"],
        "qk_nope_head_dim": dimensions["qk_nope_dim"],
        "qk_rope_head_dim": dimensions["qk_rope_dim"],
        "v_head_dim": dimensions["value_dim"],
        "linear_head_dim": dimensions["head_dim"],
        "linear_num_heads": dimensions["n_head"],
        "linear_conv_kernel_dim": dimensions["d_conv"],
        "layer_types": ["full_attention" if layer in attention else "linear_attention" for layer in layers],
        "mlp_layer_types": ["dense" if layer < dimensions["n_dense"] else "sparse" for layer in layers],
        "num_experts": dimensions["n_expert"],
        "num_experts_per_token": dimensions["n_expert"],
        "num_shared_experts": 1,
        "moe_intermediate_size": dimensions["n_ff_expert"],
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": EXPERT_SCALE,
    }


def _state_dict(dimensions: Dimensions, weights: Weights) -> dict[str, np.ndarray]:
    state = {
        "model.embed_tokens.weight": weights["token_embedding"],
        "model.norm.weight": weights["output_norm"],
        "lm_head.weight": weights["output"],
    }
    for layer in range(dimensions["n_layer"]):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        for name, (_, their_name) in _layer_names(dimensions, layer).items():
            array = weights[ours + name]
            state[theirs + their_name] = array[None, None, :, None] if name == "a_log" else array
        if layer in periodic_layers(dimensions):
            expansions = weights[ours + "k_expansion"].transpose(0, 2, 1), weights[ours + "v_expansion"]
            state[theirs + "self_attn.kv_b_proj.weight"] = np.concatenate(expansions, axis=1).reshape(-1, dimensions["kv_lora_rank"])
        else:
            taps = np.concatenate([weights[f"{ours}{part}_convolution"] for part in "qkv"])
            state[theirs + "self_attn.conv1d.weight"] = taps[:, None, :]
        if layer >= dimensions["n_dense"]:
            gate_and_up = [weights[f"{ours}expert_{part}"] for part in ("gate", "up")]
            state[theirs + "mlp.experts.gate_up_proj"] = np.concatenate(gate_and_up, axis=1)
    return state


KIMI_LINEAR = Family(
    name="kimi_linear",
    title="Kimi Linear: hybrid, delta attention with a decay per channel, latent attention, and experts",
    defaults={
        "n_vocab": 64, "n_embd": 32, "n_layer": 4, "n_head": 2, "head_dim": 16, "d_conv": 4, "kv_lora_rank": 16, "qk_nope_dim": 16,
        "qk_rope_dim": 8, "value_dim": 12, "n_ff": 48, "n_dense": 1, "n_expert": 3, "n_ff_expert": 16, "attention_period": 3,
    },
    bounds={
        "n_vocab": (8, 65536), "n_layer": (1, 64), "d_conv": (2, 8), "attention_period": (1, 64), "n_dense": (0, 64), "n_expert": (2, 64),
    },
    check=_check,
    tensors=_tensors,
    recurrent_layers=other_layers,
    attention_layers=periodic_layers,
    row_widths=lambda dimensions: RowWidths(
        3 * (dimensions["d_conv"] - 1) * inner_channels(dimensions), dimensions["head_dim"] * inner_channels(dimensions)
    ),
    state_layers=_state_layers,
    doubled=("n_embd", "n_head", "kv_lora_rank"),
    gguf_metadata=_gguf_metadata,
    gguf_tensors=_gguf_tensors,
    transformers_class="KimiLinearForCausalLM",
    transformers_configuration=_transformers_configuration,
    state_dict=_state_dict,
)  # fmt: skip
