"""What becomes of a rollback: accepted and right, accepted and wrong, or refused, on each target.

    python benchmarks/acceptance.py [--rollbacks N] [--target T ...] [--write FILE]

Rules
- The same programs for every target: a campaign's, cut after the first rollback of a part, and one token decoded for every sequence after it.
- A rollback is counted when it takes back a part of a sequence, and everything up to it was right.
- Wrong: an answer, a position or an output row from the rollback on is not what the contract and the full recompute say.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path

import msgspec
from statedrift.cli.throughput import machine_facts, markdown_table
from statedrift.fuzz.retrace import retrace
from statedrift.fuzz.shards import settled_heap, shard_programs
from statedrift.fuzz.trial import Bench, Trial
from statedrift.oracle.recompute import use_one_thread
from statedrift.spec.operations import Decode, Item, Rollback
from statedrift.spec.programs import Program

TARGETS = ("llamacpp", "numba", "numba-ring")
FAMILIES = ("lfm2", "lfm2_swa", "nemotron_h", "qwen35")
"""Those in which llama.cpp takes tokens back at all."""
ROLLBACKS = 20_000
SHARD_PROGRAMS = 64
PROBE_SALT = 7_777
FATES = ("accepted, right", "accepted, wrong", "refused", "died")


def cut_programs(seed: int) -> Iterator[list[Program]]:
    """Shards of programs that end with a rollback and its probe, without an end."""
    for shard in count():
        cut = []
        for program in shard_programs(seed, shard, FAMILIES, SHARD_PROGRAMS):
            place = next((index for index, operation in enumerate(program.operations) if isinstance(operation, Rollback)), None)
            if place is not None:
                cut.append(msgspec.structs.replace(program, operations=program.operations[: place + 1] + _probe(program, place)))
        yield cut


def _probe(program: Program, place: int) -> tuple[Decode, ...]:
    """One new token for every sequence, the one that was taken back first; a decode each, so that a refusal hides no other."""
    rolled_back = program.operations[place]
    assert isinstance(rolled_back, Rollback)
    others = [sequence for sequence in range(program.cache.n_seq_max) if sequence != rolled_back.sequence]
    return tuple(Decode((Item((sequence,), 1, PROBE_SALT),)) for sequence in (rolled_back.sequence, *others))


def fate_of(trial: Trial) -> str | None:
    """What became of the rollback of a cut program; None when it does not count."""
    run, verdict = trial.run, trial.verdict
    place = next(index for index, operation in enumerate(trial.program.operations) if isinstance(operation, Rollback))
    if run is None or len(run.steps) <= place or (verdict.is_divergence and (verdict.operation_index or 0) < place):
        return None
    moment = next(islice(retrace(trial.program, run), place, None))
    assert isinstance(moment.operation, Rollback)
    log = moment.checker.ledger.logs[moment.operation.sequence]
    if log.unchecked or not moment.operation.token_count < len(log.tokens):
        return None
    match moment.step.outcome.word:
        case "accepted" if verdict.kind in ("crash", "hang"):
            return "died"
        case "accepted":
            return "accepted, wrong" if verdict.is_divergence else "accepted, right"
        case "refused":
            return "refused"
        case "crash" | "hang":
            return "died"
        case _:
            return None


def measure(target: str, rollbacks: int, seed: int) -> Counter[str]:
    """How many rollbacks had which fate, of the first `rollbacks` that count."""
    fates: Counter[str] = Counter()
    with Bench(target) as bench, settled_heap():
        for programs in cut_programs(seed):
            for trial in bench.try_programs(programs):
                fate = fate_of(trial)
                if fate is not None and fates.total() < rollbacks:
                    fates[fate] += 1
            if fates.total() >= rollbacks:
                return fates
    raise AssertionError("programs do not end")


def report_markdown(measured: dict[str, Counter[str]], rollbacks: int) -> str:
    """The measurement as a Markdown page."""
    rows = [[target, *(f"{100 * fates[fate] / fates.total():.2f} %" for fate in FATES)] for target, fates in measured.items()]
    parts = [
        "# What becomes of a rollback",
        "Written by `python benchmarks/acceptance.py --write FILE`. "
        f"Shares of {rollbacks:,} rollbacks of a part of a sequence on each target, in a campaign's programs over\n"
        f"{', '.join(FAMILIES)}: n_rs_seq, sharing, batches and memory as they are drawn there. Each is followed by a token for every sequence.",
        markdown_table(("", *FATES), rows),
        "## Measured on",
        markdown_table(("", ""), [list(fact) for fact in machine_facts()]),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="What becomes of a rollback.")
    parser.add_argument("--rollbacks", type=int, default=ROLLBACKS, metavar="N", help=f"on each target ({ROLLBACKS:,})")
    parser.add_argument("--target", action="append", metavar="T", help=f"{', '.join(TARGETS)} unless given")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the programs (0)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the report as Markdown")
    given = parser.parse_args(arguments)
    use_one_thread()
    measured = {target: measure(target, given.rollbacks, given.seed) for target in given.target or TARGETS}
    report = report_markdown(measured, given.rollbacks)
    print(report, end="")
    if given.write:
        given.write.write_text(report, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
