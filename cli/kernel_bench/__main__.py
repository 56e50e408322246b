"""The measuring process: `python -m statedrift.cli.kernel_bench FILE full|short` measures and writes what it measured to a file, as JSON."""

import sys
from pathlib import Path

import msgspec

from ..failures import OK, status_of_failure
from .measuring import full, measure, short


def main(arguments: list[str]) -> int:
    """Measure, and write; the answer is the exit status."""
    file, effort = arguments
    try:
        Path(file).write_bytes(msgspec.json.encode(measure(short() if effort == "short" else full())))
    except (Exception, KeyboardInterrupt) as error:
        return status_of_failure(error)
    return OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
