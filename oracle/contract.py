"""The contract as one checker: what must be accepted, what must be refused, and what every answer means for the logs.

Rules
- One `Checker` walks beside one program: `demand` before an operation is sent, `conclude` after its answer.
- It knows logs, never caches; every row of docs/contract.md's table is one `case` here, whether or not a target can do it yet.
- It judges acceptance and positions at once; output rows are collected as `Span`s and judged later, in bulk.
- Only the first divergence counts: the caller stops there.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Literal, NamedTuple

import msgspec

from ..spec.configuration import CacheConfiguration, changed
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
    operation_name,
    sequences_of,
)  # fmt: skip
from ..spec.target import Capabilities
from ..spec.tokens import implicit_tokens
from ..spec.verdicts import Outcome, Relation, Verdict
from .ledger import EMPTY, Ledger, Log, Slot

POSITION_MAX = 1 << 30

DemandWord = Literal["must-accept", "must-refuse", "may", "skip", "undeclared"]


class Demand(NamedTuple):
    """What the contract asks of an operation, and why.

    skip        the operation does not apply; it is not sent
    undeclared  the target does not offer it; it is refused without a call
    """

    word: DemandWord
    reason: str = ""


MUST_ACCEPT = Demand("must-accept")
MAY = Demand("may")


class Span(msgspec.Struct, frozen=True):
    """Output rows of one sequence from one decode.

    log       the sequence's tokens up to its last token of this decode
    indices   which of them the rows belong to
    offset    position of a token minus its index
    places    where the rows are among the rows that the session returned
    relation  whether the last operation that was no decode named this sequence (so that late effects tell whose fault they are)
    """

    operation_index: int
    sequence: int
    hidden: bool
    log: tuple[int, ...]
    indices: tuple[int, ...]
    offset: int
    places: tuple[int, ...]
    relation: Relation


class Piece(NamedTuple):
    """The tokens of one item of a batch, as they are to be sent."""

    sequences: tuple[int, ...]
    tokens: tuple[int, ...]
    first_position: int
    first_index: int


Positions = Sequence[tuple[int, int]]


def removed_tokens(log: Log, start: int, end: int) -> tuple[int, bool]:
    """How many tokens of a log lie in positions start..end-1 (OPEN: open end), and whether its last token is among them."""
    if not log.tokens:
        return 0, False
    low = max(start, log.first_position, 0)
    high = log.position if end == OPEN else min(end - 1, log.position)
    return max(0, high - low + 1), high == log.position and low <= high


class Checker:
    """The contract over one program on one target."""

    def __init__(self, cache: CacheConfiguration, vocabulary_size: int, capabilities: Capabilities) -> None:
        self.cache = cache
        self.vocabulary_size = vocabulary_size
        self.capabilities = capabilities
        self.ledger = Ledger(cache.n_seq_max)
        self.before: Positions = [(-1, -1)] * cache.n_seq_max
        self.suspect: AnyOperation | None = None  # the last accepted operation that was no decode

    # --- before an operation is sent -----------------------------------------------------------------------------------

    def demand(self, operation: AnyOperation) -> Demand:
        """What the contract asks of `operation` in the present state."""
        logs = self.ledger.logs
        if max(sequences_of(operation), default=-1) >= len(logs):
            return Demand("skip", "the session has no such sequence any more")
        match operation:
            case Decode(items=items, outputs=outputs):
                return self._demand_decode(items, outputs or self.cache.outputs)
            case Cancel(items=items):
                if not self.capabilities.cancel:
                    return Demand("undeclared", "this target cannot cancel a decode")
                demand = self._demand_decode(items, self.cache.outputs)
                return MAY if demand.word == "must-accept" else demand
            case Rollback(sequence=sequence, token_count=token_count):
                return self._demand_rollback(logs[sequence], token_count)
            case Remove(sequence=sequence, start=start, end=end):
                return self._demand_remove(logs[sequence], start, end)
            case Share():
                return self._demand_share(operation)
            case Shift(sequence=sequence, delta=delta):
                return self._demand_shift(logs[sequence], delta)
            case Divide(sequence=sequence):
                if not self.capabilities.divide:
                    return Demand("undeclared", "this target cannot divide positions")
                return Demand("skip", "nothing to divide") if not logs[sequence].tokens else MAY
            case Save(partial=partial, device=device):
                if not self.capabilities.save:
                    return Demand("undeclared", "this target cannot save a sequence")
                if (partial and not self.capabilities.partial) or (device and not self.capabilities.device):
                    return Demand("undeclared", "this target has no such save")
                return MUST_ACCEPT
            case SaveAll():
                return MUST_ACCEPT if self.capabilities.save_all else Demand("undeclared", "this target cannot save a whole session")
            case Restore(slot=name, sequence=sequence):
                return self._demand_restore(name, sequence)
            case RestoreAll(slot=name):
                return self._demand_restore_all(name)
            case Damage(slot=name, how=how, amount=amount):
                return self._demand_damage(name, how, amount)
            case Drop() | Keep() | Clear() | Reopen():
                return MUST_ACCEPT

    def pieces(self, items: tuple[Item, ...]) -> tuple[Piece, ...]:
        """The items with their tokens and positions; several items of one sequence append in order."""
        added: dict[int, int] = {}
        result = []
        for item in items:
            lowest = min(item.sequences)
            log = self.ledger.logs[lowest]
            index = len(log.tokens) + added.get(lowest, 0)
            tokens = item.tokens
            if tokens is None:
                tokens = implicit_tokens(lowest, index, item.token_count, item.salt, self.vocabulary_size)
            result.append(Piece(item.sequences, tokens, log.position + 1 + added.get(lowest, 0), index))
            for sequence in item.sequences:
                added[sequence] = added.get(sequence, 0) + item.token_count
        return tuple(result)

    def _demand_decode(self, items: tuple[Item, ...], outputs: Outputs) -> Demand:
        logs = self.ledger.logs
        if outputs == "embeddings" and not self.capabilities.embeddings:
            return Demand("undeclared", "this target has no hidden states")
        total = sum(item.token_count for item in items)
        if total > self.capabilities.n_batch:
            return Demand("undeclared", f"{total} tokens are more than this target's largest batch, {self.capabilities.n_batch}")
        coupled = self._demand_coupled(items)
        if coupled.word in ("skip", "undeclared", "must-refuse"):
            return coupled
        if any(logs[sequence].unchecked for item in items for sequence in item.sequences):
            return Demand("may", "a sequence of the batch is unchecked")
        return MUST_ACCEPT if self._has_room(items) else Demand("may", "beyond the capacity")

    def _demand_coupled(self, items: tuple[Item, ...]) -> Demand:
        """Tokens that belong to several sequences at once: their logs, at that point of the batch, must be the same.

        Different lengths are refused by their positions; when a shift made the positions equal, no engine can see the lengths.
        """
        if all(len(item.sequences) == 1 for item in items):
            return MUST_ACCEPT
        if not self.capabilities.coupled:
            return Demand("undeclared", "this target has no tokens of several sequences here")
        added: dict[int, tuple[int, ...]] = {}
        worst = MUST_ACCEPT
        for item, piece in zip(items, self.pieces(items), strict=True):
            present = [(self.ledger.logs[sequence], added.get(sequence, ())) for sequence in item.sequences]
            # Divided positions are compared by identity: what lies below the last one is not known.
            states = [(log.tokens + new, log.position + len(new), log.marks if log.divided else ()) for log, new in present]
            if len(present) > 1 and any(log.unchecked for log, _ in present):
                worst = Demand("skip", "a sequence of a coupled token is unchecked, and would make the others so")
            elif len({len(tokens) for tokens, _, _ in states}) > 1 and len({position for _, position, _ in states}) > 1:
                return Demand("must-refuse", "the sequences of a coupled token have different lengths")
            elif len(set(states)) > 1:
                worst = Demand("skip", "the sequences of a coupled token have different logs, which no engine can see")
            for sequence in item.sequences:
                added[sequence] = added.get(sequence, ()) + piece.tokens
        return worst

    def _has_room(self, items: tuple[Item, ...]) -> bool:
        n_ctx = self.capabilities.n_ctx
        if not self.capabilities.attention or not n_ctx:
            return True
        if self.cache.unified:
            cells = n_ctx * len(self.ledger.logs)
            new = sum(item.token_count for item in items)
            return sum(len(log.tokens) for log in self.ledger.logs) + new <= cells or self.ledger.cached_tokens() + new <= cells
        added: dict[int, int] = {}
        for item in items:
            for sequence in item.sequences:
                added[sequence] = added.get(sequence, 0) + item.token_count
        return all(len(self.ledger.logs[sequence].tokens) + count <= n_ctx for sequence, count in added.items())

    def _demand_rollback(self, log: Log, token_count: int) -> Demand:
        if log.divided:
            return Demand("skip", "positions were divided")
        if token_count >= len(log.tokens):
            return MUST_ACCEPT
        if log.unchecked:
            return MAY
        match self.capabilities.guarantee:
            case "all":
                promised = token_count
            case "any":
                promised = log.depth
            case "draft":
                promised = min(self.capabilities.n_rs_seq, log.draft)
            case "none":
                promised = 0
        return Demand("must-accept", f"{token_count} of {promised} promised tokens") if token_count <= promised else MAY

    def _demand_remove(self, log: Log, start: int, end: int) -> Demand:
        if log.divided:
            return Demand("skip", "positions were divided")
        if log.unchecked:
            return MUST_ACCEPT if start <= 0 and end == OPEN else MAY
        count, with_last = removed_tokens(log, start, end)
        if count == 0:
            return Demand("must-accept", "the range holds no token")
        if not with_last:
            return Demand("must-refuse", "a state cannot forget its middle") if self.capabilities.recurrent else MAY
        return self._demand_rollback(log, count)

    def _covers(self, log: Log, start: int, end: int) -> bool:
        return removed_tokens(log, start, end)[0] == len(log.tokens)

    def _demand_share(self, share: Share) -> Demand:
        log = self.ledger.logs[share.source]
        if share.source == share.destination or (share.start, share.end) == (OPEN, OPEN):
            return MUST_ACCEPT
        if log.unchecked:
            return MAY
        if log.divided:
            return Demand("skip", "positions were divided")
        if self._covers(log, share.start, share.end):
            return MUST_ACCEPT
        if not self.capabilities.partial_share:
            return Demand("undeclared", "this target cannot share a range")
        return Demand("must-refuse", "a state is the whole past, not a range of it") if self.capabilities.recurrent else MAY

    def _demand_shift(self, log: Log, delta: int) -> Demand:
        if not self.capabilities.shift:
            return Demand("undeclared", "this target cannot shift positions")
        if not log.tokens:
            return Demand("skip", "nothing to shift")
        if log.divided:
            return Demand("skip", "positions were divided")
        if (log.unchecked and delta < 0) or log.first_position + delta < 0 or log.position + delta > POSITION_MAX:
            return Demand("skip", "a position would leave the allowed range")
        return MAY

    def _room_for_restore(self, logs: dict[int, Log]) -> bool:
        n_ctx = self.capabilities.n_ctx
        if not self.capabilities.attention or not n_ctx:
            return True
        if self.cache.unified:
            others = set().union(*(log.marks for sequence, log in enumerate(self.ledger.logs) if sequence not in logs))
            return len(others) + sum(len(log.tokens) for log in logs.values()) <= n_ctx * len(self.ledger.logs)
        return all(len(log.tokens) <= n_ctx for log in logs.values())

    def _demand_blob(self, slot: Slot, logs: dict[int, Log]) -> Demand:
        if slot.is_damaged:
            if {"header", "flip"} & set(slot.damages):
                return Demand("may", "a damaged blob may be noticed")
            return Demand("must-refuse", f"the blob was damaged ({', '.join(slot.damages)})")
        if (slot.n_seq_max, slot.unified, slot.cells) != (self.cache.n_seq_max, self.cache.unified, (self.cache.kv, self.cache.flash)):
            return Demand("may", "the blob is of another configuration")
        if any(log.unchecked for log in logs.values()):
            return Demand("may", "what was saved is unchecked")
        # a partial save goes under attention cells that are there already
        return MUST_ACCEPT if slot.partial or self._room_for_restore(logs) else Demand("may", "there may be no room")

    def _demand_restore(self, name: str, sequence: int) -> Demand:
        slot = self.ledger.slots.get(name)
        if slot is None or slot.whole:
            return Demand("skip", f"slot {name} holds no saved sequence")
        if slot.device and slot.session != self.ledger.session:
            return Demand("skip", "a device-bound blob is valid in its own session only")
        log = slot.logs[slot.sequence]
        if slot.partial and not slot.is_damaged:
            present = self.ledger.logs[sequence]
            is_prefix = present.tokens[: len(log.tokens)] == log.tokens
            is_prefix &= not log.tokens or present.first_position == log.first_position
            if sequence != slot.sequence or slot.session != self.ledger.session or not is_prefix or slot.shortest < len(log.tokens):
                return Demand("skip", "a partial save holds only where it was taken, on top of the same past")
            if present.divided or present.unchecked:
                return Demand("skip", "a partial save needs a past that is known")
        return self._demand_blob(slot, {sequence: log})

    def _demand_restore_all(self, name: str) -> Demand:
        slot = self.ledger.slots.get(name)
        if not self.capabilities.save_all:
            return Demand("undeclared", "this target cannot restore a whole session")
        if slot is None or not slot.whole:
            return Demand("skip", f"slot {name} holds no saved session")
        return self._demand_blob(slot, slot.logs)

    def _demand_damage(self, name: str, how: str, amount: int) -> Demand:
        slot = self.ledger.slots.get(name)
        if slot is None:
            return Demand("skip", f"slot {name} holds nothing")
        size = len(slot.blob)
        if (how == "truncate" and not 0 < amount < size) or (how == "flip" and amount >= size) or (how == "header" and size == 0):
            return Demand("skip", f"the blob has {size} bytes")
        return MUST_ACCEPT

    # --- after the answer ------------------------------------------------------------------------------------------------

    def conclude(self, index: int, operation: AnyOperation, demand: Demand, outcome: Outcome, positions: Positions) -> Verdict | None:
        """Judge the answer to operation number `index` and the positions after it, and bring the logs up to date.

        Returns None when nothing is wrong so far (output rows are judged later).
        """
        verdict = self._judge_outcome(index, operation, demand, outcome)
        if verdict is None:
            if outcome.word == "refused":
                verdict = self._after_refusal(index, operation, positions)
            else:
                verdict = self.take_effect(index, operation, outcome, positions) or self._judge_positions(index, operation, positions)
                if not isinstance(operation, Decode):
                    self.suspect = operation
        self._follow_unchecked(positions)
        self.before = positions
        return verdict

    def follow(self, index: int, operation: AnyOperation, outcome: Outcome, positions: Positions) -> None:
        """Bring the logs up to date with an answer as it is, right or wrong; nothing is judged.

        For two targets that are held to each other: as long as they answer alike, their logs are the same. A log whose last position is
        another than the target's is unchecked from there on, and follows the target; one that the target calls empty is empty.
        """
        ledger = self.ledger
        if outcome.word in ("accepted", "cancelled"):
            self.take_effect(index, operation, outcome, positions)
            if not isinstance(operation, Decode):
                self.suspect = operation
        for sequence, (_, last) in enumerate(positions[: len(ledger.logs)]):
            log = ledger.logs[sequence]
            if last != log.position:
                ledger.put(sequence, EMPTY if last < 0 else log._replace(position=last, unchecked=True))
        self.before = positions

    def _judge_outcome(self, index: int, operation: AnyOperation, demand: Demand, outcome: Outcome) -> Verdict | None:
        if outcome.word == "accepted" and demand.word != "must-refuse":
            return None
        name = operation_name(operation)
        detail = f": {outcome.detail}" if outcome.detail else ""
        because = f" ({demand.reason})" if demand.reason else ""
        if outcome.word == "error":
            verdict = Verdict("bad-refusal", index, reason=f"{name} was answered with an error, which is neither yes nor no{detail}")
        elif outcome.word == "cancelled" and not isinstance(operation, Cancel):
            verdict = Verdict("bad-refusal", index, reason=f"{name} was cancelled, which nobody asked for{detail}")
        elif outcome.word == "refused" and demand.word == "must-accept":
            verdict = Verdict("bad-refusal", index, reason=f"{name} must be accepted{because} but was refused{detail}")
        elif outcome.word in ("accepted", "cancelled") and demand.word == "must-refuse":
            verdict = Verdict("false-success", index, reason=f"{name} must be refused{because} but was accepted")
        else:
            return None
        named = sorted(sequences_of(operation))
        return msgspec.structs.replace(verdict, sequence=named[0] if named else None, relation="self")

    def _after_refusal(self, index: int, operation: AnyOperation, positions: Positions) -> Verdict | None:
        """A refused operation changes nothing; only a refused restore may leave its own destination empty."""
        may_empty: frozenset[int] = frozenset()
        if isinstance(operation, Restore):
            may_empty = frozenset((operation.sequence,))
        elif isinstance(operation, RestoreAll):
            may_empty = frozenset(range(len(positions)))
        for sequence, (old, new) in enumerate(zip(self.before, positions, strict=True)):
            if sequence in may_empty and new == (-1, -1):
                self.ledger.put(sequence, EMPTY._replace(unchecked=self.ledger.logs[sequence].unchecked))
            elif old != new and not self.ledger.logs[sequence].unchecked:
                reason = f"{operation_name(operation)} was refused, but sequence {sequence} went from positions {old} to {new}"
                return self._position_verdict("partial-effect", index, operation, sequence, new[1], reason)
        return None

    def take_effect(self, index: int, operation: AnyOperation, outcome: Outcome, positions: Positions) -> Verdict | None:
        """Bring the logs up to date with an accepted (or cancelled) operation."""
        ledger = self.ledger
        match operation:
            case Decode(items=items):
                self._append(items)
            case Cancel(items=items):
                if outcome.word != "cancelled":
                    self._append(items)
                else:
                    return self._after_cancel(index, operation, positions)
            case Rollback(sequence=sequence, token_count=token_count):
                ledger.cut(sequence, token_count)
            case Remove(sequence=sequence, start=start, end=end):
                self._after_remove(sequence, start, end)
            case Drop(sequence=sequence):
                ledger.put(sequence, EMPTY)
            case Share():
                self._after_share(operation)
            case Keep(sequence=kept):
                for sequence in range(len(ledger.logs)):
                    if sequence != kept:
                        ledger.put(sequence, EMPTY)
            case Shift(sequence=sequence, delta=delta):
                log = ledger.logs[sequence]
                marks = ledger.new_marks(len(log.tokens))  # a token that moved is not the one that others share
                ledger.put(sequence, log._replace(position=log.position + delta, draft=0, marks=marks))
                self._spoil_partial_saves(sequence)
            case Divide(sequence=sequence, divisor=divisor):
                log = ledger.logs[sequence]
                silent = log.silent or self.capabilities.attention
                marks = ledger.new_marks(len(log.tokens))
                position = log.position // divisor
                ledger.put(sequence, log._replace(position=position, draft=0, divided=True, silent=silent, marks=marks))
                self._spoil_partial_saves(sequence)
            case Restore(slot=name, sequence=sequence):
                slot = ledger.slots[name]
                log = self._restored(slot, slot.logs[slot.sequence])
                if slot.partial and not slot.is_damaged:  # the attention cells stayed
                    log = log._replace(marks=ledger.logs[sequence].marks[: len(log.tokens)])
                ledger.put(sequence, log)
            case RestoreAll(slot=name):
                slot = ledger.slots[name]
                for sequence in range(len(ledger.logs)):
                    ledger.put(sequence, self._restored(slot, slot.logs.get(sequence, EMPTY)))
            case Clear():
                for sequence in range(len(ledger.logs)):
                    ledger.put(sequence, EMPTY)
            case Reopen(changes=changes):
                self.cache = changed(self.cache, changes)
                ledger.reopen(self.cache.n_seq_max)
            case Save() | SaveAll() | Damage():
                pass  # `saved` and `damaged` record these, which also need the bytes
        return None

    def _append(self, items: tuple[Item, ...]) -> None:
        pieces = self.pieces(items)
        tokens: dict[int, tuple[int, ...]] = {}
        marks: dict[int, tuple[int, ...]] = {}
        coupled: set[int] = set()
        for piece in pieces:
            new = self.ledger.new_marks(len(piece.tokens))
            for sequence in piece.sequences:
                tokens[sequence] = tokens.get(sequence, ()) + piece.tokens
                marks[sequence] = marks.get(sequence, ()) + new
            if len(piece.sequences) > 1:
                coupled.update(piece.sequences)
        for sequence, given in tokens.items():
            self.ledger.append(sequence, given, marks[sequence], sequence not in coupled, self.capabilities.n_rs_seq)

    def _after_cancel(self, index: int, operation: Cancel, positions: Positions) -> Verdict | None:
        pieces = self.pieces(operation.items)
        for sequence in sorted(sequences_of(operation)):
            log = self.ledger.logs[sequence]
            given = tuple(token for piece in pieces if sequence in piece.sequences for token in piece.tokens)
            count = positions[sequence][1] - log.position
            if positions[sequence][1] == -1:
                self.ledger.put(sequence, EMPTY._replace(unchecked=log.unchecked))
            elif 0 <= count <= len(given):
                self.ledger.append(sequence, given[:count], self.ledger.new_marks(count), False, 0)
                self.ledger.put(sequence, self.ledger.logs[sequence]._replace(draft=0, depth=0))
            elif not log.unchecked:
                reason = (
                    f"a cancelled decode left sequence {sequence} at position {positions[sequence][1]}, which no prefix of its tokens has"
                )
                return self._position_verdict("wrong-position", index, operation, sequence, positions[sequence][1], reason)
        return None

    def _after_remove(self, sequence: int, start: int, end: int) -> None:
        log = self.ledger.logs[sequence]
        count, with_last = removed_tokens(log, start, end)
        if log.unchecked and not (start <= 0 and (end == OPEN or end > log.position)):
            return  # what is left of it is not known
        if log.unchecked or with_last:
            self.ledger.cut(sequence, len(log.tokens) if log.unchecked else count)
        elif count:
            self.ledger.put(sequence, log._replace(unchecked=True))

    def _after_share(self, share: Share) -> None:
        ledger = self.ledger
        if share.source == share.destination:
            return
        log = ledger.logs[share.source]
        if (share.start, share.end) == (OPEN, OPEN) or log.unchecked or self._covers(log, share.start, share.end):
            log = log._replace(draft=0)
            ledger.put(share.source, log)
            ledger.put(share.destination, log)
        else:
            ledger.put(share.destination, log._replace(unchecked=True))

    def _restored(self, slot: Slot, log: Log) -> Log:
        if not log.tokens:
            return EMPTY._replace(unchecked=log.unchecked or slot.is_damaged)
        depth = min(log.depth, self.capabilities.n_rs_seq) if slot.saves_snapshots and not slot.is_damaged else 0
        return log._replace(draft=0, depth=depth, unchecked=log.unchecked or slot.is_damaged, marks=self.ledger.new_marks(len(log.tokens)))

    def _spoil_partial_saves(self, sequence: int) -> None:
        """Positions moved: a recurrent half taken before does not fit the attention half any more."""
        for slot in self.ledger.slots.values():
            if slot.partial and slot.sequence == sequence:
                slot.shortest = -1

    def _judge_positions(self, index: int, operation: AnyOperation, positions: Positions) -> Verdict | None:
        has_first = not self.capabilities.recurrent and not self.capabilities.windowed
        for sequence, (first, last) in enumerate(positions):
            log = self.ledger.logs[sequence]
            if log.unchecked:
                continue
            if last != log.position:
                unmoved = sequence < len(self.before) and self.before[sequence] == (first, last)
                if unmoved and self._is_meant(operation, sequence):
                    reason = f"{operation_name(operation)} was accepted, but sequence {sequence} still ends at position {last}, not {log.position}"
                    return self._position_verdict("false-success", index, operation, sequence, last, reason)
                reason = f"after {operation_name(operation)} sequence {sequence} ends at position {last}, not {log.position}"
                return self._position_verdict("wrong-position", index, operation, sequence, last, reason)
            exact = has_first and not log.divided
            if (first == -1) != (last == -1) or first > last or (exact and first != log.first_position):
                reason = f"after {operation_name(operation)} sequence {sequence} says it begins at position {first} and ends at {last}"
                return self._position_verdict("wrong-position", index, operation, sequence, first, reason)
        return None

    def _is_meant(self, operation: AnyOperation, sequence: int) -> bool:
        """Whether an operation, when accepted, is to do something to a sequence."""
        match operation:
            case Keep(sequence=kept):
                return sequence != kept
            case Clear() | RestoreAll():
                return True
            case Reopen():
                return False
            case _:
                return sequence in sequences_of(operation)

    def _position_verdict(
        self, kind: Literal["wrong-position", "false-success", "partial-effect"], index: int, operation: AnyOperation, sequence: int, position: int,
        reason: str,
    ) -> Verdict:  # fmt: skip
        named = sequences_of(operation)
        relation: Relation = "self" if sequence in named or not named else "other"
        return Verdict(kind, index, sequence, position, relation, reason=reason)

    def _follow_unchecked(self, positions: Positions) -> None:
        """Of an unchecked log only the position is known, and only from the target: decoding on needs it."""
        for sequence, log in enumerate(self.ledger.logs[: len(positions)]):
            if log.unchecked and log.position != positions[sequence][1]:
                self.ledger.logs[sequence] = log._replace(position=positions[sequence][1])

    # --- what needs bytes or rows ----------------------------------------------------------------------------------------

    def saved(self, operation: Save | SaveAll, blob: bytes) -> None:
        """Record an accepted save."""
        ledger = self.ledger
        if isinstance(operation, Save):
            logs = {operation.sequence: ledger.logs[operation.sequence]}
            slot = Slot(logs, blob, False, self.cache.n_seq_max, self.cache.unified, ledger.session)
            slot.partial, slot.device = operation.partial, operation.device
            slot.shortest = len(logs[operation.sequence].tokens)
            if operation.device:
                self._forget_device_saves(operation.sequence)
        else:
            slot = Slot(dict(enumerate(ledger.logs)), blob, True, self.cache.n_seq_max, self.cache.unified, ledger.session)
        slot.cells = (self.cache.kv, self.cache.flash)
        slot.saves_snapshots = self.capabilities.saves_snapshots
        ledger.slots[operation.slot] = slot

    def _forget_device_saves(self, sequence: int) -> None:
        """A device-bound blob is valid until the next device save of its sequence."""
        for name in [name for name, slot in self.ledger.slots.items() if slot.device and slot.sequence == sequence]:
            del self.ledger.slots[name]

    def damaged(self, operation: Damage, blob: bytes) -> None:
        """Record damage to a slot."""
        slot = self.ledger.slots[operation.slot]
        slot.blob = blob
        if not slot.is_damaged:  # the same flip twice
            slot.damages = []
        elif operation.how == "foreign":  # nothing of what it was is left
            slot.damages = ["foreign"]
        else:
            slot.damages.append(operation.how)

    def spans(
        self, index: int, pieces: tuple[Piece, ...], places: list[list[int]], wanted: list[list[bool]], outputs: Outputs,
        everything: bool = False,
    ) -> list[Span]:  # fmt: skip
        """The output rows of an accepted decode that are to be judged; call before `conclude`.

        places   for every piece and token, the token's place among the returned rows
        wanted   for every piece and token, whether its row was asked for
        everything  also the rows of logs that are not judged
        """
        spans = []
        named = sequences_of(self.suspect) if self.suspect else frozenset()
        added: dict[int, tuple[int, ...]] = {}
        for piece, piece_places, piece_wanted in zip(pieces, places, wanted, strict=True):
            lowest = min(piece.sequences)
            log = self.ledger.logs[lowest]
            for sequence in piece.sequences:
                added[sequence] = added.get(sequence, ()) + piece.tokens
            logs = [self.ledger.logs[sequence] for sequence in piece.sequences]
            if not everything and any(own.unchecked or own.silent for own in logs):
                continue
            if any(piece_wanted):
                indices = range(piece.first_index, piece.first_index + len(piece.tokens))
                spans.append(
                    Span(
                        index,
                        lowest,
                        outputs == "embeddings",
                        log.tokens + added[lowest],
                        tuple(compress(indices, piece_wanted)),
                        piece.first_position - piece.first_index,
                        tuple(compress(piece_places, piece_wanted)),
                        "self" if not named or lowest in named else "other",
                    )
                )
        return spans
