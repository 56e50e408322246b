"""Lightning attention over the tokens of one ubatch, with rollback snapshots.

Rules
- A row is [heads, d_state, head_dim], what a key's channel holds of a value side by side; how it is walked, where it is streamed, and how
  head channels are cut: as in `mamba2_scan`.
- What a state loses a token depends on the head alone, and may be little: it is given as that loss, since the factor, close to 1, would be
  rounded the same way at every token.
- Plane p receives the state p tokens before the last, for p < tokens of the segment; other planes are not written.
"""

from typing import Any

import numpy as np

from . import kernel
from .rows import copy_rows_of
from .vectors import FLOAT_BYTES, PREFETCH_AHEAD_BYTES, fence, load, may_stream, prefetch, spread, store, store_nontemporal, zeros


@kernel
def lightning_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    loss: np.ndarray,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    y: np.ndarray,
) -> None:
    """state = state + state * loss + key value^T; y = query^T state, head by head.

    query, key     float32 [tokens, heads, d_state]
    value          float32 [tokens, heads, head_dim]
    loss           float32 [heads], decay - 1: between -1 and 0
    rows           float32 [n_rows, heads, d_state, head_dim], 64-byte aligned; read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments]; the row each state is read from; another segment's plane row only if that one is listed earlier
    plane_row      int64 [segments, planes]; plane p receives the state p tokens before the last, for p < tokens
    y              float32 [tokens, heads, head_dim], written

    Bitwise the same for any split of the tokens. Raises nothing: rows were planned by the cache.
    Source: MiniMax 2025 (arXiv:2501.08313), section 2.2, as the plain recurrence.
    """
    heads, head_dim = value.shape[1:]
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
            lost = loss[head]
            for token in range(first, last):
                k_token, q_token, v_token, result = key[token, head], query[token, head], value[token, head], y[token, head]
                p = 0
                while p + 64 <= head_dim:
                    _advance(zeros(64), p, source, state, lost, k_token, q_token, v_token, streams, result)
                    p += 64
                while p + 16 <= head_dim:
                    _advance(zeros(16), p, source, state, lost, k_token, q_token, v_token, streams, result)
                    p += 16
                while p < head_dim:
                    _advance(np.float32(0), p, source, state, lost, k_token, q_token, v_token, streams, result)
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
    loss: np.float32,
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
    loss_each, added = spread(loss, like), load(value, (p,), like)
    total = spread(np.float32(0), like)
    for n in range(key.size):
        held = load(source, (n, p), like)
        changed = held + held * loss_each + spread(key[n], like) * added
        total = total + changed * spread(query[n], like)
        if streams:
            prefetch(source, (n + ahead, p), like)
            store_nontemporal(state, (n, p), changed)
        else:
            store(state, (n, p), changed)
    store(result, (p,), total)


def lightning_attention_reference(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    loss: np.ndarray,
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
            state = state + state * loss[:, None, None] + key[token][:, :, None] * value[token][:, None, :]
            y[token] = np.einsum("hnp,hn->hp", state, query[token])
            plane = last - 1 - token
            if plane < plane_row.shape[1]:
                rows[plane_row[segment, plane]] = state
