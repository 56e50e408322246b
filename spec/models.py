"""Models: real architectures at toy size, named by a family, a seed and changed dimensions.

Rules
- A `Model` is only a name; its weights are a pure function of it (weights.py), the same for every executor.
- Dimensions are whole numbers; a family's defaults are in its own file (families/).
"""

import msgspec

from .errors import UsageError

SEED_MAX = (1 << 32) - 1


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A family, the seed of its weights, and the dimensions that differ from the family's defaults (sorted by name)."""

    family: str
    seed: int = 0
    dimensions: tuple[tuple[str, int], ...] = ()


def model_text(model: Model) -> str:
    """The model as in a program's `model` line, e.g. "lfm2 seed=0 n_layer=6"; the seed is always written."""
    return " ".join([model.family, f"seed={model.seed}", *(f"{name}={value}" for name, value in model.dimensions)])


def check_seed(seed: int) -> None:
    """Raise UsageError unless 0 <= seed <= 2**32 - 1."""
    if not 0 <= seed <= SEED_MAX:
        raise UsageError(f"`seed` must be a whole number from 0 to {SEED_MAX}, not {seed}")
