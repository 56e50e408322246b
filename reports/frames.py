"""What campaigns found and did, as typed pandas frames: findings, programs, operations, reach, timeline, errors; and as CSV and Parquet.

Rules
- Columns and types are fixed (`COLUMNS`), whatever was found, also when nothing was; docs/frames.md describes every column.
- A value that a row does not have is missing (NA), never 0 or an empty text.
- A frame is filled column by column from packed arrays: a million programs take seconds, and words that repeat are kept once.
- Frames of several campaigns stand one below the other; the column `campaign` tells them apart.
- Files are written whole, then renamed over what was there.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from ..spec.programs import program_id
from ..store.campaigns import Campaign, read_campaign, read_shards
from ..store.files import write_whole
from ..store.findings import Finding
from ..store.records import ANSWERS, BIN_COUNT, KINDS, OPERATIONS, ShardRecord, answers_of, distances_of, divergent_of, joined
from .terminal import in_order

MOMENT: Final = "datetime64[us, UTC]"
WORDS = "category"
"""The dtype of columns whose words repeat."""

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
    "first_seen": MOMENT,
    "reliability": "string",
    "documented": "bool",
    "title": "string",
    "against": "string",
    "part": "string",
    "layer": "Int64",
    "oracle": "string",
    "last_seen": MOMENT,
    "seen": "Int64",
    "found_after_programs": "Int64",
    "found_after_seconds": "Float64",
}
"""Column -> pandas dtype, in order."""

REACH_COLUMNS: dict[str, str] = {"table": "string", "cell": "string", "count": "Int64"}
"""Column -> pandas dtype, in order."""

COLUMNS: dict[str, dict[str, str]] = {
    "findings": {"campaign": "string", **FINDING_COLUMNS},
    "programs": {
        "campaign": WORDS, "number": "int64", "shard": "int32", "family": WORDS, "kind": WORDS, "operations": "uint16",
        "accepted": "uint16", "error": "float32", "tolerance": "float32", "signature": WORDS,
    },
    "operations": {"campaign": WORDS, "family": WORDS, "operation": WORDS, "answer": WORDS, "count": "int64"},
    "reach": {"campaign": "string", **REACH_COLUMNS},
    "timeline": {
        "campaign": WORDS, "programs": "int64", "seconds": "float64", "family": WORDS, "divergent": "int64", "cells": "int32",
        "signatures": "int32",
    },
    "errors": {
        "campaign": WORDS, "target": WORDS, "family": WORDS, "above": "float64", "up_to": "float64", "rows": "int64",
        "tolerance": "float64",
    },
}  # fmt: skip
"""Frame -> column -> pandas dtype, in order."""


class CampaignFrames(NamedTuple):
    """All frames of one or several campaigns; docs/frames.md describes their columns, `COLUMNS` has their types.

    findings    a row a finding, in the order in which reports number them
    programs    a row a generated program
    operations  a row for each family, operation and answer that occurred
    reach       a row a cell of what could be reached, those at 0 included
    timeline    a row a shard of programs: how far everything had come
    errors      a row for each family and distance from the tolerance: rows of programs that were right
    """

    findings: pd.DataFrame
    programs: pd.DataFrame
    operations: pd.DataFrame
    reach: pd.DataFrame
    timeline: pd.DataFrame
    errors: pd.DataFrame


def load(*folders: Path | str) -> CampaignFrames:
    """The frames of campaigns' folders, one campaign below the other, in the order given; also of campaigns that are running.

    What a campaign of an older version did not keep has no rows. Raises UsageError for a folder that is no campaign, or cannot be used.
    """
    parts = [_one(str(folder), read_campaign(Path(folder)), read_shards(Path(folder))) for folder in folders]
    frames = {}
    for name, columns in COLUMNS.items():
        own = [getattr(part, name) for part in parts]
        frames[name] = own[0] if len(own) == 1 else _below_each_other(own, columns)
    return CampaignFrames(**frames)


def frames_of(name: str, campaign: Campaign, records: Sequence[ShardRecord]) -> CampaignFrames:
    """The frames of one campaign that was read already; `name` fills the column `campaign`."""
    return _one(name, campaign, tuple(records))


def reliability(finding: Finding) -> str:
    """How often the reduced program showed the divergence when it was run again, e.g. "10/10"."""
    return f"{finding.reproduced}/{finding.reruns}"


def findings_frame(campaign: Campaign) -> pd.DataFrame:
    """One row a finding, in the order in which `report` numbers them (`terminal.in_order`); columns and dtypes as in `FINDING_COLUMNS`, also for no finding.

    `operation_index` counts from 0; `error` and `tolerance` are max|y - r| / (1 + rms(r)); `first_seen` and `last_seen` are UTC.
    """
    rows = [_row(finding) for finding in in_order(campaign.findings)]
    return _typed({name: [row[name] for row in rows] for name in FINDING_COLUMNS}, FINDING_COLUMNS)


def reach_frame(campaign: Campaign) -> pd.DataFrame:
    """One row a cell of the campaign's reach, in the account's order: its table, its name, and how often it was reached (0: never).

    No row for a campaign whose reach was not counted. Columns and dtypes as in `REACH_COLUMNS`.
    """
    reach = campaign.account.reach
    rows = [] if reach is None else [(table, cell, number) for table, counts in reach.cells.items() for cell, number in counts.items()]
    return _typed({name: [row[place] for row in rows] for place, name in enumerate(REACH_COLUMNS)}, REACH_COLUMNS)


# --- one campaign ------------------------------------------------------------------------------------------------------------


def _one(name: str, campaign: Campaign, records: tuple[ShardRecord, ...]) -> CampaignFrames:
    account = campaign.account
    return CampaignFrames(
        _named(name, findings_frame(campaign), COLUMNS["findings"]),
        _programs(name, records),
        _operations(name, records),
        _named(name, reach_frame(campaign), COLUMNS["reach"]),
        _timeline(name, records),
        _errors(name, account.target, records),
    )


def _programs(name: str, records: tuple[ShardRecord, ...]) -> pd.DataFrame:
    counts = np.array([record.programs for record in records], np.int64)
    arrays = joined(records)
    starts = np.array([record.position for record in records], np.int64)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    signatures: dict[str, int] = {}
    codes = np.full(len(within), -1, np.int32)
    first = 0
    for record in records:
        for number, signature in divergent_of(record):
            codes[first + number] = signatures.setdefault(signature, len(signatures))
        first += record.programs
    columns = {
        "campaign": _repeated(name, len(within)),
        "number": np.repeat(starts, counts) + within + 1,
        "shard": np.repeat(np.array([record.shard for record in records], np.int32), counts),
        "family": _words([record.family for record in records], counts),
        "kind": pd.Categorical.from_codes(arrays["kinds"].astype(np.int8), _vocabulary(KINDS)),
        "operations": arrays["operations"],
        "accepted": arrays["accepted"],
        "error": arrays["errors"],
        "tolerance": arrays["tolerances"],
        "signature": pd.Categorical.from_codes(codes, _vocabulary(signatures)),
    }
    return _typed(columns, COLUMNS["programs"])


def _by_family(records: Sequence[ShardRecord]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for place, record in enumerate(records):
        places.setdefault(record.family, []).append(place)
    return places


def _operations(name: str, records: tuple[ShardRecord, ...]) -> pd.DataFrame:
    answers = answers_of(records)
    rows = []
    for family, places in _by_family(records).items():
        sums = answers[places].sum(axis=0, dtype=np.int64)
        rows += [
            (name, family, operation, answer, int(sums[number, place]))
            for number, operation in enumerate(OPERATIONS)
            for place, answer in enumerate(ANSWERS)
            if sums[number, place]
        ]
    return _from_rows(rows, COLUMNS["operations"])


def _timeline(name: str, records: tuple[ShardRecord, ...]) -> pd.DataFrame:
    divergent = np.cumsum([sum(1 for _ in divergent_of(record)) for record in records], dtype=np.int64)
    columns = {
        "campaign": _repeated(name, len(records)),
        "programs": np.array([record.position + record.programs for record in records], np.int64),
        "seconds": np.array([record.seconds for record in records], np.float64),
        "family": _words([record.family for record in records], np.ones(len(records), np.int64)),
        "divergent": divergent,
        "cells": np.array([record.cells for record in records], np.int32),
        "signatures": np.array([record.signatures for record in records], np.int32),
    }
    return _typed(columns, COLUMNS["timeline"])


def _errors(name: str, target: str, records: tuple[ShardRecord, ...]) -> pd.DataFrame:
    distances = distances_of(records)
    rows = []
    for family, places in _by_family(records).items():
        counts = distances[places].sum(axis=0, dtype=np.int64)
        tolerances = joined(tuple(records[place] for place in places))["tolerances"]
        tolerance = float(np.nanmax(tolerances)) if np.isfinite(tolerances).any() else float("nan")
        for halvings in range(BIN_COUNT - 1, -1, -1):
            above = 0.0 if halvings == BIN_COUNT - 1 else 2.0 ** -(halvings + 1)
            rows.append((name, target, family, above, 2.0**-halvings, int(counts[halvings]), tolerance))
    return _from_rows(rows, COLUMNS["errors"])


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
        "last_seen": finding.last_seen,
        "seen": finding.seen,
        "found_after_programs": finding.found_after_programs,
        "found_after_seconds": finding.found_after_seconds,
    }


# --- columns -----------------------------------------------------------------------------------------------------------------


def _column(values: Any, dtype: str) -> pd.Series:
    if dtype == MOMENT:
        return pd.to_datetime(pd.Series(values, dtype="object"), utc=True, format="ISO8601").astype(MOMENT)
    if dtype == WORDS and not isinstance(values, pd.Categorical):
        return pd.Series(pd.Categorical(values, _vocabulary(dict.fromkeys(values))))
    return pd.Series(values, dtype=dtype)


def _typed(columns: dict[str, Any], types: dict[str, str]) -> pd.DataFrame:
    return pd.DataFrame({name: _column(columns[name], dtype) for name, dtype in types.items()}, columns=list(types), copy=False)


def _from_rows(rows: Sequence[tuple[object, ...]], types: dict[str, str]) -> pd.DataFrame:
    return _typed({name: [row[place] for row in rows] for place, name in enumerate(types)}, types)


def _named(name: str, frame: pd.DataFrame, types: dict[str, str]) -> pd.DataFrame:
    columns = {"campaign": [name] * len(frame), **{str(column): frame[column] for column in frame}}
    return _typed(columns, types)


def _vocabulary(words: Iterable[str]) -> pd.Index:
    """The words of a column, of one dtype also when there are none."""
    return pd.Index(list(words), dtype="object")


def _repeated(word: str, count: int) -> pd.Categorical:
    return pd.Categorical.from_codes(np.zeros(count, np.int8), _vocabulary([word]))


def _words(words: Sequence[str], counts: np.ndarray) -> pd.Categorical:
    """Each word `counts` times; kept once."""
    names = list(dict.fromkeys(words))
    code = {name: number for number, name in enumerate(names)}
    return pd.Categorical.from_codes(np.repeat(np.array([code[word] for word in words], np.int16), counts), _vocabulary(names))


def _below_each_other(frames: Sequence[pd.DataFrame], types: dict[str, str]) -> pd.DataFrame:
    """One frame; words of columns that have them become those of all."""
    if not frames:
        return _from_rows([], types)
    columns: dict[str, Any] = {}
    for name, dtype in types.items():
        parts = [frame[name] for frame in frames]
        if dtype == WORDS:
            columns[name] = union_categoricals([part.array for part in parts])
        else:
            columns[name] = pd.concat(parts, ignore_index=True)
    return _typed(columns, types)


# --- files -------------------------------------------------------------------------------------------------------------------


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


def write_frames(frames: CampaignFrames, folder: Path, write: Callable[[pd.DataFrame, Path], None] = write_parquet) -> None:
    """Write every frame into `folder`, as `<frame>.parquet`, or `<frame>.csv` with `write_csv`. Raises UsageError when that cannot be done."""
    ending = "csv" if write is write_csv else "parquet"
    for name, frame in frames._asdict().items():
        write(frame, folder / f"{name}.{ending}")
