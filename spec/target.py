"""What a target is: the one small protocol that everything that can be driven implements.

Rules
- A session is told, never asked to think: it does one call or says no. What may be asked of it is decided by the contract.
- An operation whose capability is not declared is never sent to the engine.
- A session leaves nothing changed when it refuses.
- Bad arguments (an id or token out of range) raise UsageError that names the argument; they never reach an engine.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

from .configuration import CacheConfiguration
from .models import Model
from .operations import Outputs
from .verdicts import Outcome

Guarantee = Literal["none", "draft", "any", "all"]
"""Which rollbacks a target must accept (docs/contract.md, "The rollback guarantee")."""


class Capabilities(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an open session can do.

    guarantee, n_rs_seq   which rollbacks it must accept; n_rs_seq as the engine really took it (0: no snapshots)
    n_batch               most tokens in one decode
    n_ctx                 attention cells a sequence (the pool is n_ctx * n_seq_max when unified); 0: no limit (a model without attention)
    coupled, cancel, shift, divide, save_all, partial, device, embeddings
                          the optional operations
    save                  a sequence can be saved and restored; False for a cache that has no such operation at all
    saves_snapshots       a restored sequence can go as far back as the saved one could (guarantee `any`)
    partial_share         share of a range
    inspect               shows its logical state rows
    recurrent, attention  the model has a recurrent layer, an attention layer
    windowed              the model has an attention window
    engine                the engine whose memory this is, "" when it is nobody else's. Two targets of one engine that are held to each other have
                          to agree in what is the engine's own affair, too: first positions, numbers of snapshots, the bytes of a saved state
    """

    guarantee: Guarantee
    n_rs_seq: int
    n_batch: int
    n_ctx: int
    recurrent: bool
    attention: bool
    windowed: bool = False
    coupled: bool = False
    cancel: bool = False
    shift: bool = False
    divide: bool = False
    save_all: bool = False
    partial: bool = False
    device: bool = False
    embeddings: bool = False
    partial_share: bool = False
    inspect: bool = False
    engine: str = ""
    saves_snapshots: bool = False
    save: bool = True


class Batch(msgspec.Struct, frozen=True):
    """One decode, token by token, in the order the engine is to see them.

    tokens, positions  int32 [n_tokens]
    sequences          for every token, the sequences it belongs to
    wanted             bool [n_tokens]: which tokens' output rows are asked for
    outputs            logits ("all", "last") or hidden states ("embeddings")
    """

    tokens: np.ndarray
    positions: np.ndarray
    sequences: tuple[tuple[int, ...], ...]
    wanted: np.ndarray
    outputs: Outputs


class Decoded(msgspec.Struct, frozen=True):
    """The answer to a decode: `rows` is float32 [wanted tokens, width] in batch order when accepted, else None."""

    outcome: Outcome
    rows: np.ndarray | None = None


class StateRow(msgspec.Struct, frozen=True):
    """One part of one sequence's logical state in one layer, float32, for inspection."""

    layer: int
    part: Literal["conv", "recurrent", "embedding", "attention", "index"]
    values: np.ndarray


@runtime_checkable
class Session(Protocol):
    """One opened cache. `remove` is every kind of forgetting: rollback, drop and ranges; `OPEN` is an open end."""

    capabilities: Capabilities

    def decode(self, batch: Batch) -> Decoded: ...
    def cancel(self, batch: Batch, at: int) -> Decoded: ...
    def remove(self, sequence: int, start: int, end: int) -> Outcome: ...
    def share(self, source: int, destination: int, start: int, end: int) -> Outcome: ...
    def keep(self, sequence: int) -> Outcome: ...
    def shift(self, sequence: int, delta: int) -> Outcome: ...
    def divide(self, sequence: int, divisor: int) -> Outcome: ...
    def save(self, sequence: int, partial: bool, device: bool) -> tuple[Outcome, bytes]: ...
    def restore(self, sequence: int, blob: bytes, partial: bool, device: bool) -> Outcome: ...
    def save_all(self) -> tuple[Outcome, bytes]: ...
    def restore_all(self, blob: bytes) -> Outcome: ...
    def clear(self, data: bool) -> Outcome:
        """Empty every sequence; `data` False leaves the bytes in memory as they are."""
        ...

    def positions(self) -> Sequence[tuple[int, int]]:
        """First and last position of every sequence, (-1, -1) when empty."""
        ...

    def inspect(self, sequence: int) -> Sequence[StateRow]: ...
    def close(self) -> None: ...


class Undocumented(msgspec.Struct, frozen=True):
    """A use that a target's own documentation does not promise, and the sentence it rests on."""

    use: Literal["share-onto-nonempty", "partial-share", "shift-of-shared", "divide", "small-ubatch", "foreign-partial-restore"]
    sentence: str


@runtime_checkable
class Target(Protocol):
    """A thing that can be driven.

    name        the word on the command line
    version     of the thing itself, for reports
    isolated    True: native code that can die; it is run in a child process
    families    the families it can run
    poison      honours `start=poison`
    undocumented  uses outside its own documentation
    """

    name: str
    isolated: bool
    families: tuple[str, ...]
    poison: bool
    undocumented: tuple[Undocumented, ...]

    def version(self) -> str: ...
    def describe(self) -> str:
        """One line for `statedrift targets`: which library, which build, where."""
        ...

    def open(self, model: Model, configuration: CacheConfiguration) -> Session:
        """Open a session. Raises UnavailableError when the target cannot be used here, UsageError for what it cannot open."""
        ...


@runtime_checkable
class HasBuilds(Protocol):
    """What an isolated target may offer besides: there are several builds of it, one a process, and the environment says which."""

    def environment_of(self, build: str) -> dict[str, str]:
        """The environment variables with which a child process drives this build, named as on the command line; values may be empty.

        Raises UsageError when there is none.
        """
        ...


@runtime_checkable
class IsSlow(Protocol):
    """What a target may say of itself: a token takes it so long that its noise is measured over fewer and shorter logs."""

    def noise_logs(self) -> tuple[int, int]:
        """How many logs, at least 2, and how many tokens the longest has."""
        ...


@runtime_checkable
class LoadsModels(Protocol):
    """What an isolated target may offer besides: a model is loaded before anything is opened, so that the workers forked afterwards find it."""

    def load(self, model: Model) -> None:
        """Load `model` and keep it for the sessions to come. It was opened once before, in a worker. It must start no thread: processes are
        forked afterwards. Raises as `open` does."""
        ...
