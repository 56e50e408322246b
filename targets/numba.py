"""The targets `numba` and `numba-ring`: statedrift's own caches and incremental models on the CPU.

Rules
- One code base, two policies of the recurrent side: strict (planes, guarantee `draft`) and ring (guarantee `any`).
- Nothing of Numba is imported before a session is opened or a version is asked: listing targets stays quick.
Source: statedrift/impl.
"""

from importlib import metadata

from ..spec.configuration import CacheConfiguration
from ..spec.errors import UnavailableError
from ..spec.families import FAMILIES
from ..spec.models import Model
from ..spec.target import Session, Undocumented


class NumbaTarget:
    """Policy strict. See `spec.target.Target`."""

    name = "numba"
    policy = "strict"
    isolated = False
    families: tuple[str, ...] = tuple(FAMILIES)
    poison = True
    undocumented: tuple[Undocumented, ...] = ()

    def version(self) -> str:
        """The versions of statedrift and Numba. Raises UnavailableError without a Numba that compiles."""
        require_numba(self.name)
        return f"statedrift {metadata.version('statedrift')}, numba {metadata.version('numba')}"

    def describe(self) -> str:
        """One line: what it is and what it runs on."""
        require_numba(self.name)
        import numba

        return f"own caches, policy {self.policy}; numba {numba.__version__}, CPU {_processor()}"

    def open(self, model: Model, configuration: CacheConfiguration) -> Session:
        """Open a session. Raises UnavailableError without Numba, UsageError for a model or configuration it cannot have."""
        require_numba(self.name)
        from ..impl.session import NumbaSession

        return NumbaSession(model, configuration)


class RingTarget(NumbaTarget):
    """Policy ring."""

    policy = "ring"

    def __init__(self, name: str, saves_snapshots: bool) -> None:
        """saves_snapshots: saves take along the states that a sequence can go back to."""
        self.name = name
        self._saves_snapshots = saves_snapshots

    def open(self, model: Model, configuration: CacheConfiguration) -> Session:
        """Open a session. Raises UnavailableError without Numba, UsageError for a model or configuration it cannot have."""
        require_numba(self.name)
        from ..impl.ring import RingCells
        from ..impl.session import NumbaSession

        return NumbaSession(model, configuration, RingCells, self._saves_snapshots)


def _processor() -> str:
    from llvmlite import binding  # type: ignore[import-untyped]

    return str(binding.get_host_cpu_name())


def require_numba(target: str) -> None:
    """For the target of this name: raise UnavailableError when Numba cannot be imported, or is told not to compile: our kernels call what only exists compiled."""
    try:
        import numba
    except ImportError as error:
        raise UnavailableError(f"target {target} is not available: {error}. pip install numba") from error
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # made when it is imported
        raise UnavailableError(f"target {target} is not available: NUMBA_DISABLE_JIT is set, and its kernels run only compiled; unset it")


TARGET = NumbaTarget()
RING = RingTarget("numba-ring", saves_snapshots=True)
RING_WITHOUT_SNAPSHOTS = RingTarget("numba-ring-without-snapshots", saves_snapshots=False)
