"""The scans' promise, bit for bit: however tokens are split, channels cut into vectors, and heads dealt to threads, the same outputs and states."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numba import njit
from statedrift.impl.kernels.arithmetic import exponential
from statedrift.impl.kernels.delta_rule import delta_rule_in
from statedrift.impl.kernels.gated_delta_net import gated_delta_net, gated_delta_net_heads
from statedrift.impl.kernels.kimi_delta_attention import kimi_delta_attention, kimi_delta_attention_heads
from statedrift.impl.kernels.lightning_attention import lightning_attention, lightning_attention_heads
from statedrift.impl.kernels.mamba2_scan import mamba2_scan, mamba2_scan_heads
from statedrift.impl.kernels.outer_products import outer_products_in
from statedrift.impl.kernels.threads import scan_on_threads
from statedrift.impl.kernels.vectors import CHUNK_TOKENS, LANES, SPAN_TOKENS, zeros
from statedrift.impl.memory import aligned

HEADS, GROUPS = 4, 2
TOKENS = SPAN_TOKENS + CHUNK_TOKENS + 9
"""More than one span, more than one chunk in the last of them, and a part of a chunk."""
OTHER_LANES = 16 if LANES != 16 else 64


def random32(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mamba2_arguments(head_dim, d_state):
    return (
        random32(1, TOKENS, HEADS, head_dim),
        np.abs(random32(2, TOKENS, HEADS)) / 8,
        -np.abs(random32(3, HEADS)),
        random32(4, TOKENS, GROUPS, d_state),
        random32(5, TOKENS, GROUPS, d_state),
    )


def delta_arguments(head_dim, d_state):
    return (
        random32(1, TOKENS, GROUPS, d_state) / 4,
        random32(2, TOKENS, GROUPS, d_state) / 4,
        random32(3, TOKENS, HEADS, head_dim),
        -np.abs(random32(4, TOKENS, HEADS)),
        np.random.default_rng(5).random((TOKENS, HEADS), np.float32),
    )


def kimi_arguments(head_dim, d_state):
    query, key, value, _, beta = delta_arguments(head_dim, d_state)
    decay = np.random.default_rng(6).random((TOKENS, HEADS, d_state), np.float32)
    return np.tile(query, (1, 2, 1)), np.tile(key, (1, 2, 1)), value, decay, beta


def lightning_arguments(head_dim, d_state):
    query, key, value = random32(1, TOKENS, HEADS, d_state), random32(2, TOKENS, HEADS, d_state), random32(3, TOKENS, HEADS, head_dim)
    return query, key, value, -np.random.default_rng(4).random(HEADS, np.float32)


@njit
def mamba2_other_lanes(x, dt, a, *others):
    decay = np.empty_like(dt)
    for token in range(TOKENS):
        for head in range(HEADS):
            decay[token, head] = exponential(dt[token, head] * a[head])
    outer_products_in(zeros(OTHER_LANES), 0, HEADS, x, dt, decay, None, *others)


@njit
def lightning_other_lanes(query, key, value, loss, *others):
    outer_products_in(
        zeros(OTHER_LANES), 0, HEADS, value, np.ones((1, HEADS), np.float32), loss.reshape((1, HEADS)), True, key, query, *others
    )


@njit
def delta_other_lanes(query, key, value, log_decay, *others):
    decay = np.empty((*log_decay.shape, 1), np.float32)
    for token in range(TOKENS):
        for head in range(HEADS):
            decay[token, head, 0] = exponential(log_decay[token, head])
    delta_rule_in(zeros(OTHER_LANES), 0, HEADS, query, key, value, decay, *others)


@njit
def kimi_other_lanes(*arguments):
    delta_rule_in(zeros(OTHER_LANES), 0, HEADS, *arguments)


SCANS = {
    "mamba2_scan": (mamba2_scan, mamba2_scan_heads, mamba2_other_lanes, mamba2_arguments),
    "lightning_attention": (lightning_attention, lightning_attention_heads, lightning_other_lanes, lightning_arguments),
    "gated_delta_net": (gated_delta_net, gated_delta_net_heads, delta_other_lanes, delta_arguments),
    "kimi_delta_attention": (kimi_delta_attention, kimi_delta_attention_heads, kimi_other_lanes, kimi_arguments),
}
"""Of each: the kernel, a range of its heads, the kernel with vectors of another width, and its arguments before the rows."""
SIZES = [(84, 6), (128, 9)]
"""head_dim and d_state: every width of vectors with a channel left over, and whole vectors; d_state a multiple of nothing."""


def run(scan, arguments, rows, segment_start, source_row, plane_row):
    y = np.full((arguments[0].shape[0], HEADS, rows.shape[3]), np.nan, np.float32)
    scan(*arguments, rows, np.array(segment_start), np.array(source_row), np.array(plane_row), y)
    return y


def whole(name, head_dim, d_state, scan):
    """Outputs and rows of one segment of all tokens, from row 3 into row 0 with snapshots in rows 1 and 2."""
    rows = aligned(np.full((4, HEADS, d_state, head_dim), np.nan, np.float32))
    rows[3] = random32(6, *rows.shape[1:])
    return run(scan, SCANS[name][3](head_dim, d_state), rows, [0, TOKENS], [3], [[0, 1, 2]]), rows


@pytest.mark.parametrize(("head_dim", "d_state"), SIZES)
@pytest.mark.parametrize("name", SCANS)
def test_a_long_segment_gives_the_bits_of_its_tokens_one_by_one(name, head_dim, d_state):
    scan, arguments = SCANS[name][0], SCANS[name][3](head_dim, d_state)
    y, rows = whole(name, head_dim, d_state, scan)
    alone = rows.copy()
    for token in range(TOKENS):
        part = [one[token : token + 1] if one.shape[0] == TOKENS else one for one in arguments]
        planes = [[(token + 1) % 3]]
        assert np.array_equal(run(scan, part, alone, [0, 1], [token % 3 if token else 3], planes)[0], y[token]), token
    for plane in range(3):
        assert np.array_equal(alone[(TOKENS - plane) % 3], rows[plane])


@pytest.mark.parametrize(("head_dim", "d_state"), SIZES)
@pytest.mark.parametrize("name", SCANS)
def test_pieces_of_any_length_give_the_bits_of_the_whole(name, head_dim, d_state):
    scan, arguments = SCANS[name][0], SCANS[name][3](head_dim, d_state)
    y, rows = whole(name, head_dim, d_state, scan)
    ends = [0, 2, 2 + CHUNK_TOKENS, TOKENS - 3, TOKENS]
    pieces = aligned(np.concatenate([rows, rows[:2]]))
    assert np.array_equal(run(scan, arguments, pieces, ends, [3, 0, 0, 0], [[0, 4, 5]] * 3 + [[0, 1, 2]]), y)
    assert np.array_equal(pieces[:3], rows[:3])


@pytest.mark.parametrize(("head_dim", "d_state"), SIZES)
@pytest.mark.parametrize("name", SCANS)
def test_vectors_of_another_width_give_the_same_bits(name, head_dim, d_state):
    y, rows = whole(name, head_dim, d_state, SCANS[name][0])
    y_other, rows_other = whole(name, head_dim, d_state, SCANS[name][2])
    assert np.array_equal(y, y_other)
    assert np.array_equal(rows, rows_other)


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
@pytest.mark.parametrize("name", SCANS)
def test_any_number_of_threads_gives_the_same_bits(name, threads):
    y, rows = whole(name, *SIZES[0], SCANS[name][0])
    with ThreadPoolExecutor(threads) as pool:

        def scan(*arguments):
            scan_on_threads(pool, threads, SCANS[name][1], HEADS, *arguments)

        y_other, rows_other = whole(name, *SIZES[0], scan)
    assert np.array_equal(y, y_other)
    assert np.array_equal(rows, rows_other)
