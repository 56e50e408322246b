"""Arrays that a launch is given: on the device, or on both sides.

Rules
- Float arrays live on the device. Small arrays of whole numbers, which also say what is launched, live on both sides: `Twin`.
- A part of a twin is a twin. Its device side is copied when it is first asked for, and then once.
"""

from typing import Any

import numpy as np
from numba import cuda


class Twin:
    """An array of whole numbers on the host that kernels can be given; it is never changed."""

    def __init__(self, host: np.ndarray, device: Any = None) -> None:
        self.host = host
        self._device = device

    @property
    def device(self) -> Any:
        """The array on the device."""
        if self._device is None:
            self._device = cuda.to_device(np.ascontiguousarray(self.host))
        return self._device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.host.shape

    @property
    def size(self) -> int:
        return int(self.host.size)

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, index: Any) -> Any:
        """A number, or a twin of a part."""
        part = self.host[index]
        if not isinstance(part, np.ndarray):
            return part.item()
        # a device has views of itself for slices alone; what a list of places chooses is copied there
        return Twin(part, self.device[index]) if isinstance(index, slice) else Twin(part)


def resident(argument: Any) -> Any:
    """What a kernel is given for an argument: twins become their device side, inside tuples, too."""
    if isinstance(argument, Twin):
        return argument.device
    return tuple(map(resident, argument)) if isinstance(argument, tuple) else argument


def to_device(value: Any) -> Any:
    """A tree of tuples with its arrays on the device, arrays of whole numbers on both sides; what is no array stays as it is."""
    if isinstance(value, np.ndarray):
        return Twin(value) if value.dtype.kind in "iub" else cuda.to_device(value)
    if isinstance(value, tuple):
        parts = [to_device(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
