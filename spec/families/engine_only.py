"""Architectures that llama.cpp runs and statedrift has no forward for: only the engine's own recompute says what is right (`--oracle engine`).

Rules
- A family here is its metadata at toy size; which tensors there are, and their shapes, the engine itself says (targets/llama_tensors.py).
- Every tensor is drawn as any weight is (spec/weights.py), keyed by its GGUF name, so that the order in which they are asked for is nothing;
  one rule by name and shape gives the distributions, and a family may have words of its own for some.
- Weights are drawn so that a state shows: decays lose about a third a token, later layers speak louder, attention is mild with large values,
  and nothing is selected (every expert is used, an indexer takes all), because a selection makes rounding jump.
- Tensors that models of the architecture may do without are left out where they change another thing than the forward.
Sources: llama.cpp's src/models/<architecture>.cpp (hyperparameters, tensors).
"""

import math
import re
from collections.abc import Callable
from typing import Any

from ..errors import UsageError
from .family import Dimensions, Family, RowWidths, TensorFact

NORM_EPSILON = 1e-5
_WINDOW = 32
_LAYER = re.compile(r"blk\.(\d+)\.")
Rule = Callable[[str, tuple[int, ...]], TensorFact | None]
Metadata = dict[str, Any]
Draws = dict[str, tuple[str, float, float]]
"""Leaf of a tensor's name -> distribution, scale (of a matrix: before the division by the square root of its inputs), offset."""

_LEFT_OUT = re.compile(r"(rope_freqs|rope_factors_\w+)\.weight|.*\.(scale|input_scale)|output_norm\.bias|dense_\d\..*|blk\.\d+\.nextn\..*")
"""Optional: scales of quantised weights, heads for other uses, and rotation frequencies, which would be used by a shift and not by every forward."""


def _leaf(name: str) -> str:
    """The tensor's own word, e.g. "ssm_dt.bias", "attn_q"; `.weight` says nothing."""
    return _LAYER.sub("", name, count=1).removesuffix(".weight")


def _loudness(name: str) -> float:
    """Later layers add more to the residual stream, so that what they remember shows beside what came before."""
    layer = _LAYER.match(name)
    return min(1.25 ** int(layer[1]), 3.0) if layer else 1.0


_VECTORS: Draws = {
    "ssm_a": ("uniform", -0.5, -0.4), "ssm_dt.bias": ("uniform", 0.5, 0.2), "ssm_d": ("normal", 0.1, 1.0), "exp_probs_b.bias": ("normal", 0.05, 0.0),
    "time_mix_w0": ("normal", 0.3, 0.3), "time_mix_decay": ("normal", 0.3, -1.0), "time_mix_first": ("normal", 0.5, 0.0),
    "time_mix_a0": ("normal", 0.5, 0.0), "time_mix_v0": ("normal", 0.5, 0.0), "time_mix_k_k": ("normal", 0.1, 0.8),
    "time_mix_k_a": ("normal", 0.1, 0.8), "time_mix_r_k": ("normal", 0.2, 0.0), "attn_sinks": ("normal", 0.3, 0.0),
    "attn_q_norm": ("uniform", 0.3, 0.5), "attn_k_norm": ("uniform", 0.3, 0.5),
}  # fmt: skip
_MATRICES: Draws = {
    "attn_q": ("normal", 0.6, 0.0), "attn_k": ("normal", 0.6, 0.0), "attn_v": ("normal", 4.0, 0.0), "attn_output": ("normal", 1.5, 0.0),
    "ssm_out": ("normal", 1.2, 0.0), "time_mix_output": ("normal", 1.2, 0.0), "ffn_down": ("normal", 0.5, 0.0),
    "ffn_down_exps": ("normal", 0.5, 0.0), "ffn_down_shexp": ("normal", 0.5, 0.0), "ffn_gate_inp": ("normal", 0.5, 0.0),
    "token_embd": ("normal", 0.0, 0.0), "output": ("normal", 1.0, 0.0),
}  # fmt: skip
_LOUDER = ("attn_output", "ssm_out", "time_mix_output", "shortconv.out_proj")


