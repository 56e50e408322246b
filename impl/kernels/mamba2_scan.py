"""Mamba-2's recurrence over the tokens of one ubatch, with rollback snapshots.

Rules
- A row is [heads, d_state, head_dim]: the sum over d_state then adds whole vectors of outputs in a written order, which vectorises without
  a reordered sum (it would with head_dim before d_state).
- The state lives in the row of plane 0 while the tokens run: the first token reads the source row and writes there in the same pass, and
  every snapshot is a copy of it.
- A row that one token reads and another row receives is, when large, written past the caches: it is read again only after all other
  layers and sequences.
- Head channels are taken 64 at a time, then 16, then one by one: each adds its own sums, so how they are cut changes no bit.
- Plane p receives the state p tokens before the last, for p < tokens of the segment; other planes are not written.
"""

from typing import Any

import numpy as np

from . import kernel
from .arithmetic import exponential
from .rows import copy_rows_of
from .vectors import FLOAT_BYTES, PREFETCH_AHEAD_BYTES, fence, load, may_stream, prefetch, spread, store, store_nontemporal, zeros


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
    heads, head_dim = x.shape[1:]
    heads_per_group = heads // b.shape[1]
    scaled = np.empty(head_dim, np.float32)
    large = may_stream(rows)
    streamed = False
    base = segment_start[0]
    for segment in range(source_row.size):
        first = segment_start[segment] - base
        last = segment_start[segment + 1] - base
        streams = large and last - first == 1 and source_row[segment] != plane_row[segment, 0]
        streamed |= streams
        for head in range(heads):
            source, state = rows[source_row[segment], head], rows[plane_row[segment, 0], head]
            group = head // heads_per_group
            for token in range(first, last):
                step = dt[token, head]
                decay = exponential(step * a[head])
                for p in range(head_dim):
                    scaled[p] = step * x[token, head, p]
                b_token, c_token, result = b[token, group], c[token, group], y[token, head]
                p = 0
                while p + 64 <= head_dim:
                    _advance(zeros(64), p, source, state, decay, scaled, b_token, c_token, streams, result)
                    p += 64
                while p + 16 <= head_dim:
                    _advance(zeros(16), p, source, state, decay, scaled, b_token, c_token, streams, result)
                    p += 16
                while p < head_dim:
                    _advance(np.float32(0), p, source, state, decay, scaled, b_token, c_token, streams, result)
                    p += 1
                source = state
                plane = last - 1 - token
                if 0 < plane < plane_row.shape[1]:
                    copy_rows_of(state, rows[plane_row[segment, plane], head])
    if streamed:
        fence()


@kernel
def _advance(
    like: Any,
    p: int,
    source: np.ndarray,
    state: np.ndarray,
    decay: np.float32,
    scaled: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    streams: bool,
    result: np.ndarray,
) -> None:
    """One token for as many head channels as `like` has, from channel p on: state = source * decay + scaled b^T; result = state c.

    source, state   float32 [d_state, head_dim]; state written, past the caches when `streams`. They may be the same
    scaled, result  float32 [head_dim]; result written
    b, c            float32 [d_state]
    """
    ahead = PREFETCH_AHEAD_BYTES // (FLOAT_BYTES * source.shape[1])
    decay_each, scaled_each = spread(decay, like), load(scaled, (p,), like)
    total = spread(np.float32(0), like)
    for n in range(b.size):
        value = load(source, (n, p), like) * decay_each + scaled_each * spread(b[n], like)
        total = total + value * spread(c[n], like)
        if streams:
            prefetch(source, (n + ahead, p), like)
            store_nontemporal(state, (n, p), value)
        else:
            store(state, (n, p), value)
    store(result, (p,), total)


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
