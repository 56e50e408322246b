"""Compile every CUDA kernel without a device, to PTX and to machine code, and count what it uses.

Rules
- A kernel is compiled with the types that it is called with: the functions of `kernels_cuda` are called on arrays of the host, and what
  they would start is taken down instead.
- Needed: numba-cuda with NVRTC and libNVVM, and `ptxas` and, for the machine code, `nvdisasm`; `missing_tool` says what is not there.
"""

import contextlib
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

ARCHITECTURES = ((9, 0), (8, 0))
WHEELS = "pip install 'statedrift[cuda-compile]' brings the compilers"


class Compiled(NamedTuple):
    """What a compiled kernel uses.

    stack_bytes, spill_bytes  of a thread
    doubles                   float64 instructions of the machine code
    vector_loads, vector_stores  of 16 bytes
    """

    name: str
    architecture: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    doubles: int
    vector_loads: int
    vector_stores: int


class Launch(NamedTuple):
    """A kernel that was started, and with what."""

    kernel: Any
    arguments: tuple[Any, ...]


@functools.cache
def missing_tool() -> str:
    """What is not here of what compiling needs, or ""."""
    try:
        from numba import cuda
    except ImportError:
        return "numba-cuda is not installed"
    if not hasattr(cuda, "compile_ptx") or cuda.compile_ptx is None:
        return "the simulator compiles nothing: run without NUMBA_ENABLE_CUDASIM"
    if not ptxas():
        return f"there is no ptxas; {WHEELS}"
    if not nvdisasm():
        return f"there is no nvdisasm; {WHEELS}"
    try:
        cuda.compile_ptx(_nothing, "void(float32[::1])", cc=ARCHITECTURES[0], device=False)
    except Exception as error:  # whatever a toolkit that is half there says
        said = " ".join(str(error).split())[:160]
        return f"numba-cuda does not compile ({type(error).__name__}: {said}); {WHEELS}"
    return ""


def _nothing(x: Any) -> None:
    pass


def _tool(name: str) -> str:
    """The path of a tool of the CUDA toolkit: on the path, or in a wheel, or ""."""
    found = shutil.which(name)
    if found:
        return found
    with contextlib.suppress(ImportError):
        import nvidia

        for folder in nvidia.__path__:
            for path in sorted(Path(folder).glob(f"**/bin/{name}")):
                return str(path)
    return ""


@functools.cache
def ptxas() -> str:
    return _tool("ptxas")


@functools.cache
def nvdisasm() -> str:
    return _tool("nvdisasm")


def tool_version() -> str:
    """The release of ptxas, e.g. "ptxas 13.0"."""
    said = subprocess.run([ptxas(), "--version"], capture_output=True, text=True, check=True).stdout
    return "ptxas " + _number(r"release ([\d.]+)", said)


@contextlib.contextmanager
def taken_down() -> Iterator[list[Launch]]:
    """Functions of `kernels_cuda` start nothing inside: what they would start is in the list. Arrays are the host's."""
    import statedrift.kernels_cuda as kernels_cuda
    from numba import cuda

    launches: list[Launch] = []
    before = kernels_cuda.start, cuda.device_array, cuda.to_device
    kernels_cuda.start = lambda kernel, blocks, threads, arguments: launches.append(Launch(kernel, kernels_cuda.resident(arguments)))  # type: ignore[assignment]
    cuda.device_array, cuda.to_device = np.empty, lambda array: array
    try:
        yield launches
    finally:
        kernels_cuda.start, cuda.device_array, cuda.to_device = before  # type: ignore[assignment]


@contextlib.contextmanager
def _for_architecture(architecture: tuple[int, int]) -> Iterator[None]:
    """Device functions are compiled for the device that is there; here there is none."""
    from numba.cuda import dispatcher

    before = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=architecture)
    try:
        yield
    finally:
        dispatcher.get_current_device = before


def compiled(name: str, launch: Launch, architecture: tuple[int, int] = ARCHITECTURES[0]) -> Compiled:
    """Compile a kernel with the types of a launch. Raises CalledProcessError when ptxas refuses it."""
    from numba import cuda
    from numba.cuda import types

    signature = types.void(*map(_type_of, launch.arguments))
    with _for_architecture(architecture):
        ptx, _ = cuda.compile_ptx(launch.kernel.py_func, signature, cc=architecture, device=False)
    target = f"sm_{architecture[0]}{architecture[1]}"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_text(ptx)
        said = subprocess.run([ptxas(), f"-arch={target}", "-v", source, "-o", binary], capture_output=True, text=True, check=True).stderr
        code = subprocess.run([nvdisasm(), "-c", binary], capture_output=True, text=True, check=True).stdout
    return Compiled(
        name,
        target,
        int(_number(r"Used (\d+) registers", said)),
        int(_number(r"(\d+) bytes stack frame", said)),
        int(_number(r"(\d+) bytes spill stores", said)) + int(_number(r"(\d+) bytes spill loads", said)),
        len(re.findall(r"\b(?:DADD|DMUL|DFMA|DSETP|DMNMX)\b", code)),
        len(re.findall(r"\bLDG\.E\.128", code)),
        len(re.findall(r"\bSTG\.E\.128", code)),
    )


def _number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, f"ptxas did not say {pattern!r}: {text}"
    return found.group(1)


def _type_of(value: Any) -> Any:
    from numba.cuda import types
    from numba.cuda.typing.typeof import typeof

    if isinstance(value, tuple):
        return types.Tuple(tuple(map(_type_of, value)))
    if isinstance(value, bool):
        return types.boolean
    if isinstance(value, int):
        return types.int64
    return typeof(value)
