"""What the command line takes, what it refuses, and that it answers at once."""

import subprocess
import sys

import pytest
from statedrift.cli.application import run

HEAVY = ("numpy", "torch", "numba", "pandas", "pyarrow", "hypothesis", "rich")


def modules_after(*arguments: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after a command."""
    code = (
        "import sys, contextlib, io\n"
        "from statedrift.cli.application import run\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        f"    run({list(arguments)!r})\n"
        "print('\\n'.join(sys.modules))\n"
    )
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("fuzz", "--help"), ("--version",), ("replay",), ("nonsense",), ("fuzz", "--target", "numba", "--nonsense"), ()],
)
def test_help_and_usage_errors_load_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert not modules_after(*arguments) & set(HEAVY)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, statedrift; print('\\n'.join(sys.modules))"
    loaded = set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "a command is missing"),
        (["nonsense"], "nonsense"),
        (["bench"], "a command is missing"),
        (["--nonsense"], "--nonsense"),
        (["replay"], "PROGRAM"),
        (["replay", "x.drift"], "--target"),
        (["replay", "x.drift", "y.drift", "--target", "numba"], "y.drift"),
        (["fuzz"], "--target"),
        (["fuzz", "--target"], "--target"),
        (["fuzz", "--target", "numba", "--seed", "many"], "--seed"),
        (["fuzz", "--target", "numba", "--seed", "-1"], "--seed"),
        (["fuzz", "--target", "numba", "--programs", "0"], "--programs"),
        (["fuzz", "--target", "numba", "--jobs", "0"], "--jobs"),
        (["report"], "DIR"),
        (["fuzz", "--target", "numba", "--no-such", "x"], "--no-such"),
        (["report", "x", "--pdf", "x"], "--pdf"),
        (["replay", "no-such-file.drift", "--target", "numba"], "no-such-file.drift"),
        (["replay", "model lfm2 seed=0; rollback 0", "--target", "numba"], "line 1, column 20"),
        (["replay", "model rwkv9; decode 0:1", "--target", "numba"], "rwkv9"),
        (["replay", "model lfm2; decode 0:1", "--target", "nothing"], "llamacpp, numba"),
        (["replay", "{}", "--target", "numba"], "JSON"),
        (["replay", "", "--target", "numba"], "empty"),
        (["replay", "x" * 5000, "--target", "numba"], "no file"),
        (["replay", "nul\0byte", "--target", "numba"], "no file"),
        (["fuzz", "--target", "numba", "--seconds", "1", "--programs", "1"], "--seconds and --programs"),
        (["fuzz", "--target", "numba", "--seconds", "0"], "--seconds"),
        (["fuzz", "--target", "numba", "--seconds", "-3"], "--seconds"),
        (["fuzz", "--target", "numba", "--seconds", "nan"], "--seconds"),
        (["fuzz", "--target", "numba", "--seconds", "inf"], "--seconds"),
        (["fuzz", "--target", "numba", "--family", "rwkv9"], "rwkv9"),
        (["fuzz", "--target", "nothing"], "llamacpp, numba"),
        (["fuzz", "--target", "numba", "--profile", "nosuch"], "swarm, speculative, server, agents, soak"),
        (["doctor", "--target", "nothing"], "llamacpp, numba"),
        (["bench", "throughput", "--seconds", "0"], "--seconds"),
    ],
)
def test_a_usage_error_is_one_line_and_status_64(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 64
    out, err = capsys.readouterr()
    lines = err.strip().split("\n")
    assert lines[-1].startswith("statedrift: ")
    assert words in lines[-1]
    assert "Traceback" not in err
    if arguments[:1] != ["doctor"]:
        assert (out, len(lines)) == ("", 1)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["fuzz", "--help"], ["bench", "throughput", "--help"]])
def test_help_goes_to_standard_output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Usage: statedrift")
    assert err == ""


def test_help_names_every_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    run(["-h"])
    ending = " ".join(capsys.readouterr().out.split("Exit status:")[1].split())
    assert ending == "0 clean, 1 a divergence, 2 could not test, 64 a usage error, 70 a fault of statedrift."


def test_every_command_has_a_summary_that_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--help"])
    out = capsys.readouterr().out
    assert "..." not in out.replace("[ARGS]...", "")
    for command in ("fuzz", "replay", "explain", "reduce", "report", "targets", "families", "doctor", "bench"):
        assert f"\n  {command} " in out


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"statedrift {version('statedrift')}\n"


def test_public_names_are_there_and_no_others() -> None:
    import statedrift

    for name in statedrift.__all__:
        assert getattr(statedrift, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = statedrift.nothing
