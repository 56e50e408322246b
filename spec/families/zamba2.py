"""zamba2: Mamba-2 layers, and before some of them a transformer block whose weights are shared by all its uses.

Every `attention_period`-th layer, the first of them at index attention_period - 1, is a hybrid layer: the stream beside the token's embedding
goes through attention and an MLP without residuals, then through a projection of the layer's own, and is added to what the layer's mixer
reads. There are `n_block` such blocks, which take turns; each use has cells of its own, and adapters of its own (two small matrices each,
for q, k, v and the MLP). Every layer is recurrent; the hybrid layers are attention layers too.
What leaves the model is read off with the embedding's own matrix. llama.cpp does not run it. The weights are drawn so that every state row shows: the mixers as in mamba2.py; what attention and the MLP
make outweighs the stream that a hybrid layer's mixer reads. tests/quality/test_sensitivity.py holds them to it.
Sources: Glorioso et al. 2024, Zamba2 (arXiv:2411.15242); Transformers' Zamba2ForCausalLM.
"""

import math
from typing import Any

import numpy as np

from ..errors import UsageError
from ..state_sizes import StateLayers
from .family import Dimensions, Family, TensorFact, Weights
from .mamba2 import mixer_dimensions, mixer_row_widths, mixer_state, mixer_state_dict, mixer_tensors

NORM_EPSILON = 1e-5
ROPE_THETA = 10000.0
TIME_STEP_MIN = 1e-30
"""Transformers clamps dt from below and takes the logarithm of the bound: the bound is what no dt reaches."""
BLOCK_NAMES = {
    "input_norm": "input_layernorm", "q_projection": "self_attn.q_proj", "k_projection": "self_attn.k_proj",
    "v_projection": "self_attn.v_proj", "attention_out": "self_attn.o_proj", "ffn_norm": "pre_ff_layernorm",
    "ffn_gate_up": "feed_forward.gate_up_proj", "ffn_down": "feed_forward.down_proj",
}  # fmt: skip
"""Transformers' names of a shared block's weights."""
ADAPTER_NAMES = {
    "q": "self_attn.linear_q_adapter_list", "k": "self_attn.linear_k_adapter_list", "v": "self_attn.linear_v_adapter_list",
    "ffn": "feed_forward.gate_up_proj_adapter_list",
}  # fmt: skip
"""Transformers' names of a block's adapters, one in each list for every use."""


def head_size(dimensions: Dimensions) -> int:
    """Channels of one attention head: attention is as wide as the stream and the embedding together."""
    return 2 * dimensions["n_embd"] // dimensions["n_head"]


def hybrid_layers(dimensions: Dimensions) -> tuple[int, ...]:
    """Indices of the layers that use a shared block."""
    return tuple(layer for layer in range(dimensions["n_layer"]) if (layer + 1) % dimensions["attention_period"] == 0)


def block_of_use(dimensions: Dimensions) -> tuple[int, ...]:
    """The block that each hybrid layer uses."""
    return tuple(use % dimensions["n_block"] for use in range(len(hybrid_layers(dimensions))))


def _check(dimensions: Dimensions) -> None:
    if dimensions["d_inner"] % dimensions["n_head_ssm"] or dimensions["n_head_ssm"] % dimensions["n_group"]:
        raise UsageError("zamba2 needs d_inner divisible by n_head_ssm, and n_head_ssm divisible by n_group")
    if dimensions["n_embd"] % dimensions["n_head"] or dimensions["d_inner"] % dimensions["n_embd"]:
        raise UsageError("zamba2 needs n_embd divisible by n_head, and d_inner divisible by n_embd")


def _state_layers(dimensions: Dimensions) -> tuple[StateLayers, ...]:
    attention = {"n_head_kv": dimensions["n_head"], "head_dim": head_size(dimensions)}
    return (
        StateLayers(dimensions["n_layer"], "mamba2", mixer_state(dimensions)),
        StateLayers(len(hybrid_layers(dimensions)), "attention", attention),
    )


