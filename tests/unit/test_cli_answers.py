"""Exit statuses, the JSON object, progress lines, and what a fault looks like."""

import json
import math
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from statedrift.cli import application, failures, output
from statedrift.cli.fuzzing import checked_settings, status_of_campaign
from statedrift.cli.inventory import abilities_text, families_text, targets_text
from statedrift.cli.progress import live_line, plain_line
from statedrift.cli.reducing import PROGRESS_SECONDS, shown_steps
from statedrift.cli.replaying import finite, replay_object, status_of
from statedrift.fuzz.progress import Progress
from statedrift.fuzz.trial import Trial
from statedrift.reports.terminal import account_text, verdict_sentence
from statedrift.spec.errors import UnavailableError, UsageError
from statedrift.spec.families import FAMILIES
from statedrift.spec.programs import parse_program, program_id
from statedrift.spec.target import Capabilities
from statedrift.spec.verdicts import DIVERGENCE_KINDS, Verdict, VerdictKind
from statedrift.store.campaigns import Account, Campaign
from statedrift.store.findings import Finding
from statedrift.store.statistics import Statistics
from statedrift.targets.llamacpp import TARGET as LLAMACPP
from statedrift.targets.numba import TARGET as NUMBA

from tests.kept_campaign import keep_campaign

PROGRAM = parse_program("model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1/1")
ACCOUNT = Account(
    target="numba", version="1", families=("lfm2",), seed=0, jobs=2, started_at="2026-01-02T03:04:05+00:00", seconds=10.0, programs=100,
    operations=3000, outcomes={}, verdicts={"ok": 100}, noise={}, could_not_test={}, seconds_generating=1.0, seconds_running=10.0,
    seconds_judging=5.0, seconds_reducing=0.0, complete=True,
)  # fmt: skip
FINDING = Finding(
    signature="s", title="t", target="numba", version="1", family="lfm2", verdict=Verdict("wrong-output", 2, 0, 1, "self", 1.0, 1e-5),
    program=PROGRAM, original=PROGRAM, documented=True, undocumented_uses=(), reproduced=10, reruns=10, found_after_programs=1,
    found_after_seconds=0.1, first_seen="2026-01-02T03:04:05+00:00", last_seen="2026-01-02T03:04:05+00:00",
)  # fmt: skip
UNDOCUMENTED = msgspec.structs.replace(FINDING, documented=False)


@pytest.mark.parametrize("kind", DIVERGENCE_KINDS)
def test_a_divergence_is_status_1_and_an_undocumented_one_only_when_asked(kind: VerdictKind) -> None:
    assert status_of(Verdict(kind), True, False) == 1
    assert status_of(Verdict(kind), False, False) == 0
    assert status_of(Verdict(kind), False, True) == 1


@pytest.mark.parametrize(("kind", "status"), [("ok", 0), ("unknown", 2), ("harness-error", 2)])
def test_what_is_no_divergence_has_its_own_status(kind: VerdictKind, status: int) -> None:
    assert status_of(Verdict(kind), True, False) == status_of(Verdict(kind), True, True) == status


@pytest.mark.parametrize(
    ("changes", "findings", "undocumented", "status"),
    [
        ({}, (), False, 0),
        ({}, (FINDING,), False, 1),
        ({}, (UNDOCUMENTED,), False, 0),
        ({}, (UNDOCUMENTED,), True, 1),
        ({}, (UNDOCUMENTED, FINDING), False, 1),
        ({"could_not_test": {"lfm2": "noisy"}}, (), False, 2),
        ({"could_not_test": {"lfm2": "noisy"}}, (FINDING,), False, 1),
        ({"programs": 0, "verdicts": {}}, (), False, 2),
        ({"verdicts": {"unknown": 100}}, (), False, 2),
        ({"verdicts": {"ok": 99, "unknown": 1}}, (), False, 0),
        ({"verdicts": {"ok": 98, "unknown": 2}}, (), False, 2),
        ({"verdicts": {"ok": 98, "unknown": 2}}, (FINDING,), False, 1),
        ({"verdicts": {"ok": 99, "harness-error": 1}}, (), False, 2),
        ({"ended_by": "a worker process was killed"}, (), False, 2),
        ({"ended_by": "a worker process was killed"}, (FINDING,), False, 1),
    ],
)
def test_a_campaigns_status(changes: dict[str, object], findings: tuple[Finding, ...], undocumented: bool, status: int) -> None:
    account = msgspec.structs.replace(ACCOUNT, **changes)
    assert status_of_campaign(Campaign(account, findings), undocumented) == status


