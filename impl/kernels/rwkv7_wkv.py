"""RWKV-7's generalised delta rule over the tokens of one ubatch, with rollback snapshots.

Rules
- A row is [heads, key channels, value channels]: what the state holds along a key, and what a receptance reads, are then sums of whole
  vectors over key channels in a written order, which vectorise without a reordered sum.
- The state lives in the row of plane 0 while the tokens run. A token reads the row before it twice, for what it holds along the key and
  to change it, and writes once; only the first reads from the source row.
- How value channels are cut, and what is asked for early: as in `rwkv6_wkv`.
- Plane p receives the state p tokens before the last, for p < tokens of the segment; other planes are not written.
"""

from typing import Any

import numpy as np

from . import kernel
from .rows import copy_rows_of
from .vectors import fused, load, prefetch, spread, store, zeros


@kernel
def rwkv7_wkv(
    receptance: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    decay: np.ndarray,
    removal: np.ndarray,
    rate: np.ndarray,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    y: np.ndarray,
) -> None:
    """state = state * decay - (rate * removal) (removal^T state) + key value^T; y = receptance^T state, head by head.

    receptance, key, decay, removal, rate  float32 [tokens, heads, key channels], segment after segment; decays are factors
    value          float32 [tokens, heads, value channels]
    rows           float32 [n_rows, heads, key channels, value channels]; read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments]; the row each state is read from; another segment's plane row only if that one is listed earlier
    plane_row      int64 [segments, planes]; plane p receives the state p tokens before the last, for p < tokens
    y              float32 [tokens, heads, value channels], written

    Bitwise the same for any split of the tokens. Raises nothing: rows were planned by the cache.
    Source: Peng et al. 2025 (arXiv:2503.14456), the generalised delta rule.
    """
    heads, channels = value.shape[1], value.shape[2]
    base = segment_start[0]
    for segment in range(source_row.size):
        start = segment_start[segment] - base
        end = segment_start[segment + 1] - base
        for head in range(heads):
            source, state = rows[source_row[segment], head], rows[plane_row[segment, 0], head]
            for token in range(start, end):
                operands = (
                    receptance[token, head], key[token, head], value[token, head], decay[token, head], removal[token, head], rate[token, head],
                )  # fmt: skip
                result = y[token, head]
                for n in range(0, channels, 16):
                    for one in (receptance, key, value, decay, removal, rate, y):
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
    operands       receptance, key, value, decay, removal and rate of the head, float32 [its channels] each
    result         float32 [value channels], written
    """
    receptance, key, value, decay, removal, rate = operands
    held = spread(np.float32(0), like)
    for n in range(key.size):
        held = fused(load(source, (n, p), like), spread(removal[n], like), held)
    value_each = load(value, (p,), like)
    total = spread(np.float32(0), like)
    for n in range(key.size):
        kept = fused(spread(-(rate[n] * removal[n]), like), held, load(source, (n, p), like) * spread(decay[n], like))
        changed = fused(spread(key[n], like), value_each, kept)
        total = fused(changed, spread(receptance[n], like), total)
        store(state, (n, p), changed)
    store(result, (p,), total)


def rwkv7_wkv_reference(
    receptance: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    decay: np.ndarray,
    removal: np.ndarray,
    rate: np.ndarray,
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
            held = np.einsum("hn,hnp->hp", removal[token], state)
            state = state * decay[token][:, :, None] - (rate[token] * removal[token])[:, :, None] * held[:, None, :]
            state = state + key[token][:, :, None] * value[token][:, None, :]
            y[token] = np.einsum("hn,hnp->hp", receptance[token], state)
            plane = end - 1 - token
            if plane < plane_row.shape[1]:
                rows[plane_row[segment, plane]] = state
