"""Mamba-2's recurrence over the tokens of one ubatch, with rollback snapshots.

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


def mamba2_scan(
    x: Any, dt: Any, a: Any, b: Any, c: Any, rows: Any, segment_start: Any, source_row: Any, plane_row: Any, y: Any
) -> None:  # fmt: skip
    """state = state * exp(dt * a) + (dt * x) b^T; y = state c, head by head.

    x              float32 [tokens, heads, head_dim], segment after segment
    dt             float32 [tokens, heads], after softplus
    a              float32 [heads], negative
    b, c           float32 [tokens, groups, d_state]; a group serves heads / groups neighbouring heads
    rows           float32 [n_rows, heads, d_state, head_dim]; read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments]; the row each state is read from; no other segment's plane row
    plane_row      int64 [segments, planes]; plane p receives the state p tokens before the last, for p < tokens
    y              float32 [tokens, heads, head_dim], written

    Bitwise the same for any split of the tokens. Raises nothing.
    Source: Dao and Gu 2024 (arXiv:2405.21060), eq. 1; snapshots as llama.cpp's ssm_scan with K > 1.
    """
    launch_scan(_kernel, (x, dt, a, b, c), rows, segment_start, source_row, plane_row, y)


@functools.cache
def _kernel(tile: Tile) -> Any:
    entries, width, lanes, d_state, is_exact, load, _ = constants_of(tile)

    @device_function
    def advance(operands, token, head, p, lane, state, total):  # type: ignore[no-untyped-def]
        x, dt, a, b, c = operands
        group = head // (np.uint64(x.shape[1]) // np.uint64(b.shape[1]))
        step = dt[token, head]
        decay = exponential(step * a[head])
        added = cuda.local.array(width, np.float32)
        load(x, (token, head, p), added, 0)
        for i in range(width):
            added[i] *= step
            total[i] = np.float32(0)
        for j in range(entries):
            n = lane + np.uint64(j) * lanes
            if is_exact or n < d_state:
                b_n, c_n = b[token, group, n], c[token, group, n]
                for i in range(width):
                    changed = state[j * width + i] * decay + added[i] * b_n
                    state[j * width + i] = changed
                    total[i] += changed * c_n

    return scan_kernel(tile, advance)
