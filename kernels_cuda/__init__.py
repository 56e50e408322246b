"""Numba-CUDA kernels: the functions of `impl/kernels/`, with the same names and arguments, on arrays of a device.

Rules
- A function checks nothing and returns at once: it launches one kernel, and the device's own order of launches is the order of their effects.
- A token's result depends on its own sequence alone, and every sum is taken in one written order: bitwise the same for every split of the
  tokens and every order of sequences. (The order is not that of the CPU's kernels, and products may be fused with sums: results differ
  from theirs by rounding.)
- Sequences of one launch run side by side. None may read a row that another one of the launch writes: whoever launches splits such a
  batch (targets/cuda_session.py).
- Indices are unsigned throughout: a signed one is tested for being negative at every access.
- What a launch works with is chosen by shapes alone, never by values: nothing is read back from the device.

Without a device everything is simulated when NUMBA_ENABLE_CUDASIM=1 is set before Numba is imported: simulator.py.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from .arrays import resident

SIMULATED: bool = bool(cuda.config.ENABLE_CUDASIM)
"""Whether kernels run in the simulator: thread by thread, in Python."""
BLOCK_THREADS = 32 if SIMULATED else 128
"""Threads of a block. Lanes exchange in blocks of one warp only where they are simulated (simulator.py)."""
BLOCKS_MAX = 4096
"""Blocks that a launch has at most where threads take turns."""
SIMULATED_THREADS = 4
"""Simulated threads that take turns: enough that turns are taken."""

if SIMULATED:
    from . import simulator

    simulator.install()
else:
    cuda.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # small models are what this is for


def device_function(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call; it becomes a part of them."""
    if SIMULATED:
        return function
    return cuda.jit(device=True, forceinline=True)(function)  # a thread's own numbers stay in registers


def simulated_by(quick: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """A device function for which another one stands in where kernels are simulated, because it takes whole arrays at once: the same bits.
    (The function itself is its attribute `of_one_thread`, and a test compares them.)"""

    def choose(function: Callable[..., Any]) -> Any:
        if not SIMULATED:
            return device_function(function)
        quick.of_one_thread = function  # type: ignore[attr-defined]
        return quick

    return choose


def kernel(function: Callable[..., None]) -> Any:
    """Compile a function of one thread."""
    return function if SIMULATED else cuda.jit(function)


def start(kernel: Any, block_count: int, block_threads: int, arguments: tuple[Any, ...]) -> None:
    """Start a kernel: every launch goes through here."""
    if SIMULATED:
        simulator.run(kernel, block_count, block_threads, resident(arguments))
    else:
        kernel[block_count, block_threads](*resident(arguments))


def launch(kernel: Any, thread_count: int, *arguments: Any) -> None:
    """Run a kernel with at least so many threads, in whole blocks; not at all where there is nothing to do."""
    if thread_count > 0:
        start(kernel, math.ceil(thread_count / BLOCK_THREADS), BLOCK_THREADS, arguments)


def for_each(work: Callable[..., None]) -> Callable[..., None]:
    """A function of (count, *arguments) that does work(place, *arguments) for every place, uint64, below `count`: threads take turns."""
    one = device_function(work)

    @kernel
    def take_turns(count, arguments):  # type: ignore[no-untyped-def]
        place, step = np.uint64(cuda.grid(1)), np.uint64(cuda.gridsize(1))
        while place < np.uint64(count):
            one(place, *arguments)
            place += step

    def do(count: int, *arguments: Any) -> None:
        if count > 0:
            block_count = 1 if SIMULATED else min(math.ceil(count / BLOCK_THREADS), BLOCKS_MAX)
            start(take_turns, block_count, min(count, SIMULATED_THREADS) if SIMULATED else BLOCK_THREADS, (count, arguments))

    take_turns.__name__ = work.__name__
    return do
