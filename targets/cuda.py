"""The targets `cuda` and `cuda-ring`: statedrift's own caches with states and models on a CUDA device.

Rules
- One code base with target numba, on the other side of the bus: targets/cuda_session.py.
- Without a device they run in Numba's simulator, when NUMBA_ENABLE_CUDASIM=1 says so: thread by thread, for toy sizes.
- Nothing of Numba is imported before a session is opened or a version is asked.
"""

import functools
import warnings
from importlib import metadata
from typing import Any

from ..spec.configuration import CacheConfiguration
from ..spec.errors import UnavailableError
from ..spec.families import FAMILIES
from ..spec.models import Model
from ..spec.target import Session, Undocumented
from .numba import require_numba


class CudaTarget:
    """One policy on a device. See `spec.target.Target`."""

    isolated = False
    families: tuple[str, ...] = tuple(FAMILIES)
    poison = True
    undocumented: tuple[Undocumented, ...] = ()

    def __init__(self, name: str, policy: str, saves_snapshots: bool) -> None:
        """policy: strict or ring; saves_snapshots: saves take along the states that a sequence can go back to."""
        self.name = name
        self._policy = policy
        self._saves_snapshots = saves_snapshots

    def version(self) -> str:
        """The versions of statedrift and Numba-CUDA, and the device, whose rounding is its own. Raises UnavailableError without a device and
        without the simulator."""
        place = _place(require_cuda(self.name))
        return f"statedrift {metadata.version('statedrift')}, numba-cuda {metadata.version('numba-cuda')}, {place}"

    def describe(self) -> str:
        """One line: what it is and what it runs on."""
        return f"own caches, policy {self._policy}; {_place(require_cuda(self.name))}"

    def noise_logs(self) -> tuple[int, int]:
        """A simulation takes a tenth of a second a token."""
        from numba import cuda

        return (3, 24) if cuda.config.ENABLE_CUDASIM else (200, 200)

    def open(self, model: Model, configuration: CacheConfiguration) -> Session:
        """Open a session. Raises UnavailableError without a device, UsageError for a model or configuration it cannot have."""
        require_cuda(self.name)
        from ..impl.cells import StrictCells
        from ..impl.ring import RingCells
        from .cuda_session import CudaSession

        return CudaSession(model, configuration, RingCells if self._policy == "ring" else StrictCells, self._saves_snapshots)


def require_cuda(target: str) -> Any:
    """`numba.cuda`, for the target of this name. Raises UnavailableError when it can neither use a device nor simulate one."""
    require_numba(target)
    try:
        metadata.version("numba-cuda")
        from numba import cuda
    except (ImportError, metadata.PackageNotFoundError):
        raise UnavailableError(f"target {target} is not available: numba-cuda is not installed. pip install 'statedrift[cuda]'") from None
    if not cuda.config.ENABLE_CUDASIM:
        reason = _why_no_device(cuda)
        if reason:
            raise UnavailableError(f"target {target} is not available: {reason}. NUMBA_ENABLE_CUDASIM=1 simulates a device, for toy sizes")
    return cuda


@functools.cache
def _why_no_device(cuda: Any) -> str:
    """What keeps kernels from running on a device, or "" when nothing does."""
    try:
        has_device = cuda.cudadrv.driver.driver.is_available
    except Exception:  # what a driver that is half there raises is no answer for people
        has_device = False
    if not has_device:
        return "there is no CUDA device here, or no driver for it"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a kernel that makes little use of the device
            cuda.jit(_nothing)[1, 1]()
            cuda.synchronize()
    except Exception as error:  # a part of the toolkit that is missing, too old or too new; it says which
        said = " ".join(str(error).split())[:160]
        return (
            f"there is a CUDA device, but numba-cuda cannot run a kernel on it ({type(error).__name__}: {said}). "
            "pip install 'numba-cuda[cu13]', or [cu12] for a driver of CUDA 12, brings the compiler"
        )
    return ""


def _nothing() -> None:
    pass


def _place(cuda: Any) -> str:
    if cuda.config.ENABLE_CUDASIM:
        return "simulated device"
    device = cuda.get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    return f"{name}, compute capability {'.'.join(map(str, device.compute_capability))}"


TARGET = CudaTarget("cuda", "strict", saves_snapshots=False)
RING = CudaTarget("cuda-ring", "ring", saves_snapshots=True)