def test_a_family_that_the_target_does_not_run_could_not_be_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NUMBA, "families", ("mamba2",))
    with pytest.raises(UnavailableError, match="could not test"):
        checked_settings("numba", ["lfm2"], None, None, 0, 1, None)


def test_a_campaign_without_a_bound_lasts_a_minute_over_all_families() -> None:
    settings = checked_settings("numba", [], None, None, 0, 1, None)
    assert (settings.seconds, settings.programs, settings.families) == (60.0, None, tuple(NUMBA.families))
    assert checked_settings("numba", ["lfm2", "lfm2"], None, 5, 0, 1, None).families == ("lfm2",)


def trial(verdict: Verdict, program_text: str = "model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1/1") -> Trial:
    return Trial(parse_program(program_text), None, verdict, "a signature" if verdict.is_divergence else None, 2e-5)


def test_the_json_object_has_exactly_its_keys_in_order() -> None:
    found = replay_object(trial(Verdict("wrong-output", 2, 0, 1, "self", 22.8, 2e-5)), NUMBA, "numba", True)
    assert list(found.items()) == [
        ("format", 1),
        ("program", program_id(PROGRAM)),
        ("target", "numba"),
        ("verdict", "wrong-output"),
        ("documented", True),
        ("signature", "numba/lfm2 wrong-output at decode (self) after decode+rollback"),
        ("op_index", 2),
        ("sequence", 0),
        ("position", 1),
        ("relation", "self"),
        ("error", 22.8),
        ("tolerance", 2e-5),
        ("ops", []),
    ]


def test_the_json_object_names_the_target_as_the_command_line_did() -> None:
    found = replay_object(trial(Verdict("wrong-output", 2, 0, 1, "self", 22.8, 2e-5)), NUMBA, "my_cache:TARGET", True)
    assert found["target"] == "my_cache:TARGET"
    assert found["signature"].startswith("my_cache:TARGET/lfm2 ")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null(number: float) -> None:
    assert finite(number) is None
    found = replay_object(trial(Verdict("nonfinite", 2, 0, 1, "self", number, 2e-5)), NUMBA, "numba", True)
    assert json.loads(json.dumps(found, allow_nan=False))["error"] is None


