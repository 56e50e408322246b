"""Films: a program on a cache of ours that shows its cells, picture by picture, beside the truth.

Rules
- The program is walked as always (execution.py); a picture is taken before every operation is sent and before a session is closed.
- What a plane holds is told from its bytes: bytes that are new after a decode are the states of the log that the cell's owner has then, one
  token less for each plane further back; bytes that were seen before are what they were. So a plane that was never written is known.
- A state that was computed from a wrong one is wrong, whatever its log.
- An engine shows no cells. Beside llama.cpp its memory is replayed that we rebuilt fault for fault; where it answers differently, the film ends.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ..oracle.ledger import Log
from ..oracle.recompute import recompute_of
from ..spec.configuration import CacheConfiguration
from ..spec.errors import UnavailableError, UsageError
from ..spec.models import Model
from ..spec.operations import AnyOperation, Cancel, Decode, Reopen
from ..spec.pictures import Film, FilmCell, FilmSequence, FilmStep, Offset, Plane, Reading, ShowsCells, Snapshot
from ..spec.programs import Program, operation_text
from ..spec.target import Session, Target
from ..store.findings import Answer
from ..targets.registry import load_target
from .execution import Run, execute
from .judgement import row_errors, span_errors
from .retrace import retrace

STEPS_MAX = 40
"""So many of a long program's newest steps are shown."""
TOKENS_MAX = 4096
"""Longer logs are not recomputed for a picture."""
STAND_INS = {"llamacpp": "numba-llamacpp"}
"""Which cache of ours is an engine's memory."""


class _Watched:
    """A session that is photographed before it is closed."""

    def __init__(self, session: Session, camera: "_Camera") -> None:
        self._session = session
        self._camera = camera

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def close(self) -> None:
        self._camera.take()
        self._camera.session = None
        self._session.close()


