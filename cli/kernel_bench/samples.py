"""How long something takes on a machine that is shared.

Rules
- A time is the least of many short samples: what else runs only ever adds.
- A sample during which the system took the processor away counts only when there is no other.
- What is compared is sampled in turn, one sample of each at a time: what a shared machine gives changes within seconds.
"""

import resource
from collections.abc import Callable, Sequence
from time import perf_counter

from .results import Timing

CLEAN_SAMPLES = 12
"""With so many samples without an involuntary context switch no more are taken."""
SAMPLES_MIN = 2

Run = Callable[[], object]


def timed(run: Run, seconds: float) -> Timing:
    """Time `run` alone, as `timed_in_turn`."""
    return timed_in_turn((run,), seconds)[0]


def timed_in_turn(runs: Sequence[Run], seconds: float) -> list[Timing]:
    """Call each of `runs` once to warm up, then all in turn, again and again: for at most `seconds`, but at least `SAMPLES_MIN` times."""
    every: list[list[float]] = [[] for _ in runs]
    clean: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    started = perf_counter()
    while len(every[0]) < SAMPLES_MIN or (min(map(len, clean)) < CLEAN_SAMPLES and perf_counter() - started < seconds):
        for run, own, own_clean in zip(runs, every, clean, strict=True):
            switches = _switches()
            before = perf_counter()
            run()
            elapsed = perf_counter() - before
            own.append(elapsed)
            if _switches() == switches:
                own_clean.append(elapsed)
    return [Timing(min(own_clean or own), len(own), len(own_clean)) for own, own_clean in zip(every, clean, strict=True)]


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
