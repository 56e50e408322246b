"""Vectors inside kernels: float32 numbers side by side, loaded, multiplied, added and stored together.

Rules
- The compiler leaves a loop scalar that reads one row and writes another, for the two might overlap. Written with vectors it is not, and
  the two rows may then even be the same one.
- Every lane does what a float32 does in a plain loop, and `fused` rounds its product and sum once, everywhere: the same bits whatever
  vectors the processor has. The compiler cuts ours into what there is. (A processor that cannot fuse is given the C library's `fmaf`, one
  number at a time: many times slower, and the same bits.)
- `like`, a vector or a float32, says by its type how many numbers are meant; with a float32 a function does one at a time.
- Nothing is checked: no index may be negative, and all of a vector must lie in its array.
- A nontemporal store writes a whole cache line without reading it first, and leaves nothing in the caches: it is for memory that is not read
  again soon. The thread that wrote sees it in its place; for others to see it before they are told of it, `fence` has to be called.
Source: LLVM's language reference (vector types, `llvm.fma`, `nontemporal`, `llvm.prefetch`, `fence`), through Numba's extension interface.
"""
# mypy: allow-untyped-calls, allow-untyped-decorators

import operator
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import config, types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from . import inner_kernel, kernel

CACHE_LINE_BYTES = 64
FLOAT_BYTES = 4
PREFETCH_AHEAD_BYTES = 8192
"""How far before it is needed memory is asked for; found by trial, flat from 4096 to 16384."""
STREAMED_ROW_BYTES_MIN = 1 << 18
STREAMED_CALL_BYTES_MIN = 1 << 23
"""Rows from the one size on, of a call that writes as much as the other, are taken not to stay in the caches until they are read again."""


def _lanes() -> int:
    """How many numbers side by side leave room for four such vectors, three more, and what is spread, in the processor's registers."""
    features = config.CPU_FEATURES  # type: ignore[attr-defined]  # made when it is imported
    if features is None:
        features = ",".join(f"+{name}" for name, is_there in binding.get_host_cpu_features().items() if is_there)
    return 64 if "+avx512f" in features else 16


LANES = _lanes()
DELTA_LANES = max(LANES // 2, 16)
"""The same for two sums a channel and no entries that stay; of a state, so many channels fit the first cache."""
CHUNK_TOKENS = 32
"""Tokens whose inputs and outputs, for LANES channels, stay in the first cache while all of a state passes by."""
FEW_NUMBERS = 1024
"""Up to so many numbers of a head's state, each token's counted, it is quicker to take tokens one by one than to lay anything out."""
SPAN_TOKENS = 256
"""Tokens whose inputs shared by several heads are laid out once for all of these: they stay in the second cache."""

_INT = ir.IntType(32)
_FLOAT = ir.FloatType()
_BYTE_POINTER = ir.IntType(8).as_pointer()
_READ, _USED_ONCE, _DATA = (_INT(flag) for flag in (0, 0, 1))

Typed = tuple[Any, Callable[..., Any]]
"""What an operation is to Numba: its signature, and what emits it."""


def _operation(function: Callable[..., Typed]) -> Callable[..., Any]:
    """An operation that kernels call without the first argument of `function`; a number that is written out keeps its value in its type."""
    return cast("Callable[..., Any]", intrinsic(prefer_literal=True)(function))


class Vector(types.Type):
    """Numba's type of `lanes` float32 numbers."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(f"Vector({lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(_FLOAT, vector.lanes))


@infer_global(operator.add)
@infer_global(operator.sub)
@infer_global(operator.mul)
class _OfTwoVectors(AbstractTemplate):
    def generic(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if len(arguments) == 2 and isinstance(arguments[0], Vector) and arguments[0] == arguments[1]:
            return signature(arguments[0], *arguments)
        return None


@lower_builtin(operator.add, Vector, Vector)
def _add(context: Any, builder: Any, types_: Any, values: Any) -> Any:
    return builder.fadd(*values)


@lower_builtin(operator.sub, Vector, Vector)
def _subtract(context: Any, builder: Any, types_: Any, values: Any) -> Any:
    return builder.fsub(*values)


@lower_builtin(operator.mul, Vector, Vector)
def _multiply(context: Any, builder: Any, types_: Any, values: Any) -> Any:
    return builder.fmul(*values)


@_operation
def fused(typing: Any, left: Any, right: Any, added: Any) -> Typed:
    """left * right + added, three vectors or three float32, rounded once."""
    lanes = f"v{added.lanes}" if isinstance(added, Vector) else ""

    def emit(context: Any, builder: Any, types_: Any, values: Any) -> Any:
        kind = ir.FunctionType(values[2].type, [values[2].type] * 3)
        return builder.call(builder.module.declare_intrinsic(f"llvm.fma.{lanes}f32", (), kind), values)

    return signature(added, added, added, added), emit


@_operation
def zeros(typing: Any, lanes: Any) -> Typed:
    """A vector of `lanes`, written as a number, zeros."""
    vector = Vector(lanes.literal_value)

    def emit(context: Any, builder: Any, types_: Any, values: Any) -> Any:
        return ir.Constant(ir.VectorType(_FLOAT, vector.lanes), [0.0] * vector.lanes)

    return signature(vector, lanes), emit


@_operation
def spread(typing: Any, number: Any, like: Any) -> Typed:
    """`number`, float32, in every lane."""

    def emit(context: Any, builder: Any, types_: Any, values: Any) -> Any:
        if not isinstance(like, Vector):
            return values[0]
        undefined = ir.Constant(ir.VectorType(_FLOAT, like.lanes), ir.Undefined)
        first = builder.insert_element(undefined, values[0], _INT(0))
        return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INT, like.lanes), [0] * like.lanes))

    return signature(like, types.float32, like), emit


def _pointer(context: Any, builder: Any, types_: Any, values: Any, like: Any) -> Any:
    """Where `like` is in the array, the first argument, at the index, the second."""
    array_type, index_type = types_.args[:2]
    array = context.make_array(array_type)(context, builder, values[0])
    index = zip(cgutils.unpack_tuple(builder, values[1]), index_type, strict=True)
    item = cgutils.get_item_pointer(context, builder, array_type, array, [context.cast(builder, *one, types.intp) for one in index])
    return builder.bitcast(item, context.get_value_type(like).as_pointer())


@_operation
def load(typing: Any, array: Any, index: Any, like: Any) -> Typed:
    """What stands in `array`, float32, from `index`, a tuple, on."""

    def emit(context: Any, builder: Any, types_: Any, values: Any) -> Any:
        return builder.load(_pointer(context, builder, types_, values, like), align=FLOAT_BYTES)

    return signature(like, array, index, like), emit


@_operation
def store(typing: Any, array: Any, index: Any, value: Any) -> Typed:
    """Put `value` into `array`, float32, from `index`, a tuple, on."""

    def emit(context: Any, builder: Any, types_: Any, values: Any) -> Any:
        builder.store(values[2], _pointer(context, builder, types_, values, value), align=FLOAT_BYTES)
        return context.get_dummy_value()

    return signature(types.void, array, index, value), emit


@_operation
def store_nontemporal(typing: Any, array: Any, index: Any, value: Any) -> Typed:
    """As `store`, past the caches; a vector of whole cache lines, at the start of one."""

    def emit(context: Any, builder: Any, types_: Any, values: Any) -> Any:
        pointer = _pointer(context, builder, types_, values, value)
        # Of a single number this is never carried out (see `may_stream`), but compiled: then its own size is all that may be promised.
        alignment_bytes = CACHE_LINE_BYTES if isinstance(value, Vector) else FLOAT_BYTES
        builder.store(values[2], pointer, align=alignment_bytes).set_metadata("nontemporal", builder.module.add_metadata([_INT(1)]))
        return context.get_dummy_value()

    return signature(types.void, array, index, value), emit


@_operation
def prefetch(typing: Any, array: Any, index: Any, like: Any) -> Typed:
    """Ask for every cache line that `like` touches at `index`, which may lie beyond the array's end, to be used once."""

    def emit(context: Any, builder: Any, types_: Any, values: Any) -> Any:
        start = builder.bitcast(_pointer(context, builder, types_, values, like), _BYTE_POINTER)
        kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _INT, _INT, _INT])
        ask = builder.module.declare_intrinsic("llvm.prefetch", (_BYTE_POINTER,), kind)
        lanes = like.lanes if isinstance(like, Vector) else 1
        for offset_bytes in range(0, lanes * FLOAT_BYTES, CACHE_LINE_BYTES):
            builder.call(ask, [builder.gep(start, [_INT(offset_bytes)]), _READ, _USED_ONCE, _DATA])
        return context.get_dummy_value()

    return signature(types.void, array, index, like), emit


