"""llama.cpp's own operators for recurrent layers, called alone: the library that llama-cpp-python installs, through ctypes.

Rules
- An operator is one node of a graph on the CPU backend, on one thread. It writes its new states beside its outputs; that a cache
  then has to copy them into its rows is not in its time.
- No struct but the three fields that open a context is used: what moves between versions is left alone.
- The operators' own conventions are met by the inputs: a step before its softplus, a query times the root of its length, states with the
  summed index last where they want it so.
Source: ggml.h and ggml-backend.h of llama.cpp; its CPU operators for the layouts.
"""

import contextlib
import ctypes
import functools
import importlib
import math
from collections.abc import Iterator
from ctypes import c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from .cases import Arrays, Case
from .peers import Work

_F32, _I32 = 0, 26
_OVERHEAD_BYTES = 16 << 20
_DIMENSIONS = 4


class _InitParameters(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


_POINTER = c_void_p
_BASE: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (_POINTER, (_InitParameters,)),
    "ggml_free": (None, (_POINTER,)),
    "ggml_new_tensor_4d": (_POINTER, (_POINTER, c_int, c_int64, c_int64, c_int64, c_int64)),
    "ggml_new_graph": (_POINTER, (_POINTER,)),
    "ggml_build_forward_expand": (None, (_POINTER, _POINTER)),
    "ggml_get_data": (_POINTER, (_POINTER,)),
    "ggml_nelements": (c_int64, (_POINTER,)),
    "ggml_backend_graph_compute": (c_int, (_POINTER, _POINTER)),
    "ggml_ssm_conv": (_POINTER, (_POINTER,) * 3),
    "ggml_ssm_scan": (_POINTER, (*(_POINTER,) * 8, c_int64)),
    "ggml_gated_delta_net": (_POINTER, (*(_POINTER,) * 7, c_int64)),
    "ggml_gated_linear_attn": (_POINTER, (*(_POINTER,) * 6, c_float)),
    "ggml_rwkv_wkv6": (_POINTER, (_POINTER,) * 7),
    "ggml_rwkv_wkv7": (_POINTER, (_POINTER,) * 8),
}
_CPU: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_backend_cpu_init": (_POINTER, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_POINTER, c_int)),
}
_VECTORS = ("ggml_cpu_has_avx512", "ggml_cpu_has_avx2", "ggml_cpu_has_avx", "ggml_cpu_has_neon")


class Library:
    """The bound functions, and a CPU backend on one thread."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError or AttributeError for a library that is not there or lacks a function."""
        base, cpu = (ctypes.CDLL(str(_library_file(folder, name))) for name in ("ggml-base", "ggml-cpu"))
        self.call = _bound(base, _BASE)
        own = _bound(cpu, _CPU)
        self.backend = own["ggml_backend_cpu_init"]()
        own["ggml_backend_cpu_set_n_threads"](self.backend, 1)
        self.vectors = next((name.rpartition("_")[2].upper() for name in _VECTORS if getattr(cpu, name)()), "no vectors known")


def _library_file(folder: Path, name: str) -> Path:
    """E.g. libggml-cpu.so; .dylib on macOS."""
    return next((path for path in sorted(folder.glob(f"lib{name}.*")) if path.suffix in (".so", ".dylib")), folder / f"lib{name}.so")


def _bound(library: ctypes.CDLL, signatures: dict[str, tuple[Any, tuple[Any, ...]]]) -> dict[str, Any]:
    bound = {}
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        bound[name] = function
    return bound


@functools.cache
def library() -> Library | str:
    """The library of llama-cpp-python, or why there is none."""
    try:
        package = importlib.import_module("llama_cpp")
        return Library(Path(package.llama_cpp._lib._name).parent)
    except ModuleNotFoundError:
        return "llama-cpp-python is not installed: pip install 'statedrift[llamacpp]'"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"llama-cpp-python's operators cannot be called: {error}".splitlines()[0]