def _rule(own: Draws | None = None, left_out: tuple[str, ...] = ()) -> Rule:
    """The weight for a tensor; `own` draws come before the common ones, and `left_out` leaves are not there."""
    draws = _VECTORS | _MATRICES | (own or {})

    def fact_of(name: str, shape: tuple[int, ...]) -> TensorFact | None:
        leaf = _leaf(name)
        if _LEFT_OUT.fullmatch(name) or leaf in left_out:
            return None
        inputs = shape[-1]
        is_matrix = sum(size > 1 for size in shape) > 1 and "norm" not in leaf and "lerp" not in leaf
        if leaf == "token_embd":
            return TensorFact(name, shape, "normal", 1.0)
        if leaf in draws:
            draw, scale, offset = draws[leaf]
            if is_matrix and leaf not in _VECTORS:
                scale *= (_loudness(name) if leaf in _LOUDER else 1.0) / math.sqrt(inputs)
            return TensorFact(name, shape, "normal" if draw == "normal" else "uniform", scale, offset)
        if "norm" in leaf or leaf.startswith("time_mix_ln"):
            return TensorFact(name, shape, "normal", 0.1, 0.0 if leaf.endswith(".bias") else 1.0)
        if leaf.endswith(".conv") or "conv1d" in leaf:
            return TensorFact(name, shape, "normal", 0.5)
        if "lerp" in leaf:
            return TensorFact(name, shape, "normal", 0.2, 0.5)
        if not is_matrix:
            return TensorFact(name, shape, "normal", 0.05)
        return TensorFact(name, shape, "normal", 1 / math.sqrt(inputs))

    return fact_of


# --- metadata ----------------------------------------------------------------------------------------------------------------


def _named(architecture: str, values: Metadata) -> Metadata:
    """Metadata with the architecture's prefix; `__` stands for a dot."""
    return {"general.architecture": architecture} | {f"{architecture}.{key.replace('__', '.')}": value for key, value in values.items()}


def _common(dimensions: Dimensions) -> Metadata:
    names = {"n_vocab": "vocab_size", "n_embd": "embedding_length", "n_layer": "block_count", "n_ff": "feed_forward_length"}
    values: Metadata = {word: dimensions[name] for name, word in names.items()}
    epsilons = {"attention__layer_norm_epsilon": NORM_EPSILON, "attention__layer_norm_rms_epsilon": NORM_EPSILON}
    return values | {"context_length": 1 << 20} | epsilons


def _attention_layers(dimensions: Dimensions) -> tuple[int, ...]:
    """Of a hybrid: the second layer, and every third after it."""
    return tuple(range(1, dimensions["n_layer"], 3))


def _recurrent_layers(dimensions: Dimensions) -> tuple[int, ...]:
    attention = _attention_layers(dimensions)
    return tuple(layer for layer in range(dimensions["n_layer"]) if layer not in attention)


def _heads(dimensions: Dimensions) -> Metadata:
    """Heads of every layer; a layer without key heads is recurrent."""
    attention = _attention_layers(dimensions)
    key_heads = [1 if layer in attention else 0 for layer in range(dimensions["n_layer"])]
    return {"attention__head_count": [2] * dimensions["n_layer"], "attention__head_count_kv": key_heads}


def _mixer(dimensions: Dimensions, n_group: int = 2) -> Metadata:
    """A Mamba-2 mixer."""
    return {
        "ssm__conv_kernel": 4, "ssm__inner_size": 2 * dimensions["n_embd"], "ssm__state_size": 16, "ssm__time_step_rank": 4, "ssm__group_count": n_group,
    }  # fmt: skip


_EXPERTS: Metadata = {
    "expert_feed_forward_length": 32, "expert_count": 2, "expert_used_count": 2, "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 32, "expert_gating_func": 2, "leading_dense_block_count": 1, "expert_weights_scale": 1.0,
}  # fmt: skip


def _delta_and_latent(dimensions: Dimensions) -> Metadata:
    """Kimi delta attention, whose decay is then exp(-sigmoid), and multi-head latent attention."""
    rank, rotated = 2 * dimensions["head_dim"], 8
    return {
        "attention__key_length": rank + rotated, "attention__value_length": rank, "rope__dimension_count": rotated, "attention__key_length_mla": 24,
        "attention__value_length_mla": 16, "attention__q_lora_rank": 32, "attention__kv_lora_rank": rank, "kda__head_dim": dimensions["head_dim"],
        "ssm__conv_kernel": 4, "kda__safe_gate": True, "kda__gate_lower_bound": -1.0,
    }  # fmt: skip


_HYPER_CONNECTIONS: Metadata = {
    "hyper_connection__count": 4, "hyper_connection__sinkhorn_iterations": 2, "hyper_connection__epsilon": 1e-6,
}  # fmt: skip


def _rwkv_heads(dimensions: Dimensions) -> Metadata:
    """Heads of 64: the engine's kernels are not right with less than their vector's width."""
    return {"wkv__head_size": 64, "token_shift_count": 1}


