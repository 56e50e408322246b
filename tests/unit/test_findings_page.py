"""The page of findings in llama.cpp: what campaigns hold is on it, and nothing else."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from statedrift.spec.programs import parse_program
from statedrift.spec.verdicts import Verdict
from statedrift.store.campaigns import Account
from statedrift.store.findings import Finding

from tests.kept_campaign import keep_campaign

PAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "findings_llamacpp.py"
VERSION = "llama-cpp-python 0.0.0 (llama.cpp of a test)"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = importlib.util.spec_from_file_location("findings_llamacpp", PAGE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "findings_llamacpp", module)
    monkeypatch.syspath_prepend(str(PAGE.parent))  # what lies beside it
    found.loader.exec_module(module)
    return module


def account(families: tuple[str, ...], **changes: Any) -> Account:
    own = Account(
        target="llamacpp", version=VERSION, families=families, seed=0, jobs=1, started_at="2026-11-30T01:02:03+00:00", seconds=1.0, programs=1234,
        operations=9, outcomes={"decode": {"accepted": 9}}, verdicts={"ok": 1200, "wrong-output": 34}, noise={}, could_not_test={},
        seconds_generating=0.0, seconds_running=0.0, seconds_judging=0.0, seconds_reducing=0.0, complete=True, oracle="engine",
    )  # fmt: skip
    return msgspec.structs.replace(own, **changes)


def finding(family: str, text: str = "decode 0:3; decode 0:1; rollback 0 3; decode 0:1", **changes: Any) -> Finding:
    program = parse_program(f"model {family} seed=0; {text}")
    own = Finding(
        signature=f"llamacpp/{family} wrong-output at decode (self) after decode+rollback", title="the next outputs are wrong after rollback",
        target="llamacpp", version=VERSION, family=family, verdict=Verdict("wrong-output", 3, 0, 1, "self", 0.5, 1e-4, reason="logits off by 0.5"),
        program=program, original=program, documented=True, undocumented_uses=(), reproduced=9, reruns=10, found_after_programs=1,
        found_after_seconds=0.1, first_seen="2026-11-30T01:02:03+00:00", last_seen="2026-11-30T01:02:03+00:00", oracle="engine",
    )  # fmt: skip
    return msgspec.structs.replace(own, **changes)


def folder_of(path: Path, own: Account, findings: list[Finding]) -> Path:
    return keep_campaign(path, own, findings)


def test_a_signature_is_one_row_over_all_families(page: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = folder_of(tmp_path / "a", account(("lfm2moe", "arwkv7")), [finding("lfm2moe")])
    second = folder_of(tmp_path / "b", account(("lfm2",)), [finding("lfm2", reproduced=10)])
    written = tmp_path / "page" / "llama.cpp.md"
    assert page.main([str(first), str(second), "--no-compare", "--write", str(written)]) == 0
    text = capsys.readouterr().out
    assert written.read_text() == text
    assert f"**{VERSION}**" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| 1 |")]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "1",
        "wrong-output at decode (self) after decode+rollback",
        "",
        "10",
        "9",
    ]
    assert text.count("rollback 0 3") == 1
    assert "Seen in lfm2, lfm2moe; reproduced 9/10" in text
    assert "Nothing was found in arwkv7" in text
    assert "[EXPERIMENTAL]" in text, "what the header says of a rollback"
    assert "**Why** (llama_memory_recurrent::seq_rm, rollback). The caller takes tokens back after" in text
    (fault,) = [line for line in text.splitlines() if line.startswith("| llama_memory_recurrent::seq_rm, rollback |")]
    assert fault.endswith("| 1 |  |  |"), "signature 1; pools were not tried"


def test_undocumented_uses_are_said_with_the_headers_sentence(page: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = finding("lfm2", "decode 0:2; divide 0 2; decode 0:1", documented=False, undocumented_uses=("divide",))
    folder = folder_of(tmp_path / "a", account(("lfm2",)), [entry])
    assert page.main([str(folder), "--no-compare"]) == 0
    text = capsys.readouterr().out
    assert "(u)" in text
    assert "Not documented: divide. llama_memory_seq_div" in text


def test_what_was_not_reached_is_said(page: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = account(("lfm2", "plamo2"), could_not_test={"plamo2": "could not test plamo2: too noisy"}, complete=False)
    folder = folder_of(tmp_path / "a", own, [])
    assert page.main([str(folder), "--no-compare"]) == 0
    text = capsys.readouterr().out
    assert "could not test plamo2: too noisy" in text
    assert "stopped before its end" in text
    assert "never executed" in text


def test_two_versions_make_no_page(page: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = folder_of(tmp_path / "a", account(("lfm2",)), [])
    second = folder_of(tmp_path / "b", account(("lfm2",), version="another"), [])
    assert page.main([str(first), str(second), "--no-compare"]) == 2
    assert "several versions" in capsys.readouterr().err
    assert page.main([str(tmp_path / "nothing"), "--no-compare"]) == 2


def test_a_signature_that_nobody_looked_into_is_said(page: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "a", account(("lfm2",)), [finding("lfm2", signature="llamacpp/lfm2 hang at divide (self) after keep")])
    assert page.main([str(folder), "--no-compare"]) == 0
    text = capsys.readouterr().out
    assert "| not looked into | | 1 | | |" in text
    assert "**Why**" not in text


def test_a_signature_has_one_cause(page: ModuleType) -> None:
    words = [words for cause in page.CAUSES for words in cause.signatures]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize(
    ("text", "shown", "words"),
    [
        ("decode 0:1; keep 1", (True, False), "unified=0 only"),
        ("cache unified=1; decode 0:1; share 1 0", (False, True), "unified=1 only"),
        ("decode 0:2; remove 0 0 1", (True, True), "either way"),
        ("decode 0:2; decode 0:1", (False, False), "neither way"),
    ],
)
def test_every_finding_is_tried_with_both_kinds_of_pool(page: ModuleType, text: str, shown: tuple[bool, bool], words: str) -> None:
    pytest.importorskip("llama_cpp")
    program = parse_program(f"model lfm2 seed=0; {text}")
    with page.Bench("llamacpp") as bench:
        verdict = bench.try_program(program).verdict
        signature = page.fine_signature("llamacpp", program, verdict)
    own = page.Campaign(account(("lfm2",)), (finding("lfm2", text, signature=signature, oracle="own"),))
    (pools,) = page.pools_of([own]).values()
    assert pools == shown
    assert pools.words == words


def test_counts_of_pools_stand_beside_the_faults(page: ModuleType) -> None:
    entries = [finding(family) for family in ("lfm2", "qwen35")]
    entries[1] = msgspec.structs.replace(entries[1], signature="llamacpp/qwen35 wrong-output at decode (self) after decode+rollback")
    pools = {entries[0].signature: page.Pools(True, True), entries[1].signature: page.Pools(True, False)}
    text = page.page_text([page.Campaign(account(("lfm2", "qwen35")), tuple(entries))], None, pools)
    assert "| 2 documented | 2 | 1 | 1 |" in text
    (fault,) = [line for line in text.splitlines() if line.startswith("| llama_memory_recurrent::seq_rm, rollback |")]
    assert fault.endswith("| 1 | 2 | 1 |")
