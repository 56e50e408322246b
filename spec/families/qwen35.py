"""qwen35: a hybrid of gated delta nets and gated attention, each followed by a SwiGLU feed-forward layer (Qwen3.5's text model).

Every `attention_period`-th layer, the first of them at index attention_period - 1, is attention; the others are gated delta nets: a causal
convolution over q, k and v, then a state that decays, forgets what it holds along the key, and takes the new value in.

- Value heads are in llama.cpp's order: value head h is served by key head h modulo n_group. Transformers has them grouped by key head;
  its state dict is put into that order.
- A norm's weight is what it multiplies by. Transformers keeps it less 1 (except in the gated norm): the weights lie between 0.5 and 2,
  where that difference is exact in float32. GGUF files hold it as it is here.
- Positions in llama.cpp have several parts (M-RoPE). A text token's are all the same, and the sections cover every rotated pair, so that
  the rotation is the ordinary one, of the first n_rot channels of a head.

The weights are drawn so that every state row shows and rounding does not: as in delta_net.py and gated_attention.py, and later mixers
outweigh what passes by them. tests/quality/test_sensitivity.py holds them to it.

Sources: Yang, Kautz and Hatamizadeh 2024 (gated delta networks, arXiv:2412.06464); Transformers' Qwen3_5ForCausalLM; llama.cpp's
src/models/qwen35.cpp and delta-net-base.cpp.
"""

import math
from typing import Any

import numpy as np

