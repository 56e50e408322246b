"""Reduce a diverging program to the smallest one with the same signature.

Rules
- Every step keeps the coarse signature, and for wrong rows an error well above the tolerance, so that it does not drift to noise.
- A candidate is always smaller by `cost`, so the search ends; it ends at a fixpoint: no single step of `candidates` that is smaller keeps
  the divergence. A limit of trials (or of time) may end it before; then it says so.
- It does not slip to a finding that is already known: what a known finding needs is left out first, where the divergence stays,
  and a candidate whose operations are those of a known finding is not taken.
  If nothing else explains the program in the end, it was that finding, and says so.
- Other signatures met on the way are kept for the caller.
- The family belongs to the signature, so that a program stays in its own; but whether the same program goes wrong in the same way in a
  simpler family is tried, and what it would be called there is an alternative key of the same divergence.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from time import monotonic

import msgspec

from ..spec.configuration import CACHE_KEYS, CacheConfiguration
from ..spec.errors import UsageError
from ..spec.models import Model
from ..spec.operations import (
    OPEN,
    AnyOperation,
    Cancel,
    Damage,
    Decode,
    Divide,
    Drop,
    Item,
    Keep,
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
from ..spec.programs import Program, check_program, program_text
from .retrace import undocumented_uses
from .signatures import enabling_name, enabling_operations, fine_signature
from .trial import Bench, Trial
from .truth import PLAIN_SETTING, settings_of
from .two_builds import is_right_before

BATCH_CANDIDATES = 8
ERROR_FLOOR_TOLERANCES = 10.0
ERROR_FLOOR_SHARE = 0.1
DECORATION_SECONDS = 5.0
DECORATION_TRIALS = 200
"""At least so much a program that is reduced is compared with what is known, even when its own limit is reached."""
HANG_TRIALS = 100
"""What a trial costs that the target did not answer: all of its time limit."""


class Reduction(msgspec.Struct, frozen=True):
    """What a program was reduced to.

    trial      of the smallest program
    signature  fine
    known      the signature is one of those that were known before
    tried      candidates that were run
    is_fixpoint  no limit ended the search
    error_floor  the smallest error that counts as the same divergence; 0 where no error is measured
    alternatives  fine signatures of the same program in simpler families, where the same divergence shows
    others     one trial for each other coarse signature met on the way
    undocumented_uses  that the program cannot do without; empty: it is documented
    """

    trial: Trial
    signature: str
    known: bool
    tried: int
    others: tuple[Trial, ...]
    undocumented_uses: tuple[str, ...]
    is_fixpoint: bool = True
    error_floor: float = 0.0
    alternatives: tuple[str, ...] = ()

    @property
    def program(self) -> Program:
        return self.trial.program


def _rank(operation: AnyOperation) -> int:
    """Forms that are less plain than another form of the same thing."""
    match operation:
        case Remove() | Cancel():
            return 1
        case Save(partial=partial, device=device):
            return partial + device
        case Damage(how=how):
            return ("truncate", "header", "flip", "foreign").index(how)
        case Shift(delta=delta):
            return int(delta < 0)
        case _:
            return 0


def _numbers(operation: AnyOperation) -> int:
    """How large the numbers of an operation are, apart from sequences, tokens and salts."""
    match operation:
        case Rollback(token_count=token_count):
            return token_count
        case Remove(start=start, end=end) | Share(start=start, end=end):
            return abs(start) + abs(end)
        case Shift(delta=delta):
            return abs(delta)
        case Divide(divisor=divisor):
            return divisor
        case Cancel(at=at):
            return at
        case Damage(amount=amount):
            return amount
        case _:
            return 0


def _distance(key: str, value: int | str) -> int:
    """How far a number of the cache is from its default; words are only alike or not."""
    default = getattr(CacheConfiguration(), key)
    return abs(value - default) if isinstance(value, int) and isinstance(default, int) else 0


def _lower(value: int, *simplest: int) -> list[int]:
    """Smaller numbers to try in place of one: the simplest first, then half of it, and at last only one less."""
    return sorted({*simplest, value // 2, value - 1} - {value})


def cost(program: Program) -> tuple[int, ...]:
    """What makes a program large, the most important first."""
    items = [item for operation in program.operations if isinstance(operation, Decode | Cancel) for item in operation.items]
    default = CacheConfiguration()
    sequences = [sequence for operation in program.operations for sequence in sequences_of(operation)]
    return (
        len(program.operations),
        sum(len(item.sequences) for item in items),
        sum(map(_rank, program.operations)),
        sum(item.token_count for item in items),
        sum(map(_numbers, program.operations)),
        sum(item.tokens is not None for item in items),
        sum(getattr(program.cache, key) != getattr(default, key) for key in CACHE_KEYS) + len(program.model.dimensions),
        sum(_distance(key, getattr(program.cache, key)) for key in CACHE_KEYS),
        sum(item.salt + sum(item.tokens or ()) for item in items) + program.model.seed,
        sum(sequences),
        len(program_text(program)),
    )


# --- candidates ------------------------------------------------------------------------------------------------------------


def _with_operations(program: Program, operations: Sequence[AnyOperation]) -> Program:
    return msgspec.structs.replace(program, operations=tuple(operations))


def _without_chunks(program: Program) -> Iterator[Program]:
    """Leave out runs of operations: halves, quarters, ... single ones, from the end."""
    operations = program.operations
    size = max(1, len(operations) // 2)
    while size >= 1:
        for start in range(len(operations) - size, -1, -size):
            yield _with_operations(program, operations[:start] + operations[start + size :])
        size //= 2


def _without_runs(program: Program) -> Iterator[Program]:
    """Leave out any run of operations, wherever it begins."""
    operations = program.operations
    if len(operations) > 24:
        return
    for size in range(len(operations) - 1, 0, -1):
        for start in range(len(operations) - size + 1):
            yield _with_operations(program, operations[:start] + operations[start + size :])


def _without_pairs(program: Program) -> Iterator[Program]:
    """Leave out two operations that only make sense together (a save and its restore, a rollback and a later one)."""
    operations = program.operations
    if len(operations) > 24:
        return
    for first in range(len(operations)):
        for second in range(first + 1, len(operations)):
            yield _with_operations(program, operations[:first] + operations[first + 1 : second] + operations[second + 1 :])


def _joined(program: Program) -> Iterator[Program]:
    """Two decodes that follow each other as one; what both have of the same sequences is one item."""
    operations = program.operations
    for index, (first, second) in enumerate(itertools.pairwise(operations)):
        if isinstance(first, Decode) and isinstance(second, Decode) and first.outputs == second.outputs:
            items: dict[tuple[int, ...], Item] = {}
            for item in (*first.items, *second.items):
                before = items.get(item.sequences)
                items[item.sequences] = item if before is None else Item(item.sequences, before.token_count + item.token_count, before.salt)
            joined = msgspec.structs.replace(first, items=tuple(items.values()))
            yield _with_operations(program, (*operations[:index], joined, *operations[index + 2 :]))


def _capped(program: Program) -> Iterator[Program]:
    """All items at once cut to as many tokens: where the lengths of several sequences have to be alike, none of them can be cut alone."""
    counts = {item.token_count for operation in program.operations if isinstance(operation, Decode) for item in operation.items}
    for count in (1, 2, 4, 8, 16, 32) if counts else ():
        if count < max(counts):
            yield _with_operations(program, [_cut_items(operation, count) for operation in program.operations])


def _cut_items(operation: AnyOperation, count: int) -> AnyOperation:
    if not isinstance(operation, Decode):
        return operation
    items = (Item(item.sequences, min(item.token_count, count), item.salt, item.tokens and item.tokens[:count]) for item in operation.items)
    return msgspec.structs.replace(operation, items=tuple(items))


def _replacing(program: Program, change: Callable[[AnyOperation], Iterable[AnyOperation]]) -> Iterator[Program]:
    for index, operation in enumerate(program.operations):
        for other in change(operation):
            yield _with_operations(program, (*program.operations[:index], other, *program.operations[index + 1 :]))


def _plainer(operation: AnyOperation) -> Iterator[AnyOperation]:
    """The plainer form of the same operation."""
    match operation:
        case Remove(sequence=sequence):
            yield from (Rollback(sequence, count) for count in (1, 2, 3))
        case Cancel(items=items):
            yield Decode(items)
        case Share(start=start, end=end) if (start, end) != (-1, -1):
            yield Share(operation.source, operation.destination)
        case Save(partial=partial, device=device) if partial or device:
            yield Save(operation.sequence, operation.slot)
        case Damage(slot=slot, how=how) if how != "truncate":
            yield Damage(slot, "truncate", 1)
        case Shift(sequence=sequence, delta=delta) if delta < 0:
            yield Shift(sequence, 1)
        case _:
            return


def _fewer_items(operation: AnyOperation) -> Iterator[AnyOperation]:
    if isinstance(operation, Decode | Cancel):
        for index in range(len(operation.items)):
            if len(operation.items) > 1:
                yield msgspec.structs.replace(operation, items=operation.items[:index] + operation.items[index + 1 :])
            item = operation.items[index]
            for sequence in item.sequences if len(item.sequences) > 1 else ():
                single = msgspec.structs.replace(item, sequences=(sequence,))
                yield msgspec.structs.replace(operation, items=(*operation.items[:index], single, *operation.items[index + 1 :]))


def _smaller_item(item: Item) -> Iterator[Item]:
    for count in _lower(item.token_count, 1, 2, 3):
        if 0 < count < item.token_count:
            yield msgspec.structs.replace(item, token_count=count, tokens=None if item.tokens is None else item.tokens[:count])
    if item.tokens is not None:
        yield Item(item.sequences, item.token_count)
        for place, token in enumerate(item.tokens):
            for lower in _lower(token, 0) if token else ():
                yield msgspec.structs.replace(item, tokens=(*item.tokens[:place], lower, *item.tokens[place + 1 :]))
    if item.salt:
        for salt in _lower(item.salt, 0):
            yield msgspec.structs.replace(item, salt=salt)


def _smaller_numbers(operation: AnyOperation) -> Iterator[AnyOperation]:
    match operation:
        case Decode() | Cancel():
            for index, item in enumerate(operation.items):
                for smaller in _smaller_item(item):
                    yield msgspec.structs.replace(operation, items=(*operation.items[:index], smaller, *operation.items[index + 1 :]))
            if isinstance(operation, Decode) and operation.outputs is not None:
                yield msgspec.structs.replace(operation, outputs=None)
            if isinstance(operation, Cancel) and operation.at:
                yield from (msgspec.structs.replace(operation, at=at) for at in _lower(operation.at, 0))
        case Rollback(token_count=count):
            yield from (msgspec.structs.replace(operation, token_count=smaller) for smaller in _lower(count, 1, 2) if 0 < smaller < count)
        case Reopen(changes=changes):
            for key in changes:
                yield Reopen({name: value for name, value in changes.items() if name != key})
        case Remove(start=start, end=end):
            yield from (
                msgspec.structs.replace(operation, start=smaller)
                for smaller in sorted({0, 1, start // 2, start - 1})
                if 0 <= smaller < start or (start == OPEN and smaller == 0)
            )
            yield from (
                msgspec.structs.replace(operation, end=smaller)
                for smaller in sorted({start + 1, end // 2, end - 1})
                if start < smaller < end
            )
        case Share(start=start, end=end) if (start, end) != (OPEN, OPEN):
            yield from (msgspec.structs.replace(operation, start=smaller) for smaller in _lower(start, 0) if 0 <= smaller < start)
            yield from (msgspec.structs.replace(operation, end=smaller) for smaller in _lower(end, start + 1) if start < smaller < end)
        case Shift(delta=delta) if abs(delta) > 1:
            yield from (msgspec.structs.replace(operation, delta=smaller if delta > 0 else -smaller) for smaller in _lower(abs(delta), 1))
        case Divide(divisor=divisor) if divisor > 2:
            yield from (msgspec.structs.replace(operation, divisor=smaller) for smaller in _lower(divisor, 2) if smaller >= 2)
        case Damage(amount=amount) if amount > 1:
            yield from (msgspec.structs.replace(operation, amount=smaller) for smaller in _lower(amount, 1))
        case _:
            return


def _simpler_surroundings(program: Program) -> Iterator[Program]:
    """Defaults for the model and for every cache key, or closer to them."""
    model, cache, default = program.model, program.cache, CacheConfiguration()
    models = [Model(model.family), Model(model.family, model.seed)]
    models += [
        msgspec.structs.replace(model, dimensions=tuple(other for other in model.dimensions if other != one)) for one in model.dimensions
    ]
    models.append(msgspec.structs.replace(model, seed=0))
    yield from (msgspec.structs.replace(program, model=other) for other in models if other != model)
    for key in CACHE_KEYS:
        value, simplest = getattr(cache, key), getattr(default, key)
        if value == simplest:
            continue
        values = [simplest]
        if isinstance(value, int):
            sign = 1 if value > simplest else -1
            values += [simplest + sign * distance for distance in _lower(abs(value - simplest)) if distance]
        yield from (msgspec.structs.replace(program, cache=msgspec.structs.replace(cache, **{key: simpler})) for simpler in values)


def _renumbered(program: Program) -> Iterator[Program]:
    """Sequences numbered from 0 in the order of their first use."""
    order: dict[int, int] = {}
    for operation in program.operations:
        named = (
            [s for item in operation.items for s in item.sequences]
            if isinstance(operation, Decode | Cancel)
            else sorted(sequences_of(operation))
        )
        for sequence in [operation.source, operation.destination] if isinstance(operation, Share) else named:
            order.setdefault(sequence, len(order))
    if any(old != new for old, new in order.items()):
        yield _with_operations(program, [_rename(operation, order) for operation in program.operations])


def _lowered(program: Program) -> Iterator[Program]:
    """One sequence under a lower number that no other has."""
    used = sorted({sequence for operation in program.operations for sequence in sequences_of(operation)})
    for high in used:
        for low in range(high):
            if low not in used:
                order = {sequence: low if sequence == high else sequence for sequence in used}
                yield _with_operations(program, [_rename(operation, order) for operation in program.operations])


def _merged(program: Program) -> Iterator[Program]:
    """One sequence fewer: everything that one does is done by another."""
    used = sorted({sequence for operation in program.operations for sequence in sequences_of(operation)})
    for kept in used:
        for gone in used:
            if kept < gone:
                order = {sequence: kept if sequence == gone else sequence for sequence in used}
                yield _with_operations(program, [_rename(operation, order) for operation in program.operations])


def _rename(operation: AnyOperation, order: dict[int, int]) -> AnyOperation:
    match operation:
        case Decode(items=items) | Cancel(items=items):
            renamed = tuple(msgspec.structs.replace(item, sequences=tuple(order[s] for s in item.sequences)) for item in items)
            return msgspec.structs.replace(operation, items=renamed)
        case Share(source=source, destination=destination):
            return msgspec.structs.replace(operation, source=order[source], destination=order[destination])
        case Rollback() | Remove() | Drop() | Keep() | Shift() | Divide() | Save() | Restore():
            return msgspec.structs.replace(operation, sequence=order[operation.sequence])
        case _:
            return operation


def _renamed_slots(program: Program) -> Iterator[Program]:
    order: dict[str, str] = {}
    for operation in program.operations:
        if isinstance(operation, Save | SaveAll | Restore | RestoreAll | Damage):
            order.setdefault(operation.slot, "abcdefghijklmnopqrstuvwxyz"[len(order) % 26])
    if any(old != new for old, new in order.items()):
        yield _with_operations(
            program,
            [
                msgspec.structs.replace(operation, slot=order[operation.slot])
                if isinstance(operation, Save | SaveAll | Restore | RestoreAll | Damage)
                else operation
                for operation in program.operations
            ],
        )


def candidates(program: Program) -> Iterator[Program]:
    """Smaller programs, the largest savings first."""
    yield from _without_chunks(program)
    yield from _replacing(program, _fewer_items)
    yield from _replacing(program, _plainer)
    yield from _merged(program)
    yield from _simpler_surroundings(program)
    yield from _replacing(program, _smaller_numbers)
    yield from _renumbered(program)
    yield from _lowered(program)
    yield from _renamed_slots(program)
    yield from _without_runs(program)
    yield from _without_pairs(program)
    yield from _joined(program)
    yield from _capped(program)


# --- the search ------------------------------------------------------------------------------------------------------------


def _cut(trial: Trial) -> Program:
    """The program up to the operation at which it parted."""
    index = trial.verdict.operation_index
    return trial.program if index is None else _with_operations(trial.program, trial.program.operations[: index + 1])


class _Search:
    def __init__(
        self,
        start: Trial,
        bench: Bench,
        known: frozenset[str],
        seconds_max: float | None,
        trials_max: int | None,
        on_step: Callable[[Trial], None] | None,
    ) -> None:
        assert start.signature is not None
        self.bench = bench
        self.known = known
        self.best = start
        self.tried = 0
        self.others: dict[str, Trial] = {}
        self.seen: set[str] = set()
        self.spent_trials = 0
        self.trials_max = math.inf if trials_max is None else trials_max
        self.deadline = math.inf if seconds_max is None else monotonic() + seconds_max
        self.on_step = on_step
        self.was_right_before = is_right_before(start)
        self.error_floor = 0.0
        if start.verdict.error is not None and start.verdict.kind in ("wrong-output", "wrong-state"):
            tolerance = start.tolerance if start.verdict.tolerance is None else start.verdict.tolerance
            self.error_floor = min(
                start.verdict.error / 2, max(ERROR_FLOOR_TOLERANCES * tolerance, ERROR_FLOOR_SHARE * start.verdict.error)
            )

    def is_over(self) -> bool:
        """Whether a limit is reached."""
        return self.spent_trials >= self.trials_max or monotonic() > self.deadline

    def run(self, programs: Sequence[Program]) -> list[Trial]:
        """Try programs, and count what that cost."""
        trials = self.bench.try_programs(programs)
        self.tried += len(trials)
        self.spent_trials += sum(HANG_TRIALS if trial.verdict.kind == "hang" else 1 for trial in trials)
        return trials

    def keeps(self, trial: Trial) -> bool:
        """Whether a trial is the same divergence as the start."""
        if trial.signature != self.best.signature:
            if trial.signature is not None:
                self.others.setdefault(trial.signature, trial)
            return False
        if self.was_right_before and not is_right_before(trial):  # the other build must go on being right
            return False
        return trial.verdict.error is None or trial.verdict.error >= self.error_floor

    def is_known(self, trial: Trial) -> bool:
        return fine_signature(self.bench.label, trial.program, trial.verdict) in self.known

    def first_that_keeps(self, programs: Iterable[Program], accept: Callable[[Trial], bool]) -> Trial | None:
        """Try programs in their order, some at a time; the first that is accepted."""
        batch: list[Program] = []
        for program in programs:
            text = program_text(program)
            if text in self.seen or not _is_program(program):
                continue
            self.seen.add(text)
            batch.append(program)
            if len(batch) == BATCH_CANDIDATES:
                if found := self._try(batch, accept):
                    return found
                batch = []
            if self.is_over():
                return None
        return self._try(batch, accept) if batch else None

    def _try(self, batch: list[Program], accept: Callable[[Trial], bool]) -> Trial | None:
        trials = self.run(batch)
        for number, trial in enumerate(trials):
            if self.keeps(trial) and accept(trial):
                self.seen.difference_update(map(program_text, batch[number + 1 :]))  # nobody looked at these
                return trial
        return None

    def leave_known(self) -> None:
        """Where the divergence stays without an operation that a known finding needs, go on from there: it is another one.

        (The plain search would as often leave out what the other one needs.)
        """
        while any(self._needs(fine) <= self._words() for fine in self.known):
            without = [self._without(name) for fine in sorted(self.known) for name in sorted(self._needs(fine) - {"decode"})]
            found = self.first_that_keeps(without, lambda trial: not self.is_known(trial))
            if found is None:
                return
            self.take(found)

    @staticmethod
    def _needs(fine: str) -> frozenset[str]:
        """The operations before the divergence in a fine signature."""
        return frozenset(word for word in fine.rpartition(" after ")[2].split("+") if " after " in fine)

    def _words(self) -> frozenset[str]:
        return enabling_operations(self.best.program, self.best.verdict)

    def _without(self, name: str) -> Program:
        before = self.best.verdict.operation_index or 0
        operations = self.best.program.operations
        kept = [operation for number, operation in enumerate(operations) if number >= before or enabling_name(operation) != name]
        return _with_operations(self.best.program, kept)

    def to_fixpoint(self) -> bool:
        """Take smaller programs, clear of known findings, until none is left; False when a limit ended it."""
        while not self.is_over():
            current = self.best.program
            size = cost(current)
            smaller = (program for program in candidates(current) if cost(program) < size)
            found = self.first_that_keeps(smaller, lambda trial: not self.is_known(trial))
            if found is None:
                return not self.is_over()
            self.take(found)
        return False

    def take(self, trial: Trial) -> None:
        """Go on from a trial, without what comes after its divergence."""
        shorter = _cut(trial)
        if shorter != trial.program:
            (again,) = self.run([shorter])
            trial = again if self.keeps(again) else trial
        self.best = trial
        if self.on_step:
            self.on_step(trial)


def _is_program(program: Program) -> bool:
    """Leaving out a reopen can take away sequences that later operations name."""
    try:
        check_program(program)
    except UsageError:
        return False
    return True


def reduce_trial(
    start: Trial,
    bench: Bench,
    known: frozenset[str] = frozenset(),
    seconds_max: float | None = 60.0,
    on_step: Callable[[Trial], None] | None = None,
    trials_max: int | None = None,
    families: Sequence[str] = (),
) -> Reduction:
    """Reduce a diverging trial.

    known        fine signatures of findings there are already
    seconds_max, trials_max  limits of the search; None: without one
    on_step      is told of every smaller program
    families     families, the simplest first, in which the bench can judge; those before the program's own are tried
    """
    search = _Search(start, bench, known, seconds_max, trials_max, on_step)
    search.take(start)
    search.leave_known()
    is_fixpoint = search.to_fixpoint()
    if known and not search.is_known(search.best):
        # nothing more can go without becoming a known finding: if something can still go, it was that finding with decoration
        search.seen.clear()
        search.deadline = max(search.deadline, monotonic() + DECORATION_SECONDS)
        search.trials_max = max(search.trials_max, search.spent_trials + DECORATION_TRIALS)
        size = cost(search.best.program)
        smaller = (program for program in candidates(search.best.program) if cost(program) < size)
        decoration = search.first_that_keeps(smaller, search.is_known)
        if decoration is not None:
            search.take(decoration)
    uses = _without_undocumented(search)
    signature = fine_signature(bench.label, search.best.program, search.best.verdict)
    is_known = signature in known
    alternatives = () if is_known else _in_simpler_families(search, families)
    return Reduction(
        search.best,
        signature,
        is_known,
        search.tried,
        tuple(search.others.values()),
        uses,
        is_fixpoint,
        search.error_floor,
        alternatives,
    )


def _in_simpler_families(search: _Search, families: Sequence[str]) -> tuple[str, ...]:
    """Fine signatures of the reduced program in simpler families, where they differ from its own in the family alone."""
    program, verdict, bench = search.best.program, search.best.verdict, search.bench
    own = program.model.family
    simpler = list(takewhile(lambda family: family != own, families)) if own in families else []
    if any(setting != PLAIN_SETTING for setting in settings_of(program)):  # other families' noise is measured in the plain one
        return ()
    moved = [msgspec.structs.replace(program, model=Model(family)) for family in simpler]
    found = []
    for trial in search.run([other for other in moved if _is_program(other)]) if moved else []:
        if trial.signature is None or (
            trial.verdict.error is not None and not trial.verdict.error >= ERROR_FLOOR_TOLERANCES * trial.tolerance
        ):
            continue
        there = fine_signature(bench.label, trial.program, trial.verdict)
        if there == fine_signature(bench.label, trial.program, verdict):  # its own, but for the family
            found.append(there)
    return tuple(found)


def _without_undocumented(search: _Search) -> tuple[str, ...]:
    """Replace uses outside the target's documentation by documented ones where the divergence stays; the uses that are left."""
    uses = undocumented_uses_of(search.best, search.bench)
    if uses == ("share-onto-nonempty",):
        (documented,) = search.run([dropping_before_share(search.best.program)])
        if search.keeps(documented) and not undocumented_uses_of(documented, search.bench):
            search.best = documented
            return ()
    return uses


def undocumented_uses_of(trial: Trial, bench: Bench) -> tuple[str, ...]:
    """The undocumented uses of a trial up to its divergence; none when nothing is known of its steps, or another target is the truth."""
    if trial.run is None or bench.against_name is not None:
        return ()
    return undocumented_uses(trial.program, trial.run, trial.verdict, bench.target)


def dropping_before_share(program: Program) -> Program:
    """The same program with the destination of every share dropped first."""
    operations: list[AnyOperation] = []
    for operation in program.operations:
        if isinstance(operation, Share) and operation.source != operation.destination:
            operations.append(Drop(operation.destination))
        operations.append(operation)
    return _with_operations(program, operations)


def is_documented(trial: Trial, bench: Bench) -> tuple[bool, tuple[str, ...]]:
    """Whether a trial's divergence needs no undocumented use, or stays when the uses are replaced; and the uses it made."""
    uses = undocumented_uses_of(trial, bench)
    if not uses or not trial.verdict.is_divergence:
        return True, uses
    replaced = bench.try_program(dropping_before_share(trial.program)) if uses == ("share-onto-nonempty",) else None
    return replaced is not None and replaced.verdict.kind == trial.verdict.kind, uses
