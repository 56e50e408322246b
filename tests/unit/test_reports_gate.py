"""What a gate shows: one screen, its place in a report, JUnit XML, Markdown, the trend; pinned by golden files in tests/unit/golden.

Run with STATEDRIFT_UPDATE_GOLDEN=1 to write them anew, and read what changed.
"""

import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import msgspec
import pytest
from statedrift.reports.gate import ROWS, gate_colour, gate_screen, gate_text
from statedrift.reports.junit import junit_text
from statedrift.reports.markdown import BYTES_MAX, LINES_MAX, escaped, fenced, markdown_text
from statedrift.reports.report import Report, report_of
from statedrift.reports.trend import ROWS_MAX, trend_text
from statedrift.spec.errors import UsageError
from statedrift.spec.programs import Program, parse_program, program_id
from statedrift.spec.verdicts import ACCEPTED, Verdict
from statedrift.store.baseline import Entry
from statedrift.store.campaigns import Account, Campaign, Unreduced
from statedrift.store.findings import Answer, Finding
from statedrift.store.gate import EntryReplay, Gate
from statedrift.store.records import ShardRecord

GOLDEN = Path(__file__).parent / "golden"
VERSION = "llama-cpp-python 0.3.36 (llama.cpp 0.5.0-dev, library 73592488)"
TWICE = parse_program("model lfm2 seed=0; decode 0:10; rollback 0 2; decode 0:1/1")
KEPT = parse_program("model lfm2 seed=0; keep 0")
NEW = Finding(
    signature="llamacpp/lfm2 wrong-output at decode (self) after decode+rollback",
    title="the next outputs of the sequence are wrong after rollback, although everything was accepted",
    target="llamacpp",
    version=VERSION,
    family="lfm2",
    verdict=Verdict("wrong-output", 2, 0, 8, "self", 22.8, 0.002, reason="logits off by 22.8 (tolerance 0.002)"),
    program=TWICE,
    original=TWICE,
    documented=True,
    undocumented_uses=(),
    reproduced=10,
    reruns=10,
    found_after_programs=1212,
    found_after_seconds=2.1,
    first_seen="2026-01-02T03:04:05+00:00",
    last_seen="2026-01-02T03:05:05+00:00",
    answers=(Answer(ACCEPTED, (9, -1)), Answer(ACCEPTED, (7, -1)), Answer(ACCEPTED, (8, -1))),
)
KNOWN = msgspec.structs.replace(NEW, signature="llamacpp/mamba2 bad-refusal at keep (self)", family="mamba2", found_after_programs=3)
UNDOCUMENTED = msgspec.structs.replace(
    NEW, signature="llamacpp/lfm2 wrong-output at decode (self) after decode+divide", documented=False, undocumented_uses=("divide",)
)
ACCOUNT = Account(
    target="llamacpp", version=VERSION, families=("mamba2", "lfm2"), seed=7, jobs=1, started_at="2026-01-02T03:04:05+00:00", seconds=20.0,
    programs=2412, operations=41000, outcomes={}, verdicts={"ok": 2400, "wrong-output": 12}, noise={}, could_not_test={},
    seconds_generating=1.0, seconds_running=10.0, seconds_judging=5.0, seconds_reducing=3.0, complete=True,
)  # fmt: skip


def entry(signature: str, **changes: object) -> Entry:
    program = parse_program(f"model {signature.split('/')[1].split(' ')[0]} seed=0; keep 0")
    return msgspec.structs.replace(Entry(signature, "llamacpp", program.model.family, program), **changes)


SHOWN = EntryReplay(entry(KNOWN.signature, ticket="#12", reason="waits for the new allocator"), "reproduces", 1)
GONE = EntryReplay(entry("llamacpp/lfm2 wrong-output at decode (other) after decode+share", ticket="#7"), "gone", 10)
EXPIRED = msgspec.structs.replace(
    SHOWN, expired=True, entry=entry("llamacpp/lfm2 crash at clear (self) after decode", expires=date(2026, 1, 1), ticket="#3")
)
UNTESTED = EntryReplay(entry("llamacpp/lfm2 hang at clear (self)"), "could not test", 0, why="the noise is too large")
DIFFERS = EntryReplay(entry("llamacpp/lfm2 nonfinite at decode (self)"), "differs", 10, signature="llamacpp/lfm2 crash at decode (self)")
GATE = Gate("known.toml", 7, 2, (SHOWN, GONE, EXPIRED, UNTESTED, DIFFERS), "2026-01-02", VERSION)
CAMPAIGN = Campaign(
    msgspec.structs.replace(
        ACCOUNT,
        unreduced=(Unreduced("llamacpp/lfm2 crash at restore", 3, "model lfm2 seed=0; save 0 a; restore a 1", (("save",),)),),
        could_not_test={"mamba2": "could not test: the noise floor is 0.3"},
    ),
    (NEW, KNOWN, UNDOCUMENTED),
)
GREEN = msgspec.structs.replace(GATE, replayed=(SHOWN, GONE))
QUIET = Campaign(ACCOUNT, (KNOWN,))


