"""Faults that only a device can have, planted one at a time: each of them is found by a program on target cuda, which without them is right."""

import numpy as np
import pytest
import statedrift.kernels_cuda.causal_convolution as convolution
import statedrift.kernels_cuda.mamba2_scan as mamba2
from statedrift.kernels_cuda import scan
from statedrift.kernels_cuda.arrays import Twin
from statedrift.spec.programs import parse_program

from statedrift import check

MAMBA2 = "model mamba2 seed=0 d_state=17 n_layer=1; cache n_seq_max=2 n_rs_seq=2; decode 0:3; rollback 0 1; decode 0:1; share 0 1; decode 1:1 0:1"
LFM2 = "model lfm2 seed=0 n_layer=2; cache n_seq_max=2 n_rs_seq=2; decode 0:3; rollback 0 1; decode 0:1; share 0 1; decode 1:1 0:1"


def with_other_rows(change):
    """A launcher whose rows to read from and to write to are changed first."""
    launch = scan.launch_scan

    def launched(kernel_of, operands, rows, segment_start, source_row, plane_row, y):
        source, planes = change(source_row.host, plane_row.host)
        launch(kernel_of, operands, rows, segment_start, Twin(source), Twin(planes), y)

    return launched


def no_exchange(monkeypatch):
    """Lanes do not add up what they read: the missing barrier of a kernel that exchanges by shuffles."""
    monkeypatch.setattr(scan, "_adder", lambda lanes: lambda value: value)


def plane_off_by_one(monkeypatch):
    monkeypatch.setattr(mamba2, "launch_scan", with_other_rows(lambda source, planes: (source, np.roll(planes, 1, axis=1))))


def wrong_source_row(monkeypatch):
    monkeypatch.setattr(mamba2, "launch_scan", with_other_rows(lambda source, planes: (np.roll(source, 1) + (len(source) == 1), planes)))


def tail_lanes_not_masked(monkeypatch):
    monkeypatch.setattr(scan.Tile, "is_exact", True)


def window_late(monkeypatch):
    """A window is written to the plane of the token before."""
    convolve = convolution.causal_convolution

    def late(x, taps, bias, rows, segment_start, source_row, plane_row, y):
        convolve(x, taps, bias, rows, segment_start, source_row, Twin(np.roll(plane_row.host, 1, axis=1)), y)

    monkeypatch.setattr(convolution, "causal_convolution", late)


FAULTS = {no_exchange: MAMBA2, plane_off_by_one: MAMBA2, wrong_source_row: MAMBA2, tail_lanes_not_masked: MAMBA2, window_late: LFM2}


def fresh_kernels():
    """Kernels and forwards are made once: those of a fault are not those of the next."""
    from statedrift.targets import cuda_session

    mamba2._kernel.cache_clear()
    cuda_session.on_device.cache_clear()


@pytest.fixture(autouse=True)
def _kernels_of_this_test():
    fresh_kernels()
    yield
    fresh_kernels()


@pytest.mark.parametrize("program", [MAMBA2, LFM2], ids=["mamba2", "lfm2"])
def test_the_programs_are_right_without_a_fault(program):
    assert check(parse_program(program), "cuda").kind == "ok"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_device_is_found(fault, monkeypatch):
    fault(monkeypatch)
    assert check(parse_program(FAULTS[fault]), "cuda").is_divergence
