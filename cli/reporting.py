"""`statedrift report`: a campaign's folder as text, CSV, Parquet, JUnit XML or Markdown.

Rules
- A folder that is no campaign is status 2; a file that cannot be written is a usage error, and its folder is not made.
- What was written is said on standard error; `--csv -` writes to standard output.
- pandas is imported only when a table is asked for.
"""

import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from ..reports.gate import gate_text
from ..reports.reach import reach_text
from ..reports.report import report_of
from ..reports.terminal import campaign_text
from ..spec.errors import UnavailableError, UsageError
from ..spec.programs import Program, program_id
from ..store.campaigns import Campaign, read_campaign, read_shards
from ..store.database import DATABASE_FILE, running_words
from ..store.files import write_whole
from ..store.findings import Finding, folder_name
from ..store.gate import Gate, read_gate
from . import failures
from .given import RUNS, Given, one_line, replay_words
from .output import say

STANDARD_OUTPUT = Path("-")


def report_command(
    folder: Path,
    csv: Path | None,
    parquet: Path | None,
    junit: Path | None = None,
    markdown: Path | None = None,
    trend: Path | None = None,
    html: Path | None = None,
    frames: Path | None = None,
) -> int:
    """Show or write a campaign; the answer is the exit status."""
    places = {"--csv": csv, "--parquet": parquet, "--junit": junit, "--markdown": markdown, "--trend": trend, "--html": html}
    for option, path in places.items():
        check_place(option, path)
    campaign = opened_campaign(folder)
    gate = opened_gate(folder)
    if running := running_words(folder):
        failures.complain(f"{folder} is of a campaign that is running{running}: this is what it has kept so far")
    if not any((*places.values(), frames)):
        say(summary_text(campaign, folder, reach_text(campaign.account)) + ("" if gate is None else "\n" + gate_text(campaign, gate)))
        return failures.OK
    _write_tables(campaign, csv, parquet)
    if junit is not None or markdown is not None:
        from ..reports.junit import junit_text
        from ..reports.markdown import markdown_text

        report = report_of(str(folder), campaign, gate, read_shards(folder), replay_of(folder))
        for path, text_of in ((junit, junit_text), (markdown, markdown_text)):
            if path is not None:
                _write_text(path, text_of(report))
    if trend is not None:
        from ..reports.trend import trend_text

        before = trend.read_text(encoding="utf-8", errors="replace") if trend.exists() else ""
        _write_text(trend, trend_text(before, str(trend), campaign, gate, datetime.now(UTC).date()))
    if html is not None:
        from .paging import page_of

        _write_text(html, page_of(folder, campaign, gate, running))
    if frames is not None:
        from ..reports.frames import load, write_frames

        write_frames(load(folder), frames)
        print(f"written to {frames}", file=sys.stderr)
    return failures.OK


def _write_tables(campaign: Campaign, csv: Path | None, parquet: Path | None) -> None:
    if csv is None and parquet is None:
        return
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


def _write_text(path: Path, text: str) -> None:
    write_whole(path, text.encode("utf-8", "replace"))
    print(f"written to {path}", file=sys.stderr)


def check_place(option: str, path: Path | None) -> None:
    """Raise UsageError when a table cannot be written to `path` because its folder is not there."""
    if path is None or (path == STANDARD_OUTPUT and option == "--csv"):
        return
    if path == STANDARD_OUTPUT:
        raise UsageError(f"{option} needs a file; only --csv can be written to standard output")
    if path.is_dir():
        raise UsageError(f"{option} {path} cannot be written: it is a folder; name a file in it")
    if not path.parent.exists():
        raise UsageError(f"{option} {path} cannot be written: there is no folder {path.parent}; make it first")


def opened_campaign(folder: Path) -> Campaign:
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


def opened_gate(folder: Path) -> Gate | None:
    """The gate in a campaign's folder; None when it had none. Raises UnavailableError saying what is wrong with it."""
    try:
        return read_gate(folder)
    except UsageError as error:
        raise UnavailableError(str(error)) from error


def summary_text(campaign: Campaign, folder: Path | None, details: str = "") -> str:
    """The campaign as text, with `details` after the account; its replay commands use ids where `folder` makes them known, else the programs' text."""
    return campaign_text(campaign, replay_of(folder), _script_of(folder), details)


def _given(program: Program, folder: Path | None) -> Given:
    if folder is None:
        return Given(program, one_line(program))
    is_found_unasked = folder.parent == RUNS
    return Given(program, program_id(program) + ("" if is_found_unasked else f" --campaign {shlex.quote(str(folder))}"))


def replay_of(folder: Path | None) -> Callable[[Finding], str]:
    """The command that shows a finding again; `folder` of its campaign makes it short."""
    return lambda finding: replay_words(
        _given(finding.program, folder), finding.target, finding.against, finding.verdict.layer is not None, finding.oracle
    )


def _script_of(folder: Path | None) -> Callable[[Finding], str]:
    return lambda finding: (
        "" if folder is None or finding.against is not None else str(folder / "findings" / folder_name(finding) / "repro.py")
    )
