"""How soon a mutant is found: one run of one fuzzer on one mutant, with a limit on its time.

Rules
- All fuzzers run on the mutant's family, on the same target, held to the same tolerance, which is that of the sound cache; it is measured
  before the clock starts. What is found is what a fuzzer itself calls wrong.
- Time is the CPU time of this process: a core that is shared with others does not make a fuzzer slower. Reduction is not in it.
- Before a run its mutant has shown itself on the program that was written by hand, and its fixed twin has passed it.
- A run that finds nothing within its limit is censored, never counted as slow.
- Fixed twins are run on programs of the same kind: on as many as asked for, or for as long; in the latter case on none that a search uses.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import count
from time import process_time
from typing import Literal

import msgspec

from ...spec.errors import UnavailableError
from ...spec.models import Model
from ...spec.programs import Program, program_line
from ...store.campaigns import Noise
from ..choices import SeededChoices
from ..generation import OPERATIONS_PER_PROGRAM_MAX, generate, model_for
from ..generation_operations import draw_program
from ..hypofuzz_baseline import search_by_coverage
from ..naive_baseline import SearchLimit, search_naively
from ..reduction import reduce_trial
from ..shards import number_of
from ..signatures import fine_signature
from ..trial import Bench, Trial
from .mutant import Mutant, MutantTarget

Finder = Literal["statedrift", "uniform", "hypothesis", "hypofuzz"]
FINDERS: tuple[Finder, ...] = ("statedrift", "uniform", "hypothesis", "hypofuzz")
BATCH_PROGRAMS = 16
"""Programs that are judged together: a fault is known at the end of them."""
REDUCTION_SECONDS_MAX = 30.0
TWIN_PROGRAMS = 64


class Detection(msgspec.Struct, frozen=True):
    """What came of one run.

    seconds             of CPU time until the mutant was found, or until the run gave up
    programs            until then; of a state machine, its examples
    signature           fine, of the reduced program; None where nothing is reduced
    reduced_operations  of the reduced program
    program             the reduced program, on one line
    """

    mutant: str
    finder: Finder
    seed: int
    limit_seconds: float
    is_found: bool
    seconds: float
    programs: int
    signature: str | None = None
    reduced_operations: int | None = None
    program: str | None = None


class Twin(msgspec.Struct, frozen=True):
    """What a fixed twin gave in the programs of one seed: how many there were, and the alarms, each a program on one line."""

    mutant: str
    seed: int
    programs: int
    alarms: tuple[str, ...]


class TwinPiece(msgspec.Struct, frozen=True):
    """What the fixed twins of one family gave in one piece of the time that they are run for, in turns.

    mutants  whose twins they are
    number   of the piece, from 0; its programs are a pure function of the family and of it
    seconds  of CPU time
    alarms   each the mutant, and a program on one line
    """

    family: str
    mutants: tuple[str, ...]
    number: int
    seconds: float
    programs: int
    alarms: tuple[str, ...]


class UniformChoices(SeededChoices):
    """Choices without a preference: no kind of operation is switched off or favoured for a program, and no answer is leant towards."""

    __slots__ = ()

    def leans(self, percent: int) -> bool:
        return False

    def weighted(self, cumulative: Sequence[int]) -> int:
        return self.integer(0, len(cumulative) - 1)

    def swarm(self, count: int) -> list[int]:
        return [1] * count


def check_ready(mutant: Mutant, noises: dict[Model, Noise]) -> None:
    """A clean pass and a forced failure. Raises UnavailableError when the mutant or its fixed twin is not what it says."""
    for is_faulty, kind in ((False, "ok"), (True, mutant.kind)):
        target = MutantTarget(mutant, is_faulty)
        with Bench(target) as bench:
            bench.set_noise(noises)
            verdict = bench.try_program(mutant.program).verdict
        if verdict.kind != kind:
            raise UnavailableError(f"could not test: {target.name} gives {verdict.kind} and not {kind} on its program `{mutant.text}`")


def sound_noise(mutants: Sequence[Mutant]) -> dict[Model, Noise]:
    """The noise of the sound caches for every model that the mutants can be run on."""
    noises: dict[Model, Noise] = {}
    families = sorted({mutant.family for mutant in mutants})
    models = dict.fromkeys([Model(family, seed) for family in families for seed in (0, 1)])
    with Bench("numba") as planes:
        for model in models:
            noises[model] = planes.noise(model)
    return noises


def _programs(finder: Finder, seed: int | str, family: str) -> Iterator[list[Program]]:
    """Batches of programs without end; all programs of a batch are of one model. seed: a text is no seed of a search."""
    for batch in count():
        model = model_for(number_of(seed, batch, "model"), family)
        numbers = [number_of(seed, batch, number) for number in range(BATCH_PROGRAMS)]
        if finder == "uniform":
            yield [draw_program(UniformChoices(number, "program"), model, OPERATIONS_PER_PROGRAM_MAX) for number in numbers]
        else:
            yield [generate(number, model) for number in numbers]


def search(mutant: Mutant, finder: Finder, seed: int, limit_seconds: float, noises: dict[Model, Noise]) -> Detection:
    """Look for a mutant for at most `limit_seconds` of CPU time. `noises`: those of the sound cache, of all its models."""
    target = MutantTarget(mutant)
    with Bench(target) as bench:
        bench.set_noise(noises)
        if finder in ("hypothesis", "hypofuzz"):
            model = Model(mutant.family)
            machine_search = search_naively if finder == "hypothesis" else search_by_coverage
            is_found, seconds, examples = machine_search(target, model, bench.tolerance(model), seed, limit_seconds)
            return Detection(mutant.name, finder, seed, limit_seconds, is_found, seconds, examples)
        trial, seconds, programs = _first_divergence(bench, _programs(finder, seed, mutant.family), limit_seconds)
        if trial is None:
            return Detection(mutant.name, finder, seed, limit_seconds, False, seconds, programs)
        reduction = reduce_trial(trial, bench, seconds_max=REDUCTION_SECONDS_MAX)
        return Detection(
            mutant.name,
            finder,
            seed,
            limit_seconds,
            True,
            seconds,
            programs,
            fine_signature("", reduction.program, reduction.trial.verdict),
            len(reduction.program.operations),
            program_line(reduction.program),
        )


def _first_divergence(bench: Bench, batches: Iterator[list[Program]], limit_seconds: float) -> tuple[Trial | None, float, int]:
    """The first trial that diverged, CPU seconds, and programs until then."""
    limit = SearchLimit(limit_seconds)
    tried = 0
    for batch in batches:
        for number, trial in enumerate(bench.try_programs(batch)):
            if trial.verdict.is_divergence:
                return trial, limit.seconds, tried + number + 1
        tried += len(batch)
        if limit.is_over:
            break
    return None, limit.seconds, tried


def try_twin(mutant: Mutant, seed: int, noises: dict[Model, Noise], programs: int = TWIN_PROGRAMS) -> Twin:
    """Run the fixed twin on the programs that its mutant is looked for with."""
    alarms: list[str] = []
    tried = 0
    with Bench(MutantTarget(mutant, is_faulty=False)) as bench:
        bench.set_noise(noises)
        for batch in _programs("statedrift", seed, mutant.family):
            alarms += [program_line(trial.program) for trial in bench.try_programs(batch) if trial.verdict.kind != "ok"]
            tried += len(batch)
            if tried >= programs:
                break
    return Twin(mutant.name, seed, tried, tuple(alarms))


def try_twins(mutants: Sequence[Mutant], number: int, seconds: float, noises: dict[Model, Noise]) -> TwinPiece:
    """Run the fixed twins of the mutants of one family in turns, until `seconds` of CPU time are over and all had equally many programs."""
    family = mutants[0].family
    batches = _programs("statedrift", f"twins {family} {number}", family)
    alarms: list[str] = []
    programs = 0
    with contextlib.ExitStack() as opened:
        benches = [opened.enter_context(Bench(MutantTarget(mutant, is_faulty=False))) for mutant in mutants]
        for bench in benches:
            bench.set_noise(noises)
        started = process_time()
        while process_time() - started < seconds:
            for mutant, bench in zip(mutants, benches, strict=True):
                trials = bench.try_programs(next(batches))
                alarms += [f"{mutant.name}: {program_line(trial.program)}" for trial in trials if trial.verdict.kind != "ok"]
                programs += len(trials)
        return TwinPiece(family, tuple(mutant.name for mutant in mutants), number, process_time() - started, programs, tuple(alarms))


# --- statistics ------------------------------------------------------------------------------------------------------------


def survival_median(times: Sequence[float], is_found: Sequence[bool]) -> float | None:
    """The Kaplan-Meier median: the first time at which at most half are still to be found; None when the runs ended before that.

    times     until it was found, or until the run gave up
    is_found  whether it was found
    Source: Kaplan and Meier 1958.
    """
    left, share = len(times), 1.0
    # at equal times what was found comes before what gave up
    for time, found in sorted(zip(times, is_found, strict=True), key=lambda run: (run[0], not run[1])):
        if found:
            share *= (left - 1) / left
            if share <= 0.5 + 1e-12:
                return time
        left -= 1
    return None


def effect_size(first: Sequence[float], second: Sequence[float]) -> float:
    """A12: how likely a run of `first` is quicker than one of `second`, ties half; 0.5 says that there is no difference. inf: never found.

    Source: Vargha and Delaney 2000, with less being better.
    """
    wins = sum(1.0 if a < b else 0.5 if a == b else 0.0 for a in first for b in second)
    return wins / (len(first) * len(second))


def purity(signatures: Sequence[str]) -> float:
    """The share of the commonest of these signatures."""
    return max(map(signatures.count, signatures)) / len(signatures)
