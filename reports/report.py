"""The model that page, Markdown and JUnit are made from: a campaign held to its gate, with everything that stands beside each finding.

Rules
- Everything is data that was made before: nothing is run, read or decided here but the order.
- What is new comes first; what is known, not reproduced any more, or only in undocumented uses stands behind it.
- "not offered", "not reached" and "only refused" are different from "passed", and are never shown as it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from ..spec.operations import operation_name
from ..spec.pictures import Film
from ..store.campaigns import Account, Campaign, gone_signatures
from ..store.findings import Finding
from ..store.gate import EntryReplay, Gate, sorted_out
from ..store.records import ANSWERS, OPERATIONS, ShardRecord, answers_of
from .gate import gate_sentence
from .terminal import in_order, plural, short_version, stopped_words, verdict_sentence

State = Literal["new", "known", "undocumented", "not reproduced any more"]
Passage = Literal["passed", "diverged", "only refused", "not reached", "not offered", "not tested"]


NO_SCRIPTS: Mapping[str, str] = {}
NO_FILMS: Mapping[str, Film] = {}


class Card(msgspec.Struct, frozen=True):
    """A finding with what stands beside it; `number` is its place in all reports, `script` its repro.py ("" without one)."""

    number: int
    state: State
    finding: Finding
    replay: str
    script: str
    film: Film | None


class MatrixRow(msgspec.Struct, frozen=True):
    """What became of an operation of the contract, family by family: the passage, and how often it was answered."""

    operation: str
    passages: tuple[tuple[Passage, int], ...]


class Report(msgspec.Struct, frozen=True):
    """A campaign as it is shown.

    sentence  the verdict
    facts     label and value of what was run, and where
    gate      None: it had no baseline
    cards     new findings, then the others
    entries   of the baseline: how each did, the entry
    families  columns of `matrix`
    running   who is running the campaign now; "" when nobody is
    made_at   UTC
    """

    name: str
    sentence: str
    is_bad: bool
    facts: tuple[tuple[str, str], ...]
    campaign: Campaign
    gate: Gate | None
    cards: tuple[Card, ...]
    entries: tuple[tuple[str, EntryReplay], ...]
    families: tuple[str, ...]
    matrix: tuple[MatrixRow, ...]
    records: tuple[ShardRecord, ...]
    running: str
    made_at: str


def report_of(
    name: str,
    campaign: Campaign,
    gate: Gate | None,
    records: Sequence[ShardRecord],
    replay_of: Callable[[Finding], str],
    scripts: Mapping[str, str] = NO_SCRIPTS,
    films: Mapping[str, Film] = NO_FILMS,
    running: str = "",
    made_at: str = "",
) -> Report:
    """The report of a campaign.

    gate     None: it had no baseline
    scripts  signature -> text of repro.py
    films    signature -> film; a finding without one has no picture
    """
    account = campaign.account
    states = _states(campaign, gate)
    numbered = list(enumerate(in_order(campaign.findings), 1))
    order: tuple[State, ...] = ("new", "undocumented", "not reproduced any more", "known")
    cards = [
        Card(number, states[own.signature], own, replay_of(own), scripts.get(own.signature, ""), films.get(own.signature))
        for number, own in numbered
    ]
    sentence = verdict_sentence(campaign) + stopped_words(account) if gate is None else gate_sentence(campaign, gate)
    return Report(
        name=name,
        sentence=sentence,
        is_bad=any(card.state == "new" for card in cards) or bool(account.unreduced),
        facts=_facts(account, gate),
        campaign=campaign,
        gate=gate,
        cards=tuple(sorted(cards, key=lambda card: (order.index(card.state), card.number))),
        entries=_entries(campaign, gate),
        families=account.families,
        matrix=matrix_of(campaign, records),
        records=tuple(records),
        running=running,
        made_at=made_at,
    )


def replays_of(report: Report) -> dict[str, str]:
    """Signature -> the command that shows the finding again."""
    return {card.finding.signature: card.replay for card in report.cards}


def _states(campaign: Campaign, gate: Gate | None) -> dict[str, State]:
    gone = gone_signatures(campaign.account)
    known: set[str] = set()
    passed_over = {finding.signature for finding in campaign.findings if not finding.documented}
    if gate is not None:
        parts = sorted_out(campaign.account, campaign.findings, gate)
        known = {finding.signature for finding in parts.known}
        passed_over = {finding.signature for finding in parts.passed_over}
    states: dict[str, State] = {}
    for finding in campaign.findings:
        state: State = "undocumented" if finding.signature in passed_over else "new"
        if finding.signature in gone:
            state = "not reproduced any more"
        elif finding.signature in known:
            state = "known"
        states[finding.signature] = state
    return states


def _entries(campaign: Campaign, gate: Gate | None) -> tuple[tuple[str, EntryReplay], ...]:
    if gate is None:
        return ()
    parts = sorted_out(campaign.account, campaign.findings, gate)
    named = {
        "expired": parts.expired, "shows another divergence, which is new": parts.other_new, "known": parts.reproduced,
        "shows another divergence": parts.other, "not observed any more (fixed?)": parts.gone, "could not test": parts.could_not_test,
    }  # fmt: skip
    return tuple((how, entry) for how, entries in named.items() for entry in entries)


def _facts(account: Account, gate: Gate | None) -> tuple[tuple[str, str], ...]:
    truth = "our own recompute in float64" if account.oracle == "own" else "the target's own fresh recompute"
    if account.against is not None:
        truth = f"{account.against} {short_version(account.against_version or '')}"
    facts = [
        ("target", f"{account.target} {account.version}"),
        ("truth", truth),
        ("families", ", ".join(account.families)),
        (
            "budget",
            f"{plural(account.programs, 'program')}, {account.operations:,} operations in {account.seconds:.0f} s; {plural(account.jobs, 'job')}",
        ),
        ("drawn", f"profile {account.profile}, seed {account.seed}" + (f"; run {account.runs:,}" if account.runs > 1 else "")),
        ("machine", account.machine),
        ("started", account.started_at[:16].replace("T", " ") + " UTC"),
    ]
    if gate is not None:
        facts.append(("baseline", f"{gate.file}: {gate.entries} entries, {len(gate.replayed)} replayed"))
    return tuple((label, value) for label, value in facts if value)


def matrix_of(campaign: Campaign, records: Sequence[ShardRecord]) -> tuple[MatrixRow, ...]:
    """What became of every operation of the contract in every family of a campaign."""
    account = campaign.account
    answers, families = answers_of(tuple(records)), np.array([record.family for record in records], object)
    counts_of = {family: answers[families == family].sum(axis=0, dtype="int64") for family in account.families}
    not_offered = account.reach.not_offered if account.reach is not None else ()
    accepted = [ANSWERS.index(word) for word in ("accepted", "cancelled")]
    sent = [ANSWERS.index(word) for word in ANSWERS if word != "skipped"]
    parted = {(finding.family, _parting_operation(finding)) for finding in campaign.findings}
    parted |= {_place_of(left.signature) for left in account.unreduced}
    rows = []
    for number, operation in enumerate(OPERATIONS):
        passages: list[tuple[Passage, int]] = []
        for family in account.families:
            counts = counts_of[family][number]
            total = int(counts[sent].sum())
            passage: Passage = "passed"
            if family in account.could_not_test:
                passage = "not tested"
            elif (family, operation) in parted:
                passage = "diverged"
            elif operation in not_offered:
                passage = "not offered"
            elif not total:
                passage = "not reached"
            elif not counts[accepted].any():
                passage = "only refused"
            passages.append((passage, total))
        rows.append(MatrixRow(operation, tuple(passages)))
    return tuple(rows)


def _place_of(signature: str) -> tuple[str, str]:
    """Family and operation of a coarse signature, as in "llamacpp/lfm2 crash at share-range (self)"."""
    where, _, rest = signature.partition(" at ")
    return where.split(" ", 1)[0].rpartition("/")[2], rest.split(" ", 1)[0].split("-", 1)[0]


def _parting_operation(finding: Finding) -> str:
    """The operation that a finding puts in question: the one at which it shows, or of a decode the newest other one before; "" when opening."""
    index = finding.verdict.operation_index
    if index is None or not finding.program.operations:
        return ""
    names = [operation_name(operation) for operation in finding.program.operations[: index + 1]]
    others = [name for name in names if name != "decode"]
    return names[-1] if not others or names[-1] != "decode" else others[-1]
