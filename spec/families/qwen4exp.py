"""qwen4exp: a hybrid of gated delta nets and attention over a selection of tokens, with hyper-connections, embeddings of n-grams, and
mixtures of experts (Qwen4-Exp's text model).

Every `attention_period`-th layer, the first of them at index attention_period - 1, is attention; the others are gated delta nets, as in
qwen35 but for the sigmoid of their output gate.

- The residual is `hyper_connections` streams side by side. A mixer norms each stream, weighs every channel of every stream, and takes
  the mean over streams; what a block gives is added to every stream, each with a factor of its own between 0 and 2. A last mixer stands
  in place of the final norm.
- An attention layer keeps for every token the raw key of an indexer beside key and value. A query scores whole blocks of `compress_ratio`
  tokens by their mean key, and attends to the `top_k` tokens of the best blocks, and to those that make no whole block yet.
- Layer 0 also adds embeddings of the newest 2 to `ngram_size` tokens, looked up by hashes, and their causal convolution, whose taps stand
  ngram_size tokens apart. EOS_TOKEN ends the n-grams that reach it; before a log stands EOS_TOKEN.
- All experts are used: only tokens are selected.
- Order of value heads, norm weights and positions: as in qwen35.

llama.cpp's budget is top_k + compress_ratio - 1 tokens whatever the incomplete block holds, so that with compress_ratio > 1 it attends to
some tokens of one more block, by the order of its cells; Transformers takes whole blocks. With compress_ratio 1 both are the same.

The weights are drawn so that every state row shows and rounding does not, as in qwen35. A mixer halves what passes it; its norms' weights
make up for it.

Sources: Transformers' Qwen4ExpForCausalLM; llama.cpp's src/models/qwen4exp.cpp and llama-memory-hybrid-idx.cpp; Steele, Lea and Flood 2014
(SplitMix, doi:10.1145/2660193.2660195), for the multipliers of the hash.
"""

import math
from typing import Any

import numpy as np

from ..errors import UsageError
from ..state_sizes import StateLayers
from . import delta_net, gated_attention
from .delta_net import (
    delta_net_gguf_metadata,
    delta_net_gguf_tensors,
    delta_net_row_widths,
    delta_net_state,
    delta_net_state_layers,
    delta_net_tensors,
)
from .family import Dimensions, Family, GgufTensor, TensorFact, Weights, other_layers, periodic_layers
from .gated_attention import gated_attention_gguf_metadata, gated_attention_gguf_tensors, gated_attention_tensors
from .qwen35 import QWEN35, check_mixers, rotation_sections

EOS_TOKEN = 0
HASH_SEED = 1234
"""Transformers' default, from which the multipliers follow."""
EMBEDDING_LAYER = 0
"""The layer with the embeddings of n-grams."""


def stream_channels(dimensions: Dimensions) -> int:
    """Channels of all streams of the residual."""
    return dimensions["hyper_connections"] * dimensions["n_embd"]


def hash_count(dimensions: Dimensions) -> int:
    """Hashes, and so rows of the table, for one token: of every length of n-grams ngram_hashes."""
    return (dimensions["ngram_size"] - 1) * dimensions["ngram_hashes"]


def embedding_window(dimensions: Dimensions) -> int:
    """Inputs that the convolution of n-gram embeddings looks back at, the current one not included."""
    return (dimensions["ngram_conv"] - 1) * dimensions["ngram_size"]


def hash_sizes(dimensions: Dimensions) -> list[int]:
    """How many rows of the table each hash has: the first primes from ngram_rows on."""
    sizes: list[int] = []
    candidate = dimensions["ngram_rows"]
    while len(sizes) < hash_count(dimensions):
        if candidate > 1 and all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            sizes.append(candidate)
        candidate += 1
    return sizes


def hash_offsets(dimensions: Dimensions) -> list[int]:
    """The first row of each hash."""
    sizes = hash_sizes(dimensions)
    return [sum(sizes[:index]) for index in range(len(sizes))]


