"""llama.cpp in its child process: what a worker's death leaves to the next one."""

import importlib.util
import sys
from pathlib import Path

import pytest
from statedrift.fuzz.execution import Run
from statedrift.fuzz.sandbox import Sandbox
from statedrift.spec.programs import parse_program

if importlib.util.find_spec("llama_cpp") is None:
    pytest.skip("needs llama-cpp-python, which is not installed", allow_module_level=True)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_the_worker_after_a_death_has_the_model_and_no_thread_was_started_for_it() -> None:
    sandbox = Sandbox("llamacpp")
    nursery, worker = sandbox.processes
    threads = Path(f"/proc/{nursery}/task")
    program = parse_program("model lfm2 seed=0; cache start=dirty; decode 0:7 1:2; share 0 2; decode 0:1 2:3")
    before, count = sandbox.run([program]), len(list(threads.iterdir()))
    sandbox.renew_worker()
    after = sandbox.run([program])
    assert sandbox.processes[0] == nursery != sandbox.processes[1] != worker
    assert len(list(threads.iterdir())) == count
    assert isinstance(before[0], Run)
    assert after == before
    sandbox.close()
