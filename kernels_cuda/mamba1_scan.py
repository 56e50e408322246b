"""Mamba-1's selective scan over the tokens of one ubatch, with rollback snapshots.

Rules
- How a state is dealt to threads, and when it is written: scan.py.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from . import device_function
from .arithmetic import exponential
from .scan import Tile, constants_of, launch_scan, scan_kernel


def mamba1_scan(
    x: Any, dt: Any, a: Any, b: Any, c: Any, rows: Any, segment_start: Any, source_row: Any, plane_row: Any, y: Any
) -> None:  # fmt: skip
    """state = state * exp(dt * a) + b (dt * x); y = c^T state, channel by channel.

    x              float32 [tokens, d_inner], segment after segment
    dt             float32 [tokens, d_inner], after softplus
    a              float32 [d_state, d_inner], negative
    b, c           float32 [tokens, d_state]
    rows           float32 [n_rows, d_state, d_inner]; read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments]; the row each state is read from; no other segment's plane row
    plane_row      int64 [segments, planes]; plane p receives the state p tokens before the last, for p < tokens
    y              float32 [tokens, d_inner], written

    Bitwise the same for any split of the tokens. Raises nothing.
    Source: Gu and Dao 2023 (arXiv:2312.00752), eq. 2 with the discretization of algorithm 2; snapshots as llama.cpp's ssm_scan with K > 1.
    """
    tokens, d_inner = y.shape
    n_rows, d_state = rows.shape[:2]
    one_head = rows.reshape((n_rows, 1, d_state, d_inner))
    launch_scan(_kernel, (x, dt, a, b, c), one_head, segment_start, source_row, plane_row, y.reshape((tokens, 1, d_inner)))


@functools.cache
def _kernel(tile: Tile) -> Any:
    entries, width, lanes, d_state, is_exact, load, _ = constants_of(tile)

    @device_function
    def advance(operands, token, head, p, lane, state, total):  # type: ignore[no-untyped-def]
        x, dt, a, b, c = operands
        step = cuda.local.array(width, np.float32)
        added = cuda.local.array(width, np.float32)
        own_a = cuda.local.array(width, np.float32)
        load(dt, (token, p), step, 0)
        load(x, (token, p), added, 0)
        for i in range(width):
            added[i] *= step[i]
            total[i] = np.float32(0)
        for j in range(entries):
            n = lane + np.uint64(j) * lanes
            if is_exact or n < d_state:
                b_n, c_n = b[token, n], c[token, n]
                load(a, (n, p), own_a, 0)
                for i in range(width):
                    changed = state[j * width + i] * exponential(step[i] * own_a[i]) + added[i] * b_n
                    state[j * width + i] = changed
                    total[i] += changed * c_n

    return scan_kernel(tile, advance)
