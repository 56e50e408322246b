"""RWKV-6's recurrence over the tokens of one ubatch, with rollback snapshots.

Rules
- How a state is dealt to threads, and when it is written: scan.py.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from . import device_function
from .scan import Tile, constants_of, launch_scan, scan_kernel


def rwkv6_wkv(
    receptance: Any, key: Any, value: Any, decay: Any, first: Any, rows: Any, segment_start: Any, source_row: Any, plane_row: Any, y: Any
) -> None:  # fmt: skip
    """y = receptance^T (state + first * key value^T); state = state * decay + key value^T, head by head.

    receptance, key, decay  float32 [tokens, heads, key channels], segment after segment; decays are factors
    value          float32 [tokens, heads, value channels]
    first          float32 [heads, key channels]
    rows           float32 [n_rows, heads, key channels, value channels]; read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments]; the row each state is read from; no other segment's plane row
    plane_row      int64 [segments, planes]; plane p receives the state p tokens before the last, for p < tokens
    y              float32 [tokens, heads, value channels], written

    Bitwise the same for any split of the tokens. Raises nothing.
    Source: Peng et al. 2024 (arXiv:2404.05892), the recurrence of Finch.
    """
    launch_scan(_kernel, (receptance, key, value, decay, first), rows, segment_start, source_row, plane_row, y)


@functools.cache
def _kernel(tile: Tile) -> Any:
    entries, width, lanes, d_state, is_exact, load, _ = constants_of(tile)

    @device_function
    def advance(operands, token, head, p, lane, state, total):  # type: ignore[no-untyped-def]
        receptance, key, value, decay, first = operands
        given = cuda.local.array(width, np.float32)
        load(value, (token, head, p), given, 0)
        for i in range(width):
            total[i] = np.float32(0)
        for j in range(entries):
            n = lane + np.uint64(j) * lanes
            if is_exact or n < d_state:
                k_n, r_n, decay_n, first_n = key[token, head, n], receptance[token, head, n], decay[token, head, n], first[head, n]
                for i in range(width):
                    held, added = state[j * width + i], k_n * given[i]
                    total[i] += r_n * (held + first_n * added)
                    state[j * width + i] = held * decay_n + added

    return scan_kernel(tile, advance)
