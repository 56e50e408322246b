"""`statedrift bench throughput`: programs and operations a second of a campaign, and where the time goes.

Rules
- It measures a real campaign with everything in it; what it finds does not change the status.
- The noise measurement is not counted: it is done once for a target and remembered.
"""

from collections.abc import Sequence

from ..fuzz.campaign import run_campaign
from ..reports.terminal import aligned
from ..store.campaigns import Account
from . import failures
from .fuzzing import checked_settings
from .output import say
from .progress import shown_progress


def throughput_command(target: str, families: Sequence[str], seconds: float, seed: int, jobs: int) -> int:
    """Measure and print; the answer is the exit status."""
    settings = checked_settings(target, families, seconds, None, seed, jobs, None)
    with shown_progress() as show:
        account = run_campaign(settings, show).account
    say(throughput_text(account))
    return failures.OK if account.programs and not account.could_not_test else failures.COULD_NOT_TEST


def throughput_text(account: Account) -> str:
    """Rates per second of wall time, and the share of each kind of work in the time of all jobs."""
    work = {
        "generating": account.seconds_generating,
        "running": account.seconds_running,
        "judging": account.seconds_judging,
        "reducing": account.seconds_reducing,
    }
    total = account.seconds * account.jobs
    rows = [
        ["programs", f"{account.programs:,}", f"{account.programs / max(account.seconds, 1e-9):,.1f}/s"],
        ["operations", f"{account.operations:,}", f"{account.operations / max(account.seconds, 1e-9):,.0f}/s"],
        *([name, f"{seconds:.2f} s", f"{100 * seconds / max(total, 1e-9):.1f} %"] for name, seconds in work.items()),
        ["all", f"{total:.2f} s", f"{account.jobs} x {account.seconds:.2f} s"],
    ]
    heading = f"{account.target} {account.version} · {', '.join(account.families)} · seed {account.seed}"
    gaps = [f"could not test {family}: {reason}" for family, reason in account.could_not_test.items()]
    return "\n".join([heading, *("  " + line for line in aligned(rows)), *gaps]) + "\n"
