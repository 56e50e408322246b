"""`statedrift report`: a campaign's folder as text, CSV or Parquet.

Rules
- A folder that is no campaign is status 2; a file that cannot be written is a usage error.
- pandas is imported only when a table is asked for.
"""

import shlex
from collections.abc import Callable
from pathlib import Path

from ..reports.terminal import campaign_text
from ..spec.errors import UnavailableError, UsageError
from ..spec.programs import Program, program_id
from ..store.campaigns import Campaign, read_campaign
from ..store.findings import Finding, folder_name
from . import failures
from .given import RUNS, Given, one_line, replay_words
from .output import say


def report_command(folder: Path, csv: Path | None, parquet: Path | None) -> int:
    """Show or write a campaign; the answer is the exit status."""
    try:
        campaign = read_campaign(folder)
    except UsageError as error:
        raise UnavailableError(str(error)) from error
    if csv is None and parquet is None:
        say(summary_text(campaign, folder))
        return failures.OK
    from ..reports.frames import findings_frame, write_csv, write_parquet

    frame = findings_frame(campaign)
    if csv is not None:
        write_csv(frame, csv)
    if parquet is not None:
        write_parquet(frame, parquet)
    return failures.OK


def summary_text(campaign: Campaign, folder: Path | None) -> str:
    """The campaign as text; its replay commands use ids where `folder` makes them known, else the programs' text."""
    return campaign_text(campaign, _replay_of(folder), _script_of(folder))


def _given(program: Program, folder: Path | None) -> Given:
    if folder is None:
        return Given(program, one_line(program))
    is_found_unasked = folder.parent == RUNS
    return Given(program, program_id(program) + ("" if is_found_unasked else f" --campaign {shlex.quote(str(folder))}"))


def _replay_of(folder: Path | None) -> Callable[[Finding], str]:
    return lambda finding: replay_words(_given(finding.program, folder), finding.target)


def _script_of(folder: Path | None) -> Callable[[Finding], str]:
    return lambda finding: "" if folder is None else str(folder / "findings" / folder_name(finding) / "repro.py")
