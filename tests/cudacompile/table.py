"""`python -m tests.cudacompile.table [FILE]`: what every CUDA kernel uses when it is compiled, as a page (benchmarks/cuda-compile.md)."""

import sys
from importlib.metadata import version
from pathlib import Path

from statedrift.cli.throughput import markdown_table

from tests.cudacompile.compiling import ARCHITECTURES, Compiled, compiled, missing_tool, tool_version
from tests.cudacompile.launches import other_launches, scan_launches

HEAD = """# CUDA kernels as they are compiled

Written by `python -m tests.cudacompile.table benchmarks/cuda-compile.md`; `pytest tests/cudacompile` holds them to it: no spills, no stack, no
float64, and vectors of 16 bytes where a scan reads and writes states. Nothing here was run on a device: it says what kernels use, not how fast
they are. Registers are of a thread; a scan's are its part of a state (64 numbers) and what it takes to walk.

numba-cuda {numba_cuda}, {ptxas}
"""
COLUMNS = ["kernel", "for", "registers", "stack", "spilled", "float64", "16-byte loads", "16-byte stores"]


def row(name: str, used: Compiled) -> list[str]:
    numbers = (used.registers, used.stack_bytes, used.spill_bytes, used.doubles, used.vector_loads, used.vector_stores)
    return [name, used.architecture, *map(str, numbers)]


def page() -> str:
    """The page. Raises RuntimeError where nothing can be compiled."""
    if missing_tool():
        raise RuntimeError(missing_tool())
    scans = [row(name, compiled(name, launch, architecture)) for name, launch in scan_launches() for architecture in ARCHITECTURES]
    others = [row(name, compiled(name, launch, architecture)) for name, launch in other_launches() for architecture in ARCHITECTURES]
    head = HEAD.format(numba_cuda=version("numba-cuda"), ptxas=tool_version())
    return f"{head}\n## Scans and convolutions\n\n{markdown_table(COLUMNS, scans)}\n\n## The others\n\n{markdown_table(COLUMNS, others)}\n"


if __name__ == "__main__":
    text = page()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)
    else:
        print(text, end="")
