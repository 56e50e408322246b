"""A plain cache as a target: a session that has in it what such a cache does not, and a target of which nothing is known but how it is opened.

Rules
- `PlainSession` asks a cache for four things in its own words (append, length, drop, copy) and puts the calls of the protocol into them. It
  keeps nothing: what a cache answers, wrong or right, is the cache's own.
- What it does not offer is not declared, and never asked of it. A subclass offers more by having the method (`save` and `restore`, `inspect`)
  or by changing `capabilities`.
- A class or function that opens sessions is a target; what more there is to say of it, it says by attributes of the target's names.
Source: spec/target.py; docs/targets.md.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from ..spec.configuration import CacheConfiguration
from ..spec.errors import UsageError
from ..spec.families import FAMILIES, dimensions_of, family_of
from ..spec.models import Model
from ..spec.operations import OPEN
from ..spec.target import Batch, Capabilities, Decoded, Guarantee, Session, StateRow, Target, Undocumented
from ..spec.verdicts import ACCEPTED, Outcome, refused

N_BATCH = 4096

Opener = Callable[[Model, CacheConfiguration], Session]
"""Opens a session: a session's class, or a function."""


class PlainSession:
    """What a cache of one state a sequence inherits; it has `append`, `length`, `drop` and `copy`, and `rollback` if it can go back.

    families   those that the cache runs
    guarantee  which rollbacks it promises (docs/contract.md); what it does beyond is checked, too. `draft` and `any` promise as many tokens
               as the program's `n_rs_seq` says
    isolated   True: native code that can die or hang; it is run in a child process
    `__init__` sets `capabilities`: no limit of tokens, the guarantee, and `save` where the class has one.
    """

    families: Sequence[str] = tuple(FAMILIES)
    guarantee: Guarantee = "none"
    isolated = False

    def __init__(self, model: Model, configuration: CacheConfiguration) -> None:
        """Raises UsageError for a family that the class does not name."""
        if model.family not in self.families:
            raise UsageError(f"{type(self).__name__} runs {', '.join(self.families)}, not {model.family}")
        family, dimensions = family_of(model), dimensions_of(model)
        self.n_seq_max, self.n_vocab = configuration.n_seq_max, dimensions["n_vocab"]
        self.capabilities = Capabilities(
            guarantee=self.guarantee, n_rs_seq=configuration.n_rs_seq if self.guarantee in ("draft", "any") else 0, n_batch=N_BATCH, n_ctx=0,
            recurrent=bool(family.recurrent_layers(dimensions)), attention=bool(family.attention_layers(dimensions)),
            windowed=bool(family.attention_window(dimensions)),
            save=type(self).save is not PlainSession.save, inspect=type(self).inspect is not PlainSession.inspect,
        )  # fmt: skip

    # --- what a cache has ------------------------------------------------------------------------------------------------

    def append(self, sequence: int, tokens: np.ndarray) -> np.ndarray:
        """Take int32 [tokens] at the end of a sequence; the answer is float32 [tokens, n_vocab], the logits after each."""
        raise NotImplementedError

    def length(self, sequence: int) -> int:
        """How many tokens the sequence has taken."""
        raise NotImplementedError

    def drop(self, sequence: int) -> None:
        """Empty a sequence."""
        raise NotImplementedError

    def copy(self, source: int, destination: int) -> None:
        """Make `destination` an independent copy of `source`, another sequence, whatever it held."""
        raise NotImplementedError

    def rollback(self, sequence: int, token_count: int) -> bool:
        """Take back the newest tokens, some but not all; False, and nothing changed, where the cache cannot."""
        return False

    # --- the calls, in those words ----------------------------------------------------------------------------------------

    def _checked(self, sequence: int) -> int:
        if not 0 <= sequence < self.n_seq_max:  # -1 would be the last one in Python
            raise UsageError(f"`sequence` must be from 0 to {self.n_seq_max - 1}, not {sequence}")
        return sequence

    def decode(self, batch: Batch) -> Decoded:
        """Neighbouring tokens of one sequence are appended together. Raises UsageError for a bad token or sequence, before any is taken."""
        if not np.all((batch.tokens >= 0) & (batch.tokens < self.n_vocab)):
            raise UsageError(f"`tokens` must be from 0 to {self.n_vocab - 1}")
        owners = [self._checked(sequence) for (sequence,) in batch.sequences]  # tokens of several sequences are not declared
        rows, start = [], 0
        for sequence, run in groupby(owners):
            end = start + len(list(run))
            given = np.asarray(self.append(sequence, batch.tokens[start:end]), np.float32)
            if given.shape != (end - start, self.n_vocab):
                raise ValueError(f"append gave rows {given.shape} instead of {(end - start, self.n_vocab)}")
            rows.append(given)
            start = end
        return Decoded(ACCEPTED, np.concatenate(rows)[batch.wanted])

    def remove(self, sequence: int, start: int, end: int) -> Outcome:
        """A range of positions, which are the tokens' indices: nothing, a rollback, everything, or a refusal."""
        length = self.length(self._checked(sequence))
        first, beyond = max(start, 0), length if end == OPEN else min(end, length)
        if first >= beyond:
            return ACCEPTED
        if beyond < length:
            return refused("only the newest tokens can be taken back")
        if first == 0:
            self.drop(sequence)
            return ACCEPTED
        return ACCEPTED if self.rollback(sequence, length - first) else refused(f"cannot take back {length - first}")

    def share(self, source: int, destination: int, start: int, end: int) -> Outcome:
        """The whole of `source`: shares of a range are not declared."""
        if self._checked(source) != self._checked(destination):
            self.copy(source, destination)
        return ACCEPTED

    def keep(self, sequence: int) -> Outcome:
        for other in range(self.n_seq_max):
            if other != self._checked(sequence):
                self.drop(other)
        return ACCEPTED

    def clear(self, data: bool) -> Outcome:
        for sequence in range(self.n_seq_max):
            self.drop(sequence)
        return ACCEPTED

    def positions(self) -> Sequence[tuple[int, int]]:
        lengths = [self.length(sequence) for sequence in range(self.n_seq_max)]
        return [(0, length - 1) if length else (-1, -1) for length in lengths]

    def close(self) -> None:
        """Free what has to be freed; here nothing."""

    # --- what is not declared -----------------------------------------------------------------------------------------------

    def cancel(self, batch: Batch, at: int) -> Decoded:
        raise NotImplementedError

    def shift(self, sequence: int, delta: int) -> Outcome:
        raise NotImplementedError

    def divide(self, sequence: int, divisor: int) -> Outcome:
        raise NotImplementedError

    def save(self, sequence: int, partial: bool, device: bool) -> tuple[Outcome, bytes]:
        raise NotImplementedError

    def restore(self, sequence: int, blob: bytes, partial: bool, device: bool) -> Outcome:
        raise NotImplementedError

    def save_all(self) -> tuple[Outcome, bytes]:
        raise NotImplementedError

    def restore_all(self, blob: bytes) -> Outcome:
        raise NotImplementedError

    def inspect(self, sequence: int) -> Sequence[StateRow]:
        raise NotImplementedError


