"""`statedrift fuzz`: a campaign, its progress and its summary.

Rules
- Status 1: divergences that count (`--undocumented` counts all); 2: something could not be tested; 0: clean.
- An interrupt ends the campaign, not the summary. Where nothing at all could be tested there is no summary, but a line for every reason.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..fuzz.campaign import Settings, run_campaign
from ..fuzz.cluster import check_address
from ..fuzz.pair import BOTH_TRUTHS, TWO_TRUTHS
from ..fuzz.profiles import SWARM, profile_of
from ..fuzz.trial import STATES_WITHOUT_TRUTH, check_family
from ..fuzz.truth import ORACLES
from ..fuzz.two_builds import check_two_builds
from ..spec.errors import UnavailableError, UsageError
from ..spec.families import family_of
from ..spec.models import Model
from ..store.campaigns import Campaign, is_tested, present_findings
from ..store.findings import Oracle
from ..store.keeping import fresh_folder
from ..targets.registry import load_target
from . import failures
from .gating import begin_gate, close_gate, is_known_to, opened_baseline, replayed_gate
from .output import say
from .progress import shown_progress
from .reporting import summary_text

SECONDS_DEFAULT = 60.0
SECONDS_MAX = 30 * 86_400.0
PROGRAMS_MAX = 10**12


def fuzz_command(
    target: str, families: Sequence[str], seconds: float | None, programs: int | None, seed: int, jobs: int | None, out: Path | None, undocumented: bool,
    against: str | None = None, inspect: bool = False, oracle: str = "own", profile: str = SWARM, scheduler: str | None = None, fresh: bool = False,
    baseline: Path | None = None, strict: bool = False, against_library: str | None = None,
) -> int:  # fmt: skip
    """Run a campaign and print its summary, or what its gate comes to; the answer is the exit status. `fresh`: start over beside what `out` holds."""
    if fresh and out is None:
        raise UsageError("--fresh starts a campaign over beside the one in --out; give --out, too")
    known = opened_baseline(baseline, strict)
    settings = checked_settings(
        target, families, seconds, programs, seed, jobs, out, against, inspect, oracle, profile, scheduler, against_library
    )
    if fresh and out is not None:
        out = fresh_folder(out)
        settings = msgspec.structs.replace(settings, out=out)
        print(f"a new campaign in {out}", file=sys.stderr)
    gate = None if known is None else replayed_gate(known, settings, strict, undocumented)
    with shown_progress() as shown:
        campaign = run_campaign(
            settings, shown.on_progress, shown.on_beat, is_known_to(gate), on_begin=lambda: begin_gate(gate, settings.out)
        )
    if campaign.account.complete and not campaign.account.programs and campaign.account.could_not_test:
        for reason in dict.fromkeys(campaign.account.could_not_test.values()):
            failures.complain(reason)
        return failures.COULD_NOT_TEST
    if gate is None:
        say(summary_text(campaign, out))
    if campaign.not_written:
        failures.complain(f"this campaign is not kept: {campaign.not_written}")
    if gate is not None:
        return close_gate(campaign, gate, out)
    return status_of_campaign(campaign, undocumented)


def checked_settings(
    target: str, families: Sequence[str], seconds: float | None, programs: int | None, seed: int, jobs: int | None, out: Path | None,
    against: str | None = None, inspect: bool = False, oracle: str = "own", profile: str = SWARM, scheduler: str | None = None,
    against_library: str | None = None,
) -> Settings:  # fmt: skip
    """The campaign's settings. Raises UsageError for what cannot be asked for, UnavailableError for a target that is not there."""
    if seconds is not None and programs is not None:
        raise UsageError("--seconds and --programs cannot both be given; one of them ends the campaign")
    if seconds is not None and not 0 < seconds <= SECONDS_MAX:
        raise UsageError(f"--seconds must be more than 0 and at most {SECONDS_MAX:,.0f}, not {seconds:g}")
    if programs is not None and programs > PROGRAMS_MAX:
        raise UsageError(f"--programs must be at most {PROGRAMS_MAX:,}, not {programs:,}")
    if seconds is None and programs is None:
        seconds = SECONDS_DEFAULT
    profile_of(profile)
    if scheduler is not None:
        if jobs is not None:
            raise UsageError(
                "--jobs is for processes of this machine, and --scheduler takes all workers of its cluster; leave out one of them"
            )
        check_address(scheduler)
    chosen_oracle = checked_oracle(oracle, against, inspect)
    loaded = load_target(target)
    if against_library is not None:
        check_two_builds(target, loaded, against, against_library)
    for family in families:
        check_family(target, loaded, family, chosen_oracle)
    offered = tuple(family for family in loaded.families if chosen_oracle == "engine" or family_of(Model(family)).is_modelled)
    if against is not None:
        offered = _offered_by_both(target, offered, against, families)
    chosen = tuple(dict.fromkeys(families)) or offered
    return Settings(
        target=target,
        families=chosen,
        seconds=seconds,
        programs=programs,
        seed=seed,
        jobs=jobs or 1,
        scheduler=scheduler,
        out=out,
        against=against,
        inspect=inspect,
        oracle=chosen_oracle,
        profile=profile,
        against_library=against_library,
    )


def checked_oracle(oracle: str, against: str | None, inspect: bool) -> Oracle:
    """The oracle that a word names. Raises UsageError for an unknown one, or one that does not go with the other options."""
    if against is not None and inspect:
        raise UsageError(BOTH_TRUTHS)
    if oracle == "own":
        return "own"
    if oracle != "engine":
        raise UsageError(f"unknown oracle `{oracle}`; there are {', '.join(ORACLES)}")
    if against is not None:
        raise UsageError(TWO_TRUTHS)
    if inspect:
        raise UsageError(STATES_WITHOUT_TRUTH)
    return "engine"


def _offered_by_both(target: str, offered: Sequence[str], against: str, families: Sequence[str]) -> tuple[str, ...]:
    """The families that both targets run, in the first one's order."""
    other = load_target(against)
    for family in families:
        check_family(against, other, family, "own")
    both = tuple(family for family in offered if family in other.families)
    if not both:
        raise UnavailableError(
            f"could not test: {target} and {against} have no family in common; they run {', '.join(offered)} and {', '.join(other.families)}"
        )
    return both


def status_of_campaign(campaign: Campaign, undocumented: bool) -> int:
    """1 when a divergence counts (one that was not reduced always does, one that is not reproduced any more does not), else 2 when something could not be tested or kept, nothing was
    judged, more than a hundredth is unknown or the canary was silent, else 0."""
    account = campaign.account
    present = present_findings(account, campaign.findings)
    if account.unreduced or any(finding.documented or undocumented for finding in present):
        return failures.DIVERGENCE
    return failures.OK if is_tested(campaign) else failures.COULD_NOT_TEST
