"""What each workload profile is there for, counted by outcomes on our own cache (cancellations on the perfect target: our caches offer none).

Rules
- Bounds are far from what was measured (beside each), and beyond what swarm reaches where swarm reaches little: a profile that loses its point
  crosses them.
"""

from collections import Counter
from functools import cache

import pytest
from statedrift.fuzz.execution import Run, execute
from statedrift.fuzz.generation import generate, model_for
from statedrift.fuzz.rarities import rarities_of
from statedrift.spec.operations import (
    Cancel,
    Decode,
    Drop,
    Keep,
    Remove,
    Reopen,
    Restore,
    RestoreAll,
    Rollback,
    Save,
    Share,
    operation_name,
    sequences_of,
)  # fmt: skip
from statedrift.spec.programs import Program
from statedrift.spec.verdicts import ACCEPTED
from statedrift.targets.registry import load_target

from tests.perfect_target import PerfectTarget

PROGRAM_COUNT = 300
SOAK_COUNT = 3
Ran = tuple[Program, Run]


@cache
def ran(profile: str) -> list[Ran]:
    """Programs of a profile and their runs on our own cache."""
    target = load_target("numba")
    count = SOAK_COUNT if profile == "soak" else PROGRAM_COUNT
    programs = [generate(seed, model_for(seed, "lfm2"), profile) for seed in range(count)]
    return [(program, execute(program, target)) for program in programs]


def steps(profile: str) -> list[tuple[str, str]]:
    return [
        (operation_name(operation), step.outcome.word)
        for program, run in ran(profile)
        for operation, step in zip(program.operations, run.steps, strict=True)
    ]


@pytest.mark.parametrize("profile", ["speculative", "server", "agents", "soak"])
def test_most_operations_are_accepted_and_few_are_skipped(profile: str) -> None:
    words = Counter(word for _, word in steps(profile))
    assert words["accepted"] / words.total() > 0.85  # measured: 0.97, 0.92, 0.99, 0.87
    assert words["skipped"] / words.total() < 0.01  # measured: 0, 0, 0, 0.004


# --- speculative ----------------------------------------------------------------------------------------------------------------


def drafts_taken_back(program: Program, run: Run) -> Counter[str]:
    """Accepted partial rollbacks right after the batch that gave the sequence its draft, by how much of the draft they took."""
    found: Counter[str] = Counter()
    given: dict[int, int] = {}
    positions = [-1] * program.cache.n_seq_max
    taken_from: set[int] = set()
    for operation, step in zip(program.operations, run.steps, strict=True):
        match operation:
            case Decode(items=items):
                given = {item.sequences[0]: item.token_count for item in items}
                found["batches of several"] += len(given) > 1 and min(given.values()) > 1
                taken_from = set()
            case Rollback(sequence=sequence) | Remove(sequence=sequence) if step.outcome == ACCEPTED:
                left, before = step.positions[sequence][1], positions[sequence]
                if given.get(sequence, 0) > 1 and -1 < left < before:
                    found["served"] += 1
                    found["whole draft" if before - left == given[sequence] - 1 else "part of a draft"] += 1
                    taken_from.add(sequence)
                    found["of several"] += len(taken_from) == 2
            case Share(source=source) if source in taken_from:
                found["winner shared"] += 1
            case _:
                pass
        positions = [last for _, last in step.positions]
    return found


def total(profile: str, count: object) -> Counter[str]:
    return sum((count(program, run) for program, run in ran(profile)), Counter())  # type: ignore[operator]


def test_speculative_programs_take_drafts_back() -> None:
    found, swarm = total("speculative", drafts_taken_back), total("swarm", drafts_taken_back)
    assert found["served"] > 5 * swarm["served"]  # measured: 1421, swarm 105
    assert found["whole draft"] > 400  # 894, swarm 37
    assert found["part of a draft"] > 250  # 527, swarm 68
    assert found["of several"] > 30  # 76, swarm 2: of one batch more than one draft is taken back
    assert found["winner shared"] > 60  # 143, swarm 14: while its rollback is pending
    rollbacks = sum(name in ("rollback", "remove") for name, _ in steps("speculative"))
    assert found["served"] / rollbacks > 0.7  # 0.91


# --- server ---------------------------------------------------------------------------------------------------------------------