class _Graph:
    """A context with tensors, and a graph of one operator."""

    def __init__(self, own: Library, size_bytes: int) -> None:
        self._own = own
        self.context = own.call["ggml_init"](_InitParameters(size_bytes + _OVERHEAD_BYTES, None, False))
        if not self.context:
            raise MemoryError(f"llama.cpp has no memory for {size_bytes >> 20} MiB")
        self._graph: Any = None
        self._result: Any = None

    def tensor(self, array: np.ndarray, *shape: int) -> Any:
        """A tensor with this array's numbers; shape in ggml's order, the fastest first."""
        kind = _F32 if array.dtype == np.float32 else _I32
        tensor = self._own.call["ggml_new_tensor_4d"](self.context, kind, *shape, *(1,) * (_DIMENSIONS - len(shape)))
        values = np.ascontiguousarray(array)
        assert values.nbytes == 4 * math.prod(shape)
        ctypes.memmove(self._own.call["ggml_get_data"](tensor), values.ctypes.data, values.nbytes)
        return tensor

    def expects(self, operator: str, *arguments: Any) -> None:
        """The graph is this operator."""
        self._result = self._own.call[operator](self.context, *arguments)
        self._graph = self._own.call["ggml_new_graph"](self.context)
        self._own.call["ggml_build_forward_expand"](self._graph, self._result)

    def run(self) -> None:
        status = self._own.call["ggml_backend_graph_compute"](self._own.backend, self._graph)
        if status != 0:
            raise RuntimeError(f"llama.cpp's graph ended with status {status}")

    def outputs(self, count: int) -> np.ndarray:
        """The first `count` numbers of the result."""
        data = ctypes.cast(self._own.call["ggml_get_data"](self._result), ctypes.POINTER(c_float))
        return np.ctypeslib.as_array(data, (count,)).copy()

    def free(self) -> None:
        self._own.call["ggml_free"](self.context)


@contextlib.contextmanager
def operator(case: Case, arguments: Arrays, states: np.ndarray, planes: int = 1) -> Iterator[Work | str]:
    """llama.cpp's operator for a case, or why there is none; freed at the end.

    arguments  of as many tokens for each of the sequences, one sequence after the other
    states     of every sequence, as the kernel's rows
    planes     how many of the newest states it is to write
    """
    own = library()
    reason = own if isinstance(own, str) else _reason_against(case, states, planes)
    if reason:
        yield reason
        return
    assert isinstance(own, Library)
    graph = _Graph(own, 2 * sum(array.nbytes for array in arguments) + states.nbytes * (1 + planes))
    try:
        _BUILDERS[case.name](graph, arguments, states, planes)
        count = arguments[case.values].size
        yield Work(graph.run, lambda _: graph.outputs(count))
    finally:
        graph.free()


def _reason_against(case: Case, states: np.ndarray, planes: int) -> str:
    if planes > 1 and case.name not in ("mamba2_scan", "gated_delta_net", "kimi_delta_attention"):
        return "its operator keeps the last state only"
    if case.name in ("mamba1_scan", "mamba2_scan") or states.shape[-1] == states.shape[-2]:
        return ""
    return "its operator wants square states"


def _mamba1(graph: _Graph, arguments: Arrays, states: np.ndarray, planes: int) -> None:
    x, dt, a, b, c = arguments
    sequences, d_state, channels = states.shape
    tokens = len(x) // sequences
    graph.expects(
        "ggml_ssm_scan",
        graph.tensor(states.transpose(0, 2, 1), d_state, 1, channels, sequences),
        graph.tensor(x, 1, channels, tokens, sequences),
        graph.tensor(_before_softplus(dt), channels, tokens, sequences),
        graph.tensor(a.T, d_state, channels),
        graph.tensor(b, d_state, 1, tokens, sequences),
        graph.tensor(c, d_state, 1, tokens, sequences),
        graph.tensor(np.arange(sequences, dtype=np.int32), sequences),
        planes,
    )


def _mamba2(graph: _Graph, arguments: Arrays, states: np.ndarray, planes: int) -> None:
    x, dt, a, b, c = arguments
    sequences, heads, d_state, head_dim = states.shape
    tokens, groups = len(x) // sequences, b.shape[1]
    graph.expects(
        "ggml_ssm_scan",
        graph.tensor(states.transpose(0, 1, 3, 2), d_state, head_dim, heads, sequences),
        graph.tensor(x, head_dim, heads, tokens, sequences),
        graph.tensor(_before_softplus(dt), heads, tokens, sequences),
        graph.tensor(a, 1, heads),
        graph.tensor(b, d_state, groups, tokens, sequences),
        graph.tensor(c, d_state, groups, tokens, sequences),
        graph.tensor(np.arange(sequences, dtype=np.int32), sequences),
        planes,
    )


