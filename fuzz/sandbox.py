"""The parent's side of a native target: programs go to a child process, and a death or a stall there is a verdict here.

Rules
- The batch in flight is on disk before it is sent.
- A program that kills the worker costs only itself: the rest of the batch goes to the next worker, which is there at once.
- `crash`: the worker died by itself; `hang`: it gave no answer within the limit and was stopped; `unknown`: it was killed from outside.
- A child process that is lost altogether is replaced, too; the program in flight is `unknown`.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic

import msgspec

from ..spec.errors import UnavailableError, UsageError
from ..spec.programs import Program, program_text
from ..spec.verdicts import Verdict
from .engine_child import (
    FRAME_BYTES_MAX,
    FRAMES,
    LENGTH,
    PLACE,
    PLACE_BYTES,
    Answered,
    Died,
    Failed,
    Frame,
    Ran,
    Ready,
    Request,
    write_frame,
)
from .execution import PLAIN, Manner, Run, death_verdict

PROGRAM_SECONDS_MAX = 60.0
START_SECONDS_MAX = 120.0
CLOSE_SECONDS_MAX = 2.0
LOG_LINES = 12
LOG_BYTES_MAX = 1 << 26
_LOG_END_BYTES = 1 << 16
_LOOK_SECONDS = 0.5
_IDLE_DEATHS_MAX = 3
_KILLED_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Death(msgspec.Struct, frozen=True):
    """A program that ended its worker: the verdict, and the engine's last words."""

    verdict: Verdict
    log: tuple[str, ...]


class _Lost(Exception):  # noqa: N818  it is caught here, and is no error of anybody's
    """The child process ended, or its stream is torn."""


