"""A campaign: rounds of shards until the budget is spent, and every new divergence reduced, re-run and kept.

Rules
- Shards come in rounds of fixed sizes and are merged in their order; what a round found is reduced before the next one, whose programs are
  steered away from what is known by then: a fault that was found is not found over and over while others wait.
- A budget of programs makes a campaign a pure function of its settings without `jobs`: limits of reduction are counted in trials.
  With a budget of seconds time cuts, too; the account says what was known when.
- Fuzzing and reducing share the time: reduction never takes more than half of it while fuzzing goes on.
- A family that cannot be tested is said, not left out in silence.
- It watches itself: a canary that fails now and then has to be found (fuzz/canary_watch.py).
- What a shard or a reduction came to is taken over and kept as a whole (fuzz/continuing.py). A campaign goes on where it was: programs are
  numbered through, the ones before `position` were merged, and the next is the first that was never used.
"""

import contextlib
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from ..oracle.recompute import use_one_thread
from ..spec.errors import UnavailableError, UsageError
from ..spec.families import FAMILIES
from ..spec.models import Model
from ..store.campaigns import Account, Campaign, Canary, Identity, Kept, Known, Noise, Replayed
from ..store.findings import Finding, Oracle
from ..store.keeping import Store
from ..store.records import ShardRecord, Summary, divergent_text
from ..store.statistics import Statistics, write_statistics
from .canary_watch import CanaryWatch
from .cluster import check_address, connected, open_cluster
from .continuing import Keeper, check_same
from .corpus import Corpus
from .ending import Ending, ended_by_signals
from .known import Findings, Waiting, moment, now
from .pair import open_bench
from .profiles import SWARM, profile_of
from .progress import BEAT_SECONDS, FIRST_BEAT_SECONDS, Progress, Watch, beating
from .reach import Atlas
from .reproduction import reproduction_script
from .shards import SHARD_PROGRAMS, Opening, ShardResult, ShardTask, light, settled_heap, shard_model, shard_programs
from .signatures import coarse_signature, enabling_operations
from .titles import title_of
from .trial import Bench, Trial, answers_of
from .workers import RERUNS, Here, Reduced, ReductionTask, Workers, open_pool

if TYPE_CHECKING:
    from distributed import Client

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
WARM_UP_PROGRAMS = 8
NOT_JUDGED_KEPT = 3


