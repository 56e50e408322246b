"""Bindings of a llama.cpp tree: compiled once against its own headers, so that the layout of a struct and the value of a name cannot be wrong.

Rules
- cffi writes the C of the bindings, and the compiler fills in what is left open here (`...`): where a field stands, what a name is worth.
- What the headers do not have is left out when a session can do without it; else it is an error that says from when on llama.cpp has it.
- A compiled binding is kept in the user's cache under a hash of everything that it was made of: the headers, the compiler, the definitions here.
  It belongs to headers, not to a library: many builds of one version share it.
- It appears whole or not at all, under a name that holds the hash of its content: two processes may make it at once, and a damaged one is made again.
Source: llama.h, ggml.h and gguf.h of llama.cpp, from June 2025 on; cffi, "API mode".
"""

import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..spec.errors import UnavailableError
from .llama_builds import Build

MODULE = "_statedrift_llama"
COMPILE_SECONDS_MAX = 300
_HEADERS = ("llama.h", "ggml.h", "gguf.h", "ggml-cpu.h", "ggml-backend.h", "ggml-alloc.h", "ggml-opt.h")
_FLAGS = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
_INCLUDED = '#include "llama.h"\n#include "ggml.h"\n#include "gguf.h"\n'
_QUIET = ["-w", "-Wno-incompatible-pointer-types", "-Wno-int-conversion"]
"""Callbacks are plain pointers in the definitions, and `const` is left out."""

_OPAQUE = ("llama_model", "llama_context", "llama_vocab", "llama_memory_i", "gguf_context")
_STRUCTS: dict[str, dict[str, str]] = {
    "llama_batch": {
        "n_tokens": "int32_t {}", "token": "int32_t * {}", "pos": "int32_t * {}", "n_seq_id": "int32_t * {}",
        "seq_id": "int32_t ** {}", "logits": "int8_t * {}",
    },
    "llama_model_params": {
        "n_gpu_layers": "int32_t {}", "load_mode": "int32_t {}", "use_mmap": "bool {}", "use_extra_bufts": "bool {}",
        "progress_callback": "void * {}", "kv_overrides": "void * {}",
    },
    "llama_context_params": {
        "n_ctx": "uint32_t {}", "n_batch": "uint32_t {}", "n_ubatch": "uint32_t {}", "n_seq_max": "uint32_t {}", "n_rs_seq": "uint32_t {}",
        "n_threads": "int32_t {}", "n_threads_batch": "int32_t {}", "pooling_type": "int32_t {}", "type_k": "int32_t {}",
        "type_v": "int32_t {}", "flash_attn_type": "int32_t {}", "flash_attn": "bool {}", "kv_unified": "bool {}", "swa_full": "bool {}",
        "no_perf": "bool {}", "offload_kqv": "bool {}", "op_offload": "bool {}", "cb_eval": "void * {}", "abort_callback": "void * {}",
    },
    "gguf_init_params": {"no_alloc": "bool {}"},
    "ggml_tensor": {"ne": "int64_t {}[...]"},
}  # fmt: skip
"""Struct -> the fields that are used -> how C says them; `{}` is the name. Numbers of an enum are plain numbers."""
_MAY_LACK_FIELDS = {"load_mode", "use_mmap", "use_extra_bufts", "n_rs_seq", "flash_attn_type", "flash_attn", "op_offload"}

