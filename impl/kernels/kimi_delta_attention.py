"""The delta rule with a decay for every channel of a key, over the tokens of one ubatch, with rollback snapshots.

Rules
- A row is [heads, d_state, head_dim], as in `gated_delta_net`: what the state holds along a key, and what a query reads, are sums of whole
  vectors over d_state in a written order. A channel of the key, and so its decay, is one vector of the row.
- The state lives in the row of plane 0 while the tokens run. A token reads the row before it twice, for what it holds along the key and
  to change it, and writes once; only the first reads from the source row.
- Where rows are streamed, and how head channels are cut: as in `mamba2_scan`.
- Plane p receives the state p tokens before the last, for p < tokens of the segment; other planes are not written.
"""

from typing import Any

import numpy as np

from . import kernel
from .rows import copy_rows_of
from .vectors import FLOAT_BYTES, PREFETCH_AHEAD_BYTES, fence, load, may_stream, prefetch, spread, store, store_nontemporal, zeros


@kernel
def kimi_delta_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    y: np.ndarray,
) -> None:
    """state = decay * state; state = state + key (beta * (value - key^T state)); y = query^T state, head by head.

    query, key     float32 [tokens, heads, d_state]
    value          float32 [tokens, heads, head_dim]
    decay          float32 [tokens, heads, d_state], factors
    beta           float32 [tokens, heads]
    rows           float32 [n_rows, heads, d_state, head_dim], 64-byte aligned; read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments]; the row each state is read from; another segment's plane row only if that one is listed earlier
    plane_row      int64 [segments, planes]; plane p receives the state p tokens before the last, for p < tokens
    y              float32 [tokens, heads, head_dim], written

    Bitwise the same for any split of the tokens. Raises nothing: rows were planned by the cache.
    Source: Kimi Team 2025 (arXiv:2510.26692), eq. 1.
    """
    heads, head_dim = value.shape[1], value.shape[2]
    large = may_stream(rows, source_row.size)
    streamed = False
    base = segment_start[0]
    for segment in range(source_row.size):
        first = segment_start[segment] - base
        last = segment_start[segment + 1] - base
        streams = large and last - first == 1 and source_row[segment] != plane_row[segment, 0]
        streamed |= streams
        for head in range(heads):
            source, state = rows[source_row[segment], head], rows[plane_row[segment, 0], head]
            for token in range(first, last):
                rate, decay_token = beta[token, head], decay[token, head]
                k_token, q_token = key[token, head], query[token, head]
                v_token, result = value[token, head], y[token, head]
                p = 0
                while p + 64 <= head_dim:
                    _advance(zeros(64), p, source, state, decay_token, rate, k_token, q_token, v_token, streams, result)
                    p += 64
                while p + 16 <= head_dim:
                    _advance(zeros(16), p, source, state, decay_token, rate, k_token, q_token, v_token, streams, result)
                    p += 16
                while p < head_dim:
                    _advance(np.float32(0), p, source, state, decay_token, rate, k_token, q_token, v_token, streams, result)
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
    decay: np.ndarray,
    rate: np.float32,
    key: np.ndarray,
    query: np.ndarray,
    value: np.ndarray,
    streams: bool,
    result: np.ndarray,
) -> None:
    """One token for as many head channels as `like` has, from channel p on.

    source, state      float32 [d_state, head_dim]; state written, past the caches when `streams`. They may be the same
    decay, key, query  float32 [d_state]
    value, result      float32 [head_dim]; result written
    """
    ahead = PREFETCH_AHEAD_BYTES // (FLOAT_BYTES * source.shape[1])
    held = spread(np.float32(0), like)
    for n in range(key.size):
        if streams:
            prefetch(source, (n + ahead, p), like)
        held = held + load(source, (n, p), like) * spread(decay[n], like) * spread(key[n], like)
    added = spread(rate, like) * (load(value, (p,), like) - held)
    total = spread(np.float32(0), like)
    for n in range(key.size):
        changed = load(source, (n, p), like) * spread(decay[n], like) + spread(key[n], like) * added
        total = total + changed * spread(query[n], like)
        if streams:
            store_nontemporal(state, (n, p), changed)
        else:
            store(state, (n, p), changed)
    store(result, (p,), total)


def kimi_delta_attention_reference(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
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
            state = state * decay[token][:, :, None]
            held = np.einsum("hnp,hn->hp", state, key[token])
            state = state + key[token][:, :, None] * (beta[token][:, None] * (value[token] - held))[:, None, :]
            y[token] = np.einsum("hnp,hn->hp", state, query[token])
            plane = last - 1 - token
            if plane < plane_row.shape[1]:
                rows[plane_row[segment, plane]] = state
