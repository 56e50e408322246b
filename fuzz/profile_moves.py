"""Moves: what the workload profiles are made of, each a few operations that belong together.

Rules
- A move adds at most as many operations as its entry in the profile's table says, and tells the draft what it believes of each.
- The first move of a profile adds one operation at most, and stands in wherever another does not fit any more.
- The first two moves of a profile are in every program; of the others each program switches a random subset off (swarm).
- Every program ends as swarm's do: with one new-salt token on every sequence that may hold tokens.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..spec.configuration import CacheConfiguration, Start
from ..spec.models import Model
from ..spec.operations import OPEN, Decode, Drop, Item, Remove, Restore, Rollback, Save, Share
from ..spec.programs import Program
from .choices import SWARM_WEIGHT_MAX, Choices
from .generation_draft import Draft, Saved
from .generation_operations import close_draft, is_usable

MOVES_ALWAYS = 2
MOVES_FEWEST = 3
STARTS: tuple[Start, ...] = ("fresh", "fresh", "dirty", "poison")


class Move(NamedTuple):
    """How common a move is before swarm weights, the most operations that it adds, and what adds them."""

    weight: int
    operations_max: int
    add: Callable[[Draft], None]


def program_of_moves(
    choices: Choices, model: Model, cache: CacheConfiguration, operations_max: int, moves: Sequence[Move], average: int
) -> Program:
    """About `average` moves on all sequences of a session, and the closing decodes. Raises UsageError when the model is bad."""
    draft = Draft(choices, model, cache, operations_max)
    draft.active = range(cache.n_seq_max)
    always = [SWARM_WEIGHT_MAX // 2] * MOVES_ALWAYS
    swarm = [*always, *choices.swarm(len(moves) - MOVES_ALWAYS)]
    cumulative = list(accumulate(move.weight * weight for move, weight in zip(moves, swarm, strict=True)))

    def step() -> bool:
        room = draft.operations_max - 1 - len(draft.operations)
        move = moves[choices.weighted(cumulative)]
        if move.operations_max > room:
            move = moves[0]
        if move.operations_max > room:
            return False
        move.add(draft)
        return True

    choices.repeat(step, MOVES_FEWEST, average, draft.operations_max)
    close_draft(draft)
    return Program(model, cache, tuple(draft.operations))


# --- what moves are made of --------------------------------------------------------------------------------------------------


def some_of(draft: Draft, sequences: Sequence[int], most: int) -> list[int]:
    """One to `most` of these sequences, in any order; none when there are none."""
    left = list(sequences)
    chosen: list[int] = []
    for _ in range(min(len(left), draft.choices.integer(1, max(1, most)))):
        chosen.append(draft.choices.pick(left))
        left.remove(chosen[-1])
    return chosen


def busy(draft: Draft) -> list[int]:
    """Active sequences that are believed to hold tokens."""
    return [sequence for sequence in draft.active if draft.tracks[sequence].length]


def idle(draft: Draft) -> list[int]:
    """Active sequences that are believed to be empty."""
    return [sequence for sequence in draft.active if not draft.tracks[sequence].length]


def decode(draft: Draft, wanted: Sequence[tuple[int, int]]) -> list[int]:
    """One batch of so many tokens for each sequence, cut to what is believed to fit; the sequences that got any. Nothing is added when none does."""
    items: list[Item] = []
    given: dict[int, int] = {}
    for sequence, token_count in wanted:
        room = draft.room_tokens(sequence) - (sum(given.values()) if draft.cache.unified else given.get(sequence, 0))
        fitting = min(token_count, room)
        if fitting > 0:
            items.append(draft.item(sequence, fitting))
            given[sequence] = given.get(sequence, 0) + fitting
    if items:
        draft.operations.append(Decode(tuple(items)))
    for sequence, token_count in given.items():
        draft.appended(sequence, token_count)
    return list(given)


def prompt_tokens(draft: Draft) -> int:
    """How many tokens a prompt has."""
    return draft.choices.pick((5, 3, 4, 6, 8, 9, 12, 17))


def busy_sequence(draft: Draft) -> int:
    """A sequence that holds tokens; an idle one is given a prompt first (one operation)."""
    held = busy(draft)
    if held:
        return draft.one_of(held)
    sequence = draft.one_of(draft.active)
    decode(draft, [(sequence, prompt_tokens(draft))])
    return sequence


def roll_back(draft: Draft, sequence: int, token_count: int) -> None:
    """Take tokens back, now and then as the removal of a range that engines know it by."""
    track = draft.tracks[sequence]
    if not track.divided and token_count <= track.end_position and draft.choices.chance(20):
        draft.operations.append(Remove(sequence, track.end_position - token_count, OPEN))
    else:
        draft.operations.append(Rollback(sequence, token_count))
    draft.cut(sequence, token_count)


def drop(draft: Draft, sequence: int) -> None:
    """Forget a sequence."""
    draft.operations.append(Drop(sequence))
    draft.emptied(sequence)


def share(draft: Draft, source: int, destination: int) -> None:
    """Fork `source`; what `destination` held is mostly dropped first (two operations), as documented uses do."""
    if draft.tracks[destination].length and not draft.choices.chance(15):
        drop(draft, destination)
    draft.operations.append(Share(source, destination))
    draft.shared(source, destination)


def save(draft: Draft, sequence: int, slot: str, partial: bool = False) -> None:
    """Save a sequence, whole or as a checkpoint of its recurrent part."""
    draft.operations.append(Save(sequence, slot, partial))
    draft.slots[slot] = Saved(sequence, draft.tracks[sequence], draft.cache, draft.session, partial, False)


def restore(draft: Draft, slot: str, sequence: int) -> None:
    """Restore a slot."""
    saved = draft.slots[slot]
    draft.operations.append(Restore(slot, sequence))
    draft.restored(sequence, saved.copied, is_usable(draft, saved))


def usable_slots(draft: Draft, partial: bool, sequence: int | None = None) -> list[str]:
    """Slots with tokens whose restore is believed to be promised; of `sequence` only, if one is given."""
    return [
        name
        for name, saved in draft.slots.items()
        if saved.partial == partial and saved.copied.length and sequence in (None, saved.sequence) and is_usable(draft, saved)
    ]