from ..errors import UsageError
from ..state_sizes import StateLayers
from . import delta_net, gated_attention
from .delta_net import (
    delta_net_configuration,
    delta_net_gguf_metadata,
    delta_net_gguf_tensors,
    delta_net_row_widths,
    delta_net_state,
    delta_net_state_layers,
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


def check_mixers(dimensions: Dimensions, family: str) -> None:
    """Raise UsageError when the dimensions make no delta net, or no gated attention."""
    if dimensions["n_head"] % dimensions["n_head_kv"] or dimensions["n_value_head"] % dimensions["n_group"]:
        raise UsageError(f"{family} needs n_head divisible by n_head_kv, and n_value_head divisible by n_group")
    if dimensions["n_rot"] % 2 or dimensions["n_rot"] > dimensions["head_dim"]:
        raise UsageError(f"{family} needs an even n_rot, at most head_dim")


def state_layers(dimensions: Dimensions) -> tuple[StateLayers, ...]:
    return (
        delta_net_state_layers(dimensions, len(other_layers(dimensions))),
        StateLayers(len(periodic_layers(dimensions)), "attention", {name: dimensions[name] for name in ("n_head_kv", "head_dim")}),
    )


def _tensors(dimensions: Dimensions) -> tuple[TensorFact, ...]:
    n_embd, n_ff = dimensions["n_embd"], dimensions["n_ff"]
    scale = 1 / math.sqrt(n_embd)
    attention = periodic_layers(dimensions)
    facts = [TensorFact("token_embedding", (dimensions["n_vocab"], n_embd), "normal", 1.0)]
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        facts.append(TensorFact(prefix + "input_norm", (n_embd,), "uniform", 0.4, 0.8))
        if layer in attention:
            facts += gated_attention_tensors(dimensions, prefix)
        else:
            facts += delta_net_tensors(dimensions, prefix, 2 * min(1.5**layer, 4.0))
        facts += [
            TensorFact(prefix + "ffn_norm", (n_embd,), "uniform", 0.4, 0.8),
            TensorFact(prefix + "ffn_gate", (n_ff, n_embd), "normal", scale),
            TensorFact(prefix + "ffn_up", (n_ff, n_embd), "normal", scale),
            TensorFact(prefix + "ffn_down", (n_embd, n_ff), "normal", 0.5 / math.sqrt(n_ff)),
        ]
    facts += [
        TensorFact("output_norm", (n_embd,), "uniform", 0.4, 0.8),
        TensorFact("output", (dimensions["n_vocab"], n_embd), "normal", scale),
    ]
    return tuple(facts)


def rotation_sections(dimensions: Dimensions) -> list[int]:
    """How many of the rotated pairs take their angle from each part of a position; the parts take turns, and the fourth has none."""
    pairs = dimensions["n_rot"] // 2
    return [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]


def _gguf_metadata(dimensions: Dimensions) -> dict[str, Any]:
    return model_gguf_metadata(dimensions, "qwen35") | {
        "qwen35.feed_forward_length": dimensions["n_ff"],
        "qwen35.full_attention_interval": dimensions["attention_period"],
        "qwen35.rope.dimension_sections": rotation_sections(dimensions),
        **gated_attention_gguf_metadata(dimensions, "qwen35"),
        **delta_net_gguf_metadata(dimensions, "qwen35"),
    }


def _gguf_tensors(dimensions: Dimensions) -> tuple[GgufTensor, ...]:
    tensors = [*MODEL_ENDS_GGUF]
    names = {
        "input_norm": "attn_norm.weight", "ffn_norm": "post_attention_norm.weight", "ffn_gate": "ffn_gate.weight",
        "ffn_up": "ffn_up.weight", "ffn_down": "ffn_down.weight",
    }  # fmt: skip
    attention = periodic_layers(dimensions)
    for layer in range(dimensions["n_layer"]):
        tensors += [GgufTensor(f"blk.{layer}.{theirs}", f"layers.{layer}.{ours}") for ours, theirs in names.items()]
        tensors += gated_attention_gguf_tensors(layer) if layer in attention else delta_net_gguf_tensors(layer)
    return tuple(tensors)


def _transformers_configuration(dimensions: Dimensions) -> dict[str, Any]:
    attention = periodic_layers(dimensions)
    configuration = {
        "vocab_size": dimensions["n_vocab"],
        "hidden_size": dimensions["n_embd"],
        "intermediate_size": dimensions["n_ff"],
        "num_hidden_layers": dimensions["n_layer"],
        "tie_word_embeddings": False,
        "layer_types": ["full_attention" if layer in attention else "linear_attention" for layer in range(dimensions["n_layer"])],
        **gated_attention_configuration(dimensions),
        **delta_net_configuration(dimensions),
    }
    configuration["rope_parameters"]["mrope_section"] = rotation_sections(dimensions)[:3]
    return configuration


def _state_dict(dimensions: Dimensions, weights: Weights) -> dict[str, np.ndarray]:
    state = {
        "model.embed_tokens.weight": weights["token_embedding"],
        "model.norm.weight": weights["output_norm"] - np.float32(1),
        "lm_head.weight": weights["output"],
    }
    names = {
        "input_norm": "input_layernorm.weight", "ffn_norm": "post_attention_layernorm.weight", "ffn_gate": "mlp.gate_proj.weight",
        "ffn_up": "mlp.up_proj.weight", "ffn_down": "mlp.down_proj.weight",
    }  # fmt: skip
    attention = periodic_layers(dimensions)
    for layer in range(dimensions["n_layer"]):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        for name, their_name in names.items():
            state[theirs + their_name] = less_one(name, weights[ours + name])
        if layer in attention:
            for name, their_name in gated_attention.STATE_DICT_NAMES.items():
                state[f"{theirs}self_attn.{their_name}"] = less_one(name, weights[ours + name])
        else:
            for name, their_name in delta_net.STATE_DICT_NAMES.items():
                state[f"{theirs}linear_attn.{their_name}"] = delta_net_state(dimensions, name, weights[ours + name])
    return state


def less_one(name: str, array: np.ndarray) -> np.ndarray:
    """Transformers keeps a norm's weight less 1, but not a gated norm's."""
    return np.asarray(array - np.float32(1)) if name in ("input_norm", "ffn_norm", "q_norm", "k_norm") else array


QWEN35 = Family(
    name="qwen35",
    title="Qwen3.5: hybrid, gated delta nets with convolutions, and gated attention",
    defaults={
        "n_vocab": 64, "n_embd": 32, "n_layer": 4, "n_head": 2, "n_head_kv": 1, "head_dim": 16, "n_rot": 8, "n_ff": 48,
        "d_conv": 4, "d_state": 16, "n_group": 2, "n_value_head": 4, "attention_period": 3,
    },
    bounds={"n_vocab": (8, 65536), "n_layer": (1, 64), "d_conv": (2, 8), "attention_period": (1, 64), "n_rot": (2, 4096)},
    check=lambda dimensions: check_mixers(dimensions, "qwen35"),
    tensors=_tensors,
    recurrent_layers=other_layers,
    attention_layers=periodic_layers,
    row_widths=delta_net_row_widths,
    state_layers=state_layers,
    doubled=("n_embd", "n_head", "n_head_kv", "n_group", "n_value_head"),
    gguf_metadata=_gguf_metadata,
    gguf_tensors=_gguf_tensors,
    transformers_class="Qwen3_5ForCausalLM",
    transformers_configuration=_transformers_configuration,
    state_dict=_state_dict,
)  # fmt: skip
