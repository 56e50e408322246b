"""The kernels of RWKV against plain NumPy in float64, and the laws every kernel keeps: any split of tokens gives the same bits, snapshots hold
what their number says, and memory that nothing wrote is never read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statedrift.impl.kernels.arithmetic import hyperbolic_tangent
from statedrift.impl.kernels.dense import layer_norm, linear, write_wanted_layer_norm_rows
from statedrift.impl.kernels.rwkv6_wkv import rwkv6_wkv, rwkv6_wkv_reference
from statedrift.impl.kernels.rwkv7_wkv import rwkv7_wkv, rwkv7_wkv_reference
from statedrift.impl.kernels.token_shift import blend, token_shift, token_shift_reference

HEADS, SIZE = 3, 20


def random32(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def decays(seed, *shape):
    return np.random.default_rng(seed).uniform(0.3, 1.0, shape).astype(np.float32)


def arguments6(seed, tokens, size=SIZE):
    shape = (tokens, HEADS, size)
    return (*(random32(seed + i, *shape) for i in range(3)), decays(seed + 3, *shape))


def run6(arguments, rows, segment_start, source_row, plane_row, wkv=rwkv6_wkv):
    y = np.full_like(arguments[2], np.nan)
    first = random32(99, HEADS, y.shape[2]).astype(y.dtype)
    wkv(*arguments, first, rows, np.array(segment_start), np.array(source_row), np.array(plane_row), y)
    return y


def arguments7(seed, tokens, size=SIZE):
    shape = (tokens, HEADS, size)
    removal = random32(seed + 4, *shape)
    removal /= np.linalg.norm(removal, axis=-1, keepdims=True)
    rate = np.random.default_rng(seed + 5).random(shape, np.float32)
    return (*(random32(seed + i, *shape) for i in range(3)), decays(seed + 3, *shape), removal, rate)


def run7(arguments, rows, segment_start, source_row, plane_row, wkv=rwkv7_wkv):
    y = np.full_like(arguments[2], np.nan)
    wkv(*arguments, rows, np.array(segment_start), np.array(source_row), np.array(plane_row), y)
    return y


def arguments_of_shift(seed, tokens, size=SIZE):
    return (random32(seed, tokens, HEADS, size),)


def run_shift(arguments, rows, segment_start, source_row, plane_row, shift=token_shift):
    """Both mixers, one after the other, in what `written_by` says of rows of a state's shape."""
    x = arguments[0].reshape(len(arguments[0]), -1)
    before = np.full((2, *x.shape), np.nan, x.dtype)
    parts = written_by(run_shift, rows).reshape(len(rows), 2, -1)
    for mixer in (0, 1):
        shift(x + mixer, mixer, parts, np.array(segment_start), np.array(source_row), np.array(plane_row), before[mixer])
    return before.swapaxes(0, 1)


def written_by(run, rows):
    """The part of rows [n_rows, heads, size, size] that a kernel reads and writes: a token shift has only two inputs in a row."""
    flat = rows.reshape(len(rows), -1)
    return flat[:, : 2 * HEADS * rows.shape[-1]] if run is run_shift else flat


KERNELS = [
    (run6, arguments6, rwkv6_wkv_reference),
    (run7, arguments7, rwkv7_wkv_reference),
    (run_shift, arguments_of_shift, token_shift_reference),
]
NAMES = ["rwkv6_wkv", "rwkv7_wkv", "token_shift"]
every_kernel = pytest.mark.parametrize(("run", "arguments_of", "reference"), KERNELS, ids=NAMES)


@pytest.mark.parametrize("size", [2, 7, 16, 20, 64, 83])
@every_kernel
def test_a_kernel_agrees_with_its_reference(run, arguments_of, reference, size):
    arguments = arguments_of(0, 11, size)
    rows = random32(7, 12, HEADS, size, size)
    truth = rows.astype(np.float64)
    segments = ([0, 7, 11], [2, 9], [[0, 4, 8], [1, 5, 9]])
    y = run(arguments, rows, *segments)
    expected = run([argument.astype(np.float64) for argument in arguments], truth, *segments, reference)
    assert np.max(np.abs(y - expected)) <= 1e-5 * size
    assert np.max(np.abs(rows - truth)) <= 1e-4


@every_kernel
@given(pieces=st.lists(st.integers(1, 5), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_a_kernel_gives_the_same_bits_for_every_split(run, arguments_of, reference, pieces):
    tokens = sum(pieces)
    arguments = arguments_of(3, tokens)
    rows = random32(4, 4, HEADS, SIZE, SIZE)
    split_rows = rows.copy()
    whole = run(arguments, rows, [0, tokens], [3], [[0, 1]])
    outputs, start, source = [], 0, 3
    for piece in pieces:
        part = slice(start, start + piece)
        outputs.append(run([argument[part] for argument in arguments], split_rows, [0, piece], [source], [[0, 1]]))
        start, source = start + piece, 0
    assert np.array_equal(whole, np.concatenate(outputs))
    assert np.array_equal(rows[0], split_rows[0])


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7])
@every_kernel
def test_plane_p_holds_the_state_p_tokens_before_the_last_and_others_are_not_written(run, arguments_of, reference, tokens):
    arguments = arguments_of(5, tokens)
    begin = random32(6, HEADS, SIZE, SIZE)
    rows = np.full((6, HEADS, SIZE, SIZE), np.nan, np.float32)
    rows[3] = begin
    run(arguments, rows, [0, tokens], [3], [[0, 1, 2]])
    for plane in range(min(3, tokens)):
        shorter = np.full_like(rows, np.nan)
        shorter[3] = begin
        count = tokens - plane
        run([argument[:count] for argument in arguments], shorter, [0, count], [3], [[0]])
        assert np.array_equal(written_by(run, rows)[plane], written_by(run, shorter)[0])
    if run is run_shift:  # planes from before the batch receive what was read; more about them below
        assert np.array_equal(written_by(run, rows)[tokens:3], np.repeat(written_by(run, begin[None]), max(0, 3 - tokens), axis=0))
    else:
        assert np.isnan(rows[tokens:3]).all()
    assert np.array_equal(rows[3], begin)
    assert np.isnan(rows[4:]).all()


