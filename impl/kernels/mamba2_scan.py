"""Mamba-2's recurrence over the tokens of one ubatch, with rollback snapshots.

Rules
- A row is [heads, d_state, head_dim]: the sum over d_state then adds whole vectors of outputs in a written order, which vectorises without
  a reordered sum (it would with head_dim before d_state).
- The state lives in the row of plane 0 while the tokens run; it is copied there first when it is read from another row. One pointer for
  reading and writing lets the loop vectorise, and makes every snapshot a copy.
- Plane p receives the state p tokens before the last, for p < tokens of the segment; other planes are not written.
"""

import numpy as np

from . import kernel
from .arithmetic import exponential
from .rows import copy_row


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
    heads, head_dim, d_state = x.shape[1], x.shape[2], b.shape[2]
    heads_per_group = heads // b.shape[1]
    whole = d_state // 4 * 4
    scaled = np.empty(head_dim, np.float32)
    base = segment_start[0]
    for segment in range(source_row.size):
        first = segment_start[segment] - base
        last = segment_start[segment + 1] - base
        for head in range(heads):
            state = rows[plane_row[segment, 0], head]
            if source_row[segment] != plane_row[segment, 0]:
                copy_rows_of(rows[source_row[segment], head], state)
            group = head // heads_per_group
            for token in range(first, last):
                step = dt[token, head]
                decay = exponential(step * a[head])
                b_token = b[token, group]
                c_token = c[token, group]
                result = y[token, head]
                for p in range(head_dim):
                    scaled[p] = step * x[token, head, p]
                    result[p] = np.float32(0)
                # Four state channels a pass: the same additions in the same order, with a quarter of the loads and stores of the outputs.
                for n in range(0, whole, 4):
                    s0, s1, s2, s3 = state[n], state[n + 1], state[n + 2], state[n + 3]
                    b0, b1, b2, b3 = b_token[n], b_token[n + 1], b_token[n + 2], b_token[n + 3]
                    c0, c1, c2, c3 = c_token[n], c_token[n + 1], c_token[n + 2], c_token[n + 3]
                    for p in range(head_dim):
                        v0 = s0[p] * decay + scaled[p] * b0
                        v1 = s1[p] * decay + scaled[p] * b1
                        v2 = s2[p] * decay + scaled[p] * b2
                        v3 = s3[p] * decay + scaled[p] * b3
                        s0[p] = v0
                        s1[p] = v1
                        s2[p] = v2
                        s3[p] = v3
                        result[p] = result[p] + v0 * c0 + v1 * c1 + v2 * c2 + v3 * c3
                for n in range(whole, d_state):
                    row = state[n]
                    for p in range(head_dim):
                        value = row[p] * decay + scaled[p] * b_token[n]
                        row[p] = value
                        result[p] = result[p] + value * c_token[n]
                plane = last - 1 - token
                if 0 < plane < plane_row.shape[1]:
                    copy_rows_of(state, rows[plane_row[segment, plane], head])


@kernel
def copy_rows_of(source: np.ndarray, target: np.ndarray) -> None:
    """target = source, float32 [n, width] both."""
    for n in range(target.shape[0]):
        copy_row(source[n], target[n])


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