def replay_of(finding: Finding) -> str:
    return f"statedrift replay {program_id(finding.program)} --target {finding.target}"


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("STATEDRIFT_UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text()


def rows_of(text: str) -> int:
    return sum(max(1, -(-len(line) // 80)) for line in text.removesuffix("\n").split("\n"))


# --- a screen, and a report --------------------------------------------------------------------------------------------------


def test_one_new_divergence_as_it_is_shown() -> None:
    check_golden("gate_new.txt", gate_screen(Campaign(ACCOUNT, (NEW, KNOWN)), GREEN, replay_of, Path("runs/gate")))


def test_everything_at_once_as_it_is_shown_on_one_screen() -> None:
    text = gate_screen(CAMPAIGN, GATE, replay_of, Path("runs/gate"))
    check_golden("gate_everything.txt", text)
    assert rows_of(text) <= ROWS


def test_a_green_gate_as_it_is_shown() -> None:
    check_golden("gate_green.txt", gate_screen(QUIET, GREEN, replay_of, Path("runs/gate")))


def test_a_report_names_every_entry() -> None:
    text = gate_text(CAMPAIGN, GATE)
    check_golden("gate_report.txt", text)
    assert [replayed.entry.signature for replayed in GATE.replayed if replayed.entry.signature not in " ".join(text.split())] == []


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 40])
@pytest.mark.parametrize("folder", [None, Path("runs/gate")])
def test_however_much_is_new_it_fits_on_one_screen_and_the_rest_is_counted(count: int, folder: Path | None) -> None:
    findings = tuple(msgspec.structs.replace(NEW, signature=f"{NEW.signature} {number}") for number in range(count))
    text = gate_screen(Campaign(ACCOUNT, findings), GATE, replay_of, folder)
    assert rows_of(text) <= ROWS
    shown = len(re.findall("^[0-9]+ wrong-output", text, re.MULTILINE))
    more = re.search(r"\.\.\. and ([0-9]+) more", text)
    others = len([replayed for replayed in GATE.replayed if replayed.outcome != "reproduces" or replayed.expired])
    assert shown >= 1
    assert 0 <= (0 if more is None else int(more[1])) - (count - shown) <= others + 2
    assert text.startswith(f"red: {count + 1} new divergences")
    assert "--update" in text


def test_two_findings_are_shown_in_full_and_many_in_short() -> None:
    def programs(count: int) -> int:
        findings = tuple(msgspec.structs.replace(NEW, signature=f"{NEW.signature} {number}") for number in range(count))
        return gate_screen(Campaign(ACCOUNT, findings), GREEN, replay_of, Path("runs/gate")).count("rollback 0 2")

    assert (programs(1), programs(2)) == (1, 1)
    assert programs(4) == 0


def test_a_campaign_that_was_stopped_is_said_to_be() -> None:
    stopped = Campaign(msgspec.structs.replace(ACCOUNT, complete=False), ())
    assert "stopped before its end" in " ".join(gate_screen(stopped, GREEN, replay_of, None).split())
    assert gate_colour(stopped, GREEN) == "not tested"
    assert "stopped before its end" in markdown_text(model(stopped, None))
    suites = ElementTree.fromstring(junit_text(model(stopped, None)))
    assert [error.get("message") for error in suites.iter("error")] == ["stopped before its end"]
    assert "stopped" not in gate_screen(QUIET, GREEN, replay_of, None)


def test_without_a_folder_it_says_that_the_campaign_must_be_kept() -> None:
    text = gate_screen(Campaign(ACCOUNT, (NEW,)), GREEN, replay_of, None)
    assert "--out DIR" in text
    assert "statedrift baseline DIR --file known.toml --update" in text


# --- JUnit XML ---------------------------------------------------------------------------------------------------------------

SUITE_ATTRIBUTES = {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"}
RESULTS = {"failure", "error", "skipped"}


def model(campaign: Campaign, gate: Gate | None, records: Sequence[ShardRecord] = ()) -> Report:
    return report_of("runs/nightly", campaign, gate, records, replay_of)


def check_schema(text: str) -> ElementTree.Element:
    """What junit-10.xsd of Jenkins' xunit plugin asks of the elements that are used here."""
    root = ElementTree.fromstring(text)
    assert root.tag == "testsuites"
    assert set(root.attrib) <= {"name", "time", "tests", "failures", "errors"}
    cases = []
    for suite in root:
        assert suite.tag == "testsuite"
        assert {"name", "tests"} <= set(suite.attrib) <= SUITE_ATTRIBUTES
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.attrib["timestamp"])
        for case in suite:
            assert case.tag == "testcase"
            assert {"name", "classname"} <= set(case.attrib) <= {"name", "classname", "time"}
            assert {child.tag for child in case} <= RESULTS | {"system-out"}
            assert sum(child.tag in RESULTS for child in case) <= 1
            for child in case:
                assert set(child.attrib) <= {"message", "type"}
        check_counts(suite, list(suite))
        cases += list(suite)
    check_counts(root, cases)
    return root


def check_counts(element: ElementTree.Element, cases: list[ElementTree.Element]) -> None:
    names = {"tests": None, "failures": "failure", "errors": "error", "skipped": "skipped"}
    for attribute, tag in names.items():
        if attribute in element.attrib:
            assert int(element.attrib[attribute]) == sum(tag is None or case.find(tag) is not None for case in cases), attribute
    assert float(element.attrib["time"]) == pytest.approx(sum(float(case.attrib["time"]) for case in cases), abs=0.01)


def results(text: str) -> dict[str, str]:
    """Name of every case -> how it ended."""
    root = check_schema(text)
    return {case.attrib["name"]: next((child.tag for child in case if child.tag in RESULTS), "passed") for case in root.iter("testcase")}


def test_junit_of_everything_at_once() -> None:
    text = junit_text(model(CAMPAIGN, GATE))
    check_golden("gate_junit.xml", text)
    ended = results(text)
    assert {name: ended[name] for name in ended if "tested" not in name} == {
        NEW.signature: "failure",
        UNDOCUMENTED.signature: "skipped",
        KNOWN.signature: "skipped",
        GONE.entry.signature: "passed",
        EXPIRED.entry.signature: "failure",
        UNTESTED.entry.signature: "error",
        DIFFERS.entry.signature: "failure",
        "llamacpp/lfm2 crash at restore": "failure",
    }


def test_junit_of_a_failure_has_the_program_and_the_line_that_replays_it() -> None:
    root = check_schema(junit_text(model(CAMPAIGN, GATE)))
    failure = next(case for case in root.iter("testcase") if case.attrib["name"] == NEW.signature).find("failure")
    assert failure is not None
    assert failure.text is not None
    assert "> 3  decode 0:1/1" in failure.text
    assert f"statedrift replay {program_id(TWICE)} --target llamacpp" in failure.text


def test_junit_says_which_families_were_tested() -> None:
    root = check_schema(junit_text(model(CAMPAIGN, GATE)))
    suites = {suite.attrib["name"]: suite for suite in root}
    assert list(suites) == ["llamacpp/mamba2", "llamacpp/lfm2", "llamacpp/campaign"]
    ends = [next((child.tag for child in suite[0]), "passed") for suite in suites.values()]
    assert ends == ["error", "passed", "error"]


def test_junit_of_what_is_gone_fails_when_strict() -> None:
    assert results(junit_text(model(QUIET, GREEN)))[GONE.entry.signature] == "passed"
    strict = msgspec.structs.replace(GREEN, strict=True)
    assert results(junit_text(model(QUIET, strict)))[GONE.entry.signature] == "failure"


def test_junit_without_a_baseline() -> None:
    ended = results(junit_text(model(CAMPAIGN, None)))
    assert (ended[NEW.signature], ended[KNOWN.signature], ended[UNDOCUMENTED.signature]) == ("failure", "failure", "skipped")


NASTY = 'a <b> & "c" ]]> \x1b[31m \x00 \x08 \ud800 \ufffe tab\t é 😀 | ``` `x`'


def nasty(campaign: Campaign, gate: Gate) -> tuple[Campaign, Gate]:
    finding = msgspec.structs.replace(NEW, title=NASTY, log=(NASTY, "````"))
    left_over = msgspec.structs.replace(SHOWN, entry=msgspec.structs.replace(SHOWN.entry, reason=NASTY))
    return msgspec.structs.replace(campaign, findings=(finding,)), msgspec.structs.replace(gate, replayed=(left_over,))


def test_junit_escapes_what_xml_does_not_have() -> None:
    campaign, gate = nasty(QUIET, GREEN)
    root = check_schema(junit_text(model(campaign, gate)))
    failure = next(root.iter("failure"))
    for text in (failure.attrib["message"], failure.text or ""):
        assert 'a <b> & "c" ]]> \\x1b[31m \\x00 \\x08 \\ud800 \\ufffe tab\t é 😀' in text.replace("tab ", "tab\t")


# --- Markdown ----------------------------------------------------------------------------------------------------------------


def test_markdown_of_everything_at_once() -> None:
    check_golden("gate_markdown.md", markdown_text(model(CAMPAIGN, GATE)))


def test_markdown_without_a_baseline() -> None:
    text = markdown_text(model(CAMPAIGN, None))
    assert text.startswith("## statedrift · 3 divergences in 2,412 programs")
    assert text.count("```text") == 3


def test_markdown_shows_text_as_it_is() -> None:
    campaign, gate = nasty(QUIET, GREEN)
    text = markdown_text(model(campaign, gate))
    text.encode()
    assert escaped("<img> a|b\n`c`") == r"\<img\> a\|b \`c\`"
    assert fenced("a\n````\nb").startswith("`````text\n")
    assert "`````text\n" in text
    assert "\x1b" not in text
    table = [line for line in text.split("\n") if line.startswith("| known")]
    assert len(table) == 1
    assert len(re.findall(r"(?<!\\)\|", table[0])) == 3


def test_markdown_fits_a_comment_whatever_was_found() -> None:
    long = msgspec.structs.replace(NEW, log=("x" * 90,) * 300)
    findings = tuple(msgspec.structs.replace(long, signature=f"{NEW.signature} {number} {'é' * 500}") for number in range(2000))
    text = markdown_text(model(Campaign(ACCOUNT, findings), GREEN))
    assert len(text.encode()) <= BYTES_MAX < 65_536
    assert LINES_MAX - 30 < len(text.splitlines()) <= LINES_MAX < 60
    assert "more programs; `statedrift report` has them all" in text
    assert re.search(r"and 1,98\d more \|", text)
    assert "decode 0:1/1" in text


def test_markdown_shows_a_long_program_by_its_end() -> None:
    operations = tuple(parse_program("model lfm2 seed=0; decode 0:1").operations) * 50
    program = Program(NEW.program.model, NEW.program.cache, operations)
    finding = msgspec.structs.replace(NEW, program=program, verdict=msgspec.structs.replace(NEW.verdict, operation_index=49))
    text = markdown_text(model(Campaign(ACCOUNT, (finding,)), None))
    assert "model lfm2 seed=0" in text
    assert "... 36 lines" in text
    assert "  > 50  decode 0:1" in text
    assert len(text.splitlines()) <= 40


# --- the trend ---------------------------------------------------------------------------------------------------------------


def test_a_trend_has_a_row_a_night() -> None:
    text = trend_text("", "t.md", CAMPAIGN, GATE, date(2026, 1, 2))
    text = trend_text(text, "t.md", QUIET, GREEN, date(2026, 1, 3))
    check_golden("trend.md", trend_text(text, "t.md", QUIET, None, date(2026, 1, 4)))


def test_a_second_row_of_a_day_replaces_the_first() -> None:
    text = trend_text("", "t.md", CAMPAIGN, GATE, date(2026, 1, 2))
    assert trend_text(text, "t.md", QUIET, GREEN, date(2026, 1, 2)) == trend_text("", "t.md", QUIET, GREEN, date(2026, 1, 2))


def test_a_trend_keeps_the_last_rows() -> None:
    text = ""
    for number in range(ROWS_MAX + 5):
        text = trend_text(text, "t.md", QUIET, None, date.fromordinal(740000 + number))
    rows = text.splitlines()[2:]
    assert len(rows) == ROWS_MAX
    assert rows[-1].startswith(f"| {date.fromordinal(740000 + ROWS_MAX + 4)} |")


def test_a_file_that_is_no_trend_is_not_overwritten() -> None:
    with pytest.raises(UsageError, match=r"notes\.md is no trend"):
        trend_text("# my notes\n", "notes.md", QUIET, None, date(2026, 1, 2))
