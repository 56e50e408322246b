"""Walk one program through one session, beside the contract.

Rules
- The walk stops at the first divergence that shows without output rows (an answer or a position); rows are judged afterwards.
- Nothing here imports torch: this also runs in the child process of a native target.
- An exception of the target other than UsageError and UnavailableError is the target's answer `error`, never lost; `EngineAbort` is its
  answer `crash`, and ends the program.
- Two targets that are held to each other are *followed*: nothing they answer ends the program but a death, and the calls depend on
  nothing but the program, the answers so far, and the capabilities that both have.
"""

import contextlib
import functools
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from ..oracle.contract import MUST_ACCEPT, Checker, Demand, Piece, Positions, Span
from ..spec.configuration import CacheConfiguration, changed
from ..spec.errors import EngineAbort, UnavailableError, UsageError
from ..spec.families import dimensions_of, doubled
from ..spec.models import Model
from ..spec.operations import (
    OPEN,
    AnyOperation,
    Cancel,
    Clear,
    Damage,
    Decode,
    Divide,
    Drop,
    Item,
    Keep,
    Outputs,
    Remove,
    Reopen,
    Restore,
    RestoreAll,
    Rollback,
    Save,
    SaveAll,
    Share,
    Shift,
    sequences_of,
)  # fmt: skip
from ..spec.programs import Program
from ..spec.target import Batch, Capabilities, Decoded, Session, Target
from ..spec.tokens import DIRTY_SALT, DIRTY_TOKEN_COUNT, implicit_tokens
from ..spec.verdicts import ACCEPTED, Outcome, Verdict
from .inspection import Inspection, Inspector, relation_to, shown


class Step(msgspec.Struct, frozen=True):
    """One operation as it went.

    outcome    the answer
    demand     what the contract asked (contract.DemandWord), and why
    positions  first and last position of every sequence afterwards
    """

    outcome: Outcome
    demand: str
    reason: str
    positions: tuple[tuple[int, int], ...]


class Manner(msgspec.Struct, frozen=True):
    """How a program is walked.

    follow   do not stop at what the contract forbids: take every answer as it is, and keep the rows of every accepted decode
    allowed  the capabilities that may be used, one for every session that the program opens; empty: all that the session declares
    inspect  ask for the state rows of every sequence whose log is checked, after every operation that was sent
    """

    follow: bool = False
    allowed: tuple[Capabilities, ...] = ()
    inspect: bool = False


PLAIN = Manner()
NOTHING_DECLARED = Capabilities("none", 0, 1, 0, False, False)
"""Of a session that could never be opened."""


class Run(msgspec.Struct, frozen=True):
    """What came of a program.

    steps    one for every operation that was reached
    spans    which log each output row belongs to
    rows     for every operation with spans, float32 rows as bytes, and their width
    verdict  a divergence in answers or positions; None says nothing of output rows, which are judged later (fuzz/judgement.py)
    capabilities  of the last session
    sessions capabilities of every session, in order: the first, and one for every reopen
    followed answers were taken as they are (Manner.follow); capabilities are those that were allowed
    inspections  the state rows that were shown (Manner.inspect), of every log each form once
    """

    steps: tuple[Step, ...]
    spans: tuple[Span, ...]
    rows: dict[int, tuple[bytes, int]]
    verdict: Verdict | None
    capabilities: Capabilities
    sessions: tuple[Capabilities, ...] = ()
    followed: bool = False
    inspections: tuple[Inspection, ...] = ()


Progress = Callable[[int], None]


class Layout(NamedTuple):
    """A decode's pieces as one batch; for every piece and token its place among the wanted rows."""

    batch: Batch
    places: list[list[int]]
    wanted: list[list[bool]]


