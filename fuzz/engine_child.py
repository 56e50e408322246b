"""The child process that drives a native target: it loads the library once, then forks a worker that runs the programs.

Rules
- The first process (the nursery) never runs a program: when a worker dies it reports how and forks the next one at once.
- What the dead worker had loaded is loaded again by the nursery, never taken over: the workers after it find it there.
- The worker runs a batch of programs and answers each with one frame; before every operation it writes where it is to a small
  shared file, so that the place of a death is known. Answers carry the number of their batch: a late one is not taken for another.
- File descriptor 1 is the protocol's alone: what the library prints goes to standard error, which is a file of the parent's and
  starts again with every program, so that a death shows its own words only.
- When the parent ends, however it ends, nothing is left: the worker sees the end of its stream, and one that hangs is killed.
- Forking is safe here because the nursery starts no thread and no device context.
"""

import contextlib
import faulthandler
import gc
import mmap
import os
import select
import shutil
import signal
import struct
import sys
import traceback
from pathlib import Path
from typing import Literal

import msgspec

from ..spec.errors import UnavailableError, UsageError
from ..spec.models import Model
from ..spec.programs import Program
from ..spec.target import LoadsModels, Target
from ..targets.registry import load_target
from .execution import Manner, Run, execute

PLACE = struct.Struct("<qqqq")
"""The shared file: the worker's process, number of the batch, of the program in it, index of the operation; -1 before the first."""
LENGTH = struct.Struct("<I")
FRAME_BYTES_MAX = 1 << 31
_MODEL_BYTES_MAX = 4000
PLACE_BYTES = PLACE.size + LENGTH.size + _MODEL_BYTES_MAX
"""Size of the shared file: behind the place stands the model of that program, a length and MessagePack."""
_GRACE_SECONDS = 1.0


class Request(msgspec.Struct, frozen=True):
    """A batch of programs, each with the manner in which it is walked; batches are numbered."""

    batch: int
    programs: tuple[Program, ...]
    manners: tuple[Manner, ...]


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


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """The answer to the next program of a batch."""

    batch: int
    answer: Ran | Failed


class Died(msgspec.Struct, frozen=True, tag="died"):
    """A worker died: its process, and its exit code, or minus the signal."""

    process: int
    code: int


