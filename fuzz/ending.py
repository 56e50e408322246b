"""How a campaign is ended from outside: Ctrl-C, SIGTERM and SIGHUP end it with its summary, and leave nothing behind.

Rules
- The first signal interrupts whatever runs, but what is only right as a whole (`held`): that is finished first, which takes milliseconds.
- One that was swallowed (an exception raised in a callback from native code is) ends the campaign at its next step.
- Once the end has begun, further signals change nothing.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


class Ending:
    """Whether a campaign was asked to end."""

    def __init__(self) -> None:
        self.is_asked = False
        self.has_begun = False
        self._held = 0

    def interrupt(self, number: int, frame: object) -> None:
        """The handler of a signal."""
        self.is_asked = True
        if not self._held and not self.has_begun:
            raise KeyboardInterrupt

    def end_if_asked(self) -> None:
        """Raise KeyboardInterrupt when a signal came that has not ended anything yet."""
        if self.is_asked and not self.has_begun:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What is done in it is done as a whole; a signal waits until then."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if not self._held:
            self.end_if_asked()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[Ending]:
    """Signals end what runs in it. In another thread than the main one, where there are no signals, nothing does."""
    ending = Ending()
    if threading.current_thread() is not threading.main_thread():
        yield ending
        return
    numbers = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ending.interrupt) for number in numbers}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
