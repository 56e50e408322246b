"""Kernels of n-gram embeddings, of attention to selected tokens, and of residual streams, against plain NumPy in float64; the laws of
test_kernels.py hold for them too."""

import numpy as np
import pytest
import torch
from statedrift.impl.hyper_connections import MixerWeights, mix_streams
from statedrift.impl.kernels.attention import Sight
from statedrift.impl.kernels.ngram import embed_ngrams
from statedrift.impl.kernels.streams import inject
from statedrift.impl.kernels.token_selection import selected_sight
from statedrift.impl.memory import aligned
from statedrift.oracle import qwen4exp as oracle
from statedrift.oracle.blocks import rotated

SIZE, HEADS, HALF, THETA, EPSILON, CELLS = 12, 5, 3, 10000.0, np.float32(1e-6), 64
END, N_VOCAB = 0, 20
MULTIPLIERS, SIZES = np.array([7, 1 << 40, 3], np.int64), np.array([11, 13, 17, 19], np.int64)
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)[:-1]])


def random32(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sight_of(cells_of, counts):
    """Sequences whose cells are given, each with so many new tokens at its end, one after the other."""
    listed = np.concatenate(cells_of).astype(np.int32)
    starts = np.cumsum([0, *map(len, cells_of)])
    cell, first, length = [], [], []
    for start, cells, count in zip(starts[:-1], cells_of, counts, strict=True):
        for seen in range(len(cells) - count + 1, len(cells) + 1):
            cell.append(cells[seen - 1])
            first.append(start)
            length.append(seen)
    arrays = (np.array(array, np.int64) for array in (cell, first, length))
    return Sight(*arrays, listed, np.empty((0, 2), np.int64))


# --- n-grams -----------------------------------------------------------------------------------------------------------------


def embedded(log, count, cells=None):
    """What the newest `count` tokens of a log get."""
    cells = np.arange(len(log)) if cells is None else cells
    held = np.full(CELLS, np.nan, np.float32)
    held[cells] = log
    y = np.full((count, 4 * 2), np.nan, np.float32)
    table = random32(1, int(SIZES.sum()), 2)
    embed_ngrams(held, sight_of([cells], [count]), 0, MULTIPLIERS, SIZES, OFFSETS, END, N_VOCAB, table, y)
    return y


def embedded_as_written(log):
    """The same of the last token, in whole numbers of any size: the newest tokens, `END` for those behind an end, hashed one length at a time."""
    newest = [log[-1]]
    for back in (1, 2):
        is_hidden = back >= len(log) or (newest[-1] == END and back > 1)
        newest.append(END if is_hidden else log[-1 - back])
    table, rows = random32(1, int(SIZES.sum()), 2), []
    for length in (2, 3):
        joined = 0
        for token, multiplier in zip(newest[:length], MULTIPLIERS.tolist(), strict=False):
            joined ^= token * multiplier
        for hashed in (0, 1) if length == 2 else (2, 3):
            rows.append(table[joined % int(SIZES[hashed]) + int(OFFSETS[hashed])])
    return np.concatenate(rows)


@pytest.mark.parametrize("log", [[5], [0], [5, 6], [0, 6], [5, 0], [5, 6, 7], [5, 0, 7], [0, 6, 7], [5, 6, 0], [9, 5, 6, 7]])
def test_ngrams_are_hashed_as_written(log):
    assert np.array_equal(embedded(log, 1)[0], embedded_as_written(log))


def test_ngrams_are_the_same_for_every_split_and_wherever_the_cells_lie():
    log = [3, 4, 0, 5, 6, 7, 0, 0, 8]
    whole = embedded(log, 9)
    for count in (1, 4):
        assert np.array_equal(embedded(log, count), whole[-count:])
    assert np.array_equal(embedded(log, 9, np.random.default_rng(0).permutation(CELLS)[:9]), whole)


def test_a_cell_without_a_token_shows():
    y = embedded([3, np.nan, 5, 6, 7], 5)
    assert np.isnan(y).any(axis=1).tolist() == [False, True, True, True, False]


# --- selection ---------------------------------------------------------------------------------------------------------------


def selected(query, raw, cells_of, counts, segment_start, block_size, block_count):
    sight = sight_of(cells_of, counts)
    norm = random32(3, 1, SIZE)
    own = selected_sight(query, raw, sight, np.array(segment_start), block_size, block_count, norm, EPSILON, THETA, HALF)
    return [own.listed[start : start + count].tolist() for start, count in zip(own.first, own.length, strict=True)]


def selected_as_written(query, raw, cells, block_size, block_count):
    """What one token sees, in float64."""
    blocks = len(cells) // block_size
    means = np.array([raw[cells[block * block_size : (block + 1) * block_size]].mean(0) for block in range(blocks)]).reshape(blocks, SIZE)
    normed = means / np.sqrt((means**2).mean(-1, keepdims=True) + 1e-6) * random32(3, 1, SIZE)
    turned = rotated(torch.from_numpy(normed[:, None, : 2 * HALF]), torch.arange(blocks) * block_size, THETA).numpy()[:, 0]
    keys = np.concatenate([turned, normed[:, 2 * HALF :]], axis=1)
    scores = np.maximum(query.astype(np.float64) @ keys.T, 0).sum(0)
    best = sorted(np.argsort(-scores, kind="stable")[:block_count].tolist())
    whole = [cells[block * block_size + i] for block in best for i in range(block_size)]
    return [*whole, *cells[blocks * block_size :]]


@pytest.mark.parametrize(("block_size", "block_count"), [(1, 4), (1, 100), (3, 2), (4, 1), (8, 3)])
def test_a_token_sees_the_best_blocks_and_what_makes_no_whole_block(block_size, block_count):
    raw = random32(4, CELLS, SIZE + 1).astype(np.float32)
    cells = np.random.default_rng(5).permutation(CELLS)[:29]
    query = random32(6, 29, HEADS, SIZE)
    seen = selected(query, raw, [cells], [29], [0, 29], block_size, block_count)
    exact = raw[:, :SIZE].astype(np.float64)
    for token in range(29):
        assert seen[token] == selected_as_written(query[token], exact, cells[: token + 1], block_size, block_count)


def test_the_selection_is_the_same_for_every_split_and_wherever_the_cells_lie():
    raw, query = random32(4, CELLS, SIZE), random32(6, 20, HEADS, SIZE)
    cells = np.arange(20)
    whole = selected(query, raw, [cells], [20], [0, 20], 3, 2)
    for count in (1, 7):
        assert selected(query[-count:], raw, [cells], [count], [0, count], 3, 2) == whole[-count:]
    assert selected(query, raw, [cells[:8], cells[:12]], [8, 12], [0, 8, 20], 3, 2)[:8] == whole[:8]
    moved = np.random.default_rng(7).permutation(CELLS)
    elsewhere = np.full_like(raw, np.nan)
    elsewhere[moved[:20]] = raw[:20]
    assert selected(query, elsewhere, [moved[:20]], [20], [0, 20], 3, 2) == [moved[seen].tolist() for seen in whole]


def test_of_blocks_that_score_the_same_the_older_are_taken():
    raw, query = np.zeros((CELLS, SIZE), np.float32), random32(6, 1, HEADS, SIZE)
    assert selected(query, raw, [np.arange(9)], [1], [0, 1], 2, 2) == [[0, 1, 2, 3, 8]]


def test_a_key_that_is_not_a_number_is_taken_and_others_are_not_spoiled():
    raw, query = random32(4, CELLS, SIZE), random32(6, 1, HEADS, SIZE)
    right = selected(query, raw, [np.arange(20)], [1], [0, 1], 1, 4)[0]
    left_out = next(cell for cell in range(20) if cell not in right)
    raw[left_out] = np.nan
    seen = selected(query, raw, [np.arange(20)], [1], [0, 1], 1, 4)[0]
    assert left_out in seen
    assert len(set(seen) & set(right)) == 3


# --- residual streams --------------------------------------------------------------------------------------------------------


def test_streams_are_mixed_and_injected_as_the_oracle_does():
    count, n_embd, rank = 3, 8, 4
    dimensions = {"hyper_connections": count, "n_embd": n_embd}
    weights = {
        "mix_norm": random32(1, count * n_embd),
        "mix_down": random32(2, count * n_embd, rank),
        "mix_up": random32(3, rank, count * n_embd),
    }
    weights["inject"] = random32(4, count * n_embd, count)
    streams = random32(5, 6, count * n_embd)
    mixer = MixerWeights(
        aligned(weights["mix_norm"].reshape(1, count, n_embd)), *(aligned(weights[name][None]) for name in ("mix_down", "mix_up", "inject"))
    )
    normed, shares, y = np.empty_like(streams), np.empty((6, count), np.float32), np.empty((6, n_embd), np.float32)
    mix_streams(mixer, 0, streams, EPSILON, normed, shares, y)
    exact = {name: torch.from_numpy(weight.astype(np.float64)) for name, weight in weights.items()}
    before = torch.from_numpy(streams.astype(np.float64))
    mixed, true_shares = oracle._mixed(dimensions, exact, "", before)
    assert np.abs(y - mixed.numpy()).max() <= 1e-5
    assert np.abs(shares - true_shares.numpy()).max() <= 1e-5
    inject(y, shares, streams)
    assert np.abs(streams - oracle._injected(before, mixed, true_shares).numpy()).max() <= 1e-5
