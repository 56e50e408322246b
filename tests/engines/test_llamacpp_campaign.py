"""A campaign against llama.cpp finds what is known to be wrong in it, and what it finds can be shown to others."""

import importlib.util
import re
from pathlib import Path

import pytest
from statedrift.fuzz import known as known_module
from statedrift.fuzz.campaign import Settings, run_campaign
from statedrift.spec.programs import parse_program, program_text
from statedrift.store.campaigns import Campaign, read_campaign
from statedrift.store.findings import folder_name

_SPEC = importlib.util.spec_from_file_location("scripts", Path(__file__).parent.parent / "scripts.py")
assert _SPEC is not None
assert _SPEC.loader is not None
scripts = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(scripts)

PROGRAMS = 400
SIGNATURES_MIN = 6
OPERATIONS_MAX = 8
SAYS_SO = {
    "wrong-output": r"largest difference \d",
    "wrong-position": r"last ones must be",
    "false-success": r"it must be refused|last ones must be",
    "bad-refusal": r"it must be accepted|with an error",
    "partial-effect": r"after the refusal",
    "crash": r"the process that ran the program ended with -\d",
}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Campaign, Path]:
    folder = tmp_path_factory.mktemp("campaign") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_module, "EXPLAINED_REDUCTIONS_MAX", 0)  # they look for more of the same kind, at a cost
        return run_campaign(Settings("llamacpp", ("lfm2",), programs=PROGRAMS, seed=0, out=folder)), folder


def test_it_finds_distinct_divergences(campaign: tuple[Campaign, Path]) -> None:
    done, _ = campaign
    assert done.account.complete
    assert done.account.programs == PROGRAMS
    assert len({finding.signature for finding in done.findings}) >= SIGNATURES_MIN
    assert {"wrong-output", "wrong-position", "crash"} <= {finding.verdict.kind for finding in done.findings}


def test_every_finding_is_small_and_reproducible(campaign: tuple[Campaign, Path]) -> None:
    for finding in campaign[0].findings:
        assert len(finding.program.operations) <= OPERATIONS_MAX, program_text(finding.program)
        assert finding.reproduced == finding.reruns == 10, program_text(finding.program)


def test_every_divergent_program_counts_once(campaign: tuple[Campaign, Path]) -> None:
    done, _ = campaign
    divergent = sum(count for kind, count in done.account.verdicts.items() if kind not in ("ok", "unknown", "harness-error"))
    unreduced = sum(left.programs for left in done.account.unreduced)
    assert sum(finding.seen for finding in done.findings) + unreduced == divergent


def test_the_folder_holds_what_was_returned(campaign: tuple[Campaign, Path]) -> None:
    done, folder = campaign
    assert read_campaign(folder).account == done.account
    for finding in done.findings:
        own = folder / "findings" / folder_name(finding)
        assert parse_program((own / "program.drift").read_text()) == finding.program


def test_every_script_shows_its_finding_without_statedrift(campaign: tuple[Campaign, Path]) -> None:
    done, folder = campaign
    for finding in done.findings:
        script = folder / "findings" / folder_name(finding) / "repro.py"
        assert not re.search(r"^\s*(import|from)\s+statedrift", script.read_text(), re.MULTILINE)
        ran = scripts.run_script(script)
        assert ran.returncode == 1, (finding.signature, ran.stdout, ran.stderr)
        assert re.search(SAYS_SO[finding.verdict.kind], ran.stdout), (finding.signature, ran.stdout)
        assert "Traceback" not in ran.stderr
