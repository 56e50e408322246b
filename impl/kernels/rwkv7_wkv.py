"""RWKV-7's generalised delta rule over the tokens of one ubatch, with rollback snapshots.

Rules
- A row is [heads, key channels, value channels]: what the state holds along a key, and what a receptance reads, are then sums of whole
  vectors over key channels in a written order, which vectorise without a reordered sum.
- The state lives in the row of plane 0 while the tokens run; only the first token reads the source row. One pass changes the state for a token
  and reads what the next one removes, and every snapshot is a copy.
- How value channels are cut, and what is asked for early: as in `rwkv6_wkv`.
- Plane p receives the state p tokens before the last, for p < tokens of the segment; other planes are not written.
"""

from typing import Any

import numpy as np

from . import inner_kernel, kernel
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
    in_wide, in_vectors = channels // 64 * 64, channels // 16 * 16
    base = segment_start[0]
    for segment in range(source_row.size):
        start = segment_start[segment] - base
        end = segment_start[segment + 1] - base
        if start == end:
            continue
        for head in range(heads):
            operands = (receptance[start:end, head], key[start:end, head], value[start:end, head], decay[start:end, head],
                        removal[start:end, head], rate[start:end, head])  # fmt: skip
            source, planes, result = rows[source_row[segment], head], plane_row[segment], y[start:end, head]
            for p in range(0, in_wide, 64):
                _take(zeros(64), p, source, rows[:, head], planes, operands, result)
            for p in range(in_wide, in_vectors, 16):
                _take(zeros(16), p, source, rows[:, head], planes, operands, result)
            for p in range(in_vectors, channels):
                _take(np.float32(0), p, source, rows[:, head], planes, operands, result)


@inner_kernel
def _take(like: Any, p: int, source: np.ndarray, state: np.ndarray, planes: np.ndarray, operands: Any, result: np.ndarray) -> None:
    """A segment's tokens in as many value channels of one head as `like` has, from channel p on.

    source    float32 [key channels, value channels], read by the first token
    state     float32 [n_rows, key channels, value channels]; the rows `planes` are written
    operands  receptance, key, value, decay, removal and rate of the head, float32 [tokens, its channels] each
    result    float32 [tokens, value channels], written
    """
    receptance, key, value, decay, removal, rate = operands
    tokens, newest = key.shape[0], state[planes[0]]
    held = spread(np.float32(0), like)
    for n in range(key.shape[1]):
        held = fused(load(source, (n, p), like), spread(removal[0, n], like), held)
    for token in range(tokens):
        for n in range(0, key.shape[1], 16):
            for one in (receptance, key, value, decay, removal, rate, result):
                prefetch(one, (token + 2, n), zeros(16))
        following = min(token + 1, tokens - 1)  # the last token's, which nobody uses, are its own
        value_each, total, held_then = load(value, (token, p), like), spread(np.float32(0), like), spread(np.float32(0), like)
        for n in range(key.shape[1]):
            number = load(source, (n, p), like) if token == 0 else load(newest, (n, p), like)
            kept = fused(spread(-(rate[token, n] * removal[token, n]), like), held, number * spread(decay[token, n], like))
            changed = fused(spread(key[token, n], like), value_each, kept)
            total = fused(changed, spread(receptance[token, n], like), total)
            held_then = fused(changed, spread(removal[following, n], like), held_then)
            store(newest, (n, p), changed)
        store(result, (token, p), total)
        held = held_then
        plane = tokens - 1 - token
        if 0 < plane < planes.size:
            for n in range(key.shape[1]):
                store(state, (planes[plane], n, p), load(newest, (n, p), like))


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
