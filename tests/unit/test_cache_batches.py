"""Batches are ordered by sequence and cut into ubatches without losing, mixing or reordering tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statedrift.impl.batches import OK, POSITION_NOT_NEXT, SEQUENCE_OUT_OF_RANGE, TOKEN_OUT_OF_RANGE, split, ubatch_tokens

SEQUENCES = 5
LAST = np.array([-1, 4, 9, 0, -1], np.int64)


def split_of(sequences, n_ubatch=4, n_rs_seq=2, tokens=None, positions=None):
    sequences = np.array(sequences, np.int64)
    count = dict.fromkeys(sequences.tolist(), 0)
    following = []
    for sequence in sequences.tolist():
        following.append((LAST[sequence] if 0 <= sequence < SEQUENCES else -1) + 1 + count[sequence])
        count[sequence] += 1
    return split(
        np.arange(len(sequences)) if tokens is None else np.array(tokens, np.int64),
        np.array(following if positions is None else positions, np.int64),
        sequences,
        np.ones(len(sequences), bool),
        LAST,
        1000,
        ubatch_tokens(n_ubatch, 1 + n_rs_seq),
        1 + n_rs_seq,
    )


BATCHES = st.lists(st.integers(0, SEQUENCES - 1), min_size=1, max_size=40)


@given(BATCHES, st.integers(1, 12), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_every_token_keeps_its_sequence_its_order_and_its_row(sequences, n_ubatch, n_rs_seq):
    code, _, batch = split_of(sequences, n_ubatch, n_rs_seq)
    assert code == OK
    sequence_of_place = np.repeat(batch.segment_sequence, np.diff(batch.segment_start))
    assert [sequences[token] for token in batch.tokens] == sequence_of_place.tolist()
    assert np.array_equal(batch.output_row, batch.tokens)
    for sequence in set(sequences):
        mine = batch.positions[sequence_of_place == sequence]
        assert np.array_equal(mine, LAST[sequence] + 1 + np.arange(len(mine)))


@given(BATCHES, st.integers(1, 12), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_ubatches_are_within_their_size_and_the_newest_tokens_of_a_sequence_stay_together(sequences, n_ubatch, n_rs_seq):
    _, _, batch = split_of(sequences, n_ubatch, n_rs_seq)
    sizes = np.diff(batch.segment_start)
    for ubatch in range(batch.ubatch_count):
        segments = slice(batch.ubatch_start[ubatch], batch.ubatch_start[ubatch + 1])
        assert 0 < sizes[segments].sum() <= max(n_ubatch, 1 + n_rs_seq)
        assert len(set(batch.segment_sequence[segments].tolist())) == len(batch.segment_sequence[segments])
    for sequence in set(sequences):
        newest = sizes[batch.segment_sequence == sequence][-1]
        assert newest >= min(sequences.count(sequence), 1 + n_rs_seq)


@given(BATCHES, st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_without_a_tail_to_keep_together_every_ubatch_but_the_last_is_full(sequences, n_ubatch):
    _, _, batch = split_of(sequences, n_ubatch, 0)
    sizes = np.diff(batch.segment_start[batch.ubatch_start])
    assert (sizes[:-1] == n_ubatch).all()
    assert 0 < sizes[-1] <= n_ubatch


@pytest.mark.parametrize(
    ("arguments", "code", "index"),
    [
        ({"sequences": [0, 5]}, SEQUENCE_OUT_OF_RANGE, 1),
        ({"sequences": [-1]}, SEQUENCE_OUT_OF_RANGE, 0),
        ({"sequences": [0, 0, 0], "tokens": [1, 2, 1000]}, TOKEN_OUT_OF_RANGE, 2),
        ({"sequences": [0, 1], "tokens": [-1, 2]}, TOKEN_OUT_OF_RANGE, 0),
        ({"sequences": [1, 1], "positions": [5, 7]}, POSITION_NOT_NEXT, 1),
        ({"sequences": [0], "positions": [1]}, POSITION_NOT_NEXT, 0),
    ],
)
def test_a_bad_token_is_found(arguments, code, index):
    assert split_of(**arguments)[:2] == (code, index)
