"""The attention cache: which cells a sequence has, what a share copies, and what does not fit."""

import numpy as np
import pytest
from statedrift.impl.attention_cache import AttentionCache, attention_bytes
from statedrift.impl.batches import split


def cache_of(unified, n_seq_max=3, n_ctx=8):
    return AttentionCache((False, True), 0, 1, 2, n_seq_max, n_ctx, unified, poison=True, index_width=3)


def batch_of(cache, counts):
    sequences = np.concatenate([np.full(count, sequence) for sequence, count in counts.items()])
    positions = np.concatenate([cache.length[sequence] + np.arange(count) for sequence, count in counts.items()])
    return split(np.zeros(len(sequences), np.int64), positions, sequences, np.ones(len(sequences), bool), cache.length - 1, 8, 64, 1)[2]


def append(cache, counts):
    """Append tokens whose keys tell sequence and position apart; the reason when they do not fit."""
    batch = batch_of(cache, counts)
    reason = cache.prepare(batch)
    if reason is None:
        cache.apply(batch)
        for sequence, count in counts.items():
            for position in range(cache.length[sequence] - count, cache.length[sequence]):
                cell = cache.cell_of[sequence, position]
                for keys, values in zip(cache.keys, cache.values, strict=True):
                    keys[:, cell], values[:, cell] = 100 * sequence + position, -100 * sequence - position
                cache.index_rows[:, cell] = 100 * sequence + position
    return reason


def held(cache, sequence):
    keys, values, index = cache.read(sequence)
    assert np.array_equal(keys, -values)
    assert np.array_equal(keys[:, :, 0, :1], index[:, :, :1])
    return keys[0, :, 0, 0].tolist()


BOTH = pytest.mark.parametrize("unified", [False, True])


@BOTH
def test_a_sequence_reads_back_its_own_tokens_in_order(unified):
    cache = cache_of(unified)
    append(cache, {0: 3, 1: 2})
    append(cache, {1: 1, 0: 2})
    assert held(cache, 0) == [0, 1, 2, 3, 4]
    assert held(cache, 1) == [100, 101, 102]


@BOTH
def test_a_share_is_independent_of_what_either_does_next(unified):
    cache = cache_of(unified)
    append(cache, {0: 4})
    append(cache, {1: 6})
    cache.share(0, 1)
    cache.remove_tail(0, 2)
    append(cache, {1: 1})
    append(cache, {0: 1})
    assert held(cache, 0) == [0, 1, 2]
    assert held(cache, 1) == [0, 1, 2, 3, 104]


def test_a_unified_share_takes_no_cells_and_a_cell_is_free_after_its_last_sharer():
    cache = cache_of(True)
    append(cache, {0: 4})
    free = cache.free_count
    cache.share(0, 1)
    assert cache.free_count == free
    cache.drop(0)
    assert cache.free_count == free
    cache.drop(1)
    assert cache.free_count == 24


def test_a_sequence_of_its_own_is_limited_to_n_ctx():
    cache = cache_of(False)
    assert append(cache, {0: 8}) is None
    assert "sequence 0" in append(cache, {1: 1, 0: 1})
    assert cache.length.tolist() == [8, 0, 0]


def test_the_pool_counts_a_shared_token_once():
    cache = cache_of(True)
    assert append(cache, {0: 20}) is None
    cache.share(0, 1)
    assert append(cache, {0: 3, 1: 2}) is not None
    assert append(cache, {0: 2, 1: 2}) is None
    assert cache.free_count == 0
    assert append(cache, {2: 1}) is not None


def test_a_restore_may_use_what_only_its_own_sequence_holds():
    cache = cache_of(True)
    append(cache, {0: 10})
    append(cache, {1: 14})
    assert cache.refuses(0, 10) is None
    assert cache.refuses(0, 11) is not None
    cache.share(0, 2)
    assert cache.refuses(0, 1) is not None


@BOTH
def test_what_is_written_is_read_back_and_replaces_what_was_there(unified):
    cache = cache_of(unified)
    append(cache, {0: 5, 1: 3})
    cache.share(0, 2)
    cache.write(0, *cache.read(1))
    assert held(cache, 0) == [100, 101, 102]
    assert held(cache, 2) == [0, 1, 2, 3, 4]


@BOTH
def test_a_follower_is_given_the_newest_tokens_of_its_leader_and_keeps_its_own_older_ones(unified):
    cache = cache_of(unified)
    append(cache, {0: 2, 1: 2})
    append(cache, {0: 3})
    cache.follow(0, 1, 3)
    assert held(cache, 1) == [100, 101, 2, 3, 4]
    append(cache, {0: 1, 1: 1})
    cache.drop(0)
    assert held(cache, 1) == [100, 101, 2, 3, 4, 105]
    cache.drop(1)
    assert getattr(cache, "free_count", 24) == 24


@BOTH
def test_all_sequences_are_read_once_where_they_share_and_written_back(unified):
    cache = cache_of(unified)
    append(cache, {0: 4, 2: 3})
    cache.share(0, 1)
    append(cache, {1: 2})
    cells, keys, values, index = cache.read_all()
    assert [own.tolist() for own in cells] == (
        [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [6, 7, 8]] if unified else [[*range(4)], [*range(4, 10)], [*range(10, 13)]]
    )
    assert keys.shape[1] == (9 if unified else 13)
    other = cache_of(unified)
    append(other, {1: 1})
    other.drop(1)
    assert other.refuses_all(cells) is None
    other.write_all(cells, keys, values, index)
    assert [held(other, sequence) for sequence in range(3)] == [[0, 1, 2, 3], [0, 1, 2, 3, 104, 105], [200, 201, 202]]
    if unified:
        assert other.free_count == 24 - 9
        assert sorted(other.reference_count.tolist()) == [0] * 15 + [1] * 5 + [2] * 4


def test_what_all_sequences_hold_is_refused_where_it_does_not_fit():
    cells = (np.arange(5), np.arange(5), np.zeros(0, np.int64))
    assert cache_of(False, n_ctx=4).refuses_all(cells) is not None
    assert cache_of(True, n_ctx=4).refuses_all(cells) is None
    assert cache_of(True, n_ctx=1).refuses_all(cells) is not None


@BOTH
def test_several_sequences_need_room_for_each_token_once_in_a_pool_and_each_on_its_own_otherwise(unified):
    cache = cache_of(unified)
    append(cache, {0: 7, 1: 6})
    assert cache.refuses_tokens({0: 1, 1: 2}, 2) is None
    assert (cache.refuses_tokens({0: 2, 1: 2}, 2) is None) == unified
    assert (cache.refuses_tokens({0: 1, 1: 1}, 12) is None) == (not unified)


def test_the_announced_bytes_are_those_of_the_arrays():
    for unified in (False, True):
        cache = cache_of(unified)
        arrays = [*cache.keys, *cache.values, cache.index_rows, cache.cell_of] + (
            [cache.reference_count, cache.free_cells] if unified else []
        )
        total = sum(array.nbytes for array in arrays)
        assert total <= attention_bytes(2, 1, 2, 3, 8, unified, index_width=3) <= total + 12 * 24
