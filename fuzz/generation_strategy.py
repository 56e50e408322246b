"""Programs for Hypothesis: the same generator, its choices drawn from a test case.

Rules
- Every operation is drawn inside a span of its own together with the question whether to go on, so that the shrinker can cut
  out one operation, or a run of them, and nothing else. (Drawing a number of operations first would shrink badly.)
- Swarm weights are one draw: a set of features switched off, which shrinks to all of them on.
Source: Hypothesis, guides/strategies-that-shrink.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import strategies as st

from ..spec.models import Model
from ..spec.programs import Program
from .generation_operations import draw_program

Option = TypeVar("Option")


class HypothesisChoices:
    """Choices drawn from a Hypothesis test case."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return low if low == high else self._draw(st.integers(low, high))

    def chance(self, percent: int) -> bool:
        return self.integer(0, 99) >= 100 - percent

    def pick(self, options: Sequence[Option]) -> Option:
        return options[self.integer(0, len(options) - 1)]

    def weighted(self, cumulative: Sequence[int]) -> int:
        return bisect_right(cumulative, self.integer(0, cumulative[-1] - 1))

    def swarm(self, count: int) -> list[int]:
        off = self.integer(0, (1 << count) - 1)
        return [1 - (off >> number & 1) for number in range(count)]

    def repeat(self, step: Callable[[], bool], fewest: int, average: int, most: int) -> None:
        for _ in range(most):
            if not self._draw(_one_more(step, average)):
                return


@st.composite
def _one_more(draw: st.DrawFn, step: Callable[[], bool], average: int) -> bool:
    return draw(st.integers(0, average)) > 0 and step()


@st.composite
def program_strategy(draw: st.DrawFn, families: Sequence[str], max_operations: int) -> Program:
    """Programs of these families with at most `max_operations` operations."""
    choices = HypothesisChoices(draw)
    model = Model(choices.pick(families), choices.integer(0, 1))
    return draw_program(choices, model, max_operations)
