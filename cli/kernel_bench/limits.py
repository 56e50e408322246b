"""What the processor can do: multiply-adds a second, and bytes a second to and from memory.

Rules
- A multiply-add is counted once, for each float32 it is done to.
- Bytes read and bytes written both count. A write that first reads the cache line it overwrites is not counted twice: that is why writing
  to another place looks slow.
- A probe is sampled in turn with what it bounds, and what it showed each time is remembered; nothing is averaged.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ...impl.kernels import kernel
from ...impl.kernels.vectors import fence, load, spread, store, store_nontemporal, zeros
from ...impl.memory import FLOAT_BYTES, allocate
from .results import Limit, Timing
from .samples import Run

_CHAIN = 32
_LANES = 1024
_SHORT_BYTES = 1 << 22
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


class Probe(NamedTuple):
    """Something whose time says what the processor can do.

    name, unit  of the limit
    work        multiply-adds, or bytes, that one run does
    threads     that it keeps busy
    """

    name: str
    unit: str
    work: float
    run: Run
    threads: int = 1


class Limits:
    """Makes probes, and remembers what was measured with them. close() at the end."""

    def __init__(self, memory_bytes: int) -> None:
        """memory_bytes: how large an array is that no cache holds."""
        self.memory_bytes = memory_bytes
        self.pool = ThreadPoolExecutor(2)
        self._seen: dict[tuple[str, str], list[float]] = {}
        self._arrays: dict[tuple[int, int], np.ndarray] = {}

    def multiply_adds(self, threads: int = 1) -> Probe:
        """Multiply-adds of float32, on one thread or two."""
        repeats = 100 if threads == 1 else 4000  # handing a thread its work takes a while
        arrays = [np.ones(_LANES, np.float32) for _ in range(threads)]
        jobs = [functools.partial(_multiply_add, x, repeats, np.float32(0.999), np.float32(0.001)) for x in arrays]
        run = jobs[0] if threads == 1 else functools.partial(run_together, self.pool, jobs)
        name = f"float32 multiply-adds, {threads} thread{'s' * (threads > 1)}"
        return Probe(name, "G/s", float(_CHAIN * _LANES * repeats * threads), run, threads)

    def in_place(self, size_bytes: int | None = None) -> Probe:
        """Bytes read and written where they stand, in an array of this size, else in one that no cache holds."""
        array = self._array(size_bytes or self.memory_bytes, 0)
        passes = max(1, _SHORT_BYTES // array.nbytes)
        place = "memory" if size_bytes is None else f"{array.nbytes >> 10:,} KiB"
        return Probe(
            f"read and written in place, {place}", "GB/s", 2.0 * array.nbytes * passes, functools.partial(_repeat, passes, _change, array)
        )

    def written(self) -> Probe:
        """Bytes written past the caches."""
        array = self._array(self.memory_bytes, 1)
        return Probe("written past the caches", "GB/s", float(array.nbytes), functools.partial(_write_past_caches, np.float32(1.5), array))

    def copied(self, size_bytes: int | None = None) -> tuple[Probe, Probe]:
        """Bytes read in one place and written in another, both counted: with ordinary stores, and past the caches."""
        source, target = (self._array(size_bytes or self.memory_bytes, place) for place in (0, 1))
        passes = max(1, _SHORT_BYTES // source.nbytes)
        place = "memory" if size_bytes is None else f"{source.nbytes >> 10:,} KiB"
        plain, streamed = (
            Probe(f"{name}, {place}", "GB/s", 2.0 * source.nbytes * passes, functools.partial(_repeat, passes, function, source, target))
            for name, function in (("copied", _copy), ("copied past the caches", _copy_past_caches))
        )
        return plain, streamed

    def remember(self, probe: Probe, timing: Timing) -> None:
        """Keep what a probe showed, for the table."""
        self._seen.setdefault((probe.name, probe.unit), []).append(probe.work / timing.seconds)

    def measured(self) -> tuple[Limit, ...]:
        """All that was measured, in the units of its name."""
        return tuple(Limit(name, unit, min(rates) / 1e9, max(rates) / 1e9) for (name, unit), rates in self._seen.items())

    def close(self) -> None:
        """End the second thread."""
        self.pool.shutdown()

    def _array(self, size_bytes: int, place: int) -> np.ndarray:
        """An array of about this size, in whole vectors; kept, for its pages are then there."""
        floats = max(64, size_bytes // FLOAT_BYTES // 64 * 64)
        if (floats, place) not in self._arrays:
            array = allocate((floats,))
            array.fill(0)
            self._arrays[floats, place] = array
        return self._arrays[floats, place]


def _repeat(passes: int, function: Callable[..., Any], *arrays: np.ndarray) -> None:
    for _ in range(passes):
        function(*arrays)


def run_together(pool: ThreadPoolExecutor, jobs: Sequence[Callable[[], object]]) -> None:
    """Run jobs that leave the interpreter's lock at the same time, the last one on this thread."""
    others = [pool.submit(job) for job in jobs[:-1]]
    jobs[-1]()
    for other in others:
        other.result()
