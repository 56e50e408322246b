"""Try programs on a target: run them, judge them, and say what each came to.

Rules
- A `Bench` owns what that needs (a child process for a native target, measured tolerances) and is used by everything that tries programs.
- Programs of one model are judged together.
- A fault of ours is the verdict `harness-error`; it is never counted against the target.
"""

import atexit
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from ..spec.configuration import CacheConfiguration
from ..spec.errors import UnavailableError, UsageError
from ..spec.families import family_list, family_of
from ..spec.models import Model
from ..spec.programs import Program, caches_of
from ..spec.target import IsSlow, Target
from ..spec.verdicts import Outcome, OutcomeWord, Verdict
from ..store.campaigns import Noise
from ..store.findings import Answer
from ..targets.registry import load_target
from .calibration import Logs, all_logs, measure_noise, measure_own_noise, measure_state_noise, remember_noise, remembered_noise
from .engine_child import Failed
from .execution import PLAIN, Manner, Run, Step, execute
from .judgement import judge, without_truth
from .sandbox import Death, Sandbox
from .signatures import coarse_signature
from .truth import ORACLES, PLAIN_SETTING, EngineTruth, Setting, form_of, settings_of

CALIBRATION_PROGRAMS = 8
OWN_MODULES = "statedrift."
"""Targets of these modules come with statedrift, as the installed ones do: canaries, mutants."""
STATES_WITHOUT_TRUTH = "--inspect compares state rows with our own recompute, which --oracle engine does without; leave out one of them"


class Trial(msgspec.Struct, frozen=True):
    """What a program came to on a target.

    signature  coarse; None when the program did not diverge
    log        the engine's last words, for a crash or a hang
    other      what the same program came to on the target it is held to, if it is held to one
    tolerance  of the row that decided, or of the first session
    old        what was judged of it on another build, up to the operation at which it parted, where it was tried there (two_builds.py)
    truths     for every span of the run the true rows (truth.NoTruth where there is none), where the target is its own oracle
    tolerances  for every span of the run that of its session
    closeness  error / tolerance of every row that was compared, float64 [rows]; None: none was, or that is not known any more
    """

    program: Program
    run: Run | None
    verdict: Verdict
    signature: str | None
    tolerance: float
    log: tuple[str, ...] = ()
    other: Run | None = None
    old: Verdict | None = None
    truths: tuple[Any, ...] = ()
    tolerances: tuple[float, ...] = ()
    closeness: Any = None


def check_judgeable(program: Program) -> None:
    """Raise UnavailableError for a half-precision attention cache or flash attention: only the engine itself says what is right with them."""
    for cache in caches_of(program):
        if cache.kv != "f32" or cache.flash:
            key = "kv=f16" if cache.kv != "f32" else "flash=1"
            raise UnavailableError(f"could not test: with {key} only the engine itself says what is right; judge it with `--oracle engine`")


def check_family(target_name: str, target: Target, family: str, oracle: str) -> None:
    """Raise UnavailableError for a family that the target does not run, or that only the engine itself can judge where the oracle is our
    own; UsageError for an unknown one."""
    is_modelled = family_of(Model(family)).is_modelled
    if family not in target.families:
        raise UnavailableError(f"could not test: target {target_name} does not run family {family}; it runs {family_list(target.families)}")
    if not is_modelled and oracle == "own":
        raise UnavailableError(
            f"could not test: family {family} has no recompute of ours, only the engine itself says what is right; judge it with `--oracle engine`"
        )


def answers_of(trial: Trial) -> tuple[Answer, ...]:
    """What the target answered to the operations that were reached."""
    return () if trial.run is None else tuple(Answer(step.outcome, tuple(last for _, last in step.positions)) for step in trial.run.steps)


class Spent(msgspec.Struct):
    """Seconds of wall time that a bench has used."""

    running: float = 0.0
    judging: float = 0.0


