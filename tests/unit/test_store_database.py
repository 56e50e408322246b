"""The database of a campaign: what is torn, foreign or newer is said and left as it is; older ones are brought up; one process writes."""

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from statedrift.spec.errors import UsageError
from statedrift.store import database
from statedrift.store.campaigns import Tally, read_campaign, read_kept
from statedrift.store.database import (
    APPLICATION_ID,
    DATABASE_FILE,
    SCHEMA_VERSION,
    lock_folder,
    open_database,
    read_database,
    running_words,
)
from statedrift.store.keeping import Change, Store

from tests.kept_campaign import identity_of, keep_campaign
from tests.unit.test_store import ACCOUNT, FINDING, files_below


def pages(path: Path, number: int) -> None:
    path.write_bytes(path.read_bytes()[: number * 4096])


def pragma(path: Path, text: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA {text}")


def spoiled_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 : 4096 + 200] = b"\xa5" * 200
    path.write_bytes(data)


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "is damaged: it is empty"),
    "ten bytes": (lambda path: path.write_bytes(path.read_bytes()[:10]), "is not the database of a campaign"),
    "half a page": (lambda path: path.write_bytes(path.read_bytes()[:2000]), "is damaged: its last page is not whole"),
    "one page": (lambda path: pages(path, 1), "is damaged"),
    "one page short": (lambda path: pages(path, path.stat().st_size // 4096 - 1), "is damaged"),
    "one byte short": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is damaged: its last page is not whole"),
    "a page overwritten": (spoiled_page, "is damaged"),
    "another file": (lambda path: path.write_text('{"format": 1}' * 500), "is not the database of a campaign"),
    "another program's": (lambda path: pragma(path, "application_id = 7"), "another program made it"),
    "a newer version's": (
        lambda path: pragma(path, f"user_version = {SCHEMA_VERSION + 1}"),
        f"newer version of statedrift (schema {SCHEMA_VERSION + 1}; this one reads up to {SCHEMA_VERSION})",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_database_that_cannot_be_used_is_named_and_left_as_it_is(name: str, tmp_path: Path) -> None:
    spoil, message = SPOILED[name]
    path = keep_campaign(tmp_path / "run", ACCOUNT, [FINDING] * 3) / DATABASE_FILE
    spoil(path)
    before = files_below(tmp_path)
    for use in (read_campaign, Store):
        with pytest.raises(UsageError, match=re.escape(message)) as said:
            use(path.parent)
        assert str(path) in str(said.value)
        assert "--out" in str(said.value)
    with pytest.raises(UsageError):
        open_database(path)
    assert {name: data for name, data in files_below(tmp_path).items() if "lock" not in name} == {
        name: data for name, data in before.items() if "lock" not in name
    }


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_a_database_of_every_older_schema_is_read_and_brought_up(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(database, "MIGRATIONS", database.MIGRATIONS[:version])
        patch.setattr(database, "SCHEMA_VERSION", version)
        database.create_database(tmp_path / DATABASE_FILE)
    with closing(sqlite3.connect(tmp_path / DATABASE_FILE)) as connection, connection:
        connection.execute("INSERT INTO state VALUES ('a', 'kept')")
    before = files_below(tmp_path)
    with closing(read_database(tmp_path / DATABASE_FILE)) as connection:
        assert connection.execute("SELECT count(*) FROM corpus").fetchone() == (0,)
    assert files_below(tmp_path) == before
    with closing(open_database(tmp_path / DATABASE_FILE)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert connection.execute("SELECT value FROM state").fetchone() == ("kept",)
        assert connection.execute("SELECT count(*) FROM corpus").fetchone() == (0,)


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keep_campaign(tmp_path, ACCOUNT) / DATABASE_FILE
    before = path.read_bytes()
    monkeypatch.setattr(database, "MIGRATIONS", (*database.MIGRATIONS, "CREATE TABLE more (a); CREATE TABLE more (a);"))
    monkeypatch.setattr(database, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    with pytest.raises(UsageError, match="already exists"):
        read_database(path)
    assert path.read_bytes() == before


# --- readers -----------------------------------------------------------------------------------------------------------------


def test_a_campaign_that_runs_can_be_read_and_its_writer_is_not_held_up(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        store.begin(identity_of(ACCOUNT), ACCOUNT.started_at, 1, 1.0, None, "own 1")
        assert read_kept(tmp_path) is None
        with pytest.raises(UsageError, match="only begun"):
            read_campaign(tmp_path)
        with closing(open_database(store.path)) as other, database.transaction(other):
            assert read_kept(tmp_path) is None


def test_what_a_killed_campaign_left_is_read_in_a_folder_that_may_only_be_read(tmp_path: Path) -> None:
    """Its newest transactions are in a log beside the database, and SQLite cannot make the file that it wants for reading one."""
    script = f"""
import os, signal
from pathlib import Path
from tests.kept_campaign import *
from tests.unit.test_store import ACCOUNT, FINDING
store = Store(Path({str(tmp_path / "run")!r}))
store.begin(identity_of(ACCOUNT), ACCOUNT.started_at, 1, 1.0, None, "own 1")
store.save(Change(ACCOUNT, Tally(3), [FindingRow(FINDING, "coarse", None)]), 1.0, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert f"{DATABASE_FILE}-wal" in names
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    os.remove(tmp_path / "copy" / f"{DATABASE_FILE}-shm")
    before = files_below(tmp_path / "copy")

    def refuse(uri: str, memory: sqlite3.Connection, copy: Callable[[str, sqlite3.Connection], None] = database._copy_by) -> None:
        if str(tmp_path) in uri:  # as SQLite does there; who may write everywhere, as root may, cannot try it
            error = sqlite3.OperationalError("unable to open database file")
            error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
            raise error
        copy(uri, memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "_copy_by", refuse)
        assert read_campaign(tmp_path / "copy").findings == (FINDING,)
    assert files_below(tmp_path / "copy") == before
    assert read_campaign(tmp_path / "run").findings == (FINDING,)
    with closing(Store(tmp_path / "run")) as store:  # its lock is no obstacle
        assert store.kept is not None
        assert store.kept.tally.position == 3


# --- one process -------------------------------------------------------------------------------------------------------------


def test_the_second_process_on_a_folder_is_told_of_the_first(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "run")):
        message = rf"campaign folder {tmp_path}/run belongs to a running campaign \(process {os.getpid()}, started \d\d:\d\d\)\. Use another --out, or stop that one\."
        with pytest.raises(UsageError, match=message):
            Store(tmp_path / "run")
    Store(tmp_path / "run").close()


def test_whoever_looks_at_a_campaign_is_told_that_it_runs(tmp_path: Path) -> None:
    assert running_words(tmp_path) == ""
    with closing(Store(tmp_path)):
        assert f"process {os.getpid()}" in running_words(tmp_path)
        with pytest.raises(UsageError, match="running campaign"):  # looking takes no lock away
            Store(tmp_path)
    assert running_words(tmp_path) == ""


def test_a_lock_whose_text_says_nothing_is_still_a_lock(tmp_path: Path) -> None:
    descriptor = lock_folder(tmp_path)
    (tmp_path / "campaign.lock").write_text("")
    with pytest.raises(UsageError, match=r"belongs to a running campaign\. Use another"):
        lock_folder(tmp_path)
    os.close(descriptor)


# --- what happens to the folder meanwhile --------------------------------------------------------------------------------------


def test_a_folder_that_is_removed_meanwhile_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with closing(Store(folder)) as store:
        store.begin(identity_of(ACCOUNT), ACCOUNT.started_at, 1, 1.0, None, "1")
        shutil.rmtree(folder)
        with pytest.raises(UsageError, match="was removed or replaced while the campaign ran"):
            store.save(Change(ACCOUNT, Tally(1)), 1.0, 1)


@pytest.mark.parametrize("name", ["settings", "tally", "account"])
def test_a_row_that_is_missing_is_damage_and_no_new_beginning(name: str, tmp_path: Path) -> None:
    keep_campaign(tmp_path, ACCOUNT, [])
    with closing(sqlite3.connect(tmp_path / DATABASE_FILE)) as connection, connection:
        connection.execute("DELETE FROM state WHERE name = ?", (name,))
    with pytest.raises(UsageError, match="is damaged: its settings, its account or its tally is missing"):
        Store(tmp_path)
