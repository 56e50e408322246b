"""A session whose states and forward are on a CUDA device: the bookkeeping of `impl`, the kernels of `kernels_cuda`.

Rules
- Cells, plans and sights are the host's, exactly those of target numba; rows, keys and values never leave the device but for a save, a
  restore and an inspection. A decode copies its batch there and its answer back, and waits for nothing in between.
- A forward exists once, in `impl`: a function that calls kernels. Here the same function is run by Python, with every kernel replaced by
  the one of the same module and name in `kernels_cuda`, and with room on the device.
- Sequences of one launch run side by side: a ubatch in which one reads a row that another one writes is cut between them, so that the
  launches follow each other as the segments do. (Every result is the same for every cut.)
"""

import functools
import importlib
import types
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numba import cuda

from ..impl.batches import SplitBatch
from ..impl.cells import Plan
from ..impl.forwards import Memory, Sights
from ..impl.model import prepared
from ..impl.session import NumbaSession
from ..kernels_cuda.arrays import to_device
from ..kernels_cuda.rows import zero_rows
from ..spec.models import Model
from .cuda_memory import device_sides, runs

_ROOM, _KERNELS = __package__.rpartition(".")[0] + ".impl.", __package__.rpartition(".")[0] + ".kernels_cuda."


# --- the forward -----------------------------------------------------------------------------------------------------------


class _DeviceNumpy:
    """What forwards ask of NumPy, with its new arrays on the device."""

    @staticmethod
    def empty(shape: Any, dtype: Any) -> Any:
        return cuda.device_array(shape, dtype)

    @staticmethod
    def zeros(shape: Any, dtype: Any) -> Any:
        return cuda.to_device(np.zeros(shape, dtype))

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


_DEVICE_NUMPY = _DeviceNumpy()


def _begin_ubatch(memory: Memory, batch: SplitBatch, plan: Plan, ubatch: int) -> tuple[int, int, Any, Any, Any]:
    """`impl.ubatches.begin_ubatch` over twins."""
    first, last = batch.ubatch_start[ubatch], batch.ubatch_start[ubatch + 1]
    for rows in (memory.convolution_rows, memory.recurrent_rows, memory.embedding_rows):
        if rows.size:
            zero_rows(rows, plan.zero_row[first:last])
    segment_start = batch.segment_start[first : last + 1]
    return segment_start[0], segment_start[last - first], segment_start, plan.source_row[first:last], plan.plane_row[first:last]


@functools.cache
def on_device(function: Any) -> Callable[..., Any]:
    """A compiled function of `impl` as one that Python runs on device arrays: a kernel by its namesake, a function of kernels by itself
    with its names bound anew."""
    plain = function.py_func
    module, name = plain.__module__, plain.__name__
    if module == _ROOM + "ubatches":
        return _begin_ubatch
    if module.startswith(_ROOM + "kernels."):
        kernel: Callable[..., Any] = getattr(importlib.import_module(_KERNELS + module.removeprefix(_ROOM + "kernels.")), name)
        return kernel
    names = {used: _bound(plain.__globals__[used]) for used in plain.__code__.co_names if used in plain.__globals__}
    return types.FunctionType(plain.__code__, plain.__globals__ | names, name, plain.__defaults__, plain.__closure__)


def _bound(value: Any) -> Any:
    if value is np:
        return _DEVICE_NUMPY
    return on_device(value) if hasattr(value, "py_func") else value


@functools.lru_cache(maxsize=32)
def _device_weights(model: Model) -> Any:
    return to_device(prepared(model).weights)


# --- ubatches --------------------------------------------------------------------------------------------------------------


def uncrossed(batch: SplitBatch, plan: Plan) -> SplitBatch:
    """The batch with its ubatches cut into parts whose segments may go side by side."""
    read = plan.source_row.tolist()
    written = [{row for row in rows if row >= 0} for rows in plan.plane_row.tolist()]
    starts: list[int] = []
    for first, last in pairwise(batch.ubatch_start.tolist()):
        starts += [first + start for start in runs(read[first:last], written[first:last])]
    return batch._replace(ubatch_start=np.array([*starts, batch.ubatch_start[-1]], np.int64))


class CudaSession(NumbaSession):
    """See `NumbaSession`; its states are on a device."""

    def __init__(self, model: Model, configuration: Any, cells_class: Any, saves_snapshots: bool = False) -> None:
        super().__init__(model, configuration, cells_class, saves_snapshots, device_sides())
        self._weights = _device_weights(model)
        self._forward = on_device(self._model.forward)
        self._memory = Memory(*map(_arrays, self._memory))

    def _run(self, ordered: SplitBatch, plan: Plan | None, wanted: np.ndarray, hidden: bool) -> np.ndarray:
        return super()._run(ordered if plan is None else uncrossed(ordered, plan), plan, wanted, hidden)

    def _run_ubatches(self, ordered: SplitBatch, plan: Plan, sights: Sights, hidden: bool, y: np.ndarray) -> None:
        """Run an applied batch on the device: launches follow each other, and only the answer is waited for."""
        answer = cuda.device_array(y.shape, np.float32)
        given = [to_device(part) for part in (ordered, plan, sights)]
        for ubatch in range(ordered.ubatch_count):
            self._forward(self._weights, self._memory, *given, ubatch, hidden, answer)
        answer.copy_to_host(y)


def _arrays(rows: Any) -> Any:
    return tuple(part.array for part in rows) if isinstance(rows, tuple) else rows.array
