"""Ctrl-C, SIGTERM and SIGHUP end a campaign within two seconds, with its summary on disk and nothing left running, whatever it is doing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from statedrift.store.campaigns import read_campaign

from tests.processes import descendants, wait_until_gone

TESTS = Path(__file__).resolve().parents[1]
CANARY = "statedrift.fuzz.canary:FREQUENT"
SECONDS_MAX = 2.0 * float(os.environ.get("STATEDRIFT_TEST_PATIENCE", "1"))
"""A machine that does other things at the same time needs more patience."""

SCRIPT = """
import contextlib, signal, sys
from statedrift import cli
from statedrift.cli import fuzzing, progress

@contextlib.contextmanager
def told():
    yield progress.Shown(lambda at: print(at.phase, at.programs, flush=True), lambda statistics: None)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit that it is ignored
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fuzzing.shown_progress = told
    sys.exit(cli.main())
"""
"""The command, with a line of progress for every step."""


def has_begun(line: str, phase: str) -> bool:
    name, _, programs = line.partition(" ")
    return name == phase and (phase != "fuzzing" or int(programs) > 0)


@pytest.mark.parametrize(
    ("number", "target", "jobs", "profile", "phase"),
    [
        (signal.SIGTERM, CANARY, 1, "swarm", "reducing"),
        (signal.SIGHUP, CANARY, 2, "swarm", "reducing"),
        (signal.SIGINT, "numba", 2, "soak", "fuzzing"),
        (signal.SIGTERM, "numba", 1, "soak", "fuzzing"),
        (signal.SIGINT, "llamacpp", 1, "soak", "fuzzing"),
        (signal.SIGTERM, "llamacpp", 2, "swarm", "reducing"),
    ],
)
def test_a_signal_ends_a_campaign_with_its_summary(
    number: signal.Signals, target: str, jobs: int, profile: str, phase: str, tmp_path: Path
) -> None:
    if target == "llamacpp":
        pytest.importorskip("llama_cpp")
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["fuzz", "--target", target, "--family", "lfm2", "--seconds", "300"]
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", *words, "--jobs", str(jobs), "--profile", profile, "--out", tmp_path / "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    try:
        while not has_begun(process.stdout.readline().strip(), phase):
            assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.3)
        children = descendants(process.pid)
        asked = time.monotonic()
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        output, errors = process.communicate(timeout=60)
        took = time.monotonic() - asked
    finally:
        process.kill()
    assert (process.returncode, errors) == (0 if target == "numba" else 1, "")
    assert "stopped before its end" in output
    assert took <= SECONDS_MAX, f"it took {took:.2f} s"
    assert wait_until_gone(children, 5.0) == set()
    assert not read_campaign(tmp_path / "run").account.complete