@pytest.mark.parametrize("text", ["model lfm2; cache start=poison; decode 0:1", "model lfm2; decode 0:1; reopen start=poison; decode 0:1"])
def test_poison_that_was_run_as_dirty_is_said(text: str) -> None:
    assert replay_object(trial(Verdict("ok"), text), LLAMACPP, "llamacpp", True)["start"] == "dirty"
    assert "start" not in replay_object(trial(Verdict("ok"), text), NUMBA, "numba", True)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (UsageError("line 1: no\nsuch thing"), 64, "statedrift: line 1: no such thing\n"),
        (UnavailableError("not installed"), 2, "statedrift: not installed\n"),
        (KeyboardInterrupt(), 130, "statedrift: interrupted\n"),
        (
            ZeroDivisionError("x"),
            70,
            "statedrift: internal fault: ZeroDivisionError: x; please report it, with what STATEDRIFT_DEBUG=1 shows\n",
        ),
    ],
)
def test_a_failure_is_one_line_and_a_status(
    error: BaseException, status: int, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STATEDRIFT_DEBUG", raising=False)
    assert failures.status_of_failure(error) == status
    assert capsys.readouterr() == ("", words)


def test_a_traceback_of_our_own_fault_is_shown_only_when_asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise ZeroDivisionError("a planted fault")

    monkeypatch.setattr("statedrift.cli.inventory.families_text", broken)
    for debug, has_traceback in (("0", False), ("1", True)):
        monkeypatch.setenv("STATEDRIFT_DEBUG", debug)
        assert application.run(["families"]) == 70
        err = capsys.readouterr().err
        assert ("Traceback" in err) is has_traceback
        assert err.rstrip().split("\n")[-1].startswith("statedrift: internal fault: ZeroDivisionError: a planted fault")


def test_an_interrupt_is_clean(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("statedrift.cli.inventory.families_text", interrupted)
    assert application.run(["families"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_reducing_tells_of_fewer_operations_and_else_seldom() -> None:
    now = 0.0
    lines: list[str] = []
    show = shown_steps(lambda: now, lines.append)
    for seconds, count in ((0.0, 3), (0.1, 3), (0.2, 2), (0.3, 2), (PROGRESS_SECONDS + 0.2, 2), (PROGRESS_SECONDS + 0.3, 2)):
        now = seconds
        show(trial(Verdict("wrong-output"), "model lfm2 seed=0" + "; clear" * count))
    assert lines == [f"operations={count} verdict=wrong-output" for count in (3, 2, 2)]


def test_reducing_a_right_program_says_that_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "small.drift"
    assert application.run(["reduce", "model lfm2 seed=0; clear", "--target", "numba", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.err == f"nothing to reduce: the program does not diverge; {out} is not written\n"
    assert not out.exists()


@pytest.mark.parametrize("command", ["replay", "explain"])
def test_a_program_without_an_output_does_not_claim_that_outputs_are_right(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert application.run([command, "model lfm2 seed=0; clear", "--target", "numba"]) == 0
    out = capsys.readouterr().out
    assert "  no output was compared; nothing else is wrong\n" in out
    assert "every answer is right" not in out


@pytest.mark.parametrize("command", ["replay", "explain"])
def test_an_undocumented_use_is_followed_by_what_the_documentation_says(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "fixtures"))
    text = "model lfm2 seed=0; decode 0:3 1:2; share 0 1; decode 1:1"
    assert application.run([command, text, "--target", "faulty:SHARE_ONTO_USED"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[lines.index("  undocumented: it needs share-onto-nonempty") + 1] == "    share-onto-nonempty: it is not said"


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    return keep_campaign(tmp_path / "campaign", ACCOUNT, [FINDING])


def test_a_report_says_what_it_wrote(campaign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv, parquet = tmp_path / "f.csv", tmp_path / "f.parquet"
    assert application.run(["report", str(campaign), "--csv", str(csv), "--parquet", str(parquet)]) == 0
    assert capsys.readouterr() == ("", f"written to {csv}\nwritten to {parquet}\n")


def test_a_report_can_be_csv_on_standard_output(campaign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv = tmp_path / "f.csv"
    application.run(["report", str(campaign), "--csv", str(csv)])
    capsys.readouterr()
    assert application.run(["report", str(campaign), "--csv", "-"]) == 0
    assert capsys.readouterr() == (csv.read_text(), "")


@pytest.mark.parametrize("option", ["--csv", "--parquet"])
def test_a_report_into_a_folder_that_is_not_there_is_refused(
    option: str, campaign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "nowhere" / "f"
    assert application.run(["report", str(campaign), option, str(place)]) == 64
    assert capsys.readouterr().err == f"statedrift: {option} {place} cannot be written: there is no folder {place.parent}; make it first\n"
    assert not place.parent.exists()


def test_parquet_is_not_written_to_standard_output(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert application.run(["report", str(campaign), "--parquet", "-"]) == 64
    assert "--parquet needs a file" in capsys.readouterr().err


def test_a_report_of_no_campaign_suggests_a_command_that_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "no such"
    assert application.run(["report", str(place)]) == 2
    assert f"`statedrift fuzz --target numba --out '{place}'` makes one\n" in capsys.readouterr().err


def test_a_used_folder_is_not_suggested_for_a_campaign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file"):
        assert application.run(["report", str(place)]) == 2
        assert "`statedrift fuzz --target numba --out runs/first` makes one elsewhere\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ("state SET value = json_set(value, '$.programs', ?)", "programs", -1),
        ("state SET value = json_set(value, '$.seconds', ?)", "seconds", -0.5),
        ("findings SET body = json_set(body, '$.reproduced', ?)", "reproduced", 11),
    ],
)
def test_impossible_numbers_of_an_edited_database_are_named(
    place: str, key: str, value: float, campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(campaign / "campaign.sqlite")) as connection, connection:
        connection.execute(f"UPDATE {place}" + " WHERE name = 'account'" * place.startswith("state"), (value,))
    assert application.run(["report", str(campaign)]) == 2
    said = capsys.readouterr().err
    assert "campaign.sqlite" in said
    assert key in said


def test_what_a_campaign_could_not_do_is_in_its_sentence_and_its_account() -> None:
    account = msgspec.structs.replace(ACCOUNT, verdicts={"ok": 78, "unknown": 22}, ended_by="a worker process was killed")
    sentence = verdict_sentence(Campaign(account, ()))
    assert sentence == "no divergence in 100 programs; could not go on; could not test: 22 of them are unknown"
    assert "\nended before its time: a worker process was killed\n" in account_text(account)


def test_verdicts_stand_in_one_order_whatever_came_first() -> None:
    account = msgspec.structs.replace(ACCOUNT, verdicts={"unknown": 1, "crash": 2, "ok": 1097})
    assert "ok 1,097 · crash 2 · unknown 1" in account_text(account)


PROGRESS = Progress(12.34, 2412, 30000, 0.871, 2, 3.25, 1, "fuzzing")


def test_a_plain_line_has_its_names_in_their_order() -> None:
    statistics = Statistics(12.3, 2412, 201.4, 87.1, 2, 1, 4, 1, 3.2, 2, "fuzzing")
    assert plain_line(statistics) == (
        "elapsed=12.3 programs=2412 programs_per_second=201.4 accepted_percent=87.1 findings_new=2 findings_known=1 crashes=4 unknown=1 "
        "seconds_since_last_find=3.2 jobs=2 phase=fuzzing"
    )
    assert " seconds_since_last_find=- " in plain_line(msgspec.structs.replace(statistics, seconds_since_last_find=None))


def test_the_live_line_says_the_same_in_words() -> None:
    assert live_line(PROGRESS) == "fuzzing  12 s · 2,412 programs · 87 % accepted · 2 findings · last at 3 s · 1 unknown"
    assert " · 2 findings (1 known) · " in live_line(msgspec.structs.replace(PROGRESS, findings_known=1))
    assert live_line(msgspec.structs.replace(PROGRESS, phase="noise")) == "measuring the noise floor"


def test_colour_adds_nothing_but_colour() -> None:
    text = "1 wrong-output · llamacpp 1 · lfm2\n    1  decode 0:1  accepted\n  > 2  decode 0:1  logits off\n"
    painted = output.painted(text)
    assert painted != text
    assert painted.replace("\x1b[1m", "").replace("\x1b[31m", "").replace("\x1b[0m", "") == text


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colour_can_be_turned_off(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert output.wants_colour()
    monkeypatch.setenv(name, value)
    assert not output.wants_colour()


def test_a_reserved_output_keeps_native_writes_away(capfd: pytest.CaptureFixture[str]) -> None:
    import os

    with output.standard_output_reserved():
        os.write(1, b"a native library speaks\n")
    output.say("{}\n")
    assert capfd.readouterr() == ("{}\n", "a native library speaks\n")


def test_every_family_is_listed_with_its_rows() -> None:
    text = families_text()
    for family in FAMILIES.values():
        assert f"\n{family.name}  " in "\n" + text
    assert "state rows  convolution 64, recurrent 0 elements a layer and sequence" in text


def broken_target(problem: Callable[[], str]) -> object:
    class Broken:
        name, isolated, families, poison, undocumented = "broken", False, ("lfm2",), False, ()

        def version(self) -> str:
            return "0"

        def describe(self) -> str:
            return problem()

        def open(self, model: object, configuration: object) -> object:
            raise UnavailableError("no memory for it")

    return Broken()


def test_a_target_that_is_not_there_says_why_and_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise UnavailableError("target broken is not available: a library is missing. pip install it")

    monkeypatch.setattr("statedrift.cli.inventory.target_names", lambda: ("broken", "other", "half"))
    targets = {"broken": broken_target(missing), "other": broken_target(lambda: str(1 // 0)), "half": broken_target(lambda: "version 0")}
    monkeypatch.setattr("statedrift.cli.inventory.load_target", lambda name: targets[name])
    lines = targets_text()
    assert "broken  not available: a library is missing." in lines
    assert "other  not available: ZeroDivisionError" in lines
    assert "half  available  version 0\n  lfm2  not available: no memory for it" in lines


@pytest.mark.parametrize("target", ["numba", "numba-ring", "numba-llamacpp"])
def test_a_numba_that_does_not_compile_is_said_at_once(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import numba

    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert application.run(["replay", "model lfm2; decode 0:1", "--target", target]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(f"statedrift: target {target} is not available: NUMBA_DISABLE_JIT is set")


def test_an_ability_that_hangs_on_the_pool_says_with_which() -> None:
    split = Capabilities("none", 0, 64, 64, True, True, shift=True, divide=True)
    text = abilities_text(split, Capabilities("none", 0, 64, 64, True, True, shift=True, coupled=True))
    assert text == "rollback guarantee none; coupled with unified=1, shift, divide with unified=0"
