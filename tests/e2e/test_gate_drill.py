"""The gate drill: known is green, a mutant added is red on one screen, a fixed one is said, an entry expires; by the command line.

Rules
- The target is our own cache whose faults are switched on and off (tests/fixtures/switched.py); its name and version stay the same.
- The tolerance is given: measuring the same plain decodings for every step would be most of the time.
"""

import json
import os
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from statedrift.cli.application import run
from statedrift.fuzz.trial import Bench
from statedrift.reports.gate import ROWS
from statedrift.store.campaigns import Noise

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
ADDED = "share_forgets_attention"
ROLLBACK = "switched:TARGET/lfm2 wrong-output at decode (self) after decode+rollback"


def switch_on(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(FIXTURES))
    monkeypatch.setattr(Bench, "_measured_noise", lambda bench, model, setting: Noise(0.0, 1e-4, 0))
    monkeypatch.setenv("STATEDRIFT_TEST_FAULTS", "rollback")
    monkeypatch.delenv("STATEDRIFT_TEST_MUTANT", raising=False)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a campaign on the cache as it is at first, which has one fault."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as monkeypatch:
        switch_on(monkeypatch, folder)
        assert fuzz("runs/first") == 1
    return folder


@pytest.fixture(autouse=True)
def _drill(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(first, tmp_path, dirs_exist_ok=True)
    switch_on(monkeypatch, tmp_path)


def fuzz(folder: str, *options: str) -> int:
    return run(["fuzz", "--target", "switched:TARGET", "--family", "lfm2", "--programs", "64", "--out", folder, *options])


def taken_over(capsys: pytest.CaptureFixture[str]) -> str:
    """The text of a baseline made from the first campaign."""
    assert run(["baseline", "runs/first", "--file", "known.toml", "--update"]) == 0
    assert capsys.readouterr().out == f"added     {ROLLBACK}\nknown.toml has 1 entry\n"
    return Path("known.toml").read_text()


def gate(folder: str, *options: str) -> int:
    return fuzz(folder, "--baseline", "known.toml", *options)


def test_known_is_green_and_the_file_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = taken_over(capsys)
    assert gate("runs/gate", "--strict") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("green: nothing new in 64 programs; 1 known\n")
    assert "baseline known.toml: 1 entry, 1 replayed first\n" in shown.err
    assert Path("known.toml").read_text() == text


def test_a_baseline_changes_nothing_of_what_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    taken_over(capsys)
    gate("runs/gate")
    capsys.readouterr()
    counts = []
    for folder in ("runs/first", "runs/gate"):
        run(["report", folder, "--csv", "-"])
        rows = capsys.readouterr().out.splitlines()
        counts.append([row.split(",")[:11] for row in rows])
        assert len(rows) == 2
    assert counts[0] == counts[1]


def test_a_mutant_that_is_added_turns_it_red_on_one_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    taken_over(capsys)
    monkeypatch.setenv("STATEDRIFT_TEST_MUTANT", ADDED)
    assert gate("runs/gate") == 1
    shown = capsys.readouterr().out
    assert shown.startswith("red: ")
    assert "1 known" in shown.splitlines()[0]
    assert "share 0 1" in shown
    assert "  replay   statedrift replay " in shown
    assert "statedrift baseline runs/gate --file known.toml --update" in shown
    assert sum(max(1, -(-len(line) // 80)) for line in shown.splitlines()) <= ROWS
    check_reports(capsys)
    assert run(["baseline", "runs/gate", "--file", "known.toml", "--update"]) == 0
    assert gate("runs/again", "--strict") == 0, "what was taken over is known"


def check_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "runs/gate", "--junit", "j.xml", "--markdown", "m.md"]) == 0
    cases = {case.attrib["name"]: case for case in ElementTree.parse("j.xml").getroot().iter("testcase")}
    assert cases[ROLLBACK].find("skipped") is not None
    failures = [case.find("failure") for case in cases.values() if case.find("failure") is not None]
    assert failures
    assert all("statedrift replay " in (failure.text or "") for failure in failures if failure is not None)
    assert Path("m.md").read_text().startswith("## statedrift · red: ")
    capsys.readouterr()
    assert run(["report", "runs/gate"]) == 0
    assert f"  known           {ROLLBACK}\n" in capsys.readouterr().out


def test_what_is_fixed_is_said_and_pruned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    taken_over(capsys)
    monkeypatch.setenv("STATEDRIFT_TEST_FAULTS", "")
    assert gate("runs/gate") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("green: nothing new in 64 programs, 1 fixed?; 0 known\n")
    assert f"fixed? {ROLLBACK}\n" in shown
    assert gate("runs/strict", "--strict") == 1
    assert capsys.readouterr().out.startswith("red: 1 fixed?; 0 known\n")
    assert run(["baseline", "runs/gate", "--file", "known.toml", "--prune"]) == 0
    assert capsys.readouterr().out == f"removed   {ROLLBACK}\nknown.toml has 0 entries\n"
    assert gate("runs/after", "--strict") == 0


def test_an_entry_that_expired_is_red_with_its_name_and_day(capsys: pytest.CaptureFixture[str]) -> None:
    text = taken_over(capsys)
    Path("known.toml").write_text(text.replace('ticket = ""', 'ticket = "#12"\nexpires = 2020-02-29'))
    assert gate("runs/gate") == 1
    shown = capsys.readouterr().out
    assert shown.startswith("red: 1 expired; 0 known\n")
    assert f"expired 2020-02-29: {ROLLBACK} (#12)" in " ".join(shown.split())


def test_entries_of_others_are_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    text = taken_over(capsys)
    Path("known.toml").write_text(text + text.replace("switched:TARGET", "other:TARGET"))
    assert gate("runs/gate", "--strict") == 0
    assert "baseline known.toml: 2 entries, 1 replayed first; left out: 1 of other targets\n" in capsys.readouterr().err


def test_a_usage_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    taken_over(capsys)
    Path("wrong.toml").write_text("[[finding]]\nsignature = 3\n")
    cases = {
        "no-such.toml": ["fuzz", "--target", "switched:TARGET", "--baseline", "no-such.toml"],
        "key target": ["fuzz", "--target", "switched:TARGET", "--baseline", "wrong.toml"],
        "--baseline FILE": ["fuzz", "--target", "switched:TARGET", "--strict"],
        "one of --update": ["baseline", "runs/first", "--file", "known.toml"],
        "not both": ["baseline", "runs/first", "--file", "known.toml", "--update", "--prune"],
        "--file": ["baseline", "runs/first", "--update"],
        "there is no folder": ["report", "runs/first", "--junit", "nowhere/j.xml"],
    }
    for words, arguments in cases.items():
        assert run(arguments) == 64, arguments
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert words in error
    assert run(["baseline", "runs/first", "--file", "known.toml", "--prune"]) == 2, "it had no gate"
    assert "not seen is not fixed" in capsys.readouterr().err
    assert run(["baseline", os.curdir, "--file", "known.toml", "--update"]) == 2
    assert "is no campaign" in capsys.readouterr().err


def test_a_gate_is_kept_beside_the_account(capsys: pytest.CaptureFixture[str]) -> None:
    taken_over(capsys)
    gate("runs/gate")
    kept = json.loads(Path("runs/gate/gate.json").read_text())
    assert (kept["file"], kept["entries"], [replayed["outcome"] for replayed in kept["replayed"]]) == ("known.toml", 1, ["reproduces"])
