"""Facts of attention whose output is gated, with norms of queries and keys and a rotation of a head's first channels: what families share.

The weights are drawn so that every cell shows: attention is mild (small norms of queries and keys) and its values are large.
Source: Transformers' Qwen3NextForCausalLM and Qwen3_5ForCausalLM; llama.cpp's src/models/qwen35.cpp.
"""

import math
from typing import Any

from .delta_net import NORM_EPSILON
from .family import Dimensions, GgufTensor, TensorFact

ROPE_THETA = 10000.0

STATE_DICT_NAMES = {
    "q_projection": "q_proj.weight", "k_projection": "k_proj.weight", "v_projection": "v_proj.weight", "q_norm": "q_norm.weight",
    "k_norm": "k_norm.weight", "out_projection": "o_proj.weight",
}  # fmt: skip
"""What Transformers calls the weights of a layer."""

GGUF_NAMES = {
    "q_projection": "attn_q.weight", "k_projection": "attn_k.weight", "v_projection": "attn_v.weight",
    "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight", "out_projection": "attn_output.weight",
}  # fmt: skip
"""What llama.cpp calls them."""


def gated_attention_tensors(dimensions: Dimensions, prefix: str) -> list[TensorFact]:
    """The weights of one layer but its norm; in `q_projection` every head's query stands before its gate."""
    n_embd, head_dim = dimensions["n_embd"], dimensions["head_dim"]
    n_embd_q, n_embd_kv = dimensions["n_head"] * head_dim, dimensions["n_head_kv"] * head_dim
    scale = 1 / math.sqrt(n_embd)
    return [
        TensorFact(prefix + "q_projection", (2 * n_embd_q, n_embd), "normal", scale),
        TensorFact(prefix + "k_projection", (n_embd_kv, n_embd), "normal", scale),
        TensorFact(prefix + "v_projection", (n_embd_kv, n_embd), "normal", 8 * scale),
        TensorFact(prefix + "q_norm", (head_dim,), "uniform", 0.3, 0.5),
        TensorFact(prefix + "k_norm", (head_dim,), "uniform", 0.3, 0.5),
        TensorFact(prefix + "out_projection", (n_embd, n_embd_q), "normal", 3 / math.sqrt(n_embd_q)),
    ]


def gated_attention_gguf_metadata(dimensions: Dimensions, architecture: str) -> dict[str, Any]:
    return {
        f"{architecture}.attention.head_count": dimensions["n_head"],
        f"{architecture}.attention.head_count_kv": dimensions["n_head_kv"],
        f"{architecture}.attention.key_length": dimensions["head_dim"],
        f"{architecture}.attention.value_length": dimensions["head_dim"],
        f"{architecture}.attention.layer_norm_rms_epsilon": NORM_EPSILON,
        f"{architecture}.rope.freq_base": ROPE_THETA,
        f"{architecture}.rope.dimension_count": dimensions["n_rot"],
    }


def gated_attention_gguf_tensors(layer: int) -> list[GgufTensor]:
    return [GgufTensor(f"blk.{layer}.{theirs}", f"layers.{layer}.{ours}") for ours, theirs in GGUF_NAMES.items()]


def gated_attention_configuration(dimensions: Dimensions) -> dict[str, Any]:
    """Keyword arguments of a Transformers configuration."""
    return {
        "num_attention_heads": dimensions["n_head"],
        "num_key_value_heads": dimensions["n_head_kv"],
        "head_dim": dimensions["head_dim"],
        "rms_norm_eps": NORM_EPSILON,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "partial_rotary_factor": dimensions["n_rot"] / dimensions["head_dim"],
        },
    }
