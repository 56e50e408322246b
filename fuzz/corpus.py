"""The corpus: for every cell that was reached (reach.py) the smallest program that reached it and was right.

Rules
- Small is counted in operations, then in tokens; of two that are alike the earlier one stays.
- Only programs that were right: what diverges is a finding, or waits to be one. So one that diverges when it is run again is news.
- A shard hands over only programs that are its smallest for some cell. Looking for them costs a few microseconds a program.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from ..spec.errors import UsageError
from ..spec.operations import Cancel, Decode
from ..spec.programs import Program, parse_program, program_line
from ..store.campaigns import CorpusRow
from .reach import ReachCounter
from .trial import Trial

Cell = tuple[str, str]
"""Names of a table and of a cell in it."""


class Example(msgspec.Struct, frozen=True):
    """A program, and the cells of which it is the smallest example at hand."""

    program: Program
    cells: tuple[Cell, ...]


def size_of(program: Program) -> tuple[int, int]:
    """Operations and tokens of a program."""
    tokens = sum(item.token_count for operation in program.operations if isinstance(operation, Decode | Cancel) for item in operation.items)
    return len(program.operations), tokens


def count_with_examples(counter: ReachCounter, trials: Sequence[Trial]) -> tuple[Example, ...]:
    """Count what trials reach; of the right ones the smallest for every cell, the smallest first."""
    examples = []
    ran = [trial for trial in trials if trial.run is not None]
    right = sorted((trial for trial in ran if trial.verdict.kind == "ok"), key=lambda trial: size_of(trial.program))
    for trial in right:
        assert trial.run is not None
        cells = counter.add_and_name_new(trial.program, trial.run)
        if cells:
            examples.append(Example(trial.program, cells))
    for trial in ran:
        if trial.verdict.kind != "ok":
            assert trial.run is not None
            counter.add(trial.program, trial.run)
    return tuple(examples)


class Corpus:
    """The smallest programs that a campaign has seen, and which of them are not kept yet."""

    def __init__(self) -> None:
        self.smallest: dict[Cell, tuple[tuple[int, int], Program]] = {}
        self.changed: set[Cell] = set()

    def add(self, examples: Iterable[Example]) -> None:
        """Take over what is smaller than what there is."""
        for example in examples:
            size = size_of(example.program)
            for cell in example.cells:
                known = self.smallest.get(cell)
                if known is None or size < known[0]:
                    self.smallest[cell] = size, example.program
                    self.changed.add(cell)

    def changed_rows(self) -> list[CorpusRow]:
        """The rows of what changed."""
        changed = [(*cell, *self.smallest[cell]) for cell in sorted(self.changed)]
        lines = {id(program): program_line(program) for program in {id(entry[3]): entry[3] for entry in changed}.values()}
        return [CorpusRow(table, cell, *size, lines[id(program)]) for table, cell, size, program in changed]

    def take_up(self, rows: Iterable[CorpusRow]) -> None:
        """Take over what was kept. Raises UsageError for a row that holds no program."""
        programs: dict[str, Program] = {}
        for row in rows:
            if row.program not in programs:
                try:
                    programs[row.program] = parse_program(row.program)
                except UsageError as error:
                    raise UsageError(f"the corpus of this campaign holds what is no program ({row.table}, {row.cell}): {error}") from None
            self.smallest[row.table, row.cell] = (row.operations, row.tokens), programs[row.program]

    def batches(self, families: Sequence[str], programs_max: int) -> list[list[Program]]:
        """Its programs of these families, each once, by model, the smallest first, at most `programs_max` in a batch."""
        programs = {program_line(program): program for _, program in self.smallest.values() if program.model.family in families}
        ordered = sorted(programs.items(), key=lambda entry: (repr(entry[1].model), size_of(entry[1]), entry[0]))
        result = []
        for _, alike in groupby((program for _, program in ordered), key=lambda program: program.model):
            own = list(alike)
            result += [own[start : start + programs_max] for start in range(0, len(own), programs_max)]
        return result
