"""Lightning attention against NumPy, number by number and in float64, and the laws that every scan keeps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import vectorize
from statedrift.impl.kernels.lightning_attention import lightning_attention, lightning_attention_reference
from statedrift.impl.kernels.vectors import fused
from statedrift.impl.memory import aligned

HEADS, HEAD_DIM, D_STATE = 4, 6, 7
LOSS = np.array([-0.5, -0.3, -0.01, -1e-6], np.float32)


@vectorize
def fused32(left, right, added):
    """left * right + added in float32, number by number."""
    return fused(left, right, added)


def random32(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def arguments_of(seed, tokens, head_dim=HEAD_DIM, d_state=D_STATE):
    return random32(seed, tokens, HEADS, d_state), random32(seed + 1, tokens, HEADS, d_state), random32(seed + 2, tokens, HEADS, head_dim)


def run(arguments, rows, segment_start, source_row, plane_row, scan=lightning_attention):
    y = np.full_like(arguments[2], np.nan)
    scan(*arguments, LOSS.astype(rows.dtype), rows, np.array(segment_start), np.array(source_row), np.array(plane_row), y)
    return y


def as_written(query, key, value, loss, rows, segment_start, source_row, plane_row, y):
    """The scan in float32, a number at a time along d_state, in the order in which the kernel says that it adds."""
    for segment, row in enumerate(source_row):
        state, last = rows[row].copy(), segment_start[segment + 1]
        for token in range(segment_start[segment], last):
            for head in range(value.shape[1]):
                result = np.zeros(value.shape[2], np.float32)
                for n in range(key.shape[2]):
                    kept = fused32(state[head, n], loss[head], state[head, n])
                    state[head, n] = fused32(value[token, head], key[token, head, n], kept)
                    result = fused32(state[head, n], query[token, head, n], result)
                y[token, head] = result
            if last - 1 - token < plane_row.shape[1]:
                rows[plane_row[segment, last - 1 - token]] = state


SEGMENTS = {
    "a token in place": ([0, 1], [2], [[2]]),
    "a token into another row": ([0, 1], [2], [[5]]),
    "tokens into another row, with snapshots": ([0, 3], [2], [[5, 1]]),
    "into its own source's snapshot": ([0, 3], [2], [[5, 2]]),
    "one sequence in two pieces": ([0, 1, 3], [2, 5], [[5, 0], [4, 3]]),
    "two sequences from one row": ([0, 1, 2], [2, 2], [[5], [4]]),
}
STREAMED = (64, 256)
"""head_dim and d_state of rows that are just large enough to be written past the caches, if a call writes many of them."""


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
@pytest.mark.parametrize(("head_dim", "d_state"), [(1, 1), (6, 7), (16, 16), (17, 5), (64, 3), (100, 9), STREAMED])
def test_it_does_what_is_written_bit_for_bit_and_reads_no_row_that_nothing_wrote(head_dim, d_state, segments):
    arguments = arguments_of(1, segments[0][-1], head_dim, d_state)
    rows = aligned(random32(6, 6, HEADS, d_state, head_dim))
    rows[[i for i in range(6) if i not in segments[1]]] = np.nan
    truth = rows.copy()
    y = run(arguments, rows, *segments)
    assert np.array_equal(y, run(arguments, truth, *segments, as_written))
    assert np.array_equal(rows, truth, equal_nan=True)


def test_it_agrees_with_its_reference_in_float64():
    arguments, rows = arguments_of(0, 11), random32(7, 12, HEADS, D_STATE, HEAD_DIM)
    truth = rows.astype(np.float64)
    segments = ([0, 7, 11], [2, 9], [[0, 4, 8], [1, 5, 9]])
    y = run(arguments, rows, *segments)
    reference = run([argument.astype(np.float64) for argument in arguments], truth, *segments, scan=lightning_attention_reference)
    assert np.max(np.abs(y - reference)) <= 2e-5
    assert np.max(np.abs(rows - truth)) <= 1e-5


def test_a_loss_is_not_rounded_the_same_way_at_every_token():
    """As a factor of 0.99 in float32 it would be: the state would be off by 1e-8 more with every token."""
    tokens = 2000
    silent = (random32(0, tokens, HEADS, D_STATE), np.zeros((tokens, HEADS, D_STATE), np.float32), random32(1, tokens, HEADS, HEAD_DIM))
    rows = np.ones((1, HEADS, D_STATE, HEAD_DIM), np.float32)
    run(silent, rows, [0, tokens], [0], [[0]])
    assert rows[0, 2, 0, 0] == pytest.approx((1 + float(LOSS[2])) ** tokens, rel=5e-6)
    assert abs(float(np.float32(1) + LOSS[2]) - (1 + float(LOSS[2]))) * tokens > 1e-5


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_every_split_gives_the_same_bits(pieces):
    tokens = sum(pieces)
    arguments, rows = arguments_of(3, tokens), random32(4, 4, HEADS, D_STATE, HEAD_DIM)
    split_rows = rows.copy()
    whole = run(arguments, rows, [0, tokens], [3], [[0, 1]])
    outputs, start, source = [], 0, 3
    for piece in pieces:
        part = [argument[start : start + piece] for argument in arguments]
        outputs.append(run(part, split_rows, [0, piece], [source], [[0, 1]]))
        start, source = start + piece, 0
    assert np.array_equal(whole, np.concatenate(outputs))
    assert np.array_equal(rows[0], split_rows[0])


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7])
def test_plane_p_holds_the_state_p_tokens_before_the_last_and_others_are_not_written(tokens):
    arguments, states = arguments_of(5, tokens), np.full((4, HEADS, D_STATE, HEAD_DIM), np.nan, np.float32)
    states[0] = 0
    run(arguments, states, [0, tokens], [0], [[0, 1, 2, 3]])
    for plane in range(min(tokens, 4)):
        state = np.zeros((1, *states.shape[1:]), np.float32)
        run([argument[: tokens - plane] for argument in arguments], state, [0, tokens - plane], [0], [[0]])
        assert np.array_equal(states[plane], state[0])
    assert np.isnan(states[tokens:]).all()


def test_a_segment_may_read_from_one_of_its_own_planes():
    arguments, states = arguments_of(5, 4), random32(0, 4, HEADS, D_STATE, HEAD_DIM)
    apart = np.concatenate([states, states])
    y = run(arguments, states, [0, 4], [2], [[0, 1, 2, 3]])
    assert np.array_equal(y, run(arguments, apart, [0, 4], [6], [[0, 1, 2, 3]]))
    assert np.array_equal(states, apart[:4])
