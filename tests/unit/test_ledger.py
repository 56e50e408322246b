"""The ledger: logs are replaced, never changed; marks say which cached tokens are one; partial saves remember how short a log became."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statedrift.oracle.ledger import EMPTY, Ledger, Log, Slot


def grown(ledger: Ledger, sequence: int, count: int, alone: bool = True) -> Log:
    ledger.append(sequence, tuple(range(count)), ledger.new_marks(count), alone, 3)
    return ledger.logs[sequence]


def test_a_new_ledger_is_empty() -> None:
    ledger = Ledger(3)
    assert ledger.logs == [EMPTY] * 3
    assert (EMPTY.position, EMPTY.first_position, EMPTY.tokens) == (-1, -1, ())
    assert ledger.cached_tokens() == 0


def test_appending_gives_tokens_positions_and_budgets() -> None:
    ledger = Ledger(2)
    log = grown(ledger, 0, 5)
    assert (log.position, log.first_position, log.draft, log.depth, len(log.marks)) == (4, 0, 4, 3, 5)
    log = grown(ledger, 0, 1)
    assert (log.position, log.first_position, log.draft, log.depth, len(log.marks)) == (5, 0, 0, 3, 6)
    assert ledger.logs[1] == EMPTY


def test_coupled_tokens_give_no_draft_budget() -> None:
    ledger = Ledger(2)
    assert grown(ledger, 0, 5, alone=False).draft == 0


def test_cutting_takes_the_newest_tokens() -> None:
    ledger = Ledger(1)
    before = grown(ledger, 0, 5)
    ledger.cut(0, 2)
    log = ledger.logs[0]
    assert (log.tokens, log.position, log.marks, log.draft, log.depth) == ((0, 1, 2), 2, before.marks[:3], 0, 1)


@pytest.mark.parametrize("count", [5, 6, 100])
def test_cutting_everything_leaves_an_empty_log_and_forgets_its_flags(count: int) -> None:
    ledger = Ledger(1)
    ledger.put(0, grown(ledger, 0, 5)._replace(divided=True, silent=True, unchecked=True))
    ledger.cut(0, count)
    assert ledger.logs[0] == EMPTY


def test_a_shared_token_counts_once() -> None:
    ledger = Ledger(3)
    ledger.put(1, grown(ledger, 0, 4))
    assert ledger.cached_tokens() == 4
    grown(ledger, 0, 2)
    grown(ledger, 1, 3)
    assert ledger.cached_tokens() == 9
    ledger.put(0, EMPTY)
    assert ledger.cached_tokens() == 7


@given(st.lists(st.integers(0, 5), max_size=8))
def test_marks_are_never_given_twice(counts: list[int]) -> None:
    ledger = Ledger(1)
    marks = [mark for count in counts for mark in ledger.new_marks(count)]
    assert len(marks) == len(set(marks)) == sum(counts)


def partial_slot(ledger: Ledger, sequence: int) -> Slot:
    slot = Slot({sequence: ledger.logs[sequence]}, b"blob", False, len(ledger.logs), 0, ledger.session)
    slot.partial, slot.shortest = True, len(ledger.logs[sequence].tokens)
    ledger.slots["a"] = slot
    return slot


def test_a_partial_save_remembers_how_short_its_sequence_became() -> None:
    ledger = Ledger(2)
    grown(ledger, 0, 5)
    slot = partial_slot(ledger, 0)
    grown(ledger, 0, 2)
    assert slot.shortest == 5
    ledger.cut(0, 4)
    grown(ledger, 0, 4)
    assert slot.shortest == 3


def test_a_partial_save_does_not_care_about_other_sequences() -> None:
    ledger = Ledger(2)
    grown(ledger, 0, 5)
    grown(ledger, 1, 5)
    slot = partial_slot(ledger, 0)
    ledger.put(1, EMPTY)
    assert slot.shortest == 5


def test_a_reopened_ledger_is_empty_and_keeps_its_slots() -> None:
    ledger = Ledger(2)
    grown(ledger, 0, 5)
    slot = partial_slot(ledger, 0)
    ledger.reopen(3)
    assert ledger.logs == [EMPTY] * 3
    assert ledger.slots == {"a": slot}
    assert slot.session != ledger.session


def test_damage_is_what_differs_from_what_was_saved() -> None:
    slot = Slot({2: EMPTY}, b"blob", False, 4, 0, 0)
    assert not slot.is_damaged
    slot.blob = b"blub"
    assert slot.is_damaged
    slot.blob = b"blob"
    assert not slot.is_damaged
    assert slot.sequence == 2


def test_the_first_position_follows_a_shift() -> None:
    log = Log(tokens=(1, 2, 3), position=9)
    assert log.first_position == 7
