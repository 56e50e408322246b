"""Hold a target to rows of the contract, program by program: what the tests of a conformance suite do.

Rules
- A row is a few programs that run and are judged as a replay does, so that a wrong output shows, too; the programs end with a decode of new
  tokens for every sequence that they name.
- A row counts only where the operation that it is about was asked of the target (and answered as the row says): else it is `NotAsked`, with
  the reason. A target that cannot be judged is `CouldNotTest`. Neither is a pass.
- A divergence is reduced and run again before it is said; it is a `Diverged`, which carries findings. Nothing is printed here.
- Noise is measured once for each suite and model, over fewer logs than a campaign does: a cache in development is measured at every start.
Source: docs/contract.md; docs/pytest.md.
"""

import contextlib
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..oracle.recompute import use_one_thread
from ..spec.configuration import CacheConfiguration
from ..spec.errors import EngineAbort, UnavailableError, UsageError
from ..spec.families import dimensions_of
from ..spec.models import Model
from ..spec.operations import OPEN, AnyOperation, Decode, Item, sequences_of
from ..spec.programs import Program, parse_program, program_line
from ..spec.target import Batch, Capabilities, Target
from ..spec.target import Session as OpenedSession
from ..spec.verdicts import OutcomeWord
from ..store.campaigns import Account, Campaign, Noise, is_mostly_known, is_silent
from ..store.findings import Finding, write_finding
from ..targets.plain import as_target
from .calibration import Logs
from .campaign import Settings, run_campaign
from .engine_child import Failed
from .execution import Run, Step
from .known import now
from .reproduction import command_script, reproduction_script
from .sandbox import Death
from .shards import light
from .signatures import enabling_name, fine_signature
from .titles import title_of
from .trial import OWN_MODULES, Bench, Trial, answers_of
from .workers import RERUNS, ReductionTask, reduce_task

NOISE_LOGS = Logs(40)
"""A fifth of a campaign's, of the same lengths."""
REDUCTION_SECONDS = 10.0
CLOSING_SALT = 9
"""Of the decodes that end a row's programs: tokens that none of them has."""


class NotAsked(Exception):  # noqa: N818  no error of anybody's
    """The contract does not ask this row of the target; the message says why."""


class CouldNotTest(Exception):  # noqa: N818
    """Nothing can be said of the target; the message says why."""


class Misused(Exception):  # noqa: N818
    """A bad argument was not a clear error; the message says which."""


class Shown(NamedTuple):
    """A finding as it can be seen again.

    replay       words of the command
    python_path  a folder that has to be importable for it; empty: none
    script       path of its repro.py; empty: it was not written, and `why_not` says why
    """

    finding: Finding
    replay: tuple[str, ...]
    python_path: str
    script: str
    why_not: str = ""


