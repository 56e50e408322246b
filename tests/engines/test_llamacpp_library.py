"""The library behind target llamacpp: what is checked before it is used, and what becomes of its messages and aborts.

Rules
- What could end the process runs in a process of its own.
"""

import ctypes
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from statedrift.spec.errors import UnavailableError
from statedrift.targets import llama_installed, llama_library, llama_loading
from statedrift.targets.llamacpp import TARGET, last_log_lines

NEEDS_LLAMA = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python, which is not installed")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
    )


def shifted(defaults: ctypes.Structure, field: str, byte_count: int) -> ctypes.Structure:
    """The struct as it reads when the library has `byte_count` more bytes before `field` (fewer when negative)."""
    place = getattr(type(defaults), field).offset
    content = bytes(defaults)
    moved = content[:place] + bytes(byte_count) + content[place:] if byte_count > 0 else content[:place] + content[place - byte_count :]
    return type(defaults).from_buffer_copy(moved + bytes(64))


def test_a_missing_package_is_said_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(UnavailableError) as caught:
        llama_loading.load_library.__wrapped__()
    assert str(caught.value) == (
        "target llamacpp is not available: llama-cpp-python is not installed. "
        "pip install 'statedrift[llamacpp]' (builds in about 4 minutes, needs a C++ compiler)"
    )


def test_importing_the_target_loads_no_engine() -> None:
    code = "import sys, statedrift.targets.llamacpp; print(sorted({'llama_cpp', 'gguf', 'torch'} & set(sys.modules)))"
    assert run_python(code).stdout == "[]\n"


@NEEDS_LLAMA
def test_a_folder_without_a_library_is_named(tmp_path: Path) -> None:
    code = (
        "from statedrift.targets.llamacpp import TARGET\n"
        "from statedrift.spec.errors import UnavailableError\n"
        "try: TARGET.version()\n"
        "except UnavailableError as error: print(error)"
    )
    printed = run_python(code, LLAMA_CPP_LIB_PATH=str(tmp_path)).stdout
    assert printed.startswith("target llamacpp is not available: ")
    assert f"LLAMA_CPP_LIB_PATH={tmp_path}" in printed


@NEEDS_LLAMA
def test_the_installed_library_has_the_known_layout() -> None:
    package: Any = importlib.import_module("llama_cpp")
    llama_installed.check_layout(package, llama_loading.load_library().call, Path("libllama.so"))


@NEEDS_LLAMA
@pytest.mark.parametrize(
    ("struct", "field", "byte_count"),
    [
        ("context", "n_rs_seq", -4),  # a library from before rollback snapshots
        ("context", "n_outputs_max", 4),
        ("context", "rope_freq_base", 4),
        ("context", "cb_eval", -8),
        ("context", "abort_callback", 8),  # a number between the cache types and the callback
        ("context", "embeddings", 1),
        ("context", "swa_full", 1),
        ("model", "n_gpu_layers", 8),
        ("model", "main_gpu", -4),
        ("model", "vocab_only", 8),
        ("model", "use_extra_bufts", 1),
    ],
)
def test_a_shifted_layout_is_refused(struct: str, field: str, byte_count: int) -> None:
    package: Any = importlib.import_module("llama_cpp")
    call = llama_loading.load_library().call
    defaults = {"context": call.llama_context_default_params(), "model": call.llama_model_default_params()}
    defaults[struct] = shifted(defaults[struct], field, byte_count)
    fake = SimpleNamespace(llama_context_default_params=lambda: defaults["context"], llama_model_default_params=lambda: defaults["model"])
    with pytest.raises(UnavailableError) as caught:
        llama_installed.check_layout(package, fake, Path("/opt/libllama.so"))
    assert (
        f"the layout of llama_{struct}_params in /opt/libllama.so is not the one llama-cpp-python {package.__version__} describes"
        in str(caught.value)
    )


@NEEDS_LLAMA
def test_the_version_names_package_and_build() -> None:
    package: Any = importlib.import_module("llama_cpp")
    assert TARGET.version().startswith(f"llama-cpp-python {package.__version__} (llama.cpp ")
    assert TARGET.describe().startswith(TARGET.version())
    assert str(llama_loading.load_library().path) in TARGET.describe()


@NEEDS_LLAMA
def test_a_second_look_at_the_version_is_the_same() -> None:
    assert run_python("from statedrift.targets.llamacpp import TARGET; print(TARGET.version())").stdout.strip() == TARGET.version()


@NEEDS_LLAMA
def test_an_abort_of_the_library_ends_the_process_with_its_message() -> None:
    code = (
        "from statedrift.targets import llama_loading\n"
        "call = llama_loading.load_library().call\n"
        "import ctypes\n"
        "call.ggml_abort.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p)\n"
        "call.ggml_abort(b'cells.cpp', 7, b'lost a cell')"
    )
    ended = run_python(code)
    assert ended.returncode == llama_library.ABORT_STATUS
    assert ended.stderr == "llama.cpp aborted: cells.cpp:7: lost a cell\n"


@NEEDS_LLAMA
def test_information_is_dropped_and_warnings_are_kept() -> None:
    log = llama_library.Log()
    texts = [(2, b"loading\n"), (5, b"...\n"), (3, b"careful: "), (5, b"a cell\n"), (4, b"lost\n")]
    for level, text in texts:
        log.receive(level, ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value or 0, None)
    assert list(log.lines) == ["careful: a cell", "lost"]
    assert log.first_since(0) == "careful: a cell"
    assert log.first_since(1) == "lost"
    assert log.first_since(2) == ""


@NEEDS_LLAMA
def test_no_more_than_forty_lines_are_kept() -> None:
    log = llama_library.Log()
    for line in range(100):
        text = ctypes.create_string_buffer(f"line {line}\n".encode())
        log.receive(4, ctypes.addressof(text), None)
    assert len(log.lines) == 40
    assert log.first_since(0) == "line 60"
    assert len(last_log_lines()) <= 40
