"""The account of a campaign: what was run, how it ended, and where its findings are.

Rules
- `campaign.json` is the account; `findings/` holds one folder a finding.
- An account says what was not run: families that could not be tested, operations that were never executed.
"""

import msgspec

from .findings import Finding

FORMAT = 1


class Noise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A target's measured noise floor for a family, and the tolerance that follows from it."""

    floor: float
    tolerance: float
    log_count: int


class Account(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a campaign did.

    outcomes        operation name -> outcome word -> count
    verdicts        verdict kind -> programs
    noise           family -> measured floor and tolerance (the largest over the family's models)
    could_not_test  family -> why
    seconds_*       of wall time, summed over jobs
    """

    target: str
    version: str
    families: tuple[str, ...]
    seed: int
    jobs: int
    started_at: str
    seconds: float
    programs: int
    operations: int
    outcomes: dict[str, dict[str, int]]
    verdicts: dict[str, int]
    noise: dict[str, Noise]
    could_not_test: dict[str, str]
    seconds_generating: float
    seconds_running: float
    seconds_judging: float
    seconds_reducing: float
    complete: bool
    format: int = FORMAT


class Campaign(msgspec.Struct, frozen=True):
    """An account and its findings, newest signature last."""

    account: Account
    findings: tuple[Finding, ...]
