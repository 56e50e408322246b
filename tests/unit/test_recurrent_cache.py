"""Cells: who holds what, where a batch reads from, and which rollbacks can be served."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statedrift.impl.batches import split
from statedrift.impl.cells import StrictCells
from statedrift.impl.recurrent_cache import RecurrentCache, States
from statedrift.impl.ring import RingCells


def batch_of(cells, counts, ubatch_size=64):
    sequences = np.concatenate([np.full(count, sequence) for sequence, count in counts.items()])
    positions = np.concatenate([cells.position[sequence] + 1 + np.arange(count) for sequence, count in counts.items()])
    tokens = np.zeros(len(sequences), np.int64)
    return split(
        tokens, positions, sequences, np.ones(len(sequences), bool), cells.position, 8, max(ubatch_size, cells.planes), cells.planes
    )[2]


def decode(cells, counts, ubatch_size=64):
    batch = batch_of(cells, counts, ubatch_size)
    plan = cells.plan(batch)
    cells.apply(batch, plan)
    return plan


def state(cells):
    names = ("tail", "position", "pending", "reference_count", "valid_planes", "free_cells")
    return [getattr(cells, name).tolist() for name in names] + [cells.free_count]


def test_a_plan_changes_nothing():
    cells = StrictCells(4, 3)
    decode(cells, {0: 5})
    cells.share(0, 1)
    before = state(cells)
    cells.plan(batch_of(cells, {0: 2, 1: 1, 2: 4}))
    assert state(cells) == before


def test_a_new_sequence_reads_a_row_that_is_zeroed_first():
    plan = decode(StrictCells(4, 3), {2: 5})
    assert plan.source_row[0] == plan.zero_row[0] == plan.plane_row[0, 0]


def test_plane_p_of_a_cell_is_row_p_times_the_cells_plus_the_cell():
    cells = StrictCells(4, 3)
    plan = decode(cells, {2: 5})
    assert plan.plane_row[0].tolist() == [plane * 4 + cells.tail[2] for plane in range(4)]


def test_a_shared_sequence_that_goes_on_gets_its_own_cell_and_reads_from_the_shared_one():
    cells = StrictCells(3, 1)
    decode(cells, {0: 5})
    shared = cells.tail[0]
    cells.share(0, 1)
    plan = decode(cells, {1: 1})
    assert plan.source_row[0] == shared
    assert cells.tail[0] == shared != cells.tail[1]
    assert cells.reference_count[[cells.tail[0], cells.tail[1]]].tolist() == [1, 1]


def test_sharers_that_go_on_together_read_before_the_last_of_them_writes():
    cells = StrictCells(3, 1)
    decode(cells, {0: 5})
    shared = cells.tail[0]
    cells.share(0, 1)
    cells.share(0, 2)
    plan = decode(cells, {2: 1, 0: 1, 1: 1})
    assert plan.source_row.tolist() == [shared] * 3
    assert [int(shared) in rows for rows in plan.plane_row.tolist()] == [False, False, True]


def test_as_many_cells_as_sequences_always_suffice():
    cells = StrictCells(4, 0)
    decode(cells, {0: 3})
    for other in (1, 2, 3):
        cells.share(0, other)
    decode(cells, {0: 1, 1: 1, 2: 1, 3: 1})
    assert sorted(cells.tail.tolist()) == [0, 1, 2, 3]


def test_a_sequence_in_several_ubatches_goes_on_in_the_cell_it_was_given():
    cells = StrictCells(2, 1)
    decode(cells, {0: 5})
    cells.share(0, 1)
    plan = decode(cells, {0: 9}, ubatch_size=4)
    assert len(plan.cell) == 3
    assert plan.source_row[1:].tolist() == plan.plane_row[1:, 0].tolist() == [cells.tail[0]] * 2


@pytest.mark.parametrize("ubatch_size", [1, 4, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_a_rollback_is_accepted_exactly_when_its_state_was_kept(count, ubatch_size):
    for taken in range(1, 6):
        cells = StrictCells(2, 3)
        decode(cells, {0: 10}, ubatch_size)
        decode(cells, {0: count}, ubatch_size)
        reason = cells.rollback(0, taken)
        assert (reason is None) == (taken <= min(3, count - 1))


def test_a_rollback_is_read_once_and_its_snapshots_are_gone_afterwards():
    cells = StrictCells(2, 3)
    decode(cells, {0: 10})
    assert cells.rollback(0, 2) is None
    plan = decode(cells, {0: 1})
    assert plan.source_row[0] == 2 * 2 + cells.tail[0]
    assert cells.rollback(0, 1) is not None
    assert cells.position[0] == 8


def test_a_second_rollback_reaches_further_back_while_states_are_kept():
    cells = StrictCells(2, 3)
    decode(cells, {0: 10})
    assert cells.rollback(0, 2) is None
    assert cells.rollback(0, 2) is not None
    assert cells.rollback(0, 1) is None
    assert cells.pending[0] == 3
    assert cells.position[0] == 6


def test_a_share_copies_a_pending_rollback_and_a_later_one_binds_only_its_own_sequence():
    cells = StrictCells(3, 3)
    decode(cells, {0: 10})
    cells.rollback(0, 1)
    cells.share(0, 1)
    cells.rollback(1, 1)
    assert cells.pending[:2].tolist() == [1, 2]
    assert cells.position[:2].tolist() == [8, 7]
    plan = decode(cells, {0: 1, 1: 1})
    cell = 0 if cells.tail[0] == 0 else int(cells.tail[1])
    assert plan.source_row.tolist() == [3 * 1 + cell, 3 * 2 + cell]


def test_a_placed_state_has_no_snapshots():
    cells = StrictCells(2, 3)
    decode(cells, {0: 10})
    cells.rollback(0, 1)
    cells.place(0, 7)
    assert cells.pending[0] == 0
    assert cells.rollback(0, 1) is not None


def test_the_logical_state_is_read_from_the_pending_plane():
    cache = RecurrentCache(StrictCells(2, 3), 1, 2, 3, poison=True)
    decode(cache.cells, {0: 10})
    cache.cells.rollback(0, 2)
    row = 2 * 2 + int(cache.cells.tail[0])
    cache.convolution_rows[0, row], cache.recurrent_rows[0, row] = 7, 8
    states = cache.read(0)
    assert np.array_equal(states.convolution, [[[7, 7]]])
    assert np.array_equal(states.recurrent, [[[8, 8, 8]]])


CELLS = pytest.mark.parametrize("cells_class", [StrictCells, RingCells])


@CELLS
def test_the_part_of_per_layer_embeddings_is_poisoned_read_and_written_like_the_others(cells_class):
    cache = RecurrentCache(cells_class(3, 2), 2, 1, 1, embedding_width=4, embedding_layer_count=1, poison=True)
    assert cache.embedding_rows.shape == (1, 9, 4)
    assert np.isnan(cache.embedding_rows).all()
    states = States(np.ones((1, 2, 1)), np.full((1, 2, 1), 2), np.arange(4.0).reshape(1, 1, 4))
    cache.write(1, 5, states)
    for mine, right in zip(cache.read(1), states, strict=True):
        assert np.array_equal(mine, right)
    cache.zero()
    assert not cache.embedding_rows.any()


def test_every_part_goes_along_when_a_sequence_leaves_a_shared_cell():
    cache = RecurrentCache(RingCells(2, 2), 2, 3, 1, embedding_width=4, embedding_layer_count=2)
    batch = batch_of(cache.cells, {0: 3})
    cache.apply(batch, cache.cells.plan(batch))
    for part, rows in enumerate(cache.parts):
        rows[:] = 100 * part + np.arange(rows.shape[1])[:, None]
    before = cache.read(0, 2)
    cache.cells.share(0, 1)
    batch = batch_of(cache.cells, {1: 1, 0: 1})
    cache.apply(batch, cache.cells.plan(batch))
    assert cache.cells.rollback(1, 1) is None
    for mine, right in zip(cache.read(1, 2), before, strict=True):
        assert np.array_equal(mine, right)


@CELLS
def test_states_that_are_older_than_there_are_planes_for_are_left_out_of_a_write(cells_class):
    cache = RecurrentCache(cells_class(2, 1), 1, 1, 1)
    column = np.arange(4.0).reshape(4, 1, 1)
    cache.write(0, 7, States(column, column, np.zeros((4, 1, 0))))
    assert cache.cells.reach(0) == 1
    assert cache.read(0, 2).convolution.ravel().tolist() == [0, 1]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["decode", "share", "drop", "rollback", "place"]), st.integers(0, 3), st.integers(0, 3), st.integers(1, 5)),
    max_size=40,
)


@given(OPERATIONS)
@settings(max_examples=200, deadline=None)
def test_references_and_free_cells_always_add_up(operations):
    cells = StrictCells(4, 2)
    for name, sequence, other, count in operations:
        if name == "decode":
            decode(cells, {sequence: count, other: count} if sequence != other else {sequence: count})
        elif name == "share":
            cells.share(sequence, other)
        elif name == "drop":
            cells.drop(sequence)
        elif name == "place":
            cells.place(sequence, count)
        elif cells.position[sequence] >= count:
            cells.rollback(sequence, count)
        used = [cell for cell in cells.tail.tolist() if cell >= 0]
        assert [used.count(cell) for cell in range(4)] == cells.reference_count.tolist()
        assert sorted(cells.free_cells[: cells.free_count].tolist()) == [cell for cell in range(4) if cell not in used]
        assert all((cell < 0) == (position < 0) for cell, position in zip(cells.tail, cells.position, strict=True))
