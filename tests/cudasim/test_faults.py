"""Faults that only a device can have, planted one at a time: each of them is found by generated programs on targets cuda and cuda-ring, which
without them pass the same programs.

Rules
- The noise that answers are held to is that of the sound kernels.
- A fault is in how kernels are started, what they are told, or how threads exchange; the kernels themselves stay as they are.
"""

import numpy as np
import pytest
import statedrift.kernels_cuda.causal_convolution as convolution
import statedrift.kernels_cuda.mamba2_scan as mamba2
from statedrift.fuzz.generation import generate
from statedrift.fuzz.shards import number_of
from statedrift.fuzz.trial import Bench
from statedrift.kernels_cuda import scan, simulator
from statedrift.kernels_cuda.arrays import Twin
from statedrift.spec.models import Model
from statedrift.targets import cuda_session

MODELS = {"mamba2": Model("mamba2", 0, (("d_state", 17), ("n_layer", 1))), "lfm2": Model("lfm2", 0, (("n_layer", 2),))}
"""d_state 17: two lanes share a channel, and one of them has no last entry."""
PROGRAMS = 2
SEED = 0


def missing_barrier(monkeypatch):
    """Lanes take what the others had laid down before, without waiting for them."""

    def exchange_without_waiting(block, value, lane_mask):
        board = block._boards[0]
        taken = board.get(block.lane ^ lane_mask, np.float32(0))
        board[block.lane] = value
        return taken

    monkeypatch.setattr(simulator.Block, "exchange", exchange_without_waiting)


def one_late(plane_row):
    """The planes that are written, each with the state of the one after it."""
    late = plane_row.copy()
    for planes in late:
        planes[planes >= 0] = np.roll(planes[planes >= 0], 1)
    return late


def plane_off_by_one(monkeypatch):
    monkeypatch.setattr(mamba2, "launch_scan", with_other_rows(lambda source, planes: (source, one_late(planes))))


def wrong_source_row(monkeypatch):
    """Rows are read for the next segment, or, where there is one alone, from the next row."""
    monkeypatch.setattr(mamba2, "launch_scan", with_other_rows(lambda source, planes: (np.roll(source, 1) + (len(source) == 1), planes)))


def with_other_rows(change):
    """A launcher whose rows to read from and to write to are changed first."""
    launch = scan.launch_scan

    def launched(kernel_of, operands, rows, segment_start, source_row, plane_row, y):
        source, planes = change(source_row.host, plane_row.host)
        launch(kernel_of, operands, rows, segment_start, Twin(source % rows.shape[0]), Twin(planes), y)

    return launched


class Unbounded:
    """An array as a device has it: an index beyond the end of a row is in the next one."""

    def __init__(self, array):
        self.array = array
        self.flat = array.reshape(-1)
        self.steps = [stride // array.itemsize for stride in array.strides]

    def __getattr__(self, name):
        return getattr(self.array, name)

    def place(self, index):
        return sum(int(one) * step for one, step in zip(index, self.steps, strict=True)) % self.flat.size

    def __getitem__(self, index):
        is_number = isinstance(index, tuple) and len(index) == len(self.steps)
        return self.flat[self.place(index)] if is_number else self.array[index]

    def __setitem__(self, index, value):
        self.flat[self.place(index)] = value


def tail_lanes_not_masked(monkeypatch):
    """A lane takes an entry that its state does not have."""
    launch = scan.launch_scan
    see = simulator._seen

    def seen(argument):
        array = see(argument)
        return Unbounded(array) if isinstance(array, np.ndarray) and array.size and array.dtype == np.float32 else array

    def launched(*arguments):
        with pytest.MonkeyPatch.context() as within:
            within.setattr(
                simulator, "_seen", lambda argument: tuple(map(seen, argument)) if isinstance(argument, tuple) else seen(argument)
            )
            launch(*arguments)

    monkeypatch.setattr(scan.Tile, "is_exact", True)
    monkeypatch.setattr(mamba2, "launch_scan", launched)


def convolution_window_late(monkeypatch):
    convolve = convolution.causal_convolution

    def late(x, taps, bias, rows, segment_start, source_row, plane_row, y):
        convolve(x, taps, bias, rows, segment_start, source_row, Twin(one_late(plane_row.host)), y)

    monkeypatch.setattr(convolution, "causal_convolution", late)


FAULTS = {
    missing_barrier: "mamba2", plane_off_by_one: "mamba2", wrong_source_row: "mamba2", tail_lanes_not_masked: "mamba2",
    convolution_window_late: "lfm2",
}  # fmt: skip


@pytest.fixture(scope="module", params=["cuda", "cuda-ring"])
def bench(request):
    """A target that knows the noise of its sound kernels."""
    with Bench(request.param) as opened:
        for model in MODELS.values():
            opened.noise(model)
        yield opened


@pytest.fixture(autouse=True)
def _kernels_of_this_test():
    """Kernels and forwards are made once: those of a fault are not those of the next test."""
    forget_kernels()
    yield
    forget_kernels()


def forget_kernels():
    mamba2._kernel.cache_clear()
    cuda_session.on_device.cache_clear()


def first_divergence(bench, model):
    """The verdict of the first of some programs that diverges, or None."""
    for number in range(PROGRAMS):
        (trial,) = bench.try_programs([generate(number_of(SEED, number), model)])
        if trial.verdict.is_divergence:
            return trial.verdict
        assert trial.verdict.kind == "ok"
    return None


@pytest.mark.parametrize("family", MODELS)
def test_without_a_fault_the_programs_pass(bench, family):
    assert first_divergence(bench, MODELS[family]) is None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_device_is_found(bench, fault, monkeypatch):
    fault(monkeypatch)
    assert first_divergence(bench, MODELS[FAULTS[fault]]) is not None
