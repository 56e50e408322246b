"""Lightning attention over the tokens of one ubatch, with rollback snapshots.

Rules
- What a token does, in which order, and how a row is walked: outer_products.py; a key's channel is an entry of d_state.
- What a state loses a token depends on the head alone, and may be little: it is given as that loss, since the factor, close to 1, would be
  rounded the same way at every token.
- Plane p receives the state p tokens before the last, for p < tokens of the segment; other planes are not written.
"""

import numpy as np

from . import kernel
from .outer_products import outer_products_in
from .vectors import LANES, zeros


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
    factor = loss.reshape((1, loss.size))
    outer_products_in(
        zeros(LANES), 0, value.shape[1], value, np.ones_like(factor), factor, True, key, query, rows, segment_start, source_row, plane_row, y
    )  # fmt: skip


@kernel
def lightning_attention_heads(
    first_head: int,
    end_head: int,
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
    """`lightning_attention` for the heads from `first_head` up to `end_head`: what one thread of several does, see threads.py."""
    factor = loss.reshape((1, loss.size))
    outer_products_in(
        zeros(LANES), first_head, end_head, value, np.ones_like(factor), factor, True, key, query, rows, segment_start, source_row, plane_row, y
    )  # fmt: skip


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
