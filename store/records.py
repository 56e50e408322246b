"""What is kept of every program: packed arrays, a row of the database for each shard.

Rules
- A row is written in its shard's own transaction, so that it is there exactly when the shard counts. Of a program some fifteen bytes are kept.
- Numbers stand for words by their place in `KINDS`, `OPERATIONS` and `ANSWERS`. Those are part of the format: new words go to their ends.
- All but `seconds` is the same for one job, several, and a cluster.
- Numbers are little-endian.
"""

import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

KINDS = (
    "ok", "wrong-output", "wrong-state", "wrong-position", "bad-refusal", "false-success", "partial-effect", "nonfinite",
    "crash", "hang", "unknown", "harness-error",
)  # fmt: skip
"""Kinds of verdicts (spec/verdicts.py)."""
OPERATIONS = (
    "decode", "cancel", "rollback", "remove", "drop", "share", "keep", "shift", "divide", "save", "restore", "save_all", "restore_all",
    "damage", "clear", "reopen",
)  # fmt: skip
"""Operations of programs (spec/operations.py)."""
ANSWERS = ("accepted", "refused", "cancelled", "skipped", "error", "crash", "hang")
"""Words of outcomes (spec/verdicts.py)."""
BIN_COUNT = 32
"""Bin b counts rows with tolerance / 2^(b+1) < error <= tolerance / 2^b; the last one all that are smaller, 0 included."""


class Summary(NamedTuple):
    """What came of some programs of one family, one after the other.

    kinds       uint8 [programs], place in KINDS
    operations  uint16 [programs], that were reached
    accepted    uint16 [programs], of these
    errors      float32 [programs], the error that decided, or of the nearest row; NaN where no row was compared, or the row was not finite
    tolerances  float32 [programs], what was allowed; NaN where nothing was compared
    answers     uint32 [OPERATIONS, ANSWERS], how often an operation was answered so
    distances   uint32 [BIN_COUNT], rows of programs that were right, by how far they are under their tolerance
    """

    kinds: bytes
    operations: bytes
    accepted: bytes
    errors: bytes
    tolerances: bytes
    answers: bytes
    distances: bytes


class ShardRecord(msgspec.Struct, frozen=True):
    """What is kept of a shard.

    position    programs that were merged before it
    shard       its number, and that of the first of its programs in it: with the campaign's seed they can be drawn again
    programs    how many
    seconds     of the campaign when it was merged (for people; the one thing that depends on the machine)
    cells       of the campaign that were reached by then, with it
    signatures  findings that the campaign had by then, without what this shard leads to
    divergent   which of the programs diverged (their number among these, from 0), and the coarse signature, both in text
    """

    position: int
    shard: int
    first: int
    family: str
    programs: int
    seconds: float
    cells: int
    signatures: int
    divergent: str
    kinds: bytes
    operations: bytes
    accepted: bytes
    errors: bytes
    tolerances: bytes
    answers: bytes
    distances: bytes


COLUMNS = ", ".join(ShardRecord.__struct_fields__)
_ITEM_BYTES = {"kinds": 1, "operations": 2, "accepted": 2, "errors": 4, "tolerances": 4}


def divergent_text(divergent: Iterator[tuple[int, str]]) -> str:
    """Numbers and coarse signatures of divergent programs as text, a line each."""
    return "\n".join(f"{number} {signature}" for number, signature in divergent)


def divergent_of(record: ShardRecord) -> Iterator[tuple[int, str]]:
    """The same, read back; lines that are none are left out."""
    for line in record.divergent.splitlines():
        number, _, signature = line.partition(" ")
        if number.isdecimal() and int(number) < record.programs:
            yield int(number), signature


def put_records(connection: sqlite3.Connection, records: tuple[ShardRecord, ...]) -> None:
    """Write records, within the caller's transaction."""
    places = ", ".join("?" * len(ShardRecord.__struct_fields__))
    rows = [tuple(getattr(record, name) for name in ShardRecord.__struct_fields__) for record in records]
    connection.executemany(f"INSERT OR REPLACE INTO shards ({COLUMNS}) VALUES ({places})", rows)


def read_records(connection: sqlite3.Connection) -> tuple[ShardRecord, ...]:
    """All records, in the order of the programs. Raises ValueError, naming the shard, for one whose arrays are not as long as they should be."""
    records = tuple(ShardRecord(*row) for row in connection.execute(f"SELECT {COLUMNS} FROM shards ORDER BY position"))
    answers_bytes, distances_bytes = 4 * len(OPERATIONS) * len(ANSWERS), 4 * BIN_COUNT
    for record in records:
        is_whole = all(len(getattr(record, name)) == size * record.programs for name, size in _ITEM_BYTES.items())
        if not (is_whole and len(record.answers) == answers_bytes and len(record.distances) == distances_bytes):
            raise ValueError(f"what is kept of shard {record.shard} is not whole")
    return records


def joined(records: tuple[ShardRecord, ...]) -> dict[str, np.ndarray]:
    """The arrays of all programs, one after the other (the first five of `Summary`), by name."""
    types = {"kinds": "<u1", "operations": "<u2", "accepted": "<u2", "errors": "<f4", "tolerances": "<f4"}
    return {name: np.frombuffer(b"".join(getattr(record, name) for record in records), kind) for name, kind in types.items()}


def answers_of(records: tuple[ShardRecord, ...]) -> np.ndarray:
    """uint32 [records, OPERATIONS, ANSWERS]."""
    return np.frombuffer(b"".join(record.answers for record in records), "<u4").reshape(-1, len(OPERATIONS), len(ANSWERS))


def distances_of(records: tuple[ShardRecord, ...]) -> np.ndarray:
    """uint32 [records, BIN_COUNT]."""
    return np.frombuffer(b"".join(record.distances for record in records), "<u4").reshape(-1, BIN_COUNT)
