"""Two campaigns side by side: what only one of them found, and what only one of them reached.

Rules
- Findings are the same when their signatures are, the target's name left out: two targets can be compared, or two versions of one.
- What only one found may be what only one looked for: which programs, families and cells each had stands with it.
"""

from collections.abc import Callable, Sequence

from ..store.campaigns import Campaign
from ..store.findings import Finding
from .terminal import cell_text, in_order, plural, short_version, wrapped

CELLS_SHOWN_MAX = 12


def is_same(first: Campaign, second: Campaign) -> bool:
    """Whether both found the same."""
    return {_key(finding) for finding in first.findings} == {_key(finding) for finding in second.findings}


def comparison_text(
    names: tuple[str, str], campaigns: tuple[Campaign, Campaign], replays: tuple[Callable[[Finding], str], Callable[[Finding], str]]
) -> str:
    """What both found, counted, then what only the first and only the second did.

    names    of the two, as they were given
    replays  for each the command that shows one of its findings again
    """
    keys = [{_key(finding) for finding in campaign.findings} for campaign in campaigns]
    lines = [_head_line(name, campaign) for name, campaign in zip(names, campaigns, strict=True)]
    lines += ["", f"in both  {plural(len(keys[0] & keys[1]), 'finding')}"]
    for own, other in ((0, 1), (1, 0)):
        only = [finding for finding in in_order(campaigns[own].findings) if _key(finding) not in keys[other]]
        lines += ["", f"only in {names[own]}  {plural(len(only), 'finding')}"]
        for finding in only:
            lines += _finding_lines(finding, campaigns[other], replays[own](finding))
        lines += _reach_lines(_reached(campaigns[own]), _reached(campaigns[other]))
    return "\n".join(lines) + "\n"


def _key(finding: Finding) -> str:
    return finding.signature.partition("/")[2]


def _head_line(name: str, campaign: Campaign) -> str:
    account = campaign.account
    return (
        f"{name}  {account.target} {short_version(account.version)}, {', '.join(account.families)}, {plural(account.programs, 'program')}"
    )


def _finding_lines(finding: Finding, other: Campaign, replay: str) -> list[str]:
    lines = wrapped(f"  {finding.verdict.kind} · {finding.family} · {finding.title}", "    ")
    account = other.account
    if finding.family not in account.families or finding.family in account.could_not_test:
        lines.append("    the other did not test this family")
    return [*lines, f"    {replay}"]


def _reached(campaign: Campaign) -> dict[tuple[str, str], int]:
    reach = campaign.account.reach
    return {} if reach is None else {(table, cell): count for table, counts in reach.cells.items() for cell, count in counts.items()}


def _reach_lines(own: dict[tuple[str, str], int], other: dict[tuple[str, str], int]) -> list[str]:
    if not own or not other:
        return []
    only: Sequence[tuple[str, str]] = [cell for cell, count in own.items() if count and not other.get(cell)]
    if not only:
        return []
    shown = [cell_text(table, name) for table, name in only[:CELLS_SHOWN_MAX]]
    more = [f"{len(only) - CELLS_SHOWN_MAX} more"] if len(only) > CELLS_SHOWN_MAX else []
    return wrapped(f"  reached only here: {', '.join([*shown, *more])}", "    ")
