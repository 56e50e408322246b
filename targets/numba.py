"""The target `numba`: statedrift's own strict caches and incremental models on the CPU.

Rules
- Nothing of Numba is imported before a session is opened or a version is asked: listing targets stays quick.
Source: statedrift/impl.
"""

from importlib import metadata

from ..spec.configuration import CacheConfiguration
from ..spec.errors import UnavailableError
from ..spec.models import Model
from ..spec.target import Session, Undocumented


class NumbaTarget:
    """See `spec.target.Target`."""

    name = "numba"
    isolated = False
    families: tuple[str, ...] = ("mamba2", "lfm2", "nemotron_h", "qwen35")
    poison = True
    undocumented: tuple[Undocumented, ...] = ()

    def version(self) -> str:
        """The versions of statedrift and Numba."""
        return f"statedrift {metadata.version('statedrift')}, numba {metadata.version('numba')}"

    def describe(self) -> str:
        """One line: what it is and what it runs on."""
        _require_numba()
        import numba

        return f"own caches, policy strict; numba {numba.__version__}, CPU {_processor()}"

    def open(self, model: Model, configuration: CacheConfiguration) -> Session:
        """Open a session. Raises UnavailableError without Numba, UsageError for a model or configuration it cannot have."""
        _require_numba()
        from ..impl.session import NumbaSession

        return NumbaSession(model, configuration)


def _processor() -> str:
    from llvmlite import binding  # type: ignore[import-untyped]

    return str(binding.get_host_cpu_name())


def _require_numba() -> None:
    try:
        import numba  # noqa: F401
    except ImportError as error:
        raise UnavailableError(f"target numba is not available: {error}. pip install numba") from error


TARGET = NumbaTarget()
