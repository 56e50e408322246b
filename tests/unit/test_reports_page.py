"""The page of a campaign: what it says, in which order, and that nothing that it is given breaks or escapes it.

Its words are pinned by tests/unit/golden/reports_page.txt; STATEDRIFT_UPDATE_GOLDEN=1 writes it anew. How it behaves in a browser:
tests/e2e/test_page_in_chromium.py.
"""

import os
import re
import sqlite3
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
import statedrift.reports
from statedrift.cli.application import run as run_command
from statedrift.reports import page
from statedrift.reports.frames import frames_of
from statedrift.reports.junit import junit_text
from statedrift.reports.report import report_of
from statedrift.spec.operations import Decode, Item
from statedrift.spec.pictures import Film, FilmCell, FilmSequence, FilmStep, Offset, Plane
from statedrift.spec.programs import Program
from statedrift.spec.verdicts import ACCEPTED, Verdict
from statedrift.store.campaigns import Campaign, Reach
from statedrift.store.database import DATABASE_FILE, lock_folder
from statedrift.store.findings import Answer
from statedrift.store.gate import Gate
from statedrift.store.records import ShardRecord

from tests.kept_campaign import keep_campaign
from tests.unit.test_records import record, trial
from tests.unit.test_reports_gate import ACCOUNT, CAMPAIGN, GATE, NEW, model
from tests.unit.test_reports_terminal import check_golden, replay_of

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}</pre></style>"


def step(index: int, claim: str = "right") -> FilmStep:
    cells = (FilmCell((0,), 9, (Plane(10, 0), Plane(8, 0, True), Plane(0), Plane())), FilmCell((), -1, (Plane(0),) * 4))
    sequence = FilmSequence(0, 10, 9, 0, 1, 1, claim, (0, 9))  # type: ignore[arg-type]
    return FilmStep(index, f"decode 0:{index + 1}", "accepted", "", cells, (sequence,))


FILM = Film(
    "numba 1", (step(0), step(1), step(2, "wrong")), 0, (Offset(0, "output", 0.02), Offset(2, "layer 0 conv", float("inf"))), "a note"
)
RECORDS = (record([trial(Verdict("ok", error=2e-6, tolerance=1e-5), [0.2, 0.1]), trial(Verdict("crash", 0))]),)
REACH = Reach(
    {"answers": {"decode accepted": 3}, "pending": {"save": 0, "decode": 2}, "pairs": {"decode after nothing": 9, "save after decode": 0}},
    ("divide",),
)


def page_of(
    campaign: Campaign,
    gate: Gate | None = None,
    film: Film | None = None,
    records: Sequence[ShardRecord] = RECORDS,
    running: str = "",
    script: str = "",
) -> str:
    films = {finding.signature: film for finding in campaign.findings} if film is not None else {}
    scripts = {finding.signature: script for finding in campaign.findings} if script else {}
    report = report_of("runs/nightly", campaign, gate, records, replay_of, scripts, films, running, "2026-01-02 03:04 UTC")
    return page.page_text(report, frames_of("runs/nightly", campaign, records))


class _Words(HTMLParser):
    """The words that a reader sees, a line for each block; and every tag with its attributes."""

    BLOCKS = ("p", "h1", "h2", "h3", "h4", "tr", "li", "dt", "dd", "figcaption", "pre", "summary", "article", "button", "div")

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._silent = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._silent += tag in ("style", "script", "svg")
        self.text += "\n" if tag in self.BLOCKS else " " if tag in ("td", "th") else ""

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in ("style", "script", "svg")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.text += data

    @property
    def lines(self) -> str:
        return "\n".join(line for line in (" ".join(line.split()) for line in self.text.splitlines()) if line) + "\n"


def parsed(text: str) -> _Words:
    words = _Words()
    words.feed(text)
    words.close()
    return words


def test_the_page_says_what_was_agreed() -> None:
    campaign = msgspec.structs.replace(
        CAMPAIGN, account=msgspec.structs.replace(CAMPAIGN.account, reach=REACH, outcomes={"decode": {"accepted": 3}})
    )
    check_golden("reports_page.txt", parsed(page_of(campaign, GATE, FILM, script="print('again')")).lines)


def test_what_is_new_comes_first() -> None:
    text = parsed(page_of(CAMPAIGN, GATE, FILM)).lines
    places = [text.index(f"\n{words}\n") for words in ("New", "Diverged, and not reduced", "Known, undocumented, not observed any more, expired",
              "What was tried, family by family", "What was reached", "How it grew", "Crashes and unknowns", "What this report cannot show")]  # fmt: skip
    assert places == sorted(places)