class Fuzzed(msgspec.Struct, frozen=True):
    """What a campaign of a suite came to.

    accepted        operations that were, of `operations`
    never_accepted  operations that were refused every time, though the target offers them
    not_offered     operations that it does not offer
    undocumented    divergences only in uses that the target's documentation does not promise
    """

    seconds: float
    programs: int
    operations: int
    accepted: int
    never_accepted: tuple[str, ...]
    not_offered: tuple[str, ...]
    undocumented: int = 0

    def as_property(self) -> dict[str, Any]:
        """As plain data, which goes from one process to another."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


class Diverged(Exception):  # noqa: N818
    """The target is wrong.

    fuzzed     what the campaign came to that found it; None: it was a row's program
    unreduced  divergent programs that no finding stands for: how many with which signature, and one of them where there is no finding
    """

    def __init__(self, message: str, shown: Sequence[Shown], fuzzed: Fuzzed | None = None, unreduced: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.shown = tuple(shown)
        self.fuzzed = fuzzed
        self.unreduced = tuple(unreduced)


class Place(NamedTuple):
    """Where a test runs, for commands that do it again.

    node    the test, as pytest is to be given it
    folder  the findings' folder
    """

    node: str
    folder: Path


# --- what is tested ------------------------------------------------------------------------------------------------------------


class Named(NamedTuple):
    """How a command names a target: `module:attribute`, or the name of an installed one; and the folder that has to be importable for it."""

    name: str
    python_path: str = ""


def _path_of_module(module_name: str) -> str | None:
    """The folder that has to be importable for a module; empty: none, as it is found anyway; None: it is found by no name."""
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if file is None or module_name == "__main__":
        return None
    if module_name.startswith(OWN_MODULES):
        return ""
    parts = list(Path(file).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    words = module_name.split(".")
    if parts[-len(words) :] != words:
        return None
    folder = Path(*parts[: -len(words)])
    if folder == Path.cwd() or "site-packages" in folder.parts:
        return ""
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


def _attribute_that_is(value: object, module_name: str) -> str | None:
    """The name under which a module holds a value."""
    module = sys.modules.get(module_name)
    qualified = getattr(value, "__qualname__", None)
    if isinstance(qualified, str) and qualified.isidentifier() and getattr(module, qualified, None) is value:
        return qualified
    return next((name for name, held in vars(module).items() if held is value and not name.startswith("_")), None) if module else None


def named(value: object, suite_module: str) -> Named | None:
    """How a command can name a target that a suite was given; None: it cannot."""
    if isinstance(value, str):
        path = _path_of_module(value.partition(":")[0]) if ":" in value else ""
        return Named(value, path or "")
    own_module = str(getattr(value, "__module__", None) or type(value).__module__)
    for module_name in dict.fromkeys((own_module, suite_module)):
        attribute, path = _attribute_that_is(value, module_name), _path_of_module(module_name)
        if attribute is not None and path is not None:
            return Named(f"{module_name}:{attribute}", path)
    return None


def opened_bench(value: object, suite_module: str) -> tuple[Bench, Named | None]:
    """A bench for what a suite was given: the name of a target, a target, a class of sessions, or a function that opens them.

    Raises CouldNotTest when it is none of these, or cannot be used.
    """
    use_one_thread()
    command = named(value, suite_module)
    target = value if isinstance(value, str) else as_target(value)
    if target is None:
        raise CouldNotTest(
            f"`target` is {value!r}; it must be a target, its name (module:attribute), a class of sessions, or a function that opens them"
        )
    if isinstance(target, Target) and target.isolated:
        if command is None:
            raise CouldNotTest(
                f"{target.name} runs in a child process, which finds it by name; make it an attribute of a module, or give its name"
            )
        target = command.name
    try:
        return Bench(target, noise_logs=NOISE_LOGS), command
    except (UsageError, UnavailableError) as error:
        raise CouldNotTest(str(error)) from None


def check_opens(target: Target, model: Model, configuration: CacheConfiguration) -> None:
    """Open a session and close it. Raises CouldNotTest that names the place, in the target's own code, where it raised."""
    try:
        target.open(model, configuration).close()
    except (UsageError, UnavailableError) as error:
        raise CouldNotTest(str(error)) from None
    except EngineAbort as error:
        raise CouldNotTest(f"{target.name} cannot be opened: the engine it stands for would have died: {error}") from None
    except (Exception, SystemExit) as error:
        raise CouldNotTest(f"{target.name} cannot be opened with {model.family}: {_where(error)}") from None


def _where(error: BaseException) -> str:
    """An exception of the target, with the places in its own code that it came through."""
    said = "".join(traceback.format_exception_only(error)).strip()
    own = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not Path(frame.filename).is_relative_to(Path(__file__).parents[1])
    ]
    return "\n".join([said, *(f"  {frame.filename}:{frame.lineno}: {frame.name}: {frame.line}" for frame in own)])


class Session(NamedTuple):
    """A target that is being held to the contract.

    bench     ready to try programs
    command   how a command names it
    noise     what was measured in this suite so far, and is added to
    """

    bench: Bench
    command: Named | None
    noise: dict[Model, Noise]

    def prepare(self, model: Model, configuration: CacheConfiguration) -> None:
        """See that the target can be judged on a model. Raises CouldNotTest."""
        bench = self.bench
        if model.family not in bench.target.families:
            runs = ", ".join(bench.target.families)
            raise CouldNotTest(
                f"{bench.target_name} does not run family {model.family}; it runs {runs}. Set `families` in the class to what it is to be tested on"
            )
        if not bench.target.isolated:
            check_opens(bench.target, model, configuration)
        bench.set_noise(self.noise)
        try:
            self.noise[model] = bench.noise(model)
        except (UnavailableError, UsageError) as error:
            raise CouldNotTest(str(error)) from None

    def capabilities(self, model: Model, configuration: CacheConfiguration) -> Capabilities:
        """Those of a fresh session. Raises CouldNotTest when it cannot be opened, NotAsked when it has no such configuration."""
        (opened,) = self.bench.run([Program(model, configuration, ())])
        match opened:
            case Run():
                return opened.capabilities
            case Failed(kind="usage", message=message):
                raise NotAsked(message)
            case Failed(message=message):
                raise CouldNotTest(f"{self.bench.target_name} cannot be opened: {message}")
            case Death(verdict=verdict):
                raise CouldNotTest(f"{self.bench.target_name} cannot be opened: {verdict.reason}")

    def shown(self, finding: Finding, place: Place) -> Shown:
        """A finding, written to the folder if it can be, and how to see it again."""
        text = program_line(finding.program)
        path = self.command.python_path if self.command else ""
        replay: tuple[str, ...] = ("pytest", place.node, "--statedrift-program", text)
        if self.command is not None:
            replay = ("statedrift", "replay", text, "--target", self.command.name)
        if finding.target == "llamacpp":
            script = reproduction_script(finding, self.bench.try_program(finding.program))
        else:
            script = command_script(finding, replay, path)
        try:
            written, why_not = str(write_finding(place.folder, finding, script) / "repro.py"), ""
        except UsageError as error:
            written, why_not = "", str(error)
        return Shown(finding, replay, path, written, why_not)


