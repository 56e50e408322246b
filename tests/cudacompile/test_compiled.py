"""CUDA kernels as they are compiled: no spills, no stack, no float64, whole vectors in the scans, few registers."""

import pytest

from tests.cudacompile.compiling import ARCHITECTURES, compiled, missing_tool
from tests.cudacompile.launches import other_launches, scan_launches

pytestmark = pytest.mark.skipif(bool(missing_tool()), reason=missing_tool() or "compiles")

SCAN_REGISTERS_MAX = 168
"""Three blocks of 128 threads on a processor's 65,536 registers."""
OTHER_REGISTERS_MAX = 64


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("name", "launch"), [pytest.param(*case, id=case[0]) for case in ([] if missing_tool() else scan_launches())])
def test_a_scan_keeps_its_state_in_registers(name, launch, architecture):
    found = compiled(name, launch, architecture)
    assert (found.stack_bytes, found.spill_bytes, found.doubles) == (0, 0, 0)
    assert found.registers <= SCAN_REGISTERS_MAX
    if not name.startswith("causal_convolution"):  # its threads have one channel each
        assert found.vector_loads > 0
        assert found.vector_stores > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("name", "launch"), [pytest.param(*case, id=case[0]) for case in ([] if missing_tool() else other_launches())])
def test_any_other_kernel_spills_nothing(name, launch, architecture):
    found = compiled(name, launch, architecture)
    assert (found.stack_bytes, found.spill_bytes, found.doubles) == (0, 0, 0)
    assert found.registers <= OTHER_REGISTERS_MAX
