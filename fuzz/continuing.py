"""How a campaign is kept, and how it goes on: between what it knows (known.py, corpus.py) and its folder (store/keeping.py).

Rules
- What changed since the newest transaction goes into the next one. It counts as kept when that was committed, not before: after a failure
  everything is tried again at the end.
- A folder that cannot be written any more ends no campaign.
- Settings that say which programs are drawn are the same, or it is another campaign.
"""

from collections.abc import Callable, Iterable

import msgspec

from ..spec.errors import UsageError
from ..spec.programs import program_line
from ..store.campaigns import Account, FindingRow, Identity, Kept, NotKept, Tally, WaitingRow
from ..store.findings import Finding
from ..store.keeping import Change, Store
from ..store.records import ShardRecord
from .corpus import Corpus
from .known import Findings, Waiting
from .signatures import enabling_operations
from .trial import Trial


class Keeper:
    """Keeps a campaign in its folder, where it has one."""

    def __init__(self, store: Store | None, findings: Findings, corpus: Corpus) -> None:
        self.scripts: dict[str, str | None] = {}
        self._shards: list[ShardRecord] = []
        self._store = store
        self._findings = findings
        self._corpus = corpus
        self._kept: dict[str, Finding] = {}
        self._database_fault = self._folder_fault = ""

    @property
    def not_written(self) -> str:
        """Why the folder does not hold what it should; empty: it does."""
        return self._database_fault or self._folder_fault

    def add_shard(self, record: ShardRecord) -> None:
        """Keep this of a shard with the next change, where there is a folder."""
        if self._store is not None:
            self._shards.append(record)

    def save(self, account: Account, position: int, learned: int | None, abilities: set[str], run: tuple[float, int, str | None]) -> None:
        """Keep what changed, then show the findings that are new; `run`: seconds and programs of this run of the command, and when it ended,
        if it did."""
        store, findings = self._store, self._findings
        if store is None or (self._database_fault and run[2] is None):
            return
        changed = [finding for finding in findings.by_signature.values() if self._kept.get(finding.signature) is not finding]
        waiting = [_row(entry) for entry in findings.changed.values()]
        tally = _tally(position, learned, abilities, findings)
        change = Change(account, tally, self._rows(changed), waiting, findings.finished, self._corpus.changed_rows(), tuple(self._shards))
        self._database_fault = _fault(lambda: store.save(change, *run))
        if self._database_fault:
            return
        new = [finding for finding in changed if finding.signature not in self._kept]
        self._kept.update((finding.signature, finding) for finding in changed)
        findings.changed.clear()
        findings.finished.clear()
        self._corpus.changed.clear()
        self._shards.clear()
        if new and not self._folder_fault:
            self._folder_fault = _fault(lambda: store.write_folders(self._rows(new)))

    def write_folders(self) -> None:
        """Bring the folders of all findings up to date."""
        store = self._store
        if store is not None:
            self._folder_fault = _fault(lambda: store.write_folders(self._rows(self._findings.by_signature.values())))

    def _rows(self, findings: Iterable[Finding]) -> list[FindingRow]:
        coarse_of = {fine: coarse for coarse, known in self._findings.enabling.items() for _, fine in known}
        return [FindingRow(finding, coarse_of[finding.signature], self.scripts.get(finding.signature)) for finding in findings]

    def take_up(self, kept: Kept) -> None:
        """Go on from what was kept. Raises UsageError when it cannot be read."""
        findings = self._findings
        for row in kept.findings:
            finding = row.finding
            findings.by_signature[finding.signature] = self._kept[finding.signature] = finding
            findings.enabling[row.coarse].append((enabling_operations(finding.program, finding.verdict), finding.signature))
            self.scripts[finding.signature] = row.script
        for waiting in kept.waiting:
            findings.waiting[waiting.coarse].append(_waiting(waiting))
            findings.next_number = waiting.number + 1
        findings.unexplained.update(kept.tally.unexplained)
        findings.explained_reductions.update(kept.tally.reductions)
        for entry in kept.tally.not_kept:
            findings.not_kept[entry.coarse][frozenset(entry.enabling)] += entry.programs
        self._corpus.take_up(kept.corpus)


def _fault(write: Callable[[], None]) -> str:
    """Why something could not be written; empty when it was."""
    try:
        write()
    except UsageError as error:
        return str(error)
    return ""


def _tally(position: int, learned: int | None, abilities: set[str], findings: Findings) -> Tally:
    not_kept = [
        NotKept(coarse, tuple(sorted(enabling)), programs)
        for coarse, counts in findings.not_kept.items()
        for enabling, programs in counts.items()
    ]
    return Tally(
        position,
        learned,
        tuple(sorted(abilities)),
        {coarse: programs for coarse, programs in findings.unexplained.items() if programs},
        tuple(not_kept),
        dict(findings.explained_reductions),
    )


def _row(waiting: Waiting) -> WaitingRow:
    assert waiting.number is not None
    return WaitingRow(
        waiting.number,
        waiting.coarse,
        waiting.program_number,
        waiting.seconds,
        waiting.first_seen,
        waiting.is_generated,
        waiting.counted,
        program_line(waiting.trial.program),
        " ".join(sorted(waiting.enabling)),
        msgspec.msgpack.encode(waiting.trial),
    )


def _waiting(row: WaitingRow) -> Waiting:
    try:
        trial = msgspec.msgpack.decode(row.trial, type=Trial)
    except msgspec.MsgspecError as error:
        raise UsageError(f"a divergence that waits in this campaign cannot be read ({row.program}): {error}") from None
    enabling = frozenset(row.enabling.split())
    return Waiting(row.program_number, row.seconds, row.first_seen, trial, enabling, row.is_generated, row.counted, row.number)


_NAMES = {
    "target": "--target",
    "families": "--family",
    "seed": "--seed",
    "profile": "--profile",
    "against": "--against",
    "inspect": "--inspect",
    "oracle": "--oracle",
    "steer": "steering",
    "against_library": "--against-lib",
}


def check_same(kept: Identity, asked: Identity, folder: object) -> None:
    """Raise UsageError, naming what differs, when a folder holds a campaign of other settings."""
    differing = [
        f"{word} {_said(getattr(kept, name))} (now {_said(getattr(asked, name))})"
        for name, word in _NAMES.items()
        if getattr(kept, name) != getattr(asked, name)
    ]
    if differing:
        raise UsageError(
            f"{folder} holds a campaign with other settings: {'; '.join(differing)}. Give the same to go on, --fresh to start over beside it, or another --out"
        )


def _said(value: object) -> str:
    match value:
        case tuple():
            return ", ".join(map(str, value))
        case None | False:
            return "not given"
        case True:
            return "given"
        case _:
            return str(value)