def _before_softplus(dt: np.ndarray) -> np.ndarray:
    return np.log(np.expm1(dt.astype(np.float64))).astype(np.float32)


def _gated_delta_net(graph: _Graph, arguments: Arrays, states: np.ndarray, planes: int) -> None:
    query, key, value, log_decay, beta = arguments
    _delta_rule(graph, query, key, value, log_decay[:, :, None], beta, states, planes)


def _kimi_delta_attention(graph: _Graph, arguments: Arrays, states: np.ndarray, planes: int) -> None:
    query, key, value, decay, beta = arguments
    _delta_rule(graph, query, key, value, np.log(decay), beta, states, planes)


def _delta_rule(
    graph: _Graph,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    states: np.ndarray,
    planes: int,
) -> None:
    sequences, heads, size, _ = states.shape
    tokens, key_heads = len(value) // sequences, key.shape[1]
    graph.expects(
        "ggml_gated_delta_net",
        graph.tensor(query * np.float32(math.sqrt(size)), size, key_heads, tokens, sequences),
        graph.tensor(key, size, key_heads, tokens, sequences),
        graph.tensor(value, size, heads, tokens, sequences),
        graph.tensor(log_decay, log_decay.shape[2], heads, tokens, sequences),
        graph.tensor(beta, 1, heads, tokens, sequences),
        graph.tensor(states.transpose(0, 1, 3, 2), size, size, heads, sequences),
        planes,
    )


def _lightning_attention(graph: _Graph, arguments: Arrays, states: np.ndarray, planes: int) -> None:
    query, key, value, loss = arguments
    sequences, heads, size, _ = states.shape
    decay = np.broadcast_to((1 + loss)[:, None], key.shape)
    shape = (size, heads, len(value))
    graph.expects(
        "ggml_gated_linear_attn",
        *(graph.tensor(array, *shape) for array in (key, value, query, decay)),
        graph.tensor(states, size * size * heads, sequences),
        1.0,
    )


def _rwkv6(graph: _Graph, arguments: Arrays, states: np.ndarray, planes: int) -> None:
    receptance, key, value, decay, first = arguments
    sequences, heads, size, _ = states.shape
    shape = (size, heads, len(value))
    graph.expects(
        "ggml_rwkv_wkv6",
        *(graph.tensor(array, *shape) for array in (key, value, receptance)),
        graph.tensor(first, size, heads),
        graph.tensor(decay, *shape),
        graph.tensor(states, size * size * heads, sequences),
    )


def _rwkv7(graph: _Graph, arguments: Arrays, states: np.ndarray, planes: int) -> None:
    receptance, key, value, decay, removal, rate = arguments
    sequences, heads, size, _ = states.shape
    shape = (size, heads, len(value))
    graph.expects(
        "ggml_rwkv_wkv7",
        *(graph.tensor(array, *shape) for array in (receptance, decay, key, value, removal, -rate * removal)),
        graph.tensor(states.transpose(0, 1, 3, 2), size * size * heads, sequences),
    )


_BUILDERS = {
    "mamba1_scan": _mamba1,
    "mamba2_scan": _mamba2,
    "gated_delta_net": _gated_delta_net,
    "kimi_delta_attention": _kimi_delta_attention,
    "lightning_attention": _lightning_attention,
    "rwkv6_wkv": _rwkv6,
    "rwkv7_wkv": _rwkv7,
}


@contextlib.contextmanager
def convolution_operator(arguments: Arrays, window: np.ndarray) -> Iterator[Work | str]:
    """Its causal convolution of one sequence: window [taps - 1, channels]."""
    own = library()
    if isinstance(own, str):
        yield own
        return
    x, taps = arguments[:2]
    inputs = np.concatenate([window, x])
    graph = _Graph(own, 2 * inputs.nbytes + taps.nbytes)
    try:
        graph.expects("ggml_ssm_conv", graph.tensor(inputs.T, len(inputs), x.shape[1], 1), graph.tensor(taps.T, len(taps), x.shape[1]))
        yield Work(graph.run, lambda _: graph.outputs(x.size))
    finally:
        graph.free()
