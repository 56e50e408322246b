"""Token shifts over the tokens of one ubatch, with rollback snapshots, as in `impl/kernels/token_shift.py`.

Rules
- One thread takes one channel of one segment: it has read the row before it writes any plane, which may be the row that it read.
"""

from typing import Any

import numpy as np

from . import for_each


@for_each
def _shift(place: Any, x: Any, mixer: Any, rows: Any, segment_start: Any, source_row: Any, plane_row: Any, before: Any) -> None:
    channels, one = np.uint64(x.shape[1]), np.uint64(1)
    segment, i, part = place // channels, place % channels, np.uint64(mixer)
    base = segment_start[np.uint64(0)]
    first, last = np.uint64(segment_start[segment] - base), np.uint64(segment_start[segment + one] - base)
    read = rows[np.uint64(source_row[segment]), part, i]
    before[first, i] = read
    token = first + one
    while token < last:
        before[token, i] = x[token - one, i]
        token += one
    plane = np.uint64(0)
    while plane < np.uint64(plane_row.shape[1]):
        row = plane_row[segment, plane]
        if row >= 0:
            rows[np.uint64(row), part, i] = x[last - one - plane, i] if plane < last - first else read
        plane += one


def token_shift(x: Any, mixer: Any, rows: Any, segment_start: Any, source_row: Any, plane_row: Any, before: Any) -> None:
    """before[t] = x[t - 1], that of a segment's first token coming from its row.

    x              float32 [tokens, channels], segment after segment
    mixer          which part of a row
    rows           float32 [n_rows, mixers, channels]; part `mixer` read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments]; the row that is read; no other segment's plane row
    plane_row      int64 [segments, planes], -1 for a plane that is not written
    before         float32 [tokens, channels], written; may not be x
    """
    _shift(source_row.size * x.shape[1], x, mixer, rows, segment_start, source_row, plane_row, before)


@for_each
def _blend(place: Any, x: Any, before: Any, share: Any, y: Any) -> None:
    channels = np.uint64(x.shape[1])
    token, i = place // channels, place % channels
    factor = share[token % np.uint64(share.shape[0]), i]
    y[token, i] = x[token, i] + (before[token, i] - x[token, i]) * factor


def blend(x: Any, before: Any, share: Any, y: Any) -> None:
    """y = x + (before - x) * share.

    x, before, y  float32 [tokens, channels]; y written
    share         float32 [1 or tokens, channels]; one row serves all tokens
    """
    _blend(x.size, x, before, share, y)
