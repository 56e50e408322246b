"""The target `numba-llamacpp`: llama.cpp's memory, fault for fault, over statedrift's own kernels.

Rules
- It is held to the engine, not to the contract: `statedrift fuzz --target numba-llamacpp --against llamacpp`.
- Its switches are those of the engine that is installed here, found by a probe; without one they are the defaults.
- Where the engine would abort it raises EngineAbort, which is the outcome `crash`.
Source: statedrift/impl/llamacpp.
"""

from importlib import metadata

from ..impl.llamacpp.architectures import ARCHITECTURES
from ..spec.configuration import CacheConfiguration
from ..spec.errors import UsageError
from ..spec.models import Model
from ..spec.target import Session, Undocumented
from .llamacpp import TARGET as ENGINE
from .numba import require_numba


class NumbaLlamaTarget:
    """See `spec.target.Target`."""

    name = "numba-llamacpp"
    isolated = False
    families: tuple[str, ...] = tuple(name for name in ENGINE.families if name in ARCHITECTURES)
    poison = False
    undocumented: tuple[Undocumented, ...] = ENGINE.undocumented

    def version(self) -> str:
        """The version of statedrift, and the switches that are not at their default."""
        require_numba(self.name)
        from .llama_probe import probed_switches

        switches = probed_switches()
        differing = [name for name in switches.__struct_fields__ if getattr(switches, name) != getattr(type(switches)(), name)]
        return f"statedrift {metadata.version('statedrift')}" + "".join(f", {name}" for name in differing)

    def describe(self) -> str:
        """One line: what it is and what it runs on."""
        require_numba(self.name)
        return "own caches, policy llamacpp: llama.cpp's memory fault for fault"

    def open(self, model: Model, configuration: CacheConfiguration) -> Session:
        """Open a session. Raises UnavailableError without Numba, UsageError for a model or configuration it cannot have."""
        require_numba(self.name)
        if model.family not in self.families:
            raise UsageError(f"target numba-llamacpp does not run family `{model.family}`; it runs {', '.join(self.families)}")
        from ..impl.llamacpp.session import LlamaPolicySession
        from .llama_probe import probed_switches

        return LlamaPolicySession(model, configuration, probed_switches())


TARGET = NumbaLlamaTarget()
