"""What Numba's simulator lacks: exchanges between the lanes of a warp.

Rules
- For tests and toy sizes. All threads of a block have to come to an exchange together, and a block is one warp.
- Threads are Python threads that wait for each other: handing over between them is made quick, for it is most of what a simulation costs.
Source: numba-cuda's simulator, kernelapi.FakeCUDAModule; CUDA C++ Programming Guide, warp shuffle functions.
"""

import sys
import threading
from typing import Any

import numpy as np

WARP_LANES = 32
_SWITCH_SECONDS = 5e-5


def install() -> None:
    """Give the simulator `cuda.shfl_xor_sync`, once."""
    from numba.cuda.simulator import kernelapi

    module = kernelapi.FakeCUDAModule
    if not hasattr(module, "shfl_xor_sync"):
        sys.setswitchinterval(_SWITCH_SECONDS)
        module.shfl_xor_sync = _shfl_xor_sync


def _shfl_xor_sync(module: Any, mask: int, value: Any, lane_mask: int) -> Any:
    """The value that the lane whose number differs in the bits of `lane_mask` gave."""
    thread: Any = threading.current_thread()
    given = _board(thread)
    lane = thread.thread_id
    given[lane] = value
    thread.syncthreads()
    taken = given[lane ^ int(lane_mask)]
    thread.syncthreads()
    return np.float32(taken)


def _board(thread: Any) -> list[Any]:
    """Where the threads of a block lay down what they exchange; it belongs to the block."""
    board: list[Any] = vars(thread._manager).setdefault(
        "statedrift_board", [np.float32(np.nan)] * WARP_LANES
    )  # one for all, whoever comes first
    return board
