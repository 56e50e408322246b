"""Gates: which entries are replayed, what a replay says, and what is red.

Rules
- Targets are our own cache with planted misbehaviour (tests/fixtures/faulty.py); their noise is given, not measured.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

from faulty import CLEAR_ABORTS, FaultySession, FaultyTarget
from statedrift.cli.gating import begin_gate, close_gate, gone_entries, opened_baseline, update_with
from statedrift.fuzz import gate as gate_module
from statedrift.fuzz.campaign import Settings
from statedrift.fuzz.gate import REPLAYS, chosen_entries, left_out_words, replay_baseline
from statedrift.fuzz.trial import Bench
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.errors import UsageError
from statedrift.spec.models import Model
from statedrift.spec.programs import parse_program
from statedrift.spec.verdicts import Verdict
from statedrift.store.baseline import Baseline, Entry, Versions, read_baseline
from statedrift.store.campaigns import Account, Campaign, Noise, Replayed, Unreduced
from statedrift.store.files import alone_in
from statedrift.store.findings import Finding
from statedrift.store.gate import EntryReplay, Gate, is_red, read_gate, sorted_out, write_gate

TODAY = date(2026, 11, 30)
NAME = "faulty:TARGET"
ROLLED_BACK = parse_program("model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1")
KEPT = parse_program("model lfm2 seed=0; decode 0:2; keep 0; rollback 0 1; decode 0:1")
ROLLBACK = Entry(f"{NAME}/lfm2 wrong-output at decode (self) after decode+rollback", NAME, "lfm2", ROLLED_BACK)
KEEP_ROLLBACK = Entry(f"{NAME}/lfm2 wrong-output at decode (self) after decode+keep+rollback", NAME, "lfm2", KEPT)
KEEP_REFUSED = f"{NAME}/lfm2 bad-refusal at keep (self) after decode"
SETTINGS = Settings(NAME, ("lfm2",), programs=1)


def baseline_of(*entries: Entry) -> Baseline:
    return Baseline(Path("known.toml"), entries)


def gate_over(target: FaultyTarget, monkeypatch: pytest.MonkeyPatch, *entries: Entry, strict: bool = False) -> Gate:
    def open_bench(name: str, against: str | None, inspect: bool, oracle: str) -> Bench:
        bench = Bench(target, inspect, oracle)
        bench.target_name = name
        return bench

    monkeypatch.setattr(Bench, "_measured_noise", lambda bench, model, setting: Noise(0.0, 1e-4, 0))
    monkeypatch.setattr(gate_module, "open_bench", open_bench)
    return replay_baseline(baseline_of(*entries), SETTINGS, TODAY, strict, False)


# --- which entries -----------------------------------------------------------------------------------------------------------


def test_only_entries_of_this_campaign_are_replayed_and_the_others_are_counted() -> None:
    replace = msgspec.structs.replace
    left_out = (
        replace(ROLLBACK, target="other"), replace(ROLLBACK, family="mamba2"), replace(ROLLBACK, oracle="engine"),
        replace(ROLLBACK, against="numba"), replace(ROLLBACK, inspect=True),
    )  # fmt: skip
    baseline = baseline_of(ROLLBACK, *left_out)
    assert chosen_entries(baseline, SETTINGS) == (ROLLBACK,)
    assert left_out_words(baseline, SETTINGS) == "1 of other targets, 1 of other families, 2 with another truth, 1 that need --inspect"
    assert left_out_words(baseline_of(ROLLBACK), SETTINGS) == ""
    inspecting = replace(SETTINGS, inspect=True)
    assert chosen_entries(baseline, inspecting) == (ROLLBACK, left_out[-1])


def test_a_gate_with_nothing_to_replay_opens_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "open_bench", None)
    gate = replay_baseline(baseline_of(msgspec.structs.replace(ROLLBACK, target="other")), SETTINGS, TODAY, False, False)
    assert (gate.entries, gate.left_out, gate.replayed) == (1, 1, ())


# --- what a replay says ------------------------------------------------------------------------------------------------------


def test_an_entry_that_shows_its_signature_reproduces_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gate_over(FaultyTarget("rollback"), monkeypatch, ROLLBACK, KEEP_ROLLBACK)
    assert [(replayed.outcome, replayed.runs) for replayed in gate.replayed] == [("reproduces", 1), ("reproduces", 1)]
    assert gate.replayed[0].operations == ("decode", "rollback")
    assert gate.replayed[0].coarse == f"{NAME}/lfm2 wrong-output at decode"


def test_an_entry_is_gone_only_when_no_run_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    (replayed,) = gate_over(FaultyTarget(), monkeypatch, ROLLBACK).replayed
    assert (replayed.outcome, replayed.runs) == ("gone", REPLAYS)


class Fickle(FaultyTarget):
    """Has its fault in every fourth session only."""

    opened = 0

    def open(self, model: Model, configuration: CacheConfiguration) -> FaultySession:
        self.opened += 1
        session = super().open(model, configuration)
        return session if self.opened % 4 == 0 else FaultySession(session._session, frozenset())


def test_an_entry_that_shows_itself_now_and_then_reproduces(monkeypatch: pytest.MonkeyPatch) -> None:
    (replayed,) = gate_over(Fickle("rollback"), monkeypatch, ROLLBACK).replayed
    assert (replayed.outcome, replayed.runs) == ("reproduces", 4)


def test_a_program_that_shows_something_else_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    (replayed,) = gate_over(FaultyTarget("rollback", "keep beside nobody is refused"), monkeypatch, KEEP_ROLLBACK).replayed
    assert (replayed.outcome, replayed.signature, replayed.documented) == ("differs", KEEP_REFUSED, True)


def test_what_cannot_be_judged_could_not_be_tested_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    half = parse_program("model lfm2 seed=1; cache kv=f16; decode 0:2")
    entry = Entry(f"{NAME}/lfm2 crash at decode (self)", NAME, "lfm2", half)
    gate = gate_over(FaultyTarget("rollback"), monkeypatch, ROLLBACK, entry)
    assert [replayed.outcome for replayed in gate.replayed] == ["reproduces", "could not test"]
    assert "--oracle engine" in gate.replayed[1].why


def test_a_crash_is_an_outcome_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model lfm2 seed=0; decode 0:1; clear"
    signature = f"{NAME}/lfm2 crash at clear [cache.c ASSERT(empty) failed] (self) after decode"
    (replayed,) = gate_over(CLEAR_ABORTS, monkeypatch, Entry(signature, NAME, "lfm2", parse_program(text))).replayed
    assert (replayed.outcome, replayed.signature) == ("reproduces", "")


def test_an_entry_expires_after_its_day(monkeypatch: pytest.MonkeyPatch) -> None:
    def expired(day: date) -> bool:
        entry = msgspec.structs.replace(ROLLBACK, expires=day)
        return gate_over(FaultyTarget("rollback"), monkeypatch, entry).replayed[0].expired

    assert [expired(date(2026, 11, 29)), expired(TODAY), expired(date(2026, 12, 1))] == [True, False, False]


# --- what is red -------------------------------------------------------------------------------------------------------------

ACCOUNT = Account(
    target=NAME, version="1 (build 7)", families=("lfm2",), seed=0, jobs=1, started_at="2026-11-30T03:04:05+00:00", seconds=10.0,
    programs=100, operations=3000, outcomes={}, verdicts={"ok": 100}, noise={}, could_not_test={}, seconds_generating=1.0,
    seconds_running=10.0, seconds_judging=5.0, seconds_reducing=0.0, complete=True,
)  # fmt: skip
FOUND = Finding(
    signature=ROLLBACK.signature, title="t", target=NAME, version="2", family="lfm2",
    verdict=Verdict("wrong-output", 2, 0, 1, "self", 1.0, 1e-5), program=ROLLED_BACK, original=ROLLED_BACK, documented=True,
    undocumented_uses=(), reproduced=10, reruns=10, found_after_programs=1, found_after_seconds=0.1,
    first_seen="2026-11-30T03:04:05+00:00", last_seen="2026-11-30T03:04:05+00:00",
)  # fmt: skip
NEW = msgspec.structs.replace(FOUND, signature=f"{NAME}/lfm2 wrong-output at decode (other) after decode+share", found_after_programs=2)
SHOWN = EntryReplay(ROLLBACK, "reproduces", 1, coarse=f"{NAME}/lfm2 wrong-output at decode", operations=("decode", "rollback"))
GATE = Gate("known.toml", 1, 0, (SHOWN,), "2026-11-30", "2")


def red(gate: Gate, *findings: Finding, account: Account = ACCOUNT) -> bool:
    return is_red(sorted_out(account, findings, gate), gate)


def gate_with(replayed: EntryReplay, **changes: bool) -> Gate:
    return msgspec.structs.replace(GATE, replayed=(replayed,), **changes)


def test_known_is_green_and_new_is_red() -> None:
    assert not red(GATE)
    assert not red(GATE, FOUND)
    assert red(GATE, FOUND, NEW)


def test_a_finding_of_another_oracle_is_not_known() -> None:
    assert red(GATE, msgspec.structs.replace(FOUND, oracle="engine"))


def test_an_undocumented_one_is_passed_over_unless_asked() -> None:
    undocumented = msgspec.structs.replace(NEW, documented=False)
    assert not red(GATE, undocumented)
    assert sorted_out(ACCOUNT, (undocumented,), GATE).passed_over == (undocumented,)
    assert red(gate_with(SHOWN, undocumented=True), undocumented)


def test_what_is_gone_is_red_only_when_strict() -> None:
    gone = EntryReplay(ROLLBACK, "gone", 10)
    assert not red(gate_with(gone))
    assert red(gate_with(gone, strict=True))


def test_what_is_expired_is_red_whatever_it_shows() -> None:
    for replayed in (SHOWN, EntryReplay(ROLLBACK, "gone", 10), EntryReplay(ROLLBACK, "could not test", 0)):
        assert red(gate_with(msgspec.structs.replace(replayed, expired=True)))


def test_a_program_that_shows_something_else_is_red_unless_that_is_known_or_undocumented() -> None:
    differs = EntryReplay(KEEP_ROLLBACK, "differs", 10, signature=KEEP_REFUSED)
    assert red(gate_with(differs))
    assert not red(gate_with(msgspec.structs.replace(differs, documented=False)))
    known = EntryReplay(Entry(KEEP_REFUSED, NAME, "lfm2", KEPT), "reproduces", 1)
    assert not red(msgspec.structs.replace(GATE, replayed=(differs, known)))


def test_what_was_not_reduced_is_red_unless_a_known_divergence_may_be_the_reason() -> None:
    def left(*operations: tuple[str, ...], coarse: str = SHOWN.coarse) -> Account:
        return msgspec.structs.replace(ACCOUNT, unreduced=(Unreduced(coarse, 3, "model lfm2; keep 0", operations),))

    assert not red(GATE, account=left(("decode", "rollback", "share"), ("decode", "rollback")))
    assert sorted_out(left(("decode", "rollback")), (), GATE).explained == 3
    assert red(GATE, account=left(("decode", "rollback"), ("decode", "share")))
    assert red(GATE, account=left(("decode", "rollback"), coarse=f"{NAME}/lfm2 bad-refusal at keep"))
    assert red(GATE, account=left())
    assert red(gate_with(EntryReplay(ROLLBACK, "gone", 10)), account=left(("decode", "rollback")))


FAULTY_ACCOUNT = msgspec.structs.replace(
    ACCOUNT, verdicts={"ok": 99, "harness-error": 1}, not_judged=(("harness-error: ours", "model lfm2"),)
)


def status(gate: Gate, *findings: Finding, folder: Path | None = None, account: Account = ACCOUNT) -> int:
    begin_gate(gate, folder)
    return close_gate(Campaign(account, findings), gate, folder)


def test_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(GATE, FOUND) == 0
    assert status(GATE, NEW) == 1
    assert status(GATE, NEW, account=FAULTY_ACCOUNT) == 1
    capsys.readouterr()
    assert status(GATE, FOUND, account=FAULTY_ACCOUNT) == 2
    shown = capsys.readouterr().out
    assert shown.startswith("not tested: ")
    assert "not judged: harness-error: ours" in shown
    assert status(gate_with(EntryReplay(ROLLBACK, "could not test", 0, why="it is away"))) == 2
    assert "it is away" in capsys.readouterr().out


def test_a_gate_is_kept_with_its_campaign_and_read_again(tmp_path: Path) -> None:
    gate = gate_with(msgspec.structs.replace(SHOWN, entry=msgspec.structs.replace(ROLLBACK, expires=TODAY, reason="r")), strict=True)
    assert read_gate(tmp_path) is None
    status(gate, folder=tmp_path)
    assert read_gate(tmp_path) == gate
    (tmp_path / "gate.json").write_text("{}")
    with pytest.raises(UsageError, match=r"gate\.json is damaged"):
        read_gate(tmp_path)


def test_a_gate_that_cannot_be_kept_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert status(GATE, FOUND, folder=tmp_path / "file") == 2
    assert "the gate is not kept" in capsys.readouterr().err


def test_strict_needs_a_baseline(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--baseline"):
        opened_baseline(None, True)
    assert opened_baseline(None, False) is None


# --- the file after it -------------------------------------------------------------------------------------------------------


def test_an_update_adds_what_is_new_and_knows_what_the_gate_saw(tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    never = msgspec.structs.replace(NEW, signature=f"{NAME}/lfm2 crash at clear (self)", reproduced=0)
    differs = EntryReplay(KEEP_ROLLBACK, "differs", 10, signature=KEEP_REFUSED)
    gate = msgspec.structs.replace(GATE, replayed=(SHOWN, differs), version="3", day="2026-12-05")
    update_with(path, Campaign(ACCOUNT, (FOUND,)), None)
    changes = update_with(path, Campaign(ACCOUNT, (NEW, never)), gate)
    assert sorted((change.what, change.signature) for change in changes) == sorted(
        [("updated", ROLLBACK.signature), ("added", NEW.signature), ("added", KEEP_REFUSED), ("left out", never.signature)]
    )
    entries = {entry.signature: entry for entry in read_baseline(path).entries}
    assert (entries[ROLLBACK.signature].last_seen, entries[ROLLBACK.signature].versions) == (date(2026, 12, 5), Versions("2", "3"))
    assert entries[KEEP_REFUSED].program == KEPT


def test_an_update_takes_in_nothing_that_is_mended(tmp_path: Path) -> None:
    gone = msgspec.structs.replace(ACCOUNT, replayed=Replayed(findings=1, gone=(NEW.signature,)))
    changes = update_with(tmp_path / "known.toml", Campaign(gone, (NEW, FOUND)), None)
    assert [(change.what, change.signature) for change in changes] == [("added", FOUND.signature), ("left out", NEW.signature)]


def test_a_gate_that_was_stopped_did_not_test(tmp_path: Path) -> None:
    stopped = msgspec.structs.replace(ACCOUNT, complete=False)
    assert status(GATE, FOUND, account=stopped) == 2
    assert status(GATE, NEW, account=stopped) == 1


def test_a_gate_that_is_killed_leaves_none_but_its_own(tmp_path: Path) -> None:
    write_gate(tmp_path, GATE)
    newer = msgspec.structs.replace(GATE, day="2026-12-05")
    begin_gate(newer, tmp_path)
    assert read_gate(tmp_path) == newer


def test_a_day_that_is_none_is_damage(tmp_path: Path) -> None:
    write_gate(tmp_path, msgspec.structs.replace(GATE, day="2026-13-45"))
    with pytest.raises(UsageError, match=r"gate\.json is damaged: its day"):
        read_gate(tmp_path)


def test_updates_at_the_same_moment_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    findings = [msgspec.structs.replace(NEW, signature=f"{NAME}/lfm2 crash at clear {number} (self)") for number in range(4)]

    def update(finding: Finding) -> None:
        with alone_in(tmp_path):
            update_with(path, Campaign(ACCOUNT, (finding,)), None)

    with ThreadPoolExecutor(4) as several:
        list(several.map(update, findings))
    assert {entry.signature for entry in read_baseline(path).entries} == {finding.signature for finding in findings}


def test_what_the_gate_replayed_without_its_divergence_is_what_a_prune_removes() -> None:
    outcomes = {"reproduces": False, "gone": True, "differs": True, "could not test": False}
    for outcome, is_removed in outcomes.items():
        gate = gate_with(EntryReplay(ROLLBACK, outcome, 10))  # type: ignore[arg-type]
        assert gone_entries(gate) == ({(ROLLBACK.signature, "own"): ROLLED_BACK} if is_removed else {})


def test_a_gate_is_written_as_json_that_names_its_format(tmp_path: Path) -> None:
    write_gate(tmp_path, GATE)
    assert msgspec.json.decode((tmp_path / "gate.json").read_bytes())["format"] == 1
