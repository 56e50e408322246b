"""`statedrift bench mutants`: how soon named faults in our own caches are found, by us and by others, and whether the stated bounds hold.

Rules
- Every run is a line of JSON in a file; a last line that was not finished is dropped; what else stands there with the same limit and version is not run again.
  Files of different mutants, or of different runs of the same ones, can be joined: a file is its lines.
- The machine and the versions that something was measured with are a line, too.
- Before anything is measured every mutant shows itself on its own program, and its fixed twin passes it.
- The fixed twins run beside the search, on as many programs for each; or, with `--twins`, after it, family by family for so long.
- A peer that is not installed is left out, and the report says so.
- Status 1 when a stated bound fails; 2 when a mutant is not what it says.
"""

import contextlib
import fcntl
import math
import os
from collections.abc import Sequence
from io import BufferedWriter
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..fuzz import hypofuzz_baseline
from ..fuzz.mutants import MUTANTS, Mutant
from ..fuzz.mutants.search import FINDERS, Detection, Finder, Twin, TwinPiece, check_ready, search, sound_noise, try_twin, try_twins
from ..fuzz.throughput import one_core
from ..oracle.recompute import use_one_thread
from ..spec.errors import UsageError
from ..spec.models import Model
from ..store.campaigns import Noise
from ..targets.numba import TARGET
from . import failures
from .failures import complain
from .mutants_report import Measured, report_markdown, report_of, report_text, runs_csv
from .output import check_file, say, standard_output_reserved, write_file
from .throughput import machine_facts

SEEDS, SEEDS_FULL = 3, 10
SECONDS, SECONDS_FULL = 20.0, 60.0
PIECE_SECONDS = 30.0
"""The fixed twins of a family are run in pieces of so long: no more than one is lost when a run is broken off."""
PACKAGES = ("statedrift", "numpy", "numba", "torch", "msgspec", "hypothesis", "hypofuzz")

Facts = tuple[tuple[str, str], ...]