def lay_out(pieces: tuple[Piece, ...], interleave: bool, outputs: Outputs) -> Layout:
    """Order the tokens of a decode, item by item or round-robin over sequences, and say which rows are wanted.

    Round-robin keeps the order within a sequence; it is not done for tokens that belong to several sequences at once.
    """
    newest = {sequence: number for number, piece in enumerate(pieces) for sequence in piece.sequences} if outputs == "last" else {}
    last_pieces = set(newest.values())
    tokens: list[int] = []
    positions: list[int] = []
    sequences: list[tuple[int, ...]] = []
    wanted = []
    for number, piece in enumerate(pieces):
        count = len(piece.tokens)
        tokens += piece.tokens
        positions += range(piece.first_position, piece.first_position + count)
        sequences += [piece.sequences] * count
        wanted.append([True] * count if outputs != "last" else [False] * (count - 1) + [number in last_pieces])
    asked = list(chain.from_iterable(wanted))
    order: Sequence[int] = range(len(tokens))
    if interleave and all(len(piece.sequences) == 1 for piece in pieces):
        order = _round_robin(sequences)
        tokens, positions = [tokens[place] for place in order], [positions[place] for place in order]
        sequences = [sequences[place] for place in order]
    places = [-1] * len(asked)
    for row, place in enumerate(filter(asked.__getitem__, order)):
        places[place] = row
    ends = accumulate((len(piece.tokens) for piece in pieces), initial=0)
    batch = Batch(
        tokens=np.array(tokens, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        sequences=tuple(sequences),
        wanted=np.array(list(map(asked.__getitem__, order)), dtype=bool),
        outputs=outputs,
    )
    return Layout(batch, [places[start:end] for start, end in pairwise(ends)], wanted)


def _round_robin(sequences: Sequence[tuple[int, ...]]) -> list[int]:
    """The order that puts the first token of every sequence first, then the second of every sequence, and so on."""
    seen: Counter[tuple[int, ...]] = Counter()
    turns = []
    for ids in sequences:
        turns.append(seen[ids])
        seen[ids] += 1
    return sorted(range(len(turns)), key=turns.__getitem__)


def open_session(target: Target, model: Model, cache: CacheConfiguration, allowed: Capabilities | None = None) -> Session:
    """Open a session over memory in the state that `start` asks for.

    dirty: every sequence decodes a few tokens, then everything is cleared but the data. A target that cannot poison its
    memory runs `poison` as `dirty`. `allowed`: what may be used of the session. Raises UnavailableError, UsageError or EngineAbort as
    the target does.
    """
    session = target.open(model, cache)
    if cache.start == "dirty" or (cache.start == "poison" and not target.poison):
        try:
            _use_memory(session, allowed or session.capabilities, cache.n_seq_max, dimensions_of(model)["n_vocab"])
        except BaseException:
            session.close()
            raise
    return session


def _use_memory(session: Session, capabilities: Capabilities, n_seq_max: int, vocabulary_size: int) -> None:
    count = min(DIRTY_TOKEN_COUNT, capabilities.n_batch, capabilities.n_ctx or DIRTY_TOKEN_COUNT)
    for sequence in range(n_seq_max):
        session.decode(_dirty_batch(sequence, count, vocabulary_size))
    session.clear(False)


@functools.lru_cache(maxsize=1024)
def _dirty_batch(sequence: int, token_count: int, vocabulary_size: int) -> Batch:
    return _plain_batch(sequence, implicit_tokens(sequence, 0, token_count, DIRTY_SALT, vocabulary_size), 0)


def _plain_batch(sequence: int, tokens: tuple[int, ...], first_position: int) -> Batch:
    return lay_out((Piece((sequence,), tokens, first_position, 0),), False, "last").batch


def death_verdict(kind: Literal["crash", "hang"], program: Program, index: int, reason: str) -> Verdict:
    """A death at operation `index`; -1: while opening the session."""
    if index < 0:
        return Verdict(kind, relation="self", reason=reason)
    named = sorted(sequences_of(program.operations[index]))
    return Verdict(kind, index, named[0] if named else None, relation="self", reason=reason)


def _abort_verdict(program: Program, index: int, error: EngineAbort) -> Verdict:
    return death_verdict("crash", program, index, f"the engine would have died (abort): {error}"[:300])


def _abort_of(error: EngineAbort | SystemExit, target: Target) -> EngineAbort:
    """Who calls sys.exit in this process would have ended it. Raises SystemExit again in a process of the target's own: that one ends."""
    if isinstance(error, EngineAbort):
        return error
    if target.isolated:
        raise error
    return EngineAbort(f"sys.exit({error.code!r})")


_TARGETS_WORDS = ("accepted", "refused", "cancelled", "error")
"""What a target may answer; the other words are said of it."""


class _Walk:
    """One program on its way through a target."""

    def __init__(self, program: Program, target: Target, manner: Manner) -> None:
        self.program = program
        self.target = target
        self.manner = manner
        self.cache = program.cache
        dimensions = dimensions_of(program.model)
        self.widths = {"all": dimensions["n_vocab"], "last": dimensions["n_vocab"], "embeddings": dimensions["n_embd"]}
        self.sessions: list[Capabilities] = []
        self.session = self._open()
        self.is_open = True
        self.checker = Checker(program.cache, dimensions["n_vocab"], self.sessions[0])
        self.spans: list[Span] = []
        self.rows: dict[int, tuple[bytes, int]] = {}
        self.inspector = Inspector()

    def _open(self) -> Session:
        """The next session of the program; what may be used of it is noted."""
        number = len(self.sessions)
        allowed = self.manner.allowed[number] if number < len(self.manner.allowed) else None
        session = open_session(self.target, self.program.model, self.cache, allowed)
        self.sessions.append(allowed or session.capabilities)
        return session

    def step(self, index: int, operation: AnyOperation) -> tuple[Step, Verdict | None]:
        """Send one operation, judge its answer, bring the logs up to date."""
        demand = self._demand(operation)
        if demand.word in ("skip", "undeclared"):
            outcome = Outcome("skipped" if demand.word == "skip" else "refused", demand.reason)
            return Step(outcome, demand.word, demand.reason, tuple(self.checker.before)), None
        try:
            outcome = self._perform(index, operation)
            if not isinstance(outcome, Outcome):
                raise TypeError(f"the answer must be an Outcome, not {type(outcome).__name__}")
            if outcome.word not in _TARGETS_WORDS:
                raise ValueError(f"the answer must be accepted, refused, cancelled or error, not {outcome.word}")
            positions = self._positions()
        except (UsageError, UnavailableError):
            raise
        except (EngineAbort, SystemExit) as error:
            abort = _abort_of(error, self.target)
            outcome = Outcome("crash", str(abort)[:300])
            return Step(outcome, demand.word, demand.reason, tuple(self.checker.before)), _abort_verdict(self.program, index, abort)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            outcome = Outcome("error", f"{type(error).__name__}: {error} ({place.name})"[:300])
            positions = self.checker.before
        step = Step(outcome, demand.word, demand.reason, tuple(positions))
        if self.manner.follow:
            self.checker.follow(index, operation, outcome, positions)
            return step, None
        verdict = self.checker.conclude(index, operation, demand, outcome, positions)
        if verdict is None and self.manner.inspect and self.session.capabilities.inspect:
            return self._inspect(index, operation, step)
        return step, verdict

    def _inspect(self, index: int, operation: AnyOperation, step: Step) -> tuple[Step, Verdict | None]:
        """Take down what the session shows of its state after an operation; a session that cannot show it has not answered."""
        if isinstance(operation, Reopen):
            self.inspector.forget()
        for sequence, log in enumerate(self.checker.ledger.logs):
            if log.unchecked:
                self.inspector.skip(sequence)
                continue
            try:
                now = shown(self.session.inspect(sequence))
            except (UsageError, UnavailableError):
                raise
            except (EngineAbort, SystemExit) as error:
                abort = _abort_of(error, self.target)
                crash = Outcome("crash", str(abort)[:300])
                return msgspec.structs.replace(step, outcome=crash), _abort_verdict(self.program, index, abort)
            except Exception as error:
                reason = f"sequence {sequence} could not be inspected: {type(error).__name__}: {error}"[:300]
                return step, Verdict("bad-refusal", index, sequence, relation=relation_to(operation, sequence), reason=reason)
            verdict = self.inspector.look(index, operation, step.outcome.word == "refused", sequence, log, now)
            if verdict is not None:
                return step, verdict
        return step, None

    def _demand(self, operation: AnyOperation) -> Demand:
        if self.manner.follow and isinstance(operation, Damage) and not self.checker.capabilities.engine:
            if operation.how in ("flip", "header"):
                return Demand("skip", "a byte of one target's blob is not the same byte of another's")
            if operation.slot in self.checker.ledger.slots:  # whatever the size of the blob
                return MUST_ACCEPT
        return self.checker.demand(operation)

    def _positions(self) -> Positions:
        positions = [(int(first), int(last)) for first, last in self.session.positions()]
        if len(positions) != self.cache.n_seq_max:
            raise ValueError(f"positions of {len(positions)} sequences instead of {self.cache.n_seq_max}")
        return positions

    def close(self) -> None:
        """Close the session, once."""
        if self.is_open:
            self.is_open = False
            self.session.close()

    def _perform(self, index: int, operation: AnyOperation) -> Outcome:
        session, logs = self.session, self.checker.ledger.logs
        match operation:
            case Decode(items=items, outputs=outputs):
                return self._decode(index, items, outputs or self.cache.outputs, None)
            case Cancel(items=items, at=at):
                return self._decode(index, items, self.cache.outputs, at)
            case Rollback(sequence=sequence, token_count=token_count):
                if token_count >= len(logs[sequence].tokens):
                    return session.remove(sequence, 0, OPEN)
                # of an unchecked log the position may be anything
                return session.remove(sequence, max(0, logs[sequence].position - token_count + 1), OPEN)
            case Remove(sequence=sequence, start=start, end=end):
                return session.remove(sequence, start, end)
            case Drop(sequence=sequence):
                return session.remove(sequence, 0, OPEN)
            case Share(source=source, destination=destination, start=start, end=end):
                if not self.checker.capabilities.partial_share:  # the range is known to cover the whole log
                    start = end = OPEN
                return session.share(source, destination, start, end)
            case Keep(sequence=sequence):
                return session.keep(sequence)
            case Shift(sequence=sequence, delta=delta):
                return session.shift(sequence, delta)
            case Divide(sequence=sequence, divisor=divisor):
                return session.divide(sequence, divisor)
            case Save(sequence=sequence, partial=partial, device=device):
                outcome, blob = session.save(sequence, partial, device)
                if outcome.word == "accepted":
                    self.checker.saved(operation, blob)
                return outcome
            case SaveAll():
                outcome, blob = session.save_all()
                if outcome.word == "accepted":
                    self.checker.saved(operation, blob)
                return outcome
            case Restore(slot=name, sequence=sequence):
                slot = self.checker.ledger.slots[name]
                return session.restore(sequence, slot.blob, slot.partial, slot.device)
            case RestoreAll(slot=name):
                return session.restore_all(self.checker.ledger.slots[name].blob)
            case Damage():
                self.checker.damaged(operation, self._damaged_blob(operation))
                return ACCEPTED
            case Clear():
                return session.clear(True)
            case Reopen(changes=changes):
                self.close()
                self.cache = changed(self.cache, changes)
                self.session = self._open()
                self.is_open = True
                self.checker.capabilities = self.sessions[-1]
                return ACCEPTED

    def _decode(self, index: int, items: tuple[Item, ...], outputs: Outputs, cancel_at: int | None) -> Outcome:
        pieces = self.checker.pieces(items)
        layout = lay_out(pieces, bool(self.cache.interleave), outputs)
        decoded = self.session.decode(layout.batch) if cancel_at is None else self.session.cancel(layout.batch, cancel_at)
        if decoded.outcome.word == "accepted":
            return self._keep_rows(index, pieces, layout, decoded)
        return decoded.outcome

    def _keep_rows(self, index: int, pieces: tuple[Piece, ...], layout: Layout, decoded: Decoded) -> Outcome:
        rows, expected = decoded.rows, (int(np.count_nonzero(layout.batch.wanted)), self.widths[layout.batch.outputs])
        if rows is None or rows.shape != expected or rows.dtype != np.float32:
            got = "no rows" if rows is None else f"rows {rows.shape} of {rows.dtype}"
            return Outcome("error", f"the decode was accepted with {got} instead of {expected} of float32")
        spans = self.checker.spans(index, pieces, layout.places, layout.wanted, layout.batch.outputs, self.manner.follow)
        if spans:
            self.spans += spans
            self.rows[index] = (rows.tobytes(), rows.shape[1])
        return decoded.outcome

    def _damaged_blob(self, operation: Damage) -> bytes:
        blob = self.checker.ledger.slots[operation.slot].blob
        match operation.how:
            case "truncate":
                return blob[: -operation.amount]
            case "flip":
                return blob[: operation.amount] + bytes((blob[operation.amount] ^ 1,)) + blob[operation.amount + 1 :]
            case "header":
                return b"\xff" * min(16, len(blob)) + blob[16:]
            case "foreign":
                return self._foreign_blob(operation.slot)

    def _foreign_blob(self, name: str) -> bytes:
        """The same save, made by a model of the same family with doubled width."""
        slot = self.checker.ledger.slots[name]
        session = self.target.open(doubled(self.program.model), self.cache)
        n_batch = min(session.capabilities.n_batch, self.checker.capabilities.n_batch)
        try:
            logs = slot.logs
            if not slot.whole and slot.sequence >= self.cache.n_seq_max:  # a blob without a token has no width to be foreign by
                logs = {0: slot.logs[slot.sequence]}
            for sequence, log in logs.items():
                if sequence < self.cache.n_seq_max:
                    for start in range(0, len(log.tokens), n_batch):
                        session.decode(_plain_batch(sequence, log.tokens[start : start + n_batch], start))
            if slot.whole:
                return session.save_all()[1]
            return session.save(next(iter(logs)), slot.partial, slot.device)[1]
        finally:
            session.close()


def execute(program: Program, target: Target, progress: Progress | None = None, manner: Manner = PLAIN) -> Run:
    """Run a program on a target until its end, a death, or (unless followed) the first divergence that shows without rows.

    progress is told the index of every operation before it is sent. Raises UnavailableError and UsageError when the target
    cannot open what the program asks for.
    """
    try:
        walk = _Walk(program, target, manner)
    except (EngineAbort, SystemExit) as error:
        return _dead_at_opening(program, target, manner, _abort_of(error, target))
    steps: list[Step] = []
    verdict = None
    try:
        with contextlib.closing(walk):
            for index, operation in enumerate(program.operations):
                if progress is not None:
                    progress(index)
                step, verdict = walk.step(index, operation)
                steps.append(step)
                if verdict is not None:
                    break
    except (EngineAbort, SystemExit) as error:  # only closing can: it belongs to the last operation
        abort = _abort_of(error, target)
        if verdict is None:
            verdict = _abort_verdict(program, len(steps) - 1, abort)
            steps[-1:] = [msgspec.structs.replace(step, outcome=Outcome("crash", str(abort)[:300])) for step in steps[-1:]]
    return Run(
        tuple(steps),
        tuple(walk.spans),
        walk.rows,
        verdict,
        walk.sessions[-1],
        tuple(walk.sessions),
        manner.follow,
        tuple(walk.inspector.inspections),
    )


def _dead_at_opening(program: Program, target: Target, manner: Manner, error: EngineAbort) -> Run:
    """A run whose engine died before the first operation; its capabilities are those of a session over fresh memory."""
    try:
        with contextlib.closing(target.open(program.model, program.cache)) as session:
            capabilities = session.capabilities
    except (EngineAbort, SystemExit):
        capabilities = NOTHING_DECLARED
    return dead_at_opening(_abort_verdict(program, -1, error), capabilities, manner)


def dead_at_opening(verdict: Verdict, capabilities: Capabilities, manner: Manner) -> Run:
    """A run that ended, so judged, before the first operation."""
    return Run((), (), {}, verdict, capabilities, (*manner.allowed[:1],) or (capabilities,), manner.follow)