def hostile_page() -> str:
    """A page whose every text is markup."""
    finding = msgspec.structs.replace(
        NEW, title=HOSTILE, signature=HOSTILE, version=HOSTILE, log=(HOSTILE,), verdict=msgspec.structs.replace(NEW.verdict, reason=HOSTILE)
    )
    account = msgspec.structs.replace(
        ACCOUNT, version=HOSTILE, not_judged=((HOSTILE, HOSTILE),), could_not_test={"lfm2": HOSTILE}, ended_by=HOSTILE, machine=HOSTILE
    )
    film = msgspec.structs.replace(
        FILM, note=HOSTILE, source=HOSTILE, steps=tuple(msgspec.structs.replace(own, operation=HOSTILE) for own in FILM.steps)
    )
    return page_of(Campaign(account, (finding,)), None, film, running=HOSTILE, script=HOSTILE)


def test_nothing_that_it_is_given_becomes_markup() -> None:
    words = parsed(hostile_page())
    plain = parsed(page_of(Campaign(ACCOUNT, (NEW,)), None, FILM, script="x"))
    assert [tag for tag, _ in words.tags].count("script") == 1
    assert not {"img", "iframe", "object"} & {tag for tag, _ in words.tags}
    assert not [name for _, attributes in words.tags for name in attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in words.text
    assert "{{ 7 * 7 }}" in words.text
    assert {name for _, attributes in words.tags for name in attributes} == {name for _, attributes in plain.tags for name in attributes}


def test_nothing_is_fetched_and_no_other_script_may_run() -> None:
    text = page_of(CAMPAIGN, GATE, FILM)
    words = parsed(text)
    addresses = [
        value for _, attributes in words.tags for name, value in attributes.items() if name in ("src", "href", "xlink:href", "data")
    ]
    assert all(value is not None and value.startswith(("#", "data:,")) for value in addresses)
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import", text)


def long_program() -> Program:
    return Program(NEW.program.model, NEW.program.cache, tuple(Decode((Item((0,), 1),)) for _ in range(2000)))


def long_page() -> str:
    """A page with a program of 2,000 operations."""
    finding = msgspec.structs.replace(
        NEW,
        program=long_program(),
        verdict=msgspec.structs.replace(NEW.verdict, operation_index=1999),
        answers=(Answer(ACCEPTED, (0,)),) * 2000,
    )
    film = msgspec.structs.replace(FILM, steps=tuple(step(index) for index in range(1960, 2000)), skipped=1960)
    return page_of(Campaign(ACCOUNT, (finding,)), None, film)


def test_a_program_of_two_thousand_operations_is_shown_from_its_end() -> None:
    text = long_page()
    assert len(text.encode()) < 400_000
    words = parsed(text).lines
    assert "... 1,940 operations before" in words
    assert "1,960 steps before these are left out." in words
    assert "> 2000 here they part decode 0:1 " in words
    assert "characters more" in words


@pytest.mark.parametrize("error", [float("nan"), float("inf"), None])
def test_errors_that_are_no_numbers_are_shown_as_none(error: float | None) -> None:
    verdict = msgspec.structs.replace(NEW.verdict, kind="nonfinite", error=error)
    film = msgspec.structs.replace(FILM, offsets=(Offset(0, "output", float("nan")), Offset(1, "layer 1 conv", float("inf"))))
    text = page_of(Campaign(ACCOUNT, (msgspec.structs.replace(NEW, verdict=verdict),)), None, film)
    assert 'data-value=""' in text
    assert text.count(">not finite<") == 2


def test_a_campaign_without_a_program_has_a_page() -> None:
    account = msgspec.structs.replace(ACCOUNT, programs=0, operations=0, verdicts={}, complete=False)
    words = parsed(page_of(Campaign(account, ()), records=())).lines
    assert "nothing was tested" in words
    assert "This campaign did not keep it." in words
    assert "not reached" in words


def test_a_clean_campaign_is_not_called_bad() -> None:
    text = page_of(Campaign(ACCOUNT, ()))
    assert '<header class="bad">' not in text
    assert "no divergence in 2,412 programs" in text
    assert '<header class="bad">' in page_of(CAMPAIGN)


def test_the_matrix_tells_what_passed_from_what_was_not_reached_or_not_offered() -> None:
    account = msgspec.structs.replace(ACCOUNT, families=("lfm2", "mamba2", "jamba"), could_not_test={"jamba": "noise"}, reach=REACH)
    report = report_of("runs/nightly", Campaign(account, (NEW,)), None, RECORDS, replay_of, {}, {}, "", "")
    rows = {row.operation: [passage for passage, _ in row.passages] for row in report.matrix}
    assert rows["decode"] == ["passed", "not reached", "not tested"]
    assert rows["rollback"] == ["diverged", "not reached", "not tested"]
    assert rows["divide"] == ["not offered", "not offered", "not tested"]
    assert rows["save"] == ["not reached", "not reached", "not tested"]


def test_large_pages_lose_pictures_before_findings() -> None:
    findings = tuple(msgspec.structs.replace(NEW, signature=f"llamacpp/lfm2 crash at decode {number}") for number in range(20))
    large = [msgspec.structs.replace(own, cells=own.cells * 4) for own in map(step, range(40))]
    film = msgspec.structs.replace(FILM, steps=tuple(large))
    text = page_of(Campaign(ACCOUNT, findings), None, film, script="x" * 30_000)
    assert len(text.encode()) <= page.BYTES_MAX
    assert text.count("<article") == 20
    assert 0 < text.count('<figure class="frame') < 20 * 40


def test_a_picture_marks_who_reads_what() -> None:
    words = parsed(page_of(Campaign(ACCOUNT, (NEW,)), None, FILM)).lines
    assert "plane 1: 8 of seq 0, wrong seq 0 reads" in words
    assert "0 10 tokens, position 9 cell 0, plane 1: 8 of seq 0, wrong; rollback of 1 pending; attention 0..9 not its state" in words
    assert "and 1 cell more" in words


# --- from the command line ---------------------------------------------------------------------------------------------------


def test_the_command_writes_a_page_of_a_running_and_of_an_older_campaign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = keep_campaign(tmp_path / "run", ACCOUNT, [msgspec.structs.replace(NEW, against="numba", against_version="1")])
    lock = lock_folder(folder)
    assert run_command(["report", str(folder), "--html", str(tmp_path / "page.html")]) == 0
    assert "This campaign is running" in (tmp_path / "page.html").read_text()

    os.close(lock)
    with closing(sqlite3.connect(folder / DATABASE_FILE)) as connection:
        connection.execute("DROP TABLE shards")
        connection.execute("PRAGMA user_version = 2")
    assert run_command(["report", str(folder), "--html", str(tmp_path / "page.html"), "--frames", str(tmp_path / "frames")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert "This campaign is running" not in text
    assert "This campaign did not keep it." in text
    assert sorted(path.name for path in (tmp_path / "frames").iterdir()) == [
        "errors.parquet", "findings.parquet", "operations.parquet", "programs.parquet", "reach.parquet", "timeline.parquet",
    ]  # fmt: skip


def test_without_what_draws_it_the_command_says_how_to_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    folder = keep_campaign(tmp_path / "run", ACCOUNT)
    monkeypatch.delitem(sys.modules, "statedrift.reports.page")
    monkeypatch.delitem(sys.modules, "statedrift.reports.charts")
    monkeypatch.delattr(statedrift.reports, "charts")
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert run_command(["report", str(folder), "--html", str(tmp_path / "page.html")]) == 2
    assert "pip install 'statedrift[report]'" in capsys.readouterr().err


# --- JUnit -------------------------------------------------------------------------------------------------------------------


def test_junit_has_a_case_for_every_operation_of_the_contract_and_family() -> None:
    account = msgspec.structs.replace(ACCOUNT, reach=REACH)
    campaign = Campaign(account, (NEW,))
    root = ElementTree.fromstring(junit_text(model(campaign, None, RECORDS)).partition("\n")[2])
    cases = {(case.get("classname"), case.get("name")): case for case in root.iter("testcase")}
    assert sum(name is not None and name.startswith("contract: ") for _, name in cases) == 16 * 2
    assert cases["llamacpp.lfm2", "contract: decode"].find("skipped") is None

    def skipped(operation: str) -> str | None:
        (why,) = cases["llamacpp.lfm2", f"contract: {operation}"].findall("skipped")
        return why.get("message")

    assert skipped("save") == "not reached"
    assert skipped("divide") == "not offered"
    assert skipped("rollback") == "diverged: the cases of its findings say how"
    assert root.get("failures") == "1"
