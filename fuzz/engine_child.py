"""The child process that drives a native target: it loads the library once, then forks a worker that runs the programs.

Rules
- The first process (the nursery) never runs a program: when a worker dies it reports how and forks the next one at once.
- The worker runs a batch of programs and answers each with one frame; before every operation it writes where it is to a small
  shared file, so that the place of a death is known.
- File descriptor 1 is the protocol's alone: what the library prints goes to standard error, which is a file of the parent's.
- Forking is safe here because the nursery starts no thread and no device context.
"""

import faulthandler
import mmap
import os
import struct
import sys
from pathlib import Path
from typing import Literal

import msgspec

from ..spec.errors import UnavailableError, UsageError
from ..spec.programs import Program
from ..targets.registry import load_target
from .execution import Run, execute

PLACE = struct.Struct("<qq")
"""The shared file: number of the program in its batch, index of the operation; -1 before the first."""
_LENGTH = struct.Struct("<I")
FRAME_BYTES_MAX = 1 << 31


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A worker has started."""

    process: int
    version: str
    description: str


class Ran(msgspec.Struct, frozen=True, tag="ran"):
    """A program was run."""

    run: Run


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A program could not be run; it is not the target's fault."""

    kind: Literal["usage", "unavailable", "internal"]
    message: str


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The worker died: its exit code, or minus the signal."""

    code: int


Frame = Ready | Ran | Failed | Died


def read_exactly(descriptor: int, size: int) -> bytes:
    """Read `size` bytes; fewer only at the end of the stream."""
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, min(size - len(parts), 1 << 20))
        if not part:
            break
        parts += part
    return bytes(parts)


def read_frame(descriptor: int) -> bytes | None:
    """The next frame's body; None at the end of the stream."""
    head = read_exactly(descriptor, _LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    body = read_exactly(descriptor, size)
    return body if len(body) == size else None


def write_frame(descriptor: int, body: bytes) -> None:
    """Write one frame, whole."""
    data = memoryview(_LENGTH.pack(len(body)) + body)
    while data:
        data = data[os.write(descriptor, data) :]


def _serve(target_name: str, requests: int, answers: int, place: mmap.mmap) -> None:
    """The worker: batches of programs in, one frame for each program out, until the parent closes the stream."""
    target = load_target(target_name)
    write_frame(answers, msgspec.msgpack.encode(Ready(os.getpid(), target.version(), target.describe())))
    while (request := read_frame(requests)) is not None:
        for number, program in enumerate(msgspec.msgpack.decode(request, type=tuple[Program, ...])):
            PLACE.pack_into(place, 0, number, -1)
            answer: Frame
            try:
                answer = Ran(execute(program, target, lambda index, number=number: PLACE.pack_into(place, 0, number, index)))  # type: ignore[misc]
            except UsageError as error:
                answer = Failed("usage", str(error))
            except UnavailableError as error:
                answer = Failed("unavailable", str(error))
            except Exception as error:
                answer = Failed("internal", f"{type(error).__name__}: {error}")
            write_frame(answers, msgspec.msgpack.encode(answer))


def main(target_name: str, place_path: str) -> None:
    """The nursery: load the library, then keep one worker alive. Ends when the parent closes the request stream."""
    requests, answers = 0, os.dup(1)
    os.dup2(2, 1)
    faulthandler.enable(all_threads=False)
    try:
        load_target(target_name).version()
    except (UsageError, UnavailableError) as error:
        kind: Literal["usage", "unavailable"] = "usage" if isinstance(error, UsageError) else "unavailable"
        write_frame(answers, msgspec.msgpack.encode(Failed(kind, str(error))))
        return
    with Path(place_path).open("r+b") as file, mmap.mmap(file.fileno(), PLACE.size) as place:
        while True:
            worker = os.fork()
            if worker == 0:
                _serve(target_name, requests, answers, place)
                os._exit(0)
            _, status = os.waitpid(worker, 0)
            code = os.waitstatus_to_exitcode(status)
            if code == 0:
                return
            write_frame(answers, msgspec.msgpack.encode(Died(code)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