class Sandbox:
    """A child process for one native target. Raises UnavailableError or UsageError when the target cannot be loaded."""

    def __init__(
        self, target_name: str, program_seconds_max: float = PROGRAM_SECONDS_MAX, environment: Mapping[str, str] | None = None
    ) -> None:
        """environment: what the child process is to find in its own beside what is in ours."""
        self.target_name = target_name
        self._environment = dict(environment or {})
        self.program_seconds_max = program_seconds_max
        self._batch = 0
        self._is_busy = False  # also after an interrupt: then nobody waits for what is being done
        self._folder = tempfile.TemporaryDirectory(prefix="statedrift-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self._place = (folder / "place").open("w+b", buffering=0)
        self._place.write(PLACE.pack(-1, -1, -1, -1).ljust(PLACE_BYTES, b"\0"))
        self._in_flight = folder / "in-flight.drift"
        self._log = (folder / "log").open("a+b", buffering=0)  # appending: it can be cut while the child writes
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        self.version = self._ready.version
        self.description = self._ready.description

    def _start(self) -> None:
        """Start the child process and wait for its first worker. The child finds the modules that this process finds."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}.engine_child", self.target_name, self._place.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)} | self._environment,
            process_group=0,  # an interrupt at the terminal is for the parent, which then ends the child
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests = self._process.stdin.fileno()
        self._answers = self._process.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)
        self._ready = self._await_worker()

    @property
    def processes(self) -> tuple[int, int]:
        """The ids of the child process and of its present worker."""
        return self._process.pid, self._ready.process

    def _await_worker(self) -> Ready:
        try:
            frame = self._next_frame(START_SECONDS_MAX)
        except _Lost:
            frame = None
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
        """The next frame; None when nothing came in time. Raises _Lost when the stream ended or is torn."""
        head = self._read(LENGTH.size, seconds)
        if head is None:
            return None
        (size,) = LENGTH.unpack(head)
        body = self._read(size, seconds) if size <= FRAME_BYTES_MAX else None
        if body is None:
            raise _Lost
        try:
            return FRAMES.decode(body)
        except msgspec.MsgspecError:
            raise _Lost from None

    def _read(self, size: int, seconds: float) -> bytes | None:
        """`size` bytes from the child, or None when not one of them came in time."""
        deadline = monotonic() + seconds
        parts = bytearray()
        while len(parts) < size:
            left = deadline - monotonic()
            if self._poll.poll(1000 * max(0.0, min(left, _LOOK_SECONDS))):
                part = os.read(self._answers, min(size - len(parts), 1 << 20))
                if not part:
                    raise _Lost
                parts += part
            elif left <= 0 or self._process.poll() is not None:  # a worker that outlives the child process is lost with it
                if parts or left > 0:
                    raise _Lost
                return None
            self._cut_log()
        return bytes(parts)

    def _cut_log(self) -> None:
        """Keep only the end of a log that an engine fills for ever."""
        if os.fstat(self._log.fileno()).st_size > LOG_BYTES_MAX:
            end = self._log_end()
            self._log.truncate(0)
            self._log.write(end)

    def _log_end(self) -> bytes:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _LOG_END_BYTES, max(0, size - _LOG_END_BYTES))

    def _last_words(self) -> tuple[str, ...]:
        """The last lines that the library or the interpreter wrote; of the interpreter's account of a death the cause and the call."""
        lines = [line.strip() for line in self._log_end().decode(errors="replace").splitlines() if line.strip()]
        fatal = next((number for number, line in enumerate(lines) if line.startswith(_FATAL)), len(lines))
        call = next((line for line in lines[fatal:] if line.startswith("File ")), None)
        words = reversed(dict.fromkeys(reversed(lines[:fatal])))  # of what is said again, the last time counts
        return (*list(words)[-LOG_LINES:], *lines[fatal : fatal + 1], *([call] if call else []))

    def run(self, programs: Sequence[Program], manners: Sequence[Manner] = ()) -> list[Run | Death | Failed]:
        """Run programs one after another, each in its manner (or all in the plain one); every one of them gets an answer."""
        manners = manners or [PLAIN] * len(programs)
        texts = list(map(program_text, programs))
        results: list[Run | Death | Failed] = []
        self._is_busy = True
        while (done := len(results)) < len(programs):
            self._in_flight.write_text("\n".join(texts[done:]))
            results += self._run_until_death(programs[done:], manners[done:])
        self._is_busy = False
        return results

    def _run_until_death(self, programs: Sequence[Program], manners: Sequence[Manner]) -> list[Run | Death | Failed]:
        """Send programs, which are on disk, as one batch; the answers up to the first death, at least one."""
        self._batch += 1
        results: list[Run | Death | Failed] = []
        try:
            request = msgspec.msgpack.encode(Request(self._batch, tuple(programs), tuple(manners)))
            write_frame(self._requests, request)
            idle_deaths = 0
            while len(results) < len(programs):
                match self._next_frame(self.program_seconds_max):
                    case Answered(batch=batch, answer=answer):
                        if batch == self._batch:  # what a stopped worker said at the last moment is too late
                            results.append(answer.run if isinstance(answer, Ran) else answer)
                    case Died(process=process, code=code):
                        number, index = self._read_place(process)
                        if number < 0 and idle_deaths < _IDLE_DEATHS_MAX:
                            # nothing was running; nobody knows how much of the batch it had read: it is sent again, through a new child's pipe
                            idle_deaths += 1
                            self._end(0)
                            self._restart()
                            write_frame(self._requests, request)
                            continue
                        if not results or number == len(results):
                            results.append(self._death(programs[len(results)], index, code))
                        self._go_on()
                        break
                    case None:
                        results.append(self._stop_hanging(programs[len(results)]))
                        break
        except (_Lost, BrokenPipeError):
            words = self._last_words()
            if len(results) < len(programs):
                results.append(Death(Verdict("unknown", reason="the target's child process was lost, perhaps for memory"), words))
            self._end(0)
            self._restart()
        return results

    def renew_worker(self) -> None:
        """Go on in a worker that ran nothing yet: memory that nobody wrote holds nothing of an earlier program there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._ready.process, signal.SIGKILL)
        try:
            while not isinstance(frame := self._next_frame(START_SECONDS_MAX), Died):
                if frame is None:
                    raise _Lost
            self._ready = self._await_worker()
        except (_Lost, UnavailableError):
            self._end(0)
            self._restart()

    def _stop_hanging(self, program: Program) -> Death:
        """Kill the worker. Raises _Lost when it had not even begun with the batch: that is no fault of the program's."""
        process = self._ready.process
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        while not isinstance(frame := self._next_frame(START_SECONDS_MAX), Died):  # an answer at the last moment is still too late
            if frame is None:
                raise _Lost
        number, index = self._read_place(process)
        if number < 0:
            raise _Lost
        verdict = death_verdict("hang", program, index, f"no answer within {self.program_seconds_max:g} s")
        death = Death(verdict, self._short_words())
        self._go_on()
        return death

    def _go_on(self) -> None:
        """Wait for the worker after a death; a child that forks none (it may die of loading the model again) is replaced, once more if need be."""
        try:
            self._ready = self._await_worker()
            return
        except UnavailableError:
            self._end(0)
        self._restart()

    def _restart(self) -> None:
        """Start a child process again; once more when it was lost while it started."""
        self._log.truncate(0)  # what an earlier program's worker said is no reason for this one
        try:
            self._start()
        except UnavailableError:
            self._end(0)
            self._start()

    def _read_place(self, process: int) -> tuple[int, int]:
        """Program and operation at which a worker was in this batch; -1 when it had not begun with it."""
        worker, batch, number, index = PLACE.unpack(os.pread(self._place.fileno(), PLACE.size, 0))
        return (number, index) if (worker, batch) == (process, self._batch) else (-1, -1)

    def _death(self, program: Program, index: int, code: int) -> Death:
        log = self._short_words()
        if -code in _KILLED_FROM_OUTSIDE:
            killed = Verdict("unknown", None if index < 0 else index, reason="the process was killed from outside, perhaps for memory")
            return Death(killed, log)
        reason = f"the process died ({_cause_of(code)}): {_telling_line(log, code)}"
        return Death(death_verdict("crash", program, index, reason[:300]), log)

    def _short_words(self) -> tuple[str, ...]:
        """The last words without folders: where a library was built says nothing."""
        return tuple(re.sub(r"(?<![\w.])/\S*/", "", line) for line in self._last_words())

    def _end(self, grace_seconds: float) -> None:
        """End the child process and what it started. Without grace it is killed before its stream is closed: it would remove the folder, which
        the next child needs, as it does for a parent that is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if grace_seconds > 0:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=grace_seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of the group
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def close(self) -> None:
        """End the child process and remove its files."""
        if hasattr(self, "_process") and not self._log.closed:
            self._end(0 if self._is_busy else CLOSE_SECONDS_MAX)
        self._log.close()
        self._place.close()
        self._folder.cleanup()


_FATAL = "Fatal Python error"


def _cause_of(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


def _telling_line(log: Sequence[str], code: int) -> str:
    """The line that says why a process died. It becomes a part of the signature: the same death must give the same line."""
    own = [line for line in log if not line.startswith((_FATAL, 'File "'))]
    fatal = [line for line in log if line.startswith(_FATAL)]
    said = [line for line in own if "ASSERT" in line or "aborted" in line or line.startswith(("terminate called", "what():"))]
    errors = [line for line in own if "error" in line.lower()]
    if code == -signal.SIGABRT or not fatal:  # who gives up by himself says why, and says it last
        return (said or errors or own or fatal or ["no message"])[-1]
    return (said or fatal)[-1]
