"""Memory for states: aligned float32 arrays, zero or poisoned.

Rules
- Arrays start at a multiple of 64 bytes: vector loads that straddle cache lines cost up to a quarter of a kernel's time.
- Sizes are added up before anything is allocated.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

ALIGNMENT_BYTES = 64
FLOAT_BYTES = 4
Allocate = Callable[..., Any]
"""`allocate`, or one with its arguments that gives what is indexed and filled like its array."""


def allocate(shape: tuple[int, ...], poison: bool = False) -> np.ndarray:
    """A float32 array of this shape: zeros, or NaN when `poison`."""
    padding = ALIGNMENT_BYTES // FLOAT_BYTES
    count = math.prod(shape)
    block = np.zeros(count + padding, np.float32)
    start = -block.ctypes.data % ALIGNMENT_BYTES // FLOAT_BYTES
    array = block[start : start + count].reshape(shape)
    if poison:
        array.fill(np.nan)
    return array


def aligned(array: np.ndarray) -> np.ndarray:
    """An aligned, contiguous, writable float32 copy."""
    result = allocate(array.shape)
    result[...] = array
    return result
