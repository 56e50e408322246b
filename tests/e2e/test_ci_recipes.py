"""The recipes for CI systems (examples/ci, docs/ci.md): they parse, every command in them is one of ours, and their steps run.

Rules
- A step runs as it stands in the file, but for the command `statedrift`, which here tries 64 programs of one family in place of
  the seconds, and our own cache in place of the recipe's target.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from statedrift.cli.application import application

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "ci"
WORKFLOWS = sorted(RECIPES.glob("*.yml"))
GATE = RECIPES / "gate.sh"
PAGES = [ROOT / "docs" / "ci.md", ROOT / "docs" / "baselines.md"]
VALUES = {"TARGET": "numba", "BUDGET": "120", "OUT": "runs", "BASELINE": "known.toml", "@": "--family lfm2", "(nproc)": "2"}
SHIM = """#!{python}
import re, sys
import statedrift.cli
line = " ".join(sys.argv[1:])
if line.startswith("fuzz "):
    line = re.sub("--seconds [0-9]+", "--programs 64", re.sub("--family [a-z0-9]+", "", line)) + " --family lfm2"
sys.argv[1:] = re.sub("--target [a-zA-Z_:]+", "--target {target}", line).split()
sys.exit(statedrift.cli.main())
"""


def steps_of(path: Path) -> list[dict[str, Any]]:
    (job,) = yaml.safe_load(path.read_text())["jobs"].values()
    steps: list[dict[str, Any]] = job["steps"]
    return steps


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of every command `statedrift ...` in a script or page, with the values of variables."""
    fenced = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)  # of a page; a script has none
    joined = "".join(fenced or [text]).replace("\\\n", " ")
    for match in re.finditer(r"(?:^|[`\s])statedrift ((?:[a-z]+)(?: [^`\n]*)?)", joined, re.MULTILINE):
        line = re.split(r"\|\||&&|;|>>|`|\s#\s", match[1])[0]
        for name, value in VALUES.items():
            line = line.replace(f'"${name}"', value).replace(f"${name}", value)
        words = shlex.split(line)
        if words[0] in COMMANDS:
            yield words


COMMAND: Any = typer.main.get_command(application)
COMMANDS = set(COMMAND.commands)


def check_command(words: list[str]) -> None:
    """Raise when our command line does not take these words; nothing is run."""
    COMMAND.commands[words[0]].make_context(words[0], words[1:])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_whole(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert {"name", "permissions", "env", "jobs"} <= workflow.keys()
    assert workflow[True], "when it runs: `on`, which YAML takes for a truth value"
    for step in steps_of(path):
        assert ("uses" in step) != ("run" in step), step
        if "run" in step:
            assert "${{" not in step["run"], "what a pull request can write must not become a part of a script"
            done = subprocess.run(["bash", "-n"], input=step["run"], text=True, capture_output=True)
            assert (done.returncode, done.stderr) == (0, "")


def test_the_shell_script_is_a_script() -> None:
    for shell in ("sh", "bash"):
        assert subprocess.run([shell, "-n", str(GATE)], capture_output=True).returncode == 0


@pytest.mark.parametrize("path", [*WORKFLOWS, GATE, *PAGES], ids=lambda path: path.name)
def test_every_command_is_one_that_there_is(path: Path) -> None:
    commands = list(commands_in(path.read_text()))
    assert {"fuzz", "report"} <= {words[0] for words in commands} or path in PAGES
    assert commands
    for words in commands:
        check_command(words)


def test_a_command_that_there_is_not_is_noticed() -> None:
    (words,) = commands_in('run: statedrift fuzz --target numba --no-such "$BUDGET" >> x\n')
    with pytest.raises(Exception, match="--no-such"):
        check_command(words)


def test_the_page_names_every_recipe() -> None:
    page = (ROOT / "docs" / "ci.md").read_text()
    assert [path.name for path in (*WORKFLOWS, GATE) if f"examples/ci/{path.name}" not in page] == []


# --- running them ------------------------------------------------------------------------------------------------------------


def environment(folder: Path, target: str = "numba") -> dict[str, str]:
    """With a `statedrift` on the path that is quick."""
    commands = folder / "commands"
    commands.mkdir()
    (commands / "statedrift").write_text(SHIM.format(python=sys.executable, target=target))
    (commands / "statedrift").chmod(0o755)
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    fixtures = str(ROOT / "tests" / "fixtures")
    return os.environ | {"PATH": path, "GITHUB_STEP_SUMMARY": str(folder / "page.md"), "PYTHONPATH": fixtures}


def run_script(script: str, folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-e", "-c", script], cwd=folder, env=variables, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_the_steps_of_a_workflow_run(path: Path, tmp_path: Path) -> None:
    (tmp_path / ".statedrift").mkdir()
    (tmp_path / ".statedrift" / "known.toml").write_text("")
    variables = environment(tmp_path)
    ours = [step["run"] for step in steps_of(path) if "statedrift " in step.get("run", "").replace("install", "")]
    ours = [script for script in ours if not script.startswith("pip ")]
    assert len(ours) >= 2
    for script in ours:
        done = run_script(script, tmp_path, variables)
        assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("## statedrift · green: nothing new in 64 programs")
    assert ("| day | target |" in page) == ("nightly" in path.name)
    assert ElementTree.parse(tmp_path / "runs" / "junit.xml").getroot().attrib["failures"] == "0"


def test_the_shell_script_runs_and_is_red_when_something_is_new(tmp_path: Path) -> None:
    variables = environment(tmp_path, "switched:TARGET") | {"TARGET": "switched:TARGET", "FAMILIES": "lfm2", "OUT": "out"}
    shutil.copy(GATE, tmp_path)
    green = run_script("sh gate.sh", tmp_path, variables)
    assert green.returncode == 0, green.stderr
    assert green.stdout.startswith("green: nothing new in 64 programs")
    assert (tmp_path / "known.toml").read_text() == ""
    shutil.rmtree(tmp_path / "out")
    red = run_script("sh gate.sh", tmp_path, variables | {"STATEDRIFT_TEST_FAULTS": "rollback"})
    assert red.returncode == 1, red.stderr
    assert ElementTree.parse(tmp_path / "out" / "junit.xml").getroot().attrib["failures"] == "1"
    assert "wrong-output" in (tmp_path / "out" / "summary.md").read_text()
    again = run_script("sh gate.sh", tmp_path, {name: value for name, value in variables.items() if name != "TARGET"})
    assert again.returncode != 0
    assert "TARGET" in again.stderr
