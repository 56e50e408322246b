"""Processes as the system shows them: those below one, and waiting until they are gone."""

import time
from pathlib import Path


def descendants(process: int) -> set[int]:
    """The processes below one that still run."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(folder.name)] = int(fields[1])
    found = {process}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return found - {process}


def wait_until_gone(processes: set[int], seconds: float) -> set[int]:
    """The processes that are left after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := {pid for pid in processes if Path(f"/proc/{pid}/exe").exists()}) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