class OpenedTarget:
    """A target that is only known by how its sessions are opened. See `spec.target.Target`.

    opener  a session's class or a function; its attributes `families`, `isolated`, `poison`, `undocumented` and `version` (text) count,
            where it has them, else every family of ours, and no for the rest
    """

    def __init__(self, opener: Opener) -> None:
        self.opener = opener
        self.name: str = getattr(opener, "__name__", type(opener).__name__)
        self.families: tuple[str, ...] = tuple(getattr(opener, "families", FAMILIES))
        self.isolated: bool = bool(getattr(opener, "isolated", False))
        self.poison: bool = bool(getattr(opener, "poison", False))
        self.undocumented: tuple[Undocumented, ...] = tuple(getattr(opener, "undocumented", ()))

    def version(self) -> str:
        return str(getattr(self.opener, "version", "in development"))

    def describe(self) -> str:
        return f"{getattr(self.opener, '__module__', '?')}, {self.name}"

    def open(self, model: Model, configuration: CacheConfiguration) -> Session:
        return self.opener(model, configuration)


def as_target(value: object) -> Target | None:
    """The target that a value is, or makes: a target itself, a class of sessions, or a function that opens them; None for anything else."""
    if isinstance(value, type):
        return OpenedTarget(value) if hasattr(value, "decode") and hasattr(value, "positions") else None
    if isinstance(value, Target):
        return value
    return OpenedTarget(value) if callable(value) else None
