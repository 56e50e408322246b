"""Mamba-1's scan against plain NumPy, and the laws every kernel keeps: any split of tokens gives the same bits, snapshots hold what their
number says, and memory that nothing wrote is never read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statedrift.impl.kernels.arithmetic import exponential
from statedrift.impl.kernels.mamba1_scan import mamba1_scan, mamba1_scan_reference

CHANNELS, D_STATE = 6, 7
SEGMENTS = {
    "a token in place": ([0, 1], [2], [[2]]),
    "a token into another row": ([0, 1], [2], [[5]]),
    "tokens in place": ([0, 3], [2], [[2]]),
    "tokens into another row, with snapshots": ([0, 3], [2], [[5, 1]]),
    "into its own source's snapshot": ([0, 3], [2], [[5, 2]]),
    "one sequence in two pieces": ([0, 1, 3], [2, 5], [[5, 0], [4, 3]]),
    "two sequences from one row": ([0, 1, 2], [2, 2], [[5], [4]]),
}


def random32(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def arguments_of(seed, tokens, channels=CHANNELS, d_state=D_STATE):
    return (
        random32(seed, tokens, channels),
        np.abs(random32(seed + 1, tokens, channels)),
        -np.abs(random32(seed + 2, d_state, channels)),
        random32(seed + 3, tokens, d_state),
        random32(seed + 4, tokens, d_state),
    )


def part_of(arguments, part):
    x, dt, a, b, c = arguments
    return x[part], dt[part], a, b[part], c[part]


def run(arguments, rows, segment_start, source_row, plane_row, scan=mamba1_scan):
    y = np.full_like(arguments[0], np.nan)
    scan(*arguments, rows, np.array(segment_start), np.array(source_row), np.array(plane_row), y)
    return y


def as_written(x, dt, a, b, c, rows, segment_start, source_row, plane_row, y):
    """The scan in float32, a number at a time along d_state, in the order in which the kernel says that it adds."""
    for segment, row in enumerate(source_row):
        state, last = rows[row].copy(), segment_start[segment + 1]
        for token in range(segment_start[segment], last):
            scaled, result = dt[token] * x[token], np.zeros(x.shape[1], np.float32)
            for n in range(b.shape[1]):
                decay = np.array([exponential(exponent) for exponent in dt[token] * a[n]], np.float32)
                state[n] = state[n] * decay + scaled * b[token, n]
                result = result + state[n] * c[token, n]
            y[token] = result
            if last - 1 - token < plane_row.shape[1]:
                rows[plane_row[segment, last - 1 - token]] = state


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
@pytest.mark.parametrize(("channels", "d_state"), [(1, 1), (6, 7), (16, 16), (17, 5), (64, 8), (100, 9)])
def test_the_scan_does_what_is_written_bit_for_bit(channels, d_state, segments):
    arguments = arguments_of(1, segments[0][-1], channels, d_state)
    rows = random32(6, 6, d_state, channels)
    rows[[i for i in range(6) if i not in segments[1]]] = np.nan
    truth = rows.copy()
    y = run(arguments, rows, *segments)
    assert np.array_equal(y, run(arguments, truth, *segments, as_written))
    assert np.array_equal(rows, truth, equal_nan=True)


def test_the_scan_agrees_with_its_reference():
    arguments, rows = arguments_of(0, 11), random32(7, 12, D_STATE, CHANNELS)
    truth = rows.astype(np.float64)
    segments = ([0, 7, 11], [2, 9], [[0, 4, 8], [1, 5, 9]])
    y = run(arguments, rows, *segments)
    reference = run([argument.astype(np.float64) for argument in arguments], truth, *segments, scan=mamba1_scan_reference)
    assert np.max(np.abs(y - reference)) <= 1e-5
    assert np.max(np.abs(rows - truth)) <= 1e-5


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_the_scan_gives_the_same_bits_for_every_split(pieces):
    tokens = sum(pieces)
    arguments, rows = arguments_of(3, tokens), random32(4, 4, D_STATE, CHANNELS)
    split_rows = rows.copy()
    whole = run(arguments, rows, [0, tokens], [3], [[0, 1]])
    outputs, start, source = [], 0, 3
    for piece in pieces:
        outputs.append(run(part_of(arguments, slice(start, start + piece)), split_rows, [0, piece], [source], [[0, 1]]))
        start, source = start + piece, 0
    assert np.array_equal(whole, np.concatenate(outputs))
    assert np.array_equal(rows[0], split_rows[0])


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7])
def test_plane_p_holds_the_state_p_tokens_before_the_last_and_others_are_not_written(tokens):
    arguments, states = arguments_of(5, tokens), np.full((4, D_STATE, CHANNELS), np.nan, np.float32)
    states[0] = 0
    run(arguments, states, [0, tokens], [0], [[0, 1, 2, 3]])
    for plane in range(min(tokens, 4)):
        state, shorter = np.zeros((1, D_STATE, CHANNELS), np.float32), tokens - plane
        run(part_of(arguments, slice(0, shorter)), state, [0, shorter], [0], [[0]])
        assert np.array_equal(states[plane], state[0])
    assert np.isnan(states[tokens:]).all()


def test_a_segment_may_read_from_one_of_its_own_planes():
    # A rollback that is carried out: the source, plane 2, is overwritten by the new snapshots.
    arguments, states = arguments_of(5, 4), random32(0, 4, D_STATE, CHANNELS)
    apart = np.concatenate([states, states])
    y = run(arguments, states, [0, 4], [2], [[0, 1, 2, 3]])
    assert np.array_equal(y, run(arguments, apart, [0, 4], [6], [[0, 1, 2, 3]]))
    assert np.array_equal(states, apart[:4])
