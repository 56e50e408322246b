"""The benchmarks that watch whole campaigns: what they make of what they saw. No campaign is run."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from statedrift.store.statistics import Statistics

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MIB = 1 << 20


def benchmark(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


soak, scaling = benchmark("soak"), benchmark("scaling")


def samples(minutes: int, rates: list[float], **changes: Any) -> list[Any]:
    """A sample a second of a campaign that begins after 20 s; `rates`: programs a second in its minutes."""
    found, programs = [], 0.0
    for second in range(20 + 60 * minutes + 15):
        minute = (second - 20) // 60
        if second >= 20:
            programs += rates[min(minute, len(rates) - 1)]
        said = 10 * (second // 10)  # stats.json is as old as its last beat
        statistics = None
        if second >= 10:
            told = 0.0 if said < 20 else programs - rates[min(minute, len(rates) - 1)] * (second - said)
            statistics = Statistics(float(said), round(max(0.0, told)), 0.0, 80.0, 0, 0, 0, 0, None, 2, "fuzzing")
        grown = {name: per_minute * max(0, minute) for name, per_minute in changes.items()}
        found.append(
            soak.Sample(
                second, 300 * MIB + grown.get("parent", 0), 600 * MIB, 0.004 * programs, 90 + grown.get("descriptors", 0), 3, statistics
            )
        )
    return found


@pytest.mark.parametrize(
    ("rates", "changes", "held"),
    [
        ([100.0] * 8, {}, [True, True, True]),
        ([100.0] * 4 + [95.0] * 4, {}, [True, True, True]),
        ([100.0] * 4 + [80.0] * 4, {}, [True, True, False]),
        ([100.0] * 8, {"parent": 6 * MIB}, [False, True, True]),
        ([100.0] * 8, {"descriptors": 1}, [True, False, True]),
        ([10.0] + [0.0] * 7, {}, [True, True, False]),
    ],
)
def test_a_soak_says_what_did_not_hold(rates: list[float], changes: dict[str, int], held: list[bool]) -> None:
    seen = samples(8, rates, **changes)
    minutes = soak.minutes_of(seen)
    assert [bound.holds for bound in soak.bounds_of(seen, minutes)] == held


def test_a_minute_of_a_soak_has_its_own_rate() -> None:
    minutes = soak.minutes_of(samples(3, [100.0, 50.0, 100.0]))
    assert [round(minute.programs_per_second) for minute in minutes] == pytest.approx([100, 50, 100], abs=9)
    assert minutes[1].cpu_seconds == pytest.approx(0.004, rel=0.2)
    assert (minutes[0].parent_bytes, minutes[0].processes) == (300 * MIB, 3)


def test_a_soak_looks_at_a_process_and_all_below_it() -> None:
    import os

    assert soak.processes_below(os.getpid())[0] == os.getpid()
    assert soak.resident_bytes(os.getpid()) > MIB
    assert soak.descriptors_of(os.getpid()) >= 3
    assert soak.cpu_seconds_of(os.getpid()) > 0.1
    assert soak.resident_bytes(1 << 30) == 0
    assert soak.cpu_seconds_of(1 << 30) == 0
    assert soak.descriptors_of(1 << 30) == 0


def passes(*rates: tuple[float, float, float]) -> list[Any]:
    return [tuple(scaling.Measured(rate, 0.003) for rate in way) for way in rates]


@pytest.mark.parametrize(
    ("rates", "held"),
    [
        ([(100.0, 180.0, 162.0)], [True, True]),
        ([(100.0, 179.0, 179.0)], [False, True]),
        ([(100.0, 200.0, 170.0)], [True, False]),
        ([(100.0, 190.0, 190.0), (50.0, 95.0, 95.0), (100.0, 120.0, 60.0)], [True, True]),  # medians of ratios
        ([(float("nan"), 190.0, 190.0)], [False, True]),
    ],
)
def test_scaling_is_the_median_of_the_passes_ratios(rates: list[tuple[float, float, float]], held: list[bool]) -> None:
    assert [bound.holds for bound in scaling.bounds_of(passes(*rates))] == held


def test_the_page_of_scaling_has_every_way() -> None:
    page = scaling.page("a command", passes((100.0, 190.0, 180.0)))
    for way, rate in zip(scaling.WAYS, ("100", "190", "180"), strict=True):
        assert f"| {way} | {rate} | {rate} | 3.00 |" in page
