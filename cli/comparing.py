"""`statedrift compare`: what only one of two campaigns found, or what only one of two targets does.

Rules
- Two folders are compared as they are, nothing is run. Two targets are held to each other by a campaign, as `fuzz --against` does.
- Status 1: something only one of them has.
"""

from pathlib import Path

from ..reports.comparison import comparison_text, is_same
from ..spec.errors import UsageError
from ..store.database import DATABASE_FILE
from . import failures
from .output import say
from .reporting import opened_campaign, replay_of

SECONDS = 20.0


def compare_command(first: str, second: str, families: tuple[str, ...], seconds: float | None, out: Path | None) -> int:
    """Compare two campaigns' folders, or two targets; the answer is the exit status."""
    folders = [Path(name) for name in (first, second)]
    are_campaigns = [(folder / DATABASE_FILE).is_file() for folder in folders]
    if not any(are_campaigns) and not any(folder.exists() for folder in folders):
        from .fuzzing import fuzz_command

        return fuzz_command(first, families, seconds or SECONDS, None, 0, None, out, False, against=second)
    if families or seconds is not None or out is not None:
        raise UsageError("two campaigns are compared as they are; --family, --seconds and --out are for two targets")
    one, other = (opened_campaign(folder) for folder in folders)
    say(comparison_text((first, second), (one, other), (replay_of(folders[0]), replay_of(folders[1]))))
    return failures.OK if is_same(one, other) else failures.DIVERGENCE
