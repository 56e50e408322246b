"""qwen3next: a hybrid of gated delta nets and gated attention, each followed by a mixture of experts (Qwen3-Next).

Every `attention_period`-th layer, the first of them at index attention_period - 1, is attention; the others are gated delta nets.

- Neighbouring value heads share a key head, in Transformers and in llama.cpp. The projection to beta and to the step is one matrix in both:
  for every key head the betas of its value heads, then their steps. The one to q, k, v and their gates is in Transformers, head by head;
  in llama.cpp gates stand apart.
- A norm's weight is what it multiplies by. Transformers keeps it less 1 (except in the gated norm): the weights lie between 0.5 and 2,
  where that difference is exact in float32. GGUF files hold it as it is here.
- All experts are used, so that nothing is selected; their shares are a softmax. A shared expert is added, times a sigmoid of its own.

The weights are drawn so that every state row shows and rounding does not: as in delta_net.py and gated_attention.py, and later mixers
outweigh what passes by them. tests/quality/test_sensitivity.py holds them to it.

Sources: Qwen Team 2025 (Qwen3-Next); Transformers' Qwen3NextForCausalLM; llama.cpp's src/models/qwen3next.cpp.
"""

import math
from typing import Any

import numpy as np

from . import delta_net, gated_attention
from .delta_net import (
    delta_net_configuration,
    delta_net_gguf_metadata,
    delta_net_row_widths,
    delta_net_tensors,
)
from .family import Dimensions, Family, GgufTensor, TensorFact, Weights, other_layers, periodic_layers
from .gated_attention import (
    gated_attention_configuration,
    gated_attention_gguf_metadata,
    gated_attention_gguf_tensors,
    gated_attention_tensors,
)
from .model_ends import MODEL_ENDS_GGUF, model_gguf_metadata
from .qwen35 import check_mixers, less_one, state_layers

GGUF_DELTA_NET = {ours: theirs for ours, theirs in delta_net.GGUF_NAMES.items() if ours not in ("beta_projection", "step_projection")} | {
    "rates_projection": "ssm_ba.weight"
}
STATE_DICT_DELTA_NET = {
    "rates_projection": "in_proj_ba.weight", "convolution": "conv1d.weight", "dt_bias": "dt_bias", "a_log": "A_log",
    "gated_norm": "norm.weight", "out_projection": "out_proj.weight",
}  # fmt: skip


def _delta_net_tensors(dimensions: Dimensions, prefix: str, out_scale: float) -> list[TensorFact]:
    rates = TensorFact(
        prefix + "rates_projection", (2 * dimensions["n_value_head"], dimensions["n_embd"]), "normal", 0.7 / math.sqrt(dimensions["n_embd"])
    )
    apart = (prefix + "beta_projection", prefix + "step_projection")
    return [fact for fact in delta_net_tensors(dimensions, prefix, out_scale) if fact.name not in apart] + [rates]


def expert_tensors(dimensions: Dimensions, prefix: str) -> list[TensorFact]:
    """The weights of a layer's mixture of experts."""
    n_embd, n_expert, n_ff, n_ff_shared = (dimensions[name] for name in ("n_embd", "n_expert", "n_ff_expert", "n_ff_shared"))
    scale = 1 / math.sqrt(n_embd)
    return [
        TensorFact(prefix + "router", (n_expert, n_embd), "normal", scale),
        TensorFact(prefix + "expert_gate", (n_expert, n_ff, n_embd), "normal", scale),
        TensorFact(prefix + "expert_up", (n_expert, n_ff, n_embd), "normal", scale),
        TensorFact(prefix + "expert_down", (n_expert, n_embd, n_ff), "normal", 0.5 / math.sqrt(n_ff)),
        TensorFact(prefix + "shared_router", (1, n_embd), "normal", scale),
        TensorFact(prefix + "shared_gate", (n_ff_shared, n_embd), "normal", scale),
        TensorFact(prefix + "shared_up", (n_ff_shared, n_embd), "normal", scale),
        TensorFact(prefix + "shared_down", (n_embd, n_ff_shared), "normal", 0.5 / math.sqrt(n_ff_shared)),
    ]


