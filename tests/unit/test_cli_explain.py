"""`explain` shows what was sent, said and true, and stops where they part."""

import msgspec
import numpy as np
import pytest
from statedrift.cli.application import run as run_command
from statedrift.cli.explaining import ledger_text, opening_text, step_lines
from statedrift.fuzz.execution import Run, execute
from statedrift.fuzz.filming import film_of
from statedrift.fuzz.trial import Bench, Trial, answers_of
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.programs import parse_program
from statedrift.spec.verdicts import Outcome, Verdict, VerdictKind
from statedrift.targets.numba import TARGET

from tests.judging import verdicts_of

TOLERANCE = 1e-3
PROGRAM = parse_program(
    "model lfm2 seed=0; cache n_seq_max=2; decode 0:10; share 0 1; save 0 a; drop 0; restore b 0; restore a 0; cancel 0:1 at=0; "
    "remove 0 2 4; decode 0:1 1:2; rollback 1 1; reopen"
)


def trial_of(run: Run) -> Trial:
    verdict = verdicts_of(PROGRAM.model, [run], TOLERANCE)[0]
    return Trial(PROGRAM, run, verdict, None, TOLERANCE)


@pytest.fixture(scope="module")
def run() -> Run:
    return execute(PROGRAM, TARGET)


def facts(lines: list[str], number: int) -> dict[str, str]:
    """The labelled lines of step `number`."""
    start = next(index for index, line in enumerate(lines) if line[4:].startswith(f"{number}  "))
    step: dict[str, str] = {}
    for line in lines[start + 1 :]:
        if not line:
            break
        if line[7] != " ":
            label, _, value = line.strip().partition(" ")
            step[label] = value.strip()
    return step


def test_every_step_of_a_right_program_is_shown(run: Run) -> None:
    lines = step_lines(trial_of(run))
    assert not any(line.startswith("  >") for line in lines)
    assert facts(lines, 1)["sent"].startswith("one batch: sequence 0 [")
    assert facts(lines, 1)["sent"].endswith("at positions 0..9")
    assert facts(lines, 1)["truth"].startswith("last positions 0:9; 10 output rows off by at most")
    assert facts(lines, 2) == {
        "sent": "copy all of sequence 0 to sequence 1",
        "contract": "must be accepted: a whole sequence can always be shared",
        "said": "accepted; last positions 0:9 1:9",
        "truth": "last positions 0:9 1:9",
    }
    assert facts(lines, 4)["truth"] == "last positions 1:9"
    assert facts(lines, 5) == {"contract": "not sent: slot b holds no saved sequence", "said": "skipped"}
    assert facts(lines, 7)["contract"].startswith("refused without a call")
    assert facts(lines, 8)["contract"] == "must be refused: a state cannot forget its middle"
    assert facts(lines, 10)["truth"] == "last positions 0:10 1:10"
    assert facts(lines, 11)["truth"] == "last positions all empty"


def test_a_wrong_row_is_shown_against_the_true_one(run: Run) -> None:
    data, width = run.rows[8]
    rows = np.frombuffer(data, np.float32).reshape(-1, width).copy()
    rows[2, 7] = 99.0
    trial = trial_of(msgspec.structs.replace(run, rows={**run.rows, 8: (rows.tobytes(), width)}))
    lines = step_lines(trial)
    assert trial.verdict.kind == "wrong-output"
    assert [line for line in lines if line.startswith("  >")] == ["  > 9  decode 0:1 1:2"]
    step = facts(lines, 9)
    assert step["parted"].startswith("wrong-output (sequence 1, position 11, relation other): logits off by")
    assert step["given"].startswith("likeliest tokens 7 (99.000)")
    assert "7 (99" not in step["expected"]
    assert step["worst"].startswith("number 7: expected ")
    assert not any(line[4:].startswith("10  ") for line in lines)


def test_a_row_that_is_not_a_number_can_be_shown(run: Run) -> None:
    data, width = run.rows[8]
    rows = np.frombuffer(data, np.float32).reshape(-1, width).copy()
    rows[0, :] = np.nan
    step = facts(step_lines(trial_of(msgspec.structs.replace(run, rows={**run.rows, 8: (rows.tobytes(), width)}))), 9)
    assert step["parted"].startswith("nonfinite")
    assert "nan" in step["worst"]