class Settings(msgspec.Struct, frozen=True):
    """What to run: a number of seconds, or of programs.

    against  the target that is the truth for the other, in place of the oracle
    inspect  compare the state rows that the target shows, too
    oracle   `engine`: the target's own fresh recompute is the truth
    steer    lead programs away from what is known already
    profile  which kind of programs to draw (fuzz/profiles.py)
    scheduler  of the Dask cluster that does the work in place of `jobs` processes here
    against_library  another build of the target: what it does, too, is no finding (fuzz/two_builds.py)
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
    scheduler: str | None = None
    against_library: str | None = None


def round_of(shard: int) -> range:
    """The shards of the round that a shard belongs to."""
    start, size = 0, 1
    while shard >= start + size and size < ROUND_SHARDS_MAX:
        start, size = start + size, min(ROUND_SHARDS_MAX, 2 * size)
    start += (shard - start) // size * size
    return range(start, start + size)


class _Campaign:
    def __init__(
        self,
        settings: Settings,
        bench: Bench,
        on_progress: Callable[[Progress], None],
        ending: Ending,
        store: Store | None,
        client: "Client | None" = None,
        is_known: Callable[[Finding], bool] = lambda finding: False,
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.ending = ending
        self.bench = bench
        self.on_progress = on_progress
        self.client = client
        self.is_known = is_known
        self.on_begin = on_begin
        self.started = monotonic()
        self.started_at = self.run_started_at = now()
        self.earlier_seconds = 0.0  # of earlier runs of the command
        self.position = self.start = 0  # programs that were drawn and merged; as many at the start of this run
        self.learned: int | None = None  # the shard from which on what was known then is known
        self.runs = 1
        self.jobs = settings.jobs
        self.replayed: Replayed | None = None
        self.findings = Findings()
        self.corpus = Corpus()
        self.store = store
        self.keeper = Keeper(store, self.findings, self.corpus)
        self.noise: dict[str, Noise] = {}
        self.could_not_test: dict[str, str] = {}
        self.not_judged: list[tuple[str, str]] = []
        self.programs = self.operations = self.inspected = 0
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.verdicts: Counter[str] = Counter()
        self.also_in_old: Counter[str] = Counter()
        self.atlas = Atlas()
        self.canary = Canary()
        self.seconds_generating = self.seconds_running = self.seconds_judging = self.seconds_reducing = 0.0
        self.last_finding_seconds: float | None = None
        self.phase = "noise"
        self.ended_by: str | None = None
        self.models: dict[Model, Noise] = {}
        self.testable: tuple[str, ...] = ()
        self.known: list[Known] = []
        self.seconds_in_waves = 0.0  # of the campaign; `seconds_reducing` is summed over jobs

    # --- the budget --------------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Of this run of the command, as the budget is."""
        return monotonic() - self.started

    @property
    def whole(self) -> int:
        """Programs of a whole shard."""
        return profile_of(self.settings.profile).shard_programs

    @property
    def is_between_rounds(self) -> bool:
        """Whether all shards of a round were merged, and none of the next."""
        return self.position == round_of(self.position // self.whole).start * self.whole

    @property
    def is_budget_left(self) -> bool:
        """Whether there is time, or a program, for more."""
        if self.settings.programs is None:
            return self.seconds < (self.settings.seconds or 0.0)
        return self.position < self.start + self.settings.programs

    def shard_first(self, shard: int) -> int:
        """The first program of a shard that was never used: an earlier run may have had a part of it."""
        return max(0, self.start - shard * self.whole)

    def shard_size(self, shard: int) -> int:
        """How many programs of a shard that this run has not begun yet the budget has."""
        left = self.whole - self.shard_first(shard)
        if self.settings.programs is None:
            return left if self.is_budget_left else 0
        return max(0, min(left, self.start + self.settings.programs - shard * self.whole - self.shard_first(shard)))

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
        """This process for one job, else a pool, or a cluster."""
        settings = self.settings
        if settings.jobs == 1 and self.client is None:
            return contextlib.nullcontext(Here(self.bench, lambda trial: self.tell()))
        noise = msgspec.json.encode(list(self.models.items()))
        opening = Opening(settings.target, settings.against, settings.inspect, settings.oracle, noise, settings.against_library)
        if self.client is not None and settings.scheduler is not None:
            return open_cluster(self.client, settings.scheduler, opening, (self.bench.version, self.bench.against_version))
        return open_pool(settings.jobs, opening)

    def rounds(self, workers: Workers, families: tuple[str, ...], watching: CanaryWatch) -> None:
        """Round after round until the budget is spent, and what is left to reduce."""
        if self.is_between_rounds:
            self.reduce_within_share(workers)  # an earlier run was ended while it did
        while self.is_budget_left:
            shard = self.position // self.whole
            shards = round_of(shard)
            if self.is_between_rounds:
                self.learn(shard)
            ahead = self.round_tasks(round_of(shards.stop), families)  # right unless this round finds something
            for result in workers.shards(self.round_tasks(shards[shard - shards.start :], families), ahead):
                self.ending.end_if_asked()
                canary = self.watch(watching, result)
                with self.ending.held():
                    self.canary = canary
                    self.merge(result)
                    self.save()
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
            yield ShardTask(self.settings.seed, shard, families, size, contexts, self.settings.profile, self.shard_first(shard))

    def learn(self, first_shard: int) -> None:
        """What is known now is known to all programs from `first_shard` on; also when a run that was killed had come so far."""
        if self.learned == first_shard:
            return
        self.learned = first_shard
        contexts = self.findings.contexts() if self.settings.steer else ()
        if contexts and (not self.known or self.known[-1].contexts != contexts):
            self.known.append(Known(first_shard, contexts))
        self.save()

    def merge(self, result: ShardResult) -> None:
        """Take over a shard's result."""
        for divergent in result.divergent:
            self.findings.add_divergent(self.waiting(self.position + divergent.number + 1, divergent.trial))
        position = self.position
        self.position += result.programs
        self.not_judged += result.not_judged[: NOT_JUDGED_KEPT - len(self.not_judged)]
        self.programs += result.programs
        self.operations += result.operations
        self.inspected += result.inspected
        for name, counts in result.outcomes.items():
            self.outcomes[name].update(counts)
        self.verdicts.update(result.verdicts)
        self.also_in_old.update(result.also_in_old)
        self.atlas.add(result.reached)
        self.corpus.add(result.examples)
        self.seconds_generating += result.seconds_generating
        self.seconds_running += result.seconds_running
        self.seconds_judging += result.seconds_judging
        if result.summary is not None and result.programs:
            self.keeper.add_shard(self.record(position, result, result.summary))

    def record(self, position: int, result: ShardResult, summary: Summary) -> ShardRecord:
        """What is kept of a shard whose first program was the campaign's number `position`, counted from 0."""
        family = shard_model(self.settings.seed, result.shard, self.testable).family
        divergent = divergent_text((own.number, own.trial.signature or "") for own in result.divergent)
        seconds = round(self.earlier_seconds + self.seconds, 3)
        return ShardRecord(
            position, result.shard, position - result.shard * self.whole, family, result.programs, seconds,
            self.atlas.reached_count, len(self.findings.by_signature), divergent, *summary,
        )  # fmt: skip

    def watch(self, watching: CanaryWatch, result: ShardResult) -> Canary:
        """Try a shard of swarm on the canary, when it is its turn; it is as large as the campaign's where that has shards of the same size.
        The answer is what is known of the canary then."""
        if self.shard_first(result.shard):
            return self.canary  # the run that had its first part did
        canary = watching.watch(self.settings.seed, result.shard, result.programs if self.whole == SHARD_PROGRAMS else SHARD_PROGRAMS)
        return Canary(self.canary.programs + canary.programs, self.canary.seen + canary.seen, self.canary.why_not or canary.why_not)

    def waiting(self, program_number: int, trial: Trial, is_generated: bool = True) -> Waiting:
        """A divergence that was met now."""
        enabling = enabling_operations(trial.program, trial.verdict)
        first_seen = moment(self.run_started_at, self.seconds)
        return Waiting(program_number, self.earlier_seconds + self.seconds, first_seen, trial, enabling, is_generated)

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
        most = WAVE_MAX if self.settings.seconds is None else workers.count
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
            with self.ending.held():
                self.take(waiting, reduced)
                self.save()
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
                met = Waiting(waiting.program_number, waiting.seconds, waiting.first_seen, other, enabling, is_generated=False)
                self.findings.add_divergent(met)
        if reduction.signature in self.findings.by_signature:
            self.findings.count(waiting, reduction.signature)
            self.meet_again(reduction.signature)
        else:
            self.keep(waiting, reduced)
        self.findings.finish(waiting)

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
            first_seen=waiting.first_seen,
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
        self.keeper.scripts[finding.signature] = script

    # --- the account -------------------------------------------------------------------------------------------------------

    def tell(self) -> None:
        accepted = sum(counts["accepted"] for counts in self.outcomes.values())
        unknown = self.verdicts["unknown"] + self.verdicts["harness-error"]
        findings = len(self.findings.by_signature)
        share = accepted / max(1, self.operations)
        known = sum(map(self.is_known, self.findings.by_signature.values()))
        crashes = self.verdicts["crash"] + self.verdicts["hang"]
        last = self.last_finding_seconds
        self.on_progress(
            Progress(self.seconds, self.programs, self.operations, share, findings, last, unknown, self.phase, known, crashes, self.jobs)
        )

    def save(self, account: Account | None = None) -> None:
        """Keep all of this, in one transaction; `account`: the last one of this run."""
        if self.store is not None:
            run = (round(self.seconds, 3), self.position - self.start, None if account is None else now())
            self.keeper.save(account or self.account(False), self.position, self.learned, self.atlas.abilities, run)

    def account(self, complete: bool) -> Account:
        """All but `unreduced`, which follows from what waits."""
        return Account(
            target=self.settings.target,
            version=self.bench.version,
            families=self.settings.families,
            seed=self.settings.seed,
            jobs=self.jobs,
            started_at=self.started_at,
            seconds=round(self.earlier_seconds + self.seconds, 3),
            programs=self.programs,
            operations=self.operations,
            outcomes={name: dict(counts) for name, counts in sorted(self.outcomes.items())},
            verdicts=dict(self.verdicts),
            noise=self.noise,
            could_not_test=self.could_not_test,
            not_judged=tuple(self.not_judged),
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
            runs=self.runs,
            replayed=self.replayed,
            against_library=self.bench.old_version,
            also_in_old=dict(sorted(self.also_in_old.items())),
            machine=machine_words(),
        )

    def run(self) -> Campaign:
        complete = False
        self.begin()
        try:
            families = self.testable = self.measure()
            watching = CanaryWatch(self.bench, families)
            if families:
                watching.watch(self.settings.seed, 0, WARM_UP_PROGRAMS)  # compiling is not taken from the budget
            self.started, self.run_started_at = monotonic(), now()  # the budget is for fuzzing
            if families and self.replayed is not None:
                self.replay(self.replayed, families)
            self.phase = "fuzzing"
            if families:
                opening = monotonic()
                with self.workers() as workers:
                    self.jobs = workers.count
                    self.started += monotonic() - opening  # neither is opening the target elsewhere
                    self.rounds(workers, families, watching)
            complete = True
        except KeyboardInterrupt:
            self.ending.has_begun = True  # the summary of what was done is still the answer
        except UnavailableError as error:  # so it is when the target cannot be used any more
            if self.position == self.start:
                raise
            self.ended_by = str(error)
        finally:
            self.ending.has_begun = True
            account = self.account(complete)
            self.save(account)
            self.keeper.write_folders()
        account = msgspec.structs.replace(account, unreduced=self.findings.unreduced())
        return Campaign(account, tuple(self.findings.by_signature.values()), self.keeper.not_written)

    # --- going on ----------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a run of the command, after what the folder holds, if it holds something. Raises UsageError when it cannot be written."""
        settings, store = self.settings, self.store
        if store is None:
            return
        if store.kept is not None:
            self.take_up(store.kept)
        store.begin(identity_of(settings), self.run_started_at, settings.jobs, settings.seconds, settings.programs, self.bench.version)
        self.save()
        self.keeper.write_folders()
        self.on_begin()

    def take_up(self, kept: Kept) -> None:
        """Go on from what was kept."""
        self.keeper.take_up(kept)
        account = kept.account
        self.position = self.start = kept.tally.position
        self.learned = kept.tally.learned
        self.started_at, self.earlier_seconds, self.runs = account.started_at, account.seconds, account.runs + 1
        self.programs, self.operations, self.inspected = account.programs, account.operations, account.inspected or 0
        for name, counts in account.outcomes.items():
            self.outcomes[name].update(counts)
        self.verdicts.update(account.verdicts)
        self.also_in_old.update(account.also_in_old)
        self.not_judged = list(account.not_judged)
        self.known = list(account.known)
        self.canary = account.canary or Canary()
        if account.reach is not None:
            self.atlas.take_up(account.reach, kept.tally.abilities)
        self.seconds_generating, self.seconds_running = account.seconds_generating, account.seconds_running
        self.seconds_judging, self.seconds_reducing = account.seconds_judging, account.seconds_reducing
        self.replayed = Replayed(version_before=account.version if account.version != self.bench.version else None)

    def replay(self, replayed: Replayed, families: tuple[str, ...]) -> None:
        """Try again what is known: every finding once, then the corpus. With a budget of seconds it counts, and ends this, too."""
        self.phase = "replaying"
        for finding in tuple(self.findings.by_signature.values()):
            if not self.is_budget_left or finding.family not in families:
                continue
            self.bench.renew()
            trial = self.bench.try_program(finding.program)
            with self.ending.held():
                self.take_replay(finding, trial)
                self.save()
            self.tell()
        for batch in self.corpus.batches(families, self.whole):
            if not self.is_budget_left:
                return
            trials = self.bench.try_programs(batch)
            with self.ending.held():
                self.take_corpus(trials)
                self.save()
            self.tell()

    def take_replay(self, finding: Finding, trial: Trial) -> None:
        """Take over what a finding's program came to now; another divergence than its own waits, unless there is a finding of its kind."""
        assert self.replayed is not None
        if not trial.verdict.is_judged:
            return  # killed from outside, perhaps: that says nothing of the finding
        gone = self.replayed.gone
        if trial.signature == coarse_signature(self.bench.label, finding.program, finding.verdict):
            self.findings.see_again(finding.signature)
        else:
            gone = tuple(sorted((*gone, finding.signature)))
            if trial.signature is not None and not self.findings.enabling[trial.signature]:
                self.findings.add_divergent(self.waiting(self.position, light(trial), is_generated=False))
        self.replayed = msgspec.structs.replace(self.replayed, findings=self.replayed.findings + 1, gone=gone)

    def meet_again(self, signature: str) -> None:
        """A finding whose own program did not show it any more was found by another."""
        if self.replayed is not None and signature in self.replayed.gone:
            self.replayed = msgspec.structs.replace(self.replayed, gone=tuple(gone for gone in self.replayed.gone if gone != signature))

    def take_corpus(self, trials: list[Trial]) -> None:
        """Take over what programs of the corpus came to now; one that was right before and is not any more counts as one of the campaign's."""
        assert self.replayed is not None
        divergent = [light(trial) for trial in trials if trial.verdict.is_divergence]
        for trial in divergent:
            self.programs += 1
            self.verdicts[trial.verdict.kind] += 1
            self.findings.add_divergent(self.waiting(self.position, trial))
        self.replayed = msgspec.structs.replace(
            self.replayed,
            corpus=self.replayed.corpus + len(trials),
            corpus_diverged=self.replayed.corpus_diverged + len(divergent),
        )


def machine_words() -> str:
    """The machine that this runs on, in words: architecture, cores, system."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def identity_of(settings: Settings) -> Identity:
    """What makes a campaign the same one, in another run of the command."""
    return Identity(**{name: getattr(settings, name) for name in Identity.__struct_fields__})


def run_campaign(
    settings: Settings,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_beat: Callable[[Statistics], None] = lambda statistics: None,
    is_known: Callable[[Finding], bool] = lambda finding: False,
    bench: Bench | None = None,
    on_begin: Callable[[], None] = lambda: None,
) -> Campaign:
    """Run a campaign to its end, or to Ctrl-C or a signal to end; the campaign says whether it is complete. In a folder that holds one of the
    same settings it goes on; the budget is for this run alone.

    on_progress  is told where it is after every shard and every step of a reduction
    on_beat      is told so from another thread every BEAT_SECONDS, whatever is going on; `stats.json` is written then, and at the end
    is_known     whether a finding is one of a baseline; it is only counted apart
    bench        of the target, for one that has no name, or that was measured before; with one job. It is left open
    on_begin     is called once the campaign's folder, if it has one, is its own

    Raises UsageError for settings that make no campaign, an unknown profile, or a folder that cannot be written, holds something else or is
    in use; UnavailableError when the target cannot be used.
    """
    if not settings.families:
        raise UsageError("a campaign needs at least one family")
    if (settings.seconds is None) == (settings.programs is None):
        raise UsageError("a campaign needs either a number of seconds or a number of programs")
    profile_of(settings.profile)
    if settings.scheduler is not None:
        check_address(settings.scheduler)
    use_one_thread()
    watch = Watch()

    def tell(progress: Progress) -> None:
        watch.tell(progress)
        on_progress(progress)

    def beat() -> None:
        statistics = watch.statistics()
        on_beat(statistics)
        if statistics.phase != "starting":  # a campaign that cannot start leaves its folder as it was
            _keep(settings.out, statistics)

    with (
        _opened(settings) as store,
        ended_by_signals() as ending,
        beating(beat, FIRST_BEAT_SECONDS, BEAT_SECONDS),
        connected(settings.scheduler) if settings.scheduler is not None else contextlib.nullcontext() as client,
        _given_or_opened(bench, settings) as own_bench,
        settled_heap(),
    ):
        campaign = _Campaign(settings, own_bench, tell, ending, store, client, is_known, on_begin).run()
    _keep(settings.out, watch.statistics("done", campaign.account.complete))
    return campaign


def _given_or_opened(bench: Bench | None, settings: Settings) -> contextlib.AbstractContextManager[Bench]:
    if bench is not None:
        return contextlib.nullcontext(bench)
    return open_bench(settings.target, settings.against, settings.inspect, settings.oracle, settings.against_library)


@contextlib.contextmanager
def _opened(settings: Settings) -> Iterator[Store | None]:
    """The campaign's folder, for this process alone."""
    if settings.out is None:
        yield None
        return
    with contextlib.closing(Store(settings.out)) as store:
        if store.kept is not None:
            check_same(store.kept.identity, identity_of(settings), settings.out)
        yield store


def _keep(out: Path | None, statistics: Statistics) -> None:
    """Write `stats.json`; a folder that cannot be written any more is said by the campaign itself."""
    if out is not None:
        with contextlib.suppress(UsageError):
            write_statistics(out, statistics)
