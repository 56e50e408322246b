"""Depthwise causal convolution over the tokens of one ubatch, with rollback snapshots, as in `impl/kernels/causal_convolution.py`.

Rules
- One thread takes one channel of one segment through all its tokens: it has read the window before it writes any plane, which may be the
  row that it came from. Neighbouring threads have neighbouring channels.
- The window lives in registers: it moves by one with every token. The planes of the last tokens are written as their windows come by;
  those beyond the first token are the window that was read.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from . import device_function, kernel, launch


def causal_convolution(x: Any, taps: Any, bias: Any, rows: Any, segment_start: Any, source_row: Any, plane_row: Any, y: Any) -> None:
    """y[t] = bias + sum over j of taps[j] * x[t - (n_taps - 1) + j], inputs before the segment's first coming from its window.

    x              float32 [tokens, channels], segment after segment
    taps           float32 [n_taps, channels], the newest input's last
    bias           float32 [channels]
    rows           float32 [n_rows, n_taps - 1, channels]; read and written
    segment_start  int64 [segments + 1]; segment i is tokens segment_start[i] - segment_start[0] up to those of segment i + 1
    source_row     int64 [segments]; the row a window is read from; no other segment's plane row
    plane_row      int64 [segments, planes], -1 for a plane that is not written
    y              float32 [tokens, channels], written; may not be x
    """
    segments, channels = source_row.size, taps.shape[1]
    launch(_kernel(taps.shape[0]), segments * channels, x, taps, bias, rows, segment_start, source_row, plane_row, y)


@functools.cache
def _kernel(n_taps: int) -> Any:
    window = n_taps - 1
    size, newest, one = max(window, 1), np.uint64(max(window, 1) - 1), np.uint64(1)

    @device_function
    def write_window(own: Any, rows: Any, row: Any, channel: Any) -> None:
        if row >= 0:
            for j in range(window):
                rows[np.uint64(row), np.uint64(j), channel] = own[j]

    @kernel
    def convolve(x: Any, taps: Any, bias: Any, rows: Any, segment_start: Any, source_row: Any, plane_row: Any, y: Any) -> None:
        channels, planes = np.uint64(taps.shape[1]), np.uint64(plane_row.shape[1])
        thread = np.uint64(cuda.grid(1))
        segment, channel = thread // channels, thread % channels
        if segment >= np.uint64(source_row.size):
            return
        base = segment_start[np.uint64(0)]
        first = np.uint64(segment_start[segment] - base)
        last = np.uint64(segment_start[segment + one] - base)
        own = cuda.local.array(size, np.float32)
        own_taps = cuda.local.array(n_taps, np.float32)
        for j in range(window):
            own[j] = rows[np.uint64(source_row[segment]), np.uint64(j), channel]
        for j in range(n_taps):
            own_taps[j] = taps[np.uint64(j), channel]
        plane = last - first
        while plane < planes:  # beyond the first token: the window that was read
            write_window(own, rows, plane_row[segment, plane], channel)
            plane += one
        token = first
        while token < last:
            given = x[token, channel]
            total = bias[channel]
            for j in range(window):
                total += own_taps[j] * own[j]
            y[token, channel] = total + own_taps[window] * given
            for j in range(window - 1):
                own[j] = own[j + 1]
            own[newest] = given
            plane = last - one - token
            if plane < planes:
                write_window(own, rows, plane_row[segment, plane], channel)
            token += one

    return convolve