class Wanted(NamedTuple):
    """What is to be measured; twins_seconds: of each family, None for a number of programs of each twin and seed."""

    mutants: Sequence[Mutant]
    seeds: int
    limit_seconds: float
    finders: Sequence[Finder]
    twins_seconds: float | None


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the file of results: one of these."""

    version: str
    run: Detection | None = None
    twin: Twin | None = None
    twins: TwinPiece | None = None
    facts: Facts | None = None


_LINE_BEGINS = b'{"version":"'


class _Results:
    """What is known, from a file if there is one, and what is measured now, which goes to its end. One command has the file at a time."""

    def __init__(self, path: Path | None) -> None:
        """Raises UsageError for a file that is none of ours, that cannot be written, or that another command has."""
        self.path = path
        if path is not None:
            self._file = _held(path)
        self.version = TARGET.version()
        self.lines = [] if path is None else [line for line in _read(path) if line.version == self.version]
        self.facts = tuple(machine_facts(PACKAGES))

    def keep(self, line: _Line) -> None:
        """One line more, and before the first of a machine what it was measured with."""
        if self.facts not in [known.facts for known in self.lines]:
            self._append(_Line(self.version, facts=self.facts))
        self._append(line)

    def _append(self, line: _Line) -> None:
        self.lines.append(line)
        if self.path is None:
            return
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
        except OSError as error:
            raise UsageError(f"--results {self.path}: {error.strerror}; the runs before this one are kept") from error


def mutants_command(
    names: Sequence[str],
    is_full: bool,
    compares: bool,
    results: Path | None,
    as_json: bool,
    twins_seconds: float | None = None,
    write: Path | None = None,
    csv: Path | None = None,
) -> int:
    """Measure what is not in the file yet, print, and write pages when asked to; the answer is the exit status."""
    if twins_seconds is not None and not 0 < twins_seconds < math.inf:
        raise UsageError(f"--twins {twins_seconds:g}: give a number of seconds above 0")
    for option, path in (("--results", results), ("--write", write), ("--csv", csv)):
        check_file(option, path)
    seeds, limit_seconds = (SEEDS_FULL, SECONDS_FULL) if is_full else (SEEDS, SECONDS)
    wanted = Wanted(_chosen(names), seeds, limit_seconds, FINDERS if compares else FINDERS[:1], twins_seconds)
    kept = _Results(results)
    with standard_output_reserved() if as_json else contextlib.nullcontext():
        measured = _measured(wanted, kept)
    report = report_of(wanted.mutants, seeds, limit_seconds, measured)
    say(msgspec.json.encode(report).decode() + "\n" if as_json else report_text(report), plain=as_json)
    if write is not None:
        write_file("--write", write, report_markdown(report, _joined([line.facts for line in kept.lines if line.facts] or [kept.facts])))
    if csv is not None:
        write_file("--csv", csv, runs_csv(measured.runs))
    return failures.OK if all(bound.holds for bound in report.bounds) else failures.DIVERGENCE


def _chosen(names: Sequence[str]) -> list[Mutant]:
    for name in names:
        if name not in MUTANTS:
            raise UsageError(f"there is no mutant `{name}`; docs/mutants.md lists them, such as {next(iter(MUTANTS))}")
    return [mutant for name, mutant in MUTANTS.items() if not names or name in names]


def _held(results: Path) -> BufferedWriter:
    """The file, open for more lines and locked until this process ends."""
    if results.exists() and not results.is_file():
        raise UsageError(f"--results {results}: it is no ordinary file")
    try:
        file = results.open("ab")
    except OSError as error:
        raise UsageError(f"--results {results}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UsageError(f"--results {results}: another command has this file") from None
    return file


def _read(results: Path) -> list[_Line]:
    """All lines; a last line without its end, of a run that was ended while it wrote, is taken out of the file. Raises UsageError for a
    file that is none of ours."""
    try:
        data = results.read_bytes()
        end = data.rfind(b"\n") + 1
        lines = [msgspec.json.decode(line, type=_Line) for line in data[:end].splitlines()]
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"--results {results}: it cannot be read as results of this command: {error}") from error
    torn = data[end:]
    if torn and not _LINE_BEGINS.startswith(torn[: len(_LINE_BEGINS)]):
        raise UsageError(f"--results {results}: its last line is none of this command's; give another file")
    if torn:
        os.truncate(results, end)
    return lines


def _joined(facts: Sequence[Facts]) -> list[tuple[str, str]]:
    """The facts of several machines or days as one list."""
    values: dict[str, list[str]] = {}
    for name, value in (fact for some in facts for fact in some):
        values.setdefault(name, []).append(value)
    return [(name, "; ".join(dict.fromkeys(some))) for name, some in values.items()]


def _measured(wanted: Wanted, results: _Results) -> Measured:
    """The runs asked for: those that are known, and the others, which are made now."""
    use_one_thread()
    noises = sound_noise(wanted.mutants)
    runs = {
        (line.run.mutant, line.run.finder, line.run.seed): line.run
        for line in results.lines
        if line.run and line.run.limit_seconds == wanted.limit_seconds
    }
    twins = {(line.twin.mutant, line.twin.seed): line.twin for line in results.lines if line.twin}
    measured = Measured([], [], [], [])
    with one_core():
        for number, mutant in enumerate(wanted.mutants):
            check_ready(mutant, noises)
            complain(f"mutant {number + 1} of {len(wanted.mutants)}: {mutant.name}")
            for seed in range(wanted.seeds):
                if wanted.twins_seconds is None:
                    if (mutant.name, seed) not in twins:
                        twins[mutant.name, seed] = try_twin(mutant, seed, noises)
                        results.keep(_Line(results.version, twin=twins[mutant.name, seed]))
                    measured.twins.append(twins[mutant.name, seed])
                for finder in wanted.finders:
                    key = mutant.name, finder, seed
                    if key not in runs:
                        if finder == "hypofuzz" and not hypofuzz_baseline.is_installed():
                            measured.gaps[:] = [hypofuzz_baseline.MISSING]
                            continue
                        runs[key] = search(mutant, finder, seed, wanted.limit_seconds, noises)
                        results.keep(_Line(results.version, runs[key]))
                    measured.runs.append(runs[key])
        if wanted.twins_seconds is not None:
            for family in dict.fromkeys(mutant.family for mutant in wanted.mutants):
                of_family = [mutant for mutant in wanted.mutants if mutant.family == family]
                complain(f"fixed twins of {family}, {len(of_family)} in turns for {wanted.twins_seconds:g} s")
                measured.pieces.extend(_twin_pieces(of_family, wanted.twins_seconds, noises, results))
    return measured


def _twin_pieces(mutants: Sequence[Mutant], seconds: float, noises: dict[Model, Noise], results: _Results) -> list[TwinPiece]:
    """The pieces of the time that the twins of one family are run for: those that are known, and the others, which are run now."""
    names = tuple(mutant.name for mutant in mutants)
    known = {line.twins.number: line.twins for line in results.lines if line.twins and line.twins.mutants == names}
    pieces: list[TwinPiece] = []
    while (left := seconds - sum(piece.seconds for piece in pieces)) > 0:
        number = len(pieces)
        if number not in known:
            known[number] = try_twins(mutants, number, min(PIECE_SECONDS, left), noises)
            results.keep(_Line(results.version, twins=known[number]))
        pieces.append(known[number])
    return pieces
