"""The frames: their columns and types are fixed and documented, whatever was found."""

import re
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pandas as pd
import pytest
from statedrift.reports.frames import COLUMNS, FINDING_COLUMNS, MOMENT, findings_frame, load, write_csv, write_frames, write_parquet
from statedrift.spec.errors import UsageError
from statedrift.spec.programs import parse_program, program_id
from statedrift.spec.verdicts import Verdict
from statedrift.store.campaigns import Account, Campaign, Tally
from statedrift.store.findings import Finding
from statedrift.store.keeping import Change, Store
from statedrift.store.records import ShardRecord

from tests.kept_campaign import identity_of, keep_campaign
from tests.unit.test_records import record, trial

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
    again = pd.read_csv(tmp_path / "findings.csv", dtype={name: t for name, t in FINDING_COLUMNS.items() if t != MOMENT})
    for name in ("first_seen", "last_seen"):
        again[name] = pd.to_datetime(again[name], utc=True).astype(MOMENT)
    pd.testing.assert_frame_equal(again, frame)


def test_rows_have_the_order_in_which_the_terminal_numbers_findings() -> None:
    late = msgspec.structs.replace(FINDING, signature="late", found_after_programs=9)
    frame = findings_frame(Campaign(ACCOUNT, (CRASH, late, FINDING)))
    assert list(frame["signature"]) == [FINDING.signature, "late", CRASH.signature]
    assert list(frame["documented"]) == [True, True, False]


def test_csv_is_read_back_as_the_documentation_shows(tmp_path: Path) -> None:
    frame = findings_frame(Campaign(ACCOUNT, (FINDING, CRASH)))
    write_csv(frame, tmp_path / "findings.csv")
    moments = ["first_seen", "last_seen"]
    types = {name: dtype for name, dtype in FINDING_COLUMNS.items() if name not in moments}
    again = pd.read_csv(tmp_path / "findings.csv", dtype=types, parse_dates=moments).astype(FINDING_COLUMNS)
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


# --- all frames --------------------------------------------------------------------------------------------------------------

ONE = record(
    [trial(Verdict("ok", error=2e-6, tolerance=1e-5), [0.2, 0.1]), trial(Verdict("crash", 0))], 0, "1 numba/lfm2 crash at decode (self)"
)
OTHER = msgspec.structs.replace(ONE, position=2, shard=1, family="mamba2", divergent="", signatures=3)


def kept(folder: Path, records: tuple[ShardRecord, ...], findings: tuple[Finding, ...] = ()) -> Path:
    keep_campaign(folder, ACCOUNT, findings)
    with closing(Store(folder)) as store:
        store.begin(identity_of(ACCOUNT), ACCOUNT.started_at, 1, None, 4, ACCOUNT.version)
        store.save(Change(ACCOUNT, Tally(4), shards=records), 1.0, 4)
    return folder


def types_of(frame: pd.DataFrame) -> dict[str, str]:
    return {str(name): str(dtype) for name, dtype in frame.dtypes.items()}


@pytest.mark.parametrize("records", [(), (ONE,), (ONE, OTHER)])
@pytest.mark.parametrize("copies", [0, 1, 2])
def test_all_frames_always_have_the_same_columns_and_types(records: tuple[ShardRecord, ...], copies: int, tmp_path: Path) -> None:
    frames = load(*[kept(tmp_path / "a", records, (FINDING,))] * copies)
    assert {name: types_of(frame) for name, frame in frames._asdict().items()} == COLUMNS
    assert len(frames.programs) == copies * 2 * len(records)
    assert len(frames.findings) == copies


def test_a_program_is_a_row_with_its_verdict(tmp_path: Path) -> None:
    programs = load(kept(tmp_path / "a", (ONE, OTHER))).programs
    assert programs["number"].tolist() == [1, 2, 3, 4]
    assert programs["shard"].tolist() == [0, 0, 1, 1]
    assert programs["family"].tolist() == ["lfm2", "lfm2", "mamba2", "mamba2"]
    assert programs["kind"].tolist() == ["ok", "crash", "ok", "crash"]
    assert programs["signature"].isna().tolist() == [True, False, True, True]
    assert programs["error"].isna().tolist() == [False, True, False, True]


def test_the_timeline_grows(tmp_path: Path) -> None:
    timeline = load(kept(tmp_path / "a", (ONE, OTHER))).timeline
    assert timeline[["programs", "divergent", "cells", "signatures"]].to_numpy().tolist() == [[2, 1, 10, 2], [4, 1, 10, 3]]


def test_errors_say_how_near_rows_came_to_their_tolerance(tmp_path: Path) -> None:
    errors = load(kept(tmp_path / "a", (ONE, OTHER))).errors
    reached = errors[errors["rows"] > 0]
    assert reached[["family", "above", "up_to", "rows"]].to_numpy().tolist() == [
        ["lfm2", 0.0625, 0.125, 1], ["lfm2", 0.125, 0.25, 1], ["mamba2", 0.0625, 0.125, 1], ["mamba2", 0.125, 0.25, 1],
    ]  # fmt: skip
    assert errors.groupby("family", observed=True).size().tolist() == [32, 32]


def test_campaigns_stand_one_below_the_other(tmp_path: Path) -> None:
    first, second = kept(tmp_path / "a", (ONE,)), kept(tmp_path / "b", (OTHER,))
    programs = load(first, second).programs
    assert programs["campaign"].tolist() == [str(first)] * 2 + [str(second)] * 2
    assert programs["family"].cat.categories.tolist() == ["lfm2", "mamba2"]
    assert programs["signature"].dropna().tolist() == ["numba/lfm2 crash at decode (self)"]


def test_frames_are_read_back_from_parquet(tmp_path: Path) -> None:
    frames = load(kept(tmp_path / "a", (ONE, OTHER), (FINDING,)))
    write_frames(frames, tmp_path / "tables")
    for name, frame in frames._asdict().items():
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "tables" / f"{name}.parquet"), frame, check_categorical=False)


def test_the_page_describes_every_column_with_its_type() -> None:
    page = Path(__file__).parents[2] / "docs" / "frames.md"
    own = {}
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
        name = section.split("\n", 1)[0]
        own[name] = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", section, flags=re.MULTILINE))
    expected = {name: dict(columns) for name, columns in COLUMNS.items()}
    expected["findings"] = {"campaign": "string"}
    assert own == expected


def test_the_page_of_findings_describes_every_column() -> None:
    text = (Path(__file__).parents[2] / "docs" / "findings-and-reports.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]+?) \|", text, flags=re.MULTILINE)
    own = {}
    for names, types in rows:
        words = re.findall(r"`(\w+)`", names)
        own_types = types.split(", ") if len(words) > 1 else [types]
        if set(own_types) <= set(FINDING_COLUMNS.values()):
            own.update(zip(words, own_types, strict=True))
    assert own == FINDING_COLUMNS


def test_the_questions_of_the_page_are_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "frames.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "last week" in block]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    frames = load(kept(tmp_path / "a", (ONE, OTHER), (msgspec.structs.replace(FINDING, first_seen=datetime.now(UTC).isoformat()),)))
    exec(code, {"frames": frames})
    said = capsys.readouterr().out
    assert FINDING.signature in said
    assert "0.25" in said
