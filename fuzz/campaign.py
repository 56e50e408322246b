"""A campaign: rounds of shards until the budget is spent, and every new divergence reduced, re-run and kept.

Rules
- Shards come in rounds of fixed sizes and are merged in their order; what a round found is reduced before the next one, whose programs are
  steered away from what is known by then: a fault that was found is not found over and over while others wait.
- A budget of programs makes a campaign a pure function of its settings without `jobs`: limits of reduction are counted in trials.
  With a budget of seconds time cuts, too; the account says what was known when.
- Fuzzing and reducing share the time: reduction never takes more than half of it while fuzzing goes on.
- A family that cannot be tested is said, not left out in silence.
- It watches itself: a canary that fails now and then has to be found (fuzz/canary_watch.py).
"""

import contextlib
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from time import monotonic

import msgspec

from ..oracle.recompute import use_one_thread
from ..spec.errors import UnavailableError, UsageError
from ..spec.families import FAMILIES
from ..spec.models import Model
from ..store.campaigns import FINDINGS_FOLDER, Account, Campaign, Canary, Known, Noise, prepare_folder, write_account
from ..store.findings import Finding, Oracle, write_finding
from .canary_watch import CanaryWatch
from .known import Findings, Waiting, moment, now
from .pair import open_bench
from .profiles import SWARM, profile_of
from .reach import Atlas
from .reproduction import reproduction_script
from .shards import SHARD_PROGRAMS, Divergent, ShardResult, ShardTask, settled_heap, shard_model, shard_programs
from .signatures import enabling_operations
from .titles import title_of
from .trial import Bench, answers_of
from .workers import RERUNS, Here, Reduced, ReductionTask, Workers, open_pool

ROUND_SHARDS_MAX = 8
"""The first round is one shard, every other twice the one before, up to this many: what shows at once is known at once."""
WAVE_MAX = 8
"""Divergences that are reduced without waiting for what became of each other; a number of its own, whatever the number of jobs."""
ROUND_TRIALS_MAX = 8_000
"""With a budget of programs: after so many trials of reduction the next round begins. What waits may have its turn after it."""
LAST_TRIALS_MAX = 40_000
"""The same after the last round."""
REDUCTION_SECONDS_MAX = 20.0
AFTERTIME_SHARE = 0.25
"""How much longer than its time a campaign may go on reducing what nothing explains yet."""
ACCOUNT_SECONDS = 10.0
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
WARM_UP_PROGRAMS = 8
NOT_JUDGED_KEPT = 3


class Settings(msgspec.Struct, frozen=True):
    """What to run: a number of seconds, or of programs.

    against  the target that is the truth for the other, in place of the oracle
    inspect  compare the state rows that the target shows, too
    oracle   `engine`: the target's own fresh recompute is the truth
    steer    lead programs away from what is known already
    profile  which kind of programs to draw (fuzz/profiles.py)
    """

    target: str
    families: tuple[str, ...]
    seconds: float | None = None
    programs: int | None = None
    seed: int = 0
    jobs: int = 1
    out: Path | None = None
    against: str | None = None
    inspect: bool = False
    oracle: Oracle = "own"
    steer: bool = True
    profile: str = SWARM


class Progress(msgspec.Struct, frozen=True):
    """Where a campaign is; told after every shard and every step of a reduction."""

    seconds: float
    programs: int
    operations: int
    accepted_share: float
    findings: int
    last_finding_seconds: float | None
    unknown: int
    phase: str


def round_shards(number: int) -> range:
    """The shards of a round."""
    sizes = [min(ROUND_SHARDS_MAX, 1 << earlier) for earlier in range(number + 1)]
    return range(sum(sizes[:-1]), sum(sizes))


