"""Snapshots of our own caches: rows as digests, and as the state rows that `inspect` shows.

Rules
- Reading changes nothing. A digest is of all layers and parts of a row together; a row of zeros has digest 0.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from ..spec.target import StateRow
from .forwards import PreparedModel


def digests(parts: Sequence[np.ndarray], row_count: int) -> list[int]:
    """A digest for each of the first `row_count` rows; parts: float32 [layers, rows, width] each."""
    return [_digest([part[:, row] for part in parts if part.size]) for row in range(row_count)]


def _digest(values: list[np.ndarray]) -> int:
    if not any(np.any(own) for own in values):  # NaN counts as something
        return 0
    digest = hashlib.blake2b(digest_size=8)
    for own in values:
        digest.update(own.tobytes())
    return int.from_bytes(digest.digest(), "little") or 1


def recurrent_rows(model: PreparedModel, convolution: np.ndarray, recurrent: np.ndarray) -> list[StateRow]:
    """A recurrent state, layer by layer: conv [channels, window], recurrent [heads, head_dim, d_state].

    convolution, recurrent  float32 [recurrent layers, width]; a part that the model does not have has width 0
    """
    rows = []
    for index, layer in enumerate(model.recurrent_layers):
        if convolution.size:
            rows.append(StateRow(layer, "conv", convolution[index].reshape(model.convolution_shape).T.copy()))
        if recurrent.size:
            rows.append(StateRow(layer, "recurrent", recurrent[index].reshape(model.recurrent_shape).transpose(0, 2, 1).copy()))
    return rows
