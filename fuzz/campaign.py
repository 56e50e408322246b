"""A campaign: shards until the budget is spent, and every new divergence reduced, re-run and kept.

Rules
- Shards are merged in their order, so that the same seed gives the same programs on one process and on many.
- Fuzzing and reducing share the time: reduction never takes more than half of it while fuzzing goes on.
- Divergences that no known finding explains are reduced first; the others still get a share, for two faults can wear one coat.
- A family that cannot be tested is said, not left out in silence.
"""

import contextlib
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from time import monotonic

import msgspec

from ..oracle.recompute import use_one_thread
from ..spec.errors import UnavailableError, UsageError
from ..spec.models import Model
from ..store.campaigns import FINDINGS_FOLDER, Account, Campaign, Noise, prepare_folder, write_account
from ..store.findings import Finding, Oracle, write_finding
from .pair import open_bench
from .profiles import SWARM, profile_of
from .reduction import Reduction, reduce_trial
from .reproduction import reproduction_script
from .shards import (
    Divergent,
    ShardResult,
    run_shard,
    run_shard_in_worker,
    settled_heap,
    shard_model,
    shard_programs,
    start_worker,
)
from .signatures import enabling_operations
from .titles import title_of
from .trial import Bench, Trial, answers_of

RERUNS = 10
REDUCTION_SECONDS_MAX = 20.0
EXPLAINED_REDUCTIONS_MAX = 24
"""Reductions, for each coarse signature, of divergences that a known finding may explain."""
WAITING_MAX = 200
"""Divergences, for each coarse signature, that wait for their reduction."""
AFTERTIME_SHARE = 0.25
"""How much longer than its time a campaign may go on reducing what nothing explains yet."""
ACCOUNT_SECONDS = 10.0
WARM_UP_PROGRAMS = 8
NOT_JUDGED_KEPT = 3


