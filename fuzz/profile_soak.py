"""Profile `soak`: one long program of thousands of operations, in one session.

Rules
- The operations are swarm's, but for those that end everything (clear, reopen): what was done long ago is to be met.
- Which of them are switched on, and how common they are, is drawn anew every hundred operations.
- A sequence that is long is dropped: judging costs by the token of every log.
"""

from ..spec.models import Model
from ..spec.operations import Drop
from ..spec.programs import Program
from .choices import Choices
from .generation_draft import Draft, model_facts
from .generation_operations import LASTING_KINDS, add_one, close_draft, draw_configuration, draw_weights

SPELL_OPERATIONS = 100
"""So long the same kinds of operations are switched on."""
LOG_TOKENS_MAX = 48


def soak_program(choices: Choices, model: Model, operations_max: int) -> Program:
    """A program of two thirds of `operations_max` operations at least. Raises UsageError when the model is bad."""
    cache = draw_configuration(choices, model_facts(model).has_window)
    draft = Draft(choices, model, cache, operations_max)
    weights = draw_weights(choices, LASTING_KINDS)
    spell_ends = SPELL_OPERATIONS

    def step() -> bool:
        nonlocal weights, spell_ends
        if len(draft.operations) >= operations_max - 1:
            return False
        if len(draft.operations) >= spell_ends:
            weights, spell_ends = draw_weights(choices, LASTING_KINDS), spell_ends + SPELL_OPERATIONS
            draft.token_count = 0  # sizes are drawn as at a program's beginning
            draft.hot = choices.pick(draft.active)
        if not _drop_a_long_one(draft):
            add_one(draft, LASTING_KINDS, weights)
        return True

    choices.repeat(step, operations_max * 2 // 3, operations_max * 5 // 6, operations_max)
    close_draft(draft)
    return Program(model, cache, tuple(draft.operations))


def _drop_a_long_one(draft: Draft) -> bool:
    long = [sequence for sequence, track in enumerate(draft.tracks) if track.length > LOG_TOKENS_MAX]
    if not long or draft.damaged_slot is not None:
        return False
    draft.operations.append(Drop(long[0]))
    draft.emptied(long[0])
    return True
