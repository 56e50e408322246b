"""Other builds of llama.cpp: found, bound through their own headers, and called as they are.

Rules
- The builds are of a tiny llama.cpp (tests/fixtures/tiny_llama) whose structs and numbers are all other than the real one's; some are older.
- A library is loaded in a process of its own, with a cache of its own.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from statedrift.cli.application import run
from statedrift.cli.builds import build_words
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.errors import UnavailableError, UsageError
from statedrift.targets import llama_builds, llamacpp
from statedrift.targets.llama_builds import FOLDER, INCLUDE, LIBRARY, asked_build, environment_of

TINY = Path(__file__).parent.parent / "fixtures" / "tiny_llama"
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cffi") is None or shutil.which("cc") is None,
    reason="needs cffi and a C compiler; one of them is not installed",
)
HEADERS = ("llama.h", "ggml.h", "gguf.h")


def older(code: str) -> str:
    return "".join(line for line in code.splitlines(keepends=True) if not line.endswith("// young\n"))


def compile_library(source: Path, includes: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-w", "-fPIC", "-shared", f"-I{includes}", "-x", "c", str(source), "-o", str(library)], check=True)


def make_tree(folder: Path, is_older: bool = False) -> Path:
    """A tree with its build, as one looks that has just been built; `all` holds its headers in one folder."""
    together = folder / "all"
    together.mkdir(parents=True)
    for name in HEADERS:
        place = folder / ("include" if name == "llama.h" else "ggml/include") / name
        place.parent.mkdir(parents=True, exist_ok=True)
        code = (TINY / "include" / name).read_text()
        for path in (place, together / name):
            path.write_text(older(code) if is_older else code)
    code = (TINY / "llama.c").read_text()
    (folder / "llama.c").write_text(older(code) if is_older else code)
    compile_library(folder / "llama.c", together, folder / "build" / "bin" / llama_builds.FILE_NAME)
    (folder / "build" / "llama-config.cmake").write_text("set(LLAMA_BUILD_COMMIT 1a2b3c4)\nset(LLAMA_BUILD_NUMBER 6789)\n")
    return folder


def changed_tree(folder: Path, old: str, new: str) -> Path:
    """A young tree with another source."""
    make_tree(folder)
    code = (folder / "llama.c").read_text()
    assert old in code
    (folder / "llama.c").write_text(code.replace(old, new))
    compile_library(folder / "llama.c", folder / "all", folder / "build" / "bin" / llama_builds.FILE_NAME)
    return folder


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A young tree, an old one, and the cache that they share."""
    root = tmp_path_factory.mktemp("trees")
    return SimpleNamespace(young=make_tree(root / "young"), old=make_tree(root / "old", is_older=True), cache=root / "cache")


def asked(code: str, cache: Path, **environment: str) -> Any:
    """What `code` answers (`answer = ...`) in a process that drives the build of this environment; a string where it raised."""
    text = (
        "import json, sys\n"
        "from statedrift.spec.errors import UnavailableError\n"
        "from statedrift.targets.llama_library import CancelCallback, SetTensorCallback, BatchArrays, set_present\n"
        "from statedrift.targets.llama_loading import load_library\n"
        "try:\n    library = load_library()\n"
        "except UnavailableError as error:\n    print(json.dumps(str(error))); sys.exit()\n"
        "call = library.call\n" + code + "\nprint(json.dumps(answer))"
    )
    own = {name: value for name, value in os.environ.items() if not name.startswith("STATEDRIFT_")}
    own |= {"XDG_CACHE_HOME": str(cache)} | environment
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, env=own, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