class Settings(msgspec.Struct, frozen=True):
    """What to run: a number of seconds, or of programs.

    against  the target that is the truth for the other, in place of the oracle
    inspect  compare the state rows that the target shows, too
    oracle   `engine`: the target's own fresh recompute is the truth
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


class _Waiting(msgspec.Struct):
    """A divergence that waits for its reduction.

    is_generated  a program of the campaign; False for one that was met while another was reduced
    counted       the finding (fine signature) that it counts for
    """

    program_number: int
    seconds: float
    trial: Trial
    enabling: frozenset[str]
    is_generated: bool = True
    counted: str | None = None


class _Findings:
    """What is known, and what waits."""

    def __init__(self) -> None:
        self.by_signature: dict[str, Finding] = {}
        self.enabling: dict[str, list[tuple[frozenset[str], str]]] = defaultdict(list)  # coarse -> (operations, fine)
        self.waiting: dict[str, list[_Waiting]] = defaultdict(list)
        self.explained_reductions: Counter[str] = Counter()

    def explanation(self, coarse: str, enabling: frozenset[str]) -> str | None:
        """A known finding whose operations are all in the program."""
        return next((fine for known, fine in self.enabling[coarse] if known <= enabling), None)

    def add_divergent(self, waiting: _Waiting) -> None:
        """Count a divergence for a finding that may explain it, and let it wait for its turn."""
        coarse = waiting.trial.signature
        assert coarse is not None
        explained = self.explanation(coarse, waiting.enabling)
        if explained is not None:
            self.count(waiting, explained)
        if len(self.waiting[coarse]) < WAITING_MAX:
            self.waiting[coarse].append(waiting)

    def count(self, waiting: _Waiting, fine: str) -> None:
        """A program counts for one finding: the one that it was reduced to, until then the one that explains it."""
        if not waiting.is_generated or waiting.counted == fine:
            return
        self.discount(waiting)
        finding = self.by_signature[fine]
        self.by_signature[fine] = msgspec.structs.replace(finding, seen=finding.seen + 1, last_seen=_now())
        waiting.counted = fine

    def discount(self, waiting: _Waiting) -> None:
        """It was not that finding after all."""
        if waiting.counted is not None:
            finding = self.by_signature[waiting.counted]
            self.by_signature[waiting.counted] = msgspec.structs.replace(finding, seen=finding.seen - 1)

    def next_waiting(self, with_explained: bool) -> _Waiting | None:
        """The next divergence to reduce: the smallest that nothing explains, else (when asked) one that may hide another fault."""
        best: tuple[int, str, int] | None = None
        for coarse, entries in self.waiting.items():
            for place, entry in enumerate(entries):
                explained = self.explanation(coarse, entry.enabling) is not None
                if explained and (not with_explained or self.explained_reductions[coarse] >= EXPLAINED_REDUCTIONS_MAX):
                    continue
                rank = (1000 * (1 + self.explained_reductions[coarse]) if explained else 0) + len(entry.trial.program.operations)
                if best is None or rank < best[0]:
                    best = (rank, coarse, place)
        if best is None:
            return None
        _, coarse, place = best
        entry = self.waiting[coarse].pop(place)
        if self.explanation(coarse, entry.enabling) is not None:
            self.explained_reductions[coarse] += 1
        return entry

    def add_finding(self, coarse: str, finding: Finding, enabling: frozenset[str]) -> None:
        self.by_signature[finding.signature] = finding
        self.enabling[coarse].append((enabling, finding.signature))
        for waiting in self.waiting[coarse]:
            if waiting.counted is None and enabling <= waiting.enabling:
                self.count(waiting, finding.signature)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class _Campaign:
    def __init__(self, settings: Settings, bench: Bench, on_progress: Callable[[Progress], None]) -> None:
        self.settings = settings
        self.bench = bench
        self.on_progress = on_progress
        self.started = monotonic()
        self.started_at = _now()
        self.findings = _Findings()
        self.noise: dict[str, Noise] = {}
        self.could_not_test: dict[str, str] = {}
        self.not_judged: list[tuple[str, str]] = []
        self.programs = self.operations = self.inspected = 0
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.verdicts: Counter[str] = Counter()
        self.seconds_generating = self.seconds_running = self.seconds_judging = self.seconds_reducing = 0.0
        self.last_finding_seconds: float | None = None
        self.phase = "noise"
        self.account_written = 0.0
        self.models: dict[Model, Noise] = {}

    # --- the budget --------------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        return monotonic() - self.started

    def due_shards(self) -> Iterator[tuple[int, int]]:
        """Number and size of every next shard, until the budget is spent."""
        whole = profile_of(self.settings.profile).shard_programs
        for shard in count():
            if self.settings.programs is None:
                size = whole if self.seconds < (self.settings.seconds or 0.0) else 0
            else:
                size = min(whole, self.settings.programs - shard * whole)
            if size <= 0:
                return
            yield shard, size

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
                self.bench.try_programs(shard_programs(self.settings.seed, 0, (family,), warm_up, self.settings.profile))
                testable.append(family)
            except UnavailableError as error:
                self.could_not_test[family] = str(error)
        return tuple(testable)

    def shards(self, families: tuple[str, ...]) -> Iterator[ShardResult]:
        """Results in the order of the shards' numbers."""
        due = self.due_shards()
        if self.settings.jobs == 1:
            for shard, size in due:
                yield run_shard(self.bench, self.settings.seed, shard, families, size, self.settings.profile)
            return
        noise = msgspec.json.encode(list(self.models.items()))
        with ProcessPoolExecutor(
            self.settings.jobs,
            get_context("spawn"),
            start_worker,
            (self.settings.target, self.settings.against, self.settings.inspect, self.settings.oracle, noise),
        ) as pool:
            running: list[Future[bytes]] = []
            try:
                while True:
                    for shard, size in islice(due, 2 * self.settings.jobs - len(running)):
                        running.append(pool.submit(run_shard_in_worker, self.settings.seed, shard, families, size, self.settings.profile))
                    if not running:
                        break
                    yield msgspec.msgpack.decode(running.pop(0).result(), type=ShardResult)
            except BrokenProcessPool:
                raise UnavailableError(
                    "a worker process ended by itself or was killed, perhaps for memory; fewer --jobs need less of it"
                ) from None
            finally:
                for future in running:
                    future.cancel()

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
        self.seconds_generating += result.seconds_generating
        self.seconds_running += result.seconds_running
        self.seconds_judging += result.seconds_judging

    def waiting(self, divergent: Divergent) -> _Waiting:
        trial = divergent.trial
        enabling = enabling_operations(trial.program, trial.verdict)
        return _Waiting(self.programs + divergent.number + 1, self.seconds, trial, enabling)

    def reduce_within_share(self) -> None:
        """Reduce while reduction has had less than half of the time."""
        while self.seconds_reducing <= 0.5 * self.seconds and (waiting := self.findings.next_waiting(True)):
            self.reduce(waiting)
            if self.settings.seconds is not None and self.seconds > self.settings.seconds:
                return

    def reduce_the_rest(self) -> None:
        """After the last shard: reduce what nothing explains; with a budget of programs also what may hide another fault."""
        budget = self.settings.seconds
        aftertime = 120.0 if budget is None else max(5.0, AFTERTIME_SHARE * budget)
        deadline = self.seconds + aftertime
        while self.seconds < deadline and (waiting := self.findings.next_waiting(budget is None)):
            self.reduce(waiting)

    def reduce(self, waiting: _Waiting) -> None:
        """Reduce one divergence; keep it when it is a new finding."""
        self.phase = "reducing"
        started = monotonic()
        coarse = waiting.trial.signature
        assert coarse is not None
        known = frozenset(fine for _, fine in self.findings.enabling[coarse])
        again = self.bench.try_program(waiting.trial.program)
        if again.signature != coarse:  # it does not come back: keep it, with its reliability
            again = waiting.trial
        reduction = reduce_trial(again, self.bench, known, REDUCTION_SECONDS_MAX, lambda _: self.tell())
        for other in reduction.others:
            if other.signature is not None and not self.findings.enabling[other.signature]:
                enabling = enabling_operations(other.program, other.verdict)
                self.findings.add_divergent(_Waiting(waiting.program_number, waiting.seconds, other, enabling, is_generated=False))
        if reduction.signature in self.findings.by_signature:
            self.findings.count(waiting, reduction.signature)
        else:
            self.keep(waiting, coarse, reduction)
        self.seconds_reducing += monotonic() - started
        self.phase = "fuzzing"
        self.tell()

    def keep(self, waiting: _Waiting, coarse: str, reduction: Reduction) -> None:
        """Re-run a reduced program and keep it as a finding."""
        trial = reduction.trial
        reruns = self.bench.try_programs([trial.program] * RERUNS)
        now = _now()
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
            reproduced=sum(rerun.signature == trial.signature for rerun in reruns),
            reruns=RERUNS,
            found_after_programs=waiting.program_number,
            found_after_seconds=round(waiting.seconds, 2),
            first_seen=now,
            last_seen=now,
            log=trial.log,
            answers=answers_of(trial),
            against=self.bench.against_name,
            against_version=self.bench.against_version,
            oracle=self.settings.oracle,
        )
        self.findings.discount(waiting)  # the new finding has it for its first
        self.findings.add_finding(coarse, finding, enabling_operations(trial.program, trial.verdict))
        self.last_finding_seconds = self.seconds
        if self.settings.out is not None:
            script = reproduction_script(finding, trial) if finding.against is None else None  # a script has one engine only
            write_finding(self.settings.out / FINDINGS_FOLDER, finding, script)

    # --- the account -------------------------------------------------------------------------------------------------------

    def tell(self) -> None:
        accepted = sum(counts["accepted"] for counts in self.outcomes.values())
        unknown = self.verdicts["unknown"] + self.verdicts["harness-error"]
        findings = len(self.findings.by_signature)
        share = accepted / max(1, self.operations)
        progress = Progress(self.seconds, self.programs, self.operations, share, findings, self.last_finding_seconds, unknown, self.phase)
        self.on_progress(progress)
        if self.settings.out is not None and monotonic() - self.account_written > ACCOUNT_SECONDS:
            write_account(self.settings.out, self.account(False))
            self.account_written = monotonic()

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
            seconds_generating=round(self.seconds_generating, 3),
            seconds_running=round(self.seconds_running, 3),
            seconds_judging=round(self.seconds_judging, 3),
            seconds_reducing=round(self.seconds_reducing, 3),
            complete=complete,
            against=self.bench.against_name,
            against_version=self.bench.against_version,
            inspected=self.inspected if self.settings.inspect else None,
            oracle=self.settings.oracle,
            profile=self.settings.profile,
        )

    def run(self) -> Campaign:
        complete = False
        try:
            families = self.measure()
            self.started = monotonic()  # the budget is for fuzzing
            self.phase = "fuzzing"
            if families:
                for result in self.shards(families):
                    self.merge(result)
                    self.tell()
                    self.reduce_within_share()
                self.reduce_the_rest()
            complete = True
        except KeyboardInterrupt:
            pass  # the summary of what was done is still the answer
        finally:  # also when the target cannot be used any more
            account = self.account(complete)
            if self.settings.out is not None:
                write_account(self.settings.out, account)
                for finding in self.findings.by_signature.values():
                    self._rewrite(finding)
        return Campaign(account, tuple(self.findings.by_signature.values()))

    def _rewrite(self, finding: Finding) -> None:
        """Bring the counts of a stored finding up to date."""
        assert self.settings.out is not None
        if finding.seen > 1:
            write_finding(self.settings.out / FINDINGS_FOLDER, finding, None)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a campaign as Ctrl-C does: with its summary, and nothing left behind."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_campaign(settings: Settings, on_progress: Callable[[Progress], None] = lambda progress: None) -> Campaign:
    """Run a campaign to its end, or to Ctrl-C or a signal to end; the campaign says whether it is complete.

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
    with _ended_by_signals(), open_bench(settings.target, settings.against, settings.inspect, settings.oracle) as bench, settled_heap():
        return _Campaign(settings, bench, on_progress).run()
