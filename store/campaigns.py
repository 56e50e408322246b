"""A campaign as it is kept: its account (what was run, how it ended), its findings, and what it needs to go on.

Rules
- `campaign.sqlite` holds all of it (database.py); `findings/` shows one folder a finding to people. keeping.py writes, this file reads.
- An account says what was not run: families that could not be tested, operations that were never executed.
- What is read is validated first: a row that is not as it should be is a clear error.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from ..spec.errors import UsageError
from .database import DATABASE_FILE, damaged, explained, read_database
from .findings import Amount, Count, Finding, Oracle, checked_finding
from .records import ShardRecord, read_records

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
    """Divergent programs that were not reduced, so that no finding stands for them: their coarse signature, and one of them on one line.

    operations  which operations came before the divergence in these programs, every set of words once (as in signatures, sorted)
    """

    signature: str
    programs: Count
    program: str
    operations: tuple[tuple[str, ...], ...] = ()


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


class Replayed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was tried again, before anything new, by a campaign that went on.

    findings        how many of those that it had
    gone            signatures of the ones that did not diverge as before, and were not met again since (sorted)
    corpus          programs of the corpus
    corpus_diverged of them, the ones that had been right and diverged now; they count as programs of the campaign
    version_before  what was driven before, where it was another version
    """

    findings: Count = 0
    gone: tuple[str, ...] = ()
    corpus: Count = 0
    corpus_diverged: Count = 0
    version_before: str | None = None


