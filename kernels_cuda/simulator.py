"""Kernels without a device: thread by thread, in Python, where Numba's own simulator is chosen (NUMBA_ENABLE_CUDASIM=1).

Rules
- For tests and toy sizes. Arrays are those of Numba's simulator, kernels see them as NumPy's; what a thread asks of `cuda` is here.
- One thread runs at a time: to its end, or until lanes exchange; then the next one goes on. So nothing is polled, and a run is always the
  same. (Numba's simulator polls as many operating system's threads as a block has: ten times as slow here.)
- A device promises no order of threads; `backwards` runs them from the last to the first, so that tests see both.
- All threads of a block have to come to an exchange together, and a block that exchanges is one warp.
Source: CUDA C++ Programming Guide, warp shuffle functions; numba-cuda's simulator for what it gives kernels.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

backwards = False
"""Whether the last thread is run first."""


class _Stopped(Exception):  # noqa: N818 (it says that another thread failed)
    """Another thread of the block failed."""


class Block:
    """The threads of one block, which take turns.

    handovers  times that a thread waited for the others, of all blocks: what a simulation costs
    """

    handovers = 0
    running: "Block"
    lane: int

    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...], number: int, block_count: int, lane_count: int) -> None:
        self._function = function
        self._arguments = arguments
        self.number, self.block_count, self.lane_count = number, block_count, lane_count
        self._next = 0  # how many lanes were begun
        self._waiting: list[int] = []  # lanes at an exchange, in the order in which they came
        self._turn: dict[int, threading.Lock] = {}
        self._ended = threading.Lock()
        self._failure: BaseException | None = None
        self._boards: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        self._exchanges = [0] * lane_count

    def run(self) -> None:
        """Run all threads to their end. Raises what a thread raised."""
        Block.running = self
        self._ended.acquire()
        self._begin()
        self._ended.acquire()
        if self._failure is not None:
            raise self._failure

    def _begin(self) -> None:
        """Run the lanes that were not begun, until one that waited for others ends: whoever goes on then ends the block."""
        while self._next < self.lane_count:
            lane = self.lane = self.lane_count - 1 - self._next if backwards else self._next
            self._next += 1
            try:
                self._function(*self._arguments)
            except _Stopped:
                pass
            except BaseException as error:  # handed to whoever launched
                self._failure = self._failure or error
            if self._exchanges[lane]:
                break
        self._end()

    def _end(self) -> None:
        """A lane ended, and it was the running one: the next one that waits goes on; the last one ends the block."""
        if self._waiting:
            self._turn[self._waiting.pop(0)].release()
        else:
            self._ended.release()

    def exchange(self, value: Any, lane_mask: int) -> Any:
        """The value that the lane whose number differs in the bits of `lane_mask` gave."""
        lane = self.lane
        board = self._boards[self._exchanges[lane] % 2]  # the last one is still read
        self._exchanges[lane] += 1
        board[lane] = value
        self._wait(lane)
        self.lane = lane
        if self._failure is not None:
            raise _Stopped
        other = lane ^ lane_mask
        if self._exchanges[other] < self._exchanges[lane]:
            raise RuntimeError(f"lane {other} did not come to the exchange of lane {lane}")
        return board[other]

    def _wait(self, lane: int) -> None:
        """Let the others come to where this lane is."""
        Block.handovers += 1
        turn = self._turn.setdefault(lane, threading.Lock())
        turn.acquire(blocking=False)
        self._waiting.append(lane)
        if self._next < self.lane_count:
            threading.Thread(target=self._begin, daemon=True).start()
        else:
            self._turn[self._waiting.pop(0)].release()
        turn.acquire()


def run(function: Callable[..., None], block_count: int, lane_count: int, arguments: tuple[Any, ...]) -> None:
    """Run a kernel, block after block. Raises what a thread raised."""
    seen = tuple(map(_seen, arguments))
    for number in reversed(range(block_count)) if backwards else range(block_count):
        Block(function, seen, number, block_count, lane_count).run()


def _seen(argument: Any) -> Any:
    """An argument as a kernel sees it."""
    if isinstance(argument, tuple):
        return tuple(map(_seen, argument))
    return getattr(argument, "_ary", argument)


def _grid(dimensions: int) -> int:
    return Block.running.number * Block.running.lane_count + Block.running.lane


def _gridsize(dimensions: int) -> int:
    return Block.running.block_count * Block.running.lane_count


def _shfl_xor_sync(mask: int, value: Any, lane_mask: int) -> Any:
    return np.float32(Block.running.exchange(value, int(lane_mask)))


class _Local:
    @staticmethod
    def array(size: int, dtype: Any) -> np.ndarray:
        """A thread's own numbers; NaN until they are set."""
        return np.full(size, np.nan, dtype)


def install() -> None:
    """Give Numba's simulator what kernels ask for."""
    cuda.grid, cuda.gridsize, cuda.local, cuda.shfl_xor_sync = _grid, _gridsize, _Local, _shfl_xor_sync
