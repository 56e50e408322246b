"""lfm2_swa: lfm2 with a window: every attention layer sees only the newest `n_swa` tokens, its own included.

Everything else is lfm2, and both have the same forwards: a dimension makes the difference. To llama.cpp it is architecture lfm2 with a window in
its metadata, which makes every attention layer windowed and gives the model another memory (llama_memory_hybrid_iswa). Transformers'
Lfm2ForCausalLM has no window: it must be given the mask.
By default every second layer is attention, so that more than one window lies behind an output, and logs of toy programs leave the window.
Sources: llama.cpp's src/models/lfm2.cpp and llama-hparams.h (is_masked_swa); Beltagy, Peters and Cohan 2020 (arXiv:2004.05150).
"""

from typing import Any

import msgspec

from ..state_sizes import StateLayers
from .family import Dimensions
from .lfm2 import LFM2, attention_window
from .lfm2 import gguf_metadata as lfm2_gguf_metadata


def _state_layers(dimensions: Dimensions) -> tuple[StateLayers, ...]:
    convolution, attention = LFM2.state_layers(dimensions)
    windowed = attention.dimensions | {"window": attention_window(dimensions)}
    return convolution, StateLayers(attention.count, "window_attention", windowed)


def _gguf_metadata(dimensions: Dimensions) -> dict[str, Any]:
    return lfm2_gguf_metadata(dimensions) | {"lfm2.attention.sliding_window": attention_window(dimensions)}


LFM2_SWA = msgspec.structs.replace(
    LFM2,
    name="lfm2_swa",
    title="LFM2 with a window: hybrid, gated short convolutions and sliding-window attention",
    defaults=LFM2.defaults | {"attention_period": 2, "n_swa": 8},
    state_layers=_state_layers,
    gguf_metadata=_gguf_metadata,
    forward="lfm2",
)
