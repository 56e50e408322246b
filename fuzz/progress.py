"""Where a campaign is: what it tells as it goes, and a beat that passes it on every ten seconds, whatever the campaign is at.

Rules
- The beat has a thread of its own: it comes also while a kernel is compiled, a long reduction runs, or a worker is waited for.
- Durations are of a monotonic clock; the time of day decides nothing.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from time import monotonic

import msgspec

from ..store.statistics import Statistics

BEAT_SECONDS = 10.0
FIRST_BEAT_SECONDS = 5.0
"""The first beat comes sooner: whoever waits wants to see that something is going on."""


class Progress(msgspec.Struct, frozen=True):
    """Where a campaign is; told after every shard and every step of a reduction.

    seconds         since fuzzing began
    findings        signatures; findings_known: of them, those of a baseline
    crashes         programs that ended in a crash or a hang
    jobs            processes that take part
    """

    seconds: float
    programs: int
    operations: int
    accepted_share: float
    findings: int
    last_finding_seconds: float | None
    unknown: int
    phase: str
    findings_known: int = 0
    crashes: int = 0
    jobs: int = 1


class Watch:
    """What was told last, as statistics at any moment."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._told: Progress | None = None
        self._programs_before = 0
        self._first_program: float | None = None
        self._last_find: float | None = None

    def tell(self, progress: Progress) -> None:
        """Take note of where the campaign is."""
        told = self._told
        if told is None:
            self._programs_before = progress.programs
        elif progress.findings > told.findings:
            self._last_find = self._clock()
        if self._first_program is None and progress.phase not in ("starting", "noise"):
            self._first_program = self._clock()
        self._told = progress

    def statistics(self, phase: str | None = None, complete: bool = False) -> Statistics:
        """The statistics of now; `phase` in place of the one that was told."""
        now = self._clock()
        told = self._told or Progress(0.0, 0, 0, 0.0, 0, None, 0, "starting")
        seconds = 0.0 if self._first_program is None else now - self._first_program
        rate = (told.programs - self._programs_before) / seconds if seconds > 0 else 0.0
        return Statistics(
            elapsed=round(now - self._started, 1),
            programs=told.programs,
            programs_per_second=round(rate, 1),
            accepted_percent=round(100 * told.accepted_share, 1),
            findings_new=told.findings - told.findings_known,
            findings_known=told.findings_known,
            crashes=told.crashes,
            unknown=told.unknown,
            seconds_since_last_find=None if self._last_find is None else round(now - self._last_find, 1),
            jobs=told.jobs,
            phase=phase or told.phase,
            complete=complete,
        )


@contextlib.contextmanager
def beating(beat: Callable[[], object], first_seconds: float, seconds: float) -> Iterator[None]:
    """Call `beat` from a thread after `first_seconds`, and then every `seconds`; a beat that is late does not delay the next."""
    is_over = threading.Event()
    started = monotonic()

    def go() -> None:
        due = started + first_seconds
        while not is_over.wait(max(0.0, due - monotonic())):
            beat()
            while due <= monotonic():
                due += seconds

    thread = threading.Thread(target=go, daemon=True, name="statedrift-beat")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
