"""Files that are either written whole or not at all."""

import errno
import os
import tempfile
from pathlib import Path

from ..spec.errors import UsageError


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path`, making its folder, through a temporary file beside it. Raises UsageError when that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another place") from None


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
