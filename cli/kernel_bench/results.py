"""What a run measured, as data: it travels from the measuring process to the command as JSON.

Rules
- Times in seconds. A time is the least of its samples.
"""

from typing import Literal

import msgspec

What = Literal["prefill", "decode in place", "decode to another row", "cached in place", "cached to another row", "snapshots"]
"""Of what a row is: 512 tokens of one sequence; a token of every sequence, with a state larger than the caches, written where it was read or
to another row; tokens one by one of a sequence whose state stays in the caches; a batch of 4 tokens whose states are all kept."""


class Timing(msgspec.Struct, frozen=True):
    """The least of `samples` samples; clean: how many had no involuntary context switch. With one clean or more, only those count."""

    seconds: float
    samples: int
    clean: int


class Peer(msgspec.Struct, frozen=True):
    """Another implementation of the same row.

    timing   None when it was not measured
    error    largest difference to our result, as a share of that result's rms; None when it was not measured
    missing  why it was not measured, "" when it was
    """

    name: str
    timing: Timing | None = None
    error: float | None = None
    missing: str = ""


class Row(msgspec.Struct, frozen=True):
    """One measured figure.

    size           in words, as in "64 heads x 64 x 128"
    threads        how many worked on it
    elements       state elements that one token changes, times tokens: what the time is divided by for a figure that compares
    limit          what bounds it, in words
    limit_seconds  how long it would take at that limit
    """

    kernel: str
    size: str
    what: What
    threads: int
    elements: int
    timing: Timing
    limit: str
    limit_seconds: float
    peers: tuple[Peer, ...] = ()

    @property
    def share(self) -> float:
        """Of the limit."""
        return self.limit_seconds / self.timing.seconds


class Limit(msgspec.Struct, frozen=True):
    """What the processor can do: the least and the largest of what was measured over the run."""

    name: str
    unit: str
    least: float
    most: float


class Exactness(msgspec.Struct, frozen=True):
    """One kernel's promise: results compared bit for bit, how many differed, and the error of the plain run against float64 (rms, relative)."""

    kernel: str
    compared: int
    differing: int
    error: float


class Growth(msgspec.Struct, frozen=True):
    """Error against float64 after so many tokens: rms over the last tenth of them, relative to the rms of the truth there."""

    kernel: str
    decays: str
    tokens: tuple[int, ...]
    errors: tuple[float, ...]


class FirstCall(msgspec.Struct, frozen=True):
    """Seconds that the first decode of a process takes, beyond a second one: with nothing compiled before, and with all on disk (the least of some)."""

    family: str
    cold: float
    warm: float


class Results(msgspec.Struct, frozen=True):
    """All of one run. gaps: one line on each thing that could not be measured; facts: of the machine."""

    short: bool
    limits: tuple[Limit, ...]
    rows: tuple[Row, ...]
    exactness: tuple[Exactness, ...]
    growth: tuple[Growth, ...]
    first_call: FirstCall | None
    gaps: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
