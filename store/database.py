"""A campaign's database: one SQLite file, its schema, and who may write it.

Rules
- A file is there whole or not at all: it is made under another name, with its schema, and renamed.
- Nothing is written to a file before a read of it found it whole, ours, and not of a newer version; one that is not is left as it is.
- The schema's version is the number of migrations that were applied; a migration that was published is never changed, only followed by another.
- Write-ahead logging, synchronous=NORMAL: what was committed outlives the death of every process, since the system has it by then. Losing
  power may take the newest transactions, never the file; a flush at every commit would cost more than the programs that it could lose.
- One process writes, the one that holds the lock of the folder. The lock is the system's (flock): it ends with its process, however that ends.
- Readers work on a copy in memory: they never hold up the writer, and leave no file behind.
Source: SQLite's documentation (Write-Ahead Logging; PRAGMA application_id, user_version, quick_check; backup API).
"""

import contextlib
import errno
import fcntl
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from ..spec.errors import UsageError

DATABASE_FILE = "campaign.sqlite"
LOCK_FILE = "campaign.lock"
APPLICATION_ID = 0x53647266
"""Says that a file is ours ("Sdrf")."""
BUSY_SECONDS = 5.0
_MAGIC = b"SQLite format 3\0"
_WAY_OUT = "Use another --out, or --fresh to start over beside it"

MIGRATIONS = (
    """
    CREATE TABLE state (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE runs (
        number INTEGER PRIMARY KEY, started_at TEXT NOT NULL, ended_at TEXT, jobs INTEGER NOT NULL, seconds_budget REAL,
        programs_budget INTEGER, version TEXT NOT NULL, seconds REAL NOT NULL DEFAULT 0, programs INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE TABLE findings (
        number INTEGER PRIMARY KEY, signature TEXT NOT NULL UNIQUE, coarse TEXT NOT NULL, body TEXT NOT NULL, script TEXT
    ) STRICT;
    CREATE TABLE waiting (
        number INTEGER PRIMARY KEY, coarse TEXT NOT NULL, program_number INTEGER NOT NULL, seconds REAL NOT NULL,
        first_seen TEXT NOT NULL, is_generated INTEGER NOT NULL, counted TEXT, program TEXT NOT NULL,
        enabling TEXT NOT NULL, trial BLOB NOT NULL
    ) STRICT;
    """,
    """
    CREATE TABLE corpus (
        kind TEXT NOT NULL, cell TEXT NOT NULL, operations INTEGER NOT NULL, tokens INTEGER NOT NULL, program TEXT NOT NULL,
        PRIMARY KEY (kind, cell)
    ) STRICT;
    """,
    """
    CREATE TABLE shards (
        position INTEGER PRIMARY KEY, shard INTEGER NOT NULL, first INTEGER NOT NULL, family TEXT NOT NULL, programs INTEGER NOT NULL,
        seconds REAL NOT NULL, cells INTEGER NOT NULL, signatures INTEGER NOT NULL, divergent TEXT NOT NULL, kinds BLOB NOT NULL,
        operations BLOB NOT NULL, accepted BLOB NOT NULL, errors BLOB NOT NULL, tolerances BLOB NOT NULL, answers BLOB NOT NULL,
        distances BLOB NOT NULL
    ) STRICT;
    """,
)
"""The steps from nothing to the present schema.

state     one row for each fact of the whole campaign, as JSON: `settings`, `account`, `tally`
runs      one for each run of the command; `ended_at` is missing where it was killed, or is still running
findings  `body` is the finding as JSON, `script` its repro.py, `coarse` the signature that it was found under
waiting   divergences that wait to be reduced; `trial` is MessagePack, `counted` the finding that each counts for, `enabling` the operations
          that came before, as words
corpus    the smallest program, on one line, for every cell that was reached
shards    what is kept of every program: packed arrays for each shard (records.py); none for shards of an older version
"""
SCHEMA_VERSION = len(MIGRATIONS)


# --- making, opening, reading ------------------------------------------------------------------------------------------------


def create_database(path: Path) -> None:
    """Make an empty database of the present schema at `path`, where nothing is yet. Raises UsageError when it cannot be written."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    try:
        with explained(path):
            with contextlib.closing(_connect(Path(name))) as connection:
                migrate(connection)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            os.chmod(name, 0o644)
            os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def open_database(path: Path) -> sqlite3.Connection:
    """Open a database for writing, by the holder of the folder's lock, and bring an older schema up.

    Raises UsageError, and leaves the file as it is, when it is torn, foreign or of a newer version.
    """
    read_database(path).close()
    with explained(path):
        connection = _connect(path)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            migrate(connection)
        except BaseException:
            connection.close()
            raise
    return connection


def read_database(path: Path) -> sqlite3.Connection:
    """A copy of a database in memory, checked and of the present schema; also of one that is being written, as of its newest transaction.

    Raises UsageError when it is torn, foreign or of a newer version, or cannot be read.
    """
    _check_head(path)
    memory = sqlite3.connect(":memory:", isolation_level=None)
    try:
        with explained(path, "read"):
            _copy(path, memory)
            _check(path, memory)
            migrate(memory)
    except BaseException:
        memory.close()
        raise
    return memory


def migrate(connection: sqlite3.Connection) -> None:
    """Apply the migrations that a database has not had yet, all or none."""
    version = _number(connection, "user_version")
    if version == SCHEMA_VERSION:
        return
    with transaction(connection):
        for script in MIGRATIONS[version:]:
            for statement in filter(str.strip, script.split(";")):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Everything in it is kept, or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def explained(path: Path, verb: str = "written") -> Iterator[None]:
    """Turn what SQLite or the system refuses into a UsageError that names the file and the way out; `verb`: what could not be done with it."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # errors of the module itself have none
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise UsageError(damaged(path, str(error))) from None
        raise UsageError(f"{path} cannot be {verb}: {_WHY.get(code, str(error))}; choose another place") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be {verb}: {error.strerror}; choose another place") from None


