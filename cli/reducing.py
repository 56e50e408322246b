"""`statedrift reduce`: the smallest program with the same divergence.

Rules
- Progress goes to standard error; the reduced program goes to standard output, and to `--out` as program text.
- A program that does not diverge is shown as it is: there is nothing to reduce, and nothing is written.
- A line of progress when there are fewer operations, else at most one in `PROGRESS_SECONDS`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from ..fuzz.pair import open_bench
from ..fuzz.reduction import reduce_trial
from ..fuzz.trial import Bench, Trial, answers_of
from ..reports.terminal import plural, verdict_text
from ..spec.programs import program_text
from ..store.files import check_writable, write_whole
from .given import Given, one_line, read_given, replay_words
from .output import say
from .replaying import heading_words, sentences_of, states_compared, status_of, was_compared

PROGRESS_SECONDS = 5.0


def reduce_command(
    argument: str, target_name: str, out: Path | None, undocumented: bool, campaign: Path | None, against: str | None = None,
    inspect: bool = False, oracle: str = "own",
) -> int:  # fmt: skip
    """Reduce a program and print what is left; the answer is the exit status."""
    given = read_given(argument, campaign)
    if out is not None:
        check_writable(out)
    with open_bench(target_name, against, inspect, oracle) as bench:
        start = bench.try_program(given.program)
        if not start.verdict.is_divergence:
            say(_text(start, bench, replay_words(given, target_name, against, inspect, oracle)))
            unwritten = "" if out is None else f"; {out} is not written"
            print(f"nothing to reduce: the program does not diverge{unwritten}", file=sys.stderr)
            return status_of(start.verdict, True, undocumented)
        reduction = reduce_trial(start, bench, on_step=shown_steps(monotonic, lambda line: print(line, file=sys.stderr, flush=True)))
        uses = reduction.undocumented_uses
        trial = reduction.trial
        words = replay_words(Given(trial.program, one_line(trial.program)), target_name, against, inspect, oracle)
        say(_text(trial, bench, words, uses))
    print(
        f"{plural(len(given.program.operations), 'operation')} reduced to {len(trial.program.operations)}; "
        f"{plural(reduction.tried, 'smaller program')} tried",
        file=sys.stderr,
    )
    if not reduction.is_fixpoint:
        print("its time was over: a smaller program may be left; reduce what is printed again", file=sys.stderr)
    for other in reduction.others:
        print(f"met on the way: {other.signature}: {one_line(other.program)}", file=sys.stderr)
    if out is not None:
        write_whole(out, (f"# {reduction.signature}\n" + program_text(trial.program)).encode())
        print(f"written to {out}", file=sys.stderr)
    return status_of(trial.verdict, not uses, undocumented)


def _text(trial: Trial, bench: Bench, words: str, uses: tuple[str, ...] = ()) -> str:
    needs = "it needs " + ", ".join(uses) if uses else ""
    return verdict_text(
        trial.program, trial.verdict, *heading_words(bench), answers_of(trial), words, needs, trial.log,
        sentences_of(uses, bench.target), was_compared(trial), states_compared(trial),
    )  # fmt: skip


def shown_steps(clock: Callable[[], float], write: Callable[[str], None]) -> Callable[[Trial], None]:
    """A function that writes a line for a smaller program, as the file's rules say; `clock` tells seconds."""
    fewest: int | None = None
    newest = clock()

    def show(trial: Trial) -> None:
        nonlocal fewest, newest
        count = len(trial.program.operations)
        if fewest is None or count < fewest or clock() - newest >= PROGRESS_SECONDS:
            fewest, newest = count, clock()
            write(f"operations={count} verdict={trial.verdict.kind}")

    return show
