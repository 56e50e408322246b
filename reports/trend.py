"""A trend: one row a night, in a small Markdown table that a nightly campaign adds to.

Rows say what the campaign's folder says that day: of a campaign that goes on night after night, its programs and findings until then.

Rules
- The newest row is the last one; a second report of the same target on the same day replaces the first. `ROWS_MAX` are kept.
- A file that is no trend is never overwritten.
"""

from datetime import date

from ..spec.errors import UsageError
from ..store.campaigns import Campaign
from ..store.gate import Gate, sorted_out
from .gate import gate_colour
from .markdown import escaped

ROWS_MAX = 60
HEAD = "| day | target | version | programs | findings | gate | new | known | fixed? |"
_RULE = "|---|---|---|--:|--:|---|--:|--:|--:|"


def trend_text(before: str, name: str, campaign: Campaign, gate: Gate | None, day: date) -> str:
    """The table with a row for this campaign; `before`: what the file called `name` holds, empty for a new one.

    Raises UsageError when that is no trend.
    """
    lines = before.splitlines()
    if lines and lines[:2] != [HEAD, _RULE]:
        raise UsageError(f"{name} is no trend: it does not begin with `{HEAD}`; give another file")
    account = campaign.account
    key = f"| {day.isoformat()} | {escaped(account.target)} |"
    cells = [escaped(account.version), f"{account.programs:,}", str(len(campaign.findings)), *_gate_cells(campaign, gate)]
    rows = [line for line in lines[2:] if line.strip() and not line.startswith(key)] + [f"{key} {' | '.join(cells)} |"]
    return "\n".join([HEAD, _RULE, *rows[-ROWS_MAX:]]) + "\n"


def _gate_cells(campaign: Campaign, gate: Gate | None) -> list[str]:
    if gate is None:
        return ["-"] * 4
    parts = sorted_out(campaign.account, campaign.findings, gate)
    return [gate_colour(campaign, gate), str(len(parts.new) + len(parts.other_new)), str(len(parts.reproduced)), str(len(parts.gone))]