@every_kernel
def test_a_segment_may_read_from_one_of_its_own_planes(run, arguments_of, reference):
    arguments = arguments_of(8, 4)
    apart = random32(9, 4, HEADS, SIZE, SIZE)
    within = apart.copy()
    expected = run(arguments, apart, [0, 4], [3], [[0, 1, 2]])
    within[1] = within[3]
    assert np.array_equal(run(arguments, within, [0, 4], [1], [[0, 1, 2]]), expected)
    assert np.array_equal(written_by(run, within)[:3], written_by(run, apart)[:3])


@every_kernel
def test_a_later_segment_reads_what_an_earlier_one_wrote(run, arguments_of, reference):
    arguments = arguments_of(2, 3)
    rows = np.full((6, HEADS, SIZE, SIZE), np.nan, np.float32)
    rows[2] = random32(1, HEADS, SIZE, SIZE)
    whole = rows.copy()
    y = run(arguments, rows, [0, 1, 3], [2, 5], [[5, 0], [4, 3]])
    assert np.array_equal(y, run(arguments, whole, [0, 3], [2], [[4, 3]]))
    assert np.array_equal(rows[[4, 3]], whole[[4, 3]], equal_nan=True)


@pytest.mark.parametrize("shift", [token_shift, token_shift_reference])
def test_a_plane_from_before_the_batch_receives_the_input_that_was_read(shift):
    x, rows = random32(0, 1, 5), random32(1, 4, 2, 5)
    before = np.full((1, 5), np.nan, np.float32)
    own, other = rows[2, 1].copy(), rows[:, 0].copy()
    shift(x, 1, rows, np.array([0, 1]), np.array([2]), np.array([[0, 1, -1]]), before)
    assert np.array_equal(before[0], own)
    assert np.array_equal(rows[1, 1], own)
    assert np.array_equal(rows[0, 1], x[0])
    assert np.array_equal(rows[:, 0], other)


def test_a_state_gives_a_value_back_for_its_key():
    _, key, value, _, removal, rate = arguments7(1, 1)
    rows = np.zeros((1, HEADS, SIZE, SIZE), np.float32)
    y = run7((removal, removal, value, np.ones_like(key), removal, rate), rows, [0, 1], [0], [[0]])
    assert np.max(np.abs(y - value)) <= 1e-5


def test_a_blend_takes_one_share_for_all_tokens_or_one_for_each():
    x, before, share = random32(0, 4, 6), random32(1, 4, 6), random32(2, 4, 6)
    y = np.empty_like(x)
    blend(x, before, share, y)
    assert np.max(np.abs(y - (x + (before - x) * share))) <= 1e-6
    blend(x, before, share[:1], y)
    assert np.max(np.abs(y - (x + (before - x) * share[:1]))) <= 1e-6
    own = x.copy()
    blend(own, before, share[:1], own)
    assert np.array_equal(own, y)


def test_the_hyperbolic_tangent_agrees_with_float64_and_lets_nan_through():
    x = np.linspace(-30, 30, 20001).astype(np.float32)
    got = np.array([hyperbolic_tangent(value) for value in x], np.float64)
    assert np.max(np.abs(got - np.tanh(x.astype(np.float64)))) <= 2e-7
    assert hyperbolic_tangent(np.float32(0)) == 0
    assert np.isnan(hyperbolic_tangent(np.float32(np.nan)))


@pytest.mark.parametrize("channels", [1, 5, 32, 33])
def test_a_layer_norm_agrees_with_float64_and_takes_its_groups_in_turn(channels):
    x, weight, bias = random32(0, 6, channels) + 3, random32(1, 3, channels), random32(2, 3, channels)
    y = np.empty_like(x)
    layer_norm(x, weight, bias, np.float32(1e-5), y)
    centered = x.astype(np.float64) - x.astype(np.float64).mean(1, keepdims=True)
    truth = centered / np.sqrt(np.mean(centered**2, axis=1, keepdims=True) + 1e-5) * np.tile(weight, (2, 1)) + np.tile(bias, (2, 1))
    assert np.max(np.abs(y - truth)) <= 2e-5
    layer_norm(x, weight, bias, np.float32(1e-5), x)
    assert np.array_equal(x, y)


def test_only_wanted_rows_are_written_at_a_models_end():
    stream, norm, bias, output = random32(0, 3, 8), random32(1, 1, 8), random32(2, 1, 8), random32(3, 8, 5)
    normed = np.empty_like(stream)
    layer_norm(stream, norm, bias, np.float32(1e-5), normed)
    logits = np.empty((3, 5), np.float32)
    linear(normed, output, logits)
    rows = np.array([1, -1, 0])
    for hidden, truth in ((True, normed), (False, logits)):
        y = np.full((2, truth.shape[1]), np.nan, np.float32)
        write_wanted_layer_norm_rows(stream, rows, norm, bias, np.float32(1e-5), output, hidden, y)
        assert np.array_equal(y, truth[[2, 0]])
