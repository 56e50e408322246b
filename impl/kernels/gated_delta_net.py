"""The gated delta rule over the tokens of one ubatch, with rollback snapshots.

Rules
- A decay for a head. What a token does, in which order, and how a row is walked: delta_rule.py.
- Plane p receives the state p tokens before the last, for p < tokens of the segment; other planes are not written.
"""

import numpy as np

from . import inner_kernel, kernel
from .arithmetic import exponential
from .delta_rule import delta_rule_in
from .vectors import DELTA_LANES, zeros


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
    delta_rule_in(
        zeros(DELTA_LANES), 0, value.shape[1], query, key, value, _factors(log_decay), beta, rows, segment_start, source_row, plane_row, y
    )


@kernel
def gated_delta_net_heads(
    first_head: int,
    end_head: int,
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
    """`gated_delta_net` for the heads from `first_head` up to `end_head`: what one thread of several does, see threads.py."""
    delta_rule_in(
        zeros(DELTA_LANES),
        first_head,
        end_head,
        query,
        key,
        value,
        _factors(log_decay),
        beta,
        rows,
        segment_start,
        source_row,
        plane_row,
        y,
    )


@inner_kernel
def _factors(log_decay: np.ndarray) -> np.ndarray:
    """What a state is multiplied by, float32 [tokens, value heads, 1]."""
    decay = np.empty((*log_decay.shape, 1), np.float32)
    for token in range(log_decay.shape[0]):
        for head in range(log_decay.shape[1]):
            decay[token, head, 0] = exponential(log_decay[token, head])
    return decay


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
