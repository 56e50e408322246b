"""The table of findings: its columns and types are fixed, whatever was found."""

from pathlib import Path

import msgspec
import pandas as pd
import pytest
from statedrift.reports.frames import FINDING_COLUMNS, findings_frame, write_csv, write_parquet
from statedrift.spec.errors import UsageError
from statedrift.spec.programs import parse_program, program_id
from statedrift.spec.verdicts import Verdict
from statedrift.store.campaigns import Account, Campaign
from statedrift.store.findings import Finding

PROGRAM = parse_program("model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1/1")
ACCOUNT = Account(
    target="numba", version="1", families=("lfm2",), seed=0, jobs=1, started_at="2026-01-02T03:04:05+00:00", seconds=1.0, programs=1,
    operations=3, outcomes={}, verdicts={}, noise={}, could_not_test={}, seconds_generating=0.0, seconds_running=0.0,
    seconds_judging=0.0, seconds_reducing=0.0, complete=True,
)  # fmt: skip
FINDING = Finding(
    signature='numba/lfm2 wrong-output at decode (self) after "rollback", really',
    title="größer, as it were\nand more",
    target="numba",
    version="1",
    family="lfm2",
    verdict=Verdict("wrong-output", 2, 0, 1, "self", 22.75, 0.002, reason="logits off"),
    program=PROGRAM,
    original=PROGRAM,
    documented=True,
    undocumented_uses=(),
    reproduced=9,
    reruns=10,
    found_after_programs=3,
    found_after_seconds=0.5,
    first_seen="2026-01-02T03:04:05+00:00",
    last_seen="2026-01-02T03:04:05+00:00",
)
CRASH = msgspec.structs.replace(FINDING, verdict=Verdict("crash", 0, reason="it died"), documented=False)


@pytest.mark.parametrize("findings", [(), (FINDING,), (CRASH,), (FINDING, CRASH)])
def test_columns_and_types_are_always_the_same(findings: tuple[Finding, ...]) -> None:
    frame = findings_frame(Campaign(ACCOUNT, findings))
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == FINDING_COLUMNS
    assert list(frame.columns) == list(FINDING_COLUMNS)
    assert len(frame) == len(findings)


def test_a_row_says_what_the_finding_says() -> None:
    row = findings_frame(Campaign(ACCOUNT, (FINDING,))).iloc[0]
    assert (row["kind"], row["operation_index"], row["sequence"], row["position"], row["relation"]) == ("wrong-output", 2, 0, 1, "self")
    assert (row["error"], row["tolerance"]) == (22.75, 0.002)
    assert (row["program"], row["reliability"], row["documented"]) == (program_id(PROGRAM), "9/10", True)
    assert row["first_seen"] == pd.Timestamp("2026-01-02T03:04:05", tz="UTC")


def test_what_a_finding_does_not_have_is_missing_and_not_zero() -> None:
    row = findings_frame(Campaign(ACCOUNT, (CRASH,))).iloc[0]
    assert all(pd.isna(row[name]) for name in ("sequence", "position", "relation", "error", "tolerance"))
    assert row["operation_index"] == 0


def test_csv_is_read_back_with_the_same_values(tmp_path: Path) -> None:
    frame = findings_frame(Campaign(ACCOUNT, (FINDING, CRASH)))
    write_csv(frame, tmp_path / "findings.csv")
    again = pd.read_csv(tmp_path / "findings.csv", dtype={name: t for name, t in FINDING_COLUMNS.items() if name != "first_seen"})
    again["first_seen"] = pd.to_datetime(again["first_seen"], utc=True).astype(FINDING_COLUMNS["first_seen"])
    pd.testing.assert_frame_equal(again, frame)


def test_rows_have_the_order_in_which_the_terminal_numbers_findings() -> None:
    late = msgspec.structs.replace(FINDING, signature="late", found_after_programs=9)
    frame = findings_frame(Campaign(ACCOUNT, (CRASH, late, FINDING)))
    assert list(frame["signature"]) == [FINDING.signature, "late", CRASH.signature]
    assert list(frame["documented"]) == [True, True, False]


def test_csv_is_read_back_as_the_documentation_shows(tmp_path: Path) -> None:
    frame = findings_frame(Campaign(ACCOUNT, (FINDING, CRASH)))
    write_csv(frame, tmp_path / "findings.csv")
    types = {name: dtype for name, dtype in FINDING_COLUMNS.items() if name != "first_seen"}
    again = pd.read_csv(tmp_path / "findings.csv", dtype=types, parse_dates=["first_seen"]).astype(FINDING_COLUMNS)
    pd.testing.assert_frame_equal(again, frame)


def test_csv_of_nothing_is_its_heading(tmp_path: Path) -> None:
    write_csv(findings_frame(Campaign(ACCOUNT, ())), tmp_path / "findings.csv")
    assert (tmp_path / "findings.csv").read_text() == ",".join(FINDING_COLUMNS) + "\n"


@pytest.mark.parametrize("findings", [(), (FINDING, CRASH)])
def test_parquet_is_read_back_with_the_same_types(tmp_path: Path, findings: tuple[Finding, ...]) -> None:
    frame = findings_frame(Campaign(ACCOUNT, findings))
    write_parquet(frame, tmp_path / "findings.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "findings.parquet"), frame)


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_a_place_that_cannot_be_written_is_a_clear_error_and_leaves_nothing(tmp_path: Path, write: object) -> None:
    assert callable(write)
    (tmp_path / "file").write_text("kept")
    for place in (tmp_path, tmp_path / "file" / "findings"):
        with pytest.raises(UsageError, match="cannot be written"):
            write(findings_frame(Campaign(ACCOUNT, ())), place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_an_older_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "findings.csv"
    path.write_text("x" * 100_000)
    write_csv(findings_frame(Campaign(ACCOUNT, ())), path)
    assert path.read_text().startswith("target,version")
    assert len(path.read_text()) < 1000
