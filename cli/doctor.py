"""`statedrift doctor`: is this installation one whose answers can be believed?

Rules
- For every target: it opens; the same program twice gives bitwise the same rows; its noise floor is measured; then a target that is
  broken on purpose is driven in the same way, and the fault must be found.
- A target that is not installed is said to be so and is no failure, unless it was asked for by name.
"""

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import msgspec

from ..fuzz.canary_watch import CANARY
from ..fuzz.generation import generate
from ..fuzz.trial import Bench, Trial
from ..reports.terminal import aligned, wrapped
from ..spec.errors import UnavailableError, UsageError
from ..spec.families import FAMILIES, family_of
from ..spec.models import Model
from ..spec.programs import Program, parse_program
from ..targets.registry import load_target, target_names
from . import failures
from .output import say

CANARY_PROGRAMS = 1600
"""About one in a hundred shows the canary's fault."""
_BATCH = 64
PACKAGES = ("statedrift", "numpy", "torch", "numba", "msgspec", "hypothesis", "llama-cpp-python", "transformers")

Result = Literal["ok", "failed", "not here"]


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    subject: str
    what: str
    result: Result
    detail: str


def doctor_command(target: str | None, families: Sequence[str] = ()) -> int:
    """Run all checks and print each as soon as it is known; the answer is the exit status. `families`: only these; empty: all.

    Raises UsageError for a family that our oracle does not have.
    """
    for family in families:
        if not family_of(Model(family)).is_modelled:
            raise UsageError(
                f"`{family}` is a family that only an engine's own recompute can judge, which doctor does not look at; "
                f"`statedrift fuzz --family {family} --oracle engine` measures its noise"
            )
    say(versions_text() + "\n")
    failed = False
    reachable = False
    for check in all_checks((target,) if target else target_names(), target is not None, families):
        failed |= check.result == "failed"
        reachable |= check.result == "ok" and check.what == "opens"
        say("\n".join(check_lines(check)) + "\n")
    if not reachable:
        say("no target can be used here\n")
    is_well = reachable and not failed
    say("\n" + ("all is well\n" if is_well else "something is wrong: see `failed` above\n"))
    return failures.OK if is_well else failures.COULD_NOT_TEST


def versions_text() -> str:
    """Python, the machine, and the packages that matter, as a table."""
    rows = [["python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"]]
    for package in PACKAGES:
        try:
            rows.append([package, version(package)])
        except PackageNotFoundError:
            rows.append([package, "not installed"])
    return "\n".join(aligned(rows, numbers_from=2)) + "\n"


def check_lines(check: Check) -> list[str]:
    """A check as lines of text."""
    return wrapped(f"{check.result:<8}  {check.subject}: {check.what}" + (f": {check.detail}" if check.detail else ""), " " * 12)


def all_checks(names: tuple[str, ...], named: bool, families: Sequence[str] = ()) -> Iterator[Check]:
    """The checks of these targets, then of the planted fault. `named`: the user asked for them, so that none may be missing."""
    for name in names:
        yield from target_checks(name, named, families)
    yield planted_fault_check()


def target_checks(name: str, named: bool, families: Sequence[str] = ()) -> Iterator[Check]:
    """Opening of one target; determinism and noise for each of its families, or for these of them."""
    try:
        target = load_target(name)
        bench = Bench(name)
    except UsageError:
        raise
    except UnavailableError as error:
        yield Check(name, "opens", "failed" if named else "not here", str(error))
        return
    with bench:
        yield Check(name, "opens", "ok", bench.version)
        for family in families or (own for own in target.families if own in FAMILIES):  # others only an engine's own recompute can judge
            if family in target.families:
                yield from _family_checks(bench, name, Model(family))
            else:
                yield Check(f"{name} {family}", "is run", "failed" if named else "not here", "the target does not have it")


def _family_checks(bench: Bench, name: str, model: Model) -> Iterator[Check]:
    subject = f"{name} {model.family}"
    try:
        noise = bench.noise(model)
        yield Check(subject, "noise", "ok", f"floor {noise.floor:.2g}, tolerance {noise.tolerance:.2g}, {noise.log_count} logs")
        first, second = bench.try_programs([probe_program(model)] * 2)
    except UnavailableError as error:
        yield Check(subject, "noise", "failed", str(error))
        return
    yield determinism_check(subject, first, second)


def probe_program(model: Model) -> Program:
    """Plain decoding of two sequences: nothing that a target may refuse."""
    return parse_program(f"model {model.family} seed={model.seed}; cache n_seq_max=2; decode 0:17; decode 1:9; decode 0:1; decode 0:3 1:2")


def determinism_check(subject: str, first: Trial, second: Trial) -> Check:
    """Whether two runs of one program gave bitwise the same rows, and answered at all."""
    what = "the same program twice gives the same rows"
    if first.run is None or second.run is None or not first.run.rows:
        return Check(subject, what, "failed", first.verdict.reason or "no rows came back")
    if first.run.rows == second.run.rows:
        return Check(subject, what, "ok", "")
    return Check(subject, what, "failed", "the rows differ; a divergence that is found here may not be found again")


def planted_fault_check() -> Check:
    """Whether the fault of a target that is wrong about once in a hundred programs is found."""
    subject, what = "planted fault", "is found"
    try:
        with Bench(CANARY) as bench:
            model = Model(bench.target.families[0])
            for start in range(0, CANARY_PROGRAMS, _BATCH):
                seeds = range(start, min(start + _BATCH, CANARY_PROGRAMS))
                for seed, trial in zip(seeds, bench.try_programs([generate(seed, model) for seed in seeds]), strict=True):
                    if trial.verdict.is_divergence:
                        return Check(
                            subject, what, "ok", f"{trial.verdict.kind} after {seed + 1} programs; about one in a hundred shows it"
                        )
    except UnavailableError as error:
        return Check(subject, what, "failed", str(error))
    return Check(subject, what, "failed", f"not in {CANARY_PROGRAMS} programs; no verdict of this installation means anything")
