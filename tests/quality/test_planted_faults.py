"""Does the fuzzer find what it should, and does the reducer end where it should."""

import importlib.util
import sys
from pathlib import Path

import pytest
from statedrift.fuzz import known as known_module
from statedrift.fuzz.campaign import Settings, run_campaign
from statedrift.spec.programs import program_text

_SPEC = importlib.util.spec_from_file_location("planted", Path(__file__).parent.parent / "planted.py")
assert _SPEC is not None
assert _SPEC.loader is not None
planted = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(planted)

OPERATIONS_MAX = 6


@pytest.mark.parametrize("name", planted.FAULTS)
def test_a_planted_fault_is_found_and_reduced(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(known_module, "EXPLAINED_REDUCTIONS_MAX", 2)  # one fault needs no search for others behind it
    target, fault = planted.plant(name, tmp_path), planted.FAULTS[name]
    try:
        campaign = run_campaign(Settings(target, (fault.family,), programs=fault.programs))
    finally:
        for module in [module for module in sys.modules if module.startswith(f"planted_{name}")]:
            del sys.modules[module]
    assert campaign.findings, f"{fault.programs} programs found nothing"
    for finding in campaign.findings:
        assert len(finding.program.operations) <= OPERATIONS_MAX, program_text(finding.program)
        assert finding.reproduced == finding.reruns, program_text(finding.program)
