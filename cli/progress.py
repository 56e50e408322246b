"""How a campaign is going: a live line on a terminal, else one plain line of `name=value` every ten seconds.

Rules
- Everything goes to standard error.
- Rich is imported only for the live line.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from time import monotonic

from ..fuzz.campaign import Progress
from ..reports.terminal import plural

PLAIN_SECONDS = 10.0


def plain_line(progress: Progress) -> str:
    """The state as `name=value`, e.g. "phase=fuzzing seconds=20.0 programs=2412 ..."."""
    last = "-" if progress.last_finding_seconds is None else f"{progress.last_finding_seconds:.1f}"
    return (
        f"phase={progress.phase} seconds={progress.seconds:.1f} programs={progress.programs} operations={progress.operations} "
        f"accepted_share={progress.accepted_share:.3f} findings={progress.findings} last_finding_seconds={last} unknown={progress.unknown}"
    )


def live_line(progress: Progress) -> str:
    """The state in words, short enough for one line."""
    if progress.phase == "noise":
        return "measuring the noise floor"
    parts = [
        f"{progress.phase}  {progress.seconds:.0f} s",
        plural(progress.programs, "program"),
        f"{100 * progress.accepted_share:.0f} % accepted",
        plural(progress.findings, "finding"),
    ]
    if progress.last_finding_seconds is not None:
        parts.append(f"last at {progress.last_finding_seconds:.0f} s")
    if progress.unknown:
        parts.append(f"{progress.unknown} unknown")
    return " · ".join(parts)


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[Progress], None]]:
    """A function that shows a `Progress`, for as long as the context lasts."""
    if sys.stderr.isatty():
        with _live() as show:
            yield show
    else:
        yield plain_progress(monotonic, lambda line: print(line, file=sys.stderr, flush=True))


def plain_progress(clock: Callable[[], float], write: Callable[[str], None]) -> Callable[[Progress], None]:
    """A function that writes a plain line at most every `PLAIN_SECONDS`; `clock` tells seconds."""
    newest = clock()

    def show(progress: Progress) -> None:
        nonlocal newest
        if clock() - newest >= PLAIN_SECONDS:
            newest = clock()
            write(plain_line(progress))

    return show


@contextlib.contextmanager
def _live() -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(stderr=True), transient=True, refresh_per_second=8) as live:
        yield lambda progress: live.update(Text(live_line(progress), no_wrap=True, overflow="ellipsis"))