_FUNCTIONS: dict[str, str] = {
    "llama_backend_init": "void {}(void)",
    "llama_log_set": "void {}(void *, void *)",
    "llama_version": "const char * {}(void)",
    "llama_model_default_params": "struct llama_model_params {}(void)",
    "llama_context_default_params": "struct llama_context_params {}(void)",
    "llama_model_load_from_file": "struct llama_model * {}(const char *, struct llama_model_params)",
    "llama_model_init_from_user": "struct llama_model * {}(struct gguf_context *, void *, void *, struct llama_model_params)",
    "llama_model_free": "void {}(struct llama_model *)",
    "llama_model_get_vocab": "struct llama_vocab * {}(struct llama_model *)",
    "llama_vocab_n_tokens": "int32_t {}(struct llama_vocab *)",
    "llama_model_n_embd": "int32_t {}(struct llama_model *)",
    "llama_model_n_embd_out": "int32_t {}(struct llama_model *)",
    "llama_model_is_recurrent": "bool {}(struct llama_model *)",
    "llama_init_from_model": "struct llama_context * {}(struct llama_model *, struct llama_context_params)",
    "llama_free": "void {}(struct llama_context *)",
    "llama_get_memory": "struct llama_memory_i * {}(struct llama_context *)",
    "llama_n_ctx": "uint32_t {}(struct llama_context *)",
    "llama_n_ctx_seq": "uint32_t {}(struct llama_context *)",
    "llama_n_batch": "uint32_t {}(struct llama_context *)",
    "llama_n_rs_seq": "uint32_t {}(struct llama_context *)",
    "llama_decode": "int32_t {}(struct llama_context *, struct llama_batch)",
    "llama_get_logits": "float * {}(struct llama_context *)",
    "llama_get_embeddings": "float * {}(struct llama_context *)",
    "llama_set_embeddings": "void {}(struct llama_context *, bool)",
    "llama_set_abort_callback": "void {}(struct llama_context *, void *, void *)",
    "llama_memory_clear": "void {}(struct llama_memory_i *, bool)",
    "llama_memory_seq_rm": "bool {}(struct llama_memory_i *, int32_t, int32_t, int32_t)",
    "llama_memory_seq_cp": "void {}(struct llama_memory_i *, int32_t, int32_t, int32_t, int32_t)",
    "llama_memory_seq_keep": "void {}(struct llama_memory_i *, int32_t)",
    "llama_memory_seq_add": "void {}(struct llama_memory_i *, int32_t, int32_t, int32_t, int32_t)",
    "llama_memory_seq_div": "void {}(struct llama_memory_i *, int32_t, int32_t, int32_t, int)",
    "llama_memory_seq_pos_min": "int32_t {}(struct llama_memory_i *, int32_t)",
    "llama_memory_seq_pos_max": "int32_t {}(struct llama_memory_i *, int32_t)",
    "llama_memory_can_shift": "bool {}(struct llama_memory_i *)",
    "llama_state_get_size": "size_t {}(struct llama_context *)",
    "llama_state_get_data": "size_t {}(struct llama_context *, uint8_t *, size_t)",
    "llama_state_set_data": "size_t {}(struct llama_context *, const uint8_t *, size_t)",
    "llama_state_seq_get_size": "size_t {}(struct llama_context *, int32_t)",
    "llama_state_seq_get_data": "size_t {}(struct llama_context *, uint8_t *, size_t, int32_t)",
    "llama_state_seq_set_data": "size_t {}(struct llama_context *, const uint8_t *, size_t, int32_t)",
    "llama_state_seq_get_size_ext": "size_t {}(struct llama_context *, int32_t, uint32_t)",
    "llama_state_seq_get_data_ext": "size_t {}(struct llama_context *, uint8_t *, size_t, int32_t, uint32_t)",
    "llama_state_seq_set_data_ext": "size_t {}(struct llama_context *, const uint8_t *, size_t, int32_t, uint32_t)",
    "gguf_init_from_file": "struct gguf_context * {}(const char *, struct gguf_init_params)",
    "gguf_free": "void {}(struct gguf_context *)",
    "ggml_get_name": "const char * {}(struct ggml_tensor *)",
    "ggml_set_abort_callback": "void {}(void *)",
    "ggml_backend_dev_count": "size_t {}(void)",
}  # fmt: skip
"""Function -> how C says it; callbacks are plain pointers."""
MAY_LACK = {
    "llama_version", "llama_model_init_from_user", "llama_model_n_embd_out", "llama_n_ctx_seq", "llama_n_rs_seq",
    "llama_state_seq_get_size_ext", "llama_state_seq_get_data_ext", "llama_state_seq_set_data_ext", "ggml_set_abort_callback",
    "ggml_backend_dev_count",
}  # fmt: skip
"""Functions that a session can do without, or with something else in their place (llama_tree.py)."""
_CONSTANTS = (
    "GGML_TYPE_F32", "GGML_TYPE_F16", "LLAMA_POOLING_TYPE_NONE", "LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY", "LLAMA_STATE_SEQ_FLAGS_ON_DEVICE",
)  # fmt: skip
_MAY_LACK_CONSTANTS = {"LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY", "LLAMA_STATE_SEQ_FLAGS_ON_DEVICE"}