SESSION = """
import numpy as np
parameters = call.llama_model_default_params()
parameters.n_gpu_layers = 0
set_present(parameters, use_mmap=False, use_extra_bufts=False, load_mode=0)
model = call.llama_model_load_from_file(b"a file", parameters)
options = call.llama_context_default_params()
options.n_ctx, options.n_seq_max, options.pooling_type = 96, 3, library.constants.pooling_none
set_present(options, n_rs_seq=2)
context = call.llama_init_from_model(model, options)
arrays = BatchArrays(*(np.zeros(8, kind) for kind in (np.int32, np.int32, np.int32, np.uint64, np.int8)))
ids = np.array([5, 2], np.int32)
arrays.tokens[:2], arrays.positions[:2], arrays.sequence_counts[:2], arrays.wanted[:2] = (3, 4), (10, 20), 2, (0, 1)
arrays.sequence_addresses[:2] = ids.ctypes.data
batch = library.batch(arrays)
batch.n_tokens = 2
answer = {
    "recurrent": call.llama_model_is_recurrent(model), "width": call.llama_model_n_embd_out(model),
    "n_ctx": call.llama_n_ctx(context), "n_rs_seq": call.llama_n_rs_seq(context), "decoded": call.llama_decode(context, batch),
    "rows": np.frombuffer(library.read(call.llama_get_logits(context), 8), np.float32).tolist(),
    "none": bool(call.llama_model_load_from_file(b"none", parameters)), "log": list(library.log.lines),
    "constants": list(library.constants), "version": library.version,
}
chances = []
callback = CancelCallback(lambda data: chances.append(1) or True)
call.llama_set_abort_callback(context, library.function(callback), library.null)
answer["cancelled"] = [call.llama_decode(context, batch), len(chances)]
call.llama_set_abort_callback(context, library.function(None), library.null)
answer["not cancelled"] = call.llama_decode(context, batch)
flags = library.constants.on_device or 0
size = call.llama_state_seq_get_size_ext(context, 1, flags)
blob = library.buffer(size)
written = call.llama_state_seq_get_data_ext(context, blob, size, 1, flags)
saved = library.read(blob, written)
answer["saved"] = saved.decode()
answer["restored"] = [call.llama_state_seq_set_data_ext(context, saved, len(saved), sequence, flags) for sequence in (1, 0)]
try:
    library.require("llama_model_init_from_user")
    seen = []
    note = SetTensorCallback(lambda address, data: seen.append(library.tensor_fact(address)))
    call.llama_model_init_from_user(library.metadata_of("a file"), library.function(note), library.null, parameters)
    answer["tensors"] = seen
except UnavailableError as error:
    answer["tensors"] = str(error)
"""


@needs_compiler
def test_a_tree_is_called_through_its_own_layouts_and_numbers(trees: SimpleNamespace) -> None:
    answer = asked(SESSION, trees.cache, **{FOLDER: str(trees.young)})
    digest = answer.pop("version").rpartition(" ")[2]
    assert len(digest) == len("1f9a03c2)")
    assert answer == {
        "recurrent": True, "width": 100, "n_ctx": 96, "n_rs_seq": 2, "decoded": 3 * 10 + 4 * 20 + 2 * 2000 + 10000, "rows": [2.5, 7.0],
        "none": False, "log": ["a warning at the beginning", "there is none"], "constants": [3, 4, 7, 4, 8],
        "cancelled": [2, 1], "not cancelled": 14110, "saved": "b" * 12, "restored": [12, 0], "tensors": [["of the user", [5, 6, 1, 1, 1]]],
    }  # fmt: skip


@needs_compiler
def test_what_an_older_one_lacks_is_left_out_or_said_otherwise(trees: SimpleNamespace) -> None:
    answer = asked(SESSION, trees.cache, **{FOLDER: str(trees.old)})
    assert (answer["width"], answer["n_rs_seq"], answer["saved"]) == (0, 0, "b" * 4)
    assert answer["decoded"] == 14110
    assert answer["constants"] == [3, 4, 7, None, None]
    assert answer["version"].startswith("llama.cpp of unstated version (build 6789, commit 1a2b3c4, library ")
    assert "has no `llama_model_init_from_user`: llama.cpp has it since March 2026; this one is older" in answer["tensors"]


@needs_compiler
def test_two_builds_of_one_version_have_two_versions(trees: SimpleNamespace, tmp_path: Path) -> None:
    other = changed_tree(tmp_path / "other", "return 2;", "return 3;")
    first, second = (asked("answer = library.version", trees.cache, **{FOLDER: str(tree)}) for tree in (trees.young, other))
    assert first.startswith("llama.cpp 7.0-tiny (build 6789, commit 1a2b3c4, library ")
    assert first != second


@needs_compiler
def test_a_build_whose_backends_come_later_is_said(trees: SimpleNamespace, tmp_path: Path) -> None:
    other = changed_tree(tmp_path / "other", "ggml_backend_dev_count(void) { return 1;", "ggml_backend_dev_count(void) { return 0;")
    assert "build it with -DGGML_BACKEND_DL=OFF" in asked("answer = 0", trees.cache, **{FOLDER: str(other)})


def test_cells_of_a_sequence_where_the_library_says_those_of_all() -> None:
    call = SimpleNamespace(llama_n_ctx=lambda context: 96)
    assert llamacpp._cells_of_sequence(call, None, CacheConfiguration(n_seq_max=3)) == 32
    assert llamacpp._cells_of_sequence(call, None, CacheConfiguration(n_seq_max=3, unified=1)) == 96


