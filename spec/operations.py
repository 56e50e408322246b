"""Operations: everything that can be done to a recurrent-state cache, as frozen, tagged data.

Rules
- An operation says what is asked for, never how a target does it, and holds no behaviour.
- Sequence ids are 0..n_seq_max-1; positions count from 0; an open end is `OPEN`.
- Functions that act on operations use one `match` and name every case.
Source: shared contract of this project (docs/contract.md) and llama.h's llama_memory_* and llama_state_* calls.
"""

from typing import Literal

import msgspec

OPEN = -1
"""An open end of a position range."""

Outputs = Literal["all", "last", "embeddings"]
"""Which output rows a decode asks for: logits of every token, of each sequence's last token, or the
final-norm hidden states of every token."""


class Operation(msgspec.Struct, frozen=True, tag_field="op", forbid_unknown_fields=True):
    """The common base of all operations: it adds only the tag."""


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Some tokens for one sequence, or the same tokens for several (a coupled item).

    Either `tokens` is given, or `token_count` tokens are a fixed function of the lowest sequence, the index in its log and `salt`.
    """

    sequences: tuple[int, ...]
    token_count: int
    salt: int = 0
    tokens: tuple[int, ...] | None = None


class Decode(Operation, frozen=True, tag="decode", omit_defaults=True):
    """One batch; a sequence may occur in several items, which append in order."""

    items: tuple[Item, ...]
    outputs: Outputs | None = None  # None: the cache configuration's


class Cancel(Operation, frozen=True, tag="cancel"):
    """A decode that is aborted while it runs, at the `at`-th chance the engine gives (counted from 0)."""

    items: tuple[Item, ...]
    at: int


class Rollback(Operation, frozen=True, tag="rollback"):
    """Take back the newest `token_count` tokens of `sequence`; at least the log's length means drop."""

    sequence: int
    token_count: int


class Remove(Operation, frozen=True, tag="remove"):
    """Remove positions `start` up to, not including, `end` of `sequence`."""

    sequence: int
    start: int
    end: int


class Drop(Operation, frozen=True, tag="drop"):
    """Remove everything of `sequence`."""

    sequence: int


class Share(Operation, frozen=True, tag="share", omit_defaults=True):
    """Make `destination` a copy of `source`, wholly, or (0 <= start) of its positions start..end-1."""

    source: int
    destination: int
    start: int = OPEN
    end: int = OPEN


class Keep(Operation, frozen=True, tag="keep"):
    """Empty every sequence but this one."""

    sequence: int


class Shift(Operation, frozen=True, tag="shift"):
    """Move every position of `sequence` by `delta`."""

    sequence: int
    delta: int


class Divide(Operation, frozen=True, tag="divide"):
    """Divide every position of `sequence` by `divisor`."""

    sequence: int
    divisor: int


class Save(Operation, frozen=True, tag="save", omit_defaults=True):
    """Save `sequence` under the name `slot`: whole, or only its recurrent part (`partial`), on the host or on the `device`."""

    sequence: int
    slot: str
    partial: bool = False
    device: bool = False


class Restore(Operation, frozen=True, tag="restore"):
    """Restore what `slot` holds into `sequence`; its kind is the slot's."""

    slot: str
    sequence: int


class SaveAll(Operation, frozen=True, tag="save_all"):
    """Save the whole session under the name `slot`."""

    slot: str


class RestoreAll(Operation, frozen=True, tag="restore_all"):
    """Restore the whole session from `slot`."""

    slot: str


class Damage(Operation, frozen=True, tag="damage", omit_defaults=True):
    """Damage what `slot` holds.

    truncate: drop the last `amount` bytes; flip: flip the lowest bit of byte `amount`; header: the first 16 bytes become 0xFF;
    foreign: replace it with the same save of a model of the same family and doubled width.
    """

    slot: str
    how: Literal["truncate", "flip", "header", "foreign"]
    amount: int = 0


class Clear(Operation, frozen=True, tag="clear"):
    """Empty every sequence."""


class Reopen(Operation, frozen=True, tag="reopen", omit_defaults=True):
    """Close the session and open a new one of the same model, with changed cache keys; saved slots survive."""

    changes: dict[str, int | str] = {}


AnyOperation = (
    Decode
    | Cancel
    | Rollback
    | Remove
    | Drop
    | Share
    | Keep
    | Shift
    | Divide
    | Save
    | Restore
    | SaveAll
    | RestoreAll
    | Damage
    | Clear
    | Reopen
)

OPERATION_NAMES: tuple[str, ...] = (
    "decode", "cancel", "rollback", "remove", "drop", "share", "keep", "shift", "divide",
    "save", "restore", "save_all", "restore_all", "damage", "clear", "reopen",
)  # fmt: skip


def operation_name(operation: AnyOperation) -> str:
    """The operation's word in program text, e.g. "save_all"."""
    return str(operation.__struct_config__.tag)


def sequences_of(operation: AnyOperation) -> frozenset[int]:
    """The sequences that the operation names; empty when it concerns the whole session."""
    match operation:
        case Decode(items=items) | Cancel(items=items):
            return frozenset().union(*[item.sequences for item in items])
        case Share(source=source, destination=destination):
            return frozenset((source, destination))
        case Rollback() | Remove() | Drop() | Keep() | Shift() | Divide() | Save() | Restore():
            return frozenset((operation.sequence,))
        case SaveAll() | RestoreAll() | Damage() | Clear() | Reopen():
            return frozenset()
