"""States on a CUDA device: the caches of `impl` over rows that never leave it but for a save, a restore and an inspection.

Rules
- Bookkeeping is the host's, exactly that of target numba; what it reads and writes of rows is done by kernels.
- A save packs what it takes, of all parts, into one buffer and copies that; a restore is the reverse. What a save has read is there when the
  reading has ended, not before: `Freight`.
"""

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numba import cuda

from ..impl.attention_cache import AttentionCache
from ..impl.batches import SplitBatch
from ..impl.cells import Plan
from ..impl.hybrid_cache import HybridCache, SequenceState, SessionState
from ..impl.model import Sides
from ..impl.recurrent_cache import RecurrentCache
from ..kernels_cuda.arrays import to_device
from ..kernels_cuda.packing import Piece, pack, unpack
from ..kernels_cuda.rows import copy_rows, zero_rows

_ALL = slice(None)


class Freight:
    """What a session's rows move across, collected while a `journey` lasts: then in one copy each way."""

    def __init__(self) -> None:
        self._travels = False
        self._home: list[tuple[Piece, np.ndarray, Any]] = []
        self._out: list[tuple[Piece, np.ndarray]] = []

    @contextlib.contextmanager
    def journey(self) -> Iterator[None]:
        """Collect until the end of the block; one within another is a part of it."""
        if self._travels:
            yield
            return
        self._travels = True
        try:
            yield
            self._move()
        finally:
            self._travels = False
            self._home, self._out = [], []

    def load(self, piece: Piece, target: np.ndarray, layers: Any = _ALL) -> None:
        """target[layers] = these rows, on the host; within a journey at its end."""
        with self.journey():
            self._home.append((piece, target, layers))

    def unload(self, piece: Piece, values: np.ndarray) -> None:
        """Write rows; `values`, float32 [layers, n, width], must not change before the journey's end."""
        with self.journey():
            self._out.append((piece, values))

    def _move(self) -> None:
        assert not (self._home and self._out), "a journey goes one way"
        for (_, target, layers), found in zip(self._home, pack([piece for piece, _, _ in self._home]), strict=True):
            part = target[layers]
            target[layers] = found.reshape(part.shape)
        unpack([piece for piece, _ in self._out], [values for _, values in self._out])


class DeviceRows:
    """Float32 rows [layers, n_rows, ...] on the device, that a cache reads and writes as it does an array's.

    array  on the device
    flat   the same as [layers, n_rows, width]
    """

    def __init__(self, freight: Freight, shape: tuple[int, ...], poison: bool) -> None:
        self.freight = freight
        self.array = cuda.to_device(np.full(shape, np.nan if poison else 0, np.float32))
        layers, n_rows, *row = shape
        self.flat = self.array.reshape((layers, n_rows, int(np.prod(row))))

    def __len__(self) -> int:
        return int(self.array.shape[0])

    def piece(self, row_list: Any) -> Piece:
        """The rows of a list, int64 [n] or a slice, of all layers."""
        listed = np.arange(self.array.shape[1])[row_list] if isinstance(row_list, slice) else np.asarray(row_list, np.int64)
        return Piece(self.flat, to_device(listed))

    def __getitem__(self, index: tuple[slice, Any]) -> np.ndarray:
        """Some rows of all layers, [:, rows], on the host."""
        whole, row_list = index
        assert whole == _ALL
        piece = self.piece(row_list)
        values = np.empty((*piece.shape[:2], *self.array.shape[2:]), np.float32)
        self.freight.load(piece, values)
        return values

    def __setitem__(self, index: tuple[slice, Any], values: np.ndarray) -> None:
        """The same, written."""
        whole, row_list = index
        assert whole == _ALL
        self.freight.unload(self.piece(row_list), values)

    def fill(self, value: float) -> None:
        """Overwrite everything with zero."""
        assert value == 0
        zero_rows(self.flat, to_device(np.arange(self.array.shape[1])))


