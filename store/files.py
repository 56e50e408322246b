"""Files that are either written whole or not at all."""

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
