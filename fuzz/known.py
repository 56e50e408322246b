"""What a campaign knows: its findings, and the divergences that wait to be reduced.

Rules
- A program counts for one finding: the one that it was reduced to, until then one that may explain it.
- What nothing explains is reduced first, the smallest first; what a finding may explain gets a share, for two faults can wear one coat.
- No divergence is lost: what was not reduced in the end is said, by its coarse signature.
- Every choice here is a pure function of what came in, in its order: no clock, no number of processes.
- It remembers what changed since it was last kept on disk (fuzz/continuing.py): which divergences wait now, and which are done with.
"""

from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from itertools import chain

import msgspec

from ..spec.programs import Program, program_line
from ..spec.verdicts import Verdict
from ..store.campaigns import Context, Unreduced, unreduced_of
from ..store.findings import Finding
from .signatures import enabling_name, enabling_operations
from .trial import Trial

EXPLAINED_REDUCTIONS_MAX = 24
"""Reductions, for each coarse signature, of divergences that a known finding may explain."""
EXPLAINED_AT_ONCE = 4
"""Of them, how many are reduced without waiting for what became of the others."""
WAITING_MAX = 200
"""Divergences, for each coarse signature, that wait for their reduction."""


class Waiting(msgspec.Struct):
    """A divergence that waits for its reduction.

    first_seen    UTC, ISO 8601
    is_generated  a program of the campaign; False for one that was met while another was reduced
    counted       the finding (fine signature) that it counts for
    number        its own, while it waits or is being reduced; None: it does not wait
    is_explained  a finding may explain it, and another fault hide behind that: decided when its reduction begins
    """

    program_number: int
    seconds: float
    first_seen: str
    trial: Trial
    enabling: frozenset[str]
    is_generated: bool = True
    counted: str | None = None
    number: int | None = None
    is_explained: bool = False

    @property
    def coarse(self) -> str:
        """Its coarse signature: it diverged, so that it has one."""
        assert self.trial.signature is not None
        return self.trial.signature


def context_of(program: Program, verdict: Verdict) -> Context | None:
    """What has to come together for a reduced program's divergence; None when decodes are enough, which no program can do without."""
    words = set(enabling_operations(program, verdict))
    index = verdict.operation_index
    if index is not None and index < len(program.operations):
        words.add(enabling_name(program.operations[index]))
    words.discard("decode")
    return Context(program.model.family, tuple(sorted(words))) if words else None