def server_work(program: Program, run: Run) -> Counter[str]:
    found: Counter[str] = Counter()
    partial: dict[str, bool] = {}
    for operation, step in zip(program.operations, run.steps, strict=True):
        match operation:
            case Save(slot=slot, partial=is_partial):
                partial[slot] = is_partial
            case Restore(slot=slot) if step.outcome == ACCEPTED:
                found["checkpoint restored" if partial[slot] else "prompt restored"] += 1
            case Decode() if step.outcome.word == "refused":
                found["context full"] += 1
            case RestoreAll() if step.outcome == ACCEPTED:
                found["restarted"] += 1
            case _:
                pass
    return found


def test_server_programs_go_back_to_checkpoints_swap_prompts_and_fill_the_context() -> None:
    found = total("server", server_work)
    assert found["checkpoint restored"] > 80  # measured: 173, swarm 7
    assert found["prompt restored"] > 200  # 359, swarm 187
    assert found["context full"] > 80  # 202, swarm 14
    assert found["restarted"] > 15  # 45, swarm 21


def test_server_programs_cancel() -> None:
    target = PerfectTarget("draft")
    words: Counter[str] = Counter()
    freed = 0
    for program, _ in ran("server"):
        run = execute(program, target)
        for number, (operation, step) in enumerate(zip(program.operations, run.steps, strict=True)):
            if isinstance(operation, Cancel):
                words[step.outcome.word] += 1
                after = program.operations[number + 1]
                freed += isinstance(after, Drop) and after.sequence in sequences_of(operation)
    assert words["cancelled"] > 40  # measured: 89
    assert freed > 50  # 103


# --- agents ---------------------------------------------------------------------------------------------------------------------


def agents_work(program: Program, run: Run) -> Counter[str]:
    found: Counter[str] = Counter()
    forked_from: dict[int, int] = {}
    for operation, step in zip(program.operations, run.steps, strict=True):
        if step.outcome != ACCEPTED:
            continue
        match operation:
            case Share(source=source, destination=destination) if step.positions[source][1] >= 0:
                found["forks"] += 1
                found["forks of forks"] += source in forked_from
                found["taken over"] += forked_from.get(source) == destination
                forked_from[destination] = source
            case Keep():
                found["kept"] += any(sequence != operation.sequence for sequence in forked_from)
                forked_from = {}
            case Drop(sequence=sequence):
                found["ended"] += forked_from.pop(sequence, None) is not None
            case Decode(items=items):
                found["coupled"] += any(len(item.sequences) > 1 for item in items)
                together = {sequence for item in items for sequence in item.sequences}
                found["side by side"] += any(forked_from.get(sequence) in together for sequence in together)
            case _:
                pass
    found["shared by three"] += rarities_of(program, run).sharing_degree >= 3
    return found


def test_agents_fork_and_join() -> None:
    found = total("agents", agents_work)
    assert found["forks"] > 1000  # measured: 2095, swarm 292
    assert found["forks of forks"] > 400  # 900, swarm 67
    assert found["side by side"] > 600  # 1372, swarm 151
    assert found["ended"] > 400  # 859, swarm 8
    assert found["taken over"] > 100  # 215, swarm 27
    assert found["shared by three"] > 180  # 251 of 300 programs, swarm 29
    assert found["coupled"] > 35  # 70, swarm 27
    assert found["kept"] > 10  # 27, swarm 14


# --- soak -----------------------------------------------------------------------------------------------------------------------


def test_soak_programs_are_long_and_stay_in_one_session() -> None:
    for program, run in ran("soak"):
        assert 2000 <= len(program.operations) <= 3000
        assert len(run.sessions) == 1
        assert not any(isinstance(operation, Reopen) for operation in program.operations)


def test_soak_programs_restore_what_was_saved_long_ago_and_keep_logs_short() -> None:
    for program, run in ran("soak"):
        saved_at: dict[str, int] = {}
        ages: list[int] = []
        for number, (operation, step) in enumerate(zip(program.operations, run.steps, strict=True)):
            if isinstance(operation, Save) and step.outcome == ACCEPTED:
                saved_at[operation.slot] = number
            elif isinstance(operation, Restore) and step.outcome == ACCEPTED:
                ages.append(number - saved_at[operation.slot])
        lengths = [last + 1 for step in run.steps for _, last in step.positions]
        kinds = {operation_name(operation) for operation in program.operations}
        assert max(ages) > 100  # measured: 228 to 404 operations
        assert sum(lengths) / len(lengths) < 25  # 12 to 15 tokens
        assert max(lengths) <= 160  # 67 to 108
        assert len(kinds) >= 13  # 14 of 16; clear and reopen would end what was done
