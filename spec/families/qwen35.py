"""qwen35: a hybrid of gated delta nets and gated attention, each followed by a SwiGLU feed-forward layer (Qwen3.5's text model).

Every `attention_period`-th layer, the first of them at index attention_period - 1, is attention; the others are gated delta nets: a causal
convolution over q, k and v, then a state that decays, forgets what it holds along the key, and takes the new value in.

- Value heads are in llama.cpp's order: value head h is served by key head h modulo n_group. Transformers has them grouped by key head;
  its state dict is put into that order.
- A norm's weight is what it multiplies by. Transformers keeps it less 1 (except in the gated norm): the weights lie between 0.5 and 2,
  where that difference is exact in float32. GGUF files hold it as it is here.
- Positions in llama.cpp have several parts (M-RoPE). A text token's are all the same, and the sections cover every rotated pair, so that
  the rotation is the ordinary one, of the first n_rot channels of a head.

The weights are drawn so that every state row shows: a state loses about a third a token, so that one that is a token late differs; later
mixers outweigh what passes by them; attention is mild and its values large. And so that rounding does not: a delta net's output can be
close to zero, and the norm after it would enlarge its rounding errors without bound; convolutions are small, so that values are, and the
norm's epsilon is the bound. tests/quality/test_sensitivity.py holds them to it.

Sources: Yang, Kautz and Hatamizadeh 2024 (gated delta networks, arXiv:2412.06464); Transformers' Qwen3_5ForCausalLM; llama.cpp's
src/models/qwen35.cpp and delta-net-base.cpp.
"""

import math
from typing import Any, Literal

import msgspec
import numpy as np

from ..errors import UsageError
from ..models import Model
from ..state_sizes import StateLayers
from .family import Dimensions, Family, GgufTensor, RowWidths, TensorFact, Weights

NORM_EPSILON = 1e-6
"""Of every norm, that of q and k to unit length included (where Transformers has no other)."""
ROPE_THETA = 10000.0


def inner_channels(dimensions: Dimensions) -> int:
    """Channels of all value heads of a delta net."""
    return dimensions["n_value_head"] * dimensions["d_state"]


def convolution_channels(dimensions: Dimensions) -> int:
    """Channels of the causal convolution: q, k and v side by side."""
    return 2 * dimensions["n_group"] * dimensions["d_state"] + inner_channels(dimensions)


def _check(dimensions: Dimensions) -> None:
    if dimensions["n_head"] % dimensions["n_head_kv"] or dimensions["n_value_head"] % dimensions["n_group"]:
        raise UsageError("qwen35 needs n_head divisible by n_head_kv, and n_value_head divisible by n_group")
    if dimensions["n_rot"] % 2 or dimensions["n_rot"] > dimensions["head_dim"]:
        raise UsageError("qwen35 needs an even n_rot, at most head_dim")


def _attention_layers(dimensions: Dimensions) -> tuple[int, ...]:
    return tuple(layer for layer in range(dimensions["n_layer"]) if (layer + 1) % dimensions["attention_period"] == 0)


def _recurrent_layers(dimensions: Dimensions) -> tuple[int, ...]:
    return tuple(layer for layer in range(dimensions["n_layer"]) if (layer + 1) % dimensions["attention_period"] != 0)


def _state_layers(dimensions: Dimensions) -> tuple[StateLayers, ...]:
    delta_net = {"d_inner": inner_channels(dimensions)} | {name: dimensions[name] for name in ("d_state", "n_group", "d_conv")}
    return (
        StateLayers(len(_recurrent_layers(dimensions)), "gated_delta_net", delta_net),
        StateLayers(len(_attention_layers(dimensions)), "attention", {name: dimensions[name] for name in ("n_head_kv", "head_dim")}),
    )


def _tensors(dimensions: Dimensions) -> tuple[TensorFact, ...]:
    n_embd, n_ff, d_state = dimensions["n_embd"], dimensions["n_ff"], dimensions["d_state"]
    d_inner, channels, n_value_head = inner_channels(dimensions), convolution_channels(dimensions), dimensions["n_value_head"]
    n_embd_q, n_embd_kv = dimensions["n_head"] * dimensions["head_dim"], dimensions["n_head_kv"] * dimensions["head_dim"]
    scale = 1 / math.sqrt(n_embd)
    attention = _attention_layers(dimensions)
    facts = [TensorFact("token_embedding", (dimensions["n_vocab"], n_embd), "normal", 1.0)]
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        facts.append(TensorFact(prefix + "input_norm", (n_embd,), "uniform", 0.4, 0.8))
        if layer in attention:
            facts += [
                TensorFact(prefix + "q_projection", (2 * n_embd_q, n_embd), "normal", scale),
                TensorFact(prefix + "k_projection", (n_embd_kv, n_embd), "normal", scale),
                TensorFact(prefix + "v_projection", (n_embd_kv, n_embd), "normal", 8 * scale),
                TensorFact(prefix + "q_norm", (dimensions["head_dim"],), "uniform", 0.3, 0.5),
                TensorFact(prefix + "k_norm", (dimensions["head_dim"],), "uniform", 0.3, 0.5),
                TensorFact(prefix + "out_projection", (n_embd, n_embd_q), "normal", 3 / math.sqrt(n_embd_q)),
            ]
        else:
            facts += [
                TensorFact(prefix + "qkv_projection", (channels, n_embd), "normal", 1 * scale),
                TensorFact(prefix + "gate_projection", (d_inner, n_embd), "normal", scale),
                TensorFact(prefix + "beta_projection", (n_value_head, n_embd), "normal", 0.7 * scale),
                TensorFact(prefix + "step_projection", (n_value_head, n_embd), "normal", 0.7 * scale),
                TensorFact(prefix + "convolution", (channels, dimensions["d_conv"]), "normal", 0.02),
                TensorFact(prefix + "dt_bias", (n_value_head,), "uniform", 0.7, 0.3),
                TensorFact(prefix + "a_log", (n_value_head,), "uniform", 0.7, -1.2),
                TensorFact(prefix + "gated_norm", (d_state,), "uniform", 0.4, 0.8),
                TensorFact(prefix + "out_projection", (n_embd, d_inner), "normal", 2 * min(1.5**layer, 4.0) / math.sqrt(d_inner)),
            ]
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


