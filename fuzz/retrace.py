"""Walk the contract once more beside a run that is over, to say what was asked, known and meant at every step.

Rules
- Nothing is run: the recorded answers and positions stand for the target.
- Used by whatever explains a run: the step view, the tool-free reproduction, the label `undocumented`.
"""

from collections.abc import Iterator

import msgspec

from ..oracle.contract import Checker, Demand
from ..oracle.ledger import Log
from ..spec.configuration import CacheConfiguration, changed
from ..spec.families import dimensions_of
from ..spec.operations import AnyOperation, Cancel, Damage, Decode, Divide, Reopen, Restore, Save, SaveAll, Share, Shift
from ..spec.programs import Program
from ..spec.target import Capabilities, Target
from ..spec.verdicts import Verdict
from .execution import Run, Step


class Moment(msgspec.Struct, frozen=True):
    """One step of a run, as the contract saw it.

    checker  the contract's state before the operation
    opened   what the session can do that is open after the operation
    """

    index: int
    operation: AnyOperation
    step: Step
    checker: Checker
    opened: Capabilities


def retrace(program: Program, run: Run) -> Iterator[Moment]:
    """Every step that was reached. The checker of a moment moves on when the next moment is asked for."""
    opened = iter(run.sessions)
    checker = Checker(program.cache, dimensions_of(program.model)["n_vocab"], next(opened, run.capabilities))
    for index, (operation, step) in enumerate(zip(program.operations, run.steps, strict=False)):
        is_reopened = isinstance(operation, Reopen) and step.outcome.word == "accepted"
        capabilities = next(opened, run.capabilities) if is_reopened else checker.capabilities
        yield Moment(index, operation, step, checker, capabilities)
        if step.demand in ("skip", "undeclared") or step.outcome.word in ("crash", "hang"):
            continue
        if step.outcome.word == "accepted":
            match operation:
                case Save() | SaveAll():
                    checker.saved(operation, b"saved")
                case Damage():
                    checker.damaged(operation, _damaged_stand_in(checker.ledger.slots[operation.slot].blob, operation))
        checker.capabilities = capabilities
        if run.followed:
            checker.follow(index, operation, step.outcome, step.positions)
        else:
            checker.conclude(index, operation, Demand(step.demand, step.reason), step.outcome, step.positions)  # type: ignore[arg-type]


def _damaged_stand_in(blob: bytes, damage: Damage) -> bytes:
    """The bytes are not kept; words stand for them, so that the same flip twice leaves no damage here either."""
    words, word = blob.split(), f"{damage.how}{damage.amount}".encode()
    if damage.how == "flip" and word in words:
        words.remove(word)
    elif damage.how == "foreign":
        words = [word]
    else:
        words.append(word)
    return b" ".join(words)


def _is_shared(logs: list[Log], sequence: int) -> bool:
    marks = set(logs[sequence].marks)
    return any(marks & set(log.marks) for other, log in enumerate(logs) if other != sequence)


def _has_small_ubatch(cache: CacheConfiguration, capabilities: Capabilities) -> bool:
    return capabilities.n_rs_seq > 0 and cache.n_ubatch <= capabilities.n_rs_seq + 1


def _opening_uses(cache: CacheConfiguration, capabilities: Capabilities) -> set[str]:
    """Memory that was used before was filled by decodes."""
    return {"small-ubatch"} if cache.start != "fresh" and _has_small_ubatch(cache, capabilities) else set()


def _uses(moment: Moment) -> set[str]:
    checker, logs = moment.checker, moment.checker.ledger.logs
    match moment.operation:
        case Share(source=source, destination=destination, start=start, end=end):
            onto = {"share-onto-nonempty"} if source != destination and logs[destination].tokens else set()
            return onto | ({"partial-share"} if (start, end) != (-1, -1) else set())
        case Shift(sequence=sequence) if _is_shared(logs, sequence):
            return {"shift-of-shared"}
        case Divide():
            return {"divide"}
        case Decode() | Cancel() if _has_small_ubatch(checker.cache, checker.capabilities):
            return {"small-ubatch"}
        case Reopen(changes=changes):
            return _opening_uses(changed(checker.cache, changes), moment.opened)
        case Restore(slot=name, sequence=sequence) if (
            (slot := checker.ledger.slots.get(name)) and slot.partial and slot.sequence != sequence
        ):
            return {"foreign-partial-restore"}
        case _:
            return set()


def undocumented_uses(program: Program, run: Run, verdict: Verdict, target: Target) -> tuple[str, ...]:
    """The uses outside the target's own documentation that a run made up to its divergence."""
    known = {entry.use for entry in target.undocumented}
    if not known:
        return ()
    found = _opening_uses(program.cache, run.sessions[0] if run.sessions else run.capabilities)
    for moment in retrace(program, run):
        if verdict.operation_index is not None and moment.index > verdict.operation_index:
            break
        if moment.step.demand not in ("skip", "undeclared"):
            found |= _uses(moment)
    return tuple(sorted(found & known))
