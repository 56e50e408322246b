"""Mamba-1's selective scan over the tokens of one ubatch, with rollback snapshots.

Rules
- A row is [d_state, d_inner]: the sum over d_state then adds whole vectors of channels in a written order, which vectorises without a
  reordered sum (it would with d_inner before d_state).
- Every number of a state has a decay of its own. A token's decays are taken first, into memory of their own, in a loop that vectorises
  because it knows that nothing overlaps; the state, which may be written where it was read, is then advanced with vectors.
- The state lives in the row of plane 0 while the tokens run: the first token reads the source row and writes there in the same pass, and
  every snapshot is a copy of it. No row is written past the caches, as mamba2_scan does: here the decays take the time, not the memory.
- Plane p receives the state p tokens before the last, for p < tokens of the segment; other planes are not written.
"""

from typing import Any

import numpy as np

from . import kernel
from .arithmetic import exponential
from .rows import copy_rows_of
from .vectors import load, spread, store, zeros


@kernel
def mamba1_scan(
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
    """state = state * exp(dt * a) + b (dt * x); y = c^T state, channel by channel.

    x              float32 [tokens, d_inner], segment after segment
    dt             float32 [tokens, d_inner], after softplus
    a              float32 [d_state, d_inner], negative
    b, c           float32 [tokens, d_state]
    rows           float32 [n_rows, d_state, d_inner]; read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments]; the row each state is read from; another segment's plane row only if that one is listed earlier
    plane_row      int64 [segments, planes]; plane p receives the state p tokens before the last, for p < tokens
    y              float32 [tokens, d_inner], written

    Bitwise the same for any split of the tokens. Raises nothing: rows were planned by the cache.
    Source: Gu and Dao 2023 (arXiv:2312.00752), eq. 2 with the discretization of algorithm 2; snapshots as llama.cpp's ssm_scan with K > 1.
    """
    d_state, d_inner = a.shape
    decay = np.empty((d_state, d_inner), np.float32)
    scaled = np.empty(d_inner, np.float32)
    base = segment_start[0]
    for segment in range(source_row.size):
        first = segment_start[segment] - base
        last = segment_start[segment + 1] - base
        source, state = rows[source_row[segment]], rows[plane_row[segment, 0]]
        for token in range(first, last):
            step, b_token, c_token, result = dt[token], b[token], c[token], y[token]
            for i in range(d_inner):
                scaled[i] = step[i] * x[token, i]
            for n in range(d_state):
                rates, own_decay = a[n], decay[n]
                for i in range(d_inner):
                    own_decay[i] = exponential(step[i] * rates[i])
            i = 0
            while i + 64 <= d_inner:
                _advance(zeros(64), i, source, state, decay, scaled, b_token, c_token, result)
                i += 64
            while i + 16 <= d_inner:
                _advance(zeros(16), i, source, state, decay, scaled, b_token, c_token, result)
                i += 16
            while i < d_inner:
                _advance(np.float32(0), i, source, state, decay, scaled, b_token, c_token, result)
                i += 1
            source = state
            plane = last - 1 - token
            if 0 < plane < plane_row.shape[1]:
                copy_rows_of(state, rows[plane_row[segment, plane]])


@kernel
def _advance(
    like: Any,
    i: int,
    source: np.ndarray,
    state: np.ndarray,
    decay: np.ndarray,
    scaled: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    result: np.ndarray,
) -> None:
    """One token for as many channels as `like` has, from channel i on: state = source * decay + b scaled^T; result = c^T state.

    source, state   float32 [d_state, d_inner]; state written. They may be the same
    decay           float32 [d_state, d_inner]
    scaled, result  float32 [d_inner]; result written
    b, c            float32 [d_state]
    """
    scaled_each = load(scaled, (i,), like)
    total = spread(np.float32(0), like)
    for n in range(b.size):
        value = load(source, (n, i), like) * load(decay, (n, i), like) + scaled_each * spread(b[n], like)
        total = total + value * spread(c[n], like)
        store(state, (n, i), value)
    store(result, (i,), total)


def mamba1_scan_reference(
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
    for segment, row in enumerate(source_row):
        first, last = segment_start[segment] - segment_start[0], segment_start[segment + 1] - segment_start[0]
        state = rows[row].copy()
        for token in range(first, last):
            state = state * np.exp(dt[token] * a) + np.outer(b[token], dt[token] * x[token])
            y[token] = c[token] @ state
            plane = last - 1 - token
            if plane < plane_row.shape[1]:
                rows[plane_row[segment, plane]] = state