@_operation
def fence(typing: Any) -> Typed:
    """Order all stores before it, nontemporal ones too, before all that follow."""

    def emit(context: Any, builder: Any, types_: Any, values: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return signature(types.void), emit


@_operation
def lanes_of(typing: Any, like: Any) -> Typed:
    """How many numbers `like` has: a constant."""
    lanes = like.lanes if isinstance(like, Vector) else 1

    def emit(context: Any, builder: Any, types_: Any, values: Any) -> Any:
        return context.get_constant(types.intp, lanes)

    return signature(types.intp, like), emit


@_operation
def apart(typing: Any) -> Typed:
    """The function that says so is compiled as it stands, not into its callers nor for many passes of a loop: else compiling takes long."""

    def emit(context: Any, builder: Any, types_: Any, values: Any) -> Any:
        builder.function.attributes.add("noinline")
        builder.function.attributes.add("optsize")
        return context.get_dummy_value()

    return signature(types.void), emit


@inner_kernel
def room_of(number_count: int) -> np.ndarray:
    """An unwritten float32 [number_count] at the start of a cache line: a vector that straddles two costs twice."""
    line = CACHE_LINE_BYTES // FLOAT_BYTES
    block = np.empty(number_count + line, np.float32)
    start = -(block.ctypes.data // FLOAT_BYTES) % line
    return block[start : start + number_count]


@inner_kernel
def write(array: np.ndarray, index: Any, value: Any, past_caches: bool) -> None:
    """`store_nontemporal` when `past_caches`, else `store`."""
    if past_caches:
        store_nontemporal(array, index, value)
    else:
        store(array, index, value)


@kernel
def may_stream(rows: np.ndarray, row_count: int) -> bool:
    """Whether `row_count` of rows, float32 [n_rows, heads, d_state, head_dim], are large enough to be written past the caches.

    They also have to lie in whole cache lines.
    """
    row_bytes = rows.shape[1] * rows.shape[2] * rows.shape[3] * FLOAT_BYTES
    in_whole_lines = rows.ctypes.data % CACHE_LINE_BYTES == 0 and rows.shape[3] * FLOAT_BYTES % CACHE_LINE_BYTES == 0
    return row_bytes >= STREAMED_ROW_BYTES_MIN and row_count * row_bytes >= STREAMED_CALL_BYTES_MIN and in_whole_lines
