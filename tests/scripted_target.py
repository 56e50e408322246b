"""A scripted target: a perfect one that answers chosen operations otherwise, so that a test sees what the contract makes of it.

Rules
- The script says, by the number of an operation, what comes instead of the right answer; everything else is right.
- A lie is given the session and the right deed (`do`), which it may do, half do or leave; it returns the outcome.
- Every call that reaches the session is noted: what was not to be sent is not there.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from statedrift.fuzz.execution import Run, execute
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.models import Model, model_text
from statedrift.spec.programs import parse_program
from statedrift.spec.target import Capabilities, Decoded
from statedrift.spec.verdicts import ACCEPTED, Outcome, refused

from tests.perfect_target import Cell, PerfectSession, PerfectTarget, _opened

Lie = Callable[["ScriptedSession", Callable[[], Any]], Outcome]
ATTENTION_ONLY: dict[str, Any] = {"recurrent": False, "attention": True}


class ScriptedSession(PerfectSession):
    """A perfect session whose calls go through its target's script."""

    target: "ScriptedTarget"
    is_closed = False

    def close(self) -> None:
        assert not self.is_closed, "closed twice"
        self.is_closed = True

    def positions(self) -> Sequence[tuple[int, int]]:
        answer = super().positions()
        return self.target.positions_lie(answer) if self.target.positions_lie else answer

    def append(self, sequence: int) -> None:
        """One more token for a sequence, that nobody asked for."""
        log = self.logs[sequence]
        self.logs[sequence] = (*log, Cell(0, log[-1].position + 1 if log else 0, -1 - len(self.target.calls)))


def _restore(self: PerfectSession, sequence: int, blob: bytes, partial: bool, device: bool) -> Outcome:
    """A partial save goes under tokens that are there already: they stay the same ones."""
    saved = _opened(blob)
    if not partial or saved is None or saved.model != model_text(self.model):
        return PerfectSession.restore(self, sequence, blob, partial, device)
    self.logs[sequence] = self.logs[sequence][: len(saved.logs[0])]
    return ACCEPTED


def _scripted(name: str) -> Callable[..., Any]:
    right = _restore if name == "restore" else getattr(PerfectSession, name)

    def method(self: ScriptedSession, *arguments: Any) -> Any:
        target = self.target
        target.calls.append((target.index, name, arguments))
        lie = target.script.get(target.index)
        answer = lie(self, partial(right, self, *arguments)) if lie else right(self, *arguments)
        if not isinstance(answer, Outcome) or name not in ("decode", "cancel", "save", "save_all"):
            return answer
        if name in ("save", "save_all"):
            return answer, b"scripted"
        batch = arguments[0]
        is_accepted = answer.word == "accepted"
        return Decoded(answer, np.zeros((int(batch.wanted.sum()), self.widths[batch.outputs]), np.float32) if is_accepted else None)

    return method


CALLS = ("decode", "cancel", "remove", "share", "keep", "shift", "divide", "save", "restore", "save_all", "restore_all", "clear")
for _name in CALLS:
    setattr(ScriptedSession, _name, _scripted(_name))


class ScriptedTarget(PerfectTarget):
    """A perfect target with a script.

    script        operation number -> the lie; a negative number is a call before the first operation
    capabilities  what its sessions declare otherwise than the perfect ones
    """

    name = "scripted"

    def __init__(self, script: Mapping[int, Lie] | None = None, capabilities: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.script = dict(script or {})
        self.changes = dict(capabilities or {})
        self.positions_lie: Callable[[Sequence[tuple[int, int]]], Any] | None = None
        self.index = -1
        self.calls: list[tuple[int, str, tuple[Any, ...]]] = []
        self.sessions: list[ScriptedSession] = []

    def open(self, model: Model, configuration: CacheConfiguration) -> ScriptedSession:
        session = ScriptedSession(model, configuration, "all", True, "")
        session.target = self
        session.capabilities = msgspec.structs.replace(session.capabilities, **self.changes)
        self.sessions.append(session)
        return session

    def progress(self, index: int) -> None:
        self.index = index


def walk(text: str, script: Mapping[int, Lie] | None = None, **capabilities: Any) -> tuple[Run, ScriptedTarget]:
    """Run program text on a scripted target. Script key -1 stands for the last operation."""
    program = parse_program(text if text.startswith("model") else f"model lfm2; {text}")
    last = len(program.operations) - 1
    target = ScriptedTarget({last if index == -1 else index: lie for index, lie in (script or {}).items()}, capabilities)
    return execute(program, target, target.progress), target


def declared(**changes: Any) -> Capabilities:
    """Capabilities of a perfect hybrid session, with changes."""
    capabilities = PerfectTarget().open(Model("lfm2"), CacheConfiguration()).capabilities
    return msgspec.structs.replace(capabilities, **changes)


# --- lies ------------------------------------------------------------------------------------------------------------------


def do_it(session: ScriptedSession, do: Callable[[], Any]) -> Outcome:
    """The right answer."""
    answer = do()
    if isinstance(answer, Decoded):
        return answer.outcome
    outcome: Outcome = answer[0] if isinstance(answer, tuple) else answer
    return outcome


def refuse(session: ScriptedSession, do: Callable[[], Any]) -> Outcome:
    """Say no, and change nothing."""
    return refused("scripted")


def do_nothing(session: ScriptedSession, do: Callable[[], Any]) -> Outcome:
    """Say yes, and change nothing."""
    return ACCEPTED


def refuse_but_do(session: ScriptedSession, do: Callable[[], Any]) -> Outcome:
    """Say no, and do it."""
    do()
    return refused("scripted")


def fail(session: ScriptedSession, do: Callable[[], Any]) -> Outcome:
    """Answer with an error code."""
    return Outcome("error", "code 7")


def throw(session: ScriptedSession, do: Callable[[], Any]) -> Outcome:
    """Answer with an exception."""
    raise RuntimeError("scripted")


def call_it_cancelled(session: ScriptedSession, do: Callable[[], Any]) -> Outcome:
    """Do it, and say that it was cancelled."""
    do()
    return Outcome("cancelled")


def and_grow(sequence: int) -> Lie:
    """Do it, and give a sequence one token more."""

    def lie(session: ScriptedSession, do: Callable[[], Any]) -> Outcome:
        outcome = do_it(session, do)
        session.append(sequence)
        return outcome

    return lie


def refuse_and_grow(sequence: int) -> Lie:
    """Say no, and give a sequence one token more."""

    def lie(session: ScriptedSession, do: Callable[[], Any]) -> Outcome:
        session.append(sequence)
        return refused("scripted")

    return lie


def put(logs: Mapping[int, int], say: Outcome) -> Lie:
    """Leave sequences with so many tokens at positions from 0, instead of doing it."""

    def lie(session: ScriptedSession, do: Callable[[], Any]) -> Outcome:
        for sequence, count in logs.items():
            session.logs[sequence] = ()
            for _ in range(count):
                session.append(sequence)
        return say

    return lie
