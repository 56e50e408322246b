"""What a reader sees of a campaign's reach: the line in the summary, the tables of `report`, the frame; pinned by golden files.

Run with STATEDRIFT_UPDATE_GOLDEN=1 to write them anew, and read what changed.
"""

import os
from pathlib import Path

import msgspec
import pandas as pd
import pytest
from statedrift.fuzz.reach import cells
from statedrift.reports import terminal
from statedrift.reports.frames import REACH_COLUMNS, reach_frame
from statedrift.reports.reach import reach_text, short_count
from statedrift.reports.terminal import account_text, missing_cells, never_executed_words, reach_line
from statedrift.store.campaigns import Account, Campaign, Reach

GOLDEN = Path(__file__).parent / "golden"
ABILITIES = frozenset(
    ("recurrent", "attention", "coupled", "cancel", "shift", "partial", "embeddings", "save", "guarantee draft", "snapshots")
)


def counted() -> Reach:
    """Every cell of a target, each with a count of its own, every 29th of them never reached."""
    numbers = iter(range(10_000))
    tables = {
        table: {name: 0 if (number := next(numbers)) % 29 == 7 else number**3 % 1_300_000 for name in names}
        for table, names in cells(ABILITIES).items()
    }
    return Reach(tables, ("divide", "save_all", "restore_all"))


ACCOUNT = Account(
    target="numba", version="1", families=("lfm2",), seed=0, jobs=1, started_at="2026-01-02T03:04:05+00:00", seconds=1.0, programs=10,
    operations=30, outcomes={"decode": {"accepted": 20}, "divide": {"refused": 7}, "restore": {"skipped": 3}}, verdicts={"ok": 10}, noise={},
    could_not_test={}, seconds_generating=0.0, seconds_running=0.0, seconds_judging=0.0, seconds_reducing=0.0, complete=True,
    reach=counted(),
)  # fmt: skip


def test_tables_look_as_agreed() -> None:
    text = reach_text(ACCOUNT)
    path = GOLDEN / "reports_reach.txt"
    if os.environ.get("STATEDRIFT_UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text()


def test_tables_fit_into_eighty_characters() -> None:
    table = reach_text(ACCOUNT).split("\nnever reached")[0]
    assert max(map(len, table.splitlines())) <= 80


def test_every_cell_that_was_never_reached_is_named() -> None:
    flowing = " ".join(reach_text(ACCOUNT).split("\nnever reached")[1].split())
    missing = list(missing_cells(counted()))
    assert len(missing) > 8
    assert [name for _, name in missing if name not in flowing] == []


def test_the_line_counts_cells_and_names_as_many_as_fit() -> None:
    reach = counted()
    total = sum(map(len, reach.cells.values()))
    missing = list(missing_cells(reach))
    line = reach_line(reach)
    assert line.startswith(f"reach        {total - len(missing)} of {total} cells; never: decode accepted, shift accepted, ")
    assert line.endswith(f", {len(missing) - line.count(',')} more")
    assert len(line) <= terminal.WIDTH


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"edges": {"decode of 1": 3}}, "reach        1 of 1 cells"),
        ({"edges": {"decode of 1": 0}}, "reach        0 of 1 cells; never: decode of 1"),
        ({"pending": {"save": 0, "drop": 1}}, "reach        1 of 2 cells; never: save while pending"),
        ({"edges": {"x" * 90: 0, "decode of 1": 0}}, "reach        0 of 2 cells; never: 2 of them"),
    ],
)
def test_the_line_is_as_long_as_it_needs_to_be(counts: dict[str, dict[str, int]], expected: str) -> None:
    assert reach_line(Reach(counts)) == expected


def test_operations_that_were_never_executed_come_with_the_reason() -> None:
    words = never_executed_words(ACCOUNT)
    assert words.startswith("divide, save_all, restore_all (not offered by the target); restore (skipped every time); cancel, rollback, ")
    assert words.endswith("reopen (in no program)")
    assert "never executed: divide, save_all" in account_text(ACCOUNT)


def test_an_operation_that_is_not_offered_is_not_said_to_be_refused() -> None:
    assert "never accepted" not in account_text(ACCOUNT)


def test_an_account_without_reach_has_neither_line_nor_tables() -> None:
    old = msgspec.structs.replace(ACCOUNT, reach=None)
    assert "reach" not in account_text(old)
    assert reach_text(old) == ""
    assert len(reach_frame(Campaign(old, ()))) == 0


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (99_999, "99k"), (100_000, ".1M"), (2_345_678, "2M")])
def test_counts_of_pairs_have_three_characters(number: int, text: str) -> None:
    assert short_count(number) == text


def test_the_frame_has_a_row_a_cell() -> None:
    frame = reach_frame(Campaign(ACCOUNT, ()))
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == REACH_COLUMNS
    assert len(frame) == sum(map(len, counted().cells.values()))
    assert list(frame[frame["count"] == 0]["cell"]) == [name for _, name in missing_cells(counted())]
    old = reach_frame(Campaign(msgspec.structs.replace(ACCOUNT, reach=None), ()))
    pd.testing.assert_frame_equal(old, frame.iloc[:0])
