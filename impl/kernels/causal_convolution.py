"""Depthwise causal convolution over the tokens of one ubatch, with rollback snapshots.

Rules
- A state row is the window: the newest `taps - 1` inputs, oldest first. A window is read once, before anything of its sequence is written.
- An output starts from the bias and adds one product after the other, each rounded, the oldest input's first: how channels are cut into
  vectors and pieces changes no bit.
- Plane p receives the window p tokens before the last; beyond the segment's first token that is the window that was read. A plane whose
  row is -1 is not written.
Sources: Gu and Dao 2023 (Mamba's short convolution, arXiv:2312.00752); snapshots as llama.cpp's recurrent memory with n_rs_seq > 0.
"""

from typing import Any

import numpy as np

from . import inner_kernel, kernel
from .rows import copy_row
from .vectors import lanes_of, load, store, zeros

PIECE_CHANNELS = 1024
"""So many channels go through all tokens together: their taps, and their inputs from token to token, stay in the nearest cache."""


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
    window, channels = taps.shape[0] - 1, taps.shape[1]
    kept = np.empty((window, channels), np.float32)
    base = segment_start[0]
    for segment in range(source_row.size):
        first, end = segment_start[segment] - base, segment_start[segment + 1] - base
        for j in range(window):
            copy_row(rows[source_row[segment], j], kept[j])
        inputs, outputs = x[first:end], y[first:end]
        for start in range(0, channels, PIECE_CHANNELS):
            stop = min(start + PIECE_CHANNELS, channels)
            in_wide = start + (stop - start) // 64 * 64
            in_vectors = start + (stop - start) // 16 * 16
            for token in range(end - first):
                _convolve(zeros(64), start, in_wide, token, kept, inputs, taps, bias, outputs)
                _convolve(zeros(16), in_wide, in_vectors, token, kept, inputs, taps, bias, outputs)
                _convolve(np.float32(0), in_vectors, stop, token, kept, inputs, taps, bias, outputs)
        for plane in range(plane_row.shape[1]):
            row = plane_row[segment, plane]
            if row >= 0:
                for j in range(window):
                    place = max(end - first - plane, 0) + j
                    copy_row(kept[place] if place < window else inputs[place - window], rows[row, j])


@inner_kernel
def _convolve(
    like: Any, start: int, stop: int, token: int, kept: np.ndarray, x: np.ndarray, taps: np.ndarray, bias: np.ndarray, y: np.ndarray
) -> None:
    """The outputs of one token in the channels from `start` up to `stop`, as many at once as `like` has.

    kept  float32 [n_taps - 1, channels], the inputs before the segment's first
    x, y  float32 [tokens, channels], of the segment alone
    """
    window = kept.shape[0]
    before = min(max(window - token, 0), taps.shape[0])
    for i in range(start, stop, lanes_of(like)):
        total = load(bias, (i,), like)
        for j in range(before):
            total = total + load(taps, (j, i), like) * load(kept, (token + j, i), like)
        for j in range(before, taps.shape[0]):
            total = total + load(taps, (j, i), like) * load(x, (token + j - window, i), like)
        store(y, (token, i), total)


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
