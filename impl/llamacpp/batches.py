"""Batches as llama.cpp checks and cuts them.

Rules
- A token belongs to a set of sequences; a ubatch is made of whole runs of such sets, all of one length.
- `split_equal` takes equally many tokens of every set; the newest `keep_tail` tokens of a set stay in one ubatch.
- `split_by_sequence`, for hidden states, takes tokens one set after the other and keeps no tail together.
Source: llama.cpp's src/llama-batch.cpp.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...spec.errors import EngineAbort

Owners = tuple[int, ...]
"""The sequences that a token belongs to, in the order in which the engine has them: its first is asked for everything."""
_BUCKET_COUNTS = (13, 29, 59, 127, 257)


def engine_order(sequences: Sequence[int]) -> Owners:
    """The order of a token's sequences once they were put into a set one by one.

    The engine keeps them in a std::unordered_set, so that the order is the standard library's affair: here libstdc++'s, which puts a
    new entry at the front of its bucket, and a new bucket at the front of all, and does so again with all entries when it grows.
    """
    buckets: dict[int, list[int]] = {}  # the last one is the front of all
    bucket_count = _BUCKET_COUNTS[0]
    for count, sequence in enumerate(sequences, 1):
        if count > bucket_count:
            listed = [entry for bucket in reversed(buckets.values()) for entry in bucket]
            bucket_count = next(size for size in _BUCKET_COUNTS if size >= count)
            buckets = {}
            for entry in listed:
                buckets.setdefault(entry % bucket_count, []).insert(0, entry)
        buckets.setdefault(sequence % bucket_count, []).insert(0, sequence)
    return tuple(entry for bucket in reversed(buckets.values()) for entry in bucket)


class Ubatch(NamedTuple):
    """A part of a batch that is computed at once.

    tokens, positions, owners  of every place, set after set
    rows                       index of every place in the batch as it was given
    set_count                  sets of sequences in it
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    owners: tuple[Owners, ...]
    rows: tuple[int, ...]
    set_count: int

    @property
    def set_tokens(self) -> int:
        """Tokens of every set."""
        return len(self.positions) // self.set_count

    @property
    def sequences(self) -> list[int]:
        """Every sequence in it, ascending."""
        return sorted({sequence for owners in self.owners for sequence in owners})


class LlamaBatch:
    """A batch on its way through the splits."""

    def __init__(self, tokens: Sequence[int], positions: Sequence[int], owners: Sequence[Owners]) -> None:
        self._tokens = tokens
        self._positions = positions
        self._owners = owners
        self._is_coupled = any(len(sequences) > 1 for sequences in owners)
        self._rows_of: dict[frozenset[int], list[int]] = {}
        for row, sequences in enumerate(owners):
            self._rows_of.setdefault(frozenset(sequences), []).append(row)
        self._used = [False] * len(tokens)

    @property
    def is_used_up(self) -> bool:
        """Every token is in a ubatch."""
        return all(self._used)

    def refusal(self, bounds: Callable[[int], tuple[int, int]], leaps: bool) -> str | None:
        """Why the batch is refused as it stands, or None.

        bounds  first and last position of a sequence in the memory
        leaps   positions need only grow (M-RoPE), else they must be consecutive
        """
        own: dict[int, set[int]] = {}
        coupled: list[tuple[int, int]] = []
        for position, owners in zip(self._positions, self._owners, strict=True):
            for sequence in owners:
                own.setdefault(sequence, set()).add(position)
            coupled += [(other, owners[0]) for other in owners[1:]]
        for sequence, positions in own.items():
            last = bounds(sequence)[1]
            first = min(positions)
            if last >= 0 and (first <= last if leaps else first != last + 1):
                return f"sequence {sequence} goes on at position {first} after {last}"
            if not leaps and max(positions) - first + 1 > len(positions):
                return f"positions of sequence {sequence} are not continuous"
        for one, other in coupled:
            if bounds(one) != bounds(other):
                return f"sequence {one} is coupled to {other}, but they have diverged"
        return self._misplaced()

    def _misplaced(self) -> str | None:
        """Sets of one sequence must have something in common, and its positions must not fall."""
        common: dict[int, set[int]] = {}
        newest: dict[int, int] = {}
        for position, owners in zip(self._positions, self._owners, strict=True):
            for sequence in owners:
                common[sequence] = common.get(sequence, set(owners)) & set(owners)
                if not common[sequence]:
                    return f"sequence {sequence} belongs to incompatible sets"
                if position < newest.get(sequence, -1):
                    return f"positions of sequence {sequence} decrease"
                newest[sequence] = position
        return None

    def split_equal(self, n_ubatch: int, sequential: bool, keep_tail: int) -> Ubatch | None:
        """The next ubatch, or None when there is none or the batch cannot be cut this way.

        sequential  sets one after the other by their first sequence, without a gap; coupled tokens cannot be cut so
        keep_tail   newest tokens of a set that stay together, 0 for none. Raises EngineAbort when n_ubatch has no room for them.
        """
        if sequential and self._is_coupled:
            return None
        sets = self._next_sets(n_ubatch, sequential)
        if not sets:
            return None
        waiting = [[row for row in self._rows_of[frozenset(owners)] if not self._used[row]] for owners in sets]
        length = 1
        while length < min(map(len, waiting)) and (length + 1) * len(sets) <= n_ubatch:
            length += 1
        lengths = [length] * len(sets)
        if keep_tail:
            if n_ubatch <= keep_tail:
                raise EngineAbort("GGML_ASSERT(n_ubatch > n_keep_tail) failed")
            lengths = self._with_whole_tails([len(rows) for rows in waiting], length, n_ubatch, keep_tail)
        return self._take([rows[:count] for rows, count in zip(waiting, lengths, strict=False)])

    def _next_sets(self, n_ubatch: int, sequential: bool) -> list[Owners]:
        sets: list[Owners] = []
        taken: set[int] = set()
        for row, owners in enumerate(self._owners):
            if self._used[row] or not taken.isdisjoint(owners):
                continue
            if sequential and sets and owners[0] != sets[-1][0] + 1:
                continue
            sets.append(owners)
            taken.update(owners)
            if len(sets) > n_ubatch:
                break
        return sets

    @staticmethod
    def _with_whole_tails(waiting: list[int], length: int, n_ubatch: int, keep_tail: int) -> list[int]:
        """How many tokens of the first sets to take: those that end here, or leave a whole tail; the others wait."""
        kept = 0
        while kept < len(waiting) and not 0 < waiting[kept] - length < keep_tail:
            kept += 1
        if kept:
            return [length] * kept
        return [waiting[0] if waiting[0] <= n_ubatch else waiting[0] - keep_tail]

    def split_by_sequence(self, n_ubatch: int) -> Ubatch | None:
        """The next ubatch: tokens in order, as long as their set lies within that of the token before."""
        rows: list[int] = []
        for row, owners in enumerate(self._owners):
            if self._used[row] or (rows and not set(owners) <= set(self._owners[rows[-1]])):
                continue
            rows.append(row)
            if len(rows) >= n_ubatch:
                break
        return self._take([rows]) if rows else None

    def _take(self, sets: list[list[int]]) -> Ubatch:
        rows = tuple(row for own in sets for row in own)
        for row in rows:
            self._used[row] = True
        return Ubatch(
            tuple(self._tokens[row] for row in rows),
            tuple(self._positions[row] for row in rows),
            tuple(self._owners[row] for row in rows),
            rows,
            len(sets),
        )