def hash_multipliers(dimensions: Dimensions) -> list[int]:
    """What a token is multiplied by before the tokens of an n-gram are joined by exclusive or, the newest token's first; odd, and so small
    that a product is less than 2^63."""
    bits = (1 << 64) - 1
    half = max(1, ((1 << 63) - 1) // dimensions["n_vocab"] // 2)
    multipliers = []
    for index in range(dimensions["ngram_size"]):
        # SplitMix: the state moves by the golden ratio; the number is that of the state after the move.
        value = (HASH_SEED + 0x9E3779B97F4A7C15 * (index + 2)) & bits
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & bits
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & bits
        value ^= value >> 31
        multipliers.append(2 * (value % half) + 1)
    return multipliers


def _check(dimensions: Dimensions) -> None:
    check_mixers(dimensions, "qwen4exp")
    if dimensions["n_rot"] > dimensions["index_dim"]:
        raise UsageError("qwen4exp needs n_rot at most index_dim")
    if dimensions["n_embd"] % hash_count(dimensions):
        raise UsageError("qwen4exp needs n_embd divisible by (ngram_size - 1) * ngram_hashes")
    if dimensions["top_k"] % dimensions["compress_ratio"]:
        raise UsageError("qwen4exp needs top_k divisible by compress_ratio")
    if dimensions["n_layer"] < dimensions["attention_period"]:
        raise UsageError("qwen4exp needs an attention layer: n_layer at least attention_period")


def _state_layers(dimensions: Dimensions) -> tuple[StateLayers, ...]:
    embeddings = {"d_conv": dimensions["ngram_conv"]} | {name: dimensions[name] for name in ("n_embd", "ngram_size", "hyper_connections")}
    attention = {name: dimensions[name] for name in ("n_head_kv", "head_dim", "index_dim")}
    return (
        delta_net_state_layers(dimensions, len(other_layers(dimensions))),
        StateLayers(1, "per_layer_embedding", embeddings),
        StateLayers(len(periodic_layers(dimensions)), "indexed_attention", attention),
    )


def _mixer(dimensions: Dimensions, prefix: str, injects: bool = True) -> list[TensorFact]:
    channels, rank = stream_channels(dimensions), dimensions["mix_rank"]
    facts = [
        TensorFact(prefix + "mix_norm", (channels,), "uniform", 0.4, 1.5),
        TensorFact(prefix + "mix_down", (rank, channels), "normal", 2 / math.sqrt(channels)),
        TensorFact(prefix + "mix_up", (channels, rank), "normal", 1 / math.sqrt(rank)),
    ]
    if injects:
        facts.append(TensorFact(prefix + "inject", (dimensions["hyper_connections"], channels), "normal", 2 / math.sqrt(channels)))
    return facts


def _embedding_tensors(dimensions: Dimensions, prefix: str) -> list[TensorFact]:
    n_embd, channels = dimensions["n_embd"], stream_channels(dimensions)
    scale = 1 / math.sqrt(n_embd)
    return [
        TensorFact(prefix + "ngram_table", (sum(hash_sizes(dimensions)), n_embd // hash_count(dimensions)), "normal", 1.0),
        TensorFact(prefix + "ngram_key", (channels, n_embd), "normal", scale),
        TensorFact(prefix + "ngram_value", (n_embd, n_embd), "normal", scale),
        TensorFact(prefix + "ngram_key_norm", (channels,), "uniform", 0.4, 0.8),
        TensorFact(prefix + "ngram_query_norm", (channels,), "uniform", 0.4, 0.8),
        TensorFact(prefix + "ngram_convolution_norm", (channels,), "uniform", 0.4, 0.8),
        TensorFact(prefix + "ngram_convolution", (channels, dimensions["ngram_conv"]), "normal", 0.5),
    ]


def _indexer_tensors(dimensions: Dimensions, prefix: str) -> list[TensorFact]:
    n_embd, index_dim = dimensions["n_embd"], dimensions["index_dim"]
    scale = 1 / math.sqrt(n_embd)
    return [
        TensorFact(prefix + "index_q_projection", (dimensions["n_index_head"] * index_dim, n_embd), "normal", scale),
        TensorFact(prefix + "index_k_projection", (index_dim, n_embd), "normal", scale),
        TensorFact(prefix + "index_q_norm", (index_dim,), "uniform", 0.4, 0.8),
        TensorFact(prefix + "index_k_norm", (index_dim,), "uniform", 0.4, 0.8),
    ]


def _expert_tensors(dimensions: Dimensions, prefix: str) -> list[TensorFact]:
    n_embd, n_expert, n_ff, n_ff_shared = (dimensions[name] for name in ("n_embd", "n_expert", "n_ff", "n_ff_shared"))
    scale = 1 / math.sqrt(n_embd)
    return [
        TensorFact(prefix + "router", (n_expert, n_embd), "normal", scale),
        TensorFact(prefix + "expert_gate", (n_expert, n_ff, n_embd), "normal", scale),
        TensorFact(prefix + "expert_up", (n_expert, n_ff, n_embd), "normal", scale),
        TensorFact(prefix + "expert_down", (n_expert, n_embd, n_ff), "normal", 0.5 / math.sqrt(n_ff)),
        TensorFact(prefix + "shared_share", (1, n_embd), "normal", scale),
        TensorFact(prefix + "shared_gate", (n_ff_shared, n_embd), "normal", scale),
        TensorFact(prefix + "shared_up", (n_ff_shared, n_embd), "normal", scale),
        TensorFact(prefix + "shared_down", (n_embd, n_ff_shared), "normal", 0.5 / math.sqrt(n_ff_shared)),
    ]


def _tensors(dimensions: Dimensions) -> tuple[TensorFact, ...]:
    n_vocab, n_embd = dimensions["n_vocab"], dimensions["n_embd"]
    attention = periodic_layers(dimensions)
    facts = [TensorFact("token_embedding", (n_vocab, n_embd), "normal", 1.0)]
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        if layer == EMBEDDING_LAYER:
            facts += _embedding_tensors(dimensions, prefix)
        facts += _mixer(dimensions, prefix + "input_")
        if layer in attention:
            facts += gated_attention_tensors(dimensions, prefix) + _indexer_tensors(dimensions, prefix)
        else:
            facts += delta_net_tensors(dimensions, prefix, 2 * min(1.5**layer, 4.0))
        facts += _mixer(dimensions, prefix + "ffn_")
        facts += _expert_tensors(dimensions, prefix)
    facts += _mixer(dimensions, "output_", injects=False)
    facts.append(TensorFact("output", (n_vocab, n_embd), "normal", 1 / math.sqrt(n_embd)))
    return tuple(facts)


def _gguf_metadata(dimensions: Dimensions) -> dict[str, Any]:
    if dimensions["compress_ratio"] > 1:
        return {}
    values = {
        "vocab_size": dimensions["n_vocab"],
        "context_length": 1 << 20,
        "embedding_length": dimensions["n_embd"],
        "block_count": dimensions["n_layer"],
        "feed_forward_length": dimensions["n_ff"],
        "expert_feed_forward_length": dimensions["n_ff"],
        "expert_shared_feed_forward_length": dimensions["n_ff_shared"],
        "expert_count": dimensions["n_expert"],
        "expert_used_count": dimensions["n_expert"],
        "expert_weights_scale": 1.0,
        "attention.indexer.head_count": dimensions["n_index_head"],
        "attention.indexer.key_length": dimensions["index_dim"],
        "attention.indexer.top_k": dimensions["top_k"],
        "attention.compress_ratios": [dimensions["compress_ratio"]] * dimensions["n_layer"],
        "full_attention_interval": dimensions["attention_period"],
        "rope.dimension_sections": rotation_sections(dimensions),
        "hyper_connection.count": dimensions["hyper_connections"],
        "hyper_connection.low_rank": dimensions["mix_rank"],
        "embedding_length_per_layer_input": dimensions["n_embd"] // hash_count(dimensions),
        "ple.layers": [EMBEDDING_LAYER],
        "ple.ngram_size": dimensions["ngram_size"],
        "ple.heads_per_ngram": dimensions["ngram_hashes"],
        "ple.conv_kernel": dimensions["ngram_conv"],
        "ple.eos_token_id": EOS_TOKEN,
        "ple.layer_multipliers": tuple(hash_multipliers(dimensions)),
        "ple.head_offsets": tuple(hash_offsets(dimensions)),
        "ple.head_vocab_sizes": tuple(hash_sizes(dimensions)),
    }
    own = {"general.architecture": "qwen4exp"} | {f"qwen4exp.{name}": value for name, value in values.items()}
    return own | gated_attention_gguf_metadata(dimensions, "qwen4exp") | delta_net_gguf_metadata(dimensions, "qwen4exp")


_EVERY_GGUF_NAME = {
    "input_mix_norm": "hc_attn_norm.weight", "input_mix_down": "hc_attn_down.weight", "input_mix_up": "hc_attn_up.weight",
    "input_inject": "hc_attn_inject.weight", "ffn_mix_norm": "hc_ffn_norm.weight", "ffn_mix_down": "hc_ffn_down.weight",
    "ffn_mix_up": "hc_ffn_up.weight", "ffn_inject": "hc_ffn_inject.weight",
    "router": "ffn_gate_inp.weight", "expert_gate": "ffn_gate_exps.weight", "expert_up": "ffn_up_exps.weight",
    "expert_down": "ffn_down_exps.weight", "shared_share": "ffn_gate_inp_shexp.weight", "shared_gate": "ffn_gate_shexp.weight",
    "shared_up": "ffn_up_shexp.weight", "shared_down": "ffn_down_shexp.weight",
}  # fmt: skip
_INDEXER_GGUF_NAMES = {
    "index_q_projection": "indexer.q_proj.weight", "index_k_projection": "indexer.k_proj.weight",
    "index_q_norm": "indexer.q_norm.weight", "index_k_norm": "indexer.k_norm.weight",
}  # fmt: skip
_EMBEDDING_GGUF_NAMES = {
    "ngram_key": "ple_key.weight", "ngram_value": "ple_value.weight", "ngram_key_norm": "ple_norm_key.weight",
    "ngram_query_norm": "ple_norm_query.weight", "ngram_convolution_norm": "ple_norm_conv.weight", "ngram_convolution": "ple_conv1d.weight",
}  # fmt: skip
_STREAM_NORMS = ("input_mix_norm", "ffn_mix_norm", "ngram_key_norm", "ngram_query_norm", "ngram_convolution_norm")


def _gguf_tensors(dimensions: Dimensions) -> tuple[GgufTensor, ...]:
    streams = (dimensions["hyper_connections"], dimensions["n_embd"])
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_STREAM_NORMS, streams) | {"shared_share": (dimensions["n_embd"],)}
    tensors = [
        GgufTensor("token_embd.weight", "token_embedding"),
        GgufTensor("per_layer_token_embd.weight", f"layers.{EMBEDDING_LAYER}.ngram_table"),
        GgufTensor("output_hc_norm.weight", "output_mix_norm", streams),
        GgufTensor("output_hc_down.weight", "output_mix_down"),
        GgufTensor("output_hc_up.weight", "output_mix_up"),
        GgufTensor("output.weight", "output"),
    ]
    for layer in range(dimensions["n_layer"]):
        names = _EVERY_GGUF_NAME | (_EMBEDDING_GGUF_NAMES if layer == EMBEDDING_LAYER else {})
        if layer in periodic_layers(dimensions):
            names |= _INDEXER_GGUF_NAMES
            tensors += gated_attention_gguf_tensors(layer)
        else:
            tensors += delta_net_gguf_tensors(layer)
        tensors += [GgufTensor(f"blk.{layer}.{theirs}", f"layers.{layer}.{ours}", shapes.get(ours)) for ours, theirs in names.items()]
    return tuple(tensors)


def _transformers_configuration(dimensions: Dimensions) -> dict[str, Any]:
    return QWEN35.transformers_configuration(dimensions) | {
        "layer_types": [
            "indexed_attention" if layer in periodic_layers(dimensions) else "linear_attention" for layer in range(dimensions["n_layer"])
        ],
        "output_gate_type": "sigmoid",
        "moe_intermediate_size": dimensions["n_ff"],
        "shared_expert_intermediate_size": dimensions["n_ff_shared"],
        "num_experts": dimensions["n_expert"],
        "num_experts_per_tok": dimensions["n_expert"],
        "eos_token_id": EOS_TOKEN,
        "hc_count": dimensions["hyper_connections"],
        "hc_lowrank": dimensions["mix_rank"],
        "ple_layer_ids": [EMBEDDING_LAYER + 1],
        "ple_embed_dim": dimensions["n_embd"],
        "ple_conv_kernel_size": dimensions["ngram_conv"],
        "ngram_size": dimensions["ngram_size"],
        "heads_per_ngram": dimensions["ngram_hashes"],
        "ngram_vocab_size_base": dimensions["ngram_rows"],
        "make_ngram_vocab_size_divisible_by": 1,
        "split_ngram_parts": 1,
        "seed": HASH_SEED,
        "indexer_n_heads": dimensions["n_index_head"],
        "indexer_kv_heads": 1,
        "indexer_head_dim": dimensions["index_dim"],
        "indexer_budget": dimensions["top_k"],
        "indexer_compress_ratio": dimensions["compress_ratio"],
    }


_THEIR_NAMES = {
    "input_mix_norm": "attn_hyper_connection.hc_norm.weight", "input_mix_down": "attn_hyper_connection.input_mix_weight_down.weight",
    "input_mix_up": "attn_hyper_connection.input_mix_weight_up.weight", "input_inject": "attn_hyper_connection.block_inject_weight.weight",
    "ffn_mix_norm": "mlp_hyper_connection.hc_norm.weight", "ffn_mix_down": "mlp_hyper_connection.input_mix_weight_down.weight",
    "ffn_mix_up": "mlp_hyper_connection.input_mix_weight_up.weight", "ffn_inject": "mlp_hyper_connection.block_inject_weight.weight",
    "ngram_table": "ple.ple_embedding.ngram_embedding.weight", "ngram_key": "ple.key_proj.weight", "ngram_value": "ple.value_proj.weight",
    "ngram_key_norm": "ple.norm_key.weight", "ngram_query_norm": "ple.norm_query.weight",
    "ngram_convolution_norm": "ple.norm_conv.weight", "ngram_convolution": "ple.conv1d.weight",
    "index_q_norm": "self_attn.indexer.q_layernorm.weight", "index_k_norm": "self_attn.indexer.k_layernorm.weight",
    "router": "mlp.gate.weight", "expert_down": "mlp.experts.down_proj",
    "shared_share": "mlp.shared_expert_gate.weight", "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_up": "mlp.shared_expert.up_proj.weight", "shared_down": "mlp.shared_expert.down_proj.weight",
}  # fmt: skip


def _state_dict(dimensions: Dimensions, weights: Weights) -> dict[str, np.ndarray]:
    state = {
        "model.embed_tokens.weight": weights["token_embedding"],
        "lm_head.weight": weights["output"],
        "model.hyper_connection_mixer.hc_norm.weight": weights["output_mix_norm"] - np.float32(1),
        "model.hyper_connection_mixer.input_mix_weight_down.weight": weights["output_mix_down"],
        "model.hyper_connection_mixer.input_mix_weight_up.weight": weights["output_mix_up"],
    }
    embedding = f"model.layers.{EMBEDDING_LAYER}.ple.ple_embedding."
    state[embedding + "layer_multipliers"] = np.array(hash_multipliers(dimensions), np.int64)
    state[embedding + "ngram_heads_vocab_sizes"] = np.array(hash_sizes(dimensions), np.int64)
    state[embedding + "ngram_heads_offsets"] = np.array(hash_offsets(dimensions), np.int64)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        own = {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}
        theirs = {_THEIR_NAMES[name]: _as_theirs(name, array) for name, array in own.items() if name in _THEIR_NAMES}
        theirs["mlp.experts.gate_up_proj"] = np.concatenate([own["expert_gate"], own["expert_up"]], axis=1)
        if layer in periodic_layers(dimensions):
            theirs |= {f"self_attn.{name}": _as_theirs(ours, own[ours]) for ours, name in gated_attention.STATE_DICT_NAMES.items()}
            theirs["self_attn.indexer.index_qk_proj.weight"] = np.concatenate([own["index_q_projection"], own["index_k_projection"]])
        else:
            names = delta_net.STATE_DICT_NAMES
            theirs |= {f"linear_attn.{name}": delta_net_state(dimensions, ours, own[ours]) for ours, name in names.items()}
        state |= {f"model.{prefix}{name}": array for name, array in theirs.items()}
    return state


def _as_theirs(name: str, array: np.ndarray) -> np.ndarray:
    """A layer's weight in Transformers' form: norms less 1, a convolution with an axis of one."""
    if name.endswith("norm"):
        return np.asarray(array - np.float32(1))
    return array[:, None, :] if name == "ngram_convolution" else array


QWEN4EXP = Family(
    name="qwen4exp",
    title="Qwen4-Exp: gated delta nets, attention to selected tokens, hyper-connections, n-gram embeddings, experts",
    defaults={
        "n_vocab": 64, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_head_kv": 1, "head_dim": 16, "n_rot": 8,
        "n_ff": 24, "n_ff_shared": 24, "n_expert": 2, "d_conv": 4, "d_state": 16, "n_group": 2, "n_value_head": 4, "attention_period": 3,
        "hyper_connections": 4, "mix_rank": 8, "ngram_size": 3, "ngram_hashes": 2, "ngram_rows": 32, "ngram_conv": 4,
        "n_index_head": 8, "index_dim": 16, "top_k": 16, "compress_ratio": 1,
    },
    bounds={
        "n_vocab": (8, 65536), "n_layer": (2, 64), "d_conv": (2, 8), "attention_period": (2, 64), "n_rot": (2, 4096),
        "hyper_connections": (2, 8), "ngram_size": (2, 4), "ngram_hashes": (1, 8), "ngram_rows": (2, 4096), "ngram_conv": (2, 8),
        "n_expert": (1, 16), "compress_ratio": (1, 64),
    },
    check=_check,
    tensors=_tensors,
    recurrent_layers=other_layers,
    attention_layers=periodic_layers,
    row_widths=lambda dimensions: delta_net_row_widths(dimensions)._replace(
        embedding=embedding_window(dimensions) * stream_channels(dimensions)
    ),
    state_layers=_state_layers,
    doubled=("n_embd", "n_head", "n_head_kv", "n_group", "n_value_head"),
    gguf_metadata=_gguf_metadata,
    gguf_tensors=_gguf_tensors,
    transformers_class="Qwen4ExpForCausalLM",
    transformers_configuration=_transformers_configuration,
    state_dict=_state_dict,
)  # fmt: skip
