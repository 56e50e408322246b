"""Vectors inside kernels: float32 numbers side by side, loaded, multiplied, added and stored together.

Rules
- The compiler leaves a loop scalar that reads one row and writes another, for the two might overlap. Written with vectors it is not, and
  the two rows may then even be the same one.
- Every lane does what a float32 does in a plain loop, with products and sums rounded apart: the same bits whatever vectors the processor
  has. The compiler cuts ours into what there is.
- `like`, a vector or a float32, says by its type how many numbers are meant; with a float32 a function does one at a time.
- Nothing is checked: no index may be negative, and all of a vector must lie in its array.
- A nontemporal store writes a whole cache line without reading it first, and leaves nothing in the caches: it is for memory that is not read
  again soon. The thread that wrote sees it in its place; for others to see it before they are told of it, `fence` has to be called.
Source: LLVM's language reference (vector types, `nontemporal`, `llvm.prefetch`, `fence`), through Numba's extension interface.
"""
# mypy: allow-untyped-calls, allow-untyped-decorators

import operator
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from . import kernel

CACHE_LINE_BYTES = 64
FLOAT_BYTES = 4
PREFETCH_AHEAD_BYTES = 8192
"""How far before it is needed memory is asked for; found by trial, flat from 4096 to 16384."""
STREAMED_ROW_BYTES_MIN = 1 << 18
"""Rows from this size on are taken not to stay in the caches until they are read again: a model has dozens of layers."""

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


@kernel
def may_stream(rows: np.ndarray) -> bool:
    """Whether rows, float32 [n_rows, heads, d_state, head_dim], are large enough to be written past the caches, and lie in whole cache lines."""
    row_bytes = rows.shape[1] * rows.shape[2] * rows.shape[3] * FLOAT_BYTES
    in_whole_lines = rows.ctypes.data % CACHE_LINE_BYTES == 0 and rows.shape[3] * FLOAT_BYTES % CACHE_LINE_BYTES == 0
    return row_bytes >= STREAMED_ROW_BYTES_MIN and in_whole_lines
