"""Files that are either written whole or not at all.

Rules
- A link is followed, and a file that is there keeps its mode. What is no file (a device, a pipe) is written to as it is, never replaced.
"""

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..spec.errors import UsageError

NEW_MODE = 0o644


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path`, making its folder, through a temporary file beside it. Raises UsageError when that cannot be done."""
    try:
        path = Path(os.path.realpath(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
            return
        mode = stat.S_IMODE(path.stat().st_mode) if path.is_file() else NEW_MODE
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.chmod(name, mode)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another place") from None


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """While it lasts nobody else who asks for it changes files of a folder: one after the other reads, changes and writes.

    Raises UsageError when there is no such folder.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{folder} cannot be used: {error.strerror}; choose another place") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def check_writable(path: Path) -> None:
    """Raise UsageError when a file could not be written to `path`, before the work for it is done. Nothing is left behind."""
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another place") from None
