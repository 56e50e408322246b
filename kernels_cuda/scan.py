"""What the scans share: a thread's part of a state, and its way through the tokens of a segment.

Rules
- A state, [d_state, head_dim] for every head, lives in registers: a thread has some neighbouring channels (a vector of them) of every
  `lanes`-th of the d_state entries. The neighbouring lanes that share channels add up what they read, pair by pair, in one fixed order.
- A state is read once, from its source row; every token changes it and writes an output; the states of the last tokens are written to
  their planes in the same pass. The row of plane 0 is written once, with the last one.
- What one token does to a state is the family's `advance`, and the only thing that differs.
- Threads beyond the last channel go along, since lanes exchange, and write nothing.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from . import device_function, kernel, launch
from .vectors import ACCESS, width_of

OWN_NUMBERS_MAX = 64
"""Numbers of a state that a thread holds: a quarter of the registers it may have, so that several warps share a processor."""
LANES_MAX = 32
_ALL_LANES = 0xFFFFFFFF


class Tile(NamedTuple):
    """A thread's part of a state: `entries` of the d_state entries, every `lanes`-th one, of `width` neighbouring channels each."""

    d_state: int
    entries: int
    lanes: int
    width: int

    @property
    def is_exact(self) -> bool:
        """Whether every lane has as many entries as it has room for."""
        return self.entries * self.lanes == self.d_state


def tile_of(d_state: int, head_dim: int) -> Tile:
    """The tile for states of such a shape; the lanes are a power of 2."""
    width = width_of(head_dim)
    lanes = 1
    while lanes < LANES_MAX and math.ceil(d_state / lanes) * width > OWN_NUMBERS_MAX:
        lanes *= 2
    return Tile(d_state, math.ceil(d_state / lanes), lanes, width)


class Constants(NamedTuple):
    """A tile's numbers as kernels are compiled with them, and what they do with them.

    load            of a vector, see `vectors.Access`
    add_over_lanes  device function: the sum of a float32 over the lanes that share channels, the same in each of them
    """

    entries: int
    width: int
    lanes: Any  # uint64, as d_state
    d_state: Any
    is_exact: bool
    load: Callable[..., None]
    add_over_lanes: Callable[[Any], Any]


def constants_of(tile: Tile) -> Constants:
    """The constants of kernels for a tile."""
    return Constants(
        tile.entries, tile.width, np.uint64(tile.lanes), np.uint64(tile.d_state), tile.is_exact, ACCESS[tile.width].load, _adder(tile.lanes)
    )  # fmt: skip


@functools.cache
def _adder(lanes: int) -> Callable[[Any], Any]:
    doublings = lanes.bit_length() - 1

    @device_function
    def add_over_lanes(value: Any) -> Any:
        for doubling in range(doublings):
            value += cuda.shfl_xor_sync(_ALL_LANES, value, np.int32(1) << np.int32(doubling))
        return value

    return add_over_lanes  # type: ignore[no-any-return]


def scan_kernel(tile: Tile, advance: Callable[..., None]) -> Any:
    """The kernel that takes every state of a launch through its tokens.

    advance  device function advance(operands, token, head, p, lane, state, total): one token for the thread's channels, from p on;
             state, float32 [entries * width], is changed, and total, float32 [width], is the sum over the thread's own entries of what is read
    """
    entries, width, lanes, d_state, is_exact, load, add_over_lanes = constants_of(tile)
    store = ACCESS[width].store
    size, one = entries * width, np.uint64(1)

    @kernel
    def scan(operands, rows, segment_start, source_row, plane_row, y):  # type: ignore[no-untyped-def]
        heads, head_dim, planes = np.uint64(y.shape[1]), np.uint64(y.shape[2]), np.uint64(plane_row.shape[1])
        blocks = head_dim // np.uint64(width)
        thread = np.uint64(cuda.grid(1))
        lane, unit, unit_count = thread % lanes, thread // lanes, np.uint64(source_row.size) * heads * blocks
        is_live = unit < unit_count
        unit = unit if is_live else unit_count - one
        p = unit % blocks * np.uint64(width)
        head = unit // blocks % heads
        segment = unit // (blocks * heads)
        first = np.uint64(segment_start[segment] - segment_start[np.uint64(0)])
        last = np.uint64(segment_start[segment + one] - segment_start[np.uint64(0)])

        state = cuda.local.array(size, np.float32)
        total = cuda.local.array(width, np.float32)
        row = np.uint64(source_row[segment])
        for j in range(entries):
            n = lane + np.uint64(j) * lanes
            if is_exact or n < d_state:
                load(rows, (row, head, n, p), state, j * width)
            else:
                for i in range(width):
                    state[j * width + i] = np.float32(0)
        token = first
        while token < last:
            advance(operands, token, head, p, lane, state, total)
            for i in range(width):
                total[i] = add_over_lanes(total[i])
            if is_live and lane == np.uint64(0):
                store(total, 0, y, (token, head, p))
            plane = last - one - token
            if is_live and plane < planes:
                row = np.uint64(plane_row[segment, plane])
                for j in range(entries):
                    n = lane + np.uint64(j) * lanes
                    if is_exact or n < d_state:
                        store(state, j * width, rows, (row, head, n, p))
            token += one

    return scan


def launch_scan(
    kernel_of: Callable[[Tile], Any],
    operands: tuple[Any, ...],
    rows: Any,
    segment_start: Any,
    source_row: Any,
    plane_row: Any,
    y: Any,
) -> None:
    """Run a scan over all segments, heads and channels.

    rows  float32 [n_rows, heads, d_state, head_dim]; y float32 [tokens, heads, head_dim]
    """
    heads, d_state, head_dim = rows.shape[1:]
    tile = tile_of(d_state, head_dim)
    thread_count = source_row.size * heads * (head_dim // tile.width) * tile.lanes
    launch(kernel_of(tile), thread_count, operands, rows, segment_start, source_row, plane_row, y)
