"""Numba's simulated device arrays, held to what those of a device can do.

Rules
- A simulated array is a NumPy array behind a thin wrapper: it can be indexed by lists, reshaped where that copies, and asked for all that
  NumPy has. On a device these are errors. Here each use is tried on the layout that a device would keep, too (numba-cuda's `dummyarray`),
  and what a device array does not have is an AssertionError. So are four numbers moved at once from where they are not aligned.
"""

import importlib.util
import sys
from pathlib import Path

from numba.cuda.simulator.cudadrv import devicearray
from statedrift.kernels_cuda import vectors

WITHIN_THE_SIMULATOR = {"_ary", "flags", "squeeze"}
VECTOR_BYTES = 16
ON_A_DEVICE = {"shape", "size", "ndim", "dtype", "strides", "nbytes", "stream", "reshape", "copy_to_host", "copy_to_device"}


def _layouts():
    path = Path(devicearray.__file__).parents[2] / "cudadrv" / "dummyarray.py"
    found = importlib.util.spec_from_file_location("dummyarray", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def hold_to_a_device(monkeypatch):
    """From here on, within a test, a use of a simulated device array that a device would refuse is an AssertionError."""
    layouts = _layouts()
    fake = devicearray.FakeCUDAArray
    get_item, get_attribute = fake.__getitem__, fake.__getattr__

    def layout_of(array):
        return layouts.Array.from_desc(0, array.shape, array.strides, array.itemsize)

    def getitem(self, index):
        try:
            part = layout_of(self._ary)[index]
        except Exception as error:
            raise AssertionError(f"a device array cannot be indexed by {index!r}: {error}") from error
        given = get_item(self, index)
        assert not isinstance(given, fake) or tuple(part.shape) == given._ary.shape
        return given

    def reshape(self, *shape):
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if tuple(shape) != self._ary.shape:
            layout = layout_of(self._ary)
            assert layout.reshape(*shape)[1] == [layout.extent], (
                f"a device array {self._ary.shape} cannot be reshaped to {shape} without a copy"
            )
        return fake(self._ary.reshape(shape))

    def getattribute(self, name):
        is_inside = sys._getframe(1).f_code.co_filename == devicearray.__file__
        assert name in ON_A_DEVICE or name in WITHIN_THE_SIMULATOR or is_inside, f"a device array has no {name} that is free"
        return get_attribute(self, name)

    def aligned(move):
        def checked(array, index, *values):
            address = array.ctypes.data + sum(int(one) * stride for one, stride in zip(index, array.strides, strict=True))
            assert address % VECTOR_BYTES == 0, f"four numbers at {index} of an array of strides {array.strides} are not aligned"
            return move(array, index, *values)

        return checked

    for name in ("_load_four", "_store_four"):
        monkeypatch.setattr(vectors, name, aligned(getattr(vectors, name)))
    for name, function in (("__getitem__", getitem), ("reshape", reshape), ("__getattr__", getattribute)):
        monkeypatch.setattr(fake, name, function)