_SINCE = (
    ("llama_memory_", "June 2025 (pull request 14006)"),
    ("llama_get_memory", "June 2025 (pull request 14006)"),
    ("kv_unified", "July 2025 (pull request 14363)"),
    ("llama_model_init_from_user", "March 2026"),
)  # fmt: skip


def missing(what: str, where: object) -> UnavailableError:
    """The error for a function or field that a llama.cpp does not have."""
    since = next((when for beginning, when in _SINCE if what.startswith(beginning)), None)
    older = (
        f"llama.cpp has it since {since}; this one is older, or not llama.cpp" if since else "this is no llama.cpp that statedrift knows"
    )
    return UnavailableError(f"target llamacpp is not available: {where} has no `{what}`: {older}")


# --- what the headers have -------------------------------------------------------------------------------------------------


class Described(NamedTuple):
    """What C is to be told (`definitions`), and the names of the functions and constants in it."""

    definitions: str
    names: frozenset[str]


def described(build: Build) -> Described:
    """The definitions that fit a tree's headers. Raises UnavailableError for what they lack and must have."""
    texts = {name: _without_comments(path.read_text(errors="replace")) for name, path in _headers_of(build)}
    code = "\n".join(texts.values())
    where = build.includes[0] / "llama.h"
    parts = [f"struct {name};" for name in _OPAQUE]
    for struct, fields in _STRUCTS.items():
        body = re.search(rf"struct\s+{struct}\s*{{(.*?)\n\s*}}", code, re.DOTALL)
        if body is None:
            raise missing(f"struct {struct}", where)
        there = {name: text for name, text in fields.items() if re.search(rf"\b{name}\s*(\[.*?\])?\s*;", body[1])}
        for name in fields.keys() - there.keys() - _MAY_LACK_FIELDS:
            raise missing(name, f"{struct} in {where}")
        parts.append(f"struct {struct} {{ {' '.join(text.format(name) + ';' for name, text in there.items())} ...; }};")
    functions = _those_there(code, _FUNCTIONS, MAY_LACK, where)
    constants = _those_there(code, _CONSTANTS, _MAY_LACK_CONSTANTS, where)
    parts += [_FUNCTIONS[name].format(name) + ";" for name in functions]
    parts += [f"static const int {name};" for name in constants]
    return Described("\n".join(parts) + "\n", frozenset([*functions, *constants]))


def _those_there(code: str, names: Iterable[str], may_lack: set[str], where: Path) -> list[str]:
    there = [name for name in names if re.search(rf"\b{name}\b", code)]
    for name in names:
        if name not in there and name not in may_lack:
            raise missing(name, where)
    return there


def _headers_of(build: Build) -> list[tuple[str, Path]]:
    """The headers that matter, each where the compiler finds it."""
    places = ((name, next((folder / name for folder in build.includes if (folder / name).is_file()), None)) for name in _HEADERS)
    return [(name, path) for name, path in places if path is not None]


