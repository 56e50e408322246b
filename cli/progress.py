"""How a campaign is going: a live line on a terminal, else one plain line of `name=value` every ten seconds.

Rules
- Everything goes to standard error.
- Rich is imported only for the live line.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from time import monotonic
from typing import NamedTuple

import msgspec

from ..fuzz.progress import Progress
from ..reports.terminal import plural
from ..store.statistics import Statistics

STATISTICS_NAMES = tuple(field for field in Statistics.__struct_fields__ if field != "complete")
"""What a line says, in this order."""


class Shown(NamedTuple):
    """Whom a campaign tells where it is: after every step, and every ten seconds."""

    on_progress: Callable[[Progress], None]
    on_beat: Callable[[Statistics], None]


def plain_line(statistics: Statistics) -> str:
    """The statistics as `name=value`, in their order, e.g. "elapsed=20.0 programs=2412 ..."; "-" for what there is not."""
    values = {name: getattr(statistics, name) for name in STATISTICS_NAMES}
    return " ".join(f"{name}={'-' if value is None else value}" for name, value in values.items())


def live_line(progress: Progress) -> str:
    """The state in words, short enough for one line."""
    if progress.phase == "noise":
        return "measuring the noise floor"
    parts = [
        f"{progress.phase}  {progress.seconds:.0f} s",
        plural(progress.programs, "program"),
        f"{100 * progress.accepted_share:.0f} % accepted",
        plural(progress.findings, "finding") + (f" ({progress.findings_known} known)" if progress.findings_known else ""),
    ]
    if progress.last_finding_seconds is not None:
        parts.append(f"last at {progress.last_finding_seconds:.0f} s")
    if progress.unknown:
        parts.append(f"{progress.unknown} unknown")
    return " · ".join(parts)


@contextlib.contextmanager
def shown_progress() -> Iterator[Shown]:
    """What shows a campaign's progress, for as long as the context lasts."""
    if sys.stderr is None:  # closed by whoever started us
        yield Shown(lambda progress: None, lambda statistics: None)
    elif sys.stderr.isatty():
        with _live() as show:
            yield Shown(show, lambda statistics: None)
    else:
        yield Shown(lambda progress: None, lambda statistics: print(plain_line(statistics), file=sys.stderr, flush=True))


@contextlib.contextmanager
def _live() -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    newest: list[tuple[Progress, float]] = []

    def line() -> Text:
        """As it was told, with the seconds since then: nothing is told while a worker is waited for."""
        text = (
            live_line(msgspec.structs.replace(newest[-1][0], seconds=newest[-1][0].seconds + monotonic() - newest[-1][1])) if newest else ""
        )
        return Text(text, no_wrap=True, overflow="ellipsis")

    def show(progress: Progress) -> None:
        newest[:] = [(progress, monotonic())]

    with Live(get_renderable=line, console=Console(stderr=True), transient=True, refresh_per_second=8):
        yield show
