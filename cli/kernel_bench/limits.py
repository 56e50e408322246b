"""What the processor can do: multiply-adds a second, and bytes a second to and from memory.

Rules
- A multiply-add is counted once, for each float32 it is done to.
- Bytes read and bytes written both count. A write that first reads the cache line it overwrites is not counted twice: that is why writing
  to another place looks slow.
- Every measurement is taken anew each time it is asked for, and remembered; nothing is averaged.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from ...impl.kernels import kernel
from ...impl.kernels.vectors import fence, load, spread, store, store_nontemporal, zeros
from ...impl.memory import FLOAT_BYTES, allocate
from .results import Limit
from .samples import timed

_CHAIN = 32
_LANES = 1024
_LINE_FLOATS = 16
DEFAULT_CACHE_BYTES = {1: 32 << 10, 2: 1 << 20, 3: 32 << 20}


def cache_bytes(level: int) -> int:
    """The size of one core's cache of this level, of the level below where there is none; a usual size where the system does not say."""
    sizes = {}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            if (folder / "type").read_text().strip() != "Instruction":
                size = (folder / "size").read_text().strip()
                sizes[int((folder / "level").read_text())] = int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}[size[-1]]
        except (OSError, ValueError, KeyError):
            continue
    below = [sizes[own] for own in sorted(sizes) if own <= level]
    return below[-1] if below else DEFAULT_CACHE_BYTES[level]


@njit(cache=True, nogil=True, fastmath=True)
def _multiply_add(x: np.ndarray, repeats: int, factor: np.float32, term: np.float32) -> None:  # type: ignore[misc, unused-ignore]
    """Chains of multiply-adds, one for each number of x: enough side by side that none waits for its own last result."""
    for _ in range(repeats):
        for i in range(x.size):
            value = x[i]
            for _ in range(_CHAIN):
                value = value * factor + term
            x[i] = value


@kernel
def _change(x: np.ndarray) -> None:
    """Read, change and write every number where it stands."""
    like = zeros(64)
    for i in range(0, x.size, 64):
        value = load(x, (i,), like)
        store(x, (i,), value + value)


@kernel
def _copy(x: np.ndarray, y: np.ndarray) -> None:
    """y = x with ordinary stores."""
    like = zeros(64)
    for i in range(0, x.size, 64):
        store(y, (i,), load(x, (i,), like))


@kernel
def _copy_past_caches(x: np.ndarray, y: np.ndarray) -> None:
    """y = x with nontemporal stores."""
    like = zeros(64)
    for i in range(0, x.size, 64):
        store_nontemporal(y, (i,), load(x, (i,), like))
    fence()


@kernel
def _write_past_caches(number: np.float32, y: np.ndarray) -> None:
    """y = number with nontemporal stores."""
    like = zeros(64)
    for i in range(0, y.size, 64):
        store_nontemporal(y, (i,), spread(number, like))
    fence()


class Limits:
    """Measures limits, and remembers what it measured. seconds: how long each time."""

    def __init__(self, seconds: float, memory_bytes: int) -> None:
        """memory_bytes: how large an array is that no cache holds."""
        self.seconds = seconds
        self.memory_bytes = memory_bytes
        self._seen: dict[tuple[str, str], list[float]] = {}
        self._arrays: dict[tuple[int, int], np.ndarray] = {}

    def multiply_adds(self, threads: int = 1) -> float:
        """Multiply-adds of float32 a second."""
        arrays = [np.ones(_LANES, np.float32) for _ in range(threads)]
        repeats = 100 if threads == 1 else 4000  # starting a thread's work takes a while
        jobs = [functools.partial(_multiply_add, x, repeats, np.float32(0.999), np.float32(0.001)) for x in arrays]
        work = float(_CHAIN * _LANES * repeats * threads)
        if threads == 1:
            rate = work / timed(jobs[0], self.seconds).seconds
        else:
            with ThreadPoolExecutor(threads) as pool:
                rate = work / timed(lambda: run_together(pool, jobs), self.seconds).seconds
        return self._remembered(f"float32 multiply-adds, {threads} thread{'s' * (threads > 1)}", "G/s", rate)

    def in_place(self, size_bytes: int | None = None) -> float:
        """Bytes a second, read and written where they stand; size_bytes: of an array of this size, else of one that no cache holds."""
        array = self._array(size_bytes or self.memory_bytes, 0)
        passes = max(1, (1 << 22) // array.nbytes)
        rate = self._rate(2 * array.nbytes, passes, lambda: _repeat(_change, passes, array))
        place = "memory" if size_bytes is None else f"{array.nbytes >> 10:,} KiB"
        return self._remembered(f"read and written in place, {place}", "GB/s", rate)

    def written(self) -> float:
        """Bytes a second, written past the caches."""
        array = self._array(self.memory_bytes, 1)
        return self._remembered(
            "written past the caches", "GB/s", self._rate(array.nbytes, 1, lambda: _write_past_caches(np.float32(1.5), array))
        )

    def copied(self, size_bytes: int | None = None) -> float:
        """Bytes a second, read in one place and written in another, both counted: by ordinary stores or past the caches, whichever is quicker."""
        source, target = (self._array(size_bytes or self.memory_bytes, place) for place in (0, 1))
        rates = [self._rate(2 * source.nbytes, 1, functools.partial(function, source, target)) for function in (_copy, _copy_past_caches)]
        place = "memory" if size_bytes is None else f"{source.nbytes >> 10:,} KiB"
        return self._remembered(f"copied, {place}", "GB/s", max(rates))

    def measured(self) -> tuple[Limit, ...]:
        """All that was measured, each in the units of its name."""
        return tuple(Limit(name, unit, min(rates) / 1e9, max(rates) / 1e9) for (name, unit), rates in self._seen.items())

    def _rate(self, work: int, passes: int, run: Callable[[], object]) -> float:
        return work * passes / timed(run, self.seconds).seconds

    def _remembered(self, name: str, unit: str, rate: float) -> float:
        self._seen.setdefault((name, unit), []).append(rate)
        return rate

    def _array(self, size_bytes: int, place: int) -> np.ndarray:
        """An array of about this size, in whole vectors; kept, for its pages are then there."""
        floats = max(64, size_bytes // FLOAT_BYTES // 64 * 64)
        if (floats, place) not in self._arrays:
            array = allocate((floats,))
            array.fill(0)
            self._arrays[floats, place] = array
        return self._arrays[floats, place]


def _repeat(function: Callable[..., Any], passes: int, array: np.ndarray) -> None:
    for _ in range(passes):
        function(array)


def run_together(pool: ThreadPoolExecutor, jobs: Sequence[Callable[[], object]]) -> None:
    """Run jobs that leave the interpreter's lock at the same time, the last one on this thread."""
    others = [pool.submit(job) for job in jobs[:-1]]
    jobs[-1]()
    for other in others:
        other.result()
