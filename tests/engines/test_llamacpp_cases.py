"""Every case in tests/cases comes to the verdict that its header names, on every target that it names.

A header line is `# expect TARGET: kind|kind`.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from statedrift.fuzz.trial import Bench
from statedrift.oracle.recompute import use_one_thread
from statedrift.spec.programs import parse_program
from statedrift.targets.registry import target_names

CASES = sorted((Path(__file__).parent.parent / "cases").glob("*.drift"))
EXPECTATION = re.compile(r"^# expect (\S+): (\S+)$", re.MULTILINE)
EXPECTED = [(case, target, frozenset(kinds.split("|"))) for case in CASES for target, kinds in EXPECTATION.findall(case.read_text())]


@pytest.fixture(scope="module")
def benches() -> Iterator[dict[str, Bench]]:
    use_one_thread()
    benches = {target: Bench(target) for target in sorted({target for _, target, _ in EXPECTED})}
    yield benches
    for bench in benches.values():
        bench.close()


@pytest.mark.parametrize(("case", "target", "kinds"), EXPECTED, ids=[f"{case.stem}-{target}" for case, target, _ in EXPECTED])
def test_a_case_comes_to_what_its_header_says(case: Path, target: str, kinds: frozenset[str], benches: dict[str, Bench]) -> None:
    verdict = benches[target].try_program(parse_program(case.read_text())).verdict
    assert verdict.kind in kinds, verdict


@pytest.mark.parametrize("case", CASES, ids=[case.stem for case in CASES])
def test_a_case_names_what_it_expects_of_the_engine_and_of_our_own_cache(case: Path) -> None:
    targets = [target for target, _ in EXPECTATION.findall(case.read_text())]
    assert {"numba", "llamacpp"} <= set(targets) <= set(target_names())
    assert len(set(targets)) == len(targets)
