"""Text on standard output: colour on a terminal, the same text without it in a pipe.

Rules
- Colour says only what the text says already; NO_COLOR and TERM=dumb turn it off.
- Control characters that come with given texts or files are shown as escapes: they never reach a terminal.
- With `--json` nothing but the object reaches standard output, whatever a native library writes.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ..spec.errors import UsageError

_RESET = "\x1b[0m"
_BOLD = "\x1b[1m"
_RED = "\x1b[31m"
_HEADING = re.compile(
    r"(?:\d+ )?(?:wrong-output|wrong-state|wrong-position|bad-refusal|false-success|partial-effect|nonfinite|crash|hang)(?= · )"
)
_MARKED = re.compile(r" {0,2}> ")


def visible(text: str) -> str:
    """The text with every control character but the line end as an escape."""
    return text if text.replace("\n", "").isprintable() else "".join(c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text)


def wants_colour() -> bool:
    """Whether standard output is a terminal that takes colour."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str) -> str:
    """The text with the kinds of divergences in bold, and the operations at which they part in red."""
    lines = []
    for line in text.split("\n"):
        if _MARKED.match(line):
            lines.append(f"{_RED}{line}{_RESET}")
        else:
            lines.append(_HEADING.sub(lambda match: f"{_BOLD}{_RED}{match.group()}{_RESET}", line, count=1) if line[:1].strip() else line)
    return "\n".join(lines)


def say(text: str, plain: bool = False) -> None:
    """Write a text that ends in a line end to standard output. That nobody reads it any more changes no exit status.

    plain  never coloured: data
    """
    if sys.stdout is None:  # closed by whoever started us
        return
    if not plain:
        text = painted(visible(text)) if wants_colour() else visible(text)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)  # the interpreter's last flush must have somewhere to go
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def check_file(option: str, path: Path | None) -> None:
    """Raise UsageError for a file that cannot be written at the end of a long run because there is no folder for it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir() or str(path) == "-"):
        raise UsageError(f"{option} {path}: give a file in a folder that exists")


def write_file(option: str, path: Path, text: str) -> None:
    """Write a text file that was asked for with an option. Raises UsageError when it cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from error


@contextlib.contextmanager
def standard_output_reserved() -> Iterator[None]:
    """While it lasts, whatever is written to file descriptor 1 goes to standard error."""
    if sys.stdout is None:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
