"""Saved states byte for byte as llama.cpp writes them: a stream of plain fields, and of tensor data between them.

Rules
- A writer and a reader know nothing of caches: a cache writes its fields in the engine's order, and its rows in the engine's layout.
- Tensor data that is read reaches its rows when the whole blob has been read; a failed read discards it.
- Reading stops at the end of the bytes with `BlobError`, which a restore answers with a refusal, wherever it got to.
- Kept on the device: the blob holds the fields only, and the tensor data stay with the session, for the sequence that was saved.
Source: llama.cpp's src/llama-context.cpp (llama_io_write_host, llama_io_read_host, llama_io_write_device, llama_io_read_device).
"""

import struct
from collections.abc import Callable

import numpy as np

from ...spec.errors import EngineAbort

MAGIC = 0xAF143CD8
FLOAT32_TYPE = 0  # ggml_type
Land = Callable[[np.ndarray], None]
"""Puts float32 values, flat, where they belong."""


class BlobError(Exception):
    """The bytes cannot be restored from here on."""


class BlobWriter:
    """Collects a blob. kept: where tensor data go instead when they stay on the device."""

    def __init__(self, kept: list[bytes] | None = None) -> None:
        self._kept = kept
        self.is_device = kept is not None
        self._parts: list[bytes] = []

    def write(self, layout: str, *values: int) -> None:
        """Plain fields; `layout` as in struct, little endian."""
        self._parts.append(struct.pack("<" + layout, *values))

    def write_bytes(self, data: bytes) -> None:
        """Bytes as they are."""
        self._parts.append(data)

    def write_tensor(self, values: np.ndarray) -> None:
        """Tensor data: float32, any shape, in the order of its elements."""
        (self._parts if self._kept is None else self._kept).append(np.ascontiguousarray(values, np.float32).tobytes())

    def blob(self) -> bytes:
        """What was written."""
        return b"".join(self._parts)


class BlobReader:
    """Reads a blob. kept: the tensor data that stayed on the device, None when they are in the blob."""

    def __init__(self, blob: bytes, kept: list[bytes] | None = None) -> None:
        self._blob = blob
        self._place = 0
        self._kept = kept
        self._landings: list[tuple[Land, int, int]] = []  # where to, first byte (in the blob), bytes

    def read(self, layout: str) -> tuple[int, ...]:
        """Plain fields. Raises BlobError at the end of the bytes."""
        return struct.unpack("<" + layout, self.read_bytes(struct.calcsize("<" + layout)))

    def read_bytes(self, size: int) -> bytes:
        """The next bytes. Raises BlobError at their end."""
        data = self._blob[self._place : self._place + size]
        if len(data) < size:
            raise BlobError("unexpectedly reached end of buffer")
        self._place += size
        return data

    def read_tensor(self, count: int, land: Land) -> None:
        """The next `count` float32 values; they land with `finish`. Raises BlobError at the end of the bytes."""
        if self._kept is None:
            place = self._place
            self.read_bytes(4 * count)
            self._landings.append((land, place, 4 * count))
        else:
            self._landings.append((land, -1, 4 * count))

    def finish(self) -> None:
        """Everything was read: tensor data land. Raises EngineAbort where the engine would: kept data of another size, bytes left over."""
        source, place = self._blob, 0
        if self._kept is not None:
            source = b"".join(self._kept)
            if self._landings and len(source) != sum(size for _, _, size in self._landings):
                raise EngineAbort("memory buffer mismatch")
        for land, start, size in self._landings:
            first = start if self._kept is None else place
            place += size
            land(np.frombuffer(source[first : first + size], np.float32))
        if self._kept is not None and self._place != len(self._blob):
            raise EngineAbort("GGML_ASSERT(buf_size == 0) failed")
