"""The delta rule with a decay for every channel of a key, over the tokens of one ubatch, with rollback snapshots.

Rules
- What a token does, in which order, and how a row is walked: delta_rule.py.
- Plane p receives the state p tokens before the last, for p < tokens of the segment; other planes are not written.
"""

import numpy as np

from . import kernel
from .delta_rule import delta_rule_in
from .vectors import DELTA_LANES, zeros


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
    delta_rule_in(zeros(DELTA_LANES), 0, value.shape[1], query, key, value, decay, beta, rows, segment_start, source_row, plane_row, y)


@kernel
def kimi_delta_attention_heads(
    first_head: int,
    end_head: int,
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
    """`kimi_delta_attention` for the heads from `first_head` up to `end_head`: what one thread of several does, see threads.py."""
    delta_rule_in(zeros(DELTA_LANES), first_head, end_head, query, key, value, decay, beta, rows, segment_start, source_row, plane_row, y)


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