class _Camera:
    """A target whose newest session is photographed; sessions of other models (foreign blobs) are not."""

    def __init__(self, target: Target, model: Model) -> None:
        self._target = target
        self._model = model
        self.session: Session | None = None
        self.last: Snapshot | None = None
        self.pictures: list[Snapshot | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def open(self, model: Model, configuration: CacheConfiguration) -> Any:
        session = self._target.open(model, configuration)
        if model != self._model:
            return session
        self.session = session
        return _Watched(session, self)

    def take(self) -> None:
        """Photograph the session that is open now."""
        if isinstance(self.session, ShowsCells):
            with contextlib.suppress(Exception):  # of a session that died there is no picture
                self.last = self.session.snapshot()

    def before(self, index: int) -> None:
        """Keep what an operation finds: what the one before it left."""
        self.take()
        self.pictures.append(self.last)


def film_of(program: Program, target_name: str, answers: Sequence[Answer], tolerance: float) -> Film:
    """Film a program as far as its answers are known.

    answers    what the target itself said; the film ends where the cache that is filmed says otherwise. Empty: whatever it says is shown
    tolerance  of outputs and states, to which errors are held

    A target of which there is no picture gives a film without steps, with the reason in `note`.
    """
    name = STAND_INS.get(target_name, target_name)
    try:
        target = load_target(name)
        if target.isolated or program.model.family not in target.families:
            return Film(target_name, note=f"{target_name} does not show its cells, and no cache of ours stands for it with this family")
        version = target.version()
        camera = _Camera(target, program.model)
        run = execute(program, camera, camera.before)
    except (UnavailableError, UsageError) as error:
        return Film(target_name, note=f"there is no picture: {error}")
    camera.pictures.append(camera.last)
    if not any(camera.pictures):
        return Film(target_name, note=f"{target_name} does not show its cells")
    source = f"{name}, {version}"
    steps, logs_read = _steps(program, run, camera.pictures)
    agreed = _agreed(run, answers) if answers else len(steps)
    notes = (
        []
        if name == target_name
        else [f"{target_name} does not show its cells: this is its memory rebuilt ({source}), given the same program."]
    )
    if agreed < min(len(steps), len(answers)):
        notes.append(f"It answered operation {agreed + 1} differently, so the pictures end before it.")
        steps = steps[:agreed]
    offsets = _offsets(program, run, camera.pictures, logs_read, tolerance, len(steps)) if steps else ()
    skipped = max(0, len(steps) - STEPS_MAX)
    return Film(source, tuple(steps[skipped:]), skipped, tuple(own for own in offsets if own.index >= skipped), " ".join(notes))


def _agreed(run: Run, answers: Sequence[Answer]) -> int:
    """How many steps of a run were answered as the target itself did, positions included."""
    for number, (step, answer) in enumerate(zip(run.steps, answers, strict=False)):
        positions = tuple(last for _, last in step.positions)
        if step.outcome.word != answer.outcome.word or (answer.last_positions and positions != answer.last_positions):
            return number
    return min(len(run.steps), len(answers))


# --- from pictures to steps ---------------------------------------------------------------------------------------------------

_Label = tuple[tuple[int, ...] | None, int | None, bool]
"""Tokens of the log whose state it is (None: not known), the sequence, whether it is wrong."""
_ZERO: _Label = ((), None, False)
_UNKNOWN: _Label = (None, None, False)


class _Developer:
    """Knows what every digest stands for."""

    def __init__(self, first: Snapshot | None) -> None:
        self.labels: dict[int, _Label] = {0: _ZERO}
        self.wrong: set[int] = set()
        for cell in first.cells if first else ():
            for digest in cell.planes:
                self.labels.setdefault(digest, _UNKNOWN)

    def learn(self, snapshot: Snapshot, operation: AnyOperation, logs: Sequence[Log]) -> None:
        """Name the bytes that are new after an operation."""
        is_decode = isinstance(operation, Decode | Cancel)
        present = {(reading.cell, reading.sequence): reading.plane for reading in snapshot.readings}
        for number, cell in enumerate(snapshot.cells):
            owner = min(cell.owners, default=None)
            for plane, digest in enumerate(cell.planes):
                if digest in self.labels:
                    continue
                self.labels[digest] = _UNKNOWN
                if is_decode and owner is not None and not logs[owner].unchecked:
                    base = present.get((number, owner), 0)
                    back = (base - plane) % len(cell.planes) if snapshot.is_ring else plane - base
                    left = len(logs[owner].tokens) - back
                    if 0 < left <= len(logs[owner].tokens):
                        self.labels[digest] = (logs[owner].tokens[:left], owner, owner in self.wrong)

    def step(self, index: int, operation: AnyOperation, run: Run, snapshot: Snapshot, logs: Sequence[Log]) -> FilmStep:
        """What is seen after an operation."""
        cells = tuple(
            FilmCell(cell.owners, cell.position, tuple(_plane(self.labels[digest]) for digest in cell.planes)) for cell in snapshot.cells
        )
        readings = {reading.sequence: reading for reading in snapshot.readings}
        sequences = []
        positions = run.steps[index].positions
        for sequence, log in enumerate(logs):
            reading = readings.get(sequence)
            if reading is None and not log.tokens:
                continue
            claim = self._claim(snapshot, reading, log)
            (self.wrong.add if claim == "wrong" else self.wrong.discard)(sequence)
            attention = snapshot.attention[sequence] if snapshot.attention else None
            said = positions[sequence][1] if sequence < len(positions) else None
            own = FilmSequence(sequence, len(log.tokens), log.position, claim=claim, attention=attention, said=said)
            if reading is not None:
                own = msgspec.structs.replace(own, cell=reading.cell, plane=reading.plane, pending=reading.pending)
            sequences.append(own)
        outcome = run.steps[index].outcome
        return FilmStep(index, operation_text(operation), outcome.word, outcome.detail, cells, tuple(sequences))

    def _claim(self, snapshot: Snapshot, reading: Reading | None, log: Log) -> Any:
        if log.unchecked or not snapshot.cells:
            return "unknown"
        if reading is None or not log.tokens:
            return "wrong"
        tokens, _, is_wrong = self.labels[snapshot.cells[reading.cell].planes[reading.plane]]
        if tokens is None:
            return "unknown"
        return "right" if tokens == log.tokens and not is_wrong else "wrong"


def _plane(label: _Label) -> Plane:
    tokens, sequence, is_wrong = label
    return Plane(None if tokens is None else len(tokens), sequence, is_wrong)


def _steps(program: Program, run: Run, pictures: Sequence[Snapshot | None]) -> tuple[list[FilmStep], list[tuple[tuple[int, ...], ...]]]:
    """The steps, and for each the logs of the sequences afterwards."""
    developer = _Developer(pictures[0])
    steps: list[FilmStep] = []
    all_logs = []
    moments = retrace(program, run)
    moment = next(moments, None)
    while moment is not None:
        index, operation, checker = moment.index, moment.operation, moment.checker
        following = next(moments, None)  # now the logs are those after the operation
        snapshot = pictures[index + 1] if index + 1 < len(pictures) else None
        if snapshot is None:
            break
        if isinstance(operation, Reopen):
            developer.wrong.clear()
        developer.learn(snapshot, operation, checker.ledger.logs)
        steps.append(developer.step(index, operation, run, snapshot, checker.ledger.logs))
        all_logs.append(tuple(log.tokens if not log.unchecked else () for log in checker.ledger.logs))
        moment = following
    return steps, all_logs


# --- how far it was off -------------------------------------------------------------------------------------------------------


def _offsets(
    program: Program, run: Run, pictures: Sequence[Snapshot | None], logs: Sequence[tuple[tuple[int, ...], ...]], tolerance: float, end: int
) -> list[Offset]:
    """The worst output row of every decode, and the worst recurrent state after every operation, layer by layer, in tolerances."""
    worst: dict[tuple[int, str], float] = {}

    def add(index: int, what: str, errors: np.ndarray) -> None:
        if len(errors) and index < end:
            own = float(np.max(errors)) / tolerance if np.all(np.isfinite(errors)) else float("inf")
            worst[index, what] = max(worst.get((index, what), 0.0), own)

    for span, errors in zip(run.spans, span_errors(program.model, [run])[0], strict=True):
        add(span.operation_index, "output", errors)
    asked = []
    for index, own in enumerate(logs[:end]):
        snapshot = pictures[index + 1]
        for reading, rows in zip(snapshot.readings, snapshot.states, strict=True) if snapshot else ():
            if 0 < len(own[reading.sequence]) <= TOKENS_MAX:
                asked.append((index, own[reading.sequence], rows))
    truths = dict(zip([log for _, log, _ in asked], recompute_of(program.model).states([log for _, log, _ in asked]), strict=True))
    for index, log, rows in asked:
        true_rows = {(row.layer, row.part): row.values for row in truths[log]}
        for row in rows:
            truth = true_rows.get((row.layer, row.part))
            if truth is not None and truth.shape == row.values.shape:
                error = row_errors(row.values.reshape(1, -1), truth.astype(np.float64).reshape(1, -1))
                add(index, f"layer {row.layer} {row.part}", error)
    return [Offset(index, what, own) for (index, what), own in sorted(worst.items())]
