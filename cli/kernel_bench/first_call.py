"""How long the first decode of a process takes: with every kernel still to be compiled, and with all of them on disk.

Rules
- A process of its own for each time, with an empty folder for Numba's compiled code that the first one fills.
- What is not a matter of kernels (importing, drawing weights) is done before the clock starts, and what a second decode takes is taken off.
Source: `python -m statedrift.cli.kernel_bench.first_call FAMILY` is what those processes run.
"""

import os
import subprocess
import sys
import tempfile
from time import process_time

from ...spec.errors import UnavailableError
from .results import FirstCall

WARM_STARTS = 3
_SECONDS_MAX = 600


def first_call(family: str) -> FirstCall:
    """Measure one family. Raises UnavailableError when a process fails."""
    with tempfile.TemporaryDirectory() as folder:
        times = [_one(family, folder) for _ in range(1 + WARM_STARTS)]
    return FirstCall(family, times[0], min(times[1:]))


def _one(family: str, folder: str) -> float:
    command = [sys.executable, "-m", __spec__.name, family]
    try:
        done = subprocess.run(
            command, env=os.environ | {"NUMBA_CACHE_DIR": folder}, capture_output=True, text=True, timeout=_SECONDS_MAX, check=True
        )
        return float(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UnavailableError(f"the first call of {family} could not be timed: {error}") from error


def _measure(family: str) -> float:
    """Seconds of the first decode beyond those of the second."""
    import numpy as np

    from ...spec.configuration import CacheConfiguration
    from ...spec.models import Model
    from ...spec.target import Batch
    from ...targets.numba import TARGET

    session = TARGET.open(Model(family), CacheConfiguration())
    times = []
    for position in range(2):
        batch = Batch(np.array([1], np.int32), np.array([position], np.int32), ((0,),), np.ones(1, bool), "all")
        before = process_time()
        session.decode(batch)
        times.append(process_time() - before)
    session.close()
    return times[0] - times[1]


if __name__ == "__main__":
    print(_measure(sys.argv[1]))
