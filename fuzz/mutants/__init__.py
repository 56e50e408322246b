"""Mutants: our own caches with one named fault each, taken from public reports on such caches.

Every mutant is a target, `statedrift.fuzz.mutants:FAULTY.<name>`, and its fixed twin another, `statedrift.fuzz.mutants:FIXED.<name>`.
"""

from types import SimpleNamespace

from . import attention, forwards, hybrid, planes, ring, saved  # noqa: F401 - importing a module registers its mutants
from .mutant import MUTANTS, Mutant, MutantTarget, Probe

FAULTY = SimpleNamespace(**{name: MutantTarget(mutant) for name, mutant in MUTANTS.items()})
FIXED = SimpleNamespace(**{name: MutantTarget(mutant, is_faulty=False) for name, mutant in MUTANTS.items()})

__all__ = ["FAULTY", "FIXED", "MUTANTS", "Mutant", "MutantTarget", "Probe"]
