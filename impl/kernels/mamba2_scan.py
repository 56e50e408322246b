"""Mamba-2's recurrence over the tokens of one ubatch, with rollback snapshots.

Rules
- What a token does, in which order, and how a row is walked: outer_products.py.
- Plane p receives the state p tokens before the last, for p < tokens of the segment; other planes are not written.
"""

import numpy as np

from . import inner_kernel, kernel
from .arithmetic import exponential
from .outer_products import outer_products_in
from .vectors import LANES, zeros


@kernel
def mamba2_scan(
    x: np.ndarray,
    dt: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    y: np.ndarray,
) -> None:
    """state = state * exp(dt * a) + (dt * x) b^T; y = state c, head by head.

    x              float32 [tokens, heads, head_dim], segment after segment
    dt             float32 [tokens, heads], after softplus
    a              float32 [heads], negative
    b, c           float32 [tokens, groups, d_state]; a group serves heads / groups neighbouring heads
    rows           float32 [n_rows, heads, d_state, head_dim], 64-byte aligned; read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments]; the row each state is read from; another segment's plane row only if that one is listed earlier
    plane_row      int64 [segments, planes]; plane p receives the state p tokens before the last, for p < tokens
    y              float32 [tokens, heads, head_dim], written

    Bitwise the same for any split of the tokens. Raises nothing: rows were planned by the cache.
    Source: Dao and Gu 2024 (arXiv:2405.21060), eq. 1; snapshots as llama.cpp's ssm_scan with K > 1.
    """
    outer_products_in(zeros(LANES), 0, x.shape[1], x, dt, _decays(dt, a), None, b, c, rows, segment_start, source_row, plane_row, y)


@kernel
def mamba2_scan_heads(
    first_head: int,
    end_head: int,
    x: np.ndarray,
    dt: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    y: np.ndarray,
) -> None:
    """`mamba2_scan` for the heads from `first_head` up to `end_head`: what one thread of several does, see threads.py."""
    decay = _decays(dt, a)
    outer_products_in(zeros(LANES), first_head, end_head, x, dt, decay, None, b, c, rows, segment_start, source_row, plane_row, y)


@inner_kernel
def _decays(dt: np.ndarray, a: np.ndarray) -> np.ndarray:
    """exp(dt * a), float32 [tokens, heads]."""
    decay = np.empty(dt.shape, np.float32)
    for token in range(dt.shape[0]):
        for head in range(dt.shape[1]):
            decay[token, head] = exponential(dt[token, head] * a[head])
    return decay


def mamba2_scan_reference(
    x: np.ndarray,
    dt: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    y: np.ndarray,
) -> None:
    """The same, one token after the other on whole states, in NumPy: the truth of the kernel's tests (same arguments, any float type)."""
    heads_per_group = x.shape[1] // b.shape[1]
    for segment, row in enumerate(source_row):
        first, last = segment_start[segment] - segment_start[0], segment_start[segment + 1] - segment_start[0]
        state = rows[row].copy()
        for token in range(first, last):
            b_heads = np.repeat(b[token], heads_per_group, axis=0)
            c_heads = np.repeat(c[token], heads_per_group, axis=0)
            state = state * np.exp(dt[token] * a)[:, None, None] + b_heads[:, :, None] * (dt[token][:, None] * x[token])[:, None, :]
            y[token] = np.einsum("hnp,hn->hp", state, c_heads)
            plane = last - 1 - token
            if plane < plane_row.shape[1]:
                rows[plane_row[segment, plane]] = state
