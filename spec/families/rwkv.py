"""Facts that RWKV-6 and RWKV-7 share: their ends, norms, state rows, and what llama.cpp calls them.

The norms' weights are drawn as rwkv6.py says: receptances and keys lean to one side.
Sources: Peng et al. 2024 (arXiv:2404.05892) and 2025 (arXiv:2503.14456); llama.cpp's src/models/rwkv6-base.cpp and rwkv7-base.cpp.
"""

import math
from typing import Any

from ..errors import UsageError
from ..state_sizes import StateLayers
from .family import Dimensions, GgufTensor, RowWidths, TensorFact
from .model_ends import model_gguf_metadata

NORM_EPSILON = 1e-5
HEAD_NORM_EPSILON = 64e-5


def check_heads(family: str, dimensions: Dimensions) -> None:
    """Raise UsageError when the channels cannot be cut into heads."""
    if dimensions["n_embd"] % dimensions["wkv_head_size"]:
        raise UsageError(f"{family} needs n_embd divisible by wkv_head_size")


def row_widths(dimensions: Dimensions) -> RowWidths:
    """Of a layer of RWKV-6 or RWKV-7: the inputs of both mixers at the newest token, and the state."""
    return RowWidths(2 * dimensions["n_embd"], dimensions["n_embd"] * dimensions["wkv_head_size"])


def state_layers(dimensions: Dimensions) -> tuple[StateLayers, ...]:
    """The layers of RWKV-6 or RWKV-7."""
    state = {"n_embd": dimensions["n_embd"], "wkv_head_size": dimensions["wkv_head_size"], "token_shift_count": 2}
    return (StateLayers(dimensions["n_layer"], "rwkv", state),)


def ends_of_model(dimensions: Dimensions) -> list[TensorFact]:
    """The weights before the first layer and after the last one, of RWKV-6 and RWKV-7."""
    n_vocab, n_embd = dimensions["n_vocab"], dimensions["n_embd"]
    return [
        TensorFact("token_embedding", (n_vocab, n_embd), "normal", 1.0),
        TensorFact("embedding_norm", (n_embd,), "uniform", 0.4, 0.8),
        TensorFact("embedding_norm_bias", (n_embd,), "normal", 0.1),
        TensorFact("output_norm", (n_embd,), "uniform", 0.4, 0.8),
        TensorFact("output_norm_bias", (n_embd,), "normal", 0.1),
        TensorFact("output", (n_vocab, n_embd), "normal", 1 / math.sqrt(n_embd)),
    ]


ENDS_GGUF = (
    GgufTensor("token_embd.weight", "token_embedding"),
    GgufTensor("token_embd_norm.weight", "embedding_norm"),
    GgufTensor("token_embd_norm.bias", "embedding_norm_bias"),
    GgufTensor("output_norm.weight", "output_norm"),
    GgufTensor("output_norm.bias", "output_norm_bias"),
    GgufTensor("output.weight", "output"),
)
"""Where those weights stand in a GGUF file."""

COMMON_GGUF_NAMES = {
    "time_mix_norm": "attn_norm.weight", "time_mix_norm_bias": "attn_norm.bias", "blends": "time_mix_lerp_fused.weight",
    "receptance_projection": "time_mix_receptance.weight", "key_projection": "time_mix_key.weight",
    "value_projection": "time_mix_value.weight", "head_norm": "time_mix_ln.weight", "head_norm_bias": "time_mix_ln.bias",
    "out_projection": "time_mix_output.weight", "channel_mix_norm": "attn_norm_2.weight", "channel_mix_norm_bias": "attn_norm_2.bias",
    "channel_blend_key": "channel_mix_lerp_k.weight", "channel_key_projection": "channel_mix_key.weight",
    "channel_value_projection": "channel_mix_value.weight",
}  # fmt: skip
"""What llama.cpp calls the weights of a layer that both families have."""


def norms_of_layer(dimensions: Dimensions, prefix: str) -> list[TensorFact]:
    """The weights and biases of the norms of one layer."""
    channels = (dimensions["n_embd"],)
    return [
        TensorFact(prefix + "time_mix_norm", channels, "uniform", 0.4, 0.8),
        TensorFact(prefix + "time_mix_norm_bias", channels, "normal", 0.1, 0.5),
        TensorFact(prefix + "head_norm", channels, "uniform", 0.4, 0.8),
        TensorFact(prefix + "head_norm_bias", channels, "normal", 0.1),
        TensorFact(prefix + "channel_mix_norm", channels, "uniform", 0.4, 0.8),
        TensorFact(prefix + "channel_mix_norm_bias", channels, "normal", 0.1),
    ]


def rwkv_gguf_metadata(dimensions: Dimensions, architecture: str) -> dict[str, Any]:
    """llama.cpp's keys that both architectures have."""
    return model_gguf_metadata(dimensions, architecture) | {
        f"{architecture}.feed_forward_length": dimensions["n_ff"],
        f"{architecture}.attention.head_count": 0,
        f"{architecture}.attention.layer_norm_epsilon": NORM_EPSILON,
        f"{architecture}.wkv.head_size": dimensions["wkv_head_size"],
    }
