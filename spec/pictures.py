"""Pictures of a cache: which cell is whose, what its planes hold, and where every sequence would be read from next.

Rules
- A `Snapshot` is what a session of our own caches shows of itself (`ShowsCells`); a `Film` is what can be said of a whole program from them.
- Pictures are data: who draws them decides nothing, and who takes them changes nothing.
- A plane is named by the log whose state it holds, not by what the cache believes of it.
"""

from typing import Literal, Protocol, runtime_checkable

import msgspec

from .target import StateRow

Claim = Literal["right", "wrong", "unknown"]


class SnapshotCell(msgspec.Struct, frozen=True):
    """A cell as it is: the sequences that it belongs to, its last position (-1: none), and for every plane a digest of all that it holds (0: zeros)."""

    owners: tuple[int, ...]
    position: int
    planes: tuple[int, ...]


class Reading(msgspec.Struct, frozen=True):
    """Where a sequence's state is read from next, and how many tokens were taken back that no decode has consumed yet."""

    sequence: int
    cell: int
    plane: int
    pending: int = 0


class Snapshot(msgspec.Struct, frozen=True):
    """The recurrent side of a cache between two operations.

    readings  of every sequence that holds something
    states    for every reading the recurrent state that lies there, layer by layer, as `Session.inspect` shows it
    attention first and last position of every sequence's attention cells, (-1, -1) when there are none; () without attention
    is_ring   the planes of a cell are a ring: the state one token before plane p is in plane p - 1, else in plane p + 1
    """

    cells: tuple[SnapshotCell, ...]
    readings: tuple[Reading, ...]
    states: tuple[tuple[StateRow, ...], ...]
    attention: tuple[tuple[int, int], ...] = ()
    is_ring: bool = False


@runtime_checkable
class ShowsCells(Protocol):
    """What a session may offer besides: it shows its cells, and changes nothing by it."""

    def snapshot(self) -> Snapshot: ...


class Plane(msgspec.Struct, frozen=True):
    """What a plane holds: the state after `token_count` tokens of the log of `sequence` (as it was then), 0: the zero state.

    token_count  None: not known (what lay there before, or came from elsewhere)
    is_wrong     it was computed from a wrong state
    """

    token_count: int | None = None
    sequence: int | None = None
    is_wrong: bool = False


class FilmCell(msgspec.Struct, frozen=True):
    """A cell in a film; `position` is its own, -1 for none."""

    owners: tuple[int, ...]
    position: int
    planes: tuple[Plane, ...]


class FilmSequence(msgspec.Struct, frozen=True):
    """A sequence in a film: what is true of it, and what the cache would go on from.

    token_count, position  of its log, which is the truth
    cell, plane            read next; None: an empty sequence
    pending                tokens that were taken back since the cell was written
    claim                  whether what is read next is the state of its log
    attention              first and last position of its attention cells; None: there are none in the model
    said                   the last position that the cache answers with; None: not known
    """

    sequence: int
    token_count: int
    position: int
    cell: int | None = None
    plane: int | None = None
    pending: int = 0
    claim: Claim = "unknown"
    attention: tuple[int, int] | None = None
    said: int | None = None


class FilmStep(msgspec.Struct, frozen=True):
    """The cache after an operation, with the answer to it; `index` counts from 0."""

    index: int
    operation: str
    outcome: str
    detail: str
    cells: tuple[FilmCell, ...]
    sequences: tuple[FilmSequence, ...]


class Offset(msgspec.Struct, frozen=True):
    """How far something was off at an operation, in tolerances: `what` is "output", or a layer and part; not finite: so was the row."""

    index: int
    what: str
    tolerances: float


class Film(msgspec.Struct, frozen=True):
    """A program on a cache that shows itself.

    source   which cache it is, in words
    steps    the newest ones where there are very many; () where nothing can be shown
    skipped  steps before them that are left out
    offsets  of outputs and of recurrent states
    note     what has to be known to read it, or why there is nothing
    """

    source: str
    steps: tuple[FilmStep, ...] = ()
    skipped: int = 0
    offsets: tuple[Offset, ...] = ()
    note: str = ""
