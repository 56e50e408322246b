"""`statedrift report`: a campaign's folder as text, CSV or Parquet.

Rules
- A folder that is no campaign is status 2; a file that cannot be written is a usage error, and its folder is not made.
- What was written is said on standard error; `--csv -` writes to standard output.
- pandas is imported only when a table is asked for.
"""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from ..reports.reach import reach_text
from ..reports.terminal import campaign_text
from ..spec.errors import UnavailableError, UsageError
from ..spec.programs import Program, program_id
from ..store.campaigns import Campaign, read_campaign
from ..store.database import DATABASE_FILE
from ..store.findings import Finding, folder_name
from . import failures
from .given import RUNS, Given, one_line, replay_words
from .output import say

STANDARD_OUTPUT = Path("-")


def report_command(folder: Path, csv: Path | None, parquet: Path | None) -> int:
    """Show or write a campaign; the answer is the exit status."""
    for option, path in (("--csv", csv), ("--parquet", parquet)):
        check_place(option, path)
    campaign = _campaign(folder)
    if csv is None and parquet is None:
        say(summary_text(campaign, folder, reach_text(campaign.account)))
        return failures.OK
    from ..reports.frames import csv_text, findings_frame, write_csv, write_parquet

    frame = findings_frame(campaign)
    if csv == STANDARD_OUTPUT:
        say(csv_text(frame), plain=True)
    elif csv is not None:
        write_csv(frame, csv)
        print(f"written to {csv}", file=sys.stderr)
    if parquet is not None:
        write_parquet(frame, parquet)
        print(f"written to {parquet}", file=sys.stderr)
    return failures.OK


def check_place(option: str, path: Path | None) -> None:
    """Raise UsageError when a table cannot be written to `path` because its folder is not there."""
    if path is None or (path == STANDARD_OUTPUT and option == "--csv"):
        return
    if path == STANDARD_OUTPUT:
        raise UsageError(f"{option} needs a file; only --csv can be written to standard output")
    if not path.parent.exists():
        raise UsageError(f"{option} {path} cannot be written: there is no folder {path.parent}; make it first")


def _campaign(folder: Path) -> Campaign:
    """The campaign in a folder. Raises UnavailableError saying what is wrong with it, and what makes one."""
    if not (folder / DATABASE_FILE).is_file():
        is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        command = f"statedrift fuzz --target numba --out {shlex.quote(str(folder)) if is_free else 'runs/first'}"
        raise UnavailableError(
            f"{folder} is no campaign: it has no {DATABASE_FILE}; `{command}` makes one{'' if is_free else ' elsewhere'}"
        )
    try:
        return read_campaign(folder)
    except UsageError as error:
        raise UnavailableError(str(error)) from error


def summary_text(campaign: Campaign, folder: Path | None, details: str = "") -> str:
    """The campaign as text, with `details` after the account; its replay commands use ids where `folder` makes them known, else the programs' text."""
    return campaign_text(campaign, _replay_of(folder), _script_of(folder), details)


def _given(program: Program, folder: Path | None) -> Given:
    if folder is None:
        return Given(program, one_line(program))
    is_found_unasked = folder.parent == RUNS
    return Given(program, program_id(program) + ("" if is_found_unasked else f" --campaign {shlex.quote(str(folder))}"))


def _replay_of(folder: Path | None) -> Callable[[Finding], str]:
    return lambda finding: replay_words(
        _given(finding.program, folder), finding.target, finding.against, finding.verdict.layer is not None, finding.oracle
    )


def _script_of(folder: Path | None) -> Callable[[Finding], str]:
    return lambda finding: (
        "" if folder is None or finding.against is not None else str(folder / "findings" / folder_name(finding) / "repro.py")
    )
