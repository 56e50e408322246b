"""The llama.cpp library that llama-cpp-python installs, bound with ctypes: no compiler is needed.

Rules
- The structs are llama-cpp-python's own; the functions are bound here a second time, on a handle of our own, so that nothing
  of the package's is changed and a call costs as little as ctypes allows.
- Structs travel by value, and a wrong layout moves flags silently: the library's defaults are compared with the known ones
  before anything else is called.
Source: llama.h and ggml.h of llama.cpp, as described by llama-cpp-python.
"""

import ctypes
import functools
import hashlib
import importlib
import os
from collections.abc import Sequence
from ctypes import c_bool, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from ..spec.errors import UnavailableError
from .llama_library import BatchArrays, CancelCallback, Constants, GgmlAbortCallback, Log, LogCallback, SetTensorCallback, end_process

_CONSTANTS = Constants(f32=0, f16=1, pooling_none=0, partial_only=1, on_device=2)
"""Of the versions whose layout is known here."""
_NO_CALLBACK = CancelCallback()


class MetadataParameters(ctypes.Structure):
    """`gguf_init_params`: a file is read without its tensors' data, or into a context."""

    _fields_ = (("no_alloc", c_bool), ("context", c_void_p))


class _Tensor(ctypes.Structure):
    """The beginning of `ggml_tensor`."""

    _fields_ = (("type", c_int), ("buffer", c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", c_size_t * 4))


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (LogCallback, c_void_p)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_model_n_embd_out": (c_int32, (c_void_p,)),
    "llama_model_is_recurrent": (c_bool, (c_void_p,)),
    "llama_free": (None, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_n_batch": (c_uint32, (c_void_p,)),
    "llama_n_ctx_seq": (c_uint32, (c_void_p,)),
    "llama_n_rs_seq": (c_uint32, (c_void_p,)),
    "llama_get_logits": (c_void_p, (c_void_p,)),
    "llama_get_embeddings": (c_void_p, (c_void_p,)),
    "llama_set_embeddings": (None, (c_void_p, c_bool)),
    "llama_set_abort_callback": (None, (c_void_p, CancelCallback, c_void_p)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_memory_seq_cp": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_keep": (None, (c_void_p, c_int32)),
    "llama_memory_seq_add": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_div": (None, (c_void_p, c_int32, c_int32, c_int32, c_int)),
    "llama_memory_seq_pos_min": (c_int32, (c_void_p, c_int32)),
    "llama_memory_seq_pos_max": (c_int32, (c_void_p, c_int32)),
    "llama_memory_can_shift": (c_bool, (c_void_p,)),
    "llama_state_get_size": (c_size_t, (c_void_p,)),
    "llama_state_get_data": (c_size_t, (c_void_p, c_char_p, c_size_t)),
    "llama_state_set_data": (c_size_t, (c_void_p, c_char_p, c_size_t)),
    "llama_state_seq_get_size_ext": (c_size_t, (c_void_p, c_int32, c_uint32)),
    "llama_state_seq_get_data_ext": (c_size_t, (c_void_p, c_char_p, c_size_t, c_int32, c_uint32)),
    "llama_state_seq_set_data_ext": (c_size_t, (c_void_p, c_char_p, c_size_t, c_int32, c_uint32)),
    "gguf_init_from_file": (c_void_p, (c_char_p, MetadataParameters)),
    "gguf_free": (None, (c_void_p,)),
    "ggml_get_name": (c_char_p, (c_void_p,)),
    "ggml_set_abort_callback": (c_void_p, (GgmlAbortCallback,)),
}  # fmt: skip

_CONTEXT_DEFAULTS: dict[str, object] = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_rs_seq": 0, "ctx_type": 0, "rope_scaling_type": -1,
    "pooling_type": -1, "attention_type": -1, "flash_attn_type": -1, "rope_freq_base": 0.0, "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0, "yarn_orig_ctx": 0, "defrag_thold": -1.0, "cb_eval": None, "cb_eval_user_data": None,
    "type_k": 1, "type_v": 1, "abort_callback": None, "abort_callback_data": None, "embeddings": False, "offload_kqv": True,
    "no_perf": True, "op_offload": True, "swa_full": True, "kv_unified": False, "samplers": None, "n_samplers": 0, "ctx_other": None,
}  # fmt: skip
_MODEL_DEFAULTS: dict[str, object] = {
    "devices": None, "tensor_buft_overrides": None, "n_gpu_layers": -1, "split_mode": 1, "main_gpu": 0, "tensor_split": None,
    "progress_callback": None, "progress_callback_user_data": None, "kv_overrides": None, "vocab_only": False,
    "check_tensors": False, "use_extra_bufts": True, "no_host": False, "no_alloc": False,
}  # fmt: skip


class Batch(ctypes.Structure):
    """`llama_batch`, with plain addresses for pointers."""

    _fields_ = (
        ("n_tokens", c_int32), ("token", c_void_p), ("embd", c_void_p), ("pos", c_void_p),
        ("n_seq_id", c_void_p), ("seq_id", c_void_p), ("logits", c_void_p),
    )  # fmt: skip


class InstalledLibrary:
    """llama-cpp-python's library. See llama_library.Library."""

    constants = _CONSTANTS
    null = None

    def __init__(self, package: Any, path: Path) -> None:
        self.package_version: str = package.__version__
        self.path = path
        self.log = Log()
        self.call: Any = _bind(package, path)
        check_layout(package, self.call, path)
        # the callbacks must live as long as the library uses them, which is as long as the process
        self._callbacks = (LogCallback(self.log.receive), GgmlAbortCallback(functools.partial(end_process, self.log)))
        self.call.llama_log_set(self._callbacks[0], None)
        self.call.ggml_set_abort_callback(self._callbacks[1])
        self.call.llama_backend_init()

    @property
    def version(self) -> str:
        """E.g. "llama-cpp-python 0.3.36 (llama.cpp 0.5.0-dev, library 1f9a03c2)"."""
        return f"llama-cpp-python {self.package_version} ({self.build})"

    @functools.cached_property
    def build(self) -> str:
        """What the library says of itself, and the first 8 hex digits of its file's hash, e.g. "llama.cpp 0.5.0-dev, library 1f9a03c2"."""
        try:
            self.call.llama_version.restype = c_char_p
            stated = self.call.llama_version().decode()
        except AttributeError:  # older libraries do not state a version
            stated = "of unstated version"
        return f"llama.cpp {stated}, library {hashlib.blake2b(self.path.read_bytes()).hexdigest()[:8]}"

    def require(self, function: str) -> None:
        """It has every function that is called, or it was refused."""

    def batch(self, arrays: BatchArrays) -> Batch:
        return Batch(
            token=arrays.tokens.ctypes.data,
            pos=arrays.positions.ctypes.data,
            n_seq_id=arrays.sequence_counts.ctypes.data,
            seq_id=arrays.sequence_addresses.ctypes.data,
            logits=arrays.wanted.ctypes.data,
        )

    def function(self, callback: Any) -> Any:
        return _NO_CALLBACK if callback is None else callback

    def buffer(self, size: int) -> Any:
        return ctypes.create_string_buffer(size)

    def read(self, pointer: Any, size: int) -> bytes:
        return ctypes.string_at(pointer, size)

    def metadata_of(self, path: Path) -> Any:
        return self.call.gguf_init_from_file(str(path).encode(), MetadataParameters(no_alloc=True, context=None))

    def tensor_fact(self, address: int) -> tuple[str, Sequence[int]]:
        name: str = self.call.ggml_get_name(address).decode()
        return name, list(_Tensor.from_address(address).ne)


def check_layout(package: Any, functions: Any, path: Path) -> None:
    """Raise UnavailableError unless the library's default structs, read through the package's layout, hold the known defaults."""
    for struct, function, defaults in (
        ("llama_context_params", functions.llama_context_default_params, _CONTEXT_DEFAULTS),
        ("llama_model_params", functions.llama_model_default_params, _MODEL_DEFAULTS),
    ):
        parameters = function()
        for name, expected in defaults.items():
            value = getattr(parameters, name, "missing")
            # function and data pointers have no value to compare, but a null one is false
            if bool(value) if expected is None else value != expected:
                raise UnavailableError(
                    f"target llamacpp is not available: the layout of {struct} in {path} is not the one llama-cpp-python "
                    f"{package.__version__} describes; its default `{name}` reads {value}, not {expected}. "
                    "Unset LLAMA_CPP_LIB_PATH, install the llama-cpp-python that belongs to that library, or give its source tree with --llama-dir"
                )


def _bind(package: Any, path: Path) -> Any:
    """A second handle on the library, with the functions used here typed; the package's own handle keeps its types."""
    functions = ctypes.CDLL(str(path))
    bindings = package.llama_cpp
    structs: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "llama_context_default_params": (bindings.llama_context_params, ()),
        "llama_model_default_params": (bindings.llama_model_params, ()),
        "llama_model_init_from_user": (c_void_p, (c_void_p, SetTensorCallback, c_void_p, bindings.llama_model_params)),
        "llama_model_load_from_file": (c_void_p, (c_char_p, bindings.llama_model_params)),
        "llama_init_from_model": (c_void_p, (c_void_p, bindings.llama_context_params)),
        "llama_decode": (c_int32, (c_void_p, Batch)),
    }
    for name, (result, arguments) in (_SIGNATURES | structs).items():
        try:
            function = getattr(functions, name)
        except AttributeError as error:
            raise UnavailableError(
                f"target llamacpp is not available: {path} has no function `{name}`. pip install --upgrade 'statedrift[llamacpp]'"
            ) from error
        function.restype, function.argtypes = result, arguments
    return functions


def installed_library() -> InstalledLibrary:
    """llama-cpp-python's library. `LLAMA_CPP_LIB_PATH` names the folder of another build of the same layout.

    Raises UnavailableError when llama-cpp-python is missing or its library does not fit.
    """
    try:
        package = importlib.import_module("llama_cpp")
    except ModuleNotFoundError as error:
        if error.name != "llama_cpp":
            raise UnavailableError(f"target llamacpp is not available: llama-cpp-python does not import: {error}") from error
        raise UnavailableError(
            "target llamacpp is not available: llama-cpp-python is not installed. "
            "pip install 'statedrift[llamacpp]' (builds in about 4 minutes, needs a C++ compiler)"
        ) from error
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        folder = os.environ.get("LLAMA_CPP_LIB_PATH")
        place = f" with LLAMA_CPP_LIB_PATH={folder}" if folder else ""
        raise UnavailableError(f"target llamacpp is not available: llama-cpp-python does not load its library{place}: {error}") from error
    return InstalledLibrary(package, Path(package.llama_cpp._lib._name))
