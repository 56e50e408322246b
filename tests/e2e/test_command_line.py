"""The installed command, as people run it: its output, its files, its exit status."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from statedrift.spec.programs import parse_program, program_id
from statedrift.store.campaigns import read_campaign

CANARY = "statedrift.fuzz.canary:FREQUENT"
ROLLED_BACK = "model lfm2 seed=0; decode 0:10; decode 0:4; rollback 0 2; decode 0:1/1"


def statedrift(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "statedrift", *arguments], capture_output=True, text=True, cwd=folder, timeout=300)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A campaign against the target that is broken on purpose, kept in runs/first below a folder."""
    folder = tmp_path_factory.mktemp("campaign")
    done = statedrift("fuzz", "--target", CANARY, "--family", "lfm2", "--programs", "128", "--out", "runs/first", folder=folder)
    return folder, done


def check_reported_again(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """`report` shows what `fuzz` showed, and between account and findings the tables of what was reached."""
    account, _, findings = done.stdout.partition("\n1 ")
    again = statedrift("report", "runs/first", folder=folder).stdout
    assert again.startswith(account)
    assert again.endswith("\n1 " + findings)
    assert "what came before, and what then, on one sequence" in again[len(account) : -len(findings)]


def test_a_broken_target_is_found_out(campaign: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = campaign
    assert done.returncode == 1, done.stderr
    assert "wrong-output" in done.stdout
    assert "divergence" in done.stdout.strip().split("\n")[-1]
    assert list((folder / "runs" / "first" / "findings").glob("wrong-output-*/program.drift"))


def test_a_finding_is_replayed_by_the_line_that_was_printed(campaign: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = campaign
    line = next(line.strip() for line in done.stdout.split("\n") if line.strip().startswith("replay "))
    words = line.removeprefix("replay").split()
    assert words[0] == "statedrift"
    again = statedrift(*words[1:], folder=folder)
    assert again.returncode == 1, again.stderr
    assert again.stdout.startswith("wrong-output · ")


def test_a_campaign_is_reported_again_as_text_and_as_tables(campaign: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = campaign
    check_reported_again(folder, done)
    tables = statedrift("report", "runs/first", "--csv", "f.csv", "--parquet", "f.parquet", folder=folder)
    assert (tables.returncode, tables.stdout) == (0, "")
    heading, *rows = (folder / "f.csv").read_text().splitlines()
    assert {"signature", "target", "family", "kind", "program", "documented", "reliability"} <= set(heading.split(","))
    assert rows
    assert (folder / "f.parquet").read_bytes()[:4] == b"PAR1"


@pytest.fixture(scope="module")
def self_judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A campaign in which the target that is broken on purpose is its own truth."""
    folder = tmp_path_factory.mktemp("self_judged")
    words = ["fuzz", "--target", CANARY, "--oracle", "engine", "--family", "lfm2", "--programs", "64", "--out", "runs/own"]
    return folder, statedrift(*words, folder=folder)


def test_a_broken_target_is_found_out_by_its_own_recompute(self_judged: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = self_judged
    assert done.returncode == 1, done.stderr
    assert "judged by its own recompute" in " ".join(done.stdout.split())
    assert read_campaign(folder / "runs" / "own").account.oracle == "engine"
    (script, *_) = sorted((folder / "runs" / "own" / "findings").glob("wrong-output-*/repro.py"))
    assert '"--oracle", "engine"' in script.read_text()
    assert json.loads((script.parent / "finding.json").read_text())["oracle"] == "engine"


def test_what_its_own_recompute_found_is_replayed_by_the_line_that_was_printed(
    self_judged: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = self_judged
    line = next(line.strip() for line in done.stdout.split("\n") if line.strip().startswith("replay "))
    assert line.endswith("--oracle engine")
    again = statedrift(*line.removeprefix("replay").split()[1:], "--json", folder=folder)
    assert again.returncode == 1, again.stderr
    assert json.loads(again.stdout)["oracle"] == "engine"


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A campaign in which the target that is broken on purpose is held to the sound one."""
    folder = tmp_path_factory.mktemp("held")
    words = ("--target", CANARY, "--against", "numba", "--family", "lfm2", "--programs", "64", "--out", "runs/first")
    return folder, statedrift("fuzz", *words, folder=folder)


def test_a_target_is_held_to_another_one(held: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = held
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(f"{CANARY} against numba · lfm2 · ")
    assert "\nagreed       in " in done.stdout
    assert "\n1 wrong-output · canary" not in done.stdout
    assert f"\n1 wrong-output · {CANARY} " in done.stdout
    assert "  script " not in done.stdout
    check_reported_again(folder, done)


@pytest.mark.parametrize("command", ["replay", "explain", "reduce"])
def test_a_difference_is_shown_again_by_every_command(command: str, held: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = held
    line = next(line.strip() for line in done.stdout.split("\n") if line.strip().startswith("replay "))
    words = line.split()[3:]
    assert words[-2:] == ["--against", "numba"]
    again = statedrift(command, *words, folder=folder)
    assert again.returncode == 1, again.stderr
    assert again.stdout.startswith(f"wrong-output · {CANARY} ")
    assert again.stdout.split("\n")[-2].endswith("--against numba")


def test_a_difference_as_json_names_both_targets() -> None:
    done = statedrift("replay", ROLLED_BACK, "--target", CANARY, "--against", "numba", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["target"], found["against"]) == (1, CANARY, "numba")
    assert found["signature"] == f"{CANARY} against numba/lfm2 wrong-output at decode (self) after decode+rollback"
    assert [len(found[name]) for name in ("ops", "against_ops")] == [4, 4]


SPOILED = "model lfm2 seed=0; decode 0:9; share 0 1; drop 0"
FIXTURES = Path(__file__).parent.parent / "fixtures"


def test_a_wrong_state_is_found_only_where_the_state_is_looked_at() -> None:
    plain, inspected = (
        statedrift("replay", SPOILED, "--target", "spoiling:SHARE", "--json", *more, folder=FIXTURES) for more in ((), ("--inspect",))
    )
    assert (plain.returncode, inspected.returncode) == (0, 1), inspected.stderr
    found = json.loads(inspected.stdout)
    assert (found["verdict"], found["part"], found["layer"], found["op_index"]) == ("wrong-state", "conv", 1, 1)
    assert found["signature"] == "spoiling:SHARE/lfm2 wrong-state at share in conv (self) after decode"
    assert "part" not in json.loads(plain.stdout)


@pytest.mark.parametrize("command", ["explain", "reduce"])
def test_a_wrong_state_is_shown_with_the_line_that_shows_it_again(command: str) -> None:
    done = statedrift(command, SPOILED, "--target", "spoiling:SHARE", "--inspect", folder=FIXTURES)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("wrong-state · spoiling:SHARE ")
    assert done.stdout.split("\n")[-2].endswith(" --target spoiling:SHARE --inspect")


@pytest.mark.parametrize("command", ["fuzz", "replay"])
def test_a_target_without_state_rows_could_not_be_tested(command: str) -> None:
    what = ("--programs", "1", "--family", "lfm2") if command == "fuzz" else (SPOILED,)
    done = statedrift(command, *what, "--target", "fixtures.fake_engine:SILENT", "--inspect", folder=FIXTURES.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("statedrift: could not test: target ")
    assert "does not show its state rows" in done.stderr


def test_a_campaign_in_a_used_folder_is_refused(campaign: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = campaign
    again = statedrift("fuzz", "--target", CANARY, "--programs", "1", "--out", "runs/first", folder=folder)
    assert (again.returncode, again.stdout) == (64, "")
    assert again.stderr.startswith("statedrift: ")


def test_json_is_the_only_thing_on_standard_output() -> None:
    done = statedrift("replay", ROLLED_BACK, "--target", CANARY, "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == [
        "format", "program", "target", "verdict", "documented", "signature", "op_index", "sequence", "position", "relation", "error",
        "tolerance", "ops",
    ]  # fmt: skip
    assert (found["format"], found["program"], found["verdict"]) == (1, program_id(parse_program(ROLLED_BACK)), "wrong-output")
    assert found["op_index"] == 3
    assert found["error"] > found["tolerance"]
    assert found["ops"][2] == {"op": "rollback 0 2", "outcome": "accepted"}


def test_a_right_target_is_right() -> None:
    done = statedrift("replay", ROLLED_BACK, "--target", "numba")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ok · numba ")
    assert done.stdout.rstrip().split("\n")[-1] == f"  replay   statedrift replay '{ROLLED_BACK}' --target numba"


def test_reduce_writes_a_smaller_program_that_still_diverges(tmp_path: Path) -> None:
    (tmp_path / "long.drift").write_text(
        "model lfm2 seed=0\ncache n_seq_max=3\ndecode 0:10 1:3\nshare 1 2\ndecode 0:4\nsave 1 a\nrollback 0 2\ndrop 2\ndecode 0:1/1 1:1\nclear\n"
    )
    done = statedrift("reduce", "long.drift", "--target", CANARY, "--out", "small.drift", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    small = parse_program((tmp_path / "small.drift").read_text())
    assert len(small.operations) <= 4
    assert statedrift("replay", "small.drift", "--target", CANARY, folder=tmp_path).returncode == 1


def test_explain_shows_where_they_part() -> None:
    done = statedrift("explain", ROLLED_BACK, "--target", CANARY)
    assert done.returncode == 1, done.stderr
    assert "  > 4  decode 0:1/1" in done.stdout
    assert "expected" in done.stdout.split("  > 4")[1]
    assert "given" in done.stdout.split("  > 4")[1]


INTERRUPTIBLE = """
import signal
from statedrift.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit that it is ignored
main()
"""


def test_an_interrupt_ends_with_the_summary(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "fuzz", "--target", "numba", "--family", "lfm2", "--seconds", "600", "--out", "run"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:  # the first progress line that tells of programs
        if "phase=fuzzing" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "stopped before its end" in out
    assert out.rstrip().split("\n")[-1].startswith("no divergence in ")
    assert "Traceback" not in err


def test_a_reader_that_goes_away_changes_no_status() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "statedrift", "replay", ROLLED_BACK, "--target", CANARY], stdout=write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_example_target_in_the_current_folder_is_driven(tmp_path: Path) -> None:
    (tmp_path / "my_cache.py").write_text("from statedrift.targets.numba import NumbaTarget\nTARGET = NumbaTarget()\n")
    done = statedrift("replay", ROLLED_BACK, "--target", "my_cache:TARGET", folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_front_page_works_without_installation_of_engines() -> None:
    done = statedrift("targets")
    assert done.returncode == 0
    assert done.stdout.count("vailable") >= 2
