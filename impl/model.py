"""Models made ready: weights laid out, shapes known, and the bytes a session will take.

Rules
- A model is prepared once and shared by all its sessions; nothing in it changes afterwards.
- A fingerprint names everything of the model that a saved state depends on: family, seed and every dimension.
- Bytes are added up, and refused beyond a bound, before anything is allocated.
"""

import functools
import hashlib
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

from ..spec.configuration import CacheConfiguration, check_configuration
from ..spec.errors import UsageError
from ..spec.families import dimensions_of, family_of
from ..spec.families.family import Dimensions, Weights
from ..spec.models import Model, check_seed
from ..spec.weights import weights_of
from .attention_cache import AttentionCache, attention_bytes
from .cells import Cells, StrictCells
from .forwards import Memory, PreparedModel
from .hybrid_cache import HybridCache
from .memory import FLOAT_BYTES, Allocate, allocate
from .recurrent_cache import RecurrentCache

SESSION_BYTES_MAX = 1 << 30


class FamilyModule(Protocol):
    """What the module of a family's forward has.

    prepare  the family's weights as `forward` uses them: its own tuple of arrays
    shapes   of state rows and attention cells: the fields of `PreparedModel` that the family decides
    forward  compiled, see `PreparedModel`
    """

    forward: Callable[..., None]

    def prepare(self, dimensions: Dimensions, weights: Weights) -> Any: ...
    def shapes(self, dimensions: Dimensions) -> dict[str, Any]: ...


def _forward_module(name: str) -> FamilyModule:
    """The module beside this one; imported when it is first asked for, since importing declares its kernels."""
    full_name = f"{__package__}.{name}"
    if importlib.util.find_spec(full_name) is None:
        raise UsageError(f"there is no forward `{name}` in {__package__}; only an engine runs this family")
    return cast(FamilyModule, importlib.import_module(full_name))


@functools.lru_cache(maxsize=32)
def prepared(model: Model) -> PreparedModel:
    """The model, ready to run. Raises UsageError for a bad model or one of a family that has no forward here."""
    check_seed(model.seed)
    family = family_of(model)
    dimensions = dict(dimensions_of(model))
    code = _forward_module(family.forward_module)
    described = f"{model.family},{model.seed},{sorted(dimensions.items())}"
    return PreparedModel(
        fingerprint=hashlib.blake2b(described.encode(), digest_size=16).hexdigest(),
        dimensions=dimensions,
        weights=code.prepare(dimensions, weights_of(model)),
        forward=code.forward,
        recurrent_layers=family.recurrent_layers(dimensions),
        attention_layers=family.attention_layers(dimensions),
        **code.shapes(dimensions),
    )


def session_bytes(model: PreparedModel, configuration: CacheConfiguration) -> int:
    """Bytes of the caches of one session."""
    total = 0
    if model.recurrent_layers:
        n_rows = configuration.n_seq_max * (1 + configuration.n_rs_seq)
        total += (
            len(model.recurrent_layers) * n_rows * (math.prod(model.convolution_shape) + math.prod(model.recurrent_shape)) * FLOAT_BYTES
        )
        total += len(model.embedding_layers) * n_rows * math.prod(model.embedding_shape) * FLOAT_BYTES
    if model.attention_layers:
        total += attention_bytes(
            len(model.attention_layers),
            model.key_heads,
            model.head_dim,
            configuration.n_seq_max,
            configuration.n_ctx,
            bool(configuration.unified),
            model.keeps_values,
            model.index_width,
        )
    return total


def check_session(model: PreparedModel, configuration: CacheConfiguration) -> None:
    """Raise UsageError for a configuration that cannot be had: out of bounds, half precision, or too large."""
    check_configuration(configuration)
    if configuration.kv != "f32" or configuration.flash:
        raise UsageError("target numba keeps its attention cache in float32 and has no flash attention; leave out `kv` and `flash`")
    size = session_bytes(model, configuration)
    if size > SESSION_BYTES_MAX:
        raise UsageError(
            f"a session of this model with n_seq_max={configuration.n_seq_max}, n_rs_seq={configuration.n_rs_seq}, n_ctx={configuration.n_ctx} "
            f"would take {size} bytes; at most {SESSION_BYTES_MAX} are allowed: make one of them smaller"
        )


class Sides(NamedTuple):
    """What a cache is made of, beside its cells: whoever plants a fault, or keeps states elsewhere, gives classes and memory of their own."""

    recurrent: type[RecurrentCache] = RecurrentCache
    attention: type[AttentionCache] = AttentionCache
    hybrid: type[HybridCache] = HybridCache
    allocate: Allocate = allocate


SIDES = Sides()


def open_cache(
    model: PreparedModel, configuration: CacheConfiguration, cells_class: type[Cells] = StrictCells, sides: Sides = SIDES
) -> tuple[HybridCache, Memory]:
    """New, empty caches for a checked configuration, and their arrays. Memory is zero, or NaN when the configuration says poison."""
    poison = configuration.start == "poison"
    recurrent = attention = None
    allocate = sides.allocate
    empty_rows = allocate((0, 0, 0))
    convolution_rows = recurrent_rows = embedding_rows = index_rows = empty_rows
    no_cells = allocate((0, 0, max(model.key_heads, 1), max(model.head_dim, 2)))
    keys = values = (no_cells, no_cells)
    if model.recurrent_layers:
        recurrent = sides.recurrent(
            cells_class(configuration.n_seq_max, configuration.n_rs_seq), len(model.recurrent_layers),
            math.prod(model.convolution_shape), math.prod(model.recurrent_shape), math.prod(model.embedding_shape),
            len(model.embedding_layers), poison, allocate,
        )  # fmt: skip
        convolution_rows, recurrent_rows, embedding_rows = recurrent.parts
    if model.attention_layers:
        attention = sides.attention(
            tuple(layer in model.windowed_layers for layer in model.attention_layers), model.window, model.key_heads, model.head_dim,
            configuration.n_seq_max, configuration.n_ctx, bool(configuration.unified), poison, model.keeps_values, model.index_width, allocate,
        )  # fmt: skip
        keys, values, index_rows = attention.keys, attention.values, attention.index_rows
    memory = Memory(convolution_rows, recurrent_rows, keys, values, embedding_rows, index_rows)
    return sides.hybrid(recurrent, attention), memory
