"""The gated delta rule over the tokens of one ubatch, with rollback snapshots.

Rules
- A row is [value heads, d_state, head_dim]: what the state holds along a key, and what a query reads, are then sums of whole vectors over
  d_state in a written order, which vectorise without a reordered sum.
- The state lives in the row of plane 0 while the tokens run. A token reads the row before it twice, for what it holds along the key and
  to change it, and writes once; only the first reads from the source row.
- Where rows are streamed, and how head channels are cut: as in `mamba2_scan`.
- Plane p receives the state p tokens before the last, for p < tokens of the segment; other planes are not written.
"""

from typing import Any

import numpy as np

from . import kernel
from .arithmetic import exponential
from .rows import copy_rows_of
from .vectors import FLOAT_BYTES, PREFETCH_AHEAD_BYTES, fence, load, may_stream, prefetch, spread, store, store_nontemporal, zeros


@kernel
def gated_delta_net(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    y: np.ndarray,
) -> None:
    """state = state * exp(log_decay); state = state + key (beta * (value - key^T state)); y = query^T state, head by head.

    query, key       float32 [tokens, key heads, d_state]; value head h is served by key head h modulo their number
    value            float32 [tokens, value heads, head_dim]
    log_decay, beta  float32 [tokens, value heads]
    rows             float32 [n_rows, value heads, d_state, head_dim], 64-byte aligned; read and written
    segment_start    int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row       int64 [segments]; the row each state is read from; another segment's plane row only if that one is listed earlier
    plane_row        int64 [segments, planes]; plane p receives the state p tokens before the last, for p < tokens
    y                float32 [tokens, value heads, head_dim], written

    Bitwise the same for any split of the tokens. Raises nothing: rows were planned by the cache.
    Source: Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), eq. 10; snapshots as llama.cpp's gated_delta_net with K > 1.
    """
    heads, head_dim, key_heads = value.shape[1], value.shape[2], key.shape[1]
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
            key_head = head % key_heads
            for token in range(first, last):
                decay, rate = exponential(log_decay[token, head]), beta[token, head]
                k_token, q_token = key[token, key_head], query[token, key_head]
                v_token, result = value[token, head], y[token, head]
                p = 0
                while p + 64 <= head_dim:
                    _advance(zeros(64), p, source, state, decay, rate, k_token, q_token, v_token, streams, result)
                    p += 64
                while p + 16 <= head_dim:
                    _advance(zeros(16), p, source, state, decay, rate, k_token, q_token, v_token, streams, result)
                    p += 16
                while p < head_dim:
                    _advance(np.float32(0), p, source, state, decay, rate, k_token, q_token, v_token, streams, result)
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
    rate: np.float32,
    key: np.ndarray,
    query: np.ndarray,
    value: np.ndarray,
    streams: bool,
    result: np.ndarray,
) -> None:
    """One token for as many head channels as `like` has, from channel p on.

    source, state  float32 [d_state, head_dim]; state written, past the caches when `streams`. They may be the same
    key, query     float32 [d_state]
    value, result  float32 [head_dim]; result written
    """
    ahead = PREFETCH_AHEAD_BYTES // (FLOAT_BYTES * source.shape[1])
    decay_each = spread(decay, like)
    held = spread(np.float32(0), like)
    for n in range(key.size):
        if streams:
            prefetch(source, (n + ahead, p), like)
        held = held + load(source, (n, p), like) * decay_each * spread(key[n], like)
    added = spread(rate, like) * (load(value, (p,), like) - held)
    total = spread(np.float32(0), like)
    for n in range(key.size):
        changed = load(source, (n, p), like) * decay_each + spread(key[n], like) * added
        total = total + changed * spread(query[n], like)
        if streams:
            store_nontemporal(state, (n, p), changed)
        else:
            store(state, (n, p), changed)
    store(result, (p,), total)


def gated_delta_net_reference(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    y: np.ndarray,
) -> None:
    """The same, one token after the other on whole states, in NumPy: the truth of the kernel's tests (same arguments, any float type)."""
    repeats = (1, value.shape[1] // key.shape[1], 1)
    query, key = np.tile(query, repeats), np.tile(key, repeats)
    for segment, row in enumerate(source_row):
        first, last = segment_start[segment] - segment_start[0], segment_start[segment + 1] - segment_start[0]
        state = rows[row].copy()
        for token in range(first, last):
            state = state * np.exp(log_decay[token])[:, None, None]
            held = np.einsum("hnp,hn->hp", state, key[token])
            state = state + key[token][:, :, None] * (beta[token][:, None] * (value[token] - held))[:, None, :]
            y[token] = np.einsum("hnp,hn->hp", state, query[token])
            plane = last - 1 - token
            if plane < plane_row.shape[1]:
                rows[plane_row[segment, plane]] = state