def _without_comments(code: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", code, flags=re.DOTALL)


# --- compiled, and kept ----------------------------------------------------------------------------------------------------


def bindings_of(build: Build) -> tuple[Any, frozenset[str]]:
    """The compiled bindings of a tree's headers as a module with `ffi` and `lib`, and the names of what is in them.

    The library must be loaded before, for everybody (RTLD_GLOBAL): the bindings find its functions then. Raises UnavailableError without
    cffi or a compiler, when the headers do not compile, or when the library lacks what they promise.
    """
    wanted = described(build)
    code = _c_code(wanted.definitions)
    compiler = _compiler()
    key = _key(build, code, compiler)
    try:
        folder = _cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        kept = _kept(folder, key) or _keep(_compiled(build, code, compiler, folder), folder, key)
        return _imported(kept, build), wanted.names
    except (OSError, RuntimeError):  # no cache can be written here, or there is no home: the bindings are made for this process alone
        with tempfile.TemporaryDirectory(prefix="statedrift-") as own:
            return _imported(_keep(_compiled(build, code, compiler, Path(own)), Path(own), key), build), wanted.names


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "statedrift" / "llama-bindings"


def _c_code(definitions: str) -> str:
    """The bindings' source, written by cffi."""
    try:
        cffi = importlib.import_module("cffi")
        recompiler = importlib.import_module("cffi.recompiler")
    except ImportError as error:
        raise UnavailableError(
            f"target llamacpp is not available: a build of one's own needs cffi, which is not installed: {error}. pip install 'statedrift[llamacpp]'"
        ) from error
    ffi = cffi.FFI()
    ffi.cdef(definitions)
    with tempfile.TemporaryDirectory(prefix="statedrift-") as folder:
        path = Path(folder) / f"{MODULE}.c"
        recompiler.make_c_source(ffi, MODULE, _INCLUDED, str(path))  # FFI.emit_c_code does the same, and prints
        return path.read_text()


def _compiler() -> list[str]:
    """The C compiler: `CC` where it is set, else the one that Python was built with, else `cc`."""
    asked = os.environ.get("CC")
    tried = [asked] if asked else [str(sysconfig.get_config_var("CC") or "cc"), "cc"]
    for words in tried:
        if _version_of(shlex.split(words)) is not None:
            return shlex.split(words)
    raise UnavailableError(
        "target llamacpp is not available: a build of one's own needs a C compiler, once for each version of its headers, "
        f"and `{tried[0]}` is none that answers; install one (Debian: apt install build-essential), or set CC"
    )


def _version_of(compiler: Sequence[str]) -> str | None:
    try:
        return subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _key(build: Build, code: str, compiler: list[str]) -> str:
    """A hash of everything that the bindings are made of."""
    digest = hashlib.blake2b(digest_size=12)
    for part in (code, " ".join(compiler), _version_of(compiler) or "", sys.version, sysconfig.get_platform(), " ".join(_FLAGS)):
        digest.update(part.encode() + b"\0")
    for name, path in _headers_of(build):
        digest.update(name.encode() + b"\0" + hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def _content_hash(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def _kept(folder: Path, key: str) -> Path | None:
    """What was compiled before; one whose content is not what its name says is removed."""
    for path in sorted(folder.glob(f"{key}-*.so")):
        if path.stem == f"{key}-{_content_hash(path)}":
            return path
        path.unlink(missing_ok=True)
    return None


def _keep(compiled: Path, folder: Path, key: str) -> Path:
    place = folder / f"{key}-{_content_hash(compiled)}.so"
    os.replace(compiled, place)
    return place


def _compiled(build: Build, code: str, compiler: list[str], folder: Path) -> Path:
    """Compile the bindings into a new file below `folder`; about two seconds."""
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".", suffix=".unfinished")
    os.close(descriptor)
    unfinished = Path(name)
    includes = [f"-I{path}" for path in (*build.includes, sysconfig.get_path("include"))]
    command = [*compiler, "-O2", *_QUIET, "-fPIC", *_FLAGS, *includes, "-x", "c", "-", "-o", name]
    try:
        done = subprocess.run(command, input=code, capture_output=True, text=True, timeout=COMPILE_SECONDS_MAX, check=False)
        if done.returncode:
            raise _does_not_compile(build, done.stderr)
    except subprocess.TimeoutExpired:
        unfinished.unlink(missing_ok=True)
        raise UnavailableError(
            f"target llamacpp is not available: {compiler[0]} did not compile the bindings within {COMPILE_SECONDS_MAX} s"
        ) from None
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return unfinished


def _does_not_compile(build: Build, messages: str) -> UnavailableError:
    errors = [line.strip() for line in messages.splitlines() if "error" in line] or ["the compiler gives no reason"]
    hint = (
        "install Python's own headers (Debian: apt install python3-dev)"
        if "Python.h" in messages
        else "are these the headers of a llama.cpp?"
    )
    return UnavailableError(
        f"target llamacpp is not available: the headers in {build.includes[0]} do not compile as statedrift needs them: {errors[0]}; {hint}"
    )


def _imported(path: Path, build: Build) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, str(path), loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        symbol = re.search(r"undefined symbol: (\w+)|symbol not found[^']*'_?(\w+)'", str(error))
        lacks = (
            f"has no function `{symbol[1] or symbol[2]}`, which its headers declare" if symbol else f"does not go with its headers: {error}"
        )
        raise UnavailableError(
            f"target llamacpp is not available: {build.library} {lacks}: headers and library ({build.includes[0]}) are of different versions; "
            "build the library again, or name the headers that belong to it"
        ) from error
    return module
