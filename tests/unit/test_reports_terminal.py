"""What a terminal or a pipe shows of findings and campaigns; pinned by golden files in tests/unit/golden.

Run with STATEDRIFT_UPDATE_GOLDEN=1 to write them anew, and read what changed.
"""

import os
from pathlib import Path

import msgspec
import pytest
from statedrift.reports import terminal
from statedrift.reports.terminal import (
    WIDTH,
    account_text,
    campaign_text,
    finding_text,
    never_accepted,
    never_executed,
    numbered_program,
    verdict_sentence,
    verdict_text,
)
from statedrift.spec.programs import parse_program, program_id
from statedrift.spec.verdicts import ACCEPTED, Outcome, Verdict, refused
from statedrift.store.campaigns import Account, Campaign, Noise
from statedrift.store.findings import Answer, Finding

GOLDEN = Path(__file__).parent / "golden"

TWICE = parse_program(
    "model lfm2 seed=0; cache n_seq_max=2; decode 0:10; decode 0:4; rollback 0 2; decode 0:1/1; rollback 0 2; decode 0:1/2; decode 1:1"
)
ANSWERS = (
    Answer(ACCEPTED, (9, -1)),
    Answer(ACCEPTED, (13, -1)),
    Answer(ACCEPTED, (11, -1)),
    Answer(ACCEPTED, (12, -1)),
    Answer(ACCEPTED, (10, -1)),
    Answer(ACCEPTED, (11, -1)),
    Answer(ACCEPTED, (11, 0)),
)
WRONG = Verdict("wrong-output", 5, 0, 11, "self", 22.8, 0.002, reason="logits off by 22.8 (tolerance 0.002)")
FINDING = Finding(
    signature="llamacpp/lfm2 wrong-output at decode (self) after decode+rollback",
    title="a rollback was accepted although its snapshot had never been written",
    target="llamacpp",
    version="llama-cpp-python 0.3.36 (llama.cpp 0.5.0-dev, library 73592488)",
    family="lfm2",
    verdict=WRONG,
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
    answers=ANSWERS,
)
SHARE = parse_program("model mamba2 seed=0; decode 0:48; share 0 1 0 47")
UNDOCUMENTED = msgspec.structs.replace(
    FINDING,
    answers=(),
    signature="llamacpp/mamba2 false-success at share-range (self) after decode",
    title="share says yes where it must refuse",
    family="mamba2",
    verdict=Verdict(
        "false-success", 1, 0, None, "self", reason="share must be refused (a state is the whole past, not a range of it) but was accepted"
    ),
    program=SHARE,
    original=SHARE,
    documented=False,
    undocumented_uses=("partial-share",),
    found_after_programs=7,
)
ACCOUNT = Account(
    target="llamacpp",
    version="llama-cpp-python 0.3.36 (llama.cpp 0.5.0-dev, library 73592488)",
    families=("mamba2", "lfm2"),
    seed=7,
    jobs=1,
    started_at="2026-01-02T03:04:05+00:00",
    seconds=20.0,
    programs=2412,
    operations=41000,
    outcomes={
        "decode": {"accepted": 23000, "refused": 1000, "crash": 1},
        "rollback": {"accepted": 3000, "refused": 1000},
        "shift": {"refused": 70},
        "restore": {"skipped": 12},
    },
    verdicts={"ok": 2400, "wrong-output": 11, "unknown": 1},
    noise={"lfm2": Noise(3.0e-06, 6.0e-05, 200), "mamba2": Noise(0.0, 1e-5, 200)},
    could_not_test={},
    seconds_generating=1.0,
    seconds_running=10.0,
    seconds_judging=4.0,
    seconds_reducing=3.0,
    complete=True,
)


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("STATEDRIFT_UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text()


def replay_of(finding: Finding) -> str:
    return f"statedrift replay {program_id(finding.program)} --target {finding.target}"


def script_of(finding: Finding) -> str:
    return f"runs/nightly/findings/{finding.verdict.kind}-{program_id(finding.program)[:6]}/repro.py"


def test_a_finding_looks_as_agreed() -> None:
    check_golden("reports_finding.txt", finding_text(1, FINDING, replay_of(FINDING), script_of(FINDING)))


def test_a_campaign_looks_as_agreed() -> None:
    check_golden("reports_campaign.txt", campaign_text(Campaign(ACCOUNT, (FINDING, UNDOCUMENTED)), replay_of, script_of))


def test_a_clean_campaign_looks_as_agreed() -> None:
    clean = msgspec.structs.replace(
        ACCOUNT, verdicts={"ok": 2412}, could_not_test={"lfm2": "could not test: plain decodings are off by 0.1"}
    )
    check_golden("reports_clean_campaign.txt", campaign_text(Campaign(clean, ()), replay_of, script_of))


def test_a_right_program_looks_as_agreed() -> None:
    program = parse_program("model mamba2 seed=0; cache n_rs_seq=0; decode 0:12; remove 0 4 8; restore a 1; drop 0; shift 0 2")
    answers = (
        Answer(ACCEPTED, (11, -1, -1, -1)),
        Answer(refused("positions 4 to 7 cannot be forgotten while position 11 stays"), (11, -1, -1, -1)),
        Answer(Outcome("skipped", "slot a holds no saved sequence"), (11, -1, -1, -1)),
        Answer(ACCEPTED, (-1, -1, -1, -1)),
        Answer(refused("this target cannot shift positions"), (-1, -1, -1, -1)),
    )
    verdict = Verdict("ok", error=8.6e-7, tolerance=3.7e-5)
    check_golden(
        "reports_right_program.txt", verdict_text(program, verdict, "numba", "statedrift 0.1.0", answers, "statedrift replay x.drift")
    )


def test_a_crash_shows_the_engines_last_words() -> None:
    program = parse_program("model lfm2 seed=0; cache n_ubatch=4; decode 0:1; decode 0:9")
    verdict = Verdict("crash", 1, 0, relation="self", reason="the process died (SIGABRT): GGML_ASSERT(n_ubatch > n_keep_tail) failed")
    answers = (Answer(Outcome("accepted", "reached")), Answer(Outcome("crash")))
    text = verdict_text(
        program,
        verdict,
        "llamacpp",
        "b9123",
        answers,
        "statedrift replay x.drift",
        "it needs small-ubatch",
        ("loading", "GGML_ASSERT failed"),
        ("small-ubatch: n_rs_seq is marked experimental; how it bounds n_ubatch, the tokens that are computed at once, is not said",),
    )
    check_golden("reports_crash.txt", text)


def test_the_mark_is_at_the_operation_that_parts_and_nothing_follows() -> None:
    lines = numbered_program(TWICE, WRONG, ANSWERS)
    assert [line for line in lines if ">" in line] == [lines[-1]]
    assert lines[-1].startswith("  > 6  decode 0:1/2")


def test_an_ok_program_has_no_mark_and_shows_every_operation() -> None:
    lines = numbered_program(TWICE, Verdict("ok"), ANSWERS)
    assert not any(line.startswith("  >") for line in lines)
    assert len(lines) == 1 + len(TWICE.operations)


def test_a_long_program_shows_the_operations_before_the_mark() -> None:
    program = parse_program("model lfm2 seed=0; " + "; ".join(f"decode 0:1/{number}" for number in range(200)))
    lines = numbered_program(program, Verdict("wrong-output", 150, 0, 150, reason="logits off by 1"))
    assert "    ... 91 operations before" in lines
    assert lines[-1].startswith("  > 151  decode 0:1/150")


def test_a_program_text_is_never_cut() -> None:
    tokens = ",".join(["63"] * 200)
    lines = numbered_program(parse_program(f"model lfm2 seed=0; decode 0:[{tokens}]"), Verdict("ok"), (Answer(ACCEPTED, (199,)),))
    assert any(f"0:[{tokens}]" in line for line in lines)


@pytest.mark.parametrize("name", ["reports_finding.txt", "reports_campaign.txt", "reports_clean_campaign.txt", "reports_crash.txt"])
def test_no_line_is_wider_than_a_page(name: str) -> None:
    assert max(len(line) for line in (GOLDEN / name).read_text().splitlines()) <= WIDTH


def test_operations_that_never_ran_are_named() -> None:
    missing = never_executed(ACCOUNT)
    assert "restore" in missing  # skipped every time
    assert "divide" in missing  # never generated
    assert "decode" not in missing
    assert "never executed: restore (skipped every time); cancel, remove, drop" in account_text(ACCOUNT)


def test_operations_that_were_always_refused_are_named() -> None:
    assert never_accepted(ACCOUNT) == ("shift",)


def test_an_account_names_its_profile_where_it_is_not_the_usual_one() -> None:
    assert "profile" not in account_text(ACCOUNT)
    assert "\nprofile      server\n" in account_text(msgspec.structs.replace(ACCOUNT, profile="server"))


def test_an_account_of_nothing_can_be_shown() -> None:
    nothing = msgspec.structs.replace(ACCOUNT, seconds=0.0, programs=0, operations=0, outcomes={}, verdicts={}, noise={})
    assert "programs     0 (-), 0 operations (-)" in account_text(nothing)


@pytest.mark.parametrize(
    ("findings", "could_not_test", "sentence"),
    [
        ((), {}, "no divergence in 2,412 programs"),
        ((FINDING,), {}, "1 divergence in 2,412 programs"),
        (
            (FINDING, UNDOCUMENTED),
            {},
            "2 divergences in 2,412 programs; 1 of them only in uses that the target's own documentation does not promise",
        ),
        ((), {"lfm2": "too noisy"}, "no divergence in 2,412 programs; could not test lfm2"),
    ],
)
def test_the_sentence_says_how_it_ended(findings: tuple[Finding, ...], could_not_test: dict[str, str], sentence: str) -> None:
    account = msgspec.structs.replace(ACCOUNT, could_not_test=could_not_test)
    assert verdict_sentence(Campaign(account, findings)) == sentence


def test_the_module_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    campaign_text(Campaign(ACCOUNT, (FINDING,)), replay_of, script_of)
    assert capsys.readouterr() == ("", "")
    assert terminal.plural(1, "program") == "1 program"


@pytest.mark.parametrize(("columns", "expected"), [(40, 60), (80, 80), (200, 100)])
def test_lines_are_as_wide_as_the_terminal_within_bounds(columns: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert terminal.line_width() == expected


def test_lines_into_a_pipe_are_always_as_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert terminal.line_width() == terminal.WIDTH