# --- what is kept ------------------------------------------------------------------------------------------------------------


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "statedrift" / "llama-bindings").iterdir())


@needs_compiler
def test_bindings_are_compiled_once_for_all_builds_of_the_same_headers(trees: SimpleNamespace, tmp_path: Path) -> None:
    moved = shutil.copytree(trees.young, tmp_path / "moved")
    asked("answer = 0", tmp_path / "cache", **{FOLDER: str(trees.young)})
    (file,) = kept(tmp_path / "cache")
    made = file.stat().st_mtime_ns
    asked("answer = 0", tmp_path / "cache", **{FOLDER: str(moved)})
    assert [path.stat().st_mtime_ns for path in kept(tmp_path / "cache")] == [made]
    (moved / "include" / "llama.h").write_text((moved / "include" / "llama.h").read_text() + "// another header\n")
    asked("answer = 0", tmp_path / "cache", **{FOLDER: str(moved)})
    assert len(kept(tmp_path / "cache")) == 2


@needs_compiler
@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: data[:5000] + b"\xff" * 64 + data[5064:], lambda data: b""])
def test_a_damaged_one_is_made_again(trees: SimpleNamespace, tmp_path: Path, damage: Any) -> None:
    asked("answer = 0", tmp_path, **{FOLDER: str(trees.young)})
    (file,) = kept(tmp_path)
    sound = file.read_bytes()
    file.write_bytes(damage(sound))
    assert asked(SESSION, tmp_path, **{FOLDER: str(trees.young)})["decoded"] == 14110
    (again,) = kept(tmp_path)
    assert len(again.read_bytes()) == len(sound)


@needs_compiler
def test_several_processes_may_make_it_at_once(trees: SimpleNamespace, tmp_path: Path) -> None:
    code = "from statedrift.targets.llama_loading import load_library; print(load_library().version)"
    own = os.environ | {"XDG_CACHE_HOME": str(tmp_path), FOLDER: str(trees.young)}
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=own) for _ in range(3)]
    assert len({process.communicate(timeout=120)[0] for process in started}) == 1
    assert [process.returncode for process in started] == [0, 0, 0]
    assert all(path.suffix == ".so" for path in kept(tmp_path))


@needs_compiler
def test_without_a_place_to_keep_it_it_is_made_for_the_process_alone(trees: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert asked(SESSION, tmp_path / "cache", **{FOLDER: str(trees.young)})["decoded"] == 14110


# --- what cannot be bound ----------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("llama_memory_seq_cp", "llama_kv_self_seq_cp"),
            "has no `llama_memory_seq_cp`: llama.cpp has it since June 2025 (pull request 14006)",
        ),
        (("kv_unified;", "kv_split;"), "has no `kv_unified`: llama.cpp has it since July 2025 (pull request 14363)"),
        (("llama_batch {", "llama_bunch {"), "has no `struct llama_batch`: this is no llama.cpp that statedrift knows"),
        (("double ", "doubtful "), "do not compile as statedrift needs them: "),
        # the library is of other headers than these
        (("double                     of_the_fork;", "int64_t of[7];"), "is not of the version of its headers"),
        (("void llama_backend_init(void);", "void llama_backend_init(void); void llama_extra(void);"), ""),
    ],
)
def test_headers_that_do_not_fit_are_said(trees: SimpleNamespace, tmp_path: Path, change: tuple[str, str], words: str) -> None:
    includes = shutil.copytree(trees.young / "all", tmp_path / "headers")
    code = (includes / "llama.h").read_text()
    assert change[0] in code
    (includes / "llama.h").write_text(code.replace(*change))
    library = trees.young / "build" / "bin" / llama_builds.FILE_NAME
    answer = asked("answer = ''", trees.cache, **{INCLUDE: str(includes), LIBRARY: str(library)})
    assert words in answer
    assert bool(answer) == bool(words)


@needs_compiler
def test_a_library_that_is_older_than_its_headers_is_said(trees: SimpleNamespace) -> None:
    library = trees.old / "build" / "bin"
    answer = asked("answer = 0", trees.cache, **{INCLUDE: str(trees.young / "all"), LIBRARY: str(library)})
    assert "which its headers declare: headers and library" in answer
    assert "build the library again" in answer


@needs_compiler
def test_without_a_compiler_it_is_said_what_to_install(trees: SimpleNamespace, tmp_path: Path) -> None:
    answer = asked("answer = 0", tmp_path, PATH=str(tmp_path), CC="no-such-compiler", **{FOLDER: str(trees.young)})
    assert "needs a C compiler" in answer
    assert "build-essential" in answer


