"""rwkv7: RWKV-7 (Goose), pure recurrent: every layer mixes over time through a generalised delta rule, then over channels.

Both mixers look at the token before through a token shift, with fixed blends. A state decays channel by channel, forgets at a learned rate
what it holds along the normalised key, and takes the new value in; values of later layers are pulled towards those of the first.

- The six blends stand in the order r, w, k, v, a, g (receptance, decay, key, value, rate of forgetting, gate), as in llama.cpp.
- The state of a head is [key channels, value channels] here; llama.cpp and the `rwkv` package have it the other way round.
- Layer 0 has no value residual. llama.cpp asks for its weights all the same, and does not use them: it is given those of the rate.
- llama.cpp takes a head in whole steps of its vectors: with a wkv_head_size that is no multiple of 64 it reads beyond the head, on some
  machines. Oracle and caches here take any size.

The weights are drawn as in rwkv6: receptances and keys lean to one side, so that no head's output is close to zero where its norm would enlarge
its rounding errors, and later mixers outweigh what passes by them. tests/quality/test_sensitivity.py holds them to it.

Sources: Peng et al. 2025 (arXiv:2503.14456); llama.cpp's src/models/rwkv7.cpp and rwkv7-base.cpp; the `rwkv` package's RWKV_x070 class.
"""

import math
from typing import Any

from .family import Dimensions, Family, GgufTensor, TensorFact
from .rwkv import COMMON_GGUF_NAMES, ENDS_GGUF, check_heads, ends_of_model, norms_of_layer, row_widths, rwkv_gguf_metadata, state_layers

BLENDS = 6
"""Inputs of a time mix: for receptance, decay, key, value, rate and gate."""
DECAY_LEAST = 0.606531
"""exp(-0.5), with as many digits as both implementations have: a decay is exp(-DECAY_LEAST * sigmoid)."""


def _tensors(dimensions: Dimensions) -> tuple[TensorFact, ...]:
    n_embd, n_ff = dimensions["n_embd"], dimensions["n_ff"]
    scale = 1 / math.sqrt(n_embd)
    facts = ends_of_model(dimensions)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        growth = min(1.5**layer, 4.0)
        facts += [
            *norms_of_layer(dimensions, prefix),
            TensorFact(prefix + "blends", (BLENDS, n_embd), "uniform", 0.4, 0.2),
            *_low_rank(dimensions, prefix, "decay", 0.5, TensorFact(prefix + "decay_base", (n_embd,), "uniform", 1.5, -1.8)),
            *_low_rank(dimensions, prefix, "rate", 0.5, TensorFact(prefix + "rate_base", (n_embd,), "uniform", 1.0, -1.8)),
        ]
        if layer:
            base = TensorFact(prefix + "value_residual_base", (n_embd,), "uniform", 1.0, -0.5)
            facts += _low_rank(dimensions, prefix, "value_residual", 0.5, base)
        facts += [
            *_low_rank(dimensions, prefix, "gate", 3.0, None),
            TensorFact(prefix + "key_removal", (n_embd,), "uniform", 0.4, 0.6),
            TensorFact(prefix + "key_rate", (n_embd,), "uniform", 0.4, 0.6),
            TensorFact(prefix + "first", (n_embd,), "normal", 0.1),
            TensorFact(prefix + "receptance_projection", (n_embd, n_embd), "normal", 0.5 * scale, 1.0 / n_embd),
            TensorFact(prefix + "key_projection", (n_embd, n_embd), "normal", 0.5 * scale, 1.0 / n_embd),
            TensorFact(prefix + "value_projection", (n_embd, n_embd), "normal", scale),
            TensorFact(prefix + "out_projection", (n_embd, n_embd), "normal", 1.5 * growth * scale),
            TensorFact(prefix + "channel_blend_key", (n_embd,), "uniform", 0.4, 0.5),
            TensorFact(prefix + "channel_key_projection", (n_ff, n_embd), "normal", scale),
            TensorFact(prefix + "channel_value_projection", (n_embd, n_ff), "normal", 1.5 * growth / math.sqrt(n_ff)),
        ]
    return tuple(facts)


def _low_rank(dimensions: Dimensions, prefix: str, name: str, gain: float, base: TensorFact | None) -> list[TensorFact]:
    """A projection in two steps of `name`_rank channels between them, and what is added to it."""
    n_embd, rank = dimensions["n_embd"], dimensions[f"{name}_lora_rank"]
    projection = [
        TensorFact(f"{prefix}{name}_down", (rank, n_embd), "normal", 1 / math.sqrt(n_embd)),
        TensorFact(f"{prefix}{name}_up", (n_embd, rank), "normal", gain / math.sqrt(rank)),
    ]
    return projection if base is None else [base, *projection]


def _gguf_metadata(dimensions: Dimensions) -> dict[str, Any]:
    return rwkv_gguf_metadata(dimensions, "rwkv7") | {
        "rwkv7.attention.decay_lora_rank": dimensions["decay_lora_rank"],
        "rwkv7.attention.iclr_lora_rank": dimensions["rate_lora_rank"],
        "rwkv7.attention.value_residual_mix_lora_rank": dimensions["value_residual_lora_rank"],
        "rwkv7.attention.gate_lora_rank": dimensions["gate_lora_rank"],
    }


def _gguf_tensors(dimensions: Dimensions) -> tuple[GgufTensor, ...]:
    shapes = {"blends": (BLENDS, 1, 1, dimensions["n_embd"])}
    names = COMMON_GGUF_NAMES | {
        "decay_base": "time_mix_w0.weight", "decay_down": "time_mix_w1.weight", "decay_up": "time_mix_w2.weight",
        "rate_base": "time_mix_a0.weight", "rate_down": "time_mix_a1.weight", "rate_up": "time_mix_a2.weight",
        "gate_down": "time_mix_g1.weight", "gate_up": "time_mix_g2.weight", "key_removal": "time_mix_k_k.weight",
        "key_rate": "time_mix_k_a.weight", "first": "time_mix_r_k.weight",
    }  # fmt: skip
    tensors = list(ENDS_GGUF)
    for layer in range(dimensions["n_layer"]):
        ours, theirs = f"layers.{layer}.", f"blk.{layer}."
        tensors += [GgufTensor(theirs + there, ours + here, shapes.get(here)) for here, there in names.items()]
        residual = "value_residual" if layer else "rate"
        tensors += [
            GgufTensor(f"{theirs}time_mix_v{number}.weight", f"{ours}{residual}_{part}")
            for number, part in enumerate(("base", "down", "up"))
        ]
    return tuple(tensors)


RWKV7 = Family(
    name="rwkv7",
    title="RWKV-7: pure recurrent, token shift and a generalised delta rule in every layer",
    defaults={
        "n_vocab": 64,
        "n_embd": 64,
        "n_layer": 3,
        "n_ff": 96,
        "wkv_head_size": 64,
        "decay_lora_rank": 8,
        "rate_lora_rank": 8,
        "value_residual_lora_rank": 4,
        "gate_lora_rank": 16,
    },
    bounds={"n_vocab": (8, 65536), "n_layer": (1, 64)},
    check=lambda dimensions: check_heads("rwkv7", dimensions),
    tensors=_tensors,
    recurrent_layers=lambda dimensions: tuple(range(dimensions["n_layer"])),
    attention_layers=lambda dimensions: (),
    row_widths=row_widths,
    state_layers=state_layers,
    doubled=("n_embd",),
    gguf_metadata=_gguf_metadata,
    gguf_tensors=_gguf_tensors,
)
