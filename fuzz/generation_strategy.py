"""Programs for Hypothesis: the same generator, its choices drawn from a test case.

Rules
- Every operation is drawn inside a span of its own together with the question whether to go on, so that the shrinker can cut
  out one operation, or a run of them, and nothing else. (Drawing a number of operations first would shrink badly.)
- Swarm weights are one draw: a set of features switched off, which shrinks to all of them on.
- Fewer draws shrink better and cost less: what only says how often is not drawn; whether an operation may be unusual at all is
  part of the question whether to go on, and in a usual one every small chance is answered No without a draw.
- A campaign's program is one draw: a seed. It costs next to nothing, and does not shrink.
Source: Hypothesis, guides/strategies-that-shrink.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

from hypothesis import strategies as st

from ..spec.models import Model
from ..spec.programs import Program
from .choices import SWARM_WEIGHT_MAX
from .generation import generate, model_for
from .profiles import profile_of

Option = TypeVar("Option")


SHORTER_PERCENT = 75
"""Programs are somewhat shorter than a campaign's: long ones shrink badly."""
SMALL_CHANCE_PERCENT = 15
_UNUSUAL_OF_FOUR = 1


class HypothesisChoices:
    """Choices drawn from a Hypothesis test case."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._unusual = True

    def integer(self, low: int, high: int) -> int:
        return low if low == high else self._draw(_integers(low, high))

    def chance(self, percent: int) -> bool:
        if percent <= SMALL_CHANCE_PERCENT:
            if not self._unusual:
                return False
            percent *= 4 // _UNUSUAL_OF_FOUR
        return self.integer(0, 99) >= 100 - percent

    def leans(self, percent: int) -> bool:
        return False

    def pick(self, options: Sequence[Option]) -> Option:
        return options[self.integer(0, len(options) - 1)]

    def weighted(self, cumulative: Sequence[int]) -> int:
        return bisect_right(cumulative, self.integer(0, cumulative[-1] - 1))

    def swarm(self, count: int) -> list[int]:
        off = self.integer(0, (1 << count) - 1)
        return [0 if off >> number & 1 else SWARM_WEIGHT_MAX // 2 for number in range(count)]

    def repeat(self, step: Callable[[], bool], fewest: int, average: int, most: int) -> None:
        average = max(1, average * SHORTER_PERCENT // 100)
        for _ in range(most):
            if not self._draw(_one_more(self, step, average)):
                break
        self.allow_unusual(False)

    def allow_unusual(self, is_allowed: bool) -> None:
        """Whether small chances are drawn from now on, or answered No."""
        self._unusual = is_allowed


@lru_cache(maxsize=4096)
def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


@st.composite
def _one_more(draw: st.DrawFn, choices: HypothesisChoices, step: Callable[[], bool], average: int) -> bool:
    answer = draw(_integers(0, 4 * average))  # 0 ends, the largest quarter goes on with something unusual
    choices.allow_unusual(answer > (4 - _UNUSUAL_OF_FOUR) * average)
    return answer > 0 and step()


@st.composite
def program_strategy(draw: st.DrawFn, families: Sequence[str], max_operations: int, profile: str) -> Program:
    """Programs of these families and this profile with at most `max_operations` operations."""
    choices = HypothesisChoices(draw)
    choices.allow_unusual(choices.integer(0, 3) >= 4 - _UNUSUAL_OF_FOUR)
    model = Model(choices.pick(families), choices.integer(0, 1))
    return profile_of(profile).draw(choices, model, max_operations)


SEEDS = 1 << 64


@st.composite
def seeded_program_strategy(draw: st.DrawFn, families: Sequence[str], profile: str) -> Program:
    """A campaign's programs: the seed says the family, the model and all operations."""
    seed = draw(_integers(0, SEEDS - 1))
    return generate(seed, model_for(seed, families[seed % len(families)]), profile)
