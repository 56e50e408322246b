"""The options that name a build of llama.cpp, for every command that drives one.

Rules
- They set the environment variables of targets/llama_builds.py, so that every process that is started drives the same build; on the command
  line they win over what the environment says.
- What they name is there, or it is a usage error; whether it can be used is found out when it is.
"""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..targets.llama_builds import FOLDER, INCLUDE, LIBRARY

_OPTIONS = {FOLDER: "--llama-dir", INCLUDE: "--llama-include", LIBRARY: "--llama-lib"}


def _asking(variable: str) -> Callable[[typer.Context, Path | None], Path | None]:
    """The callback of an option: its value becomes that of the variable; variables of options that are not given are emptied."""

    def ask(context: typer.Context, value: Path | None) -> Path | None:
        if value is not None:
            given: dict[str, str] = context.meta.setdefault(__name__, {})
            given[variable] = str(value)
            if FOLDER in given and len(given) > 1:
                raise typer.BadParameter("--llama-dir names a whole tree; it goes without --llama-include and --llama-lib")
            os.environ.update({name: given.get(name, "") for name in _OPTIONS})
        return value

    return ask


LlamaDirOption = Annotated[
    Path | None,
    typer.Option(
        "--llama-dir", metavar="DIR", help="Drive the build of this llama.cpp source tree.",
        exists=True, file_okay=False, resolve_path=True, callback=_asking(FOLDER),
    ),
]  # fmt: skip
LlamaIncludeOption = Annotated[
    Path | None,
    typer.Option(
        "--llama-include", metavar="DIR", help="The folder with llama.h of the library given by --llama-lib.",
        exists=True, file_okay=False, resolve_path=True, callback=_asking(INCLUDE),
    ),
]  # fmt: skip
LlamaLibOption = Annotated[
    Path | None,
    typer.Option(
        "--llama-lib", metavar="FILE", help="Drive this library of llama.cpp, or the one in this folder.",
        exists=True, resolve_path=True, callback=_asking(LIBRARY),
    ),
]  # fmt: skip


def build_words(*target_names: str | None) -> str:
    """What a command that replays a program has to say of the build that is driven now, with a space before it; "" where that is
    llama-cpp-python's, or none of the targets is llama.cpp."""
    if not any("llamacpp" in (name or "") for name in target_names):
        return ""
    return "".join(f" {option} {shlex.quote(os.environ[name])}" for name, option in _OPTIONS.items() if os.environ.get(name))
