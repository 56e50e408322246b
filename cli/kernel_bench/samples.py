"""How long something takes on a machine that is shared.

Rules
- A time is the least of many short samples: what else runs only ever adds.
- What runs on one thread is timed by the time that a core worked on it, what runs on two by the clock.
- A sample during which the system took the processor away counts only when there is no other: it comes back to emptied caches.
- What is compared is sampled in turn, a few milliseconds at a time: what a shared machine gives changes within seconds.
"""

import resource
from collections.abc import Callable, Sequence
from time import perf_counter, thread_time
from typing import NamedTuple

from .results import Timing

CLEAN_SAMPLES = 12
"""With so many samples without an involuntary context switch no more are taken."""
SAMPLES_MIN = 2
TURN_SECONDS = 0.002

Run = Callable[[], object]


class Job(NamedTuple):
    """Something to time, and how many threads it keeps busy."""

    run: Run
    threads: int = 1


def timed(run: Run, seconds: float) -> Timing:
    """Time `run` alone, on one thread, as `timed_in_turn`."""
    return timed_in_turn((Job(run),), seconds)[0]


def timed_in_turn(jobs: Sequence[Job], seconds: float) -> list[Timing]:
    """Run each of `jobs` once to warm up, then all in turn, again and again: for at most `seconds`, but at least `SAMPLES_MIN` times.

    In its turn a job is sampled once, or for `TURN_SECONDS`: what is short has to be sampled often to be seen undisturbed.
    """
    every: list[list[float]] = [[] for _ in jobs]
    clean: list[list[float]] = [[] for _ in jobs]
    for job in jobs:
        job.run()
    started = perf_counter()
    while min(map(len, every)) < SAMPLES_MIN or (min(map(len, clean)) < CLEAN_SAMPLES and perf_counter() - started < seconds):
        for job, own, own_clean in zip(jobs, every, clean, strict=True):
            turn_ends = perf_counter() + TURN_SECONDS
            while True:
                elapsed, is_clean = _sample(job)
                own.append(elapsed)
                if is_clean:
                    own_clean.append(elapsed)
                if perf_counter() >= turn_ends:
                    break
    return [Timing(min(own_clean or own), len(own), len(own_clean)) for own, own_clean in zip(every, clean, strict=True)]


def _sample(job: Job) -> tuple[float, bool]:
    """How long one run takes, and whether nothing took the processor away."""
    clock = thread_time if job.threads == 1 else perf_counter
    switches = _switches()
    before = clock()
    job.run()
    elapsed = clock() - before
    return elapsed, _switches() == switches


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