_WHY = {
    sqlite3.SQLITE_FULL: "no space left on its disk",
    sqlite3.SQLITE_READONLY: "it may only be read",
    sqlite3.SQLITE_BUSY: "another program keeps it locked",
    sqlite3.SQLITE_IOERR: "the disk refused (it may be full)",
}


def damaged(path: Path, what: str) -> str:
    """The message about a file that is torn, or was changed by something else."""
    return f"{path} is damaged: {what}. It is left as it is. {_WAY_OUT}"


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


def _check_head(path: Path) -> None:
    """Refuse what cannot be ours by its first bytes: SQLite would wait for a log of it, or make one."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_MAGIC) + 2)
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; choose another --out") from None
    if not head:
        raise UsageError(damaged(path, "it is empty"))
    if head[: len(_MAGIC)] != _MAGIC:
        raise UsageError(f"{path} is not the database of a campaign: it does not begin as an SQLite file. It is left as it is. {_WAY_OUT}")
    page_bytes = int.from_bytes(head[len(_MAGIC) :], "big")
    if size % max(1, page_bytes) and not _log_of(path).exists():
        # what is missing of a page would be read as zeros; with a log it is only being copied from there, and was stopped
        raise UsageError(damaged(path, "its last page is not whole"))


def _check(path: Path, connection: sqlite3.Connection) -> None:
    """Raise UsageError for the database of somebody else, of a newer version, or with a page that is not as it should be."""
    if _number(connection, "application_id") != APPLICATION_ID:
        raise UsageError(f"{path} is not the database of a campaign: another program made it. It is left as it is. {_WAY_OUT}")
    version = _number(connection, "user_version")
    if not 0 < version <= SCHEMA_VERSION:
        raise UsageError(
            f"{path} was written by a newer version of statedrift (schema {version}; this one reads up to {SCHEMA_VERSION}). Update statedrift, or use another --out"
        )
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise UsageError(damaged(path, " ".join(str(found).split())))


def _log_of(path: Path) -> Path:
    """The write-ahead log of a database: it is there while somebody writes, and after somebody who wrote was killed."""
    return path.with_name(f"{path.name}-wal")


def _copy(path: Path, memory: sqlite3.Connection) -> None:
    """Copy a database into memory. Where a killed campaign left a log in a folder that may only be read, by way of a copy of both files."""
    log = _log_of(path)
    if not log.exists():  # nobody writes, and nothing waits in a log: no file has to be made to read it
        _copy_by(f"{path.absolute().as_uri()}?immutable=1", memory)
        return
    try:
        _copy_by(f"{path.absolute().as_uri()}?mode=ro", memory)
    except sqlite3.OperationalError as error:
        if (error.sqlite_errorcode & 0xFF) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
        with tempfile.TemporaryDirectory(prefix="statedrift-") as folder:
            copy = Path(folder) / path.name
            for file in (path, log):
                if file.exists():
                    shutil.copyfile(file, copy.with_name(file.name))
            _copy_by(f"{copy.as_uri()}?mode=ro", memory)


def _copy_by(uri: str, memory: sqlite3.Connection) -> None:
    with contextlib.closing(sqlite3.connect(uri, timeout=BUSY_SECONDS, isolation_level=None, uri=True)) as source:
        source.backup(memory)


# --- the lock ----------------------------------------------------------------------------------------------------------------


def lock_folder(folder: Path) -> int:
    """Make this process the only one that writes to a campaign's folder; the descriptor that holds the lock until it is closed.

    Raises UsageError when another process does, or the folder cannot be written.
    """
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another --out") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {datetime.now(UTC).isoformat(timespec='seconds')}\n".encode(), 0)
    except OSError as error:
        holder = _holder(os.pread(descriptor, 100, 0))
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise UsageError(
                f"campaign folder {folder} belongs to a running campaign{holder}. Use another --out, or stop that one."
            ) from None
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another --out") from None
    return descriptor


def running_words(folder: Path) -> str:
    """Who is running the campaign of a folder now, as in " (process 4121, started 03:12)", or "" when nobody is, or that cannot be said."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _holder(os.pread(descriptor, 100, 0)) or " (by another process)"
    else:
        return ""
    finally:
        os.close(descriptor)


def _holder(text: bytes) -> str:
    """Who holds a lock, as in " (process 4121, started 03:12)"; nothing when it does not say."""
    try:
        process, started = text.decode().split()
        local = datetime.fromisoformat(started).astimezone()
    except ValueError:
        return ""
    is_today = local.date() == datetime.now().astimezone().date()
    return f" (process {process}, started {local:%H:%M})" if is_today else f" (process {process}, started {local:%Y-%m-%d %H:%M})"
