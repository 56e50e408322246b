"""Run a finding's repro.py as somebody would who has never heard of statedrift."""

import os
import subprocess
import sys
from pathlib import Path


def run_script(script: Path, blocked: tuple[str, ...] = ("statedrift",)) -> subprocess.CompletedProcess[str]:
    """Run a script where the modules `blocked` cannot be imported."""
    hidden = script.parent / "hidden"
    hidden.mkdir(exist_ok=True)
    for module in blocked:
        (hidden / f"{module}.py").write_text(f"raise ImportError('there is no {module} here')\n")
    environment = os.environ | {"PYTHONPATH": str(hidden)}
    return subprocess.run(
        [sys.executable, "-P", script.name], cwd=script.parent, env=environment, capture_output=True, text=True, timeout=120
    )
