"""Profile `agents`: conversations fork, go on side by side, and join.

Rules
- A fork shares a conversation with one or two others, which then part in one batch.
- A join keeps one of them, puts it in the place of the one it came from, or tells that one what the others found.
- Forks of forks are wanted: any conversation may be forked, also one that was just rolled back.
"""

from ..spec.configuration import CacheConfiguration
from ..spec.models import Model
from ..spec.operations import Decode, Item, Keep
from ..spec.programs import Program
from .choices import Choices
from .generation_draft import Draft
from .profile_moves import (
    STARTS,
    Move,
    busy,
    busy_sequence,
    decode,
    drop,
    idle,
    program_of_moves,
    prompt_tokens,
    restore,
    roll_back,
    save,
    share,
    some_of,
    usable_slots,
)

MOVES_AVERAGE = 8
_N_SEQ_MAX = (4, 3, 5, 6, 8)
_N_RS_SEQ = (3, 1, 2, 0)
_N_UBATCH = (64, 8, 16, 32)


def agents_program(choices: Choices, model: Model, operations_max: int) -> Program:
    """A program of conversations that fork and join. Raises UsageError when the model is bad."""
    cache = CacheConfiguration(
        n_seq_max=choices.pick(_N_SEQ_MAX),
        n_rs_seq=choices.pick(_N_RS_SEQ),
        n_ubatch=choices.pick(_N_UBATCH),
        unified=int(choices.chance(50)),
        start=choices.pick(STARTS),
        interleave=int(choices.chance(20)),
    )
    return program_of_moves(choices, model, cache, operations_max, _MOVES, MOVES_AVERAGE)


def _speak(draft: Draft) -> None:
    """Some conversations go on in one batch; the first one begins."""
    speakers = some_of(draft, busy(draft), 3) or [draft.one_of(draft.active)]
    decode(draft, [(sequence, draft.choices.integer(1, 4)) for sequence in speakers])


def _destinations(draft: Draft, source: int, most: int) -> list[int]:
    """Sequences to fork into: empty ones mostly."""
    free = [sequence for sequence in idle(draft) if sequence != source]
    if not free or draft.choices.chance(20):
        free = [sequence for sequence in draft.active if sequence != source]
    return some_of(draft, free, most)


def _fork(draft: Draft) -> None:
    """One or two forks of a conversation, which part in one batch, the first one with them or not."""
    parent = busy_sequence(draft)
    children = _destinations(draft, parent, 2)
    for child in children:
        share(draft, parent, child)
    together = [parent, *children] if draft.choices.chance(50) else children
    decode(draft, [(sequence, draft.choices.integer(1, 4)) for sequence in together])


def _join(draft: Draft) -> None:
    """Of several conversations one is left, or one takes another's place, or they end and one is told."""
    held = busy(draft)
    if len(held) < 2:
        _fork(draft)
        return
    winner, other = draft.choices.pick(held), draft.choices.pick(held)
    kind = draft.choices.integer(0, 2)
    if kind == 0 and len(held) < 4:
        draft.operations.append(Keep(winner))
        for sequence in range(len(draft.tracks)):
            if sequence != winner:
                draft.emptied(sequence)
    elif kind == 1 and winner != other:
        share(draft, winner, other)
        drop(draft, winner)
        winner = other
    else:
        for sequence in [sequence for sequence in held if sequence != winner][:2]:
            drop(draft, sequence)
    decode(draft, [(winner, draft.choices.integer(1, 7))])


def _fork_a_retry(draft: Draft) -> None:
    """The end of an answer is taken back and tried twice: the fork is made while the rollback is pending."""
    parent = busy_sequence(draft)
    wanted = 1 + max(1, draft.cache.n_rs_seq)
    if decode(draft, [(parent, wanted)]):
        roll_back(draft, parent, draft.choices.integer(1, wanted - 1))
    children = _destinations(draft, parent, 1)
    for child in children:
        share(draft, parent, child)
    decode(draft, [(sequence, draft.choices.integer(1, 3)) for sequence in (*children, parent)])


def _hear_together(draft: Draft) -> None:
    """A fork, and both hear the same tokens: at once where the cells are one pool, else each for itself."""
    parent = busy_sequence(draft)
    children = _destinations(draft, parent, 1)
    for child in children:
        share(draft, parent, child)
    token_count = min(draft.choices.integer(1, 4), draft.room_tokens(parent) // 2)
    if token_count < 1 or not children:
        return
    both, salt = tuple(sorted((parent, *children))), draft.new_salt()
    if draft.cache.unified:
        draft.operations.append(Decode((Item(both, token_count, salt),)))
    else:
        tokens = draft.explicit_tokens(token_count)
        draft.operations.append(Decode(tuple([Item((sequence,), token_count, 0, tokens) for sequence in both])))
    log_id = draft.new_log_id()
    for sequence in both:
        draft.appended(sequence, token_count)
        draft.tracks[sequence].log_id = log_id
        if draft.cache.unified:
            draft.tracks[sequence].newest = 0


def _shelve(draft: Draft) -> None:
    """A conversation is put aside, and one from the shelf goes on, in any place."""
    sequence = busy_sequence(draft)
    save(draft, sequence, draft.choices.pick(("a", "b", "c")))
    drop(draft, sequence)
    usable = usable_slots(draft, partial=False)
    destination = draft.choices.pick(idle(draft) or [sequence])
    if usable:
        restore(draft, draft.choices.pick(usable), destination)
        decode(draft, [(destination, prompt_tokens(draft))])


_MOVES = (
    Move(20, 1, _speak),
    Move(34, 6, _fork),
    Move(22, 6, _join),
    Move(10, 6, _fork_a_retry),
    Move(7, 4, _hear_together),
    Move(7, 5, _shelve),
)