def _doubled(model: Model) -> Model:
    changed = dict(model.dimensions)
    for name in ("n_embd", "n_head", "n_head_kv", "n_group", "n_value_head"):
        changed[name] = 2 * changed.get(name, QWEN35.defaults[name])
    return msgspec.structs.replace(model, dimensions=tuple(sorted(changed.items())))


def rotation_sections(dimensions: Dimensions) -> list[int]:
    """How many of the rotated pairs take their angle from each part of a position; the parts take turns, and the fourth has none."""
    pairs = dimensions["n_rot"] // 2
    return [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]


def _gguf_metadata(dimensions: Dimensions) -> dict[str, Any]:
    return {
        "general.architecture": "qwen35",
        "qwen35.vocab_size": dimensions["n_vocab"],
        "qwen35.context_length": 1 << 20,
        "qwen35.embedding_length": dimensions["n_embd"],
        "qwen35.block_count": dimensions["n_layer"],
        "qwen35.feed_forward_length": dimensions["n_ff"],
        "qwen35.attention.head_count": dimensions["n_head"],
        "qwen35.attention.head_count_kv": dimensions["n_head_kv"],
        "qwen35.attention.key_length": dimensions["head_dim"],
        "qwen35.attention.value_length": dimensions["head_dim"],
        "qwen35.attention.layer_norm_rms_epsilon": NORM_EPSILON,
        "qwen35.full_attention_interval": dimensions["attention_period"],
        "qwen35.rope.freq_base": ROPE_THETA,
        "qwen35.rope.dimension_count": dimensions["n_rot"],
        "qwen35.rope.dimension_sections": rotation_sections(dimensions),
        "qwen35.ssm.conv_kernel": dimensions["d_conv"],
        "qwen35.ssm.inner_size": inner_channels(dimensions),
        "qwen35.ssm.state_size": dimensions["d_state"],
        "qwen35.ssm.time_step_rank": dimensions["n_value_head"],
        "qwen35.ssm.group_count": dimensions["n_group"],
    }


def _gguf_tensors(dimensions: Dimensions) -> tuple[GgufTensor, ...]:
    tensors = [
        GgufTensor("token_embd.weight", "token_embedding"),
        GgufTensor("output_norm.weight", "output_norm"),
        GgufTensor("output.weight", "output"),
    ]
    every = {
        "input_norm": "attn_norm.weight", "ffn_norm": "post_attention_norm.weight", "ffn_gate": "ffn_gate.weight",
        "ffn_up": "ffn_up.weight", "ffn_down": "ffn_down.weight",
    }  # fmt: skip
    attention = {
        "q_projection": "attn_q.weight", "k_projection": "attn_k.weight", "v_projection": "attn_v.weight",
        "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight", "out_projection": "attn_output.weight",
    }  # fmt: skip
    delta_net = {
        "qkv_projection": "attn_qkv.weight", "gate_projection": "attn_gate.weight", "beta_projection": "ssm_beta.weight",
        "step_projection": "ssm_alpha.weight", "convolution": "ssm_conv1d.weight", "dt_bias": "ssm_dt.bias", "a_log": "ssm_a",
        "gated_norm": "ssm_norm.weight", "out_projection": "ssm_out.weight",
    }  # fmt: skip
    attention_layers = _attention_layers(dimensions)
    for layer in range(dimensions["n_layer"]):
        for ours, theirs in (every | (attention if layer in attention_layers else delta_net)).items():
            transform: Literal["", "negative exponential"] = "negative exponential" if ours == "a_log" else ""
            tensors.append(GgufTensor(f"blk.{layer}.{theirs}", f"layers.{layer}.{ours}", transform=transform))
    return tuple(tensors)


