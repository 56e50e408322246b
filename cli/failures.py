"""Exit statuses, and how a failure becomes one line on standard error.

Rules
- 0: nothing wrong; 1: a divergence; 2: could not test; 64: what was given cannot be used; 70: a fault of statedrift; 130: interrupted.
- What the operating system refuses (a name too long, a full disk) is a line, too.
- A traceback is shown only for a fault of statedrift, and only when STATEDRIFT_DEBUG is 1.
"""

import errno
import os
import sys
import traceback

from ..spec.errors import UnavailableError, UsageError
from .output import visible

OK = 0
DIVERGENCE = 1
COULD_NOT_TEST = 2
USAGE = 64
FAULT = 70
INTERRUPTED = 130
_MESSAGE_CHARACTERS_MAX = 2000


def complain(message: str) -> None:
    """Write one line, "statedrift: message", on standard error."""
    if sys.stderr is None:  # closed by whoever started us
        return
    line = visible(" ".join(message.split()))
    print(f"statedrift: {line[:_MESSAGE_CHARACTERS_MAX]}", file=sys.stderr)


def status_of_failure(error: BaseException) -> int:
    """Say what went wrong on standard error; the answer is the exit status."""
    match error:
        case UsageError():
            complain(str(error))
            return USAGE
        case UnavailableError():
            complain(str(error))
            return COULD_NOT_TEST
        case OSError():
            place = f"{error.filename}: " if error.filename else ""
            complain(f"{place}{error.strerror or error}")
            return USAGE if error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP) else COULD_NOT_TEST
        case KeyboardInterrupt():
            complain("interrupted")
            return INTERRUPTED
        case _:
            return _status_of_fault(error)


def _status_of_fault(error: BaseException) -> int:
    if os.environ.get("STATEDRIFT_DEBUG") == "1":
        traceback.print_exception(error)
        way_out = "please report it with the traceback above"
    else:
        way_out = "please report it, with what STATEDRIFT_DEBUG=1 shows"
    complain(f"internal fault: {type(error).__name__}: {error}; {way_out}")
    return FAULT
