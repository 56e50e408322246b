"""Depthwise causal convolution over the tokens of one ubatch, with rollback snapshots.

Rules
- A state row is the window: the newest `taps - 1` inputs, oldest first. A window is read once, before anything of its sequence is written.
- Plane p receives the window p tokens before the last; beyond the segment's first token that is the window that was read. A plane whose
  row is -1 is not written.
Sources: Gu and Dao 2023 (Mamba's short convolution, arXiv:2312.00752); snapshots as llama.cpp's recurrent memory with n_rs_seq > 0.
"""

import numpy as np

from . import kernel
from .rows import copy_row


@kernel
def causal_convolution(
    x: np.ndarray,
    taps: np.ndarray,
    bias: np.ndarray,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    y: np.ndarray,
) -> None:
    """y[t] = bias + sum over j of taps[j] * x[t - (n_taps - 1) + j], inputs before the segment's first coming from its window.

    x              float32 [tokens, channels], segment after segment
    taps           float32 [n_taps, channels], the newest input's last
    bias           float32 [channels]
    rows           float32 [n_rows, n_taps - 1, channels]; read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments]; the row a window is read from; another segment's plane row only if that one is listed earlier
    plane_row      int64 [segments, planes], -1 for a plane that is not written
    y              float32 [tokens, channels], written; may not be x
    """
    n_taps, channels = taps.shape
    window = n_taps - 1
    base = segment_start[0]
    for segment in range(source_row.size):
        first = segment_start[segment] - base
        tokens = segment_start[segment + 1] - base - first
        inputs = np.empty((window + tokens, channels), np.float32)
        for j in range(window):
            copy_row(rows[source_row[segment], j], inputs[j])
        for token in range(tokens):
            copy_row(x[first + token], inputs[window + token])
        for token in range(tokens):
            result = y[first + token]
            copy_row(bias, result)
            for j in range(n_taps):
                source = inputs[token + j]
                tap = taps[j]
                for i in range(channels):
                    result[i] = result[i] + tap[i] * source[i]
        for plane in range(plane_row.shape[1]):
            row = plane_row[segment, plane]
            if row >= 0:
                for j in range(window):
                    copy_row(inputs[max(tokens - plane, 0) + j], rows[row, j])


def causal_convolution_reference(
    x: np.ndarray,
    taps: np.ndarray,
    bias: np.ndarray,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    y: np.ndarray,
) -> None:
    """The same, token by token on a window that shifts, in NumPy: the truth of the kernel's tests."""
    for segment, row in enumerate(source_row):
        first, last = segment_start[segment] - segment_start[0], segment_start[segment + 1] - segment_start[0]
        window = rows[row].copy()
        before = window
        for token in range(first, last):
            window = np.concatenate([window, x[token : token + 1]])
            y[token] = bias + (taps * window).sum(axis=0)
            window = window[1:]
            plane = last - 1 - token
            if plane < plane_row.shape[1] and plane_row[segment, plane] >= 0:
                rows[plane_row[segment, plane]] = window
        for plane in range(last - first, plane_row.shape[1]):
            if plane_row[segment, plane] >= 0:
                rows[plane_row[segment, plane]] = before