# --- rows ----------------------------------------------------------------------------------------------------------------------


class Conformance(NamedTuple):
    """A target, a model and a cache configuration that rows are held to.

    only           programs that are tried in place of a row's own; none: the row's
    undocumented   count divergences outside the target's documentation, too
    """

    session: Session
    model: Model
    cache: CacheConfiguration
    place: Place
    only: tuple[str, ...] = ()
    undocumented: bool = False

    def hold(
        self,
        operation: str,
        *texts: str,
        answer: OutcomeWord | None = None,
        demand: str | None = None,
        otherwise: str = "",
        needs: Sequence[str] = (),
        **keys: int | str | tuple[int, ...],
    ) -> None:
        """Hold the target to a row: programs that have to be right.

        operation  what the row is about, as in signatures ("share", "share-range"); it has to be sent in at least one of the programs
        texts      operations of a program each, without model and cache
        answer     what it has to have answered somewhere for the row to count
        demand     what the contract has to have asked of it somewhere (oracle.contract.DemandWord)
        otherwise  why not, where the operation was sent but `answer` or `demand` did not come
        needs      other operations that have to be sent in the same program
        keys       of the cache configuration; of several values each is tried
        Raises NotAsked, CouldNotTest or Diverged.
        """
        if self.only:
            self.judge(self.tried([parse_program(text) for text in self.only]))
            return
        programs, why_not = [], []
        values = [value if isinstance(value, tuple) else (value,) for value in keys.values()]
        for text, chosen in itertools.product(texts, itertools.product(*values)):
            try:
                programs.append(self.program(text, dict(zip(keys, chosen, strict=True))))
            except NotAsked as error:
                why_not.append(str(error))
        if not programs:
            raise NotAsked(why_not[0])
        trials = self.tried(programs)
        asked = [trial for trial in trials if not _why_not_sent(trial, (operation, *needs))]
        if not asked:
            raise NotAsked(_why_not_sent(trials[0], (operation, *needs)))
        self.judge(asked)
        steps = [step for trial in asked for step in _steps(trial, operation)]
        if not any(answer in (None, step.outcome.word) and demand in (None, step.demand) for step in steps):
            raise NotAsked(otherwise or f"in no program the contract asks this of the target ({operation}: {demand or answer})")

    def program(self, text: str, keys: dict[str, int | str]) -> Program:
        """A program with its closing decodes, cut to what a decode of the target takes. Raises NotAsked where the cache cannot be opened so, or
        has too few sequences."""
        operations = parse_program(f"model {self.model.family}; {text}").operations
        cache: CacheConfiguration = msgspec.structs.replace(self.cache, **keys)
        sequences = sorted(set().union(*map(sequences_of, operations)))
        if sequences and sequences[-1] >= cache.n_seq_max:
            raise NotAsked(f"it takes {sequences[-1] + 1} sequences, and the cache has {cache.n_seq_max}")
        closing = tuple(Decode((Item((sequence,), 1, CLOSING_SALT),)) for sequence in sequences)
        n_batch = self.session.capabilities(self.model, cache).n_batch
        return Program(self.model, cache, tuple(part for whole in operations + closing for part in _cut(whole, n_batch)))

    def tried(self, programs: Sequence[Program]) -> list[Trial]:
        """Trials of programs. Raises CouldNotTest when the target cannot be used any more."""
        try:
            return self.session.bench.try_programs(programs)
        except (UnavailableError, UsageError) as error:
            raise CouldNotTest(str(error)) from None

    def judge(self, trials: Sequence[Trial]) -> None:
        """See that all trials are right. Raises Diverged for the first that is wrong, CouldNotTest when nothing can be said of one, and NotAsked
        when some are wrong, but only in uses that the target's documentation does not promise."""
        for trial in trials:
            if not trial.verdict.is_judged:
                raise CouldNotTest(f"{trial.verdict.reason}\n  in {program_line(trial.program)}")
        undocumented = ""
        for trial in trials:
            if trial.verdict.is_divergence:
                finding = self.finding(trial)
                if finding.documented or self.undocumented:
                    raise Diverged(_sentence(finding), [self.session.shown(finding, self.place)])
                undocumented = f"wrong, but only in a use that its documentation does not promise ({', '.join(finding.undocumented_uses)})"
        if undocumented:
            raise NotAsked(undocumented)

    def refuse_bad_arguments(self) -> None:
        """Hold an opened session to G6: an id or a token out of range raises UsageError naming the argument, and no position changes.

        Raises NotAsked where the session is in another process, Misused for a session that does otherwise.
        """
        target = self.session.bench.target
        if target.isolated:
            raise NotAsked("the target runs in a child process, which never sends it a bad argument")
        with contextlib.closing(target.open(self.model, self.cache)) as session:
            before = [tuple(pair) for pair in session.positions()]
            for what, name, call in _bad_calls(session, self.cache.n_seq_max, dimensions_of(self.model)["n_vocab"]):
                said = _what_it_says(call)
                if f"`{name}" not in said:
                    raise Misused(f"{what} must be a UsageError that names `{name}`, and {said}")
                after = [tuple(pair) for pair in session.positions()]
                if after != before:
                    raise Misused(f"{what} changed the positions from {before} to {after}")

    def finding(self, trial: Trial) -> Finding:
        """A divergence as a finding: reduced and run again, but for a hang, where every smaller program may take as long."""
        bench = self.session.bench
        if trial.verdict.kind == "hang":
            end = len(trial.program.operations) if trial.verdict.operation_index is None else trial.verdict.operation_index + 1
            cut = msgspec.structs.replace(trial.program, operations=trial.program.operations[:end])
            return _finding(msgspec.structs.replace(trial, program=cut), trial, (), bench, 1, 1)
        reduced = reduce_task(bench, ReductionTask(light(trial), frozenset(), (), REDUCTION_SECONDS))
        return _finding(reduced.reduction.trial, trial, reduced.reduction.undocumented_uses, bench, reduced.reproduced, RERUNS)


