"""What PROGRAM is on the command line: a file, a finding's folder or id, the text itself, or `-` for standard input.

Rules
- Text has a space, a line end or a `;` and begins with `model`, or begins with `{`. A file or folder wins over an id.
- Nothing is read before its size and kind are known; what cannot be a program is refused with a reason.
- Ids (at least 4 digits) and names of findings' folders are looked for in the folder given by `--campaign`, else in whatever lies below `runs/`.
"""

import re
import shlex
import stat
import sys
from pathlib import Path

import msgspec

from ..spec.errors import ProgramError, UsageError
from ..spec.programs import Program, program_id, program_line, read_program
from ..spec.verdicts import DIVERGENCE_KINDS
from .builds import build_words

FILE_BYTES_MAX = 8 << 20
RUNS = Path("runs")
_NAME = re.compile(rf"(?:({'|'.join(DIVERGENCE_KINDS)})-)?([0-9a-f]{{4,12}})/?")


class Given(msgspec.Struct, frozen=True):
    """A program, and the words that name it on a command line (quoted for a shell)."""

    program: Program
    words: str


def one_line(program: Program) -> str:
    """The program's text on one line, quoted for a shell."""
    return shlex.quote(program_line(program))


def replay_words(given: Given, target_name: str, against: str | None = None, inspect: bool = False, oracle: str = "own") -> str:
    """The command that replays a program."""
    words = f"statedrift replay {given.words} --target {shlex.quote(target_name)}"
    return (
        words
        + ("" if against is None else f" --against {shlex.quote(against)}")
        + " --inspect" * inspect
        + ("" if oracle == "own" else f" --oracle {oracle}")
        + build_words(target_name, against)
    )


def looks_like_text(argument: str) -> bool:
    """Whether the argument is a program's text itself."""
    start = argument.lstrip()
    return start.startswith("{") or (start.startswith("model") and any(mark in argument for mark in (" ", "\n", ";")))


def read_given(argument: str, campaign: Path | None) -> Given:
    """The program that an argument names. Raises UsageError saying what is wrong with it."""
    if looks_like_text(argument):
        program = read_program(argument)
        return Given(program, one_line(program))
    if not argument:
        raise UsageError("PROGRAM is empty; give a file, a finding's folder or id, the text itself, or - for standard input")
    if argument == "-":
        if sys.stdin is None:
            raise UsageError("standard input is closed; give a file, a finding's folder or id, or the text itself")
        program = _program_in(sys.stdin.buffer.read(FILE_BYTES_MAX + 1), "standard input")
        return Given(program, one_line(program))  # standard input cannot be read again
    path = Path(argument)
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise UsageError(f"`{argument[:60]}` is no file, no id and no program text: {_why(error)}") from error
    if exists:
        return Given(read_file(_inside(path)), shlex.quote(argument))
    if name := _NAME.fullmatch(argument):
        where = "" if campaign is None else f" --campaign {shlex.quote(str(campaign))}"
        program = _find(name[1] or "*", name[2], campaign)
        return Given(program, program_id(program) + where)
    raise UsageError(
        f"`{argument[:60]}` is no file, no finding's folder or id and no program text; a text begins with its model, as in 'model lfm2 seed=0; decode 0:10'"
    )


def read_file(path: Path) -> Program:
    """The program in a file, as text or JSON. Raises UsageError that names the file and what is wrong with it."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{path} is a folder, not a program")
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path} is no ordinary file")
        if status.st_size > FILE_BYTES_MAX:
            raise UsageError(f"{path} has {status.st_size:,} bytes; a program has at most {FILE_BYTES_MAX:,}")
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {_why(error)}") from error
    return _program_in(data, str(path))


def _program_in(data: bytes, name: str) -> Program:
    """The program in the bytes of a file called `name`."""
    if len(data) > FILE_BYTES_MAX:
        raise UsageError(f"{name} has more than {FILE_BYTES_MAX:,} bytes; a program has at most so many")
    if b"\0" in data:
        raise UsageError(f"{name} is binary, not a program")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not a program: byte {error.start} is not UTF-8 text") from error
    try:
        return read_program(text)
    except ProgramError as error:
        raise UsageError(f"{name}: {error}") from error


def _why(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _inside(path: Path) -> Path:
    """The program of a finding's folder, or beside a finding's `finding.json`; any other path as it is."""
    beside = path / "program.drift" if path.is_dir() else path.with_name("program.drift")
    return beside if (path.is_dir() or path.name == "finding.json") and beside.is_file() else path


def _place(campaign: Path | None) -> Path:
    """The folder in which findings are looked for, at any depth: campaigns keep them in `findings/`, test suites by their names."""
    if campaign is not None and not campaign.is_dir():
        raise UsageError(f"{campaign} is no folder of a campaign")
    return RUNS if campaign is None else campaign


def _find(kind: str, wanted: str, campaign: Path | None) -> Program:
    """The finding whose id begins with `wanted`; `kind` of the divergence may be "*"."""
    place = _place(campaign)
    found: dict[str, Program] = {}
    for path in sorted(place.rglob(f"{kind}-{wanted[:6]}*/program.drift")):
        try:
            program = read_file(path)
        except UsageError:
            continue  # a damaged finding is not the one that was asked for; `report` says so
        if program_id(program).startswith(wanted):
            found[program_id(program)] = program
    if not found:
        where = f"{place}/" if place.is_dir() else f"{place}/ (which is not there)"
        named = f"with id {wanted}" if kind == "*" else f"{kind}-{wanted}"
        raise UsageError(f"no finding {named} in {where}; name its campaign with --campaign DIR")
    if len(found) > 1:
        raise UsageError(f"id {wanted} is short for {', '.join(sorted(found))}; give more digits")
    return next(iter(found.values()))