class DeviceRecurrentCache(RecurrentCache):
    """A recurrent cache that takes states along on the device."""

    def apply(self, batch: SplitBatch, plan: Plan) -> None:
        """Make a plan true, and copy what it takes along."""
        read, written = self.cells.apply(batch, plan)
        starts = runs(read.tolist(), [{row} for row in written.tolist()])
        rows: Any
        for start, end in pairwise([*starts, len(read)]):
            for rows in self.parts:
                copy_rows(rows.flat, to_device(read[start:end]), to_device(written[start:end]))


class DeviceAttentionCache(AttentionCache):
    """An attention cache whose cells are copied on the device, and read and written for all layers of a kind at once."""

    def _copy(self, source: int, target: int, count: int) -> None:
        cells = np.arange(count)
        rows: Any
        for rows in (*self.keys, *self.values, self.index_rows):
            copy_rows(rows.flat, to_device(source + cells), to_device(target + cells))

    def _gathered(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        keys, values = (self._of_all_kinds(kinds, cells) for kinds in (self.keys, self.values))
        return keys, values, self.index_rows[:, cells]

    def _of_all_kinds(self, kinds: Any, cells: np.ndarray) -> np.ndarray:
        """Rows of these cells, float32 [layers, cells, ...], from the arrays of both kinds of layers."""
        gathered = np.empty((len(self._homes), len(cells), *kinds[0].array.shape[2:]), np.float32)
        for rows, layers in zip(kinds, self._layers_by_kind(), strict=True):
            rows.freight.load(rows.piece(cells), gathered, layers)
        return gathered

    def _layers_by_kind(self) -> list[list[int]]:
        return [[layer for layer, (home, _) in enumerate(self._homes) if home == kind] for kind in range(len(self.keys))]

    def _scatter(self, cells: np.ndarray, keys: np.ndarray, values: np.ndarray, index: np.ndarray) -> None:
        self.index_rows[:, cells] = index
        for kind, layers in enumerate(self._layers_by_kind()):
            self.keys[kind][:, cells] = keys[layers]
            self.values[kind][:, cells] = values[layers]


class DeviceHybridCache(HybridCache):
    """Both sides, with one copy for what a save takes of them and one for what a restore brings."""

    def __init__(self, recurrent: RecurrentCache | None, attention: AttentionCache | None) -> None:
        super().__init__(recurrent, attention)
        rows: Any = attention.index_rows if recurrent is None else recurrent.recurrent_rows  # type: ignore[union-attr]
        self._freight: Freight = rows.freight

    def read(self, sequence: int, snapshots: bool = False) -> SequenceState:
        with self._freight.journey():
            return super().read(sequence, snapshots)

    def read_recurrent(self, sequence: int, snapshots: bool = False) -> SequenceState:
        with self._freight.journey():
            return super().read_recurrent(sequence, snapshots)

    def read_all(self, snapshots: bool = False) -> SessionState:
        with self._freight.journey():
            return super().read_all(snapshots)

    def write(self, sequence: int, state: SequenceState) -> str | None:
        with self._freight.journey():
            return super().write(sequence, state)

    def write_recurrent(self, sequence: int, state: SequenceState) -> str | None:
        with self._freight.journey():
            return super().write_recurrent(sequence, state)

    def write_all(self, state: SessionState) -> str | None:
        with self._freight.journey():
            return super().write_all(state)


def device_sides() -> Sides:
    """What the caches of one session are made of."""
    freight = Freight()
    return Sides(
        DeviceRecurrentCache, DeviceAttentionCache, DeviceHybridCache, lambda shape, poison=False: DeviceRows(freight, shape, poison)
    )  # fmt: skip


# --- what may go side by side ----------------------------------------------------------------------------------------------


def runs(read: list[int], written: list[set[int]]) -> list[int]:
    """Where to cut a series of steps, each of which reads one row and writes some, so that the steps of a part may go side by side: the
    first step of every part. No step of a part reads what an earlier one of it wrote, or writes what an earlier one read or wrote."""
    starts: list[int] = []
    seen: set[int] = set()
    changed: set[int] = set()
    for step, (source, targets) in enumerate(zip(read, written, strict=True)):
        if not starts or source in changed or targets & (seen | changed):
            starts.append(step)
            seen, changed = set(), set()
        seen.add(source)
        changed |= targets
    return starts
