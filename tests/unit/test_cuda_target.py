"""Targets cuda and cuda-ring say why they cannot be used, and what to do; what they do is tested in tests/cudasim."""

import os
import sys
from importlib import metadata
from types import SimpleNamespace

import numba
import pytest
from statedrift.spec.errors import UnavailableError
from statedrift.targets import cuda as target

pytestmark = pytest.mark.skipif(os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", reason="a simulated device is there")


class Driver:
    """A driver with a device, or without one."""

    def __init__(self, is_available):
        self.given = is_available

    @property
    def is_available(self):
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


class NumbaCuda:
    """`numba.cuda` on some machine."""

    config = SimpleNamespace(ENABLE_CUDASIM=0)

    def __init__(self, is_available, failure=None):
        self.cudadrv = SimpleNamespace(driver=SimpleNamespace(driver=Driver(is_available)))
        self.failure = failure

    def jit(self, function):
        return {(1, 1): function}

    def synchronize(self):
        if self.failure:
            raise self.failure


def answer(monkeypatch, cuda):
    """What opening says on a machine with this `numba.cuda`, or "" when it is all right."""
    target._why_no_device.cache_clear()
    monkeypatch.setattr(numba, "cuda", cuda, raising=False)
    monkeypatch.setitem(sys.modules, "numba.cuda", cuda)
    try:
        target.require_cuda("cuda-ring")
    except UnavailableError as error:
        return str(error)
    finally:
        target._why_no_device.cache_clear()
    return ""


def test_without_numba_cuda_the_pip_line_is_said(monkeypatch):
    def version(name):
        if name == "numba-cuda":
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(target.metadata, "version", version)
    with pytest.raises(
        UnavailableError, match=r"^target cuda is not available: numba-cuda is not installed. pip install 'statedrift\[cuda\]'$"
    ):
        target.require_cuda("cuda")


@pytest.mark.parametrize("given", [False, OSError("libcuda.so: cannot open shared object file")])
def test_without_a_device_the_simulator_is_named(monkeypatch, given):
    said = answer(monkeypatch, NumbaCuda(given))
    assert said.startswith("target cuda-ring is not available: there is no CUDA device here, or no driver for it.")
    assert said.endswith("NUMBA_ENABLE_CUDASIM=1 simulates a device, for toy sizes")


def test_without_a_compiler_its_own_words_and_the_pip_line_are_said(monkeypatch):
    said = answer(monkeypatch, NumbaCuda(True, OSError("libnvrtc.so.13:\n no such file")))
    assert "cannot run a kernel on it (OSError: libnvrtc.so.13: no such file). pip install 'numba-cuda[cu13]'" in said


def test_with_all_of_it_nothing_is_said(monkeypatch):
    assert answer(monkeypatch, NumbaCuda(True)) == ""
