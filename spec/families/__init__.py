"""The model families that statedrift knows: one file of facts each.

Rules
- `FAMILIES` have forwards of ours; of `ENGINE_ONLY` ones only an engine's own recompute is known. Every function here takes both.
- A family's file says its dimensions, its weights, its state rows, and how the same weights are named in GGUF and in
  Transformers; it computes no output (the oracle and the implementation have one forward each).
- Nothing here imports gguf, torch or transformers: facts are plain data.
"""

import functools
from collections.abc import Sequence
from types import MappingProxyType

import msgspec

from ..errors import UsageError
from ..models import Model
from .engine_only import ENGINE_ONLY
from .falcon_h1 import FALCON_H1
from .family import Dimensions, Family, GgufTensor, RowWidths, TensorFact
from .jamba import JAMBA
from .kimi_linear import KIMI_LINEAR
from .lfm2 import LFM2
from .lfm2_swa import LFM2_SWA
from .mamba import MAMBA
from .mamba2 import MAMBA2
from .minimax01 import MINIMAX01
from .nemotron_h import NEMOTRON_H
from .qwen3next import QWEN3NEXT
from .qwen4exp import QWEN4EXP
from .qwen4exp_blocks import QWEN4EXP_BLOCKS
from .qwen35 import QWEN35
from .rwkv6 import RWKV6
from .rwkv7 import RWKV7
from .zamba2 import ZAMBA2

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        MAMBA, MAMBA2, LFM2, LFM2_SWA, JAMBA, NEMOTRON_H, FALCON_H1, ZAMBA2, QWEN3NEXT, QWEN35, QWEN4EXP, QWEN4EXP_BLOCKS, KIMI_LINEAR,
        MINIMAX01, RWKV6, RWKV7,
    )
}  # fmt: skip

__all__ = [
    "ENGINE_ONLY",
    "FAMILIES",
    "Dimensions",
    "Family",
    "GgufTensor",
    "RowWidths",
    "TensorFact",
    "dimensions_of",
    "doubled",
    "family_names",
    "family_of",
]


def family_of(model: Model) -> Family:
    """The family that `model` names. Raises UsageError for an unknown one."""
    family = FAMILIES.get(model.family) or ENGINE_ONLY.get(model.family)
    if family is None:
        raise UsageError(f"unknown family `{model.family}`; there are {family_names()}")
    return family


def family_names() -> str:
    """All families for people, those that only an engine can judge apart."""
    return family_list([*FAMILIES, *ENGINE_ONLY])


def family_list(names: Sequence[str]) -> str:
    """Families for people, those that only an engine can judge apart."""
    others = ", ".join(name for name in names if name in ENGINE_ONLY)
    return ", ".join(name for name in names if name not in ENGINE_ONLY) + (f"; with `--oracle engine` also {others}" if others else "")


@functools.lru_cache(maxsize=256)
def dimensions_of(model: Model) -> Dimensions:
    """All dimensions of `model`: the family's defaults with the model's changes. Read-only, and worked out once a model.

    Raises UsageError for a dimension the family does not have, a value out of bounds, or a combination that makes no model.
    """
    family = family_of(model)
    dimensions = dict(family.defaults)
    for name, value in model.dimensions:
        if name not in dimensions:
            raise UsageError(f"family {family.name} has no dimension `{name}`; it has {', '.join(dimensions)}")
        low, high = family.bounds_of(name)
        if not low <= value <= high:
            raise UsageError(f"dimension `{name}` must be from {low} to {high}, not {value}")
        dimensions[name] = value
    family.check(dimensions)
    parameters = sum(tensor.size for tensor in family.tensors(dimensions))
    if parameters > PARAMETERS_MAX:
        raise UsageError(f"model {model.family} with these dimensions has {parameters} parameters; at most {PARAMETERS_MAX} are allowed")
    return MappingProxyType(dimensions)


PARAMETERS_MAX = 1 << 25
"""Bound on a model's parameters: toy models stay toys."""


def doubled(model: Model) -> Model:
    """The same family and seed with doubled width (`n_embd`): its saved states are foreign to `model`'s."""
    family, changed = family_of(model), dict(model.dimensions)
    for name in family.doubled:
        changed[name] = 2 * changed.get(name, family.defaults[name])
    return msgspec.structs.replace(model, dimensions=tuple(sorted(changed.items())))
