"""Which build of llama.cpp is installed here, where builds differ: the switches of the policy `llamacpp`, asked of the engine itself.

Rules
- The engine is asked in a process of its own: it may abort, and its library stays out of ours.
- Without an engine, or when it dies of a question, the switch keeps its default.
- A question is a few calls on a toy model, and one switch.
"""

import functools
import subprocess
import sys

import msgspec
import numpy as np

from ..impl.llamacpp.switches import Switches
from ..spec.configuration import CacheConfiguration
from ..spec.errors import UnavailableError
from ..spec.models import Model
from ..spec.operations import OPEN
from ..spec.target import Batch
from .llamacpp import TARGET

TIME_LIMIT_SECONDS = 60


@functools.cache
def probed_switches() -> Switches:
    """The switches of the engine that is installed here; the defaults without one."""
    command = [sys.executable, "-c", f"from {__name__} import print_switches; print_switches()"]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=TIME_LIMIT_SECONDS, check=False)
        return msgspec.json.decode(answer.stdout, type=Switches)
    except (subprocess.TimeoutExpired, OSError, msgspec.DecodeError):
        return Switches()


def print_switches() -> None:
    """In the process of its own: ask, and print the answer as JSON."""
    try:
        switches = Switches(refuses_shared_rollback=_refuses_shared_rollback())
    except UnavailableError:
        switches = Switches()
    sys.stdout.write(msgspec.json.encode(switches).decode())


def _refuses_shared_rollback() -> bool:
    """Whether the last token of a sequence cannot be taken back while another shares its state."""
    session = TARGET.open(Model("lfm2", 0), CacheConfiguration(n_seq_max=2, n_rs_seq=1))
    try:
        tokens = np.arange(3, dtype=np.int32)
        session.decode(Batch(tokens, tokens, ((0,),) * 3, np.array([False, False, True]), "last"))
        session.share(0, 1, OPEN, OPEN)
        return session.remove(0, 2, OPEN).word != "accepted"
    finally:
        session.close()
