"""A campaign's folder made from what it should hold, without running anything."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
from statedrift.store.campaigns import Account, CorpusRow, FindingRow, Identity, Tally, WaitingRow
from statedrift.store.findings import Finding
from statedrift.store.keeping import Change, Store


def identity_of(account: Account) -> Identity:
    return Identity(account.target, account.families, account.seed, account.profile, account.against, False, account.oracle, True)


def keep_campaign(
    folder: Path, account: Account, findings: Sequence[Finding] = (), waiting: Sequence[WaitingRow] = (), corpus: Sequence[CorpusRow] = ()
) -> Path:
    """The folder; `unreduced` of the account becomes a count of its own, as a campaign keeps it."""
    unexplained = {left.signature: left.programs for left in account.unreduced}
    rows = [FindingRow(finding, finding.signature, None) for finding in findings]
    with closing(Store(folder)) as store:
        store.begin(identity_of(account), account.started_at, account.jobs, None, account.programs, account.version)
        own = msgspec.structs.replace(account, unreduced=())
        change = Change(own, Tally(account.programs, unexplained=unexplained), rows, waiting, (), corpus)
        store.save(change, account.seconds, account.programs, account.started_at)
        store.write_folders(rows)
    return folder
