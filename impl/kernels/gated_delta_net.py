"""The gated delta rule over the tokens of one ubatch, with rollback snapshots.

Rules
- A row is [value heads, d_state, head_dim]: what the state holds along a key, and what a query reads, are then sums of whole vectors over
  d_state in a written order, which vectorise without a reordered sum.
- The state lives in the row of plane 0 while the tokens run; it is copied there first when it is read from another row.
- Plane p receives the state p tokens before the last, for p < tokens of the segment; other planes are not written.
"""

import numpy as np

from . import kernel
from .arithmetic import exponential
from .mamba2_scan import copy_rows_of


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
    heads, head_dim, key_heads, d_state = value.shape[1], value.shape[2], key.shape[1], key.shape[2]
    whole = d_state // 4 * 4
    added = np.empty(head_dim, np.float32)
    base = segment_start[0]
    for segment in range(source_row.size):
        first = segment_start[segment] - base
        last = segment_start[segment + 1] - base
        for head in range(heads):
            state = rows[plane_row[segment, 0], head]
            if source_row[segment] != plane_row[segment, 0]:
                copy_rows_of(rows[source_row[segment], head], state)
            key_head = head % key_heads
            for token in range(first, last):
                decay = exponential(log_decay[token, head])
                rate = beta[token, head]
                k_token = key[token, key_head]
                q_token = query[token, key_head]
                v_token = value[token, head]
                result = y[token, head]
                for p in range(head_dim):
                    added[p] = np.float32(0)
                    result[p] = np.float32(0)
                # Four state channels a pass: the same additions in the same order, with a quarter of the loads and stores of the sums.
                for n in range(0, whole, 4):
                    s0, s1, s2, s3 = state[n], state[n + 1], state[n + 2], state[n + 3]
                    k0, k1, k2, k3 = k_token[n], k_token[n + 1], k_token[n + 2], k_token[n + 3]
                    for p in range(head_dim):
                        v0 = s0[p] * decay
                        v1 = s1[p] * decay
                        v2 = s2[p] * decay
                        v3 = s3[p] * decay
                        s0[p] = v0
                        s1[p] = v1
                        s2[p] = v2
                        s3[p] = v3
                        added[p] = added[p] + v0 * k0 + v1 * k1 + v2 * k2 + v3 * k3
                for n in range(whole, d_state):
                    row = state[n]
                    for p in range(head_dim):
                        held = row[p] * decay
                        row[p] = held
                        added[p] = added[p] + held * k_token[n]
                for p in range(head_dim):
                    added[p] = rate * (v_token[p] - added[p])
                for n in range(0, whole, 4):
                    s0, s1, s2, s3 = state[n], state[n + 1], state[n + 2], state[n + 3]
                    k0, k1, k2, k3 = k_token[n], k_token[n + 1], k_token[n + 2], k_token[n + 3]
                    q0, q1, q2, q3 = q_token[n], q_token[n + 1], q_token[n + 2], q_token[n + 3]
                    for p in range(head_dim):
                        v0 = s0[p] + k0 * added[p]
                        v1 = s1[p] + k1 * added[p]
                        v2 = s2[p] + k2 * added[p]
                        v3 = s3[p] + k3 * added[p]
                        s0[p] = v0
                        s1[p] = v1
                        s2[p] = v2
                        s3[p] = v3
                        result[p] = result[p] + v0 * q0 + v1 * q1 + v2 * q2 + v3 * q3
                for n in range(whole, d_state):
                    row = state[n]
                    for p in range(head_dim):
                        held = row[p] + k_token[n] * added[p]
                        row[p] = held
                        result[p] = result[p] + held * q_token[n]
                plane = last - 1 - token
                if 0 < plane < plane_row.shape[1]:
                    copy_rows_of(state, rows[plane_row[segment, plane], head])


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
