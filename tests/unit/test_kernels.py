"""Numba kernels against plain NumPy in float64, and the laws every kernel keeps: any split of tokens gives the same bits, snapshots hold what
their number says, and memory that nothing wrote is never read."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import vectorize
from statedrift.impl.kernels import discard_stale_code
from statedrift.impl.kernels.arithmetic import exponential, silu, softplus
from statedrift.impl.kernels.attention import attend, write_cells
from statedrift.impl.kernels.causal_convolution import causal_convolution, causal_convolution_reference
from statedrift.impl.kernels.dense import linear, rms_norm, rotary_table, rotate, squared_relu, sum_of_products
from statedrift.impl.kernels.experts import expert_mixture, sigmoid_shares, softmax_shares
from statedrift.impl.kernels.gated_delta_net import gated_delta_net, gated_delta_net_reference
from statedrift.impl.kernels.mamba2_scan import mamba2_scan, mamba2_scan_reference
from statedrift.impl.kernels.rows import copy_rows, gather_rows, scatter_rows, zero_rows
from statedrift.impl.kernels.vectors import fused, may_stream
from statedrift.impl.memory import aligned, allocate
from statedrift.oracle import blocks

HEADS, HEAD_DIM, GROUPS, D_STATE, CHANNELS, TAPS = 4, 6, 2, 7, 10, 4


@vectorize
def fused32(left, right, added):
    """left * right + added in float32, number by number."""
    return fused(left, right, added)


def random32(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def scan_arguments(seed, tokens, head_dim=HEAD_DIM, d_state=D_STATE):
    return (
        random32(seed, tokens, HEADS, head_dim),
        np.abs(random32(seed + 1, tokens, HEADS)),
        -np.abs(random32(seed + 2, HEADS)),
        random32(seed + 3, tokens, GROUPS, d_state),
        random32(seed + 4, tokens, GROUPS, d_state),
    )


def run_scan(arguments, rows, segment_start, source_row, plane_row, scan=mamba2_scan):
    x, dt, a, b, c = arguments
    y = np.full_like(x, np.nan)
    scan(x, dt, a, b, c, rows, np.array(segment_start), np.array(source_row), np.array(plane_row), y)
    return y


def delta_arguments(seed, tokens, head_dim=HEAD_DIM, d_state=D_STATE):
    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    return (
        unit(random32(seed, tokens, GROUPS, d_state)),
        unit(random32(seed + 1, tokens, GROUPS, d_state)),
        random32(seed + 2, tokens, HEADS, head_dim),
        -np.abs(random32(seed + 3, tokens, HEADS)),
        np.random.default_rng(seed + 4).random((tokens, HEADS), np.float32),
    )


def run_delta(arguments, rows, segment_start, source_row, plane_row, net=gated_delta_net):
    y = np.full_like(arguments[2], np.nan)
    net(*arguments, rows, np.array(segment_start), np.array(source_row), np.array(plane_row), y)
    return y


def run_convolution(x, rows, segment_start, source_row, plane_row, convolution=causal_convolution):
    taps, bias = random32(8, TAPS, CHANNELS), random32(9, CHANNELS)
    y = np.full_like(x, np.nan)
    convolution(x, taps, bias, rows, np.array(segment_start), np.array(source_row), np.array(plane_row), y)
    return y


def scan_as_written(x, dt, a, b, c, rows, segment_start, source_row, plane_row, y):
    """The scan in float32, a number at a time along d_state, in the order in which the kernel says that it adds."""
    for segment, row in enumerate(source_row):
        state, last = rows[row].copy(), segment_start[segment + 1]
        for token in range(segment_start[segment], last):
            for head in range(x.shape[1]):
                step, group = dt[token, head], head // (x.shape[1] // b.shape[1])
                decay, scaled, result = exponential(step * a[head]), step * x[token, head], np.zeros(x.shape[2], np.float32)
                for n in range(b.shape[2]):
                    state[head, n] = fused32(scaled, b[token, group, n], state[head, n] * decay)
                    result = fused32(state[head, n], c[token, group, n], result)
                y[token, head] = result
            if last - 1 - token < plane_row.shape[1]:
                rows[plane_row[segment, last - 1 - token]] = state


def delta_as_written(query, key, value, log_decay, beta, rows, segment_start, source_row, plane_row, y):
    """The delta net in float32, in the order in which the kernel says that it adds."""
    for segment, row in enumerate(source_row):
        state, last = rows[row].copy(), segment_start[segment + 1]
        for token in range(segment_start[segment], last):
            for head in range(value.shape[1]):
                k, q = key[token, head % key.shape[1]], query[token, head % key.shape[1]]
                held, seen = np.zeros(value.shape[2], np.float32), np.zeros(value.shape[2], np.float32)
                decay = exponential(log_decay[token, head])
                for n in range(k.size):
                    held = fused32(state[head, n], decay * k[n], held)
                    seen = fused32(state[head, n], decay * q[n], seen)
                added = beta[token, head] * (value[token, head] - held)
                state[head] = fused32(k[:, None], added, state[head] * decay)
                y[token, head] = fused32(added, sum_of_products(q, k), seen)
            if last - 1 - token < plane_row.shape[1]:
                rows[plane_row[segment, last - 1 - token]] = state


SCANS = [(run_scan, scan_arguments, scan_as_written), (run_delta, delta_arguments, delta_as_written)]
SCAN_NAMES = ["mamba2_scan", "gated_delta_net"]
SEGMENTS = {
    "a token in place": ([0, 1], [2], [[2]]),
    "a token into another row": ([0, 1], [2], [[5]]),
    "tokens in place": ([0, 3], [2], [[2]]),
    "tokens into another row, with snapshots": ([0, 3], [2], [[5, 1]]),
    "into its own source's snapshot": ([0, 3], [2], [[5, 2]]),
    "one sequence in two pieces": ([0, 1, 3], [2, 5], [[5, 0], [4, 3]]),
    "two sequences from one row": ([0, 1, 2], [2, 2], [[5], [4]]),
}
STREAMED = (64, 256)
"""head_dim and d_state of rows that are just large enough to be written past the caches."""


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
@pytest.mark.parametrize(("head_dim", "d_state"), [(1, 1), (6, 7), (16, 16), (17, 5), (64, 3), (100, 9), STREAMED])
@pytest.mark.parametrize(("run", "arguments_of", "as_written"), SCANS, ids=SCAN_NAMES)
def test_a_scan_does_what_is_written_bit_for_bit(run, arguments_of, as_written, head_dim, d_state, segments):
    arguments = arguments_of(1, segments[0][-1], head_dim, d_state)
    rows = aligned(random32(6, 6, HEADS, d_state, head_dim))
    rows[[i for i in range(6) if i not in segments[1]]] = np.nan
    truth = rows.copy()
    y = run(arguments, rows, *segments)
    assert np.array_equal(y, run(arguments, truth, *segments, as_written))
    assert np.array_equal(rows, truth, equal_nan=True)


SEQUENCES = 32
"""So many of the large rows that a call writes past the caches."""


@pytest.mark.parametrize("shift", [0, 1], ids=["in whole cache lines", "across cache lines"])
@pytest.mark.parametrize(("run", "arguments_of", "as_written"), SCANS, ids=SCAN_NAMES)
def test_large_rows_walked_one_by_one_hold_what_they_hold_in_place(run, arguments_of, as_written, shift):
    head_dim, d_state = STREAMED
    steps, arguments = 3, arguments_of(2, 3 * SEQUENCES, head_dim, d_state)
    shape = ((steps + 1) * SEQUENCES, HEADS, d_state, head_dim)
    rows = allocate((int(np.prod(shape)) + shift,))[shift:].reshape(shape)
    rows[:SEQUENCES] = random32(3, *shape[1:])
    assert may_stream(rows, SEQUENCES) == (shift == 0)
    in_place, starts, cells = aligned(rows[:SEQUENCES]), np.arange(SEQUENCES + 1), np.arange(SEQUENCES)
    for step in range(steps):
        part = [one if one.ndim == 1 else one[step * SEQUENCES : (step + 1) * SEQUENCES] for one in arguments]
        y = run(part, rows, starts, step * SEQUENCES + cells, (step + 1) * SEQUENCES + cells[:, None])
        assert np.array_equal(y, run(part, in_place, starts, cells, cells[:, None]))
        assert np.array_equal(rows[(step + 1) * SEQUENCES :][:SEQUENCES], in_place)


@pytest.mark.parametrize(("run", "arguments_of", "as_written"), SCANS, ids=SCAN_NAMES)
def test_snapshots_written_past_the_caches_are_those_of_one_sequence_at_a_time(run, arguments_of, as_written):
    head_dim, d_state = STREAMED
    arguments = arguments_of(2, 4 * SEQUENCES, head_dim, d_state)
    together, alone = (aligned(np.full((5 * SEQUENCES, HEADS, d_state, head_dim), np.nan, np.float32)) for _ in range(2))
    together[:SEQUENCES] = alone[:SEQUENCES] = random32(3, *together.shape[1:])
    planes = np.arange(SEQUENCES, 5 * SEQUENCES).reshape(SEQUENCES, 4)
    y = run(arguments, together, 4 * np.arange(SEQUENCES + 1), np.arange(SEQUENCES), planes)
    for sequence in range(SEQUENCES):
        part = [one if one.ndim == 1 else one[4 * sequence : 4 * sequence + 4] for one in arguments]
        assert np.array_equal(y[4 * sequence : 4 * sequence + 4], run(part, alone, [0, 4], [sequence], planes[[sequence]]))
    assert np.array_equal(together, alone)


@pytest.mark.parametrize(
    ("shape", "row_count", "streamed"),
    [
        ((2, 4, 256, 64), 32, True),
        ((2, 4, 256, 64), 31, False),
        ((2, 4, 255, 64), 40, False),
        ((2, 4, 256, 72), 32, False),
        ((2, 4, 256, 80), 32, True),
        ((1, 4, 8192, 64), 1, True),
    ],
)
def test_only_many_large_rows_of_whole_cache_lines_are_written_past_the_caches(shape, row_count, streamed):
    assert may_stream(allocate(shape), row_count) is streamed


@pytest.mark.parametrize("size", [1, 16, 33])
def test_a_fused_product_and_sum_is_rounded_once(size):
    x, y, z = random32(0, size), random32(1, size), random32(2, size)
    z = (z * np.float32(2.0**-20) - x * y).astype(np.float32)  # nearly cancels: rounded apart, the product's error shows
    exact = [float(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))) for a, b, c in zip(x, y, z, strict=True)]
    assert np.array_equal(fused32(x, y, z), np.array(exact).astype(np.float32))
    if size > 1:
        assert not np.array_equal(fused32(x, y, z), x * y + z)


def test_the_exponential_is_within_two_units_in_the_last_place():
    x = np.linspace(-86, 87, 20001).astype(np.float32)
    got = np.array([exponential(value) for value in x], np.float64)
    truth = np.exp(x.astype(np.float64))
    assert np.max(np.abs(got - truth) / truth) <= 2 * 2.0**-23


@pytest.mark.parametrize("function", [exponential, silu, softplus])
def test_an_activation_lets_nan_through(function):
    assert np.isnan(function(np.float32(np.nan)))


@pytest.mark.parametrize("x", [-1000.0, -88.0, -1.0, 0.0, 1.0, 88.0, 1000.0])
def test_silu_and_softplus_hold_far_from_zero(x):
    with np.errstate(over="ignore"):
        assert abs(silu(np.float32(x)) - x / (1 + np.exp(-x))) <= 1e-6 * max(1.0, abs(x))
    assert abs(softplus(np.float32(x)) - np.logaddexp(0, x)) <= 1e-6 * max(1.0, abs(x))


@pytest.mark.parametrize(("n_in", "n_out"), [(1, 1), (7, 5), (8, 3), (32, 96), (33, 17)])
def test_linear_agrees_with_float64(n_in, n_out):
    x, matrix = random32(0, 5, n_in), random32(1, n_in, n_out)
    y = np.full((5, n_out), np.nan, np.float32)
    linear(x, matrix, y)
    assert np.max(np.abs(y - x.astype(np.float64) @ matrix)) <= 1e-5 * n_in


def test_linear_gives_a_token_the_same_bits_alone_and_in_a_batch():
    x, matrix = random32(0, 9, 33), random32(1, 33, 50)
    together, alone = np.empty((9, 50), np.float32), np.empty((9, 50), np.float32)
    linear(x, matrix, together)
    for token in range(9):
        linear(x[token : token + 1], matrix, alone[token : token + 1])
    assert np.array_equal(together, alone)


@pytest.mark.parametrize("size", [1, 3, 4, 16, 33])
def test_a_sum_of_products_agrees_with_float64(size):
    x, y = random32(0, size), random32(1, size)
    assert abs(sum_of_products(x, y) - np.dot(x.astype(np.float64), y)) <= 1e-5


def test_a_grouped_norm_takes_its_weights_in_turn():
    x, weight = random32(0, 6, 8), random32(1, 3, 8)
    y = np.empty_like(x)
    rms_norm(x, weight, np.float32(1e-5), y)
    truth = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True) + 1e-5) * np.tile(weight, (2, 1))
    assert np.max(np.abs(y - truth)) <= 1e-5


def test_rotation_depends_on_the_difference_of_positions_only():
    query, key = random32(0, 1, 1, 8), random32(1, 1, 1, 8)
    products = []
    for first, second in ((3, 1), (203, 201)):
        cosine, sine = np.empty((2, 4), np.float32), np.empty((2, 4), np.float32)
        rotary_table(np.array([first, second]), 4, 10000.0, cosine, sine)
        rotated_query, rotated_key = query.copy(), key.copy()
        rotate(rotated_query, cosine[:1], sine[:1])
        rotate(rotated_key, cosine[1:], sine[1:])
        products.append(float(np.sum(rotated_query * rotated_key)))
    assert abs(products[0] - products[1]) <= 1e-5
    assert abs(products[0] - float(np.sum(query * key))) > 1e-3


def test_rows_are_zeroed_over_nan_in_every_layer():
    rows = np.full((2, 4, 3), np.nan, np.float32)
    zero_rows(rows, np.array([2, -1, 0]))
    assert np.array_equal(rows[:, [0, 2]], np.zeros((2, 2, 3)))
    assert np.isnan(rows[:, [1, 3]]).all()


def test_rows_are_gathered_scattered_and_copied_by_number():
    rows = random32(0, 2, 5, 3)
    before = rows.copy()
    held = np.empty((2, 2, 3), np.float32)
    gather_rows(rows, np.array([4, 1]), held)
    assert np.array_equal(held, before[:, [4, 1]])
    scatter_rows(held, np.array([0, 2]), rows)
    assert np.array_equal(rows[:, [0, 2]], before[:, [4, 1]])
    copy_rows(rows, np.array([0, 3]), np.array([3, 1]))
    assert np.array_equal(rows[:, [3, 1]], before[:, [4, 4]])


def test_the_scan_agrees_with_its_reference():
    arguments = scan_arguments(0, 11)
    rows = random32(7, 12, HEADS, D_STATE, HEAD_DIM)
    truth = rows.astype(np.float64)
    segments = ([0, 7, 11], [2, 9], [[0, 4, 8], [1, 5, 9]])
    y = run_scan(arguments, rows, *segments)
    reference = run_scan([argument.astype(np.float64) for argument in arguments], truth, *segments, scan=mamba2_scan_reference)
    assert np.max(np.abs(y - reference)) <= 1e-5
    assert np.max(np.abs(rows - truth)) <= 1e-5


def test_the_delta_net_agrees_with_its_reference():
    arguments = delta_arguments(0, 11)
    rows = random32(7, 12, HEADS, D_STATE, HEAD_DIM)
    truth = rows.astype(np.float64)
    segments = ([0, 7, 11], [2, 9], [[0, 4, 8], [1, 5, 9]])
    y = run_delta(arguments, rows, *segments)
    reference = run_delta([argument.astype(np.float64) for argument in arguments], truth, *segments, net=gated_delta_net_reference)
    assert np.max(np.abs(y - reference)) <= 1e-5
    assert np.max(np.abs(rows - truth)) <= 1e-5


def test_a_delta_net_that_takes_a_value_whole_gives_it_back_for_its_key():
    _, key, value, log_decay, beta = delta_arguments(1, 3)
    rows = random32(2, 1, HEADS, D_STATE, HEAD_DIM)
    y = run_delta((key, key, value, log_decay, np.ones_like(beta)), rows, [0, 3], [0], [[0]])
    assert np.max(np.abs(y - value)) <= 1e-5


def test_the_convolution_agrees_with_its_reference():
    x, rows = random32(0, 9, CHANNELS), random32(1, 12, TAPS - 1, CHANNELS)
    truth = rows.copy()
    segments = ([0, 2, 9], [2, 9], [[0, 4, 8], [1, 5, 9]])
    y = run_convolution(x, rows, *segments)
    reference = run_convolution(x, truth, *segments, convolution=causal_convolution_reference)
    assert np.max(np.abs(y - reference)) <= 1e-5
    assert np.array_equal(rows, truth)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_the_scan_gives_the_same_bits_for_every_split(pieces):
    tokens = sum(pieces)
    arguments = scan_arguments(3, tokens)
    rows = random32(4, 4, HEADS, D_STATE, HEAD_DIM)
    split_rows = rows.copy()
    whole = run_scan(arguments, rows, [0, tokens], [3], [[0, 1]])
    outputs, start, source = [], 0, 3
    for piece in pieces:
        x, dt, a, b, c = arguments
        part = slice(start, start + piece)
        outputs.append(run_scan((x[part], dt[part], a, b[part], c[part]), split_rows, [0, piece], [source], [[0, 1]]))
        start, source = start + piece, 0
    assert np.array_equal(whole, np.concatenate(outputs))
    assert np.array_equal(rows[0], split_rows[0])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_the_delta_net_gives_the_same_bits_for_every_split(pieces):
    tokens = sum(pieces)
    arguments = delta_arguments(3, tokens)
    rows = random32(4, 4, HEADS, D_STATE, HEAD_DIM)
    split_rows = rows.copy()
    whole = run_delta(arguments, rows, [0, tokens], [3], [[0, 1]])
    outputs, start, source = [], 0, 3
    for piece in pieces:
        part = slice(start, start + piece)
        outputs.append(run_delta([argument[part] for argument in arguments], split_rows, [0, piece], [source], [[0, 1]]))
        start, source = start + piece, 0
    assert np.array_equal(whole, np.concatenate(outputs))
    assert np.array_equal(rows[0], split_rows[0])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_the_convolution_gives_the_same_bits_for_every_split(pieces):
    tokens = sum(pieces)
    x, rows = random32(3, tokens, CHANNELS), random32(4, 4, TAPS - 1, CHANNELS)
    split_rows = rows.copy()
    whole = run_convolution(x, rows, [0, tokens], [3], [[0, 1]])
    outputs, start, source = [], 0, 3
    for piece in pieces:
        outputs.append(run_convolution(x[start : start + piece], split_rows, [0, piece], [source], [[0, 1]]))
        start, source = start + piece, 0
    assert np.array_equal(whole, np.concatenate(outputs))
    assert np.array_equal(rows[0], split_rows[0])


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7])
def test_plane_p_holds_the_state_p_tokens_before_the_last_and_others_are_not_written(tokens):
    arguments, x = scan_arguments(5, tokens), random32(6, tokens, CHANNELS)
    states = np.full((4, HEADS, D_STATE, HEAD_DIM), np.nan, np.float32)
    windows = np.full((4, TAPS - 1, CHANNELS), np.nan, np.float32)
    states[0], windows[0] = 0, 0
    run_scan(arguments, states, [0, tokens], [0], [[0, 1, 2, 3]])
    run_convolution(x, windows, [0, tokens], [0], [[plane if plane < tokens else -1 for plane in range(4)]])
    for plane in range(4):
        if plane >= tokens:
            assert np.isnan(states[plane]).all()
            assert np.isnan(windows[plane]).all()
            continue
        shorter = tokens - plane
        state, window = np.zeros((1, *states.shape[1:]), np.float32), np.zeros((1, *windows.shape[1:]), np.float32)
        a, b, c, d, e = arguments
        run_scan((a[:shorter], b[:shorter], c, d[:shorter], e[:shorter]), state, [0, shorter], [0], [[0]])
        run_convolution(x[:shorter], window, [0, shorter], [0], [[0]])
        assert np.array_equal(states[plane], state[0])
        assert np.array_equal(windows[plane], window[0])


@pytest.mark.parametrize("convolution", [causal_convolution, causal_convolution_reference])
def test_a_plane_from_before_the_batch_receives_the_window_that_was_read(convolution):
    windows = random32(7, 4, TAPS - 1, CHANNELS)
    before = windows[0].copy()
    run_convolution(random32(6, 2, CHANNELS), windows, [0, 2], [0], [[0, 1, 2, 3]], convolution)
    assert np.array_equal(windows[2], before)
    assert np.array_equal(windows[3], before)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7])
def test_plane_p_of_a_delta_net_holds_the_state_p_tokens_before_the_last(tokens):
    arguments = delta_arguments(5, tokens)
    states = np.full((4, HEADS, D_STATE, HEAD_DIM), np.nan, np.float32)
    states[0] = 0
    run_delta(arguments, states, [0, tokens], [0], [[0, 1, 2, 3]])
    for plane in range(min(tokens, 4)):
        state = np.zeros((1, *states.shape[1:]), np.float32)
        run_delta([argument[: tokens - plane] for argument in arguments], state, [0, tokens - plane], [0], [[0]])
        assert np.array_equal(states[plane], state[0])
    assert np.isnan(states[tokens:]).all()


def test_a_delta_net_may_read_from_one_of_its_own_planes():
    arguments, states = delta_arguments(5, 4), random32(0, 4, HEADS, D_STATE, HEAD_DIM)
    apart = np.concatenate([states, states])
    y = run_delta(arguments, states, [0, 4], [2], [[0, 1, 2, 3]])
    assert np.array_equal(y, run_delta(arguments, apart, [0, 4], [6], [[0, 1, 2, 3]]))
    assert np.array_equal(states, apart[:4])


def test_rotation_leaves_the_channels_beyond_the_table_as_they_are():
    x = random32(0, 2, 3, 10)
    cosine, sine = np.empty((2, 2), np.float32), np.empty((2, 2), np.float32)
    rotary_table(np.array([3, 9]), 2, 10000.0, cosine, sine)
    whole, part = x.copy(), x[:, :, :4].copy()
    rotate(whole, cosine, sine)
    rotate(part, cosine, sine)
    assert np.array_equal(whole[:, :, :4], part)
    assert np.array_equal(whole[:, :, 4:], x[:, :, 4:])


def test_a_segment_may_read_from_one_of_its_own_planes():
    # A rollback that is carried out: the source, plane 2, is overwritten by the new snapshots.
    arguments, x = scan_arguments(5, 4), random32(6, 4, CHANNELS)
    states, windows = random32(0, 4, HEADS, D_STATE, HEAD_DIM), random32(1, 4, TAPS - 1, CHANNELS)
    apart_states, apart_windows = np.concatenate([states, states]), np.concatenate([windows, windows])
    y = run_scan(arguments, states, [0, 4], [2], [[0, 1, 2, 3]])
    assert np.array_equal(y, run_scan(arguments, apart_states, [0, 4], [6], [[0, 1, 2, 3]]))
    assert np.array_equal(states, apart_states[:4])
    z = run_convolution(x, windows, [0, 4], [2], [[0, 1, 2, 3]])
    assert np.array_equal(z, run_convolution(x, apart_windows, [0, 4], [6], [[0, 1, 2, 3]]))
    assert np.array_equal(windows, apart_windows[:4])


def attention_truth(query, keys, values):
    heads, head_dim = query.shape
    sharers = heads // keys.shape[1]
    y = np.empty((heads, head_dim))
    for head in range(heads):
        scores = keys[:, head // sharers].astype(np.float64) @ query[head] / np.sqrt(head_dim)
        weights = np.exp(scores - scores.max())
        y[head] = weights / weights.sum() @ values[:, head // sharers]
    return y


def test_attention_agrees_with_float64_and_reads_only_its_cells():
    keys, values = np.full((20, 2, 8), np.nan, np.float32), np.full((20, 2, 8), np.nan, np.float32)
    cells = np.array([17, 3, 4, 11, 0], np.int64)
    write_cells(random32(0, 5, 2, 8), cells, keys)
    write_cells(random32(1, 5, 2, 8), cells, values)
    query, y = 3 * random32(2, 4, 8), np.full((4, 8), np.nan, np.float32)
    attend(query, keys, values, cells.astype(np.int32), y)
    assert np.max(np.abs(y - attention_truth(query, keys[cells], values[cells]))) <= 1e-5


def test_attention_gives_the_same_bits_wherever_the_cells_lie():
    keys, values, query = random32(0, 30, 1, 8), random32(1, 30, 1, 8), random32(2, 2, 8)
    order = np.random.default_rng(3).permutation(30)
    moved_keys, moved_values = np.empty_like(keys), np.empty_like(values)
    moved_keys[order], moved_values[order] = keys, values
    here, there = np.empty((2, 8), np.float32), np.empty((2, 8), np.float32)
    attend(query, keys, values, np.arange(30, dtype=np.int32), here)
    attend(query, moved_keys, moved_values, order.astype(np.int32), there)
    assert np.array_equal(here, there)


def test_attention_does_not_hide_a_cell_that_holds_nan():
    keys, values = random32(0, 3, 1, 4), random32(1, 3, 1, 4)
    keys[1] = np.nan
    y = np.zeros((1, 4), np.float32)
    attend(random32(2, 1, 4), keys, values, np.arange(3, dtype=np.int32), y)
    assert np.isnan(y).all()


def test_compiled_code_is_discarded_when_a_source_changes_and_only_then(tmp_path):
    folder = tmp_path / "kernels"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "one.py").write_text("@kernel\ndef f(x): return 1\n")
    index, code = folder / "__pycache__" / "one.nbi", folder / "__pycache__" / "one.1.nbc"
    discard_stale_code((folder,))
    index.write_bytes(b"compiled")
    code.write_bytes(b"compiled")
    (folder / "other.py").write_text("without kernels\n")
    assert not discard_stale_code((folder,))
    assert index.exists()
    (folder / "one.py").write_text("@kernel\ndef f(x): return 2\n")
    assert discard_stale_code((folder,))
    assert not index.exists()
    assert not code.exists()  # another process may read an index that is new and code that is old
    facts = tmp_path / "facts.py"
    facts.write_text("NORM_EPSILON = 1e-5\nother = 1\n")
    assert discard_stale_code((folder,), (facts,))
    facts.write_text("NORM_EPSILON = 1e-5\nother = 2\n")
    assert not discard_stale_code((folder,), (facts,))
    facts.write_text("NORM_EPSILON = 1e-6\nother = 2\n")
    assert discard_stale_code((folder,), (facts,))


def test_a_squared_relu_drops_what_is_negative_and_keeps_nan():
    x = np.array([[-2.0, -0.0, 0.5], [3.0, np.nan, -np.inf]], np.float32)
    squared_relu(x)
    assert np.array_equal(x, np.array([[0, 0, 0.25], [9, np.nan, 0]], np.float32), equal_nan=True)


def test_a_mixture_of_experts_agrees_with_the_oracles():
    generator = np.random.default_rng(5)
    x = generator.standard_normal((7, 12)).astype(np.float32)
    gate, up, down = (generator.standard_normal((3, *shape)).astype(np.float32) / 4 for shape in ((9, 12), (9, 12), (12, 9)))
    shares, y = generator.standard_normal((7, 3)).astype(np.float32), np.full((7, 12), np.nan, np.float32)
    softmax_shares(shares)
    expert_mixture(x, shares, *(np.ascontiguousarray(matrix.transpose(0, 2, 1)) for matrix in (gate, up, down)), y)
    whole = (torch.from_numpy(part.astype(np.float64)) for part in (x, shares, gate, up, down))
    assert np.abs(y - blocks.expert_mixture(*whole).numpy()).max() <= 1e-5


def test_shares_of_experts_add_up_to_one_or_to_their_scale():
    scores = np.random.default_rng(6).standard_normal((5, 4)).astype(np.float32)
    soft, scaled = scores.copy(), scores.copy()
    softmax_shares(soft)
    sigmoid_shares(scaled, np.float32(1.5))
    exact = np.exp(scores.astype(np.float64))
    assert np.abs(soft - exact / exact.sum(-1, keepdims=True)).max() <= 1e-6
    logistic = exact / (1 + exact)
    assert np.abs(scaled - 1.5 * logistic / logistic.sum(-1, keepdims=True)).max() <= 1e-6