def _tensors(dimensions: Dimensions) -> tuple[TensorFact, ...]:
    n_embd, n_ff, rank = dimensions["n_embd"], dimensions["n_ff"], dimensions["adapter_rank"]
    scale, wide = 1 / math.sqrt(n_embd), 1 / math.sqrt(2 * n_embd)
    hybrid = hybrid_layers(dimensions)
    facts = [TensorFact("token_embedding", (dimensions["n_vocab"], n_embd), "normal", 1.03 * scale)]
    for block in sorted(set(block_of_use(dimensions))):
        prefix = f"blocks.{block}."
        facts += [
            TensorFact(prefix + "input_norm", (2 * n_embd,), "normal", 0.1, 1.0),
            TensorFact(prefix + "q_projection", (2 * n_embd, 2 * n_embd), "normal", 0.43 * wide),
            TensorFact(prefix + "k_projection", (2 * n_embd, 2 * n_embd), "normal", 0.43 * wide),
            TensorFact(prefix + "v_projection", (2 * n_embd, 2 * n_embd), "normal", 4 * wide),
            TensorFact(prefix + "attention_out", (n_embd, 2 * n_embd), "normal", 2 * wide),
            TensorFact(prefix + "ffn_norm", (n_embd,), "normal", 0.1, 1.0),
            TensorFact(prefix + "ffn_gate_up", (2 * n_ff, n_embd), "normal", 0.5 * scale),
            TensorFact(prefix + "ffn_down", (n_embd, n_ff), "normal", 1 / math.sqrt(n_ff)),
        ]
    for layer in range(dimensions["n_layer"]):
        prefix, growth = f"layers.{layer}.", min(1.45**layer, 8.0)
        facts += mixer_tensors(mixer_dimensions(dimensions), prefix, 0.36, 0.0765 * growth, -1.8)
        if layer in hybrid:
            facts.append(TensorFact(prefix + "block_projection", (n_embd, n_embd), "normal", 0.93 * growth * scale))
            for name, (gain, n_in, n_out) in {
                "q": (0.2, 2 * n_embd, 2 * n_embd), "k": (0.2, 2 * n_embd, 2 * n_embd), "v": (2.0, 2 * n_embd, 2 * n_embd),
                "ffn": (0.25, n_embd, 2 * n_ff),
            }.items():  # fmt: skip
                facts += [
                    TensorFact(f"{prefix}{name}_adapter_in", (rank, n_in), "normal", 1 / math.sqrt(n_in)),
                    TensorFact(f"{prefix}{name}_adapter_out", (n_out, rank), "normal", gain / math.sqrt(rank)),
                ]
    facts.append(TensorFact("output_norm", (n_embd,), "normal", 0.1, 0.98))
    return tuple(facts)


def _transformers_configuration(dimensions: Dimensions) -> dict[str, Any]:
    hybrid = hybrid_layers(dimensions)
    return {
        "vocab_size": dimensions["n_vocab"],
        "hidden_size": dimensions["n_embd"],
        "num_hidden_layers": dimensions["n_layer"],
        "layers_block_type": ["hybrid" if layer in hybrid else "linear_attention" for layer in range(dimensions["n_layer"])],
        "intermediate_size": dimensions["n_ff"],
        "num_attention_heads": dimensions["n_head"],
        "num_mem_blocks": dimensions["n_block"],
        "use_shared_attention_adapter": True,
        "adapter_rank": dimensions["adapter_rank"],
        "use_mem_rope": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "rms_norm_eps": NORM_EPSILON,
        "mamba_expand": dimensions["d_inner"] // dimensions["n_embd"],
        "n_mamba_heads": dimensions["n_head_ssm"],
        "mamba_ngroups": dimensions["n_group"],
        "mamba_d_state": dimensions["d_state"],
        "mamba_d_conv": dimensions["d_conv"],
        "time_step_min": TIME_STEP_MIN,
        "chunk_size": 8,
        "tie_word_embeddings": True,
    }


def _state_dict(dimensions: Dimensions, weights: Weights) -> dict[str, np.ndarray]:
    """Transformers' module names a shared block, and all its adapters, once for every layer that uses it: one array under several names."""
    state = {
        "model.embed_tokens.weight": weights["token_embedding"],
        "model.final_layernorm.weight": weights["output_norm"],
        "lm_head.weight": weights["token_embedding"],
    }
    hybrid, blocks = hybrid_layers(dimensions), block_of_use(dimensions)
    for layer in range(dimensions["n_layer"]):
        source, target = f"layers.{layer}.", f"model.layers.{layer}."
        if layer not in hybrid:
            state |= mixer_state_dict(weights, source, target, "input_layernorm", "mamba")
            continue
        state |= mixer_state_dict(weights, source, target + "mamba_decoder.", "input_layernorm", "mamba")
        state[target + "linear.weight"] = weights[source + "block_projection"]
        block, shared = blocks[hybrid.index(layer)], target + "shared_transformer."
        state |= {f"{shared}{theirs}.weight": weights[f"blocks.{block}.{ours}"] for ours, theirs in BLOCK_NAMES.items()}
        for use, user in enumerate(hybrid):
            for ours, theirs in ADAPTER_NAMES.items() if blocks[use] == block else ():
                state[f"{shared}{theirs}.{use}.0.weight"] = weights[f"layers.{user}.{ours}_adapter_in"]
                state[f"{shared}{theirs}.{use}.1.weight"] = weights[f"layers.{user}.{ours}_adapter_out"]
    return state


ZAMBA2 = Family(
    name="zamba2",
    title="Zamba2: hybrid, Mamba-2 layers and a shared transformer block with adapters",
    defaults={
        "n_vocab": 64, "n_embd": 48, "n_layer": 4, "n_head": 8, "n_ff": 48, "d_conv": 4, "d_inner": 96, "d_state": 16, "n_head_ssm": 6,
        "n_group": 1, "attention_period": 2, "n_block": 1, "adapter_rank": 4,
    },
    bounds={"n_vocab": (8, 65536), "n_layer": (1, 64), "d_conv": (2, 8), "attention_period": (1, 64), "n_block": (1, 64)},
    check=_check,
    tensors=_tensors,
    recurrent_layers=lambda dimensions: tuple(range(dimensions["n_layer"])),
    attention_layers=hybrid_layers,
    row_widths=lambda dimensions: mixer_row_widths(mixer_dimensions(dimensions)),
    state_layers=_state_layers,
    doubled=("n_embd", "d_inner", "n_head", "n_head_ssm"),
    transformers_class="Zamba2ForCausalLM",
    transformers_configuration=_transformers_configuration,
    state_dict=_state_dict,
)  # fmt: skip
