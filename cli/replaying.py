"""`statedrift replay`: one program on one target, judged.

Rules
- Status 0: right, or wrong only in uses that the target's documentation does not promise (1 with `--undocumented`); 1: a divergence;
  2: nothing could be said.
- `--json` prints the one object of docs/programs.md; a number that is not finite is null.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..fuzz.execution import Run
from ..fuzz.pair import label_of, open_bench
from ..fuzz.reduction import is_documented
from ..fuzz.signatures import fine_signature
from ..fuzz.trial import Bench, Trial, answers_of
from ..reports.terminal import judged_by_words, verdict_text
from ..spec.programs import Program, caches_of, operation_text, program_id
from ..spec.target import Target
from ..spec.verdicts import Verdict
from . import failures
from .given import read_given, replay_words
from .output import say, standard_output_reserved

FORMAT = 1


def replay_command(
    argument: str, target_name: str, as_json: bool, undocumented: bool, campaign: Path | None, against: str | None = None,
    inspect: bool = False, oracle: str = "own",
) -> int:  # fmt: skip
    """Run one program and print its verdict; the answer is the exit status."""
    given = read_given(argument, campaign)
    if as_json:
        with standard_output_reserved():
            trial, documented, _, bench = tried(given.program, target_name, against, inspect, oracle)
        say(json.dumps(replay_object(trial, bench.target, target_name, documented, against, oracle), allow_nan=False) + "\n")
    else:
        trial, documented, uses, bench = tried(given.program, target_name, against, inspect, oracle)
        say(
            verdict_text(
                trial.program,
                trial.verdict,
                *heading_words(bench),
                answers_of(trial),
                replay_words(given, target_name, against, inspect, oracle),
                "" if documented else "it needs " + ", ".join(uses),
                trial.log,
                sentences_of(uses, bench.target),
                was_compared(trial),
                states_compared(trial),
            )
        )
    return status_of(trial.verdict, documented, undocumented)


def tried(
    program: Program, target_name: str, against: str | None = None, inspect: bool = False, oracle: str = "own"
) -> tuple[Trial, bool, tuple[str, ...], Bench]:
    """A program's trial on a target, whether its divergence is documented, its undocumented uses, and the bench, closed."""
    with open_bench(target_name, against, inspect, oracle) as bench:
        trial = bench.try_program(program)
        documented, uses = is_documented(trial, bench)
        return trial, documented, uses, bench


def heading_words(bench: Bench) -> tuple[str, str]:
    """What was run, and its version: the words that a verdict's heading begins with."""
    if bench.against_name is None:
        return bench.target_name, bench.version + judged_by_words(bench.oracle)
    return f"{bench.target_name} {bench.version} against {bench.against_name}", bench.against_version or ""


def sentences_of(uses: Sequence[str], target: Target) -> tuple[str, ...]:
    """For every undocumented use, what the target's documentation says, e.g. "divide: llama_memory_seq_div: ..."."""
    return tuple(f"{entry.use}: {entry.sentence}" for entry in target.undocumented if entry.use in uses)


def was_compared(trial: Trial) -> bool:
    """Whether any output row of a trial was compared with the truth."""
    return trial.run is not None and any(span.indices for span in trial.run.spans)


def states_compared(trial: Trial) -> int:
    """How many cached states of a trial were compared with the truth."""
    return len(trial.run.inspections) if trial.run is not None else 0


def status_of(verdict: Verdict, documented: bool, undocumented: bool) -> int:
    """The exit status that a verdict comes to. `undocumented`: fail on divergences outside the documentation, too."""
    if verdict.is_divergence:
        return failures.DIVERGENCE if documented or undocumented else failures.OK
    return failures.OK if verdict.kind == "ok" else failures.COULD_NOT_TEST


def finite(number: float | None) -> float | None:
    """The number, or None when it is none or not finite."""
    return number if number is not None and math.isfinite(number) else None


def replay_object(
    trial: Trial, target: Target, target_name: str, documented: bool, against: str | None = None, oracle: str = "own"
) -> dict[str, Any]:
    """The object that `replay --json` prints; `ops` has the operations that were reached; `target` is the word it was given, as in a finding.

    A target that cannot poison its memory runs `start=poison` as `dirty`; the object then says so with a last key, `start`. A target
    that is held to another has that one's name as `against`, and what it answered in `against_ops`; one that is its own truth has `oracle`. A wrong state row has `part` and `layer`.
    """
    program, verdict = trial.program, trial.verdict
    result: dict[str, Any] = {
        "format": FORMAT,
        "program": program_id(program),
        "target": target_name,
        "verdict": verdict.kind,
        "documented": documented,
        "signature": fine_signature(label_of(target_name, against), program, verdict) if verdict.is_divergence else None,
        "op_index": verdict.operation_index,
        "sequence": verdict.sequence,
        "position": verdict.position,
        "relation": verdict.relation,
        "error": finite(verdict.error),
        "tolerance": finite(trial.tolerance if verdict.tolerance is None else verdict.tolerance),
        "ops": _answered(program, trial.run),
    }
    if verdict.part is not None:
        result |= {"part": verdict.part, "layer": verdict.layer}
    if against is not None:
        result |= {"against": against, "against_ops": _answered(program, trial.other)}
    if oracle != "own":
        result["oracle"] = oracle
    if not target.poison and any(cache.start == "poison" for cache in caches_of(program)):
        result["start"] = "dirty"
    return result


def _answered(program: Program, run: Run | None) -> list[dict[str, str]]:
    steps = run.steps if run else ()
    return [
        {"op": operation_text(operation), "outcome": step.outcome.word} for operation, step in zip(program.operations, steps, strict=False)
    ]
