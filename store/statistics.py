"""`stats.json`: where a running campaign is, for whoever watches it from outside.

Rules
- The fields are those of a progress line, in its order, and whether the campaign is over (docs/campaigns.md).
- It is replaced as a whole, so that a reader never sees half of it; nothing is read from it again.
"""

from pathlib import Path

import msgspec

from .files import write_whole

STATISTICS_FILE = "stats.json"


class Statistics(msgspec.Struct, frozen=True):
    """Where a campaign is.

    elapsed                  seconds since the command began, by a clock that nobody sets
    programs                 that were tried; of a campaign that goes on, those of earlier runs included
    programs_per_second      of this run, since its first program: what it reduced took time, too
    accepted_percent         of all operations that were sent
    findings_new, findings_known  signatures; known are those of a baseline
    crashes                  programs that ended in a crash or a hang
    unknown                  programs that were neither right nor wrong
    seconds_since_last_find  None: this run found nothing yet
    jobs                     processes that take part
    phase                    "starting", "noise" (measuring it, and compiling), "replaying" (what it knows already), "fuzzing", "reducing", "done"
    complete                 whether it came to its end
    """

    elapsed: float
    programs: int
    programs_per_second: float
    accepted_percent: float
    findings_new: int
    findings_known: int
    crashes: int
    unknown: int
    seconds_since_last_find: float | None
    jobs: int
    phase: str
    complete: bool = False


def write_statistics(folder: Path, statistics: Statistics) -> None:
    """Write `stats.json` into a campaign's folder. Raises UsageError when it cannot be written."""
    write_whole(folder / STATISTICS_FILE, msgspec.json.format(msgspec.json.encode(statistics), indent=1) + b"\n")
