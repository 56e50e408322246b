"""What a mutant is: one of our own caches with one named fault, and what is needed to run it and to say whether the fault took place.

Rules
- A mutant is one class that overrides methods of one class of impl/; nothing else is changed, and nothing outside the session.
- The override asks its probe at the place of the fault. The same class with a probe that is not faulty is the fixed twin.
- A mutant may give wrong answers of any kind, but never reads or writes outside its arrays.
"""

import re
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from ...impl.attention_cache import AttentionCache
from ...impl.cells import Cells, StrictCells
from ...impl.hybrid_cache import HybridCache
from ...impl.model import Sides
from ...impl.recurrent_cache import RecurrentCache
from ...impl.ring import RingCells
from ...impl.session import NumbaSession
from ...spec.configuration import CacheConfiguration
from ...spec.models import Model
from ...spec.programs import Program, parse_program
from ...spec.target import Session
from ...spec.verdicts import VerdictKind
from ...targets.numba import NumbaTarget

CLASSIC = "classic"
"""In place of a report: a fault that anyone who writes such a cache makes once."""

CacheKind = Literal["planes", "ring", "ring without snapshots"]
"""Policy of the recurrent side; the last one's saves leave out the states that a sequence can go back to."""

Override = type[Cells] | type[RecurrentCache] | type[AttentionCache] | type[HybridCache] | type[NumbaSession]


class Probe:
    """Whether the place of a fault was reached, and whether the fault made a difference there.

    reached    times that the overridden code asked
    triggered  times that the fault changed something, or would have in the fixed twin
    """

    __slots__ = ("is_faulty", "reached", "triggered")

    def __init__(self, is_faulty: bool) -> None:
        self.is_faulty = is_faulty
        self.reached = self.triggered = 0

    def strikes(self, differs: bool) -> bool:
        """Whether to be wrong now. differs: being wrong changes something here."""
        self.reached += 1
        self.triggered += bool(differs)
        return bool(differs) and self.is_faulty


class Mutant(msgspec.Struct, frozen=True):
    """See the file.

    summary  one sentence: what is wrong
    report   repository#number of the public report that it is taken from, or CLASSIC
    text     the shortest program that shows it, found by hand
    kind     of the verdict on that program
    """

    name: str
    summary: str
    report: str
    cache: CacheKind
    text: str
    kind: VerdictKind
    override: Override

    @property
    def program(self) -> Program:
        """The shortest program."""
        return parse_program(self.text)

    @property
    def family(self) -> str:
        """The family that it is looked for in."""
        return self.program.model.family

    @property
    def overrides(self) -> tuple[str, ...]:
        """The methods that the mutant has of its own, as Class.method."""
        own: list[str] = []
        for parent in self.override.__mro__:
            if parent.__module__.startswith("statedrift.impl"):
                return tuple(f"{parent.__name__}.{name}" for name in own if hasattr(parent, name))
            own += [name for name in vars(parent) if not name.startswith("__")]
        return ()


class MutantTarget(NumbaTarget):
    """A mutant, or its fixed twin, as a target. See `spec.target.Target`."""

    def __init__(self, mutant: Mutant, is_faulty: bool = True) -> None:
        self.name = mutant.name if is_faulty else f"{mutant.name}-fixed"
        self.mutant = mutant
        self.families = (mutant.family,)
        self.probe = Probe(is_faulty)
        # a class of its own for each target, so that two targets never share a probe
        self._override = type(mutant.override.__name__, (mutant.override,), {"probe": self.probe})

    def describe(self) -> str:
        """One line: what it is."""
        return f"our own cache ({self.mutant.cache}) with a planted fault: {self.mutant.summary}"

    def open(self, model: Model, configuration: CacheConfiguration) -> Session:
        """Open a session. Raises UsageError for a model or configuration it cannot have."""
        override, cache = self._override, self.mutant.cache
        cells: type[Cells] = StrictCells if cache == "planes" else RingCells
        session, sides = NumbaSession, Sides()
        if issubclass(override, Cells):
            cells = override
        elif issubclass(override, RecurrentCache):
            sides = Sides(recurrent=override)
        elif issubclass(override, AttentionCache):
            sides = Sides(attention=override)
        elif issubclass(override, HybridCache):
            sides = Sides(hybrid=override)
        elif issubclass(override, NumbaSession):
            session = override
        return session(model, configuration, cells, cache == "ring", sides)


MUTANTS: dict[str, Mutant] = {}
"""By name; filled by the modules beside this one, when they are imported."""

Class = TypeVar("Class", bound=Override)


def mutant(report: str, text: str, kind: VerdictKind = "wrong-output", cache: CacheKind = "planes") -> Callable[[Class], Class]:
    """Register a class as a mutant, named after it; its docstring is the summary."""

    def register(override: Class) -> Class:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", override.__name__).lower()
        assert name not in MUTANTS
        MUTANTS[name] = Mutant(name, " ".join((override.__doc__ or "").split()), report, cache, text, kind, override)
        return override

    return register
