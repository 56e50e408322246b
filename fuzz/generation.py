"""Programs at random: one generator, fed by a seed (campaigns) or by Hypothesis (people's tests).

Rules
- `generate` is pure: the same seed and model give the same program on every machine and Python version. A golden test pins it.
- Changing what a seed gives is allowed (programs are stored, not seeds), but it is a change of the golden file, made knowingly.
- Hypothesis is imported only when its strategy is asked for.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..spec.errors import UsageError
from ..spec.families import FAMILIES, family_of
from ..spec.models import Model
from ..spec.programs import OPERATIONS_MAX, Program
from .choices import SeededChoices
from .generation_operations import Steering, draw_program
from .profiles import PROFILES, SWARM, profile_of

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

OPERATIONS_PER_PROGRAM_MAX = PROFILES[SWARM].operations_max


def generate(seed: int, model: Model, profile: str = SWARM, avoided: Sequence[Sequence[str]] = ()) -> Program:
    """The program number `seed` of a profile for `model`: of `swarm` about 15 operations, at most 30.

    avoided  sets of operations (words of signatures) that come together less often than they would: whoever knows what happens then looks
             for something else. A program that would not have had one of the sets is the one that it would have been without.

    The operations do not depend on the model's family but for its vocabulary, whether it has an attention cache that can be full, and
    whether that has a window.
    Raises UsageError when the model or the profile is unknown or the model's dimensions are bad.
    """
    drawn = profile_of(profile)
    choices = SeededChoices(seed, drawn.purpose)
    if avoided and profile == SWARM:
        return draw_program(choices, model, drawn.operations_max, Steering(SeededChoices(seed, "steering"), avoided))
    return drawn.draw(choices, model, drawn.operations_max)


def model_for(seed: int, family: str) -> Model:
    """The model that program number `seed` of `family` runs on: one of two, so that many programs can be judged together.

    Raises UsageError for an unknown family.
    """
    model = Model(family, SeededChoices(seed, "model").pick((0, 0, 1)))
    family_of(model)
    return model


def programs(
    families: Sequence[str] | None = None, max_operations: int = OPERATIONS_PER_PROGRAM_MAX, profile: str = SWARM
) -> "SearchStrategy[Program]":
    """A Hypothesis strategy of programs; they shrink to few operations, small numbers and the default configuration.

    families        families to draw from, the simplest first; None: all
    max_operations  most operations of a program, the closing decodes included
    profile         which kind of programs (docs/profiles.md)
    Raises UsageError for an unknown family or profile, or a `max_operations` outside 1..10,000.
    """
    from .generation_strategy import program_strategy

    chosen = _checked_families(families)
    profile_of(profile)
    if not 1 <= max_operations <= OPERATIONS_MAX:
        raise UsageError(f"`max_operations` must be from 1 to {OPERATIONS_MAX}, not {max_operations}")
    return program_strategy(chosen, max_operations, profile)


def seeded_programs(families: Sequence[str] | None = None, profile: str = SWARM) -> "SearchStrategy[Program]":
    """A Hypothesis strategy of a campaign's programs: one draw a program, a seed that `generate` decodes.

    For long runs, where drawing every field would cost more than running the program; they do not shrink (`statedrift reduce` does that).
    families  families to draw from; None: all
    profile   which kind of programs; of `soak` thousands of operations
    Raises UsageError for an unknown family or profile.
    """
    from .generation_strategy import seeded_program_strategy

    profile_of(profile)
    return seeded_program_strategy(_checked_families(families), profile)


def _checked_families(families: Sequence[str] | None) -> tuple[str, ...]:
    """The families to draw from. Raises UsageError when there are none, or one is unknown."""
    chosen = tuple(FAMILIES if families is None else families)
    if not chosen:
        raise UsageError(f"`families` is empty; there are {', '.join(FAMILIES)}")
    for family in chosen:
        family_of(Model(family))
    return chosen