def _steps(trial: Trial, operation: str) -> list[Step]:
    """The steps of a trial that are about an operation, as far as it came."""
    steps = trial.run.steps if trial.run is not None else ()
    return [step for each, step in zip(trial.program.operations, steps, strict=False) if enabling_name(each) == operation]


def _why_not_sent(trial: Trial, operations: Sequence[str]) -> str:
    """Why one of the operations was never sent, though the program came to it; empty: they were, or it went wrong before."""
    steps = trial.run.steps if trial.run is not None else ()
    undeclared = [step.reason for step in steps if step.demand == "undeclared"]
    for operation in operations:
        own = _steps(trial, operation)
        if own and all(step.demand in ("skip", "undeclared") for step in own):
            return [*undeclared, *(step.reason for step in own)][0]
    return ""


def _bad_calls(session: OpenedSession, n_seq_max: int, n_vocab: int) -> list[tuple[str, str, Callable[[], object]]]:
    """Calls with one bad argument each: what they are, the argument, the call."""

    def decode(token: int, sequence: int) -> Callable[[], object]:
        one = Batch(np.array([token], np.int32), np.array([0], np.int32), ((sequence,),), np.array([True]), "all")
        return lambda: session.decode(one)

    return [
        (f"a decode of token {n_vocab}", "tokens", decode(n_vocab, 0)),
        ("a decode of token -1", "tokens", decode(-1, 0)),
        (f"a decode for sequence {n_seq_max}", "sequence", decode(0, n_seq_max)),
        (f"a remove of sequence {n_seq_max}", "sequence", lambda: session.remove(n_seq_max, 0, OPEN)),
        ("a remove of sequence -1", "sequence", lambda: session.remove(-1, 0, OPEN)),
    ]