def _tensors(dimensions: Dimensions) -> tuple[TensorFact, ...]:
    n_embd = dimensions["n_embd"]
    attention = periodic_layers(dimensions)
    facts = [TensorFact("token_embedding", (dimensions["n_vocab"], n_embd), "normal", 1.0)]
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        facts.append(TensorFact(prefix + "input_norm", (n_embd,), "uniform", 0.4, 0.8))
        if layer in attention:
            facts += gated_attention_tensors(dimensions, prefix)
        else:
            facts += _delta_net_tensors(dimensions, prefix, 2 * min(1.5**layer, 4.0))
        facts.append(TensorFact(prefix + "ffn_norm", (n_embd,), "uniform", 0.4, 0.8))
        facts += expert_tensors(dimensions, prefix)
    facts += [
        TensorFact("output_norm", (n_embd,), "uniform", 0.4, 0.8),
        TensorFact("output", (dimensions["n_vocab"], n_embd), "normal", 1 / math.sqrt(n_embd)),
    ]
    return tuple(facts)


def split_rates(dimensions: Dimensions, projection: Any) -> tuple[Any, Any]:
    """The projections to beta and to the step, [value heads, n_embd] each, of the joint one: a NumPy array or a tensor."""
    both = projection.reshape(dimensions["n_group"], 2, -1, dimensions["n_embd"])
    beta, step = (both[:, part].reshape(dimensions["n_value_head"], dimensions["n_embd"]) for part in (0, 1))
    return beta, step


def _gguf_metadata(dimensions: Dimensions) -> dict[str, Any]:
    return model_gguf_metadata(dimensions, "qwen3next") | {
        "qwen3next.feed_forward_length": dimensions["n_ff_shared"],
        "qwen3next.full_attention_interval": dimensions["attention_period"],
        "qwen3next.expert_count": dimensions["n_expert"],
        "qwen3next.expert_used_count": dimensions["n_expert"],
        "qwen3next.expert_feed_forward_length": dimensions["n_ff_expert"],
        "qwen3next.expert_shared_feed_forward_length": dimensions["n_ff_shared"],
        **gated_attention_gguf_metadata(dimensions, "qwen3next"),
        **delta_net_gguf_metadata(dimensions, "qwen3next"),
    }


def _gguf_tensors(dimensions: Dimensions) -> tuple[GgufTensor, ...]:
    tensors = [*MODEL_ENDS_GGUF]
    names = {
        "input_norm": "attn_norm.weight", "ffn_norm": "post_attention_norm.weight", "router": "ffn_gate_inp.weight",
        "expert_gate": "ffn_gate_exps.weight", "expert_up": "ffn_up_exps.weight", "expert_down": "ffn_down_exps.weight",
        "shared_gate": "ffn_gate_shexp.weight", "shared_up": "ffn_up_shexp.weight", "shared_down": "ffn_down_shexp.weight",
    }  # fmt: skip
    attention = periodic_layers(dimensions)
    for layer in range(dimensions["n_layer"]):
        ours, theirs = f"layers.{layer}.", f"blk.{layer}."
        tensors += [GgufTensor(theirs + their_name, ours + name) for name, their_name in names.items()]
        tensors.append(GgufTensor(theirs + "ffn_gate_inp_shexp.weight", ours + "shared_router", (dimensions["n_embd"],)))
        if layer in attention:
            tensors += gated_attention_gguf_tensors(layer)
        else:
            tensors += [
                GgufTensor(theirs + their_name, ours + name, transform="negative exponential" if name == "a_log" else "")
                for name, their_name in GGUF_DELTA_NET.items()
            ]
    return tuple(tensors)