@needs_compiler
def test_a_library_that_does_not_load_is_said(trees: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "libllama.so").write_text("no library")
    answer = asked("answer = 0", trees.cache, **{INCLUDE: str(trees.young / "all"), LIBRARY: str(tmp_path / "libllama.so")})
    assert f"{tmp_path / 'libllama.so'} does not load: " in answer


# --- where a build is ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (FOLDER, INCLUDE, LIBRARY):
        monkeypatch.setenv(name, "")
    return monkeypatch


def touched(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")


def test_nothing_asked_for_is_the_installed_one(no_build: pytest.MonkeyPatch) -> None:
    assert asked_build() is None


@pytest.mark.parametrize("place", ["build/bin", "build/src", "build-cpu/bin", "lib", "lib64", "bin"])
def test_the_usual_places_are_looked_at(no_build: pytest.MonkeyPatch, tmp_path: Path, place: str) -> None:
    library = tmp_path / place / llama_builds.FILE_NAME
    ggml = tmp_path / ("ggml/include" if place.startswith("build") else "include") / "ggml.h"
    touched(tmp_path / "include" / "llama.h", ggml, library)
    no_build.setenv(FOLDER, str(tmp_path))
    build = asked_build()
    assert build is not None
    assert build.library == library
    assert build.includes == tuple(dict.fromkeys((tmp_path / "include", ggml.parent)))
    for name in (library, library.parent):  # the library alone: its headers are found above it
        no_build.setenv(FOLDER, "")
        no_build.setenv(LIBRARY, str(name))
        assert asked_build() == build


def test_a_tree_without_headers_or_build_and_one_with_several_are_said(no_build: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_build.setenv(FOLDER, str(tmp_path))
    with pytest.raises(UnavailableError, match=r"has no include/llama\.h"):
        asked_build()
    touched(tmp_path / "include" / "llama.h", tmp_path / "ggml" / "include" / "ggml.h")
    with pytest.raises(UnavailableError, match="cmake --build build --target llama"):
        asked_build()
    touched(*(tmp_path / f"build-{word}" / "bin" / llama_builds.FILE_NAME for word in ("a", "b")))
    with pytest.raises(UnavailableError, match="has several builds"):
        asked_build()
    touched(tmp_path / "build" / "bin" / llama_builds.FILE_NAME)
    assert asked_build() is not None


def test_a_build_asked_for_in_two_ways_or_half_is_a_usage_error(no_build: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_build.setenv(INCLUDE, str(tmp_path))
    with pytest.raises(UsageError, match="names headers alone"):
        asked_build()
    no_build.setenv(FOLDER, str(tmp_path))
    with pytest.raises(UsageError, match="names a whole tree"):
        asked_build()


def test_the_environment_of_another_build_says_nothing_of_ours(no_build: pytest.MonkeyPatch, tmp_path: Path) -> None:
    touched(tmp_path / "include" / "llama.h", tmp_path / "include" / "ggml.h", tmp_path / "lib" / llama_builds.FILE_NAME)
    assert environment_of("llama-cpp-python") == {FOLDER: "", INCLUDE: "", LIBRARY: ""}
    assert environment_of(str(tmp_path)) == {FOLDER: str(tmp_path), INCLUDE: "", LIBRARY: ""}
    library = tmp_path / "lib" / llama_builds.FILE_NAME
    assert environment_of(str(library)) == {FOLDER: "", INCLUDE: "", LIBRARY: str(library)}
    with pytest.raises(UsageError, match="there is no build"):
        environment_of(str(tmp_path / "nowhere"))


# --- on the command line ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--llama-dir", "nowhere"], "nowhere"),
        (["--llama-dir", ".", "--llama-lib", "."], "it goes without --llama-include and --llama-lib"),
    ],
)
@pytest.mark.parametrize("command", [["targets"], ["doctor"], ["replay", "model lfm2", "--target", "llamacpp"], ["bench", "throughput"]])
def test_a_build_that_is_not_there_is_a_usage_error(
    no_build: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str], options: list[str], words: str
) -> None:
    assert run([*command, *options]) == 64
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_the_command_line_wins_and_replay_lines_say_the_build(no_build: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_build.setenv(LIBRARY, "/another/library")
    assert run(["replay", "model lfm2; decode 0:1", "--target", "llamacpp", "--llama-dir", str(tmp_path)]) == 2
    assert os.environ[LIBRARY] == ""
    assert build_words("llamacpp") == f" --llama-dir {tmp_path}"
    assert build_words("numba", "llamacpp") == f" --llama-dir {tmp_path}"
    assert build_words("numba") == ""
