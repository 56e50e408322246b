"""Facts of what most models have before their first layer and after their last one, and of plain feed-forward layers.

Rules
- The ends are the embedding of the tokens, a final norm, and the projection to logits; `token_embedding`, `output_norm`, `output`.
- A feed-forward layer is a norm and a gated linear unit; `ffn_norm`, `ffn_gate`, `ffn_up`, `ffn_down`.
"""

import math
from typing import Any

from .family import Dimensions, GgufTensor, TensorFact

MODEL_ENDS_GGUF = (
    GgufTensor("token_embd.weight", "token_embedding"),
    GgufTensor("output_norm.weight", "output_norm"),
    GgufTensor("output.weight", "output"),
)
"""llama.cpp's tensors of the ends."""


def model_ends(dimensions: Dimensions, output_gain: float) -> list[TensorFact]:
    """The weights of the ends; `output_gain` is the root mean square of logits where the norm's weights are 1."""
    n_vocab, n_embd = dimensions["n_vocab"], dimensions["n_embd"]
    return [
        TensorFact("token_embedding", (n_vocab, n_embd), "normal", 1.0),
        TensorFact("output_norm", (n_embd,), "normal", 0.1, 1.0),
        TensorFact("output", (n_vocab, n_embd), "normal", output_gain * (1 / math.sqrt(n_embd))),
    ]


def feed_forward_tensors(dimensions: Dimensions, prefix: str, gate_gain: float, down_gain: float) -> list[TensorFact]:
    """The weights of one feed-forward layer, its norm included.

    gate_gain  root mean square of what the projection to the gate makes of inputs of 1
    down_gain  the same of the projection out
    """
    n_embd, n_ff, scale = dimensions["n_embd"], dimensions["n_ff"], 1 / math.sqrt(dimensions["n_embd"])
    return [
        TensorFact(prefix + "ffn_norm", (n_embd,), "normal", 0.1, 1.0),
        TensorFact(prefix + "ffn_gate", (n_ff, n_embd), "normal", gate_gain * scale),
        TensorFact(prefix + "ffn_up", (n_ff, n_embd), "normal", scale),
        TensorFact(prefix + "ffn_down", (n_embd, n_ff), "normal", down_gain / math.sqrt(n_ff)),
    ]


def model_gguf_metadata(dimensions: Dimensions, architecture: str) -> dict[str, Any]:
    """llama.cpp's keys that every architecture has, but the width of feed-forward layers."""
    return {
        "general.architecture": architecture,
        f"{architecture}.vocab_size": dimensions["n_vocab"],
        f"{architecture}.context_length": 1 << 20,
        f"{architecture}.embedding_length": dimensions["n_embd"],
        f"{architecture}.block_count": dimensions["n_layer"],
    }
