"""Neighbouring float32 numbers, loaded and stored with one instruction.

Rules
- An index is a tuple of unsigned numbers, in bounds; the number it names stands at a multiple of 16 bytes where four are taken at once.
- In the simulator they are taken one by one.
Source: LLVM's language reference (vector types), through numba-cuda's extension interface.
"""
# mypy: allow-untyped-calls, allow-untyped-decorators

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import SIMULATED, device_function

FLOAT_BYTES = 4
WIDTH = 4
"""Numbers in a vector."""

if SIMULATED:

    def _load_four(array: np.ndarray, index: Any) -> tuple[Any, ...]:
        *before, last = index
        return tuple(array[(*before, last + np.uint64(i))] for i in range(WIDTH))

    def _store_four(array: np.ndarray, index: Any, a: Any, b: Any, c: Any, d: Any) -> None:
        *before, last = index
        for i, value in enumerate((a, b, c, d)):
            array[(*before, last + np.uint64(i))] = value

else:
    from llvmlite import ir  # type: ignore[import-untyped]
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic

    _INT = ir.IntType(32)
    _FOUR = ir.VectorType(ir.FloatType(), WIDTH)

    def _pointer(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        """Where the four numbers are: in the array, the first argument, from the index, the second, on."""
        array_type, index_type = signature.args[:2]
        array = context.make_array(array_type)(context, builder, values[0])
        index = cgutils.unpack_tuple(builder, values[1], len(index_type))
        item = cgutils.get_item_pointer(context, builder, array_type, array, index, wraparound=False)
        return builder.bitcast(item, _FOUR.as_pointer())

    @intrinsic
    def _load_four(typing: Any, array: Any, index: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            vector = builder.load(_pointer(context, builder, signature, values), align=WIDTH * FLOAT_BYTES)
            parts = [builder.extract_element(vector, _INT(i)) for i in range(WIDTH)]
            return context.make_tuple(builder, signature.return_type, parts)

        return types.UniTuple(types.float32, WIDTH)(array, index), emit

    @intrinsic
    def _store_four(typing: Any, array: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            vector = ir.Constant(_FOUR, ir.Undefined)
            for i in range(WIDTH):
                vector = builder.insert_element(vector, values[2 + i], _INT(i))
            builder.store(vector, _pointer(context, builder, signature, values), align=WIDTH * FLOAT_BYTES)
            return context.get_dummy_value()

        return types.void(array, index, *([types.float32] * WIDTH)), emit


class Access(NamedTuple):
    """How numbers are moved between an array and a thread's own.

    load   load(array, index, own, place): own[place], ... = as many numbers as there are in a vector, from array[index] on
    store  store(own, place, array, index): the other way
    """

    load: Callable[..., None]
    store: Callable[..., None]


@device_function
def _load_vector(array: np.ndarray, index: Any, own: np.ndarray, place: int) -> None:
    own[place], own[place + 1], own[place + 2], own[place + 3] = _load_four(array, index)


@device_function
def _store_vector(own: np.ndarray, place: int, array: np.ndarray, index: Any) -> None:
    _store_four(array, index, own[place], own[place + 1], own[place + 2], own[place + 3])


@device_function
def _load_number(array: np.ndarray, index: Any, own: np.ndarray, place: int) -> None:
    own[place] = array[index]


@device_function
def _store_number(own: np.ndarray, place: int, array: np.ndarray, index: Any) -> None:
    array[index] = own[place]


ACCESS = {WIDTH: Access(_load_vector, _store_vector), 1: Access(_load_number, _store_number)}
"""By how many numbers are moved at once."""


def width_of(channels: int) -> int:
    """How many numbers can be moved at once in rows of so many channels."""
    return WIDTH if channels % WIDTH == 0 else 1