@pytest.mark.parametrize(
    ("index", "word", "verdict", "label", "value"),
    [
        (3, "accepted", Verdict("wrong-position", 3, 0, 9, "self"), "expected", "last positions 1:9"),
        (7, "refused", Verdict("partial-effect", 7, 0, 3, "self"), "expected", "refused, and nothing changed"),
        (7, "accepted", Verdict("false-success", 7, 0, None, "self"), "expected", "refused, and nothing changed"),
        (2, "refused", Verdict("bad-refusal", 2, 0, None, "self"), "expected", "accepted"),
        (2, "crash", Verdict("crash", 2, 0, None, "self"), "expected", "accepted"),
    ],
)
def test_where_they_part_both_sides_are_shown(run: Run, index: int, word: str, verdict: Verdict, label: str, value: str) -> None:
    last = msgspec.structs.replace(run.steps[index], outcome=Outcome(word))  # type: ignore[arg-type]
    cut = msgspec.structs.replace(run, steps=(*run.steps[:index], last), verdict=verdict, spans=(), rows={})
    lines = step_lines(Trial(PROGRAM, cut, verdict, None, TOLERANCE))
    assert facts(lines, index + 1)[label] == value


def test_a_program_of_which_nothing_is_known_says_so() -> None:
    lines = step_lines(Trial(PROGRAM, None, Verdict("harness-error", reason="it broke"), None, TOLERANCE))
    assert lines == ["  nothing is known of its steps: it broke"]


@pytest.mark.parametrize("kind", ["crash", "hang"])
def test_a_death_while_opening_is_a_step(kind: VerdictKind) -> None:
    program = parse_program("model lfm2 seed=0; cache n_seq_max=3 start=dirty; decode 0:1")
    lines = step_lines(Trial(program, None, Verdict(kind, reason="the process died (SIGABRT)"), "s", TOLERANCE))
    assert lines[:2] == ["", "  > opening"]
    text = " ".join(" ".join(lines).split())
    assert "sent open a session; then 17 tokens to every sequence of 0..2, one decode a sequence" in text
    assert f"parted {kind} while opening: the process died (SIGABRT)" in text
    assert "decode 0:1" not in text


def test_what_is_sent_at_opening_follows_from_start() -> None:
    assert opening_text(CacheConfiguration(), True) == opening_text(CacheConfiguration(), False) == "open a session"
    assert opening_text(CacheConfiguration(start="poison"), True) == "open a session over poisoned memory"
    assert opening_text(CacheConfiguration(start="poison"), False) == opening_text(CacheConfiguration(start="dirty"), True)


def test_a_death_is_explained_with_the_engines_last_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(
        PROGRAM, None, Verdict("crash", reason="the process died (SIGABRT): ASSERT(empty)"), "s", TOLERANCE, ("loading", "ASSERT(empty)")
    )
    monkeypatch.setattr("statedrift.cli.explaining.tried", lambda program, name, *_: (trial, True, (), Bench(TARGET)))
    assert run_command(["explain", "model lfm2 seed=0; clear", "--target", "numba"]) == 1
    out = capsys.readouterr().out
    assert "crash while opening: the process died (SIGABRT): ASSERT(empty)" in out
    assert "\n  the engine's last words\n    loading\n    ASSERT(empty)\n  replay   " in out


def test_last_positions_leave_empty_sequences_out() -> None:
    assert ledger_text([3, -1, 0]) == "0:3 2:0"
    assert ledger_text([-1, -1]) == "all empty"


def test_the_cells_are_shown_after_every_step(run: Run) -> None:
    trial = trial_of(run)
    lines = step_lines(trial, film=film_of(PROGRAM, "numba", answers_of(trial), TOLERANCE))
    assert facts(lines, 1)["cell"] == "0 (seq 0): 10 of seq 0 <- seq 0, its state | 9 of seq 0 | 8 of seq 0 | 7 of seq 0"
    assert facts(lines, 2)["cell"].startswith("0 (seq 0 1): 10 of seq 0 <- seq 0, its state <- seq 1, its state |")
    assert "cell" not in facts(step_lines(trial), 1)


def test_a_sequence_that_goes_on_from_another_state_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    text = "model lfm2 seed=0; decode 0:1; decode 0:1; rollback 0 1; decode 0:1"
    assert run_command(["explain", text, "--target", "numba-llamacpp"]) == 1
    assert "cell      0 (seq 0): 2 of seq 0 | zero <- seq 0, NOT its state | zero | zero" in capsys.readouterr().out
