"""`statedrift compare`: what only one of two campaigns found is named, and what both found is not."""

from pathlib import Path

import msgspec
import pytest
from statedrift.cli import comparing
from statedrift.cli.application import run as run_command
from statedrift.reports.comparison import comparison_text
from statedrift.store.campaigns import Campaign, Reach

from tests.kept_campaign import keep_campaign
from tests.unit.test_reports_gate import ACCOUNT, KNOWN, NEW
from tests.unit.test_reports_terminal import check_golden, replay_of

OTHER_TARGET = msgspec.structs.replace(NEW, target="numba", signature=NEW.signature.replace("llamacpp/", "numba/"))
WIDE = msgspec.structs.replace(ACCOUNT, reach=Reach({"answers": {"decode accepted": 3, "keep accepted": 2}, "pending": {"save": 1}}))
NARROW = msgspec.structs.replace(
    ACCOUNT,
    target="numba",
    version="1",
    families=("lfm2",),
    programs=100,
    reach=Reach({"answers": {"decode accepted": 9}, "pending": {"save": 0}}),
)


def test_a_comparison_looks_as_agreed() -> None:
    campaigns = Campaign(WIDE, (NEW, KNOWN)), Campaign(NARROW, (OTHER_TARGET,))
    check_golden("reports_comparison.txt", comparison_text(("runs/a", "runs/b"), campaigns, (replay_of, replay_of)))


def test_campaigns_that_found_the_same_are_status_0_and_others_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(keep_campaign(tmp_path / "a", WIDE, [NEW, KNOWN]))
    b = str(keep_campaign(tmp_path / "b", NARROW, [OTHER_TARGET]))
    c = str(keep_campaign(tmp_path / "c", ACCOUNT, [NEW]))
    assert run_command(["compare", b, c]) == 0
    assert "in both  1 finding\n" in capsys.readouterr().out
    assert run_command(["compare", a, b]) == 1
    assert "  wrong-output · mamba2 · " in capsys.readouterr().out


def test_a_folder_that_is_no_campaign_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(keep_campaign(tmp_path / "a", ACCOUNT))
    (tmp_path / "empty").mkdir()
    assert run_command(["compare", a, str(tmp_path / "empty")]) == 2
    assert "is no campaign" in capsys.readouterr().err
    assert run_command(["compare", a, a, "--seconds", "3"]) == 64


def test_two_targets_are_held_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    import statedrift.cli.fuzzing as fuzzing

    asked: list[object] = []
    monkeypatch.setattr(fuzzing, "fuzz_command", lambda *given, **named: asked.append((given[:3], named)) or 0)
    assert run_command(["compare", "numba", "numba-ring", "--family", "lfm2"]) == 0
    assert asked == [(("numba", ("lfm2",), comparing.SECONDS), {"against": "numba-ring"})]