def _transformers_configuration(dimensions: Dimensions) -> dict[str, Any]:
    attention = _attention_layers(dimensions)
    return {
        "vocab_size": dimensions["n_vocab"],
        "hidden_size": dimensions["n_embd"],
        "intermediate_size": dimensions["n_ff"],
        "num_hidden_layers": dimensions["n_layer"],
        "num_attention_heads": dimensions["n_head"],
        "num_key_value_heads": dimensions["n_head_kv"],
        "head_dim": dimensions["head_dim"],
        "rms_norm_eps": NORM_EPSILON,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "partial_rotary_factor": dimensions["n_rot"] / dimensions["head_dim"],
            "mrope_section": rotation_sections(dimensions)[:3],
        },
        "linear_conv_kernel_dim": dimensions["d_conv"],
        "linear_key_head_dim": dimensions["d_state"],
        "linear_value_head_dim": dimensions["d_state"],
        "linear_num_key_heads": dimensions["n_group"],
        "linear_num_value_heads": dimensions["n_value_head"],
        "tie_word_embeddings": False,
        "layer_types": ["full_attention" if layer in attention else "linear_attention" for layer in range(dimensions["n_layer"])],
    }


def _state_dict(dimensions: Dimensions, weights: Weights) -> dict[str, np.ndarray]:
    state = {
        "model.embed_tokens.weight": weights["token_embedding"],
        "model.norm.weight": weights["output_norm"] - np.float32(1),
        "lm_head.weight": weights["output"],
    }
    names = {
        "input_norm": "input_layernorm.weight", "q_projection": "self_attn.q_proj.weight", "k_projection": "self_attn.k_proj.weight",
        "v_projection": "self_attn.v_proj.weight", "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight",
        "qkv_projection": "linear_attn.in_proj_qkv.weight", "gate_projection": "linear_attn.in_proj_z.weight",
        "beta_projection": "linear_attn.in_proj_b.weight", "step_projection": "linear_attn.in_proj_a.weight",
        "convolution": "linear_attn.conv1d.weight", "dt_bias": "linear_attn.dt_bias", "a_log": "linear_attn.A_log",
        "gated_norm": "linear_attn.norm.weight", "ffn_norm": "post_attention_layernorm.weight", "ffn_gate": "mlp.gate_proj.weight",
        "ffn_up": "mlp.up_proj.weight", "ffn_down": "mlp.down_proj.weight",
    }  # fmt: skip
    attention = _attention_layers(dimensions)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        out = "self_attn.o_proj.weight" if layer in attention else "linear_attn.out_proj.weight"
        for name, their_name in (names | {"out_projection": out}).items():
            if prefix + name in weights:
                array = weights[prefix + name]
                state[f"model.{prefix}{their_name}"] = _as_theirs(dimensions, name, array, layer in attention)
    return state


def _as_theirs(dimensions: Dimensions, name: str, array: np.ndarray, attention: bool) -> np.ndarray:
    """A layer's weight in Transformers' form: value heads grouped by key head, norms less 1, convolutions with an axis of one."""
    if name in ("input_norm", "ffn_norm", "q_norm", "k_norm"):
        return np.asarray(array - np.float32(1))
    if name in ("gate_projection", "beta_projection", "step_projection", "dt_bias", "a_log"):
        return grouped_by_key_head(dimensions, array)
    if name in ("qkv_projection", "convolution"):
        key_channels = 2 * dimensions["n_group"] * dimensions["d_state"]
        array = np.concatenate([array[:key_channels], grouped_by_key_head(dimensions, array[key_channels:])])
        return array[:, None, :] if name == "convolution" else array
    if name == "out_projection" and not attention:
        return grouped_by_key_head(dimensions, array.T).T
    return array


def grouped_by_key_head(dimensions: Dimensions, array: np.ndarray) -> np.ndarray:
    """The first axis's value heads, in turn of their key heads here, side by side for every key head."""
    heads = array.reshape(-1, dimensions["n_group"], array.shape[0] // dimensions["n_value_head"], *array.shape[1:])
    return np.asarray(heads.swapaxes(0, 1).reshape(array.shape))


QWEN35 = Family(
    name="qwen35",
    title="Qwen3.5: hybrid, gated delta nets with convolutions, and gated attention",
    defaults={
        "n_vocab": 64, "n_embd": 32, "n_layer": 4, "n_head": 2, "n_head_kv": 1, "head_dim": 16, "n_rot": 8, "n_ff": 48,
        "d_conv": 4, "d_state": 16, "n_group": 2, "n_value_head": 4, "attention_period": 3,
    },
    bounds={"n_vocab": (8, 65536), "n_layer": (1, 64), "d_conv": (2, 8), "attention_period": (1, 64), "n_rot": (2, 4096)},
    check=_check,
    tensors=_tensors,
    recurrent_layers=_recurrent_layers,
    attention_layers=_attention_layers,
    row_widths=lambda dimensions: RowWidths(
        (dimensions["d_conv"] - 1) * convolution_channels(dimensions), dimensions["d_state"] * inner_channels(dimensions)
    ),
    state_layers=_state_layers,
    doubled=_doubled,
    gguf_metadata=_gguf_metadata,
    gguf_tensors=_gguf_tensors,
    transformers_class="Qwen3_5ForCausalLM",
    transformers_configuration=_transformers_configuration,
    state_dict=_state_dict,
)  # fmt: skip
