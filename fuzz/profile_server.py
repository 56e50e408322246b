"""Profile `server`: what a server does with its slots: prompt cache, checkpoints, cancellations, a full context.

Rules
- A slot is a sequence. A request reuses what its slot holds: a prefix, a checkpoint, a saved prompt, or nothing.
- A checkpoint is a partial save: it goes back into its own slot, while the slot was not cut below it.
- The context is small, so that it gets full.
Source: llama.cpp, tools/server (slots, `cache_prompt`, context checkpoints, the host's prompt cache).
"""

from ..spec.configuration import CacheConfiguration
from ..spec.models import Model
from ..spec.operations import Cancel, Decode, Item, Reopen, RestoreAll, SaveAll
from ..spec.programs import Program
from .choices import Choices
from .generation_draft import Draft, SavedSession
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

MOVES_AVERAGE = 9
_N_SEQ_MAX = (2, 1, 3, 4)
_N_RS_SEQ = (0, 3, 1, 0, 2)
_N_UBATCH = (64, 8, 16, 32)
_N_CTX = (32, 48, 24, 64)
_N_CTX_UNIFIED = (16, 24, 12)
_PROMPT_CACHE = ("a", "b", "c")
_CHECKPOINTS = ("p", "q", "r")
_RESTARTED = "w"


def server_program(choices: Choices, model: Model, operations_max: int) -> Program:
    """A program of a server's slots. Raises UsageError when the model is bad."""
    unified = int(choices.chance(50))
    cache = CacheConfiguration(
        n_seq_max=choices.pick(_N_SEQ_MAX),
        n_rs_seq=choices.pick(_N_RS_SEQ),
        n_ubatch=choices.pick(_N_UBATCH),
        n_ctx=choices.pick(_N_CTX_UNIFIED if unified else _N_CTX),
        unified=unified,
        start=choices.pick(STARTS),
    )
    return program_of_moves(choices, model, cache, operations_max, _MOVES, MOVES_AVERAGE)


def _generate(draft: Draft) -> None:
    """One token for every busy slot, with a piece of a new prompt in the same batch now and then."""
    wanted = [(sequence, 1) for sequence in busy(draft)]
    free = idle(draft)
    if free and (not wanted or draft.choices.chance(40)):
        wanted.append((draft.choices.pick(free), prompt_tokens(draft)))
    if not decode(draft, wanted):
        drop(draft, draft.filled_sequence())  # everything is full


def _request(draft: Draft) -> None:
    """A request comes to a slot."""
    sequence = draft.one_of(draft.active)
    reuse = draft.choices.pick((_start_anew, _swap_prompts, _swap_prompts, _go_back_to_checkpoint, _keep_a_prefix))
    reuse(draft, sequence)
    decode(draft, [(sequence, prompt_tokens(draft))])


def _start_anew(draft: Draft, sequence: int) -> None:
    if draft.tracks[sequence].length:
        drop(draft, sequence)


def _swap_prompts(draft: Draft, sequence: int) -> None:
    """The slot's state goes to the prompt cache, and the one that fits the request best comes from there."""
    name = draft.choices.pick(_PROMPT_CACHE)
    if draft.tracks[sequence].length:
        save(draft, sequence, name)
        drop(draft, sequence)
    others = [other for other in usable_slots(draft, partial=False) if other != name] or usable_slots(draft, partial=False)
    if others:
        restore(draft, draft.choices.pick(others), sequence)


def _go_back_to_checkpoint(draft: Draft, sequence: int) -> None:
    usable = usable_slots(draft, partial=True, sequence=sequence)
    if usable:
        restore(draft, draft.choices.pick(usable), sequence)
    else:
        _start_anew(draft, sequence)


def _keep_a_prefix(draft: Draft, sequence: int) -> None:
    """All but the newest tokens is the new request's, too; where they cannot be taken back the slot starts anew."""
    length = draft.tracks[sequence].length
    if length > 1:
        roll_back(draft, sequence, draft.choices.integer(1, min(length - 1, draft.cache.n_rs_seq + 1)))


def _checkpoint(draft: Draft) -> None:
    """Checkpoint a slot, go on, and often go back."""
    sequence = busy_sequence(draft)
    name = draft.choices.pick(_CHECKPOINTS)
    save(draft, sequence, name, partial=True)
    decode(draft, [(sequence, draft.size_tokens())])
    if draft.choices.chance(60):
        restore(draft, name, sequence)
        decode(draft, [(sequence, draft.choices.integer(1, 3))])


def _hang_up(draft: Draft) -> None:
    """A client hangs up while its batch runs; mostly its slot is freed."""
    slots = some_of(draft, list(draft.active), 2)
    items = []
    for sequence in slots:
        token_count = min(draft.room_tokens(sequence) // (len(slots) if draft.cache.unified else 1), prompt_tokens(draft))
        if token_count > 0:
            items.append(draft.item(sequence, token_count))
    if not items:
        drop(draft, draft.filled_sequence())
        return
    draft.operations.append(Cancel(tuple(items), draft.choices.integer(0, draft.choices.pick((3, 20, 80)))))
    for item in items:
        draft.cancelled(item.sequences[0])
    if draft.choices.chance(60):
        drop(draft, items[0].sequences[0])


def _fill(draft: Draft) -> None:
    """A slot generates until the context is full, asks for more, and is freed or goes back to a saved state."""
    sequence = busy_sequence(draft)
    if draft.has_attention:
        decode(draft, [(sequence, draft.room_tokens(sequence) - draft.choices.pick((0, 0, 1)))])
        draft.operations.append(Decode((Item((sequence,), draft.choices.integer(2, 3), draft.new_salt()),)))
    else:
        decode(draft, [(sequence, prompt_tokens(draft))])
    usable = usable_slots(draft, partial=True, sequence=sequence)
    if usable and draft.choices.chance(50):
        restore(draft, draft.choices.pick(usable), sequence)
    else:
        drop(draft, sequence)


def _answer_twice(draft: Draft) -> None:
    """Two completions of one prompt."""
    sequence = busy_sequence(draft)
    others = [other for other in draft.active if other != sequence]
    if others:
        other = draft.choices.pick(others)
        share(draft, sequence, other)
        decode(draft, [(sequence, 1), (other, 1)])
    else:
        decode(draft, [(sequence, 1)])


def _restart(draft: Draft) -> None:
    """The server restarts with the state that it had."""
    draft.operations.append(SaveAll(_RESTARTED))
    saved = SavedSession(draft.tracks, draft.cache)
    draft.operations.append(Reopen())
    active = draft.active
    draft.reopened({})
    draft.active = active
    draft.operations.append(RestoreAll(_RESTARTED))
    for sequence, copied in enumerate(saved.tracks):
        draft.restored(sequence, copied, True)


_MOVES = (
    Move(24, 1, _generate),
    Move(30, 4, _request),
    Move(20, 5, _checkpoint),
    Move(10, 2, _hang_up),
    Move(10, 4, _fill),
    Move(6, 4, _answer_twice),
    Move(3, 3, _restart),
)
