"""Token shifts over the tokens of one ubatch, with rollback snapshots: what a mixer's input was at the token before.

Rules
- A state row is [mixers, channels]: each mixer's input at the newest token. A shift reads and writes only its own mixer's part, and reads it
  before anything of its sequence is written.
- Plane p receives the input p tokens before the last; beyond the segment's first token that is the one that was read. A plane whose row
  is -1 is not written.
Sources: Peng et al. 2023 (RWKV, arXiv:2305.13048), token shift; snapshots as `causal_convolution` writes them.
"""

import numpy as np

from . import kernel
from .rows import copy_row


@kernel
def token_shift(
    x: np.ndarray,
    mixer: int,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    before: np.ndarray,
) -> None:
    """before[t] = x[t - 1], that of a segment's first token coming from its row.

    x              float32 [tokens, channels], segment after segment
    mixer          which part of a row
    rows           float32 [n_rows, mixers, channels]; part `mixer` read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments]; the row that is read; another segment's plane row only if that one is listed earlier
    plane_row      int64 [segments, planes], -1 for a plane that is not written
    before         float32 [tokens, channels], written; may not be x
    """
    base = segment_start[0]
    for segment in range(source_row.size):
        first = segment_start[segment] - base
        last = segment_start[segment + 1] - base
        copy_row(rows[source_row[segment], mixer], before[first])
        for token in range(first + 1, last):
            copy_row(x[token - 1], before[token])
        for plane in range(plane_row.shape[1]):
            row = plane_row[segment, plane]
            if row >= 0:
                token = last - 1 - plane
                copy_row(x[token] if token >= first else before[first], rows[row, mixer])


def token_shift_reference(
    x: np.ndarray,
    mixer: int,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    before: np.ndarray,
) -> None:
    """The same, token by token on an input that is kept, in NumPy: the truth of the kernel's tests."""
    for segment, row in enumerate(source_row):
        first, last = segment_start[segment] - segment_start[0], segment_start[segment + 1] - segment_start[0]
        kept = read = rows[row, mixer].copy()
        for token in range(first, last):
            before[token] = kept
            kept = x[token]
            plane = last - 1 - token
            if plane < plane_row.shape[1] and plane_row[segment, plane] >= 0:
                rows[plane_row[segment, plane], mixer] = kept
        for plane in range(last - first, plane_row.shape[1]):
            if plane_row[segment, plane] >= 0:
                rows[plane_row[segment, plane], mixer] = read


@kernel
def blend(x: np.ndarray, before: np.ndarray, share: np.ndarray, y: np.ndarray) -> None:
    """y = x + (before - x) * share.

    x, before, y  float32 [tokens, channels]; y written
    share         float32 [1 or tokens, channels]; one row serves all tokens
    """
    for token in range(x.shape[0]):
        now, then, result = x[token], before[token], y[token]
        factor = share[token % share.shape[0]]
        for i in range(now.size):
            result[i] = now[i] + (then[i] - now[i]) * factor[i]
