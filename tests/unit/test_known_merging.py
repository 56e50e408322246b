"""What a campaign knows does not depend on how its divergences came in: in which order, and in how many shards between two reductions."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from statedrift.fuzz.known import EXPLAINED_REDUCTIONS_MAX, Findings, Waiting
from statedrift.fuzz.trial import Trial
from statedrift.spec.programs import parse_program
from statedrift.spec.verdicts import Verdict
from statedrift.store.findings import Finding

VERDICT = Verdict("wrong-output", 1, 0, 1, "self", 0.25, 1e-5)


class Fault(NamedTuple):
    """A fault: how its divergences look before reduction, and the operations that it needs."""

    coarse: str
    operations: frozenset[str]

    @property
    def fine(self) -> str:
        return f"{self.coarse} after {'+'.join(sorted(self.operations))}"


class Diverged(NamedTuple):
    """A divergent program: of which fault, and what else is in it (which may be all that another fault needs, too)."""

    number: int
    fault: Fault
    beside: frozenset[str]


FAULTS = [
    Fault(coarse, frozenset(operations.split()))
    for coarse, operations in (
        ("at decode", "rollback"),
        ("at decode", "share"),
        ("at decode", "rollback share"),
        ("at decode", "save restore"),
        ("at save", "rollback"),
        ("at save", "share keep"),
    )
]
DIVERGED = st.builds(
    Diverged, st.just(0), st.sampled_from(FAULTS), st.frozensets(st.sampled_from(["rollback", "share", "save", "restore", "keep"]))
)


def waiting_of(diverged: Diverged) -> Waiting:
    program = parse_program(f"model lfm2; decode 0:{diverged.number + 1}; decode 0:1")
    trial = Trial(program, None, VERDICT, diverged.fault.coarse, 1e-5)
    return Waiting(diverged.number + 1, 0.0, "", trial, diverged.fault.operations | diverged.beside)


def finding_of(fault: Fault) -> Finding:
    program = parse_program("model lfm2; decode 0:1; decode 0:1")
    return Finding(
        fault.fine, "", "own", "1", "lfm2", VERDICT, program, program, True, (), 10, 10, 1, 0.0, "2026-11-30T00:00:00+00:00", "2026-11-30T00:00:00+00:00"
    )  # fmt: skip


def known_after(shards: Sequence[Sequence[Diverged]]) -> dict[str, int]:
    """Merge shards, and reduce all that waits after each of them; signature -> programs that came to it."""
    findings = Findings()
    for shard in shards:
        for diverged in shard:
            findings.add_divergent(waiting_of(diverged))
        while wave := findings.next_wave(True, 8):
            for waiting in wave:
                fault = next(one.fault for one in every(shards) if one.number + 1 == waiting.program_number)
                if fault.fine in findings.by_signature:
                    findings.count(waiting, fault.fine)
                else:
                    findings.add_finding(waiting, finding_of(fault), fault.operations)
    assert findings.unreduced() == ()
    return {fine: finding.seen for fine, finding in findings.by_signature.items()}


def every(shards: Sequence[Sequence[Diverged]]) -> list[Diverged]:
    return [diverged for shard in shards for diverged in shard]


@settings(deadline=None, max_examples=60)
@given(st.lists(DIVERGED, min_size=1, max_size=EXPLAINED_REDUCTIONS_MAX), st.data())
def test_order_and_cut_of_shards_change_neither_findings_nor_counts(drawn: list[Diverged], data: st.DataObject) -> None:
    divergences = [diverged._replace(number=number) for number, diverged in enumerate(drawn)]
    shuffled = data.draw(st.permutations(divergences))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(shuffled)), max_size=4)))
    shards = [shuffled[start:end] for start, end in zip([0, *cuts], [*cuts, len(shuffled)], strict=True)]
    expected = Counter(diverged.fault.fine for diverged in divergences)
    assert known_after([divergences]) == expected
    assert known_after(shards) == expected