class Account(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a campaign did, in all runs of the command together; jobs, version, noise and `complete` are those of the newest.

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
    runs            of the command
    replayed        None: it began anew
    machine         of the newest run: architecture, cores, system; "" in an account of an older version
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
    runs: Count = 1
    replayed: Replayed | None = None
    machine: str = ""


def gone_signatures(account: Account) -> tuple[str, ...]:
    """Signatures of earlier findings that are not reproduced any more (sorted); empty for a campaign that began anew."""
    return account.replayed.gone if account.replayed is not None else ()


def present_findings(account: Account, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings without the ones that are not reproduced any more."""
    gone = gone_signatures(account)
    return tuple(finding for finding in findings if finding.signature not in gone)


class Campaign(msgspec.Struct, frozen=True):
    """An account and its findings, newest signature last; `not_written`: why it is not on disk as it should be."""

    account: Account
    findings: tuple[Finding, ...]
    not_written: str = ""


def is_tested(campaign: Campaign) -> bool:
    """Whether a campaign could test all that it was asked to, judged nearly all of it, was not blind, and is kept where it should be."""
    account = campaign.account
    faults = account.verdicts.get("harness-error", 0)
    judged = account.programs - account.verdicts.get("unknown", 0) - faults
    is_whole = judged > 0 and not faults and not account.could_not_test and account.ended_by is None
    return is_whole and is_mostly_known(account.verdicts) and not is_silent(account.canary) and not campaign.not_written


FINDINGS_FOLDER = "findings"


# --- what a campaign needs to go on ------------------------------------------------------------------------------------------


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that say which programs a campaign draws, and how they are judged: those of Settings (fuzz/campaign.py) without budget
    and jobs. Another version of the target is the same campaign."""

    target: str
    families: tuple[str, ...]
    seed: Count
    profile: str
    against: str | None
    inspect: bool
    oracle: Oracle
    steer: bool
    against_library: str | None = None


class NotKept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Divergent programs beyond those that can wait: how many, by the operations that they have (sorted)."""

    coarse: str
    enabling: tuple[str, ...]
    programs: Count


class Tally(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a campaign has to know beside its account to go on.

    position     programs that were drawn and merged; the next one is the first of what was never used
    learned      the shard at which what is known was last taken over for a round; None: at none
    abilities    of all sessions together (fuzz/reach.py)
    unexplained  coarse signature -> programs that count for no finding
    not_kept     of those, the ones that no row stands for
    reductions   coarse signature -> reductions of what a finding may explain
    """

    position: Count = 0
    learned: Count | None = None
    abilities: tuple[str, ...] = ()
    unexplained: dict[str, Count] = {}
    not_kept: tuple[NotKept, ...] = ()
    reductions: dict[str, Count] = {}


class WaitingRow(msgspec.Struct, frozen=True):
    """A divergence that waits; `program` is its text on one line, `enabling` the operations before it (sorted, as words), `trial` MessagePack."""

    number: int
    coarse: str
    program_number: int
    seconds: float
    first_seen: str
    is_generated: bool
    counted: str | None
    program: str
    enabling: str
    trial: bytes


class FindingRow(msgspec.Struct, frozen=True):
    """A finding, the coarse signature that it was found under, and its script."""

    finding: Finding
    coarse: str
    script: str | None


class CorpusRow(msgspec.Struct, frozen=True):
    """The smallest program that reached a cell of a table, on one line."""

    table: str
    cell: str
    operations: int
    tokens: int
    program: str


class Kept(msgspec.Struct, frozen=True):
    """What a folder holds of a campaign."""

    identity: Identity
    account: Account
    tally: Tally
    findings: tuple[FindingRow, ...]
    waiting: tuple[WaitingRow, ...]
    corpus: tuple[CorpusRow, ...]


# --- reading -----------------------------------------------------------------------------------------------------------------


def read_kept(folder: Path) -> Kept | None:
    """What a folder's database holds; None where a run began and nothing was kept of it yet. Raises UsageError when it cannot be used."""
    path = folder / DATABASE_FILE
    with closing(read_database(path)) as connection, explained(path, "read"):
        identity = _get(path, connection, "settings", Identity)
        account = _get(path, connection, "account", Account)
        tally = _get(path, connection, "tally", Tally)
        if account is None and tally is None:  # killed before its first programs
            return None
        if identity is None or account is None or tally is None:
            raise UsageError(damaged(path, "its settings, its account or its tally is missing"))
        rows = connection.execute("SELECT body, coarse, script FROM findings ORDER BY number")
        return Kept(
            identity,
            account,
            tally,
            tuple(FindingRow(checked_finding(body.encode(), str(path)), coarse, script) for body, coarse, script in rows),
            tuple(_waiting(connection)),
            tuple(_corpus(connection)),
        )


def read_campaign(folder: Path) -> Campaign:
    """Read a campaign's folder, also of one that is running. Raises UsageError when it is none, or its database cannot be used."""
    if not (folder / DATABASE_FILE).is_file():
        raise UsageError(f"{folder} is no campaign: it has no {DATABASE_FILE}; `statedrift fuzz --out {folder}` makes one")
    kept = read_kept(folder)
    if kept is None:
        raise UsageError(f"{folder} holds a campaign that has only begun; look again when its first programs have run")
    waiting = [(row.coarse, row.program, tuple(row.enabling.split())) for row in kept.waiting if row.counted is None]
    not_kept = [(entry.coarse, entry.enabling) for entry in kept.tally.not_kept]
    account = msgspec.structs.replace(kept.account, unreduced=unreduced_of(kept.tally.unexplained, waiting, not_kept))
    findings = sorted((row.finding for row in kept.findings), key=lambda finding: (finding.found_after_programs, finding.signature))
    return Campaign(account, tuple(findings))


def read_shards(folder: Path) -> tuple[ShardRecord, ...]:
    """What a campaign keeps of its programs, shard by shard; () of one of an older version. Raises UsageError when it cannot be used."""
    path = folder / DATABASE_FILE
    with closing(read_database(path)) as connection, explained(path, "read"):
        try:
            return read_records(connection)
        except ValueError as error:
            raise UsageError(damaged(path, str(error))) from None


def read_scripts(folder: Path) -> dict[str, str]:
    """The text of every finding's `repro.py`, by signature, where it has one. Raises UsageError when the campaign cannot be used."""
    path = folder / DATABASE_FILE
    with closing(read_database(path)) as connection, explained(path, "read"):
        return dict(connection.execute("SELECT signature, script FROM findings WHERE script IS NOT NULL"))


Operations = tuple[str, ...]
"""The operations that come before a divergence, sorted."""


def unreduced_of(
    unexplained: Mapping[str, int], waiting: Sequence[tuple[str, str, Operations]], not_kept: Sequence[tuple[str, Operations]]
) -> tuple[Unreduced, ...]:
    """The divergent programs that count for no finding, by coarse signature, each with the smallest that is at hand.

    unexplained  how many, by coarse signature
    waiting      signature, program on one line and operations of those that wait
    not_kept     signature and operations of those that are more than can wait
    """
    left = []
    for coarse, programs in sorted(unexplained.items()):
        if programs:
            texts = [program for signature, program, _ in waiting if signature == coarse]
            own = {operations for signature, _, operations in waiting if signature == coarse}
            own |= {operations for signature, operations in not_kept if signature == coarse}
            smallest = min(texts, key=lambda text: (len(text), text), default="")
            left.append(Unreduced(coarse, programs, smallest, tuple(sorted(own))))
    return tuple(left)


def _get(path: Path, connection: sqlite3.Connection, name: str, kind: type[Any]) -> Any:
    row = connection.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
    try:
        return None if row is None else msgspec.json.decode(row[0], type=kind)
    except msgspec.MsgspecError as error:
        raise UsageError(damaged(path, f"its {name}: {error}")) from None


def _waiting(connection: sqlite3.Connection) -> Iterator[WaitingRow]:
    columns = "number, coarse, program_number, seconds, first_seen, is_generated, counted, program, enabling, trial"
    for row in connection.execute(f"SELECT {columns} FROM waiting ORDER BY number"):
        number, coarse, program_number, seconds, first_seen, is_generated, counted, program, enabling, trial = row
        yield WaitingRow(number, coarse, program_number, seconds, first_seen, bool(is_generated), counted, program, enabling, trial)


def _corpus(connection: sqlite3.Connection) -> Iterator[CorpusRow]:
    for values in connection.execute("SELECT kind, cell, operations, tokens, program FROM corpus ORDER BY kind, cell"):
        yield CorpusRow(*values)
