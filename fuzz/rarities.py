"""What is rare in a program, counted from its run: for Hypothesis to report, and to look for more of.

Rules
- Everything is read from a program and what a target answered; no target is asked for anything.
- A count is the most at any one time, but for moves and refusals, which are totals.
- Where cells lie is not shown by any target: holes are those between sequences, moves those that a cache with one cell a sequence has to
  make so that the cells of a batch lie side by side.
Source: Hypothesis, "targeted property-based testing"; llama.cpp's llama-memory-recurrent.cpp (`find_slot` swaps cells into one run).
"""

from collections import Counter
from typing import NamedTuple

from ..spec.operations import AnyOperation, Cancel, Decode, Remove, Restore, RestoreAll, Rollback, Share, sequences_of
from ..spec.programs import Program
from .execution import Run, Step

_MANY = 3


class Rarities(NamedTuple):
    """Counts; each is at least 0.

    pending_rollbacks   sequences at once that were partly taken back and not decoded since
    sharing_degree      sequences at once that have one state, by sharing or by coupled tokens
    holes               empty sequences at once below one that holds tokens
    slot_moves          cells that had to change places for a batch
    refused_operations  operations that the target refused
    """

    pending_rollbacks: int
    sharing_degree: int
    holes: int
    slot_moves: int
    refused_operations: int


class _Watch:
    """What is known of the sequences between two operations."""

    def __init__(self) -> None:
        self.last: tuple[int, ...] = ()
        self.pending: set[int] = set()
        self.states: dict[int, int] = {}
        self.cells: list[int] = []
        self.moves = 0
        self._newest_state = 0

    def _new_state(self) -> int:
        self._newest_state += 1
        return self._newest_state

    def see(self, operation: AnyOperation, step: Step) -> None:
        """One operation that was done."""
        before, self.last = self.last, tuple(last for _, last in step.positions)
        match operation:
            case Decode(items=items) | Cancel(items=items):
                for item in items:
                    self.states |= dict.fromkeys(item.sequences, self._new_state())
                self.pending -= sequences_of(operation)
                self._lay_side_by_side(list(dict.fromkeys(sequence for item in items for sequence in item.sequences)))
            case Rollback(sequence=sequence) | Remove(sequence=sequence):
                if sequence < len(before) and self.last[sequence] < before[sequence]:
                    self.states[sequence] = self._new_state()
                    self.pending.add(sequence)
            case Share(source=source, destination=destination) if source != destination:
                self.states[destination] = self.states.get(source, self._new_state())
                (self.pending.add if source in self.pending else self.pending.discard)(destination)
                self.cells = [sequence for sequence in self.cells if sequence != destination]
            case Restore(sequence=sequence):
                self.states[sequence] = self._new_state()
                self.pending.discard(sequence)
            case RestoreAll():
                self.states = {sequence: self._new_state() for sequence in range(len(self.last))}
                self.pending.clear()
            case _:
                pass
        held = {sequence for sequence, last in enumerate(self.last) if last >= 0}
        self.pending &= held
        self.states = {sequence: state for sequence, state in self.states.items() if sequence in held}
        self.cells = [sequence for sequence in self.cells if sequence in held]

    def _lay_side_by_side(self, batch: list[int]) -> None:
        self.cells += [sequence for sequence in batch if sequence not in self.cells]
        first = min(map(self.cells.index, batch))
        for place, sequence in enumerate(batch, first):
            if self.cells[place] != sequence:
                other = self.cells.index(sequence)
                self.cells[place], self.cells[other] = sequence, self.cells[place]
                self.moves += 1

    @property
    def holes(self) -> int:
        """Empty sequences below the highest that holds tokens."""
        held = [sequence for sequence, last in enumerate(self.last) if last >= 0]
        return 1 + held[-1] - len(held) if held else 0

    @property
    def sharing_degree(self) -> int:
        """Sequences of the largest group with one state; 0 when no two have."""
        largest = max(Counter(self.states.values()).values(), default=0)
        return largest if largest > 1 else 0


def rarities_of(program: Program, run: Run) -> Rarities:
    """Count what is rare in a program and its run, as far as it got."""
    watch = _Watch()
    pending = sharing = holes = refused = 0
    for operation, step in zip(program.operations, run.steps, strict=False):
        if step.outcome.word not in ("accepted", "cancelled"):
            refused += step.outcome.word == "refused"
            continue
        watch.see(operation, step)
        pending, sharing, holes = max(pending, len(watch.pending)), max(sharing, watch.sharing_degree), max(holes, watch.holes)
    return Rarities(pending, sharing, holes, watch.moves, refused)


def note_rarities(program: Program, run: Run) -> Rarities:
    """Tell Hypothesis what is rare in a program, from inside a test: an `event` for each count, and a `target` to look for more.

    `pytest --hypothesis-show-statistics` shows the events; targets guide generation (and HypoFuzz). Raises hypothesis.errors.InvalidArgument outside
    of a test.
    """
    import hypothesis

    rarities = rarities_of(program, run)
    for name, count in rarities._asdict().items():
        label = name.replace("_", " ")
        hypothesis.event(f"{label}: {count if count < _MANY else f'{_MANY} or more'}")
        hypothesis.target(float(count), label=label)
    return rarities
