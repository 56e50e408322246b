"""docs/mutants.md, the list of all mutants: `python -m statedrift.fuzz.mutants.page docs/mutants.md` writes it."""

import sys
from pathlib import Path

from . import MUTANTS
from .mutant import CLASSIC, Mutant

_HEAD = """# Mutants

Written by `python -m statedrift.fuzz.mutants.page docs/mutants.md`. Each mutant is one of our own caches with one fault, a small override of a method. `statedrift bench mutants`
says how soon each is found. The report is a public one on an engine, of which the mutant is our reading, in our caches; *classic*: a fault without a report of its own.
The program was written by hand; no operation can be left out of it. The sound caches, and the same override with its fault switched off (the fixed twin), pass it.

A mutant is a target as any other: `statedrift explain '<program>' --target statedrift.fuzz.mutants:FAULTY.<name>`; its twin is `FIXED.<name>`.
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
