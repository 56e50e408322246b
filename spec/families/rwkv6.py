"""rwkv6: RWKV-6 (Finch), pure recurrent: every layer mixes over time through a state of outer products, then over channels.

Both mixers look at the token before through a token shift: what they read is a blend of their input and that of the token before. In the time
mix the blends, and the decay of every key channel, depend on the token.

- The five blends stand in the order w, k, v, r, g (decay, key, value, receptance, gate) in every stacked weight, as in llama.cpp.
- The state of a head is [key channels, value channels]; the token's own outer product is read with the weight `first`, then added.
- Norms are layer norms with a bias; each head's output has a norm of its own (a group norm).

The weights are drawn so that every state row shows, and rounding does not. A head's output at a sequence's start is one value vector times
the product of receptance and key: were that close to zero, the head's norm would enlarge its rounding errors without bound. So receptances and
keys lean to one side: the norms before the mixers have a positive bias, and those two projections a positive mean. A state loses about a third
a token, so that one that is a token late differs; later mixers outweigh what passes by them. tests/quality/test_sensitivity.py holds them to it.

Sources: Peng et al. 2024 (arXiv:2404.05892); llama.cpp's src/models/rwkv6.cpp and rwkv6-base.cpp; the `rwkv` package's RWKV class.
"""

import math
from typing import Any

from .family import Dimensions, Family, GgufTensor, TensorFact
from .rwkv import COMMON_GGUF_NAMES, ENDS_GGUF, check_heads, ends_of_model, norms_of_layer, row_widths, rwkv_gguf_metadata, state_layers

BLENDS = 5
"""Inputs of a time mix: for decay, key, value, receptance and gate."""


def _tensors(dimensions: Dimensions) -> tuple[TensorFact, ...]:
    n_embd, n_ff = dimensions["n_embd"], dimensions["n_ff"]
    mix_rank, decay_rank = dimensions["time_mix_extra_dim"], dimensions["time_decay_extra_dim"]
    scale = 1 / math.sqrt(n_embd)
    facts = ends_of_model(dimensions)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        growth = min(1.5**layer, 4.0)
        facts += [
            *norms_of_layer(dimensions, prefix),
            TensorFact(prefix + "blend_base", (n_embd,), "uniform", 0.4, 0.3),
            TensorFact(prefix + "blend_down", (BLENDS * mix_rank, n_embd), "normal", 0.5 * scale),
            TensorFact(prefix + "blend_up", (BLENDS, n_embd, mix_rank), "normal", 0.2 / math.sqrt(mix_rank)),
            TensorFact(prefix + "blends", (BLENDS, n_embd), "uniform", 0.4, 0.2),
            TensorFact(prefix + "decay_base", (n_embd,), "uniform", 1.0, -1.4),
            TensorFact(prefix + "decay_down", (decay_rank, n_embd), "normal", 0.5 * scale),
            TensorFact(prefix + "decay_up", (n_embd, decay_rank), "normal", 0.5 / math.sqrt(decay_rank)),
            TensorFact(prefix + "first", (n_embd,), "uniform", 0.5, 0.5),
            TensorFact(prefix + "receptance_projection", (n_embd, n_embd), "normal", 0.5 * scale, 2.0 / n_embd),
            TensorFact(prefix + "key_projection", (n_embd, n_embd), "normal", 0.5 * scale, 2.0 / n_embd),
            TensorFact(prefix + "value_projection", (n_embd, n_embd), "normal", scale),
            TensorFact(prefix + "gate_projection", (n_embd, n_embd), "normal", scale),
            TensorFact(prefix + "out_projection", (n_embd, n_embd), "normal", 1.5 * growth * scale),
            TensorFact(prefix + "channel_blend_key", (n_embd,), "uniform", 0.4, 0.3),
            TensorFact(prefix + "channel_blend_receptance", (n_embd,), "uniform", 0.4, 0.3),
            TensorFact(prefix + "channel_key_projection", (n_ff, n_embd), "normal", scale),
            TensorFact(prefix + "channel_value_projection", (n_embd, n_ff), "normal", growth / math.sqrt(n_ff)),
            TensorFact(prefix + "channel_receptance_projection", (n_embd, n_embd), "normal", scale),
        ]
    return tuple(facts)


def _gguf_metadata(dimensions: Dimensions) -> dict[str, Any]:
    return rwkv_gguf_metadata(dimensions, "rwkv6") | {
        "rwkv6.time_mix_extra_dim": dimensions["time_mix_extra_dim"],
        "rwkv6.time_decay_extra_dim": dimensions["time_decay_extra_dim"],
    }


def _gguf_tensors(dimensions: Dimensions) -> tuple[GgufTensor, ...]:
    n_embd, head_size = dimensions["n_embd"], dimensions["wkv_head_size"]
    shapes = {"blends": (BLENDS, 1, 1, n_embd), "first": (n_embd // head_size, head_size)}
    names = COMMON_GGUF_NAMES | {
        "blend_base": "time_mix_lerp_x.weight", "blend_down": "time_mix_w1.weight", "blend_up": "time_mix_w2.weight",
        "decay_base": "time_mix_decay.weight", "decay_down": "time_mix_decay_w1.weight", "decay_up": "time_mix_decay_w2.weight",
        "first": "time_mix_first.weight", "gate_projection": "time_mix_gate.weight",
        "channel_blend_receptance": "channel_mix_lerp_r.weight", "channel_receptance_projection": "channel_mix_receptance.weight",
    }  # fmt: skip
    return ENDS_GGUF + tuple(
        GgufTensor(f"blk.{layer}.{theirs}", f"layers.{layer}.{ours}", shapes.get(ours))
        for layer in range(dimensions["n_layer"])
        for ours, theirs in names.items()
    )


RWKV6 = Family(
    name="rwkv6",
    title="RWKV-6: pure recurrent, token shift and a state of outer products in every layer",
    defaults={
        "n_vocab": 64,
        "n_embd": 64,
        "n_layer": 3,
        "n_ff": 96,
        "wkv_head_size": 32,
        "time_mix_extra_dim": 4,
        "time_decay_extra_dim": 8,
    },
    bounds={"n_vocab": (8, 65536), "n_layer": (1, 64)},
    check=lambda dimensions: check_heads("rwkv6", dimensions),
    tensors=_tensors,
    recurrent_layers=lambda dimensions: tuple(range(dimensions["n_layer"])),
    attention_layers=lambda dimensions: (),
    row_widths=row_widths,
    state_layers=state_layers,
    doubled=("n_embd",),
    gguf_metadata=_gguf_metadata,
    gguf_tensors=_gguf_tensors,
)
