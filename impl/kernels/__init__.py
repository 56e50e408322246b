"""Numba kernels for the CPU: what a model computes, one module-level function each.

Rules
- Every kernel is a module-level function under `@kernel`: cached on disk, without the GIL, and without fast-math. The order of every sum
  is written out, and runs within one token: bitwise the same for every split of a batch, every order of sequences, and every way the
  compiler takes. (A sum that the compiler may reorder was tried: one kernel then gave other bits when it was read from the cache on
  disk than when it had just been compiled.) So that loops still vectorise, the inner loop runs over outputs, never over a sum.
- A kernel writes only into the arrays its last arguments name, and checks nothing: a cache planned its rows before.
- Memory that nothing wrote may hold NaN: it is overwritten, never multiplied.

Numba's cache on disk looks only at the file of the function itself, so a function that calls a kernel of another file would go on
with that kernel's old code after an edit. `discard_stale_code`, run on import, removes compiled code when any source that
holds kernels, or a constant of a family, has changed.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from numba import njit

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def kernel(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Compile a module-level function with the options of every kernel."""
    return cast("Callable[Arguments, Result]", njit(cache=True, nogil=True, error_model="numpy")(function))


def inner_kernel(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """As `kernel`, for what only kernels call: Python cannot, and so compiling takes less time."""
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # real options that njit's annotations leave out
    return cast("Callable[Arguments, Result]", njit(cache=True, nogil=True, error_model="numpy", **options)(function))


_STAMP = "statedrift-sources.blake2b"
_CONSTANT = re.compile(rb"^[A-Z][A-Z0-9_]* = .*$", re.MULTILINE)
_HERE = Path(__file__).parent


def discard_stale_code(folders: tuple[Path, ...], constants: tuple[Path, ...] = ()) -> bool:
    """Remove Numba's compiled code beside the sources in `folders` unless it was made from them as they are; say whether it was removed.

    constants  files whose module-level constants (NAME = ...) are compiled into kernels that import them
    What was compiled into another place (NUMBA_CACHE_DIR) is left alone. A folder that cannot be written is left as it is.
    """
    digest = hashlib.blake2b(digest_size=16)
    for source in sorted(source for folder in folders for source in folder.glob("*.py")):
        text = source.read_bytes()
        if b"kernel\ndef " in text:
            digest.update(text)
    for source in constants:
        digest.update(b"\n".join(_CONSTANT.findall(source.read_bytes())))
    compiled = folders[0] / "__pycache__"
    stamp = compiled / _STAMP
    with contextlib.suppress(OSError):
        if stamp.read_text() == digest.hexdigest():
            return False
    with contextlib.suppress(OSError):
        for folder in folders:
            for suffix in ("nbi", "nbc"):  # the index first: what no index names is read by nobody
                for stale in (folder / "__pycache__").glob(f"*.{suffix}"):
                    stale.unlink(missing_ok=True)
        compiled.mkdir(exist_ok=True)
        stamp.write_text(digest.hexdigest())
        return True
    return False


discard_stale_code((_HERE, _HERE.parent), tuple(sorted((_HERE.parent.parent / "spec" / "families").glob("*.py"))))
