"""Both sides of a cache together: a refusal changes neither, and an effect reaches both."""

import numpy as np
import pytest
from statedrift.impl.batches import split
from statedrift.impl.model import open_cache, prepared
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.models import Model


def cache_of(**changes):
    configuration = CacheConfiguration(**({"n_seq_max": 3, "n_rs_seq": 2, "n_ctx": 8} | changes))
    return open_cache(prepared(Model("lfm2")), configuration)[0]


def append(cache, counts):
    sequences = np.concatenate([np.full(count, sequence) for sequence, count in counts.items()])
    positions = np.concatenate([cache.last_position(sequence) + 1 + np.arange(count) for sequence, count in counts.items()])
    batch = split(
        np.zeros(len(sequences), np.int64), positions, sequences, np.ones(len(sequences), bool), cache.last_positions(), 8, 64, 3
    )[2]
    plan = cache.prepare(batch)
    if isinstance(plan, str):
        return plan
    cache.apply(batch, plan)
    return None


def observed(cache):
    cells, attention = cache.recurrent.cells, cache.attention
    names = ("tail", "position", "pending", "reference_count", "valid_planes", "free_cells")
    return [getattr(cells, name).tolist() for name in names], attention.length.tolist(), getattr(attention, "free_count", None)


def sides_agree(cache):
    return np.array_equal(cache.recurrent.cells.position, cache.attention.length - 1)


UNIFIED = pytest.mark.parametrize("unified", [0, 1])


@UNIFIED
def test_a_batch_that_the_attention_side_cannot_hold_changes_neither_side(unified):
    cache = cache_of(unified=unified)
    append(cache, {0: 5})
    before = observed(cache)
    assert append(cache, {0: 8, 1: 8, 2: 8}) is not None
    assert observed(cache) == before


@UNIFIED
@pytest.mark.parametrize(("start", "end"), [(1, 3), (0, 3), (-1, 4), (2, -1), (1, 99)])
def test_a_removal_that_the_recurrent_side_refuses_changes_neither_side(unified, start, end):
    cache = cache_of(unified=unified)
    append(cache, {0: 5})
    before = observed(cache)
    assert cache.remove(0, start, end) is not None
    assert observed(cache) == before


@UNIFIED
@pytest.mark.parametrize(
    ("start", "end", "last"), [(3, -1, 2), (4, 5, 3), (4, 99, 3), (0, -1, -1), (-1, -1, -1), (0, 5, -1), (5, -1, 4), (3, 3, 4), (4, 2, 4)]
)
def test_a_removal_that_is_accepted_reaches_both_sides(unified, start, end, last):
    cache = cache_of(unified=unified)
    append(cache, {0: 5})
    assert cache.remove(0, start, end) is None
    assert cache.last_position(0) == last
    assert sides_agree(cache)


def test_a_state_without_room_changes_neither_side():
    large = cache_of(n_ctx=20)
    append(large, {0: 9})
    cache = cache_of()
    append(cache, {0: 5})
    before = observed(cache)
    assert cache.write(0, large.read(0)) is not None
    assert observed(cache) == before


@UNIFIED
def test_a_state_that_is_written_is_the_same_on_both_sides(unified):
    cache = cache_of(unified=unified)
    append(cache, {0: 5})
    cache.remove(0, 4, -1)
    assert cache.write(2, cache.read(0)) is None
    assert cache.last_position(2) == 3
    assert sides_agree(cache)
