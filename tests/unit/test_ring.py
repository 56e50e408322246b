"""Ring cells: what is at a row is followed through every operation; which rollbacks are accepted is arithmetic of the log."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statedrift.impl.batches import split
from statedrift.impl.cells import StrictCells
from statedrift.impl.recurrent_cache import RecurrentCache, States
from statedrift.impl.ring import RingCells

ZERO = ()
"""The log whose state is zero."""


class Logged:
    """A recurrent cache whose rows hold not states but numbers of the logs they are the states of; what nothing wrote is NaN."""

    def __init__(self, cells, ubatch_size=64):
        self.cells, self.ubatch_size = cells, ubatch_size
        self.cache = RecurrentCache(cells, 1, 1, 1, poison=True)
        self.logs = [()] * len(cells.tail)
        self.numbers = {ZERO: 0}
        self.fresh_token = 0

    def number(self, log):
        return self.numbers.setdefault(log, len(self.numbers))

    def decode(self, counts):
        sequences = np.concatenate([np.full(count, sequence) for sequence, count in counts])
        given_counts = {}
        positions = []
        for sequence in sequences.tolist():
            positions.append(int(self.cells.position[sequence]) + 1 + given_counts.get(sequence, 0))
            given_counts[sequence] = given_counts.get(sequence, 0) + 1
        size = max(self.ubatch_size, self.cells.tail_size)
        tokens = np.arange(self.fresh_token, self.fresh_token + len(sequences))
        self.fresh_token += len(sequences)
        batch = split(
            tokens, np.array(positions), sequences, np.ones(len(sequences), bool), self.cells.position, 1 << 40, size, self.cells.tail_size
        )[2]
        plan = self.cells.plan(batch)
        self.cache.apply(batch, plan)
        for ubatch in range(batch.ubatch_count):
            segments = range(batch.ubatch_start[ubatch], batch.ubatch_start[ubatch + 1])
            for rows in self.cache.parts[:2]:
                rows[:, [plan.zero_row[segment] for segment in segments if plan.zero_row[segment] >= 0]] = 0
            for segment in segments:
                self.run(batch, plan, segment)
        return plan

    def run(self, batch, plan, segment):
        """What a kernel does: read the source before anything is written, then every plane."""
        rows = self.cache.recurrent_rows
        sequence = int(batch.segment_sequence[segment])
        log = self.logs[sequence]
        assert rows[0, plan.source_row[segment], 0] == self.number(log)
        new = tuple(batch.tokens[batch.segment_start[segment] : batch.segment_start[segment + 1]].tolist())
        self.logs[sequence] = log + new
        for plane, row in enumerate(plan.plane_row[segment]):
            if row >= 0:
                assert plane < len(new)
                rows[0, row, 0] = self.number((log + new)[: len(log) + len(new) - plane])

    def check(self):
        """Every state that a sequence can go back to is where the cells say that it is."""
        for sequence, log in enumerate(self.logs):
            assert self.cells.position[sequence] == len(log) - 1
            if log:
                held = self.cache.read(sequence, 1 + self.cells.reach(sequence)).recurrent.ravel().tolist()
                assert held == [self.number(log[: len(log) - back]) for back in range(len(held))]

    def rollback(self, sequence, count):
        reason = self.cells.rollback(sequence, count)
        if reason is None:
            self.logs[sequence] = self.logs[sequence][: len(self.logs[sequence]) - count]
        return reason


def filled(n_rs_seq=3, count=10, n_seq_max=4, ubatch_size=64):
    logged = Logged(RingCells(n_seq_max, n_rs_seq), ubatch_size)
    logged.decode([(0, count)])
    return logged


@pytest.mark.parametrize("ubatch_size", [1, 2, 64])
@pytest.mark.parametrize("counts", [[10], [1] * 10, [1, 2, 3, 1], [4, 1], [2, 5, 1]])
def test_the_newest_states_exist_however_the_tokens_came(counts, ubatch_size):
    logged = Logged(RingCells(2, 3), ubatch_size)
    for count in counts:
        logged.decode([(1, count)])
    assert logged.cells.reach(1) == 3
    logged.check()


@pytest.mark.parametrize(("first", "depth"), [(1, 0), (2, 1), (3, 2), (4, 3), (9, 3)])
def test_a_new_sequence_can_go_back_to_its_first_token_but_not_before(first, depth):
    logged = filled(count=first)
    assert logged.cells.reach(0) == depth
    assert logged.rollback(0, depth + 1) is not None
    logged.check()


def test_a_rollback_can_be_repeated_until_depth_is_used_up():
    logged = filled()
    assert [logged.rollback(0, 1), logged.rollback(0, 2)] == [None, None]
    assert "reach 0 back" in logged.rollback(0, 1)
    assert logged.cells.position[0] == 6
    logged.check()


def test_depth_grows_again_after_a_rollback_as_tokens_come():
    logged = filled()
    logged.rollback(0, 3)
    for depth in (1, 2, 3, 3):
        logged.decode([(0, 1)])
        assert logged.cells.reach(0) == depth
        logged.check()


def test_a_refused_rollback_changes_nothing():
    logged = filled()
    before = [getattr(logged.cells, name).tolist() for name in ("tail", "position", "base", "depth")]
    assert logged.rollback(0, 4) is not None
    assert [getattr(logged.cells, name).tolist() for name in ("tail", "position", "base", "depth")] == before


def test_a_share_copies_depth_and_a_rollback_of_either_disturbs_no_other():
    logged = filled()
    logged.cells.share(0, 1)
    logged.logs[1] = logged.logs[0]
    logged.rollback(0, 2)
    assert [logged.cells.reach(0), logged.cells.reach(1)] == [1, 3]
    logged.check()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a_sequence_that_leaves_a_shared_cell_takes_the_states_along_that_it_can_still_go_back_to(count):
    logged = filled()
    shared = logged.cells.tail[0]
    logged.cells.share(0, 1)
    logged.logs[1] = logged.logs[0]
    logged.decode([(1, count)])
    assert logged.cells.tail[0] == shared != logged.cells.tail[1]
    assert logged.cells.reach(1) == 3
    logged.check()


def test_the_last_owner_of_a_cell_goes_on_in_it_also_at_an_older_plane():
    logged = filled()
    logged.cells.share(0, 1)
    logged.logs[1] = logged.logs[0]
    logged.rollback(1, 2)
    cell = logged.cells.tail[1]
    logged.decode([(0, 2), (1, 1)])
    assert logged.cells.tail[1] == cell != logged.cells.tail[0]
    assert [logged.cells.reach(0), logged.cells.reach(1)] == [3, 2]
    logged.check()


def test_without_snapshots_a_token_is_written_where_it_is_read():
    logged = filled(n_rs_seq=0, count=1)
    plan = logged.decode([(0, 3)])
    assert plan.source_row.tolist() == plan.plane_row[:, 0].tolist()
    assert logged.rollback(0, 1) is not None
    logged.check()


def test_a_token_is_never_written_over_the_state_before_it():
    logged = filled()
    plan = logged.decode([(0, 1)])
    assert plan.plane_row[0].tolist()[1:] == [-1] * 3
    assert plan.source_row[0] != plan.plane_row[0, 0]


def test_placed_states_are_where_a_rollback_finds_them():
    logged = filled()
    logged.decode([(1, 6)])
    values = np.array([logged.number(logged.logs[1][: 6 - back]) for back in range(3)], np.float32).reshape(3, 1, 1)
    logged.cache.write(2, 5, States(values, values, np.zeros((3, 1, 0), np.float32)))
    logged.logs[2] = logged.logs[1]
    assert logged.cells.reach(2) == 2
    logged.check()
    logged.decode([(2, 1)])
    assert logged.cells.reach(2) == 3
    logged.check()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["decode", "decode", "decode", "share", "drop", "rollback", "rollback", "place"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(1, 6),
        st.integers(1, 3),
    ),
    max_size=30,
)


@pytest.mark.parametrize("cells_class", [StrictCells, RingCells])
@given(OPERATIONS, st.integers(0, 4), st.sampled_from([1, 2, 5, 64]))
@settings(max_examples=150, deadline=None)
def test_every_state_that_can_be_gone_back_to_is_at_its_row(cells_class, operations, n_rs_seq, ubatch_size):
    logged = Logged(cells_class(4, n_rs_seq), ubatch_size)
    depth = [0] * 4
    for name, sequence, other, count, more in operations:
        cells = logged.cells
        if name == "decode":
            counts = [(sequence, count), (other, more)]
            for one in {sequence, other}:
                tokens = sum(given for receiver, given in counts if receiver == one)
                depth[one] = min(n_rs_seq, (depth[one] if logged.logs[one] else -1) + tokens)
            logged.decode(counts)
        elif name == "share":
            cells.share(sequence, other)
            logged.logs[other], depth[other] = logged.logs[sequence], depth[sequence]
        elif name == "drop":
            cells.drop(sequence)
            logged.logs[sequence], depth[sequence] = (), 0
        elif name == "place" and logged.logs[other]:
            logged.cache.write(sequence, len(logged.logs[other]) - 1, logged.cache.read(other, 1 + cells.reach(other)))
            logged.logs[sequence], depth[sequence] = logged.logs[other], cells.reach(other)
        elif name == "rollback" and len(logged.logs[sequence]) > count:
            reason = logged.rollback(sequence, count)
            if cells_class is RingCells:
                assert (reason is None) == (count <= depth[sequence])
            depth[sequence] -= count if reason is None else 0
        logged.check()
        used = [cell for cell in cells.tail.tolist() if cell >= 0]
        assert [used.count(cell) for cell in range(4)] == cells.reference_count.tolist()
        assert sorted(cells.free_cells[: cells.free_count].tolist()) == [cell for cell in range(4) if cell not in used]


def test_a_plan_changes_nothing():
    logged = filled()
    logged.cells.share(0, 1)
    cells = logged.cells
    names = ("tail", "position", "base", "depth", "reference_count", "free_cells")
    before = [getattr(cells, name).tolist() for name in names], cells.free_count
    tokens = np.zeros(3, np.int64)
    batch = split(tokens, np.array([10, 11, 10]), np.array([0, 0, 1]), np.ones(3, bool), cells.position, 1, 64, 1)[2]
    cells.plan(batch)
    assert ([getattr(cells, name).tolist() for name in names], cells.free_count) == before