def _what_it_says(call: Callable[[], object]) -> str:
    """What a call came to, in words; a UsageError's own."""
    try:
        answer = call()
    except UsageError as error:
        return f"it said: {error}"
    except Exception as error:
        return f"it raised {type(error).__name__}: {error}"
    word = getattr(answer, "word", None) or getattr(getattr(answer, "outcome", None), "word", "something else")
    return f"it was answered {word}"


def _sentence(finding: Finding) -> str:
    return f"{finding.verdict.kind}: {finding.title}: {program_line(finding.program)}"


def _cut(operation: AnyOperation, n_batch: int) -> list[AnyOperation]:
    """A decode as several, where the target takes fewer tokens at once."""
    if not isinstance(operation, Decode) or sum(item.token_count for item in operation.items) <= n_batch:
        return [operation]
    parts: list[AnyOperation] = []
    for item in operation.items:
        for start in range(0, item.token_count, n_batch):
            tokens = item.tokens and item.tokens[start : start + n_batch]
            count = min(n_batch, item.token_count - start)
            parts.append(msgspec.structs.replace(operation, items=(msgspec.structs.replace(item, token_count=count, tokens=tokens),)))
    return parts


def _finding(trial: Trial, original: Trial, uses: tuple[str, ...], bench: Bench, reproduced: int, reruns: int) -> Finding:
    seen = now()
    return Finding(
        signature=fine_signature(bench.label, trial.program, trial.verdict),
        title=title_of(trial.program, trial.verdict),
        target=bench.target_name,
        version=bench.version,
        family=trial.program.model.family,
        verdict=trial.verdict,
        program=trial.program,
        original=original.program,
        documented=not uses,
        undocumented_uses=uses,
        reproduced=reproduced,
        reruns=reruns,
        found_after_programs=1,
        found_after_seconds=0.0,
        first_seen=seen,
        last_seen=seen,
        log=trial.log,
        answers=answers_of(trial),
    )


# --- a campaign ----------------------------------------------------------------------------------------------------------------


def fuzz(session: Session, families: Sequence[str], seconds: float, seed: int, place: Place, undocumented: bool) -> Fuzzed:
    """A campaign of so many seconds, in this process. Raises Diverged, CouldNotTest, or KeyboardInterrupt when it was interrupted."""
    try:
        campaign = run_campaign(Settings(session.bench.target_name, tuple(families), seconds, seed=seed), bench=session.bench)
    except (UsageError, UnavailableError) as error:
        raise CouldNotTest(str(error)) from None
    account = campaign.account
    if not account.complete and account.ended_by is None:
        raise KeyboardInterrupt
    fuzzed = _fuzzed(campaign)
    counted = sorted(
        (finding for finding in campaign.findings if finding.documented or undocumented), key=lambda found: found.found_after_programs
    )
    unreduced = [f"{left.programs} with {left.signature}" + (f": {left.program}" if not counted else "") for left in account.unreduced]
    if counted or unreduced:
        shown = [session.shown(finding, place) for finding in counted]
        raise Diverged("; ".join([*map(_sentence, counted), *unreduced]), shown, fuzzed, unreduced)
    if reasons := why_not_tested(account):
        raise CouldNotTest("\n".join(reasons))
    return fuzzed


def _fuzzed(campaign: Campaign) -> Fuzzed:
    account = campaign.account
    not_offered = account.reach.not_offered if account.reach is not None else ()
    sent = {name: counts for name, counts in account.outcomes.items() if name not in not_offered and set(counts) - {"skipped"}}
    return Fuzzed(
        seconds=account.seconds,
        programs=account.programs,
        operations=account.operations,
        accepted=sum(counts.get("accepted", 0) for counts in account.outcomes.values()),
        never_accepted=tuple(name for name, counts in sent.items() if not counts.get("accepted") and not counts.get("cancelled")),
        not_offered=not_offered,
        undocumented=sum(not finding.documented for finding in campaign.findings),
    )


def why_not_tested(account: Account) -> list[str]:
    """Why a campaign without a divergence says nothing, reason by reason; none: it says that the target was right."""
    reasons = list(account.could_not_test.values())
    reasons += [account.ended_by] if account.ended_by is not None else []
    if account.verdicts.get("harness-error") or not is_mostly_known(account.verdicts) or not account.verdicts.get("ok"):
        reasons += [f"{reason}\n  in {text}" for reason, text in account.not_judged] or ([] if reasons else ["no program was judged"])
    if is_silent(account.canary):
        reasons.append("the canary, a target that is wrong on purpose, stayed silent: that nothing was found means nothing")
    return reasons
