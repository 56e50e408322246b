"""`statedrift reduce`: the smallest program with the same divergence.

Rules
- Progress goes to standard error; the reduced program goes to standard output, and to `--out` as program text.
- A program that does not diverge is shown as it is: there is nothing to reduce.
"""

import sys
from pathlib import Path

from ..fuzz.reduction import reduce_trial
from ..fuzz.trial import Bench, Trial, answers_of
from ..reports.terminal import plural, verdict_text
from ..spec.programs import program_text
from ..store.files import write_whole
from .given import Given, one_line, read_given, replay_words
from .output import say
from .replaying import status_of


def reduce_command(argument: str, target_name: str, out: Path | None, undocumented: bool, campaign: Path | None) -> int:
    """Reduce a program and print what is left; the answer is the exit status."""
    given = read_given(argument, campaign)
    with Bench(target_name) as bench:
        start = bench.try_program(given.program)
        if not start.verdict.is_divergence:
            say(_text(start, target_name, bench.version, replay_words(given, target_name)))
            print("nothing to reduce: the program does not diverge", file=sys.stderr)
            return status_of(start.verdict, True, undocumented)
        reduction = reduce_trial(start, bench, on_step=_show_step)
        uses = reduction.undocumented_uses
        trial = reduction.trial
        words = replay_words(Given(trial.program, one_line(trial.program)), target_name)
        say(_text(trial, target_name, bench.version, words, "it needs " + ", ".join(uses) if uses else ""))
    print(
        f"{plural(len(given.program.operations), 'operation')} reduced to {len(trial.program.operations)}; "
        f"{plural(reduction.tried, 'smaller program')} tried",
        file=sys.stderr,
    )
    for other in reduction.others:
        print(f"met on the way: {other.signature}: {one_line(other.program)}", file=sys.stderr)
    if out is not None:
        write_whole(out, (f"# {reduction.signature}\n" + program_text(trial.program)).encode())
        print(f"written to {out}", file=sys.stderr)
    return status_of(trial.verdict, not uses, undocumented)


def _text(trial: Trial, target_name: str, version: str, words: str, undocumented: str = "") -> str:
    return verdict_text(trial.program, trial.verdict, target_name, version, answers_of(trial), words, undocumented, trial.log)


def _show_step(trial: Trial) -> None:
    print(f"operations={len(trial.program.operations)} verdict={trial.verdict.kind}", file=sys.stderr)
