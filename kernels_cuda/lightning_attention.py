"""Lightning attention over the tokens of one ubatch, with rollback snapshots.

Rules
- How a state is dealt to threads, and when it is written: scan.py.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from . import device_function
from .scan import Tile, constants_of, launch_scan, scan_kernel


def lightning_attention(
    query: Any, key: Any, value: Any, loss: Any, rows: Any, segment_start: Any, source_row: Any, plane_row: Any, y: Any
) -> None:  # fmt: skip
    """state = state + state * loss + key value^T; y = query^T state, head by head.

    query, key     float32 [tokens, heads, d_state]
    value          float32 [tokens, heads, head_dim]
    loss           float32 [heads], decay - 1: between -1 and 0
    rows           float32 [n_rows, heads, d_state, head_dim]; read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments]; the row each state is read from; no other segment's plane row
    plane_row      int64 [segments, planes]; plane p receives the state p tokens before the last, for p < tokens
    y              float32 [tokens, heads, head_dim], written

    Bitwise the same for any split of the tokens. Raises nothing.
    Source: MiniMax 2025 (arXiv:2501.08313), section 2.2, as the plain recurrence.
    """
    launch_scan(_kernel, (query, key, value, loss), rows, segment_start, source_row, plane_row, y)


@functools.cache
def _kernel(tile: Tile) -> Any:
    entries, width, lanes, d_state, is_exact, load, _ = constants_of(tile)

    @device_function
    def advance(operands, token, head, p, lane, state, total):  # type: ignore[no-untyped-def]
        query, key, value, loss = operands
        lost = loss[head]
        added = cuda.local.array(width, np.float32)
        load(value, (token, head, p), added, 0)
        for i in range(width):
            total[i] = np.float32(0)
        for j in range(entries):
            n = lane + np.uint64(j) * lanes
            if is_exact or n < d_state:
                k_n, q_n = key[token, head, n], query[token, head, n]
                for i in range(width):
                    held = state[j * width + i]
                    changed = held + held * lost + k_n * added[i]
                    state[j * width + i] = changed
                    total[i] += changed * q_n

    return scan_kernel(tile, advance)
