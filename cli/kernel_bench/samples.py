"""How long something takes on a machine that is shared.

Rules
- A time is the least of many short samples: what else runs only ever adds.
- A sample during which the system took the processor away counts only when there is no other.
"""

import resource
from collections.abc import Callable
from time import perf_counter

from .results import Timing

CLEAN_SAMPLES = 8
"""With so many samples without an involuntary context switch no more are taken."""


def timed(run: Callable[[], object], seconds: float, samples_min: int = 2, clean_samples: int = CLEAN_SAMPLES) -> Timing:
    """Call `run` once to warm up, then again and again: for at most `seconds`, but at least `samples_min` times."""
    run()
    every: list[float] = []
    clean: list[float] = []
    started = perf_counter()
    while len(every) < samples_min or (len(clean) < clean_samples and perf_counter() - started < seconds):
        switches = _switches()
        before = perf_counter()
        run()
        elapsed = perf_counter() - before
        every.append(elapsed)
        if _switches() == switches:
            clean.append(elapsed)
    return Timing(min(clean or every), len(every), len(clean))


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
