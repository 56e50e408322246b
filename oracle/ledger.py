"""The ledger: for every sequence the log of tokens it has consumed, and for every saved slot the log it holds.

Rules
- A `Log` is immutable; an operation replaces a sequence's log by another one.
- Rollback budgets (`draft`, `depth`) are log arithmetic, as the contract's guarantee table says.
- `marks` are identities of cached tokens: a shared token has one mark in both logs, a restored token a new one.
"""

import itertools
from typing import NamedTuple


class Log(NamedTuple):
    """What one sequence has consumed.

    tokens     all of them, oldest first
    position   of the last token; -1 when empty
    draft      tokens that guarantee `draft` promises to take back
    depth      tokens that guarantee `any` promises to take back
    divided    positions were divided: they are no longer consecutive, until the log is empty
    unchecked  nothing of it is judged, until it is empty
    silent     its outputs are not judged (divided positions under attention), its positions are
    marks      identity of every cached token
    """

    tokens: tuple[int, ...] = ()
    position: int = -1
    draft: int = 0
    depth: int = 0
    divided: bool = False
    unchecked: bool = False
    silent: bool = False
    marks: tuple[int, ...] = ()

    @property
    def first_position(self) -> int:
        """Position of the first token while positions are consecutive; -1 when empty."""
        return self.position - len(self.tokens) + 1 if self.tokens else -1


EMPTY = Log()


class Slot:
    """What a save holds: the log, the bytes, and everything that decides where it may be restored."""

    def __init__(self, logs: dict[int, Log], blob: bytes, whole: bool, n_seq_max: int, unified: int, session: int) -> None:
        self.logs = logs  # one sequence, or all of them for save_all
        self.blob = blob
        self.original = blob
        self.whole = whole
        self.n_seq_max = n_seq_max
        self.unified = unified
        self.session = session
        self.partial = False
        self.device = False
        self.saves_snapshots = False
        self.cells = ("f32", 0)  # element type of its attention cells, and whether they are laid out for flash attention
        self.damages: list[str] = []
        self.shortest = 0  # shortest length of its own sequence since the save; for partial saves

    @property
    def sequence(self) -> int:
        """The sequence that was saved (for a save of one)."""
        return next(iter(self.logs))

    @property
    def is_damaged(self) -> bool:
        return self.blob != self.original


class Ledger:
    """Logs of an open session, and the slots, which outlive sessions."""

    def __init__(self, n_seq_max: int) -> None:
        self.logs: list[Log] = [EMPTY] * n_seq_max
        self.slots: dict[str, Slot] = {}
        self.session = 0
        self._next_mark = itertools.count()

    def reopen(self, n_seq_max: int) -> None:
        """A new session: every log is empty, slots stay, what was bound to the old session is not valid any more."""
        self.logs = [EMPTY] * n_seq_max
        self.session += 1

    def put(self, sequence: int, log: Log) -> None:
        """Replace a log. Partial saves of the sequence learn how short it became."""
        self.logs[sequence] = log
        for slot in self.slots.values():
            if slot.partial and slot.sequence == sequence:
                slot.shortest = min(slot.shortest, len(log.tokens))

    def append(self, sequence: int, tokens: tuple[int, ...], marks: tuple[int, ...], alone: bool, n_rs_seq: int) -> None:
        """A decode gave `tokens` to the sequence; `alone` is False when they belong to other sequences too."""
        log = self.logs[sequence]
        count = len(tokens)
        self.put(
            sequence,
            Log(
                tokens=log.tokens + tokens,
                position=log.position + count,
                draft=count - 1 if alone else 0,
                depth=min(n_rs_seq, log.depth + count) if log.tokens else min(n_rs_seq, count - 1),
                divided=log.divided,
                unchecked=log.unchecked,
                silent=log.silent,
                marks=log.marks + marks,
            ),
        )

    def new_marks(self, count: int) -> tuple[int, ...]:
        """Identities for `count` newly cached tokens."""
        return tuple(itertools.islice(self._next_mark, count))

    def cut(self, sequence: int, count: int) -> None:
        """The newest `count` tokens are gone; all of them makes the log empty."""
        log = self.logs[sequence]
        left = len(log.tokens) - count
        if left <= 0:
            self.put(sequence, EMPTY)
        else:
            self.put(
                sequence,
                log._replace(
                    tokens=log.tokens[:left],
                    marks=log.marks[:left],
                    position=log.position - count,
                    draft=0,
                    depth=max(0, log.depth - count),
                ),
            )

    def cached_tokens(self) -> int:
        """Distinct cached tokens over all sequences: a shared token counts once."""
        return len(set().union(*(log.marks for log in self.logs)))
