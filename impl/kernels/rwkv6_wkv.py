"""RWKV-6's recurrence over the tokens of one ubatch, with rollback snapshots.

Rules
- A row is [heads, key channels, value channels]: what a receptance reads is then a sum of whole vectors over key channels in a written
  order, which vectorises without a reordered sum.
- The state lives in the row of plane 0 while the tokens run: the first token reads the source row and writes there in the same pass, and
  every snapshot is a copy of it.
- Value channels are taken 64 at a time, then 16, then one by one: each adds its own sums, fused, so how they are cut changes no bit.
- What a token brings is asked for two tokens before: it lies too far from the last one's for the processor to guess.
- Plane p receives the state p tokens before the last, for p < tokens of the segment; other planes are not written.
"""

from typing import Any

import numpy as np

from . import kernel
from .rows import copy_rows_of
from .vectors import fused, load, prefetch, spread, store, zeros


@kernel
def rwkv6_wkv(
    receptance: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    decay: np.ndarray,
    first: np.ndarray,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    y: np.ndarray,
) -> None:
    """y = receptance^T (state + first * key value^T); state = state * decay + key value^T, head by head.

    receptance, key, decay  float32 [tokens, heads, key channels], segment after segment; decays are factors
    value                   float32 [tokens, heads, value channels]
    first                   float32 [heads, key channels]
    rows                    float32 [n_rows, heads, key channels, value channels]; read and written
    segment_start           int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row              int64 [segments]; the row each state is read from; another segment's plane row only if that one is listed earlier
    plane_row               int64 [segments, planes]; plane p receives the state p tokens before the last, for p < tokens
    y                       float32 [tokens, heads, value channels], written

    Bitwise the same for any split of the tokens. Raises nothing: rows were planned by the cache.
    Source: Peng et al. 2024 (arXiv:2404.05892), the recurrence of Finch.
    """
    heads, channels = value.shape[1], value.shape[2]
    base = segment_start[0]
    for segment in range(source_row.size):
        start = segment_start[segment] - base
        end = segment_start[segment + 1] - base
        for head in range(heads):
            source, state = rows[source_row[segment], head], rows[plane_row[segment, 0], head]
            for token in range(start, end):
                operands = (receptance[token, head], key[token, head], value[token, head], decay[token, head], first[head])
                result = y[token, head]
                for n in range(0, channels, 16):
                    for one in (receptance, key, value, decay, y):
                        prefetch(one, (token + 2, head, n), zeros(16))
                p = 0
                while p + 64 <= channels:
                    _advance(zeros(64), p, source, state, operands, result)
                    p += 64
                while p + 16 <= channels:
                    _advance(zeros(16), p, source, state, operands, result)
                    p += 16
                while p < channels:
                    _advance(np.float32(0), p, source, state, operands, result)
                    p += 1
                source = state
                plane = end - 1 - token
                if 0 < plane < plane_row.shape[1]:
                    copy_rows_of(state, rows[plane_row[segment, plane], head])


@kernel
def _advance(like: Any, p: int, source: np.ndarray, state: np.ndarray, operands: Any, result: np.ndarray) -> None:
    """One token for as many value channels as `like` has, from channel p on.

    source, state  float32 [key channels, value channels]; state written. They may be the same
    operands       receptance, key, value, decay and first of the head, float32 [its channels] each
    result         float32 [value channels], written
    """
    receptance, key, value, decay, first = operands
    value_each = load(value, (p,), like)
    total = spread(np.float32(0), like)
    for n in range(key.size):
        held, added = load(source, (n, p), like), spread(key[n], like) * value_each
        total = fused(spread(receptance[n], like), fused(spread(first[n], like), added, held), total)
        store(state, (n, p), fused(held, spread(decay[n], like), added))
    store(result, (p,), total)


def rwkv6_wkv_reference(
    receptance: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    decay: np.ndarray,
    first: np.ndarray,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    y: np.ndarray,
) -> None:
    """The same, one token after the other on whole states, in NumPy: the truth of the kernel's tests (same arguments, any float type)."""
    for segment, row in enumerate(source_row):
        start, end = segment_start[segment] - segment_start[0], segment_start[segment + 1] - segment_start[0]
        state = rows[row].copy()
        for token in range(start, end):
            added = key[token][:, :, None] * value[token][:, None, :]
            y[token] = np.einsum("hn,hnp->hp", receptance[token], state + first[:, :, None] * added)
            state = state * decay[token][:, :, None] + added
            plane = end - 1 - token
            if plane < plane_row.shape[1]:
                rows[plane_row[segment, plane]] = state
