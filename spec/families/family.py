"""What a family's file has to say.

Rules
- Weight names are ours, written in full; matrices are [out, in], as in Transformers.
- `layer` in a weight name is `layers.<index>.<name>`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from ..state_sizes import StateLayers

Dimensions = Mapping[str, int]
Weights = Mapping[str, np.ndarray]

Draw = Literal["normal", "uniform"]


class TensorFact(msgspec.Struct, frozen=True):
    """One weight: its shape, and the distribution it is drawn from.

    normal: offset + scale * N(0, 1); uniform: offset + scale * U(0, 1). All weights are float32.
    """

    name: str
    shape: tuple[int, ...]
    draw: Draw
    scale: float
    offset: float = 0.0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class GgufTensor(msgspec.Struct, frozen=True):
    """How one weight stands in a GGUF file.

    name       llama.cpp's
    weight     ours
    shape      in the file (numpy order), when it is not the weight's
    transform  "negative exponential": -exp(w), computed in float64; "": as it is
    """

    name: str
    weight: str
    shape: tuple[int, ...] | None = None
    transform: Literal["", "negative exponential"] = ""


BOUNDS_USUAL = (1, 4096)
"""Of a dimension for which a family says no other."""


class RowWidths(NamedTuple):
    """Elements of one state row in one layer: convolution part (n_embd_r) and recurrent part (n_embd_s) of llama.cpp; and, in a layer with
    per-layer embeddings, the part of their convolution (p)."""

    convolution: int
    recurrent: int
    embedding: int = 0


class Family(msgspec.Struct, frozen=True):
    """The facts of one family.

    name               the word in program text, also llama.cpp's architecture name where it has one
    title              one line for people
    defaults, bounds   dimensions at toy size, and allowed ranges where they differ from `BOUNDS_USUAL` (read with `bounds_of`)
    check              raises UsageError when the dimensions make no model
    tensors            every weight
    recurrent_layers   indices of layers with a recurrent or convolution state
    attention_layers   indices of layers with an attention cache
    row_widths         of every recurrent layer
    attention_window   newest tokens that the attention layers see, a token's own included; 0: all
    state_layers       how many layers keep what, in the kinds' own names (state_sizes.py), at any size; a group may have no layer
    doubled            the dimensions that are doubled together for a model of doubled width, whose saved states are foreign
    gguf_metadata      llama.cpp's keys without the tokenizer's: name -> int, float, str, bool, list of int, or tuple of int (64 bits); {}: llama.cpp does not run it
    gguf_tensors       llama.cpp's tensors and the weights they are made of
    transformers_class, transformers_configuration, state_dict
                       the Transformers class name, its configuration's keyword arguments, and its state dict (float32 arrays, and float64
                       buffers that follow from the dimensions); "" where Transformers has no such class
    forward            the module of its forwards, in oracle/ and in impl/: those of another family that differs in its dimensions only
    engine_tensor      of a family without forwards of ours (engine_only.py): the weight for a tensor that the engine asks for by its GGUF name and
                       its shape (numpy order), or None where the model is to do without it
    """

    name: str
    title: str
    defaults: dict[str, int]
    bounds: dict[str, tuple[int, int]]
    check: Callable[[Dimensions], None]
    tensors: Callable[[Dimensions], tuple[TensorFact, ...]]
    recurrent_layers: Callable[[Dimensions], tuple[int, ...]]
    attention_layers: Callable[[Dimensions], tuple[int, ...]]
    row_widths: Callable[[Dimensions], RowWidths]
    state_layers: Callable[[Dimensions], tuple[StateLayers, ...]]
    doubled: tuple[str, ...]
    gguf_metadata: Callable[[Dimensions], dict[str, Any]] = lambda dimensions: {}
    gguf_tensors: Callable[[Dimensions], tuple[GgufTensor, ...]] = lambda dimensions: ()
    transformers_class: str = ""
    transformers_configuration: Callable[[Dimensions], dict[str, Any]] = lambda dimensions: {}
    state_dict: Callable[[Dimensions, Weights], dict[str, np.ndarray]] = lambda dimensions, weights: {}
    attention_window: Callable[[Dimensions], int] = lambda dimensions: 0
    forward: str = ""
    engine_tensor: Callable[[str, tuple[int, ...]], TensorFact | None] | None = None

    def bounds_of(self, dimension: str) -> tuple[int, int]:
        """The least and the largest value that a dimension may have by itself."""
        return self.bounds.get(dimension, BOUNDS_USUAL)

    @property
    def is_modelled(self) -> bool:
        """Whether there are forwards of ours; without them only the engine itself can say what is right (`--oracle engine`)."""
        return self.engine_tensor is None

    @property
    def forward_module(self) -> str:
        return self.forward or self.name

    @property
    def has_gguf(self) -> bool:
        return bool(self.gguf_metadata(self.defaults))


def periodic_layers(dimensions: Dimensions) -> tuple[int, ...]:
    """Every `attention_period`-th layer, the first of them at index attention_period - 1."""
    return tuple(layer for layer in range(dimensions["n_layer"]) if (layer + 1) % dimensions["attention_period"] == 0)


def other_layers(dimensions: Dimensions) -> tuple[int, ...]:
    """The layers that `periodic_layers` leaves."""
    return tuple(layer for layer in range(dimensions["n_layer"]) if (layer + 1) % dimensions["attention_period"] != 0)


def head_size(dimensions: Dimensions) -> int:
    """Channels of one attention head, where all heads together are as wide as the stream."""
    return dimensions["n_embd"] // dimensions["n_head"]
