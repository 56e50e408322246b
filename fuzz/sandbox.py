"""The parent's side of a native target: programs go to a child process, and a death or a stall there is a verdict here.

Rules
- The batch in flight is on disk before it is sent.
- A program that kills the worker costs only itself: the rest of the batch goes to the next worker, which is there at once.
- `crash`: the worker died by itself; `hang`: it gave no answer within the limit and was stopped; `unknown`: it was killed from outside.
"""

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..spec.errors import UnavailableError, UsageError
from ..spec.operations import sequences_of
from ..spec.programs import Program, program_text
from ..spec.verdicts import Verdict
from .engine_child import PLACE, Died, Failed, Frame, Ran, Ready, read_frame, write_frame
from .execution import Run

PROGRAM_SECONDS_MAX = 30.0
START_SECONDS_MAX = 120.0
LOG_LINES = 12


class Death(msgspec.Struct, frozen=True):
    """A program that ended its worker: the verdict, and the engine's last words."""

    verdict: Verdict
    log: tuple[str, ...]


class Sandbox:
    """A child process for one native target. Raises UnavailableError or UsageError when the target cannot be loaded."""

    def __init__(self, target_name: str, program_seconds_max: float = PROGRAM_SECONDS_MAX) -> None:
        self.program_seconds_max = program_seconds_max
        self._folder = tempfile.TemporaryDirectory(prefix="statedrift-")
        folder = Path(self._folder.name)
        self._place = (folder / "place").open("w+b", buffering=0)
        self._place.write(PLACE.pack(-1, -1))
        self._in_flight = folder / "in-flight.drift"
        self._log = (folder / "log").open("w+b", buffering=0)
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.engine_child", target_name, self._place.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            process_group=0,  # an interrupt at the terminal is for the parent, which then ends the child
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests = self._process.stdin.fileno()
        self._answers = self._process.stdout.fileno()
        try:
            self._ready = self._await_worker()
        except BaseException:
            self.close()
            raise
        self.version = self._ready.version
        self.description = self._ready.description

    def _await_worker(self) -> Ready:
        frame = self._next_frame(START_SECONDS_MAX)
        match frame:
            case Ready():
                return frame
            case Failed(kind="usage", message=message):
                raise UsageError(message)
            case Failed(message=message):
                raise UnavailableError(message)
            case _:
                raise UnavailableError(
                    "the target's child process did not start: " + (" ".join(self._last_words()) or "no reason was given")
                )

    def _next_frame(self, seconds: float) -> Frame | None:
        """The next frame, or None: nothing came in time, or the stream ended."""
        readable, _, _ = select.select([self._answers], [], [], seconds)
        body = read_frame(self._answers) if readable else None
        return None if body is None else msgspec.msgpack.decode(body, type=Frame)

    def _last_words(self) -> tuple[str, ...]:
        """The last lines that the library or the interpreter wrote."""
        size = os.fstat(self._log.fileno()).st_size
        data = os.pread(self._log.fileno(), min(size, 16384), max(0, size - 16384))
        lines = [line.strip() for line in data.decode(errors="replace").splitlines()]
        return tuple(line for line in lines if line)[-LOG_LINES:]

    def _forget_words(self) -> None:
        """Start the log again, so that it does not grow and a death shows its own words only."""
        self._log.truncate(0)
        self._log.seek(0)

    def run(self, programs: Sequence[Program]) -> list[Run | Death | Failed]:
        """Run programs one after another; every one of them gets an answer."""
        results: list[Run | Death | Failed] = []
        while len(results) < len(programs):
            results += self._run_until_death(programs[len(results) :])
        return results

    def _run_until_death(self, programs: Sequence[Program]) -> list[Run | Death | Failed]:
        self._in_flight.write_text("\n".join(map(program_text, programs)))
        os.pwrite(self._place.fileno(), PLACE.pack(-1, -1), 0)
        self._forget_words()
        results: list[Run | Death | Failed] = []
        write_frame(self._requests, msgspec.msgpack.encode(tuple(programs)))
        while len(results) < len(programs):
            frame = self._next_frame(self.program_seconds_max)
            match frame:
                case Ran(run=run):
                    results.append(run)
                case Failed():
                    results.append(frame)
                case Died(code=code):
                    results.append(self._death(programs[len(results)], len(results), code, False))
                    self._ready = self._await_worker()
                    break
                case _:
                    results.append(self._stop_hanging(programs[len(results)], len(results)))
                    break
        return results

    def _stop_hanging(self, program: Program, number: int) -> Death:
        if self._process.poll() is not None:
            raise UnavailableError("the target's child process ended unexpectedly: " + " ".join(self._last_words()))
        os.kill(self._ready.process, signal.SIGKILL)
        frame = self._next_frame(self.program_seconds_max)
        while isinstance(frame, Ran | Failed):  # it answered at the last moment: still too late
            frame = self._next_frame(self.program_seconds_max)
        death = self._death(program, number, -signal.SIGKILL, True)
        self._ready = self._await_worker()
        return death

    def _death(self, program: Program, number: int, code: int, stopped: bool) -> Death:
        place_number, index = PLACE.unpack(os.pread(self._place.fileno(), PLACE.size, 0))
        operation_index = index if place_number == number and index >= 0 else None  # None: while opening the session
        log = self._last_words()
        if stopped:
            return Death(_death_verdict("hang", program, operation_index, f"no answer within {self.program_seconds_max:g} s"), log)
        if code == -signal.SIGKILL:
            return Death(Verdict("unknown", operation_index, reason="the process was killed from outside, perhaps for memory"), log)
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        log = tuple(re.sub(r"(?<![\w.])/\S*/", "", line) for line in log)  # where it was built says nothing
        words = next((line for line in reversed(log) if "ASSERT" in line or "error" in line.lower()), log[-1] if log else "no message")
        return Death(_death_verdict("crash", program, operation_index, f"the process died ({cause}): {words}"[:300]), log)

    def close(self) -> None:
        """End the child process and remove its files."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            for process in {self._process.pid, getattr(self, "_ready", None) and self._ready.process}:
                if process:
                    os.kill(process, signal.SIGKILL)
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
        self._place.close()
        self._folder.cleanup()


def _death_verdict(kind: str, program: Program, operation_index: int | None, reason: str) -> Verdict:
    named = [] if operation_index is None else sorted(sequences_of(program.operations[operation_index]))
    return Verdict(kind, operation_index, named[0] if named else None, relation="self", reason=reason)  # type: ignore[arg-type]
