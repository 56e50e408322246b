"""Target cuda in the simulator beside target numba: the same answers, positions and states, and rows that differ by rounding, in every family."""

import numpy as np
import pytest
from numba.cuda.simulator.cudadrv import devicearray
from statedrift.impl.batches import SplitBatch
from statedrift.impl.cells import Plan
from statedrift.kernels_cuda import simulator
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.families import FAMILIES
from statedrift.spec.models import Model
from statedrift.spec.target import Batch
from statedrift.targets import cuda_session
from statedrift.targets.cuda import RING as CUDA_RING
from statedrift.targets.cuda import TARGET as CUDA
from statedrift.targets.cuda_session import runs, uncrossed
from statedrift.targets.numba import RING, TARGET

TOLERANCE = 5e-5
POLICIES = {"planes": (CUDA, TARGET), "ring": (CUDA_RING, RING)}


class Both:
    """A session on the device and one on the CPU, that are told the same and held to each other."""

    def __init__(self, model, configuration, targets=(CUDA, TARGET)):
        self.sessions = [target.open(model, configuration) for target in targets]

    def do(self, name, *arguments):
        device, host = (getattr(session, name)(*arguments) for session in self.sessions)
        assert device == host
        self.same_positions()
        return device

    def same_positions(self):
        device, host = (session.positions() for session in self.sessions)
        assert device == host

    def decode(self, items, outputs="all"):
        """items: sequence and number of tokens of each, in the order of the batch."""
        sequences = [sequence for sequence, count in items for _ in range(count)]
        last = {sequence: self.sessions[0].positions()[sequence][1] for sequence, _ in items}
        positions = []
        for sequence in sequences:
            last[sequence] += 1
            positions.append(last[sequence])
        tokens = [(7 * position + 3 * sequence) % 31 for sequence, position in zip(sequences, positions, strict=True)]
        batch = Batch(np.array(tokens), np.array(positions), tuple((s,) for s in sequences), np.ones(len(tokens), bool), outputs)
        device, host = (session.decode(batch) for session in self.sessions)
        assert device.outcome == host.outcome
        self.same_positions()
        if host.rows is not None:
            np.testing.assert_allclose(device.rows, host.rows, rtol=TOLERANCE, atol=TOLERANCE)

    def same_states(self, sequence):
        device, host = (session.inspect(sequence) for session in self.sessions)
        for one, other in zip(device, host, strict=True):
            assert (one.layer, one.part) == (other.layer, other.part)
            np.testing.assert_allclose(one.values, other.values, rtol=TOLERANCE, atol=TOLERANCE)


