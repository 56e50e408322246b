"""falcon_h1: in every layer a Mamba-2 mixer and grouped-query attention with RoPE side by side, fed by one norm and added; then SwiGLU.

Every layer is both a recurrent and an attention layer. By default a mixer has no gated norm, as in most released models: `ssm_norm` 1 gives
it one. Falcon-H1 multiplies nearly every activation by a constant (its muP multipliers): llama.cpp has them in its weights, and ours are
those; Transformers is given multipliers other than 1 and weights divided by them, all powers of two, so that nothing is rounded.
The weights are drawn so that every state row shows: the mixers as in mamba2.py, attention mild (small queries and keys) with large values,
and both grow with the layers, so that the later ones outweigh what passes by. tests/quality/test_sensitivity.py holds them to it.
Sources: Zuo et al. 2025, Falcon-H1 (arXiv:2507.22448); Transformers' FalconH1ForCausalLM; llama.cpp's src/models/falcon-h1.cpp.
"""

from typing import Any

import numpy as np

from ..errors import UsageError
from ..state_sizes import StateLayers
from .attention import Attention, attention_state, attention_tensors, head_channels
from .family import Dimensions, Family, GgufTensor, TensorFact, Weights
from .mamba2 import (
    convolution_channels,
    mixer_dimensions,
    mixer_gguf_metadata,
    mixer_gguf_tensors,
    mixer_row_widths,
    mixer_state,
    mixer_state_dict,
    mixer_tensors,
)
from .model_ends import MODEL_ENDS_GGUF, feed_forward_tensors, model_ends, model_gguf_metadata

NORM_EPSILON = 1e-5
ROPE_THETA = 10000.0
ATTENTION = Attention(ROPE_THETA)

MULTIPLIERS: dict[str, float] = {
    "embedding_multiplier": 4.0, "lm_head_multiplier": 0.125, "key_multiplier": 0.25, "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 0.5, "ssm_in_multiplier": 0.5, "ssm_out_multiplier": 2.0,
}  # fmt: skip
"""What Transformers multiplies activations by, by the names of its configuration."""
SSM_MULTIPLIERS = (0.5, 2.0, 4.0, 0.25, 8.0)
"""Those of the parts of a mixer's in-projection: gate, x, B, C and step."""
MLP_MULTIPLIERS = (2.0, 0.25)
"""Those of the gate and of what leaves the feed-forward part."""


def _check(dimensions: Dimensions) -> None:
    if dimensions["d_inner"] % dimensions["n_head_ssm"] or dimensions["n_head_ssm"] % dimensions["n_group"]:
        raise UsageError("falcon_h1 needs d_inner divisible by n_head_ssm, and n_head_ssm divisible by n_group")
    if dimensions["n_embd"] % (2 * dimensions["n_head"]) or dimensions["n_head"] % dimensions["n_head_kv"]:
        raise UsageError("falcon_h1 needs n_embd divisible by 2 * n_head, and n_head divisible by n_head_kv")


def _layers(dimensions: Dimensions) -> tuple[int, ...]:
    return tuple(range(dimensions["n_layer"]))


def _state_layers(dimensions: Dimensions) -> tuple[StateLayers, ...]:
    return (
        StateLayers(dimensions["n_layer"], "mamba2", mixer_state(dimensions)),
        StateLayers(dimensions["n_layer"], "attention", attention_state(dimensions)),
    )


def _tensors(dimensions: Dimensions) -> tuple[TensorFact, ...]:
    facts = model_ends(dimensions, 1.34)
    for layer in _layers(dimensions):
        prefix, growth = f"layers.{layer}.", min(1.75**layer, 8.0)
        facts += mixer_tensors(mixer_dimensions(dimensions), prefix, 0.6, 0.13 * growth, -1.6, bool(dimensions["ssm_norm"]))
        facts += attention_tensors(dimensions, prefix, 0.47, 4, 0.44 * growth, "attention_out")
        facts += feed_forward_tensors(dimensions, prefix, 0.8, 3.4 * growth)
    return tuple(facts)


def _gguf_metadata(dimensions: Dimensions) -> dict[str, Any]:
    return (
        model_gguf_metadata(dimensions, "falcon-h1")
        | {
            "falcon-h1.feed_forward_length": dimensions["n_ff"],
            "falcon-h1.attention.head_count": dimensions["n_head"],
            "falcon-h1.attention.head_count_kv": dimensions["n_head_kv"],
            "falcon-h1.attention.key_length": head_channels(dimensions),
            "falcon-h1.attention.value_length": head_channels(dimensions),
            "falcon-h1.attention.layer_norm_rms_epsilon": NORM_EPSILON,
            "falcon-h1.rope.freq_base": ROPE_THETA,
        }
        | mixer_gguf_metadata(mixer_dimensions(dimensions), "falcon-h1")
    )


