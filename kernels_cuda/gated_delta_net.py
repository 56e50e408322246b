"""The gated delta rule over the tokens of one ubatch, with rollback snapshots.

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


def gated_delta_net(
    query: Any, key: Any, value: Any, log_decay: Any, beta: Any, rows: Any, segment_start: Any, source_row: Any, plane_row: Any, y: Any
) -> None:  # fmt: skip
    """state = state * exp(log_decay); state = state + key (beta * (value - key^T state)); y = query^T state, head by head.

    query, key       float32 [tokens, key heads, d_state]; value head h is served by key head h modulo their number
    value            float32 [tokens, value heads, head_dim]
    log_decay, beta  float32 [tokens, value heads]
    rows             float32 [n_rows, value heads, d_state, head_dim]; read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments]; the row each state is read from; no other segment's plane row
    plane_row      int64 [segments, planes]; plane p receives the state p tokens before the last, for p < tokens
    y              float32 [tokens, value heads, head_dim], written

    Bitwise the same for any split of the tokens. Raises nothing.
    Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), eq. 10; snapshots as llama.cpp's gated_delta_net with K > 1.
    """
    launch_scan(_kernel, (query, key, value, log_decay, beta), rows, segment_start, source_row, plane_row, y)


@functools.cache
def _kernel(tile: Tile) -> Any:
    entries, width, lanes, d_state, is_exact, load, add_over_lanes = constants_of(tile)

    @device_function
    def advance(operands, token, head, p, lane, state, total):  # type: ignore[no-untyped-def]
        query, key, value, log_decay, beta = operands
        key_head = head % np.uint64(key.shape[1])
        decay = exponential(log_decay[token, head])
        added = cuda.local.array(width, np.float32)
        load(value, (token, head, p), added, 0)
        rate = beta[token, head]
        for i in range(width):
            total[i] = np.float32(0)
        for j in range(entries):
            n = lane + np.uint64(j) * lanes
            if is_exact or n < d_state:
                k_n = key[token, key_head, n]
                for i in range(width):
                    state[j * width + i] *= decay
                    total[i] += state[j * width + i] * k_n
        for i in range(width):
            added[i] = rate * (added[i] - add_over_lanes(total[i]))
            total[i] = np.float32(0)
        for j in range(entries):
            n = lane + np.uint64(j) * lanes
            if is_exact or n < d_state:
                k_n, q_n = key[token, key_head, n], query[token, key_head, n]
                for i in range(width):
                    changed = state[j * width + i] + k_n * added[i]
                    state[j * width + i] = changed
                    total[i] += changed * q_n

    return scan_kernel(tile, advance)
