"""The account of a campaign: what was run, how it ended, and where its findings are.

Rules
- `campaign.json` is the account; `findings/` holds one folder a finding.
- An account says what was not run: families that could not be tested, operations that were never executed.
"""

from pathlib import Path

import msgspec

from ..spec.errors import UsageError
from .files import write_whole
from .findings import Amount, Count, Finding, Oracle, read_finding

FORMAT = 1


class Noise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A target's measured noise floor for a family, and the tolerance that follows from it; of its state rows, too, where they were looked at.

    unjudged  share of rows that hang on a selection too close to be judged
    """

    floor: Amount
    tolerance: Amount
    log_count: Count
    state_floor: Amount | None = None
    state_tolerance: Amount | None = None
    unjudged: Amount = 0.0


class Context(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """What has to come together for a known divergence to show: a family, and operations beside `decode` (words of signatures, sorted)."""

    family: str
    operations: tuple[str, ...]


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From shard `first_shard` on the programs were steered away from these contexts (sorted), until the next entry.

    With the seed it says which programs every shard had, also where time was the limit.
    """

    first_shard: Count
    contexts: tuple[Context, ...]


class Reach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the programs of a campaign reached, as cells of tables.

    cells        table -> cell -> how often; 0: the target could have been brought there, and was not
    not_offered  operations that no session of the target offers
    """

    cells: dict[str, dict[str, Count]]
    not_offered: tuple[str, ...] = ()


class Unreduced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Divergent programs that were not reduced, so that no finding stands for them: their coarse signature, and one of them on one line."""

    signature: str
    programs: Count
    program: str


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the campaign's own eyes were watched: programs tried on a target that is wrong on purpose, and how many of them showed it.

    why_not  why they could not be tried
    """

    programs: Count = 0
    seen: Count = 0
    why_not: str = ""


CANARY_RATE = 0.009
"""At least this share of generated programs shows the canary's fault; measured over 3,200 programs each: 0.0091 (mamba2), 0.0094 (lfm2);
tests/quality/test_canary_rate.py."""
SILENCE_PROBABILITY_MAX = 1e-6


def is_silent(canary: Canary | None) -> bool:
    """Whether the canary was never seen in so many programs that a generator and a judge that work would have."""
    return canary is not None and not canary.seen and (1 - CANARY_RATE) ** canary.programs < SILENCE_PROBABILITY_MAX


UNKNOWN_SHARE_MAX = 0.01


def is_mostly_known(verdicts: dict[str, int]) -> bool:
    """Whether at most one program, or one in a hundred, was neither right nor wrong: more says that something could not be tested."""
    return verdicts.get("unknown", 0) <= max(1.0, UNKNOWN_SHARE_MAX * sum(verdicts.values()))


class Account(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a campaign did.

    outcomes        operation name -> outcome word -> count
    verdicts        verdict kind -> programs
    noise           family -> measured floor and tolerance (the largest over the family's models)
    could_not_test  family -> why
    unreduced       divergent programs that no finding stands for
    not_judged      the first programs that were neither right nor wrong: why, and their text on one line
    seconds_*       of wall time, summed over jobs
    against, against_version  the target that was the truth; None: the oracle was
    inspected       states (all rows of one sequence) that were compared; None: none was looked at
    known           what was known when, in the order of the shards; before the first entry nothing was
    oracle          whose recompute was the truth where no other target was: our own, or the engine's
    reach           None: not counted (an account of an older version)
    canary          None: not watched (an account of an older version)
    profile         which kind of programs was drawn
    against_library  version of the other build of the target, whose own divergences are none; None: there was none
    also_in_old     coarse signature -> programs that diverged in the same way on that build
    ended_by        why it went no further, where the target could not be used any more; None: it came to its end, or was stopped
    """

    target: str
    version: str
    families: tuple[str, ...]
    seed: Count
    jobs: Count
    started_at: str
    seconds: Amount
    programs: Count
    operations: Count
    outcomes: dict[str, dict[str, Count]]
    verdicts: dict[str, Count]
    noise: dict[str, Noise]
    could_not_test: dict[str, str]
    seconds_generating: Amount
    seconds_running: Amount
    seconds_judging: Amount
    seconds_reducing: Amount
    complete: bool
    not_judged: tuple[tuple[str, str], ...] = ()
    unreduced: tuple[Unreduced, ...] = ()
    against: str | None = None
    against_version: str | None = None
    inspected: Count | None = None
    oracle: Oracle = "own"
    known: tuple[Known, ...] = ()
    reach: Reach | None = None
    canary: Canary | None = None
    profile: str = "swarm"
    ended_by: str | None = None
    against_library: str | None = None
    also_in_old: dict[str, Count] = {}
    format: int = FORMAT


class Campaign(msgspec.Struct, frozen=True):
    """An account and its findings, newest signature last; `not_written`: why it is not on disk as it should be."""

    account: Account
    findings: tuple[Finding, ...]
    not_written: str = ""


ACCOUNT_FILE = "campaign.json"
FINDINGS_FOLDER = "findings"


def prepare_folder(folder: Path) -> None:
    """Make sure that a campaign can be written to `folder`. Raises UsageError when it cannot, or when it holds something else."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; --out needs a folder")
    try:
        is_empty = not folder.is_dir() or not any(folder.iterdir())
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}; choose another --out") from None
    if not is_empty:
        raise UsageError(f"{folder} is not empty; choose another --out for a new campaign")
    write_whole(folder / ".probe", b"")
    (folder / ".probe").unlink()


def write_account(folder: Path, account: Account) -> None:
    """Write the account of a campaign. Raises UsageError when it cannot be written."""
    write_whole(folder / ACCOUNT_FILE, msgspec.json.format(msgspec.json.encode(account), indent=1))


def read_campaign(folder: Path) -> Campaign:
    """Read a campaign's folder. Raises UsageError when it is none, or a file in it is damaged."""
    path = folder / ACCOUNT_FILE
    if not path.is_file():
        raise UsageError(f"{folder} is no campaign: it has no {ACCOUNT_FILE}; `statedrift fuzz --out {folder}` makes one")
    try:
        account = msgspec.json.decode(path.read_bytes(), type=Account)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} is damaged or of another version: {error}") from None
    if account.format != FORMAT:
        raise UsageError(f"{path} has format {account.format}; this version reads format {FORMAT}")
    findings = [read_finding(file) for file in sorted((folder / FINDINGS_FOLDER).glob("*/finding.json"))]
    return Campaign(account, tuple(sorted(findings, key=lambda finding: (finding.found_after_programs, finding.signature))))