def _gguf_tensors(dimensions: Dimensions) -> tuple[GgufTensor, ...]:
    tensors = [*MODEL_ENDS_GGUF]
    names = {
        "q_projection": "attn_q.weight", "k_projection": "attn_k.weight", "v_projection": "attn_v.weight",
        "attention_out": "attn_output.weight", "ffn_norm": "ffn_norm", "ffn_gate": "ffn_gate.weight", "ffn_up": "ffn_up.weight",
        "ffn_down": "ffn_down.weight",
    }  # fmt: skip
    for layer in _layers(dimensions):
        tensors += mixer_gguf_tensors(mixer_dimensions(dimensions), layer, bool(dimensions["ssm_norm"]))
        tensors += [GgufTensor(f"blk.{layer}.{theirs}", f"layers.{layer}.{ours}") for ours, theirs in names.items()]
    return tuple(tensors)


def _transformers_configuration(dimensions: Dimensions) -> dict[str, Any]:
    return {
        "vocab_size": dimensions["n_vocab"],
        "hidden_size": dimensions["n_embd"],
        "intermediate_size": dimensions["n_ff"],
        "num_hidden_layers": dimensions["n_layer"],
        "num_attention_heads": dimensions["n_head"],
        "num_key_value_heads": dimensions["n_head_kv"],
        "rms_norm_eps": NORM_EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "mamba_d_ssm": dimensions["d_inner"],
        "mamba_n_heads": dimensions["n_head_ssm"],
        "mamba_d_head": dimensions["d_inner"] // dimensions["n_head_ssm"],
        "mamba_n_groups": dimensions["n_group"],
        "mamba_d_state": dimensions["d_state"],
        "mamba_d_conv": dimensions["d_conv"],
        "mamba_chunk_size": 8,
        "mamba_rms_norm": bool(dimensions["ssm_norm"]),
        "mamba_norm_before_gate": False,
        "tie_word_embeddings": False,
        "ssm_multipliers": list(SSM_MULTIPLIERS),
        "mlp_multipliers": list(MLP_MULTIPLIERS),
    } | MULTIPLIERS


def _state_dict(dimensions: Dimensions, weights: Weights) -> dict[str, np.ndarray]:
    state = {
        "model.embed_tokens.weight": _divided(weights["token_embedding"], MULTIPLIERS["embedding_multiplier"]),
        "model.final_layernorm.weight": weights["output_norm"],
        "lm_head.weight": _divided(weights["output"], MULTIPLIERS["lm_head_multiplier"]),
    }
    d_inner, of_b_or_c = dimensions["d_inner"], dimensions["n_group"] * dimensions["d_state"]
    parts = np.repeat(SSM_MULTIPLIERS, (d_inner, d_inner, of_b_or_c, of_b_or_c, dimensions["n_head_ssm"]))[:, None]
    assert len(parts) == d_inner + convolution_channels(dimensions) + dimensions["n_head_ssm"]
    into_attention = MULTIPLIERS["attention_in_multiplier"]
    names = {
        "q_projection": ("self_attn.q_proj", into_attention),
        "k_projection": ("self_attn.k_proj", into_attention * MULTIPLIERS["key_multiplier"]),
        "v_projection": ("self_attn.v_proj", into_attention),
        "attention_out": ("self_attn.o_proj", MULTIPLIERS["attention_out_multiplier"]),
        "ffn_norm": ("pre_ff_layernorm", 1.0),
        "ffn_gate": ("feed_forward.gate_proj", MLP_MULTIPLIERS[0]),
        "ffn_up": ("feed_forward.up_proj", 1.0),
        "ffn_down": ("feed_forward.down_proj", MLP_MULTIPLIERS[1]),
    }
    for layer in _layers(dimensions):
        source, target = f"layers.{layer}.", f"model.layers.{layer}."
        state |= mixer_state_dict(weights, source, target, "input_layernorm", "mamba")
        state[target + "mamba.in_proj.weight"] = _divided(weights[source + "in_projection"], parts * MULTIPLIERS["ssm_in_multiplier"])
        state[target + "mamba.out_proj.weight"] = _divided(weights[source + "out_projection"], MULTIPLIERS["ssm_out_multiplier"])
        for name, (their_name, multiplier) in names.items():
            state[f"{target}{their_name}.weight"] = _divided(weights[source + name], multiplier)
    return state


def _divided(weight: np.ndarray, multiplier: float | np.ndarray) -> np.ndarray:
    """A weight without what Transformers multiplies it by; exact, since that is a power of two."""
    return np.asarray(weight / multiplier, np.float32)


FALCON_H1 = Family(
    name="falcon_h1",
    title="Falcon-H1: hybrid, a Mamba-2 mixer and attention side by side in every layer",
    defaults={
        "n_vocab": 64, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_head_kv": 4, "n_ff": 48, "d_conv": 4, "d_inner": 64, "d_state": 16,
        "n_head_ssm": 4, "n_group": 1, "ssm_norm": 0,
    },
    bounds={"n_vocab": (8, 65536), "n_layer": (1, 64), "d_conv": (2, 8), "ssm_norm": (0, 1)},
    check=_check,
    tensors=_tensors,
    recurrent_layers=_layers,
    attention_layers=_layers,
    row_widths=lambda dimensions: mixer_row_widths(mixer_dimensions(dimensions)),
    state_layers=_state_layers,
    doubled=("n_embd", "d_inner", "n_head_ssm"),
    gguf_metadata=_gguf_metadata,
    gguf_tensors=_gguf_tensors,
    transformers_class="FalconH1ForCausalLM",
    transformers_configuration=_transformers_configuration,
    state_dict=_state_dict,
)  # fmt: skip
