"""What no command can judge: one wording and one status for each, whatever the command.

Rules
- What is malformed, or options that contradict each other, is a usage error (64); a request that is well-formed and cannot be tested is 2.
"""

import pytest
from statedrift.cli import application

LFM2, HALF, FLASH = "model lfm2; decode 0:2", "model lfm2; cache kv=f16; decode 0:2", "model lfm2; cache flash=1; decode 0:2"
GRANITE, ZAMBA2, UNKNOWN = "model granitehybrid; decode 0:2", "model zamba2; decode 0:2", "model lfm3; decode 0:2"
COMMANDS = ("replay", "explain", "reduce")

CONTRADICTIONS = [
    (["--against", "numba-ring", "--inspect"], "--inspect compares state rows with the truth, and --against has another target for it"),
    (
        ["--against", "numba-ring", "--oracle", "engine"],
        "--against has another target for the truth, and --oracle engine the target itself",
    ),
    (["--oracle", "engine", "--inspect"], "--inspect compares state rows with our own recompute, which --oracle engine does without"),
    (["--oracle", "other"], "unknown oracle `other`; there are own, engine"),
    (["--against", "elsewhere"], "there is no target `elsewhere`; there are cuda, cuda-ring, llamacpp, numba"),
]
NOT_JUDGED = [
    (HALF, "numba", [], "with kv=f16 only the engine itself says what is right; judge it with `--oracle engine`"),
    (FLASH, "numba", [], "with flash=1 only the engine itself says what is right; judge it with `--oracle engine`"),
    (HALF, "numba", ["--against", "numba-ring"], "with kv=f16 only the engine itself says what is right; judge it with `--oracle engine`"),
    (GRANITE, "llamacpp", [], "family granitehybrid has no recompute of ours, only the engine itself says what is right; judge it with"),
    (GRANITE, "numba", ["--oracle", "engine"], "target numba does not run family granitehybrid; it runs mamba, "),
    (ZAMBA2, "llamacpp", [], "target llamacpp does not run family zamba2; it runs mamba, "),
    (ZAMBA2, "numba", ["--against", "llamacpp"], "target llamacpp does not run family zamba2; it runs mamba, "),
    (LFM2, "llamacpp", ["--inspect"], "target llamacpp does not show its state rows; leave out --inspect"),
]


def said(command: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Status of a command, and what it said on standard error."""
    status = application.run(command)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return status, captured.err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS)
def test_options_that_contradict_each_other_are_a_usage_error(
    command: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, errors = said([command, LFM2, "--target", "numba", *options], capsys)
    assert (status, message in errors) == (64, True)


@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS)
def test_they_are_one_for_a_campaign_too(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, errors = said(["fuzz", "--target", "numba", "--family", "lfm2", "--programs", "1", *options], capsys)
    assert (status, message in errors) == (64, True)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("program", "target", "options", "message"), NOT_JUDGED)
def test_what_cannot_be_judged_is_status_2_in_every_command(
    command: str, program: str, target: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, errors = said([command, program, "--target", target, *options], capsys)
    assert (status, f"could not test: {message}" in errors) == (2, True)


@pytest.mark.parametrize(("program", "target", "options", "message"), [case for case in NOT_JUDGED if "cache" not in case[0]])
def test_and_in_a_campaign(program: str, target: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    family = program.split()[1].rstrip(";")
    status, errors = said(["fuzz", "--target", target, "--family", family, "--programs", "1", *options], capsys)
    assert (status, f"could not test: {message}" in errors) == (2, True)


def test_an_unknown_family_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["replay", UNKNOWN], ["explain", UNKNOWN], ["reduce", UNKNOWN], ["fuzz", "--family", "lfm3", "--programs", "1"]):
        status, errors = said([*command, "--target", "numba"], capsys)
        assert (status, "unknown family `lfm3`; there are mamba, " in errors) == (64, True)