class Bench:
    """A target, ready to try programs; given by name, or (never one that needs a child process) as the object itself.

    Raises UsageError for an unknown target, UnavailableError when it cannot be used here.
    """

    against_name: str | None = None
    against_version: str | None = None
    """The target that it is held to in place of the oracle, if it is (fuzz/pair.py)."""
    old_version: str | None = None
    """Of the other build whose own divergences are none, if there is one (fuzz/two_builds.py)."""

    def __init__(
        self,
        target: str | Target,
        inspect: bool = False,
        oracle: str = "own",
        environment: Mapping[str, str] | None = None,
        noise_logs: Logs | None = None,
    ) -> None:
        """inspect: compare the state rows that the target shows, too. oracle: `engine` makes the target its own truth.
        environment: of its child process, beside ours. noise_logs: over which the noise of a target in development is measured, every time."""
        if oracle not in ORACLES:
            raise UsageError(f"unknown oracle `{oracle}`; there are {', '.join(ORACLES)}")
        if inspect and oracle == "engine":
            raise UsageError(STATES_WITHOUT_TRUTH)
        self.oracle = oracle
        self.target_name = target if isinstance(target, str) else target.name
        self.target = load_target(target) if isinstance(target, str) else target
        if self.target.isolated and not isinstance(target, str):
            raise UsageError(f"target {self.target_name} runs in a child process, which finds it by name; give its name")
        self.sandbox = Sandbox(self.target_name, environment=environment) if self.target.isolated else None
        self.version = self.sandbox.version if self.sandbox else self.target.version()
        self.spent = Spent()
        self.manner = Manner(inspect=inspect)
        self.truth = EngineTruth(self.run) if oracle == "engine" else None
        self._noise: dict[tuple[Model, Setting], Noise] = {}
        # a target in development changes without changing its version: what was measured before says nothing of it
        self._is_installed = isinstance(target, str) and (":" not in target or target.startswith(OWN_MODULES))
        given = None if self._is_installed else noise_logs
        self._noise_logs = Logs(*self.target.noise_logs()) if isinstance(self.target, IsSlow) else given or all_logs()

    @property
    def label(self) -> str:
        """The target in signatures."""
        return self.target_name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the child process."""
        if self.sandbox:
            self.sandbox.close()

    def renew(self) -> None:
        """Go on with a native target in a process that ran nothing yet; with others nothing is done."""
        if self.sandbox:
            self.sandbox.renew_worker()

    def noise(self, model: Model) -> Noise:
        """The measured floor and tolerance for a model. Raises UnavailableError when the target cannot be judged on it."""
        return self._noise_in(model, PLAIN_SETTING)

    def _noise_in(self, model: Model, setting: Setting) -> Noise:
        key = model, setting
        if key not in self._noise:
            check_family(self.target_name, self.target, model.family, self.oracle)
            if self.manner.inspect:
                self._check_inspectable(model)
            judged_by = "" if self.truth is None else " ".join(["engine", *(f"{word}" for word in setting)])
            noise = None
            if self._is_installed:
                noise = remembered_noise(
                    self.target_name, self.version, model, self.manner.inspect, judged_by, setting, self._noise_logs.log_count
                )
            if noise is None:
                noise = self._measured_noise(model, setting)
                if self._is_installed:
                    remember_noise(self.target_name, self.version, model, noise, judged_by)
            self._noise[key] = noise
        return self._noise[key]

    def _measured_noise(self, model: Model, setting: Setting) -> Noise:
        if self.truth is not None:
            return measure_own_noise(model, setting, self._run_plain, self.truth)
        noise = measure_noise(model, self._run_plain, self._noise_logs)
        return measure_state_noise(model, noise, self._run_inspected) if self.manner.inspect else noise

    def _check_inspectable(self, model: Model) -> None:
        (opened,) = self._run_inspected([Program(model, CacheConfiguration(), ())])
        if not opened.capabilities.inspect:
            raise UnavailableError(f"could not test: target {self.target_name} does not show its state rows; leave out --inspect")

    def _run_plain(self, programs: Sequence[Program]) -> list[Run]:
        """Runs of calibration programs whose outputs alone are asked for."""
        return self._run_calibration(programs, PLAIN)

    def _run_inspected(self, programs: Sequence[Program]) -> list[Run]:
        """Runs of calibration programs whose states are looked at, which may cost a target a whole recompute each time."""
        return self._run_calibration(programs, self.manner)

    def _run_calibration(self, programs: Sequence[Program], manner: Manner) -> list[Run]:
        """A few at a time: a target that fails at the first is not asked for all."""
        some = (programs[start : start + CALIBRATION_PROGRAMS] for start in range(0, len(programs), CALIBRATION_PROGRAMS))
        return [_plain_run(result) for batch in some for result in self.run(batch, [manner] * len(batch))]

    def set_noise(self, noise: dict[Model, Noise]) -> None:
        """Take over measurements that another process made."""
        self._noise.update({(model, PLAIN_SETTING): measured for model, measured in noise.items()})

    def tolerance(self, model: Model) -> float:
        """The largest error of a right output row."""
        return self.noise(model).tolerance

    def program_tolerance(self, program: Program) -> float:
        """The same for the first session of a program. Measured for all of them: "could not test" is not an answer about one row."""
        if self.truth is None:
            return self.tolerance(program.model)
        tolerances = [self._noise_in(program.model, setting).tolerance for setting in settings_of(program)]
        return tolerances[0]

    def _span_tolerances(self, program: Program, run: Run) -> tuple[float, ...]:
        """The same for every span of a run."""
        if self.truth is None:
            return (self.tolerance(program.model),) * len(run.spans)
        return tuple(self._noise_in(program.model, form_of(program, span).setting).tolerance for span in run.spans)

    def try_program(self, program: Program) -> Trial:
        """Run and judge one program."""
        return self.try_programs([program])[0]

    def try_programs(self, programs: Sequence[Program]) -> list[Trial]:
        """Run and judge programs; the answer has their order."""
        for program in programs:
            if self.truth is None:
                check_judgeable(program)
            self.program_tolerance(program)  # before anything runs: "could not test" is not an answer about one program
        results = self.run(programs, [self.manner] * len(programs))
        ran = [(number, result) for number, result in enumerate(results) if isinstance(result, Run)]
        tolerances = {number: self._span_tolerances(programs[number], run) for number, run in ran}
        truths: dict[int, tuple[Any, ...]] = {}
        if self.truth is not None:
            own = self.truth.rows_of_spans([programs[number] for number, _ in ran], [run for _, run in ran])
            truths = {number: tuple(rows) for (number, _), rows in zip(ran, own, strict=True)}
        started = perf_counter()
        verdicts: dict[int, Verdict] = {}
        closeness: dict[int, np.ndarray] = {}
        alike: dict[tuple[Model, float], list[int]] = defaultdict(list)
        for number, _ in ran:
            alike[programs[number].model, self.program_tolerance(programs[number])].append(number)
        for (model, tolerance), numbers in alike.items():
            runs = [result for number in numbers if isinstance(result := results[number], Run)]
            true_rows = None if self.truth is None else [truths[number] for number in numbers]
            state_tolerance = self.noise(model).state_tolerance if self.manner.inspect else None
            of_spans = [tolerances[number] for number in numbers]
            for number, judged in zip(numbers, judge(model, runs, tolerance, state_tolerance, true_rows, of_spans), strict=True):
                verdicts[number], closeness[number] = judged
        self.spent.judging += perf_counter() - started
        if self.truth is not None:
            verdicts |= self._doubted(self.truth, programs, dict(ran), verdicts)
        return [
            self._trial(program, result, verdicts.get(number), truths.get(number, ()), tolerances.get(number, ()), closeness.get(number))
            for number, (program, result) in enumerate(zip(programs, results, strict=True))
        ]

    def _doubted(
        self, truth: EngineTruth, programs: Sequence[Program], runs: dict[int, Run], verdicts: dict[int, Verdict]
    ) -> dict[int, Verdict]:
        """A row is wrong only if the engine says twice what is right: the verdicts for which it does not."""
        numbers = [number for number, verdict in verdicts.items() if verdict.kind in ("wrong-output", "nonfinite")]
        places = [(programs[number], runs[number], verdicts[number].operation_index or 0) for number in numbers]
        doubts = zip(numbers, truth.doubts(places), strict=True)
        return {
            number: without_truth(verdicts[number].operation_index, verdicts[number].sequence, doubt) for number, doubt in doubts if doubt
        }

    def _trial(
        self,
        program: Program,
        result: Run | Death | Failed,
        verdict: Verdict | None,
        truths: tuple[Any, ...],
        tolerances: tuple[float, ...],
        closeness: np.ndarray | None,
    ) -> Trial:
        run: Run | None = None
        log: tuple[str, ...] = ()
        match result:
            case Run():
                run = result
            case Death():
                before = self.run_before(program, result)
                run = before and without_rows(before)
                verdict, log = result.verdict, result.log
            case Failed():
                verdict = failed_verdict(result)
        assert verdict is not None
        trial = self.trial(program, run, verdict, log)
        return msgspec.structs.replace(trial, truths=truths, tolerances=tolerances, closeness=closeness)

    def trial(self, program: Program, run: Run | None, verdict: Verdict, log: tuple[str, ...] = (), other: Run | None = None) -> Trial:
        """The trial of a program that was judged."""
        signature = coarse_signature(self.label, program, verdict) if verdict.is_divergence else None
        tolerance = verdict.tolerance if verdict.part is None else None
        return Trial(program, run, verdict, signature, self.program_tolerance(program) if tolerance is None else tolerance, log, other)

    def run_before(self, program: Program, death: Death, manner: Manner = PLAIN) -> Run | None:
        """What happened before a worker's death: the same program without the operation that ended it (or, when it ended while
        opening, over fresh memory)."""
        index = death.verdict.operation_index
        cache = program.cache if index is not None else msgspec.structs.replace(program.cache, start="fresh")
        (before,) = self.run([Program(program.model, cache, program.operations[: index or 0])], [manner])
        if not isinstance(before, Run) or len(before.steps) != (index or 0):
            return None
        steps = before.steps
        if index is not None:
            word: OutcomeWord = "hang" if death.verdict.kind == "hang" else "crash"
            steps += (Step(Outcome(word, death.verdict.reason), "", "", steps[-1].positions if steps else ()),)
        return msgspec.structs.replace(before, steps=steps, verdict=death.verdict)

    def run(self, programs: Sequence[Program], manners: Sequence[Manner] = ()) -> Sequence[Run | Death | Failed]:
        """Run programs, each in its manner (or all in the plain one), and judge nothing."""
        started = perf_counter()
        manners = manners or [PLAIN] * len(programs)
        results: Sequence[Run | Death | Failed]
        if self.sandbox:
            results = self.sandbox.run(programs, manners)
        else:
            results = [self._run_here(program, manner) for program, manner in zip(programs, manners, strict=True)]
        self.spent.running += perf_counter() - started
        return results

    def _run_here(self, program: Program, manner: Manner) -> Run | Failed:
        try:
            return execute(program, self.target, manner=manner)
        except UsageError as error:
            return Failed("usage", str(error))
        except UnavailableError as error:
            return Failed("unavailable", str(error))
        except Exception as error:  # ours: a session's own exceptions are its answers
            return Failed("internal", "".join(traceback.format_exception_only(error)).strip())


def without_rows(run: Run) -> Run:
    """A run without what it gave and showed."""
    return msgspec.structs.replace(run, spans=(), rows={}, inspections=())


def failed_verdict(failed: Failed) -> Verdict:
    """A program that could not be run is neither right nor wrong."""
    return Verdict("harness-error" if failed.kind == "internal" else "unknown", reason=failed.message)


def _plain_run(result: Run | Death | Failed) -> Run:
    """A run of a calibration program; anything else means that the target cannot be judged."""
    match result:
        case Run():
            return result
        case Death(verdict=verdict):
            raise UnavailableError(f"could not test: a plain decoding of one sequence ended in a {verdict.kind} ({verdict.reason})")
        case Failed(message=message):
            raise UnavailableError(f"could not test: {message}")


def check(program: Program, target: str | Target) -> Verdict:
    """Run a program on a target and judge every answer, position and output row: the whole verdict.

    target  a name (as on the command line), or an object that follows spec.target.Target
    The first program of a model on a target also measures the target's noise, which takes some seconds. Raises UnavailableError
    when the target cannot be used or judged, UsageError for an unknown one.
    """
    return _bench_of(target).try_program(program).verdict


_benches: dict[str | int, Bench] = {}


def _bench_of(target: str | Target) -> Bench:
    """The bench of a target, kept until the process ends."""
    key = target if isinstance(target, str) else id(target)  # a bench keeps its target, so that the id stays its own
    if key not in _benches:
        _benches[key] = Bench(target)
        atexit.register(_benches[key].close)
    return _benches[key]
