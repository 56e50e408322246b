"""The llama.cpp library of this process: what a session needs of it, however it was bound, made safe to run under a fuzzer.

Rules
- Two makers offer the same: `llama_installed.py` binds the library that llama-cpp-python installs, with ctypes and without a compiler;
  `llama_tree.py` binds the build of a source tree through its own headers.
- The library never prints, and never forks a debugger: its warnings are kept in a short list, and an abort writes the last of them
  and its own message to standard error and ends the process with status 134.
- Callbacks are ctypes functions for both makers: no struct passes through them.
- One library a process, loaded once (llama_loading.py).
Source: llama.h and ggml.h of llama.cpp.
"""

import collections
import ctypes
import os
from collections.abc import Sequence
from ctypes import c_bool, c_char_p, c_int, c_void_p
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

ABORT_STATUS = 134
"""Exit status of the process after the library aborted: that of SIGABRT in a shell."""

_LOG_LINES = 40
_LAST_WORDS = 5
_WARN, _CONTINUED = 3, 5  # ggml_log_level
LogCallback = ctypes.CFUNCTYPE(None, c_int, c_void_p, c_void_p)
GgmlAbortCallback = ctypes.CFUNCTYPE(None, c_char_p)
CancelCallback = ctypes.CFUNCTYPE(c_bool, c_void_p)
"""Asked by the CPU backend after every node of a graph; True cancels the decode."""
SetTensorCallback = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
"""Given every tensor of a model that is made of metadata alone."""


class Constants(NamedTuple):
    """Numbers of the library's headers; of the flags of a saved sequence None is one that it does not have.

    f32, f16      types of attention cells
    pooling_none  a hidden state a token
    partial_only  the recurrent part only
    on_device     tensors stay in buffers of the device
    """

    f32: int
    f16: int
    pooling_none: int
    partial_only: int | None
    on_device: int | None


class BatchArrays(NamedTuple):
    """What a batch points at, each for as many tokens as a decode may have; kept as long as the batch.

    tokens, positions, sequence_counts  int32
    sequence_addresses  uint64: where the ids of the sequences of a token stand
    wanted              int8
    """

    tokens: np.ndarray
    positions: np.ndarray
    sequence_counts: np.ndarray
    sequence_addresses: np.ndarray
    wanted: np.ndarray


class Library(Protocol):
    """A loaded library.

    path       of its file
    version    which one it is, for reports: name, build, hash
    call       its functions by name, as they stand in the headers; pointers and structs are what the maker makes of them
    null       a pointer to nothing
    constants  of its headers
    log        its warnings and errors
    """

    path: Path
    call: Any
    null: Any
    constants: Constants
    log: "Log"

    @property
    def version(self) -> str: ...

    def require(self, function: str) -> None:
        """Raise UnavailableError, which says from when on llama.cpp has it, unless the library has the function."""
        ...

    def batch(self, arrays: BatchArrays) -> Any:
        """A `llama_batch` of these arrays; its `n_tokens` is set before each decode."""
        ...

    def function(self, callback: Any) -> Any:
        """One of the callbacks of this file, kept by the caller, as an argument; None: no function."""
        ...

    def buffer(self, size: int) -> Any:
        """Memory of `size` bytes that the library can write into."""
        ...

    def read(self, pointer: Any, size: int) -> bytes:
        """A copy of `size` bytes of its memory."""
        ...

    def metadata_of(self, path: Path) -> Any:
        """The `gguf_context` of a file, without its tensors' data; a null pointer when it cannot be read."""
        ...

    def tensor_fact(self, address: int) -> tuple[str, Sequence[int]]:
        """Name and counts (the innermost first) of the tensor that a SetTensorCallback was given."""
        ...


def set_present(parameters: Any, **values: object) -> None:
    """Set those fields of a struct that it has: their names changed from one version of llama.cpp to another."""
    for name, value in values.items():
        if hasattr(parameters, name):
            setattr(parameters, name, value)


class Log:
    """The library's warnings and errors: the last 40 lines, and how many there ever were."""

    def __init__(self) -> None:
        self.lines: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        self.line_count = 0
        self._kept = False

    def receive(self, level: int, text: int, _: int | None) -> None:
        """The library's log callback; most of what it brings is information and is dropped unread."""
        if level < _WARN:
            self._kept = False
        elif level != _CONTINUED or self._kept:
            self._kept = True
            line = ctypes.string_at(text).decode(errors="replace").rstrip("\n")
            if level == _CONTINUED:
                self.lines[-1] += line
            else:
                self.lines.append(line)
                self.line_count += 1

    def first_since(self, line_count: int) -> str:
        """The first line after the `line_count`-th that is still there, or "": the library names the cause first."""
        new = min(self.line_count - line_count, len(self.lines))
        return self.lines[-new].strip().partition("\n")[0] if new else ""


def end_process(log: Log, message: bytes) -> None:
    """An abort callback: say why, and end at once; the library would fork a debugger for a backtrace."""
    lines = [*list(log.lines)[-_LAST_WORDS:], f"llama.cpp aborted: {message.decode(errors='replace')}"]
    os.write(2, ("\n".join(lines) + "\n").encode())
    os._exit(ABORT_STATUS)
