"""The kernel of Kimi Delta Attention: it agrees with plain NumPy and with the oracle, and keeps the laws of every scan with snapshots."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from statedrift.impl.kernels.dense import to_length
from statedrift.impl.kernels.gated_delta_net import gated_delta_net
from statedrift.impl.kernels.kimi_delta_attention import kimi_delta_attention, kimi_delta_attention_reference
from statedrift.impl.memory import aligned, allocate
from statedrift.oracle.delta_rule import gated_delta_rule, levels_of
from statedrift.oracle.forest import plan

HEADS, HEAD_DIM, D_STATE = 3, 6, 7


def random32(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def arguments_of(seed, tokens, head_dim=HEAD_DIM, d_state=D_STATE):
    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    generator = np.random.default_rng(seed + 4)
    return (
        unit(random32(seed, tokens, HEADS, d_state)),
        unit(random32(seed + 1, tokens, HEADS, d_state)),
        random32(seed + 2, tokens, HEADS, head_dim),
        generator.uniform(0.2, 1, (tokens, HEADS, d_state)).astype(np.float32),
        generator.random((tokens, HEADS), np.float32),
    )


def run(arguments, rows, segment_start, source_row, plane_row, kernel=kimi_delta_attention):
    y = np.full_like(arguments[2], np.nan)
    kernel(*arguments, rows, np.array(segment_start), np.array(source_row), np.array(plane_row), y)
    return y


@pytest.mark.parametrize("head_dim", [HEAD_DIM, 16, 70, 83])
def test_it_agrees_with_its_reference(head_dim):
    arguments, rows = arguments_of(0, 11, head_dim), random32(7, 12, HEADS, D_STATE, head_dim)
    truth, segments = rows.astype(np.float64), ([0, 7, 11], [2, 9], [[0, 4, 8], [1, 5, 9]])
    y = run(arguments, rows, *segments)
    reference = run([argument.astype(np.float64) for argument in arguments], truth, *segments, kernel=kimi_delta_attention_reference)
    assert np.max(np.abs(y - reference)) <= 1e-5
    assert np.max(np.abs(rows - truth)) <= 1e-5


def test_it_agrees_with_the_oracles_recurrence():
    arguments, rows = arguments_of(1, 9), np.zeros((1, HEADS, D_STATE, HEAD_DIM), np.float32)
    y = run(arguments, rows, [0, 9], [0], [[0]])
    (forest,) = plan([tuple(range(9))], 2, 64, 4096)
    exact = [torch.from_numpy(argument.astype(np.float64)) for argument in arguments]
    outputs, states = gated_delta_rule(*exact, levels_of(forest), torch.tensor([8]))
    assert np.max(np.abs(y - outputs.numpy())) <= 1e-5
    assert np.max(np.abs(rows[0] - states[0].transpose(1, 2).numpy())) <= 1e-5


def test_with_one_decay_for_all_channels_it_is_the_gated_delta_rule():
    query, key, value, decay, beta = arguments_of(2, 5)
    decay[:] = decay[:, :, :1]
    rows = random32(3, 1, HEADS, D_STATE, HEAD_DIM)
    same = rows.copy()
    y = run((query, key, value, decay, beta), rows, [0, 5], [0], [[0]])
    gated = run((query, key, value, np.log(decay[:, :, 0]), beta), same, [0, 5], [0], [[0]], kernel=gated_delta_net)
    assert np.max(np.abs(y - gated)) <= 1e-5
    assert np.max(np.abs(rows - same)) <= 1e-5


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_it_gives_the_same_bits_for_every_split(pieces):
    tokens = sum(pieces)
    arguments, rows = arguments_of(3, tokens), random32(4, 4, HEADS, D_STATE, HEAD_DIM)
    split_rows = rows.copy()
    whole = run(arguments, rows, [0, tokens], [3], [[0, 1]])
    outputs, start, source = [], 0, 3
    for piece in pieces:
        outputs.append(run([argument[start : start + piece] for argument in arguments], split_rows, [0, piece], [source], [[0, 1]]))
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
    # A rollback that is carried out: the source, plane 2, is overwritten by the new snapshots.
    arguments, states = arguments_of(5, 4), random32(0, 4, HEADS, D_STATE, HEAD_DIM)
    apart = np.concatenate([states, states])
    y = run(arguments, states, [0, 4], [2], [[0, 1, 2, 3]])
    assert np.array_equal(y, run(arguments, apart, [0, 4], [6], [[0, 1, 2, 3]]))
    assert np.array_equal(states, apart[:4])


def test_large_rows_are_streamed_and_hold_the_same_bits():
    head_dim, d_state = 64, 400  # a row of 300 KiB
    arguments = arguments_of(6, 1, head_dim, d_state)
    rows = allocate((2, HEADS, d_state, head_dim))
    rows[:] = random32(8, *rows.shape)
    in_place = aligned(rows)
    streamed = run(arguments, rows, [0, 1], [1], [[0]])
    same = run(arguments, in_place, [0, 1], [1], [[1]])
    assert np.array_equal(streamed, same)
    assert np.array_equal(rows[0], in_place[1])


def test_rows_get_the_length_that_is_asked_for():
    x = random32(9, 5, 7)
    exact = x.astype(np.float64)
    to_length(x, np.float32(3), np.float32(1e-6))
    assert np.max(np.abs(x - 3 * exact / np.sqrt((exact**2).sum(-1, keepdims=True) + 1e-6))) <= 1e-6
