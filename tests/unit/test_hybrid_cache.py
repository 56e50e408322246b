"""Both sides of a cache together: a refusal changes neither, and an effect reaches both."""

import numpy as np
import pytest
from statedrift.impl.batches import split
from statedrift.impl.cells import StrictCells
from statedrift.impl.model import open_cache, prepared
from statedrift.impl.ring import RingCells
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.models import Model


def cache_of(cells_class=StrictCells, **changes):
    configuration = CacheConfiguration(**({"n_seq_max": 3, "n_rs_seq": 2, "n_ctx": 8} | changes))
    return open_cache(prepared(Model("lfm2")), configuration, cells_class)[0]


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
    names = ("tail", "position", "pending", "base", "depth", "reference_count", "valid_planes", "free_cells")
    arrays = [getattr(cells, name).tolist() for name in names if hasattr(cells, name)]
    return arrays, cache.positions(), attention.length.tolist(), getattr(attention, "free_count", None)


def sides_agree(cache):
    """Without a shift, positions are indices."""
    return np.array_equal(cache.recurrent.cells.position, cache.attention.length - 1) and np.array_equal(
        cache.last_positions(), cache.attention.length - 1
    )


CELLS = pytest.mark.parametrize("cells_class", [StrictCells, RingCells])
UNIFIED = pytest.mark.parametrize("unified", [0, 1])


@CELLS
@UNIFIED
def test_a_batch_that_the_attention_side_cannot_hold_changes_neither_side(cells_class, unified):
    cache = cache_of(cells_class, unified=unified)
    append(cache, {0: 5})
    before = observed(cache)
    assert append(cache, {0: 8, 1: 8, 2: 8}) is not None
    assert observed(cache) == before


@CELLS
@UNIFIED
@pytest.mark.parametrize(("start", "end"), [(1, 3), (0, 3), (-1, 4), (2, -1), (1, 99)])
def test_a_removal_that_the_recurrent_side_refuses_changes_neither_side(cells_class, unified, start, end):
    cache = cache_of(cells_class, unified=unified)
    append(cache, {0: 5})
    before = observed(cache)
    assert cache.remove(0, start, end) is not None
    assert observed(cache) == before


@CELLS
@UNIFIED
@pytest.mark.parametrize(
    ("start", "end", "last"), [(3, -1, 2), (4, 5, 3), (4, 99, 3), (0, -1, -1), (-1, -1, -1), (0, 5, -1), (5, -1, 4), (3, 3, 4), (4, 2, 4)]
)
def test_a_removal_that_is_accepted_reaches_both_sides(cells_class, unified, start, end, last):
    cache = cache_of(cells_class, unified=unified)
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


@CELLS
@UNIFIED
def test_a_state_that_is_written_is_the_same_on_both_sides(cells_class, unified):
    cache = cache_of(cells_class, unified=unified)
    append(cache, {0: 5})
    cache.remove(0, 4, -1)
    assert cache.write(2, cache.read(0)) is None
    assert cache.last_position(2) == 3
    assert sides_agree(cache)


@CELLS
@UNIFIED
def test_a_checkpoint_that_is_ahead_of_its_sequence_changes_neither_side(cells_class, unified):
    cache = cache_of(cells_class, unified=unified)
    append(cache, {0: 5})
    ahead = cache.read_recurrent(0)
    cache.drop(0)
    append(cache, {0: 4})
    before = observed(cache)
    assert "holds only 4" in cache.write_recurrent(0, ahead)
    assert observed(cache) == before


@CELLS
@UNIFIED
def test_a_checkpoint_forgets_what_came_later_on_both_sides(cells_class, unified):
    cache = cache_of(cells_class, unified=unified)
    append(cache, {0: 3})
    checkpoint = cache.read_recurrent(0)
    append(cache, {0: 1})
    append(cache, {0: 3})
    assert cache.write_recurrent(0, checkpoint) is None
    assert cache.last_position(0) == 2
    assert sides_agree(cache)


@CELLS
@UNIFIED
def test_a_follower_is_where_its_leader_is_on_both_sides(cells_class, unified):
    cache = cache_of(cells_class, unified=unified)
    append(cache, {0: 3})
    cache.share(0, 1)
    cache.detach(1)
    append(cache, {0: 2})
    cache.follow(0, 1, 2)
    assert cache.positions() == [(0, 4), (0, 4), (-1, -1)]
    assert sides_agree(cache)
    assert cache.recurrent.cells.tail[0] == cache.recurrent.cells.tail[1]


@CELLS
def test_a_whole_session_without_room_changes_neither_side(cells_class):
    large = cache_of(cells_class, n_ctx=20)
    append(large, {0: 9, 1: 2})
    cache = cache_of(cells_class)
    append(cache, {0: 5})
    before = observed(cache)
    assert cache.write_all(large.read_all()) is not None
    assert observed(cache) == before


@CELLS
def test_sequences_that_share_a_state_share_it_again_when_a_session_is_written(cells_class):
    cache = cache_of(cells_class)
    append(cache, {0: 5, 2: 1})
    cache.share(0, 1)
    state = cache.read_all()
    assert state.same_as == (0, 0, 2)
    cache.write_all(state)
    tail = cache.recurrent.cells.tail
    assert tail[0] == tail[1] != tail[2]
    assert cache.positions() == [(0, 4), (0, 4), (0, 0)]


def test_a_shift_below_position_0_is_refused_and_an_empty_sequence_has_nothing_to_move():
    cache = cache_of()
    append(cache, {0: 2})
    assert cache.shift(0, -1) is not None
    assert cache.shift(1, -1) is None
    cache.divide(1, 2)
    assert cache.positions() == [(0, 1), (-1, -1), (-1, -1)]