Frame = Ready | Answered | Failed | Died
FRAMES = msgspec.msgpack.Decoder(Frame)
"""Made once: what a union holds would be looked up again for every frame."""
_REQUESTS = msgspec.msgpack.Decoder(Request)


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
    head = read_exactly(descriptor, LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = read_exactly(descriptor, size)
    return body if len(body) == size else None


def write_frame(descriptor: int, body: bytes) -> None:
    """Write one frame, whole."""
    data = memoryview(LENGTH.pack(len(body)) + body)
    while data:
        data = data[os.write(descriptor, data) :]


def _answer(program: Program, manner: Manner, target: Target, place: mmap.mmap, batch: int, number: int) -> bytes:
    """Run one program; the frame that answers it."""
    answer: Ran | Failed
    process = os.getpid()
    PLACE.pack_into(place, 0, process, batch, number, -1)
    try:
        answer = Ran(execute(program, target, lambda index: PLACE.pack_into(place, 0, process, batch, number, index), manner))
    except UsageError as error:
        answer = Failed("usage", str(error))
    except UnavailableError as error:
        answer = Failed("unavailable", str(error))
    except Exception as error:
        answer = Failed("internal", f"{type(error).__name__}: {error}")
    frame = msgspec.msgpack.encode(Answered(batch, answer))
    if len(frame) > FRAME_BYTES_MAX:
        return msgspec.msgpack.encode(Answered(batch, Failed("usage", f"its output rows are {len(frame)} bytes, too many to judge")))
    return frame


def _serve(target: Target, ready: bytes, requests: int, answers: int, place: mmap.mmap) -> None:
    """The worker: batches of programs in, one frame for each program out, until the parent closes the stream."""
    write_frame(answers, ready)
    noted = None
    while (body := read_frame(requests)) is not None:
        request = _REQUESTS.decode(body)
        for number, (program, manner) in enumerate(zip(request.programs, request.manners, strict=True)):
            if program.model != noted:
                PLACE.pack_into(place, 0, os.getpid(), request.batch, number, -1)  # first: the place before was of another model
                noted = _note_model(place, program.model)
            with contextlib.suppress(OSError):  # standard error is no file when somebody runs this by hand
                os.ftruncate(2, 0)
            write_frame(answers, _answer(program, manner, target, place, request.batch, number))


def _note_model(place: mmap.mmap, model: Model) -> Model:
    """Write the model of the programs to come behind the place; one that is too long is left out."""
    body = msgspec.msgpack.encode(model)
    place[PLACE.size :] = (LENGTH.pack(len(body)) + body if len(body) <= _MODEL_BYTES_MAX else b"").ljust(PLACE_BYTES - PLACE.size, b"\0")
    return model


def _noted_model(place: mmap.mmap) -> Model | None:
    """The model behind the place; None when there is none, or nobody can read it."""
    (size,) = LENGTH.unpack_from(place, PLACE.size)
    start = PLACE.size + LENGTH.size
    try:
        return msgspec.msgpack.decode(place[start : start + size], type=Model) if size else None
    except msgspec.MsgspecError:
        return None


def _load_again(target: Target, worker: int, place: mmap.mmap) -> None:
    """Load the model of the program in which a worker ended, unless it had not even opened it: that may be what it died of."""
    process, _, _, index = PLACE.unpack_from(place)
    if isinstance(target, LoadsModels) and process == worker and index >= 0 and (model := _noted_model(place)) is not None:
        with contextlib.suppress(Exception):  # the next worker meets it, too, and answers
            target.load(model)
        gc.freeze()


def _fork_worker(target: Target, version: str, description: str, requests: int, answers: int, place: mmap.mmap) -> tuple[int, int]:
    """Fork a worker; its process, and a descriptor that hangs up when it ends."""
    alive, held = os.pipe()
    worker = os.fork()
    if worker:
        os.close(held)
        return worker, alive
    code = 1
    try:
        _serve(target, msgspec.msgpack.encode(Ready(os.getpid(), version, description)), requests, answers, place)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code & 0xFF)


def _await_end(worker: int, alive: int, requests: int) -> tuple[int, bool]:
    """Wait for the end of a worker: its exit code, and whether the parent has closed the request stream or is gone."""
    watched = select.poll()
    watched.register(alive, 0)  # only that it hangs up
    watched.register(requests, 0)
    if alive not in dict(watched.poll()):
        watched.unregister(requests)
        if not watched.poll(1000 * _GRACE_SECONDS):
            os.kill(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    watched = select.poll()
    watched.register(requests, 0)
    return os.waitstatus_to_exitcode(status), bool(watched.poll(0))


def main(target_name: str, place_path: str) -> None:
    """The nursery: load the library, then keep one worker alive. Ends when the parent closes the request stream."""
    requests, answers = 0, os.dup(1)
    os.dup2(2, 1)
    faulthandler.enable(all_threads=False)
    failed = None
    try:
        target = load_target(target_name)
        version, description = target.version(), target.describe()
    except UsageError as error:
        failed = Failed("usage", str(error))
    except UnavailableError as error:
        failed = Failed("unavailable", str(error))
    except Exception as error:
        failed = Failed("unavailable", f"target {target_name} is not available: {type(error).__name__}: {error}")
    if failed is not None:
        write_frame(answers, msgspec.msgpack.encode(failed))
        return
    gc.freeze()  # what is loaded now is never garbage: collections skip it, and its pages stay shared with the workers
    with Path(place_path).open("r+b") as file, mmap.mmap(file.fileno(), PLACE_BYTES) as place:
        while True:
            worker, alive = _fork_worker(target, version, description, requests, answers, place)
            code, is_over = _await_end(worker, alive, requests)
            os.close(alive)
            if is_over:
                shutil.rmtree(Path(place_path).parent, ignore_errors=True)  # a parent that was killed cannot do it
                return
            write_frame(answers, msgspec.msgpack.encode(Died(worker, code)))
            _load_again(target, worker, place)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