def _transformers_configuration(dimensions: Dimensions) -> dict[str, Any]:
    attention = periodic_layers(dimensions)
    return {
        "vocab_size": dimensions["n_vocab"],
        "hidden_size": dimensions["n_embd"],
        "num_hidden_layers": dimensions["n_layer"],
        "tie_word_embeddings": False,
        "layer_types": ["full_attention" if layer in attention else "linear_attention" for layer in range(dimensions["n_layer"])],
        "num_experts": dimensions["n_expert"],
        "num_experts_per_tok": dimensions["n_expert"],
        "moe_intermediate_size": dimensions["n_ff_expert"],
        "shared_expert_intermediate_size": dimensions["n_ff_shared"],
        "norm_topk_prob": True,
        **gated_attention_configuration(dimensions),
        **delta_net_configuration(dimensions),
    }


def _state_dict(dimensions: Dimensions, weights: Weights) -> dict[str, np.ndarray]:
    state = {
        "model.embed_tokens.weight": weights["token_embedding"],
        "model.norm.weight": weights["output_norm"] - np.float32(1),
        "lm_head.weight": weights["output"],
    }
    names = {
        "input_norm": "input_layernorm.weight", "ffn_norm": "post_attention_layernorm.weight", "router": "mlp.gate.weight",
        "expert_down": "mlp.experts.down_proj", "shared_router": "mlp.shared_expert_gate.weight",
        "shared_gate": "mlp.shared_expert.gate_proj.weight", "shared_up": "mlp.shared_expert.up_proj.weight",
        "shared_down": "mlp.shared_expert.down_proj.weight",
    }  # fmt: skip
    attention = periodic_layers(dimensions)
    for layer in range(dimensions["n_layer"]):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        for name, their_name in names.items():
            state[theirs + their_name] = less_one(name, weights[ours + name])
        state[theirs + "mlp.experts.gate_up_proj"] = np.concatenate([weights[ours + "expert_gate"], weights[ours + "expert_up"]], axis=1)
        if layer in attention:
            for name, their_name in gated_attention.STATE_DICT_NAMES.items():
                state[f"{theirs}self_attn.{their_name}"] = less_one(name, weights[ours + name])
        else:
            for name, their_name in STATE_DICT_DELTA_NET.items():
                array = weights[ours + name]
                state[f"{theirs}linear_attn.{their_name}"] = array[:, None, :] if name == "convolution" else array
            state[f"{theirs}linear_attn.in_proj_qkvz.weight"] = _head_by_head(
                dimensions, weights[ours + "qkv_projection"], weights[ours + "gate_projection"]
            )
    return state


def _head_by_head(dimensions: Dimensions, qkv: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """For every key head its q, its k, the v of its value heads and their gates."""
    n_group, n_embd = dimensions["n_group"], dimensions["n_embd"]
    width = n_group * dimensions["d_state"]
    parts = (qkv[:width], qkv[width : 2 * width], qkv[2 * width :], gate)
    return np.concatenate([part.reshape(n_group, -1, n_embd) for part in parts], axis=1).reshape(-1, n_embd)


QWEN3NEXT = Family(
    name="qwen3next",
    title="Qwen3-Next: hybrid, gated delta nets with convolutions, gated attention, and experts",
    defaults={
        "n_vocab": 64, "n_embd": 32, "n_layer": 4, "n_head": 2, "n_head_kv": 1, "head_dim": 16, "n_rot": 8, "n_expert": 3,
        "n_ff_expert": 16, "n_ff_shared": 24, "d_conv": 4, "d_state": 16, "n_group": 2, "n_value_head": 4, "attention_period": 3,
    },
    bounds={
        "n_vocab": (8, 65536), "n_layer": (1, 64), "d_conv": (2, 8), "attention_period": (1, 64), "n_rot": (2, 4096), "n_expert": (1, 64),
    },
    check=lambda dimensions: check_mixers(dimensions, "qwen3next"),
    tensors=_tensors,
    recurrent_layers=other_layers,
    attention_layers=periodic_layers,
    row_widths=delta_net_row_widths,
    state_layers=state_layers,
    doubled=("n_embd", "n_head", "n_head_kv", "n_group", "n_value_head"),
    gguf_metadata=_gguf_metadata,
    gguf_tensors=_gguf_tensors,
    transformers_class="Qwen3NextForCausalLM",
    transformers_configuration=_transformers_configuration,
    state_dict=_state_dict,
)  # fmt: skip
