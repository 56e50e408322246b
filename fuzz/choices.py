"""Choices: the one source of chance that programs are made from.

Rules
- A generator asks only `Choices`; where the answers come from (a seed, Hypothesis) is not its business.
- The first or lowest answer is always the simplest one, so that whoever reduces choices reduces programs.
- `SeededChoices` gives the same answers on every machine and Python version: it uses `random.Random.random()` alone, whose
  series for a seed Python guarantees.
Source: swarm weights after Groce et al. 2012 ("Swarm testing").
"""

import hashlib
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Option = TypeVar("Option")

SWARM_WEIGHT_MAX = 100
_OFF_PERCENTS = (10, 30, 50, 70, 85)


class Choices(Protocol):
    """What a generator may ask."""

    def integer(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included; simplest is `low`."""
        ...

    def chance(self, percent: int) -> bool:
        """True in about `percent` of 100 cases; simplest is False."""
        ...

    def leans(self, percent: int) -> bool:
        """As `chance`, where False allows every answer that True does: it only says how often. May be False always."""
        ...

    def pick(self, options: Sequence[Option]) -> Option:
        """One of the options, each equally likely (repeat one to favour it); simplest is the first."""
        ...

    def weighted(self, cumulative: Sequence[int]) -> int:
        """An index of `cumulative`, the running sums of weights of which the last is at least 1; simplest is the first with a weight."""
        ...

    def swarm(self, count: int) -> list[int]:
        """A weight for each of `count` features: 0 (off) or 1..100; simplest is all of them on, alike."""
        ...

    def repeat(self, step: Callable[[], bool], fewest: int, average: int, most: int) -> None:
        """Call `step` some times, about `average`, until it returns False; simplest is the fewest."""
        ...


class SeededChoices:
    """Choices that are a pure function of a seed; made for speed."""

    __slots__ = ("_random",)

    def __init__(self, seed: int, purpose: str) -> None:
        digest = hashlib.blake2b(f"{purpose},{seed}".encode(), digest_size=16).digest()
        self._random = random.Random(int.from_bytes(digest, "little")).random

    def integer(self, low: int, high: int) -> int:
        return low + int(self._random() * (high - low + 1))

    def chance(self, percent: int) -> bool:
        return self._random() * 100 < percent

    def leans(self, percent: int) -> bool:
        return self._random() * 100 < percent

    def pick(self, options: Sequence[Option]) -> Option:
        return options[int(self._random() * len(options))]

    def weighted(self, cumulative: Sequence[int]) -> int:
        return bisect_right(cumulative, int(self._random() * cumulative[-1]))

    def swarm(self, count: int) -> list[int]:
        off_percent = self.pick(_OFF_PERCENTS)
        return [0 if self.chance(off_percent) else self.integer(1, SWARM_WEIGHT_MAX) for _ in range(count)]

    def repeat(self, step: Callable[[], bool], fewest: int, average: int, most: int) -> None:
        times = self.integer(fewest, min(most, 2 * average - fewest))
        if self.chance(10):
            times = self.integer(times, most)
        for _ in range(times):
            if not step():
                return
