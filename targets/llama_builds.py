"""Which build of llama.cpp is driven: llama-cpp-python's, or that of somebody's own source tree.

Rules
- It is said in environment variables, which the options of the command line set: whatever is started, by whomever, drives the same build.
  An empty variable says nothing.
- A folder is a source tree with its build, or where one was installed: the headers and the library are looked for in the usual places.
- Headers and library belong together; where headers are not given, they are those of the tree or folder that the library lies in.
"""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..spec.errors import UnavailableError, UsageError

FOLDER, INCLUDE, LIBRARY = "STATEDRIFT_LLAMA_DIR", "STATEDRIFT_LLAMA_INCLUDE", "STATEDRIFT_LLAMA_LIB"
"""The environment variables: a tree; or a folder with llama.h, and the library or its folder."""
INSTALLED = "llama-cpp-python"
"""The word for the library that llama-cpp-python installs, where another build is asked for by a path."""
FILE_NAME = "libllama.dylib" if sys.platform == "darwin" else "libllama.so"
_LIBRARY_FOLDERS = ("bin", "src", "lib", "lib64", ".")
_PARENTS_MAX = 4


class Build(msgspec.Struct, frozen=True):
    """Where a build is.

    includes  folders of llama.h and of what it includes
    library   the file
    """

    includes: tuple[Path, ...]
    library: Path


def asked_build() -> Build | None:
    """The build that the environment asks for; None: llama-cpp-python's.

    Raises UsageError when it is asked for in two ways, UnavailableError when it is not there.
    """
    folder, include, library = (os.environ.get(name, "") for name in (FOLDER, INCLUDE, LIBRARY))
    if folder and (include or library):
        raise UsageError(f"{FOLDER} names a whole tree; unset it, or {INCLUDE} and {LIBRARY}")
    if folder:
        return Build(_includes_of(_absolute(folder)), _library_in(_absolute(folder)))
    if library:
        file = _library_in(_absolute(library)) if Path(library).is_dir() else _absolute(library)
        if not file.is_file():
            raise UnavailableError(f"target llamacpp is not available: there is no library {library}")
        return Build(_includes_of(_absolute(include)) if include else _includes_above(file), file)
    if include:
        raise UsageError(f"{INCLUDE} names headers alone; give the library that belongs to them, too ({LIBRARY})")
    return None


def environment_of(place: str) -> dict[str, str]:
    """The environment of a process that is to drive the build at `place`: a tree, a library, or INSTALLED. Raises UsageError when nothing is there."""
    if place == INSTALLED:
        return {FOLDER: "", INCLUDE: "", LIBRARY: ""}
    path = _absolute(place)
    if path.is_dir() and _has_headers(path):
        return {FOLDER: str(path), INCLUDE: "", LIBRARY: ""}
    if path.exists():
        return {FOLDER: "", INCLUDE: "", LIBRARY: str(path)}
    raise UsageError(f"there is no build of llama.cpp at {place}; name a source tree with its build, a library, or {INSTALLED}")


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _has_headers(folder: Path) -> bool:
    return bool(_include_folders(folder))


def _include_folders(folder: Path) -> tuple[Path, ...]:
    """The folders with llama.h and ggml.h of a tree, of where one was installed, or that are given themselves; () when they are not there."""
    for base in (folder / "include", folder):
        if (base / "llama.h").is_file():
            ggml = next((other for other in (base, base.parent / "ggml" / "include") if (other / "ggml.h").is_file()), None)
            if ggml is not None:
                return tuple(dict.fromkeys((base, ggml)))
    return ()


def _includes_of(folder: Path) -> tuple[Path, ...]:
    found = _include_folders(folder)
    if not found:
        raise UnavailableError(
            f"target llamacpp is not available: {folder} has no include/llama.h with its ggml.h; "
            "name a source tree of llama.cpp (--llama-dir), or the folder of its headers (--llama-include)"
        )
    return found


def _includes_above(library: Path) -> tuple[Path, ...]:
    """The headers of the tree or folder that a library lies in."""
    for folder in list(library.resolve().parents)[:_PARENTS_MAX]:
        if found := _include_folders(folder):
            return found
    raise UnavailableError(
        f"target llamacpp is not available: no folder above {library} has include/llama.h; name its tree, or say where its headers are (--llama-include DIR)"
    )


def _library_in(folder: Path) -> Path:
    """The library in a tree, a folder of a build, or where one was installed; `build` comes before other folders of builds."""
    for place in (folder, folder / "build"):
        if found := _library_at(place):
            return found
    others = [library for place in sorted(folder.glob("build*")) if (library := _library_at(place))]
    if len(others) > 1:
        raise UnavailableError(
            f"target llamacpp is not available: {folder} has several builds: {', '.join(map(str, others))}; "
            "name one (--llama-include DIR --llama-lib FILE)"
        )
    if not others:
        raise UnavailableError(
            f"target llamacpp is not available: {folder} has no {FILE_NAME} in build/bin or another usual place; build it with "
            "`cmake -B build -DBUILD_SHARED_LIBS=ON && cmake --build build --target llama`, or name the library (--llama-lib FILE)"
        )
    return others[0]


def _library_at(folder: Path) -> Path | None:
    places: Iterable[Path] = (folder / name / FILE_NAME for name in _LIBRARY_FOLDERS)
    return next((path for path in places if path.is_file()), None)


def stated_build(build: Build) -> tuple[str, ...]:
    """What the build's folder says of itself, e.g. ("build 6789", "commit 1a2b3c4"); () when it says nothing."""
    for folder in list(build.library.parents)[:_PARENTS_MAX]:
        path = folder / "llama-config.cmake"
        if path.is_file():
            words = dict(re.findall(r"set\(LLAMA_BUILD_(NUMBER|COMMIT)\s+(\w+)\)", path.read_text(errors="replace")))
            number, commit = words.get("NUMBER", "0"), words.get("COMMIT", "unknown")
            return (*([f"build {number}"] if number != "0" else []), *([f"commit {commit}"] if commit != "unknown" else []))
    return ()
