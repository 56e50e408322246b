"""A campaign's findings as a table: one row a finding, as a pandas frame, CSV or Parquet; and what it reached, one row a cell.

Rules
- Columns and types are fixed (`FINDING_COLUMNS`), whatever was found, also when nothing was.
- A value that a finding does not have is missing (NA), never 0 or an empty text.
- Files are written whole, then renamed over what was there.
"""

import io
from pathlib import Path

import pandas as pd

from ..spec.programs import program_id
from ..store.campaigns import Campaign
from ..store.files import write_whole
from ..store.findings import Finding
from .terminal import in_order

FINDING_COLUMNS: dict[str, str] = {
    "target": "string",
    "version": "string",
    "family": "string",
    "kind": "string",
    "signature": "string",
    "operation_index": "Int64",
    "sequence": "Int64",
    "position": "Int64",
    "relation": "string",
    "error": "Float64",
    "tolerance": "Float64",
    "program": "string",
    "first_seen": "datetime64[us, UTC]",
    "reliability": "string",
    "documented": "bool",
    "title": "string",
    "against": "string",
    "part": "string",
    "layer": "Int64",
    "oracle": "string",
}
"""Column -> pandas dtype, in order."""


def reliability(finding: Finding) -> str:
    """How often the reduced program showed the divergence when it was run again, e.g. "10/10"."""
    return f"{finding.reproduced}/{finding.reruns}"


def _row(finding: Finding) -> dict[str, object]:
    verdict = finding.verdict
    return {
        "target": finding.target,
        "version": finding.version,
        "family": finding.family,
        "kind": verdict.kind,
        "signature": finding.signature,
        "operation_index": verdict.operation_index,
        "sequence": verdict.sequence,
        "position": verdict.position,
        "relation": verdict.relation,
        "error": verdict.error,
        "tolerance": verdict.tolerance,
        "program": program_id(finding.program),
        "first_seen": finding.first_seen,
        "reliability": reliability(finding),
        "documented": finding.documented,
        "title": finding.title,
        "against": finding.against,
        "part": verdict.part,
        "layer": verdict.layer,
        "oracle": finding.oracle if finding.against is None else None,
    }


def findings_frame(campaign: Campaign) -> pd.DataFrame:
    """One row a finding, in the order in which `report` numbers them (`terminal.in_order`); columns and dtypes as in `FINDING_COLUMNS`, also for no finding.

    `operation_index` counts from 0; `error` and `tolerance` are max|y - r| / (1 + rms(r)); `first_seen` is UTC.
    """
    rows = [_row(finding) for finding in in_order(campaign.findings)]
    columns = {}
    for name, dtype in FINDING_COLUMNS.items():
        values = [row[name] for row in rows]
        if name == "first_seen":
            columns[name] = pd.to_datetime(pd.Series(values, dtype="object"), utc=True, format="ISO8601").astype("datetime64[us, UTC]")
        else:
            columns[name] = pd.Series(values, dtype=dtype)
    return pd.DataFrame(columns, columns=list(FINDING_COLUMNS))


REACH_COLUMNS: dict[str, str] = {"table": "string", "cell": "string", "count": "Int64"}
"""Column -> pandas dtype, in order."""


def reach_frame(campaign: Campaign) -> pd.DataFrame:
    """One row a cell of the campaign's reach, in the account's order: its table, its name, and how often it was reached (0: never).

    No row for a campaign whose reach was not counted. Columns and dtypes as in `REACH_COLUMNS`.
    """
    reach = campaign.account.reach
    rows = [] if reach is None else [(table, cell, number) for table, counts in reach.cells.items() for cell, number in counts.items()]
    columns = {
        name: pd.Series([row[place] for row in rows], dtype=dtype)
        for place, (name, dtype) in enumerate(REACH_COLUMNS.items())
    }  # fmt: skip
    return pd.DataFrame(columns, columns=list(REACH_COLUMNS))


def csv_text(frame: pd.DataFrame) -> str:
    """Comma-separated values with a heading, LF; a missing value is empty."""
    return str(frame.to_csv(index=False, lineterminator="\n"))


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """Write `csv_text` as UTF-8. Raises UsageError when it cannot be written."""
    write_whole(path, csv_text(frame).encode())


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    """Write Parquet with the frame's types. Raises UsageError when it cannot be written."""
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    write_whole(path, buffer.getvalue())