SMALLER = {"rwkv6": (("wkv_head_size", 16),), "rwkv7": (("wkv_head_size", 16),)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_answers_as_on_the_cpu(family, arrays_of_a_device):
    both = Both(Model(family, 1, SMALLER.get(family, ())), CacheConfiguration(n_seq_max=2, n_rs_seq=2, n_ctx=32))
    both.decode([(0, 1)])
    both.decode([(0, 3)])
    both.do("remove", 0, 2, -1)
    both.do("share", 0, 1, -1, -1)
    both.decode([(1, 1), (0, 2)], "embeddings")
    for sequence in (0, 1):
        both.same_states(sequence)


@pytest.mark.parametrize("targets", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_a_life_on_a_device_is_that_on_the_cpu(family, targets, arrays_of_a_device):
    """Poisoned memory, small ubatches, several sequences, saves of every kind, and all that clears."""
    both = Both(Model(family, 0), CacheConfiguration(n_seq_max=3, n_rs_seq=2, n_ubatch=4, n_ctx=32, unified=1, start="poison"), targets)
    both.decode([(0, 5), (1, 2)])
    both.do("share", 1, 2, -1, -1)
    both.decode([(2, 1), (1, 1)])
    both.do("remove", 0, 4, -1)
    saved = [session.save(0, False, False)[1] for session in both.sessions]
    for session, blob in zip(both.sessions, saved, strict=True):
        assert session.restore(2, blob, False, False).word == "accepted"
    both.decode([(2, 1), (0, 1)])
    whole = [session.save_all()[1] for session in both.sessions]
    both.do("clear", True)
    both.decode([(1, 2)])
    for session, blob in zip(both.sessions, whole, strict=True):
        assert session.restore_all(blob).word == "accepted"
    both.same_positions()
    for sequence in range(3):
        both.same_states(sequence)
    both.do("keep", 1)
    both.decode([(1, 1)])


def test_separate_pools_copy_cells_on_the_device():
    both = Both(Model("lfm2", 0), CacheConfiguration(n_seq_max=2, n_rs_seq=0, n_ctx=16))
    both.decode([(0, 3)])
    both.do("share", 0, 1, -1, -1)
    both.decode([(0, 1)])
    both.decode([(1, 1)])
    both.same_states(1)


def test_a_saved_state_fits_the_other_side():
    both = Both(Model("mamba2", 0), CacheConfiguration(n_seq_max=2))
    both.decode([(0, 3)])
    device, host = both.sessions
    assert host.restore(1, device.save(0, False, False)[1], False, False).word == "accepted"
    assert device.restore(1, host.save(0, False, False)[1], False, False).word == "accepted"
    both.decode([(1, 1)])


@pytest.mark.parametrize("targets", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_the_same_bytes_on_both_sides(family, targets, arrays_of_a_device):
    """States that differ by nothing: those of the CPU, restored on the device."""
    device, host = Both(Model(family, 1), CacheConfiguration(n_seq_max=2, n_rs_seq=2, n_ctx=32, start="poison"), targets).sessions
    batch = Batch(np.arange(5), np.arange(5), ((0,),) * 5, np.ones(5, bool), "last")
    assert host.decode(batch).outcome.word == "accepted"
    assert host.share(0, 1, -1, -1).word == "accepted"
    for partial in (False, True):
        blob = host.save(0, partial, False)[1]
        assert device.restore(0, blob, partial, False).word == "accepted"
        assert device.save(0, partial, False)[1] == blob
    everything = host.save_all()[1]
    assert device.restore_all(everything).word == "accepted"
    assert device.save_all()[1] == everything


def test_a_save_and_a_restore_take_one_copy_each(monkeypatch):
    """lfm2: windows of convolutions, keys and values."""
    from statedrift.kernels_cuda import packing, rows

    copies, launches = [], []
    for place, moves in ((devicearray.FakeCUDAArray, "copy_to_host"), (packing.cuda, "to_device")):
        move = getattr(place, moves)
        monkeypatch.setattr(
            place, moves, lambda array, *rest, move=move, moves=moves: copies.append((moves, array.dtype)) or move(array, *rest)
        )
    copy = rows._copy
    monkeypatch.setattr(rows, "_copy", lambda count, *arguments: launches.append(count) or copy(count, *arguments))
    session = CUDA.open(Model("lfm2", 0), CacheConfiguration(n_seq_max=2, n_ctx=16))
    session.decode(Batch(np.arange(3), np.arange(3), ((0,),) * 3, np.ones(3, bool), "last"))
    copies.clear()
    launches.clear()
    blob = session.save(0, False, False)[1]
    assert [moves for moves, dtype in copies if dtype == np.float32] == ["copy_to_host"]
    parts = 3
    assert sum(count > 0 for count in launches) == parts
    copies.clear()
    launches.clear()
    assert session.restore(1, blob, False, False).word == "accepted"
    assert [moves for moves, dtype in copies if dtype == np.float32] == ["to_device"]
    assert sum(count > 0 for count in launches) == parts


# --- what may go side by side -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "written", "starts"),
    [
        ([0, 1, 2], [{3}, {4}, {5}], [0]),
        ([0, 1], [{0}, {1}], [0]),  # in place
        ([0, 3], [{3}, {4}], [0, 1]),  # the second reads what the first wrote
        ([0, 0], [{5}, {0}], [0, 1]),  # the second writes what the first read
        ([0, 1], [{5}, {5}], [0, 1]),  # both write the same
        ([0, 3, 4], [{3}, {6}, {7}], [0, 1]),
        ([], [], []),
    ],
)
def test_steps_are_cut_where_rows_cross(read, written, starts):
    assert runs(read, written) == starts


def test_only_ubatches_whose_rows_cross_are_cut():
    batch = SplitBatch(*(np.zeros(4, np.int64),) * 3, np.arange(4), np.arange(5), np.array([0, 2, 4]))
    plan = Plan(np.arange(4), np.array([0, 0, 2, 3]), np.array([[8, -1], [0, 9], [2, -1], [3, -1]]), np.full(4, -1))
    assert uncrossed(batch, plan).ubatch_start.tolist() == [0, 1, 2, 4]


def a_sharer_and_its_source_in_one_batch(family, targets, order):
    """The row that one reads is a row that the other one writes."""
    both = Both(Model(family, 0), CacheConfiguration(n_seq_max=2, n_rs_seq=1), targets)
    both.decode([(0, 2)])
    both.do("share", 0, 1, -1, -1)
    both.decode(order)
    both.same_states(0)
    both.same_states(1)


CROSSINGS = [pytest.param(family, targets, id=f"{family}-{name}") for family in ("lfm2", "mamba2") for name, targets in POLICIES.items()]


@pytest.mark.parametrize("order", [[(0, 2), (1, 2)], [(1, 2), (0, 2)]], ids=["source first", "sharer first"])
@pytest.mark.parametrize(("family", "targets"), CROSSINGS)
def test_a_sharer_and_its_source_in_one_batch_are_right_in_any_order_of_threads(family, targets, order, both_orders_of_threads):
    a_sharer_and_its_source_in_one_batch(family, targets, order)


@pytest.mark.parametrize(("family", "targets"), CROSSINGS)
def test_launched_side_by_side_they_would_not_be(family, targets, monkeypatch):
    """The test above can fail: without the cut one of the orders of threads gives wrong states."""
    monkeypatch.setattr(cuda_session, "uncrossed", lambda batch, plan: batch)
    monkeypatch.setattr(simulator, "backwards", True)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        a_sharer_and_its_source_in_one_batch(family, targets, [(0, 2), (1, 2)])
