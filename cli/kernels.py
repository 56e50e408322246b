"""`statedrift bench kernels`: our CPU kernels beside what the processor can do and beside other implementations, and whether the stated bounds hold.

Rules
- Everything is measured by one process of its own (kernel_bench/), which keeps every library to one thread from its start on.
- Status 1 when a stated bound fails, whatever the machine; 2 when nothing can be measured.
- `--check` says only whether results are right and every part runs: its times mean nothing, and no bound on a time is looked at.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from ..spec.errors import UnavailableError, UsageError
from ..targets.numba import require_numba
from . import failures
from .kernel_bench.results import Results
from .kernels_report import bounds_of, check_text, report_markdown, report_text
from .output import check_file, say, write_file
from .throughput import machine_facts

PACKAGES = ("statedrift", "numba", "llvmlite", "numpy", "torch", "llama-cpp-python")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "1")


def kernels_command(is_check: bool, write: Path | None) -> int:
    """Measure, print, and write Markdown when asked to; the answer is the exit status."""
    if is_check and write is not None:
        raise UsageError("--check measures no time worth writing; leave out --check or --write")
    check_file("--write", write)
    require_numba("numba")
    results = _measured(is_check)
    say(check_text(results) if is_check else report_text(results))
    if write is not None:
        facts = [*machine_facts(PACKAGES, "one used, two where it says so"), *results.facts]
        write_file("--write", write, report_markdown(results, facts))
    return failures.OK if all(bound.holds for bound in bounds_of(results)) else failures.DIVERGENCE


def _measured(is_check: bool) -> Results:
    """Run the measuring process. Raises UnavailableError when it does not come to its end."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, "-m", "statedrift.cli.kernel_bench", str(file), "short" if is_check else "full"]
        status = subprocess.run(command, env=os.environ | ONE_THREAD, stdout=subprocess.DEVNULL, check=False).returncode
        if status < 0:
            raise UnavailableError(f"the measuring process died of signal {-status}; the last line above says what it was at")
        if status != failures.OK:
            raise UnavailableError(f"the measuring process ended with status {status}; the last line above says why")
        return msgspec.json.decode(file.read_bytes(), type=Results)
