"""The llama.cpp library of a source tree or of any other build, called through bindings that were compiled against its own headers.

Rules
- What an older llama.cpp does not have is left out or said otherwise, in one place (`_IN_PLACE_OF`); a session never asks how old the library is.
- Pointers are cffi's, and stay so: nobody computes with them.
- Headers that are newer or older than the library cannot be told apart by it; defaults that make no sense can, and are refused.
Source: llama.h and ggml.h of llama.cpp.
"""

import ctypes
import functools
import hashlib
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..spec.errors import UnavailableError
from .llama_bindings import MAY_LACK, bindings_of, missing
from .llama_builds import Build, stated_build
from .llama_library import BatchArrays, Constants, GgmlAbortCallback, Log, LogCallback, end_process


class TreeLibrary:
    """A build's library. See llama_library.Library."""

    def __init__(self, build: Build) -> None:
        """Load it, and compile its bindings when they are not kept from before. Raises UnavailableError when one of them fails."""
        self._build = build
        self.path = build.library
        self.log = Log()
        try:
            self._handle = ctypes.CDLL(str(build.library), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise UnavailableError(f"target llamacpp is not available: {build.library} does not load: {error}") from error
        module, names = bindings_of(build)
        self._ffi, library = module.ffi, module.lib
        self._lacking = MAY_LACK - names
        self.null = self._ffi.NULL
        self.call: Any = SimpleNamespace(**{name: getattr(library, name) for name in names})
        for name in self._lacking & _IN_PLACE_OF.keys():
            setattr(self.call, name, _IN_PLACE_OF[name](self.call))
        self.constants = Constants(
            f32=library.GGML_TYPE_F32,
            f16=library.GGML_TYPE_F16,
            pooling_none=library.LLAMA_POOLING_TYPE_NONE,
            partial_only=self._flag("LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY"),
            on_device=self._flag("LLAMA_STATE_SEQ_FLAGS_ON_DEVICE"),
        )
        self._check_defaults()
        # the callbacks must live as long as the library uses them, which is as long as the process
        self._callbacks = (LogCallback(self.log.receive), GgmlAbortCallback(functools.partial(end_process, self.log)))
        self.call.llama_log_set(self.function(self._callbacks[0]), self.null)
        self.call.ggml_set_abort_callback(self.function(self._callbacks[1]))
        self.call.llama_backend_init()
        if "ggml_backend_dev_count" not in self._lacking and not self.call.ggml_backend_dev_count():
            raise UnavailableError(
                f"target llamacpp is not available: {self.path} has no backend in it (GGML_BACKEND_DL); build it with -DGGML_BACKEND_DL=OFF"
            )

    def _flag(self, name: str) -> int | None:
        """A flag of a saved sequence; None also where no function takes one."""
        is_there = hasattr(self.call, name) and "llama_state_seq_get_size_ext" not in self._lacking
        return int(getattr(self.call, name)) if is_there else None

    def _check_defaults(self) -> None:
        """Raise UnavailableError when the default parameters make no sense as the headers describe them."""
        context, model = self.call.llama_context_default_params(), self.call.llama_model_default_params()
        makes_sense = {
            "n_seq_max": context.n_seq_max == 1,
            "n_ubatch": 0 < context.n_ubatch <= context.n_batch,
            "type_k": context.type_k == context.type_v == self.constants.f16,
            "cb_eval": not context.cb_eval,
            "abort_callback": not context.abort_callback,
            "progress_callback": not model.progress_callback,
            "kv_overrides": not model.kv_overrides,
        }
        for name, is_sound in makes_sense.items():
            if not is_sound:
                raise UnavailableError(
                    f"target llamacpp is not available: {self.path} is not of the version of its headers ({self._build.includes[0]}): "
                    f"the default of `{name}` makes no sense; build the library again, or name the headers that belong to it"
                )

    @functools.cached_property
    def version(self) -> str:
        """What the library says of itself, what its build does, and the first 8 hex digits of the hash of its files, e.g.
        "llama.cpp 0.5.0-dev (commit 1a2b3c4, library 1f9a03c2)". Hashed are its backends beside it, too."""
        stated = self.text(self.call.llama_version()) if "llama_version" not in self._lacking else "of unstated version"
        digest = hashlib.blake2b()
        backends = {path.resolve() for path in self.path.parent.glob("libggml*") if path.suffix in (".so", ".dylib")}
        for path in [self.path, *sorted(backends)]:
            digest.update(path.read_bytes())
        return f"llama.cpp {stated} ({', '.join([*stated_build(self._build), f'library {digest.hexdigest()[:8]}'])})"

    def require(self, function: str) -> None:
        if function in self._lacking:
            raise missing(function, self.path)

    def batch(self, arrays: BatchArrays) -> Any:
        batch = self._ffi.new("struct llama_batch *")
        self._batch = batch  # it owns the struct
        batch.token = self._ffi.cast("int32_t *", arrays.tokens.ctypes.data)
        batch.pos = self._ffi.cast("int32_t *", arrays.positions.ctypes.data)
        batch.n_seq_id = self._ffi.cast("int32_t *", arrays.sequence_counts.ctypes.data)
        batch.seq_id = self._ffi.cast("int32_t **", arrays.sequence_addresses.ctypes.data)
        batch.logits = self._ffi.cast("int8_t *", arrays.wanted.ctypes.data)
        return batch[0]

    def function(self, callback: Any) -> Any:
        return self.null if callback is None else self._ffi.cast("void *", ctypes.cast(callback, c_void_p).value)

    def buffer(self, size: int) -> Any:
        return self._ffi.new("uint8_t[]", size)

    def read(self, pointer: Any, size: int) -> bytes:
        content: bytes = self._ffi.buffer(pointer, size)[:]
        return content

    def text(self, pointer: Any) -> str:
        """A string of the library's."""
        text: bytes = self._ffi.string(pointer)
        return text.decode(errors="replace")

    def metadata_of(self, path: Path) -> Any:
        parameters = self._ffi.new("struct gguf_init_params *")
        parameters.no_alloc = True
        return self.call.gguf_init_from_file(str(path).encode(), parameters[0])

    def tensor_fact(self, address: int) -> tuple[str, Sequence[int]]:
        tensor = self._ffi.cast("struct ggml_tensor *", address)
        return self.text(self.call.ggml_get_name(tensor)), list(tensor.ne)


_IN_PLACE_OF: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "llama_model_n_embd_out": lambda call: call.llama_model_n_embd,
    "llama_n_rs_seq": lambda call: lambda context: 0,
    "llama_state_seq_get_size_ext": lambda call: lambda context, sequence, flags: call.llama_state_seq_get_size(context, sequence),
    "llama_state_seq_get_data_ext": lambda call: (
        lambda context, data, size, sequence, flags: call.llama_state_seq_get_data(context, data, size, sequence)
    ),
    "llama_state_seq_set_data_ext": lambda call: (
        lambda context, data, size, sequence, flags: call.llama_state_seq_set_data(context, data, size, sequence)
    ),
    "ggml_set_abort_callback": lambda call: lambda callback: None,
}
"""What is called where a function is missing: for flags there is no capability then, and an abort says its reason itself."""
