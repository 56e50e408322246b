"""The corpus: for every cell the smallest right program; what a shard hands over, and what a campaign keeps of it."""

import pytest
from statedrift.fuzz.corpus import Corpus, Example, count_with_examples, size_of
from statedrift.fuzz.execution import execute
from statedrift.fuzz.reach import ReachCounter
from statedrift.fuzz.shards import shard_programs
from statedrift.fuzz.trial import Trial
from statedrift.oracle.recompute import use_one_thread
from statedrift.spec.errors import UsageError
from statedrift.spec.programs import Program, parse_program, program_line
from statedrift.spec.verdicts import Verdict
from statedrift.store.campaigns import CorpusRow

from tests.perfect_target import PerfectTarget

SMALL = parse_program("model lfm2 seed=0; decode 0:2")
SMALLER = parse_program("model lfm2 seed=0; decode 0:1")
LARGE = parse_program("model lfm2 seed=0; decode 0:1; decode 0:1")
DECODED, ONE = ("answers", "decode accepted"), ("edges", "decode of 1")


def trials(programs: list[Program], kind: str = "ok") -> list[Trial]:
    target = PerfectTarget()
    return [Trial(program, execute(program, target), Verdict(kind), None, 1.0) for program in programs]  # type: ignore[arg-type]


def cells_of(trial: Trial) -> set[tuple[str, str]]:
    counter = ReachCounter(False)
    assert trial.run is not None
    counter.add(trial.program, trial.run)
    return {(table, cell) for table, counts in counter.reached().counts.items() for cell in counts}


def test_a_shard_hands_over_the_smallest_program_of_every_cell() -> None:
    use_one_thread()
    ran = trials(shard_programs(0, 0, ("lfm2",), 40))
    counter = ReachCounter(False)
    examples = count_with_examples(counter, ran)
    named = [cell for example in examples for cell in example.cells]
    assert len(named) == len(set(named))
    assert set(named) == set().union(*map(cells_of, ran))
    for example in examples:
        for cell in example.cells:
            assert size_of(example.program) == min(size_of(trial.program) for trial in ran if cell in cells_of(trial))
    plain = ReachCounter(False)
    for trial in ran:
        assert trial.run is not None
        plain.add(trial.program, trial.run)
    assert (counter.reached(), counter.outcomes) == (plain.reached(), plain.outcomes)


def test_what_went_wrong_is_counted_and_is_no_example() -> None:
    counter = ReachCounter(False)
    (example,) = count_with_examples(counter, [*trials([SMALLER], "wrong-output"), *trials([SMALL])])
    assert example.program == SMALL
    assert ONE not in example.cells
    assert counter.reached().counts["edges"]["decode of 1"] == 1


def test_a_campaign_keeps_what_is_smaller_by_operations_then_by_tokens_and_the_earlier_of_two() -> None:
    corpus = Corpus()
    corpus.add([Example(SMALL, (DECODED,)), Example(LARGE, (ONE,))])
    assert [row.cell for row in corpus.changed_rows()] == ["decode accepted", "decode of 1"]
    corpus.changed.clear()
    same = parse_program("model lfm2 seed=1; decode 0:2")
    corpus.add([Example(same, (DECODED,)), Example(LARGE, (DECODED,))])
    assert corpus.changed_rows() == []
    corpus.add([Example(SMALLER, (DECODED, ONE))])
    line = program_line(SMALLER)
    assert corpus.changed_rows() == [CorpusRow(*DECODED, 1, 1, line), CorpusRow(*ONE, 1, 1, line)]
    again = Corpus()
    again.take_up(corpus.changed_rows())
    assert again.smallest == corpus.smallest
    assert again.changed_rows() == []


def test_batches_hold_every_program_of_the_families_once_and_one_model_each() -> None:
    corpus = Corpus()
    other = parse_program("model mamba2 seed=0; decode 0:1")
    corpus.add([Example(SMALL, (DECODED, ONE)), Example(LARGE, (("pairs", "a"),)), Example(SMALLER, (("pairs", "b"),))])
    corpus.add([Example(other, (("pairs", "c"),))])
    assert corpus.batches(["lfm2"], 2) == [[SMALLER, SMALL], [LARGE]]
    assert corpus.batches(["mamba2", "lfm2"], 9) == [[SMALLER, SMALL, LARGE], [other]]


def test_a_row_that_holds_no_program_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"corpus of this campaign holds what is no program \(edges, decode of 1\): line 1"):
        Corpus().take_up([CorpusRow(*ONE, 1, 1, "model lfm2; dance 0")])
