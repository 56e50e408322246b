"""Statedrift finds where a cached recurrent state drifts from the truth.

Rules
- Names are loaded when they are first used: importing statedrift costs nothing.
- What is not listed in `__all__` is reached through its room (`statedrift.spec`, `statedrift.oracle`, ...) and may change.

    program = parse_program("model lfm2 seed=0; decode 0:10; decode 0:4; rollback 0 2; decode 0:1/1")
    check(program, "numba").kind            # "ok", or what went wrong first: answers, positions and outputs are judged
    execute(program, target)                # only what a target answered, operation by operation; no output is compared
    @given(programs())                      # a Hypothesis strategy over whole programs; also: programs(profile="server")
    @given(seeded_programs())               # the same as a campaign draws them: one draw a program
    note_rarities(program, run)             # tell Hypothesis what is rare in a program
    class TestMyCache(ConformanceSuite)     # the contract as tests of a cache, for pytest
    class MyCache(PlainSession)             # a cache, with what it takes to be tested
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fuzz.conformance_suite import ConformanceSuite
    from .fuzz.execution import execute
    from .fuzz.generation import programs, seeded_programs
    from .fuzz.rarities import note_rarities
    from .fuzz.trial import check
    from .spec.programs import Program, parse_program, program_text
    from .targets.plain import PlainSession

    __version__: str

__all__ = [
    "ConformanceSuite", "PlainSession", "Program", "__version__", "check", "execute", "note_rarities", "parse_program", "program_text", "programs", "seeded_programs",
]  # fmt: skip

_ROOMS = {
    "ConformanceSuite": "fuzz.conformance_suite",
    "PlainSession": "targets.plain",
    "Program": "spec.programs",
    "parse_program": "spec.programs",
    "program_text": "spec.programs",
    "check": "fuzz.trial",
    "execute": "fuzz.execution",
    "note_rarities": "fuzz.rarities",
    "programs": "fuzz.generation",
    "seeded_programs": "fuzz.generation",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("statedrift")
    if name not in _ROOMS:
        raise AttributeError(f"module 'statedrift' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f".{_ROOMS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
