"""All tests: one thread for linear algebra. Toy models gain nothing from more, and threads that wait for each other cost much on a busy machine."""

import os
from collections.abc import Iterator

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")


@pytest.fixture(scope="module")
def one_fault_is_reduced_twice() -> Iterator[None]:
    """The canary has one fault; many reductions of what it explains only take time."""
    from statedrift.fuzz import known

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known, "EXPLAINED_REDUCTIONS_MAX", 2)
        yield