def _arwkv7(dimensions: Dimensions) -> Metadata:
    ranks = {f"attention__{word}_lora_rank": 8 for word in ("decay", "iclr", "value_residual_mix", "gate")}
    return _named("arwkv7", _common(dimensions) | {"attention__head_count": 0} | _rwkv_heads(dimensions) | ranks)


def _rwkv6qwen2(dimensions: Dimensions) -> Metadata:
    heads = {"attention__head_count": dimensions["n_embd"] // 64, "attention__head_count_kv": dimensions["n_embd"] // 64}
    sizes = {"time_mix_extra_dim": 16, "time_decay_extra_dim": 16}
    return _named("rwkv6qwen2", _common(dimensions) | heads | _rwkv_heads(dimensions) | sizes)


def _granitehybrid(dimensions: Dimensions) -> Metadata:
    return _named("granitehybrid", _common(dimensions) | _heads(dimensions) | _mixer(dimensions))


def _plamo2(dimensions: Dimensions) -> Metadata:
    lengths = {"attention__key_length": 16, "attention__value_length": 16}
    return _named("plamo2", _common(dimensions) | _heads(dimensions) | _mixer(dimensions, 0) | lengths)


def _kimi_k3(dimensions: Dimensions) -> Metadata:
    own = {"expert_latent_length": 32, "attn_res__block_size": 12, "activation__situ_beta": 4.0, "activation__situ_linear_beta": 25.0}
    return _named("kimi-k3", _common(dimensions) | _heads(dimensions) | _delta_and_latent(dimensions) | _EXPERTS | own)


def _bailingmoe3(dimensions: Dimensions) -> Metadata:
    return _named("bailingmoe3", _common(dimensions) | _heads(dimensions) | _delta_and_latent(dimensions) | _EXPERTS)


def _glm5_next(dimensions: Dimensions) -> Metadata:
    indexer = {
        "attention__indexer__head_count": 16, "attention__indexer__key_length": 16, "attention__indexer__top_k": 1 << 14,
        "attention__indexer__kpool": 4, "attention__indexer__kpool_select_tail": True, "attention__indexer__block_size": 4,
        "attention__compress_ratios": [4] * dimensions["n_layer"],
    }  # fmt: skip
    latent = _delta_and_latent(dimensions) | {"attention__key_length": 2 * dimensions["head_dim"], "rope__dimension_count": 0}
    return _named("glm5-next", _common(dimensions) | _heads(dimensions) | latent | _EXPERTS | _HYPER_CONNECTIONS | indexer)


def _qwen35moe(dimensions: Dimensions) -> Metadata:
    own = {
        "attention__head_count": 2, "attention__head_count_kv": 1, "attention__key_length": 16,
        "attention__value_length": 16, "rope__dimension_count": 16, "rope__dimension_sections": [3, 3, 2, 0], "ssm__conv_kernel": 4,
        "ssm__inner_size": dimensions["n_embd"], "ssm__state_size": 16, "ssm__time_step_rank": dimensions["n_embd"] // 16, "ssm__group_count": 2,
        "attention__recurrent_layers": [layer in _recurrent_layers(dimensions) for layer in range(dimensions["n_layer"])],
    }  # fmt: skip
    return _named("qwen35moe", _common(dimensions) | own | _EXPERTS)


def _lfm2moe(dimensions: Dimensions) -> Metadata:
    return _named("lfm2moe", _common(dimensions) | _heads(dimensions) | _EXPERTS | {"shortconv__l_cache": 3})


def _nemotron_h_moe(dimensions: Dimensions) -> Metadata:
    """Every fourth layer is a mixture of experts and nothing else."""
    experts = [dimensions["n_ff"] if layer % 4 == 2 else 0 for layer in range(dimensions["n_layer"])]
    own = {"feed_forward_length": experts, "expert_weights_norm": True}
    return _named("nemotron_h_moe", _common(dimensions) | _heads(dimensions) | _mixer(dimensions) | _EXPERTS | own)


def _deepseek4(dimensions: Dimensions) -> Metadata:
    own = {
        "attention__head_count": 8, "attention__head_count_kv": 1, "attention__key_length": dimensions["head_dim"], "attention__value_length": dimensions["head_dim"],
        "rope__dimension_count": 8, "attention__q_lora_rank": 32, "attention__kv_lora_rank": 32, "attention__sliding_window": _WINDOW,
        "attention__output_group_count": 8, "attention__output_lora_rank": 16,
        "attention__compress_ratios": [(0, 4, 128, 4)[layer % 4] for layer in range(dimensions["n_layer"])],
        "attention__compress_rope_freq_base": 160000.0, "attention__indexer__head_count": 2, "attention__indexer__top_k": 131072,
        "attention__indexer__key_length": 64, "hash_layer_count": 0, "swiglu_clamp_exp": 10.0, "expert_weights_norm": True, "expert_gating_func": 4,
    }  # fmt: skip
    return _named("deepseek4", _common(dimensions) | _EXPERTS | _HYPER_CONNECTIONS | own)


# --- families ----------------------------------------------------------------------------------------------------------------


def _check(dimensions: Dimensions) -> None:
    if dimensions.get("head_dim", 16) % 16:
        raise UsageError(f"head_dim must be a multiple of 16, not {dimensions['head_dim']}")
    if dimensions["n_embd"] % 64:
        raise UsageError(f"n_embd must be a multiple of 64, not {dimensions['n_embd']}")


def _family(
    name: str, title: str, metadata: Callable[[Dimensions], Metadata], rule: Rule, n_embd: int = 64, is_hybrid: bool = True, window: int = 0,
    **more: int,
) -> Family:  # fmt: skip
    """`more`: dimensions of its own. What its state is wide by has to be among them, so that a doubled model's state is another."""
    return Family(
        name=name,
        title=title,
        defaults={"n_vocab": 64, "n_embd": n_embd, "n_layer": 4, "n_ff": 96} | more,
        bounds={"n_vocab": (8, 4096), "n_embd": (64, 512), "n_layer": (3, 16), "n_ff": (1, 1024), "head_dim": (16, 64)},
        check=_check,
        tensors=lambda dimensions: (),
        recurrent_layers=_recurrent_layers if is_hybrid else lambda dimensions: tuple(range(dimensions["n_layer"])),
        attention_layers=_attention_layers if is_hybrid else lambda dimensions: (),
        row_widths=lambda dimensions: RowWidths(0, 0),
        state_layers=lambda dimensions: (),
        doubled=("n_embd", *more),
        gguf_metadata=metadata,
        attention_window=lambda dimensions: window,
        engine_tensor=rule,
    )


_CONVOLUTION_DRAWS: Draws = {
    "attn_v": ("normal", 8.0, 0.0), "attn_output": ("normal", 3.0, 0.0), "shortconv.conv": ("normal", 0.9 * math.sqrt(3), 0.0),
}  # fmt: skip
_DELTA_DRAWS: Draws = {"ssm_a": ("uniform", -0.4, -0.8), "ssm_dt.bias": ("normal", 0.5, 0.0)}

ENGINE_ONLY: dict[str, Family] = {
    family.name: family
    for family in (
        _family("arwkv7", "ARWKV-7: RWKV-7 time mixing in a Qwen2 block", _arwkv7, _rule(), 128, is_hybrid=False),
        _family("rwkv6qwen2", "RWKV-6 time mixing in a Qwen2 block", _rwkv6qwen2, _rule(left_out=("time_mix_first",)), 128, is_hybrid=False),
        _family("granitehybrid", "Granite 4: hybrid, Mamba-2 and grouped-query attention", _granitehybrid, _rule()),
        _family("plamo2", "PLaMo 2: hybrid, Mamba with norms and attention", _plamo2, _rule()),
        _family("nemotron_h_moe", "Nemotron-H with experts: hybrid, Mamba-2, attention and mixtures", _nemotron_h_moe, _rule()),
        _family("lfm2moe", "LFM2 with experts: hybrid, gated short convolutions and attention", _lfm2moe, _rule(_CONVOLUTION_DRAWS)),
        _family("qwen35moe", "Qwen3.5 with experts: hybrid, gated delta net and attention", _qwen35moe, _rule()),
        _family("kimi_k3", "Kimi K3: hybrid, Kimi delta attention and latent attention", _kimi_k3, _rule(_DELTA_DRAWS), head_dim=16),
        _family("bailingmoe3", "Ling 3: hybrid, Kimi delta attention and latent attention", _bailingmoe3, _rule(_DELTA_DRAWS), head_dim=16),
        _family("glm5_next", "GLM 5 next: hybrid, Kimi delta attention and latent attention with an indexer", _glm5_next, _rule(_DELTA_DRAWS), head_dim=16),
        _family("deepseek4", "DeepSeek-V4: compressed attention with recurrent compressors", _deepseek4, _rule(), window=_WINDOW, head_dim=16),
    )
}  # fmt: skip
