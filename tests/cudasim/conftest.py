"""Tests of the CUDA kernels in Numba's simulator: a pytest run of its own, `NUMBA_ENABLE_CUDASIM=1 pytest tests/cudasim`.

Rules
- The simulator is chosen before Numba is imported, for the whole process: without it these tests are left out, and test_run_of_its_own.py says so.
- Threads that wait for each other are what a simulation costs: every test has a budget of them.
"""

import os

import pytest

HANDOVERS_MAX = 40_000
"""Times that threads may wait for the others in one test."""

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    collect_ignore_glob = ["test_[!r]*.py"]  # all but test_run_of_its_own.py


@pytest.fixture(autouse=True)
def budget_of_handovers():
    from statedrift.kernels_cuda.simulator import Block

    before = Block.handovers
    yield
    count = Block.handovers - before
    assert count <= HANDOVERS_MAX, f"threads waited for each other {count} times"


@pytest.fixture
def arrays_of_a_device(monkeypatch):
    """What a device's arrays cannot do is an error of the test."""
    from tests.cudasim.device_arrays import hold_to_a_device

    hold_to_a_device(monkeypatch)


@pytest.fixture(params=[False, True], ids=["forwards", "backwards"])
def both_orders_of_threads(request, monkeypatch):
    """A test twice: with a launch's threads from the first to the last, and from the last to the first."""
    from statedrift.kernels_cuda import simulator

    monkeypatch.setattr(simulator, "backwards", request.param)
