"""All tests: one thread for linear algebra. Toy models gain nothing from more, and threads that wait for each other cost much on a busy machine."""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