class Findings:
    """What is known, and what waits."""

    def __init__(self) -> None:
        self.by_signature: dict[str, Finding] = {}
        self.enabling: dict[str, list[tuple[frozenset[str], str]]] = defaultdict(list)  # coarse -> (operations, fine)
        self.waiting: dict[str, list[Waiting]] = defaultdict(list)
        self.explained_reductions: Counter[str] = Counter()
        self.unexplained: Counter[str] = Counter()  # coarse -> programs that count for no finding
        self.not_kept: dict[str, Counter[frozenset[str]]] = defaultdict(
            Counter
        )  # of those: coarse -> operations -> programs beyond WAITING_MAX
        self.next_number = 1
        self.changed: dict[int, Waiting] = {}  # by number: to be kept
        self.finished: list[int] = []  # numbers: kept perhaps, and done with
        self._wave: list[Waiting] = []  # what is being reduced

    def explanation(self, coarse: str, enabling: frozenset[str]) -> str | None:
        """A known finding whose operations are all in the program."""
        return next((fine for known, fine in self.enabling[coarse] if known <= enabling), None)

    def known(self, coarse: str) -> frozenset[str]:
        """The fine signatures of the findings with this coarse one."""
        return frozenset(fine for _, fine in self.enabling[coarse])

    def contexts(self) -> tuple[Context, ...]:
        """What programs may be steered away from, sorted."""
        found = {context_of(finding.program, finding.verdict) for finding in self.by_signature.values()}
        return tuple(sorted(context for context in found if context is not None))

    def add_divergent(self, waiting: Waiting) -> None:
        """Count a divergence for a finding that may explain it, and let it wait for its turn."""
        coarse = waiting.coarse
        self.unexplained[coarse] += waiting.is_generated
        explained = self.explanation(coarse, waiting.enabling)
        if explained is not None:
            self.count(waiting, explained)
        if len(self.waiting[coarse]) < WAITING_MAX:
            self.waiting[coarse].append(waiting)
            waiting.number = self.next_number
            self.changed[waiting.number] = waiting
            self.next_number += 1
        elif explained is None and waiting.is_generated:
            self.not_kept[coarse][waiting.enabling] += 1

    def count(self, waiting: Waiting, fine: str) -> None:
        """The program is one of that finding's."""
        if not waiting.is_generated or waiting.counted == fine:
            return
        if waiting.counted is None:
            self.unexplained[waiting.coarse] -= 1
        else:  # it was not that finding after all
            self._see(waiting.counted, -1)
        self._see(fine, 1)
        waiting.counted = fine
        if waiting.number is not None:
            self.changed[waiting.number] = waiting

    def _see(self, fine: str, programs: int) -> None:
        finding = self.by_signature[fine]
        last_seen = now() if programs > 0 else finding.last_seen
        self.by_signature[fine] = msgspec.structs.replace(finding, seen=finding.seen + programs, last_seen=last_seen)

    def next_wave(self, with_explained: bool, most: int) -> list[Waiting]:
        """At most `most` divergences to reduce next, none of which needs to know what becomes of another.

        For each coarse signature the smallest that nothing explains; when there is none (and it is asked for) some that may hide another fault.
        """
        ranked: list[tuple[int, str, int]] = []
        for explained in (False, True) if with_explained else (False,):
            for coarse in sorted(self.waiting):
                left = EXPLAINED_REDUCTIONS_MAX - self.explained_reductions[coarse]
                sizes = [
                    (len(entry.trial.program.operations), coarse, place)
                    for place, entry in enumerate(self.waiting[coarse])
                    if (self.explanation(coarse, entry.enabling) is not None) == explained
                ]
                ranked += sorted(sizes)[: max(0, min(EXPLAINED_AT_ONCE, left)) if explained else 1]
            if ranked:
                break
        wave = sorted(ranked)[:most]
        entries = [self.waiting[coarse][place] for _, coarse, place in wave]
        for _, coarse, place in sorted(wave, reverse=True, key=lambda entry: entry[2]):
            entry = self.waiting[coarse].pop(place)
            entry.is_explained = self.explanation(coarse, entry.enabling) is not None
        self._wave = entries
        return list(entries)

    def finish(self, waiting: Waiting) -> None:
        """A divergence of the wave was reduced, and what came of it was taken over."""
        self.explained_reductions[waiting.coarse] += waiting.is_explained
        self._wave = [entry for entry in self._wave if entry is not waiting]
        if waiting.number is not None:
            self.changed.pop(waiting.number, None)
            self.finished.append(waiting.number)
            waiting.number = None

    def see_again(self, fine: str) -> None:
        """A finding's own program diverged as before."""
        self.by_signature[fine] = msgspec.structs.replace(self.by_signature[fine], last_seen=now())

    def add_finding(self, waiting: Waiting, finding: Finding, enabling: frozenset[str]) -> None:
        """A new finding, which a divergence was reduced to; programs that wait without an explanation and have all its operations count
        for it, too."""
        coarse = waiting.coarse
        self.by_signature[finding.signature] = msgspec.structs.replace(finding, seen=0)
        self.enabling[coarse].append((enabling, finding.signature))
        self.count(waiting, finding.signature)
        for other in self.waiting[coarse]:
            if other.counted is None and enabling <= other.enabling:
                self.count(other, finding.signature)
        explained = [operations for operations in self.not_kept[coarse] if enabling <= operations]
        for programs in [self.not_kept[coarse].pop(operations) for operations in explained]:
            self.unexplained[coarse] -= programs
            self._see(finding.signature, programs)

    def unreduced(self) -> tuple[Unreduced, ...]:
        """The divergent programs that count for no finding, by coarse signature, each with the smallest that is at hand."""
        kept = [entry for entry in (*chain.from_iterable(self.waiting.values()), *self._wave) if entry.counted is None]
        waiting = [(entry.coarse, program_line(entry.trial.program), tuple(sorted(entry.enabling))) for entry in kept]
        not_kept = [(coarse, tuple(sorted(words))) for coarse, counts in self.not_kept.items() for words in counts]
        return unreduced_of(self.unexplained, waiting, not_kept)


def moment(started_at: str, seconds: float) -> str:
    """The time so many seconds after another one, as findings and accounts write it."""
    return (datetime.fromisoformat(started_at) + timedelta(seconds=seconds)).isoformat(timespec="seconds")


def now() -> str:
    """The time as findings and accounts write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
