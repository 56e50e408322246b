"""The benchmarks of our own caches: they run on every class of cells, and a bound that is broken is said. Nothing is timed here."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from statedrift.spec.models import Model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch, **smaller: Any) -> ModuleType:
    """A benchmark, made so small that it only runs."""
    found = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, name, module)
    found.loader.exec_module(module)
    for constant, value in smaller.items():
        monkeypatch.setattr(module, constant, value)
    return module


@pytest.fixture
def bookkeeping(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark("bookkeeping", monkeypatch, ROUNDS=2, PASSES=1, SESSIONS=(4, 8, 16), WHOLE_SESSIONS=(4, 8))


def test_it_measures_every_operation_on_every_cache(bookkeeping: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert bookkeeping.main(["--write", str(page)]) in (0, 1)
    text = capsys.readouterr().out
    assert page.read_text(encoding="utf-8") == text
    for cells in bookkeeping.CELLS:
        for what in ("decode of 4", "share", "drop", "rollback", "refused rollback"):
            assert f"| {cells.partition(':')[2]}: {what} |" in text
        for model in bookkeeping.MODELS:
            assert f"| {cells.partition(':')[2]}, {model.family}: decode of 4 |" in text


def test_cells_of_your_own_can_be_named(bookkeeping: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bookkeeping.main(["--cells", "statedrift.impl.cells:StrictCells"])
    text = capsys.readouterr().out
    assert "StrictCells: share" in text
    assert "RingCells" not in text


@pytest.mark.parametrize(
    ("costs", "held"),
    [((10.0, 11.0, 12.0), [True, True]), ((10.0, 11.0, 21.0), [False, False]), ((5.0, 6.0, 11.0), [False, True]), ((19.0, 20.5, 21.0), [True, False])],
)  # fmt: skip
def test_a_decode_that_follows_the_session_breaks_its_bound(bookkeeping: ModuleType, costs: tuple[float, ...], held: list[bool]) -> None:
    bounds = bookkeeping.bounds_of([bookkeeping.Row("Cells: decode of 4", costs)], [], [])
    assert [bound.holds for bound in bounds] == held


def test_a_whole_decode_may_grow_with_its_sequences_and_no_more(bookkeeping: ModuleType) -> None:
    fine, quadratic = (bookkeeping.WholeDecode("Cells", costs) for costs in ((10.0, 20.0), (10.0, 41.0)))
    assert [bound.holds for bound in bookkeeping.bounds_of([], [fine, quadratic], [])] == [True, False]


def test_a_cost_that_follows_the_rows_breaks_its_bound(bookkeeping: ModuleType) -> None:
    assert [bound.holds for bound in bookkeeping.bounds_of([], [], [("share", 1.0, 1.1), ("share", 1.0, 40.0)])] == [True, False]


def test_a_cost_that_is_no_number_breaks_its_bound(bookkeeping: ModuleType) -> None:
    assert not bookkeeping.Bound("", float("nan"), 2.0).holds


def test_planes_and_ring_take_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = benchmark("planes_and_ring", monkeypatch, ROUNDS=2, MODELS={"small rows": Model("mamba2")})
    assert module.main([]) in (0, 1)
    text = capsys.readouterr().out
    assert "| small rows: 1 token for 4 sequences | 0.24 |" in text
    assert "| small rows: 4 tokens for 4 sequences | 0.24 |" in text
