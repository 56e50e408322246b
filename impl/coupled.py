"""Batches with tokens that belong to several sequences at once: cut into phases that can run one after the other.

Rules
- A token is computed once, for one sequence of its set, the leader; the others are its followers and are given what it was given.
- In a phase every sequence belongs to one set only. A sequence that goes on alone, or with others, within the batch does so in a later phase.
- The tokens of a sequence that is never coupled in the batch stay together, in the first phase: its snapshots are those of the whole batch.
- Everything is checked for the whole batch before any of it runs.
"""

from collections.abc import Sequence
from typing import NamedTuple

Members = tuple[int, ...]
"""The sequences of a token, ascending."""


class Phase(NamedTuple):
    """Tokens that run together.

    places  of the tokens in the batch, ascending
    counts  how many tokens each set of sequences is given
    """

    places: list[int]
    counts: dict[Members, int]


def phases_of(sequences: Sequence[Members]) -> list[Phase]:
    """Cut a batch, given the sequences of every token, into phases."""
    coupled = {sequence for members in sequences if len(members) > 1 for sequence in members}
    phases = [Phase([], {})]
    joined: dict[int, Members] = {}  # the set that a coupled sequence belongs to in the newest phase
    for place, members in enumerate(sequences):
        phase = phases[0]
        if not coupled.isdisjoint(members):
            if any(joined.get(sequence, members) != members for sequence in members):
                phases.append(Phase([], {}))
                joined = {}
            joined.update(dict.fromkeys(members, members))
            phase = phases[-1]
        phase.places.append(place)
        phase.counts[members] = phase.counts.get(members, 0) + 1
    return phases
