"""JUnit XML of a campaign, for the test pages of CI systems: a suite for every family, a case for every finding and every entry of the baseline.

Rules
- Failures are what makes a gate red, and nothing else; what is known is skipped, with the reason that people gave; what could not be tested is an error.
- Every suite has the case `was tested`, so that a family without a finding is seen to have been tested, and where it is known what was sent
  a case for every operation of the contract: passed, or skipped with what it was instead. What diverged fails in the cases of its findings.
- Characters that XML 1.0 does not have stand as escapes, as on a terminal.
- Elements, attributes and their order are those of the schema that Jenkins and its kin read.
Source: jenkinsci/xunit-plugin, junit-10.xsd.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from typing import NamedTuple

from ..spec.programs import program_text
from ..store.campaigns import Campaign
from ..store.findings import Finding
from ..store.gate import EntryReplay, Gate, Sorted, sorted_out
from .gate import expired_words, people_words
from .report import MatrixRow, Report, replays_of
from .terminal import could_not_test_words, in_order, numbered_program, plural, stopped_words, verdict_sentence

CAMPAIGN = "campaign"
"""The suite of what concerns all families."""
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class _Case(NamedTuple):
    """One test case; `how`: "passed", or the element that says why it did not; `type`: of a failure or error."""

    family: str
    name: str
    how: str
    message: str = ""
    text: str = ""
    type: str = "could-not-test"
    seconds: float = 0.0


def junit_text(report: Report) -> str:
    """The XML, with its declaration and a line end at its end. Without a baseline every finding that counts is a failure."""
    campaign = report.campaign
    cases = _cases(report)
    account = campaign.account
    target = account.target if account.against is None else f"{account.target} against {account.against}"
    root = ElementTree.Element("testsuites", {"name": "statedrift", **_counts(cases)})
    for family in dict.fromkeys(case.family for case in cases):
        own = [case for case in cases if case.family == family]
        started = account.started_at.split("+")[0].split(".")[0]
        suite = ElementTree.SubElement(
            root, "testsuite", {"name": _clean(f"{target}/{family}"), "timestamp": started, **_counts(own, with_skipped=True)}
        )
        for case in own:
            _add_case(suite, case, f"{target}.{family}")
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _counts(cases: list[_Case], with_skipped: bool = False) -> dict[str, str]:
    hows = [case.how for case in cases]
    skipped = {"skipped": str(hows.count("skipped"))} if with_skipped else {}
    seconds = {"time": f"{sum(case.seconds for case in cases):.3f}"}
    return {"tests": str(len(cases)), "failures": str(hows.count("failure")), "errors": str(hows.count("error")), **skipped, **seconds}


def _add_case(suite: ElementTree.Element, case: _Case, classname: str) -> None:
    attributes = {"classname": _clean(classname), "name": _clean(case.name), "time": f"{case.seconds:.3f}"}
    element = ElementTree.SubElement(suite, "testcase", attributes)
    if case.how == "passed":
        if case.text:
            ElementTree.SubElement(element, "system-out").text = _clean(case.text)
        return
    how = ElementTree.SubElement(element, case.how, {"message": _clean(case.message)})
    if case.how != "skipped":
        how.set("type", case.type)
    if case.text:
        how.text = _clean(case.text)


def _clean(text: str) -> str:
    return _FORBIDDEN.sub(lambda match: repr(match.group())[1:-1], text)


def _cases(report: Report) -> list[_Case]:
    campaign, gate, replays = report.campaign, report.gate, replays_of(report)
    account = campaign.account
    matrix = report.matrix if report.records else ()
    cases = [_family_case(campaign, family) for family in account.families]
    cases += [_operation_case(row, place, family) for row in matrix for place, family in enumerate(account.families)]
    if gate is None:
        parts = None
        failures, skipped = [finding for finding in campaign.findings if finding.documented], []
        skipped += [(finding, "undocumented: fails nothing") for finding in campaign.findings if not finding.documented]
    else:
        parts = sorted_out(account, campaign.findings, gate)
        failures = list(parts.new)
        skipped = [(finding, "undocumented: fails nothing") for finding in parts.passed_over]
    cases += [_finding_case(finding, "failure", f"{finding.verdict.kind}: {finding.title}", replays) for finding in in_order(failures)]
    cases += [_finding_case(finding, "skipped", message, replays) for finding, message in skipped]
    if parts is not None and gate is not None:
        cases += [_entry_case(replayed, parts, gate) for replayed in gate.replayed]
    for left in account.unreduced if parts is None else parts.unreduced:
        words = f"not reduced: {plural(left.programs, 'program')}"
        cases.append(_Case(_family_of(left.signature, account.families), left.signature, "failure", words, left.program, "not-reduced"))
    cases.append(_campaign_case(campaign))
    order = {family: number for number, family in enumerate((*account.families, CAMPAIGN))}
    return sorted(cases, key=lambda case: order.get(case.family, -1))


def _family_of(signature: str, families: tuple[str, ...]) -> str:
    family = signature.split(" ", 1)[0].rpartition("/")[2]
    return family if family in families else CAMPAIGN


def _family_case(campaign: Campaign, family: str) -> _Case:
    account = campaign.account
    if family in account.could_not_test:
        return _Case(family, "was tested", "error", "could not test: " + account.could_not_test[family].removeprefix("could not test: "))
    if not account.programs:
        return _Case(family, "was tested", "error", "could not test: it ended before the first program")
    return _Case(family, "was tested", "passed", seconds=account.seconds / max(1, len(account.families) - len(account.could_not_test)))


def _operation_case(row: MatrixRow, place: int, family: str) -> _Case:
    """What became of an operation of the contract in a family."""
    passage, count = row.passages[place]
    if passage == "passed":
        return _Case(family, f"contract: {row.operation}", "passed", text=f"answered {count:,} times, every time as it must")
    message = "diverged: the cases of its findings say how" if passage == "diverged" else passage
    return _Case(family, f"contract: {row.operation}", "skipped", message)


def _campaign_case(campaign: Campaign) -> _Case:
    """What is to be said of the campaign as a whole."""
    sentence = verdict_sentence(campaign)
    if words := (could_not_test_words(campaign.account) + stopped_words(campaign.account)).removeprefix("; "):
        return _Case(CAMPAIGN, "everything was tested", "error", words, sentence)
    return _Case(CAMPAIGN, "everything was tested", "passed", text=sentence)


def _finding_case(finding: Finding, how: str, message: str, replays: Mapping[str, str]) -> _Case:
    lines = [
        finding.title,
        *numbered_program(finding.program, finding.verdict, finding.answers, finding.title),
        f"replay   {replays[finding.signature]}",
        f"version  {finding.version}",
        *finding.log,
    ]
    return _Case(finding.family, finding.signature, how, message, "\n".join(lines), finding.verdict.kind)


def _entry_case(replayed: EntryReplay, parts: Sorted, gate: Gate) -> _Case:
    entry = replayed.entry
    people = people_words(entry).strip(" ()")
    program = program_text(entry.program)
    if replayed.expired:
        how, message = "failure", expired_words(replayed) + people_words(entry)
    elif replayed.outcome == "reproduces":
        how, message = "skipped", f"known: {people}" if people else "known"
    elif replayed.outcome == "gone":
        message = f"fixed? No divergence in {plural(replayed.runs, 'run')} any more; take the entry out of {gate.file}"
        return _Case(entry.family, entry.signature, "failure" if gate.strict else "passed", message, f"{message}\n{program}", "gone")
    elif replayed.outcome == "differs":
        how, message = ("failure" if replayed in parts.other_new else "skipped"), f"differs: it shows {replayed.signature}"
    else:
        how, message = "error", f"could not test: {replayed.why}"
    return _Case(
        entry.family, entry.signature, how, message, program, "expired" if replayed.expired else replayed.outcome.replace(" ", "-")
    )
