"""Batches with tokens of several sequences are cut into phases in which every sequence belongs to one set."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statedrift.impl.coupled import phases_of


@pytest.mark.parametrize(
    ("sequences", "places"),
    [
        ([(0,), (1,), (0,)], [[0, 1, 2]]),
        ([(0, 1), (0, 1), (2,)], [[0, 1, 2]]),
        ([(0, 1), (0,), (1,)], [[0], [1, 2]]),
        ([(0,), (0, 1), (1,)], [[0], [1], [2]]),
        ([(2,), (0, 1), (0,), (2,)], [[0, 1, 3], [2]]),
        ([(0, 1, 2), (0, 1), (2,), (0,), (1,)], [[0], [1, 2], [3, 4]]),
        ([(0, 1), (2, 3), (1, 2)], [[0, 1], [2]]),
    ],
)
def test_a_batch_is_cut_where_a_sequence_changes_its_company(sequences, places):
    assert [phase.places for phase in phases_of(sequences)] == places


MEMBERS = st.sets(st.integers(0, 4), min_size=1, max_size=3).map(lambda members: tuple(sorted(members)))


@given(st.lists(MEMBERS, min_size=1, max_size=20))
@settings(max_examples=300, deadline=None)
def test_every_token_is_in_one_phase_and_each_sequence_gets_its_tokens_in_order(sequences):
    phases = phases_of(sequences)
    assert sorted(place for phase in phases for place in phase.places) == list(range(len(sequences)))
    for sequence in range(5):
        mine = [place for phase in phases for place in phase.places if sequence in sequences[place]]
        assert mine == sorted(mine)
        is_coupled = any(sequence in members and len(members) > 1 for members in sequences)
        assert is_coupled or all(place in phases[0].places for place in mine)
    for phase in phases:
        sets = {sequences[place] for place in phase.places}
        assert sum(map(len, sets)) == len(set().union(*sets))
        assert phase.counts == {members: sum(sequences[place] == members for place in phase.places) for members in sets}
