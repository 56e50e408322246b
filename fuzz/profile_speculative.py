"""Profile `speculative`: drafts are decoded, verified, and partly taken back, on several sequences at once.

Rules
- The unit is a round: one batch of a sampled token and a draft for each of some sequences, then a rollback of what was rejected.
- Drafts lean on the number of snapshots: as many tokens as can be taken back, seldom more.
- A tree forks a sequence, verifies another draft on each branch, and goes on with the winner.
Source: llama.cpp, examples/speculative and tools/server (drafts, `llama_memory_seq_rm` of what was rejected).
"""

from ..spec.configuration import CacheConfiguration
from ..spec.models import Model
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

ROUNDS_AVERAGE = 8
_N_SEQ_MAX = (2, 1, 3, 4)
_N_RS_SEQ = (3, 1, 2, 4, 3, 7)
_N_UBATCH = (64, 8, 16, 32, 6)


def speculative_program(choices: Choices, model: Model, operations_max: int) -> Program:
    """A program of speculative decoding. Raises UsageError when the model is bad."""
    n_rs_seq = choices.pick(_N_RS_SEQ)
    n_ubatch = choices.pick(_N_UBATCH)
    cache = CacheConfiguration(
        n_seq_max=choices.pick(_N_SEQ_MAX),
        n_rs_seq=n_rs_seq,
        n_ubatch=max(n_ubatch, n_rs_seq + 2),  # engines do not promise snapshots for smaller ones
        unified=int(choices.chance(40)),
        start=choices.pick(STARTS),
        interleave=int(choices.chance(25)),
    )
    return program_of_moves(choices, model, cache, operations_max, _MOVES, ROUNDS_AVERAGE)


def _sample(draft: Draft) -> None:
    """A token without a draft for every sequence; an idle one now and then gets a prompt in the same batch."""
    wanted = [(sequence, 1) for sequence in busy(draft)]
    newcomers = idle(draft)
    if newcomers and (not wanted or draft.choices.chance(40)):
        wanted.append((draft.choices.pick(newcomers), prompt_tokens(draft)))
    decode(draft, wanted)


def _draft_tokens(draft: Draft) -> int:
    """As many as can be taken back, fewer, or seldom more."""
    n_rs_seq = draft.cache.n_rs_seq
    if draft.choices.chance(5):
        return n_rs_seq + draft.choices.integer(1, 2)
    return draft.choices.pick((n_rs_seq, draft.choices.integer(1, n_rs_seq)))


def _rejected_tokens(draft: Draft, drafted: int) -> int:
    """All accepted, all rejected, or anything between."""
    some = draft.choices.integer(0, drafted)
    return draft.choices.pick((some, some, drafted, 0))


def _verify(draft: Draft) -> None:
    """A round on one to three sequences."""
    first = busy_sequence(draft)
    others = [sequence for sequence in busy(draft) if sequence != first]
    drafted = {sequence: _draft_tokens(draft) for sequence in [first, *(some_of(draft, others, 2) if draft.choices.chance(60) else [])]}
    got = decode(draft, [(sequence, 1 + count) for sequence, count in drafted.items()])
    for sequence in reversed(got) if draft.choices.chance(50) else got:
        rejected = _rejected_tokens(draft, drafted[sequence])
        if rejected:
            roll_back(draft, sequence, rejected)


def _verify_a_tree(draft: Draft) -> None:
    """Branches of one sequence verify another draft each; the winner takes the sequence's place."""
    root = busy_sequence(draft)
    branches = some_of(draft, [sequence for sequence in draft.active if sequence != root], 2)
    for branch in branches:
        share(draft, root, branch)
    drafted = {sequence: _draft_tokens(draft) for sequence in (root, *branches)}
    got = decode(draft, [(sequence, 1 + count) for sequence, count in drafted.items()])
    winner = draft.choices.pick(got or [root])
    rejected = _rejected_tokens(draft, drafted[winner])
    if rejected and winner in got:
        roll_back(draft, winner, rejected)
    if winner != root:
        share(draft, winner, root)  # while the rollback is pending
    for branch in branches:
        if draft.choices.chance(60):
            drop(draft, branch)


def _take_back_again(draft: Draft) -> None:
    """A round whose rejection is taken further, with no decode between: more than was promised."""
    sequence = busy_sequence(draft)
    count = _draft_tokens(draft)
    if decode(draft, [(sequence, 1 + count)]):
        roll_back(draft, sequence, draft.choices.integer(1, count))
        roll_back(draft, sequence, draft.choices.integer(1, count))


def _save_with_rejection(draft: Draft) -> None:
    """A round, and a save while its rejection is pending; what was saved goes on in some sequence."""
    sequence = busy_sequence(draft)
    count = _draft_tokens(draft)
    if decode(draft, [(sequence, 1 + count)]):
        roll_back(draft, sequence, draft.choices.integer(1, count))
    save(draft, sequence, draft.choices.pick(("a", "b")))
    usable = usable_slots(draft, partial=False)
    if usable:
        restore(draft, draft.choices.pick(usable), draft.choices.pick(draft.active))


def _another_prompt(draft: Draft) -> None:
    """An answer is finished: its sequence gets another prompt."""
    sequence = draft.one_of(draft.active)
    drop(draft, sequence)
    decode(draft, [(sequence, prompt_tokens(draft))])


_MOVES = (
    Move(16, 1, _sample),
    Move(50, 5, _verify),
    Move(12, 11, _verify_a_tree),
    Move(7, 4, _take_back_again),
    Move(7, 5, _save_with_rejection),
    Move(8, 2, _another_prompt),
)
