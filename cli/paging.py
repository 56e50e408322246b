"""The page of `statedrift report --html`: what it needs beside the campaign is gathered here, pictures of caches included.

Rules
- The libraries that draw are of the extra `report`; without them the command says how to have them.
- Pictures cost no more than `FILMING_SECONDS` in all: a finding that had no turn has a card without one, and says so.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

from ..spec.errors import UnavailableError
from ..spec.pictures import Film
from ..store.campaigns import Campaign, read_scripts, read_shards
from ..store.findings import Finding
from ..store.gate import Gate
from .reporting import replay_of

FILMING_SECONDS = 60.0
FALLBACK_TOLERANCE = 1e-5


def page_of(folder: Path, campaign: Campaign, gate: Gate | None, running: str) -> str:
    """The page of a campaign. Raises UnavailableError when what draws it is not installed, UsageError when the folder cannot be read."""
    try:
        from ..reports.page import CARDS_MAX, page_text
    except ImportError as error:
        raise UnavailableError(f"--html needs {error.name}, which is not installed: pip install 'statedrift[report]'") from None
    from ..reports.frames import frames_of
    from ..reports.report import report_of
    from ..reports.terminal import in_order

    records = read_shards(folder)
    films = dict(_films(campaign, in_order(campaign.findings)[:CARDS_MAX]))
    made_at = datetime.now(UTC).isoformat(timespec="minutes").replace("T", " ").replace("+00:00", " UTC")
    report = report_of(str(folder), campaign, gate, records, replay_of(folder), read_scripts(folder), films, running, made_at)
    return page_text(report, frames_of(str(folder), campaign, records))


def _films(campaign: Campaign, findings: list[Finding]) -> Iterator[tuple[str, Film]]:
    from ..fuzz.filming import film_of

    started = monotonic()
    for finding in findings:
        if finding.against is not None:
            yield finding.signature, Film(finding.target, note="Of two targets that are held to each other no picture is made.")
        elif monotonic() - started > FILMING_SECONDS:
            yield finding.signature, Film(finding.target, note="No picture: making them took too long.")
        else:
            noise = campaign.account.noise.get(finding.family)
            tolerance = finding.verdict.tolerance or (noise.tolerance if noise else FALLBACK_TOLERANCE)
            yield finding.signature, film_of(finding.program, finding.target, finding.answers, tolerance)
