"""Walk one program through one session, beside the contract.

Rules
- The walk stops at the first divergence that shows without output rows (an answer or a position); rows are judged afterwards.
- Nothing here imports torch: this also runs in the child process of a native target.
- An exception of the target other than UsageError and UnavailableError is the target's answer `error`, never lost.
"""

import functools
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from ..oracle.contract import Checker, Piece, Positions, Span
from ..spec.configuration import CacheConfiguration, changed
from ..spec.errors import UnavailableError, UsageError
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
)  # fmt: skip
from ..spec.programs import Program
from ..spec.target import Batch, Capabilities, Decoded, Session, Target
from ..spec.tokens import DIRTY_SALT, DIRTY_TOKEN_COUNT, implicit_tokens
from ..spec.verdicts import ACCEPTED, Outcome, Verdict


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


class Run(msgspec.Struct, frozen=True):
    """What came of a program.

    steps    one for every operation that was reached
    spans    which log each output row belongs to
    rows     for every operation with spans, float32 rows as bytes, and their width
    verdict  a divergence in answers or positions; None says nothing of output rows, which are judged later (fuzz/judgement.py)
    capabilities  of the last session
    sessions capabilities of every session, in order: the first, and one for every reopen
    """

    steps: tuple[Step, ...]
    spans: tuple[Span, ...]
    rows: dict[int, tuple[bytes, int]]
    verdict: Verdict | None
    capabilities: Capabilities
    sessions: tuple[Capabilities, ...] = ()


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
    newest = {sequence: number for number, piece in enumerate(pieces) for sequence in piece.sequences}
    last_pieces = set(newest.values())
    wanted = [
        [True] * len(piece.tokens) if outputs != "last" else [False] * (len(piece.tokens) - 1) + [number in last_pieces]
        for number, piece in enumerate(pieces)
    ]
    tokens = [token for piece in pieces for token in piece.tokens]
    positions = [piece.first_position + index for piece in pieces for index in range(len(piece.tokens))]
    sequences = [piece.sequences for piece in pieces for _ in piece.tokens]
    asked = [want for piece_wanted in wanted for want in piece_wanted]
    order: Sequence[int] = range(len(tokens))
    if interleave and all(len(piece.sequences) == 1 for piece in pieces):
        order = _round_robin(sequences)
        tokens, positions = [tokens[place] for place in order], [positions[place] for place in order]
        sequences = [sequences[place] for place in order]
    places = [-1] * len(asked)
    for row, place in enumerate(place for place in order if asked[place]):
        places[place] = row
    ends = list(accumulate((len(piece.tokens) for piece in pieces), initial=0))
    batch = Batch(
        tokens=np.array(tokens, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        sequences=tuple(sequences),
        wanted=np.array([asked[place] for place in order], dtype=bool),
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


def open_session(target: Target, model: Model, cache: CacheConfiguration) -> Session:
    """Open a session over memory in the state that `start` asks for.

    dirty: every sequence decodes a few tokens, then everything is cleared but the data. A target that cannot poison its
    memory runs `poison` as `dirty`. Raises UnavailableError or UsageError as the target does.
    """
    session = target.open(model, cache)
    if cache.start == "dirty" or (cache.start == "poison" and not target.poison):
        try:
            _use_memory(session, cache.n_seq_max, dimensions_of(model)["n_vocab"])
        except BaseException:
            session.close()
            raise
    return session


def _use_memory(session: Session, n_seq_max: int, vocabulary_size: int) -> None:
    capabilities = session.capabilities
    count = min(DIRTY_TOKEN_COUNT, capabilities.n_batch, capabilities.n_ctx or DIRTY_TOKEN_COUNT)
    for sequence in range(n_seq_max):
        session.decode(_dirty_batch(sequence, count, vocabulary_size))
    session.clear(False)


@functools.lru_cache(maxsize=1024)
def _dirty_batch(sequence: int, token_count: int, vocabulary_size: int) -> Batch:
    return _plain_batch(sequence, implicit_tokens(sequence, 0, token_count, DIRTY_SALT, vocabulary_size), 0)


def _plain_batch(sequence: int, tokens: tuple[int, ...], first_position: int) -> Batch:
    return lay_out((Piece((sequence,), tokens, first_position, 0),), False, "last").batch


class _Walk:
    """One program on its way through a target."""

    def __init__(self, program: Program, target: Target) -> None:
        self.program = program
        self.target = target
        self.cache = program.cache
        dimensions = dimensions_of(program.model)
        self.widths = {"all": dimensions["n_vocab"], "last": dimensions["n_vocab"], "embeddings": dimensions["n_embd"]}
        self.session = open_session(target, program.model, program.cache)
        self.is_open = True
        self.sessions = [self.session.capabilities]
        self.checker = Checker(program.cache, dimensions["n_vocab"], self.session.capabilities)
        self.spans: list[Span] = []
        self.rows: dict[int, tuple[bytes, int]] = {}

    def step(self, index: int, operation: AnyOperation) -> tuple[Step, Verdict | None]:
        """Send one operation, judge its answer, bring the logs up to date."""
        demand = self.checker.demand(operation)
        if demand.word in ("skip", "undeclared"):
            outcome = Outcome("skipped" if demand.word == "skip" else "refused", demand.reason)
            return Step(outcome, demand.word, demand.reason, tuple(self.checker.before)), None
        try:
            outcome = self._perform(index, operation)
            if not isinstance(outcome, Outcome):
                raise TypeError(f"the answer must be an Outcome, not {type(outcome).__name__}")
            positions = self._positions()
        except (UsageError, UnavailableError):
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            outcome = Outcome("error", f"{type(error).__name__}: {error} ({place.name})"[:300])
            positions = self.checker.before
        verdict = self.checker.conclude(index, operation, demand, outcome, positions)
        return Step(outcome, demand.word, demand.reason, tuple(positions)), verdict

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
                if not session.capabilities.partial_share:  # the range is known to cover the whole log
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
                self.session = open_session(self.target, self.program.model, self.cache)
                self.is_open = True
                self.sessions.append(self.session.capabilities)
                self.checker.capabilities = self.session.capabilities
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
        spans = self.checker.spans(index, pieces, layout.places, layout.wanted, layout.batch.outputs)
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
        try:
            logs = slot.logs
            if not slot.whole and slot.sequence >= self.cache.n_seq_max:  # a blob without a token has no width to be foreign by
                logs = {0: slot.logs[slot.sequence]}
            for sequence, log in logs.items():
                if sequence < self.cache.n_seq_max:
                    for start in range(0, len(log.tokens), session.capabilities.n_batch):
                        session.decode(_plain_batch(sequence, log.tokens[start : start + session.capabilities.n_batch], start))
            if slot.whole:
                return session.save_all()[1]
            return session.save(next(iter(logs)), slot.partial, slot.device)[1]
        finally:
            session.close()


def execute(program: Program, target: Target, progress: Progress | None = None) -> Run:
    """Run a program on a target until its end, or the first divergence that shows without rows.

    progress is told the index of every operation before it is sent. Raises UnavailableError and UsageError when the target
    cannot open what the program asks for.
    """
    walk = _Walk(program, target)
    steps: list[Step] = []
    verdict = None
    try:
        for index, operation in enumerate(program.operations):
            if progress is not None:
                progress(index)
            step, verdict = walk.step(index, operation)
            steps.append(step)
            if verdict is not None:
                break
        capabilities = walk.session.capabilities
    finally:
        walk.close()
    return Run(tuple(steps), tuple(walk.spans), walk.rows, verdict, capabilities, tuple(walk.sessions))
