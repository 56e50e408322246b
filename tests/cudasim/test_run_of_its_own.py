"""These tests are a pytest run of their own; in any other one this says so."""

import os

import pytest


@pytest.mark.skipif(os.environ.get("NUMBA_ENABLE_CUDASIM") != "1", reason="a run of its own: NUMBA_ENABLE_CUDASIM=1 pytest tests/cudasim")
def test_kernels_are_simulated():
    from statedrift.kernels_cuda import SIMULATED

    assert SIMULATED