class _Campaign:
    def __init__(self, settings: Settings, bench: Bench, on_progress: Callable[[Progress], None], is_asked_to_end: threading.Event) -> None:
        self.settings = settings
        self.is_asked_to_end = is_asked_to_end
        self.bench = bench
        self.on_progress = on_progress
        self.started = monotonic()
        self.started_at = now()
        self.findings = Findings()
        self.noise: dict[str, Noise] = {}
        self.could_not_test: dict[str, str] = {}
        self.not_judged: list[tuple[str, str]] = []
        self.programs = self.operations = self.inspected = 0
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.verdicts: Counter[str] = Counter()
        self.atlas = Atlas()
        self.canary = Canary()
        self.seconds_generating = self.seconds_running = self.seconds_judging = self.seconds_reducing = 0.0
        self.last_finding_seconds: float | None = None
        self.phase = "noise"
        self.account_written = 0.0
        self.not_written = ""
        self.ended_by: str | None = None
        self.models: dict[Model, Noise] = {}
        self.known: list[Known] = []
        self.seconds_in_waves = 0.0  # of the campaign; `seconds_reducing` is summed over jobs

    # --- the budget --------------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        return monotonic() - self.started

    def shard_size(self, shard: int) -> int:
        """How many programs of a shard the budget still has."""
        whole = profile_of(self.settings.profile).shard_programs
        if self.settings.programs is None:
            return whole if self.seconds < (self.settings.seconds or 0.0) else 0
        return max(0, min(whole, self.settings.programs - shard * whole))

    # --- the work ----------------------------------------------------------------------------------------------------------

    def measure(self) -> tuple[str, ...]:
        """Measure the noise of every family and warm up, so that compiling is not taken from the budget; the families that can be tested."""
        warm_up = min(WARM_UP_PROGRAMS, profile_of(self.settings.profile).shard_programs)
        testable = []
        for family in self.settings.families:
            self.tell()
            try:
                for model in {shard_model(self.settings.seed, shard, (family,)) for shard in range(64)}:
                    noise = self.bench.noise(model)
                    self.models[model] = noise
                    if family not in self.noise or noise.tolerance > self.noise[family].tolerance:
                        self.noise[family] = noise
                self.bench.try_programs(shard_programs(self.settings.seed, 0, (family,), warm_up, profile=self.settings.profile))
                testable.append(family)
            except UnavailableError as error:
                self.could_not_test[family] = str(error)
        return tuple(testable)

    def workers(self) -> contextlib.AbstractContextManager[Workers]:
        """This process for one job, else a pool."""
        settings = self.settings
        if settings.jobs == 1:
            return contextlib.nullcontext(Here(self.bench, lambda trial: self.tell()))
        noise = msgspec.json.encode(list(self.models.items()))
        return open_pool(settings.jobs, settings.target, settings.against, settings.inspect, settings.oracle, noise)

    def rounds(self, workers: Workers, families: tuple[str, ...], watching: CanaryWatch) -> None:
        """Round after round until the budget is spent, and what is left to reduce."""
        for number in count():
            shards = round_shards(number)
            if not self.shard_size(shards.start):
                break
            self.learn(shards.start)
            for result in workers.shards(self.round_tasks(shards, families)):
                self.end_if_asked()
                self.merge(result)
                self.watch(watching, result)
                self.tell()
            self.reduce_within_share(workers)
        self.reduce_the_rest(workers)

    def round_tasks(self, shards: range, families: tuple[str, ...]) -> Iterator[ShardTask]:
        """The shards of a round that the budget still has, asked for when there is room for one."""
        contexts = self.known[-1].contexts if self.known else ()
        for shard in shards:
            size = self.shard_size(shard)
            if not size:
                return
            yield ShardTask(self.settings.seed, shard, families, size, contexts, self.settings.profile)

    def learn(self, first_shard: int) -> None:
        """What is known now is known to all programs from `first_shard` on."""
        contexts = self.findings.contexts() if self.settings.steer else ()
        if contexts and (not self.known or self.known[-1].contexts != contexts):
            self.known.append(Known(first_shard, contexts))

    def merge(self, result: ShardResult) -> None:
        """Take over a shard's result."""
        for divergent in result.divergent:
            self.findings.add_divergent(self.waiting(divergent))
        self.not_judged += result.not_judged[: NOT_JUDGED_KEPT - len(self.not_judged)]
        self.programs += result.programs
        self.operations += result.operations
        self.inspected += result.inspected
        for name, counts in result.outcomes.items():
            self.outcomes[name].update(counts)
        self.verdicts.update(result.verdicts)
        self.atlas.add(result.reached)
        self.seconds_generating += result.seconds_generating
        self.seconds_running += result.seconds_running
        self.seconds_judging += result.seconds_judging

    def watch(self, watching: CanaryWatch, result: ShardResult) -> None:
        """Try a shard of swarm on the canary, when it is its turn; it is as large as the campaign's where that has shards of the same size."""
        is_cut = profile_of(self.settings.profile).shard_programs == SHARD_PROGRAMS
        canary = watching.watch(self.settings.seed, result.shard, result.programs if is_cut else SHARD_PROGRAMS)
        self.canary = Canary(self.canary.programs + canary.programs, self.canary.seen + canary.seen, self.canary.why_not or canary.why_not)

    def waiting(self, divergent: Divergent) -> Waiting:
        trial = divergent.trial
        enabling = enabling_operations(trial.program, trial.verdict)
        return Waiting(self.programs + divergent.number + 1, self.seconds, trial, enabling)

    def reduce_within_share(self, workers: Workers) -> None:
        """Reduce what a round found, up to so many trials; with a budget of seconds while reduction has had less than half of the time."""
        budget = self.settings.seconds
        trials = 0
        while trials < ROUND_TRIALS_MAX if budget is None else self.seconds_in_waves <= 0.5 * self.seconds and self.seconds <= budget:
            tried = self.reduce_wave(workers, True)
            if not tried:
                return
            trials += tried

    def reduce_the_rest(self, workers: Workers) -> None:
        """After the last shard: reduce what nothing explains; with a budget of programs also what may hide another fault."""
        budget = self.settings.seconds
        deadline = self.seconds + max(5.0, AFTERTIME_SHARE * (budget or 0.0))
        trials = 0
        while trials < LAST_TRIALS_MAX if budget is None else self.seconds < deadline:
            tried = self.reduce_wave(workers, budget is None)
            if not tried:
                return
            trials += tried

    def reduce_wave(self, workers: Workers, with_explained: bool) -> int:
        """Reduce some divergences that wait, and keep the new findings, in their order; how many trials that took, 0: none waits."""
        most = WAVE_MAX if self.settings.seconds is None else self.settings.jobs
        wave = self.findings.next_wave(with_explained, most)
        if not wave:
            return 0
        self.phase = "reducing"
        started = monotonic()
        seconds_max = None if self.settings.seconds is None else REDUCTION_SECONDS_MAX
        families = tuple(family for family in FAMILIES if family in self.noise)
        tasks = [ReductionTask(waiting.trial, self.findings.known(waiting.coarse), families, seconds_max) for waiting in wave]
        trials = 0
        for waiting, reduced in zip(wave, workers.reductions(tasks), strict=True):
            trials += 1 + reduced.reduction.tried
            self.take(waiting, reduced)
            self.tell()
        self.seconds_in_waves += monotonic() - started
        self.phase = "fuzzing"
        self.tell()
        return trials

    def take(self, waiting: Waiting, reduced: Reduced) -> None:
        """Take over what a divergence was reduced to; keep it when it is a new finding."""
        self.seconds_reducing += reduced.seconds
        reduction = reduced.reduction
        for other in reduction.others:
            if other.signature is not None and not self.findings.enabling[other.signature]:
                enabling = enabling_operations(other.program, other.verdict)
                self.findings.add_divergent(Waiting(waiting.program_number, waiting.seconds, other, enabling, is_generated=False))
        if reduction.signature in self.findings.by_signature:
            self.findings.count(waiting, reduction.signature)
        else:
            self.keep(waiting, reduced)

    def keep(self, waiting: Waiting, reduced: Reduced) -> None:
        """Keep a reduced program that was run again as a finding."""
        reduction = reduced.reduction
        trial = reduction.trial
        finding = Finding(
            signature=reduction.signature,
            title=title_of(trial.program, trial.verdict, self.bench.against_name),
            target=self.settings.target,
            version=self.bench.version,
            family=trial.program.model.family,
            verdict=trial.verdict,
            program=trial.program,
            original=waiting.trial.program,
            documented=not reduction.undocumented_uses,
            undocumented_uses=reduction.undocumented_uses,
            reproduced=reduced.reproduced,
            reruns=RERUNS,
            found_after_programs=waiting.program_number,
            found_after_seconds=round(waiting.seconds, 2),
            first_seen=moment(self.started_at, waiting.seconds),
            last_seen=now(),
            log=trial.log,
            answers=answers_of(trial),
            against=self.bench.against_name,
            against_version=self.bench.against_version,
            oracle=self.settings.oracle,
            alternatives=reduction.alternatives,
        )
        self.findings.add_finding(waiting, finding, enabling_operations(trial.program, trial.verdict))
        self.last_finding_seconds = self.seconds
        script = reproduction_script(finding, trial) if finding.against is None else None  # a script has one engine only
        self.write(lambda folder: write_finding(folder / FINDINGS_FOLDER, finding, script))

    # --- the account -------------------------------------------------------------------------------------------------------

    def tell(self) -> None:
        accepted = sum(counts["accepted"] for counts in self.outcomes.values())
        unknown = self.verdicts["unknown"] + self.verdicts["harness-error"]
        findings = len(self.findings.by_signature)
        share = accepted / max(1, self.operations)
        progress = Progress(self.seconds, self.programs, self.operations, share, findings, self.last_finding_seconds, unknown, self.phase)
        self.on_progress(progress)
        if monotonic() - self.account_written > ACCOUNT_SECONDS:
            self.write(lambda folder: write_account(folder, self.account(False)))
            self.account_written = monotonic()

    def write(self, write_into: Callable[[Path], object]) -> None:
        """Write something into the campaign's folder, if it has one. A folder that cannot be written any more ends no campaign."""
        if self.settings.out is None or self.not_written:
            return
        try:
            write_into(self.settings.out)
        except UsageError as error:
            self.not_written = str(error)

    def account(self, complete: bool) -> Account:
        return Account(
            target=self.settings.target,
            version=self.bench.version,
            families=self.settings.families,
            seed=self.settings.seed,
            jobs=self.settings.jobs,
            started_at=self.started_at,
            seconds=round(self.seconds, 3),
            programs=self.programs,
            operations=self.operations,
            outcomes={name: dict(counts) for name, counts in sorted(self.outcomes.items())},
            verdicts=dict(self.verdicts),
            noise=self.noise,
            could_not_test=self.could_not_test,
            not_judged=tuple(self.not_judged),
            unreduced=self.findings.unreduced(),
            seconds_generating=round(self.seconds_generating, 3),
            seconds_running=round(self.seconds_running, 3),
            seconds_judging=round(self.seconds_judging, 3),
            seconds_reducing=round(self.seconds_reducing, 3),
            complete=complete,
            against=self.bench.against_name,
            against_version=self.bench.against_version,
            inspected=self.inspected if self.settings.inspect else None,
            oracle=self.settings.oracle,
            known=tuple(self.known),
            reach=self.atlas.reach(),
            canary=self.canary,
            profile=self.settings.profile,
            ended_by=self.ended_by,
        )

    def end_if_asked(self) -> None:
        """A signal's KeyboardInterrupt is lost where it is raised in a callback from native code: then it ends the campaign here."""
        if self.is_asked_to_end.is_set():
            raise KeyboardInterrupt

    def run(self) -> Campaign:
        complete = False
        try:
            families = self.measure()
            watching = CanaryWatch(self.bench, families)
            if families:
                watching.watch(self.settings.seed, 0, WARM_UP_PROGRAMS)  # compiling is not taken from the budget
            self.started = monotonic()  # the budget is for fuzzing
            self.phase = "fuzzing"
            if families:
                with self.workers() as workers:
                    self.rounds(workers, families, watching)
            complete = True
        except KeyboardInterrupt:
            pass  # the summary of what was done is still the answer
        except UnavailableError as error:  # so it is when the target cannot be used any more
            if not self.programs:
                raise
            self.ended_by = str(error)
        finally:
            account = self.account(complete)
            self.write(lambda folder: write_account(folder, account))
            self.write(self._bring_counts_up_to_date)
        return Campaign(account, tuple(self.findings.by_signature.values()), self.not_written)

    def _bring_counts_up_to_date(self, folder: Path) -> None:
        for finding in self.findings.by_signature.values():
            write_finding(folder / FINDINGS_FOLDER, finding, None)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[threading.Event]:
    """SIGTERM and SIGHUP end a campaign as Ctrl-C does: with its summary, and nothing left behind. The event is set by each of them."""
    is_asked_to_end = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        is_asked_to_end.set()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield is_asked_to_end
        return
    numbers = [number for number in _ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield is_asked_to_end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_campaign(
    settings: Settings, on_progress: Callable[[Progress], None] = lambda progress: None, bench: Bench | None = None
) -> Campaign:
    """Run a campaign to its end, or to Ctrl-C or a signal to end; the campaign says whether it is complete.

    bench  of the target, for one that has no name, or that was measured before; with one job. It is left open.

    Raises UsageError for settings that make no campaign, an unknown profile, or a folder that cannot be written, UnavailableError when the target cannot be used.
    """
    if not settings.families:
        raise UsageError("a campaign needs at least one family")
    if (settings.seconds is None) == (settings.programs is None):
        raise UsageError("a campaign needs either a number of seconds or a number of programs")
    profile_of(settings.profile)
    if settings.out is not None:
        prepare_folder(settings.out)
    use_one_thread()
    with (
        _ended_by_signals() as is_asked_to_end,
        contextlib.nullcontext(bench)
        if bench is not None
        else open_bench(settings.target, settings.against, settings.inspect, settings.oracle) as opened,
        settled_heap(),
    ):
        return _Campaign(settings, opened, on_progress, is_asked_to_end).run()
