"""Which llama.cpp library this process has: the build that was asked for, else the one that llama-cpp-python installs.

Rules
- One library a process, loaded once.
- Its maker is imported only when it is needed: one asks for a package, the other for a compiler.
"""

import functools
import os

from .llama_builds import asked_build
from .llama_library import Library


@functools.cache
def load_library() -> Library:
    """The library of this process, checked and silenced: the build that was asked for (llama_builds.py), else llama-cpp-python's.

    Raises UnavailableError when there is none, or it does not fit what describes it; UsageError when it was asked for in two ways.
    """
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # an escaped C++ exception does not pass through the abort callback
    build = asked_build()
    if build is None:
        from .llama_installed import installed_library

        return installed_library()
    from .llama_tree import TreeLibrary

    return TreeLibrary(build)
