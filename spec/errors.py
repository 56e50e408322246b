"""Errors that people read: what was wrong, where, and what to do.

Rules
- `UsageError` is for input that can be corrected (a program, an option, a path): exit status 64, one line, no traceback.
- `UnavailableError` is for something that is not there (a library, a target): exit status 2.
- `EngineAbort` is no error of ours: a target in this process says with it that the engine it stands for would have died.
- Anything else that escapes is a fault of statedrift itself.
"""


class UsageError(ValueError):
    """What was given cannot be used; the message says where and what to do."""


class ProgramError(UsageError):
    """A program that cannot be read. `line` and `column` count from 1; 0 means that the place is not known."""

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        self.line = line
        self.column = column
        place = f"line {line}, column {column}: " if line else ""
        super().__init__(place + message)


class UnavailableError(RuntimeError):
    """A target or library cannot be used here; the message says why and how to get it."""


class EngineAbort(Exception):  # noqa: N818  it stands for a process that died, which is an outcome
    """The engine that this target stands for would have died here; any call of a session, or opening one, may raise it.

    The message is what the engine would have said. The outcome is `crash`, and the program ends.
    """
