"""docs/mutants.md, the list of all mutants: `python -m statedrift.fuzz.mutants.page docs/mutants.md` writes it."""

import sys
from pathlib import Path

from . import MUTANTS
from .mutant import CLASSIC, Mutant
from .search import TWIN_PROGRAMS

_HEAD = f"""# Mutants

Written by `python -m statedrift.fuzz.mutants.page docs/mutants.md`. Each mutant is one of our own caches with one fault, a small override of a method. `statedrift bench mutants`
says how soon each is found. The report is a public one on an engine, of which the mutant is our reading, in our caches; *classic*: a fault without a report of its own.
The program was written by hand; no operation can be left out of it. The sound caches, and the same override with its fault switched off (the fixed twin), pass it.

A mutant is a target as any other: `statedrift explain '<program>' --target statedrift.fuzz.mutants:FAULTY.<name>`; its twin is `FIXED.<name>`.

## How soon they are found

```
statedrift bench mutants                            # our own fuzzer: 3 seeds, at most 20 s of one core each
statedrift bench mutants --full                     # 10 seeds, at most 60 s
statedrift bench mutants --compare                  # beside others, 3 seeds, at most 20 s
statedrift bench mutants --full --twins 600         # and the fixed twins of every family for 10 minutes
```

With `--results FILE` every run is kept, and the same command goes on after it was broken off; `--write FILE` makes a page of what was found, `--csv FILE` a table with a line for every run.
The others are uniform choices of the same operations, a Hypothesis state machine, and [HypoFuzz](https://hypofuzz.com) on that machine, which `pip install 'statedrift[bench]'` installs and which is left out where it is not.

- Time is CPU time of one core until a fuzzer first calls something wrong; reducing is not in it.
- A run that found nothing within its limit is *censored*: it counts as still searching when it was ended, so that medians over seeds (Kaplan-Meier) stay right; a median that the runs did not reach is shown as `> 20`.
- *A12* is how likely a run of ours is quicker than one of theirs, ties half: 1 always, 0.5 no difference, 0 never. From 0.44 to 0.56 the two count as alike; of few seeds, or of times of a
  tenth of a second, it says little.
- *Share found within* counts mutants by their medians.
- *larger by* is how many operations the largest reduced program of all seeds has beyond the program below; *purity* the share of the commonest signature among the reduced programs.
- On the fixed twins every divergence is a false alarm. They are run on {TWIN_PROGRAMS} programs for each seed, or, with `--twins`, in turns on programs that no search draws.

Status 1 when a bound fails: every mutant found within the limit, 90 % within 10 s; 95 % of the reduced programs at most one operation larger, none more than three; no alarm on a twin.

## All of them
"""


def page_text() -> str:
    """The whole page."""
    rows = ["| mutant | what is wrong | report | cache | overrides | program | verdict |", "|---|---|---|---|---|---|---|"]
    rows += [_row(mutant) for mutant in MUTANTS.values()]
    traced = sum(mutant.report != CLASSIC for mutant in MUTANTS.values())
    return f"{_HEAD}\n{len(MUTANTS)} mutants, {traced} of them after a report.\n\n" + "\n".join(rows) + "\n"


def _row(mutant: Mutant) -> str:
    overrides = ", ".join(f"`{name}`" for name in mutant.overrides)
    cells = (f"`{mutant.name}`", mutant.summary, mutant.report, mutant.cache, overrides, f"`{mutant.text}`", mutant.kind)
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page_text(), encoding="utf-8")
