"""A campaign's folder: what a campaign knows goes into its database, and is taken up again from there.

Rules
- A change is one transaction: a campaign that is killed goes on from the newest one, as if nothing had been begun after it.
- The database is the truth; `findings/` is for people, and written again where it is missing.
- What a campaign does once (its settings) and what it did so far (its account) are rows of their own; what can be hundreds (divergences that
  wait) is written when it comes and deleted when it is done.
- The times of day that are kept are for people. Nothing is decided by them.
"""

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..spec.errors import UsageError
from .campaigns import FINDINGS_FOLDER, Account, CorpusRow, FindingRow, Identity, Tally, WaitingRow, read_kept
from .database import DATABASE_FILE, LOCK_FILE, create_database, explained, lock_folder, open_database, transaction
from .findings import write_finding
from .records import ShardRecord, put_records


class Change(msgspec.Struct, frozen=True):
    """What is new since the last change. Rows that are there already are replaced."""

    account: Account
    tally: Tally
    findings: Sequence[FindingRow] = ()
    waiting: Sequence[WaitingRow] = ()
    finished: Sequence[int] = ()
    corpus: Sequence[CorpusRow] = ()
    shards: tuple[ShardRecord, ...] = ()


class Store:
    """A campaign's folder, which this process alone writes to.

    Raises UsageError when the folder holds something else, belongs to a running campaign, cannot be written, or its database cannot be used.
    Nothing is made in it but the lock until a run begins.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / DATABASE_FILE
        self.run = 0
        self._connection: sqlite3.Connection | None = None
        _check_folder(folder)
        self._lock = lock_folder(folder)
        try:
            self.kept = read_kept(folder) if self.path.exists() else None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the database, and let others have the folder."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        os.close(self._lock)

    def begin(
        self, identity: Identity, started_at: str, jobs: int, seconds_budget: float | None, programs_budget: int | None, version: str
    ) -> None:
        """Begin a run of the command. Raises UsageError when it cannot be written."""
        if not self.path.exists():
            create_database(self.path)
        self._connection = open_database(self.path)
        self._file = os.stat(self.path)
        with explained(self.path), transaction(self._connection):
            _put(self._connection, "settings", identity)
            cursor = self._connection.execute(
                "INSERT INTO runs (started_at, jobs, seconds_budget, programs_budget, version) VALUES (?, ?, ?, ?, ?)",
                (started_at, jobs, seconds_budget, programs_budget, version),
            )
            self.run = cursor.lastrowid or 0

    def save(self, change: Change, seconds: float, programs: int, ended_at: str | None = None) -> None:
        """Keep a change, whole, with the seconds and programs of this run so far. Raises UsageError when it cannot be written."""
        connection = self._connection
        assert connection is not None
        self._check_still_there()
        with explained(self.path), transaction(connection):
            connection.execute(
                "UPDATE runs SET seconds = ?, programs = ?, ended_at = ? WHERE number = ?", (seconds, programs, ended_at, self.run)
            )
            _put(connection, "account", change.account)
            _put(connection, "tally", change.tally)
            for row in change.findings:
                _put_finding(connection, row)
            connection.executemany("INSERT OR REPLACE INTO waiting VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", map(_values, change.waiting))
            connection.executemany("DELETE FROM waiting WHERE number = ?", [(number,) for number in change.finished])
            connection.executemany("INSERT OR REPLACE INTO corpus VALUES (?, ?, ?, ?, ?)", map(_values, change.corpus))
            put_records(connection, change.shards)

    def _check_still_there(self) -> None:
        """Raise UsageError when the file that is written to is not the folder's any more."""
        try:
            is_same = os.path.samestat(os.stat(self.path), self._file)
        except OSError:
            is_same = False
        if not is_same:
            raise UsageError(f"{self.path} was removed or replaced while the campaign ran")

    def write_folders(self, rows: Sequence[FindingRow]) -> None:
        """Write the folders of findings as they are now. Raises UsageError when that cannot be done."""
        for row in rows:
            write_finding(self.folder / FINDINGS_FOLDER, row.finding, row.script)


def _values(row: Any) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in row.__struct_fields__)


def _put(connection: sqlite3.Connection, name: str, value: msgspec.Struct) -> None:
    connection.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (name, msgspec.json.encode(value).decode()))


def _put_finding(connection: sqlite3.Connection, row: FindingRow) -> None:
    connection.execute(
        "INSERT INTO findings (signature, coarse, body, script) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (signature) DO UPDATE SET body = excluded.body, script = excluded.script",
        (row.finding.signature, row.coarse, msgspec.json.encode(row.finding).decode(), row.script),
    )


# --- folders -----------------------------------------------------------------------------------------------------------------


def _check_folder(folder: Path) -> None:
    """Raise UsageError when a campaign cannot be kept in `folder`, because it holds something else."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; --out needs a folder")
    try:
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}; choose another --out") from None
    others = [name for name in names if name != LOCK_FILE and not name.startswith(f".{DATABASE_FILE}.")]
    if others and DATABASE_FILE not in names:
        raise UsageError(f"{folder} is not empty and holds no campaign; choose another --out for a new one")


FRESH_MAX = 10_000


def fresh_folder(folder: Path) -> Path:
    """DIR where it is free, else the first free one of DIR-2, DIR-3, ..., made so that nobody else takes it. Raises UsageError when none can be."""
    for number in range(1, FRESH_MAX):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            if number == 1 and folder.is_dir() and not any(folder.iterdir()):
                return folder
        except OSError as error:
            raise UsageError(f"{candidate} cannot be written: {error.strerror}; choose another --out") from None
    raise UsageError(f"{folder}-2 to {folder}-{FRESH_MAX - 1} are all taken; choose another --out")
