"""Ending: a signal interrupts, but never what is only right as a whole, and is not lost."""

import contextlib
import signal
from threading import Thread

import pytest
from statedrift.fuzz.ending import Ending, ended_by_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_and_its_handler_is_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        pytest.skip("whoever started the tests ignores this signal")
    with pytest.raises(KeyboardInterrupt), ended_by_signals():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_what_is_held_is_done_as_a_whole() -> None:
    done = []

    def work(ending: Ending) -> None:
        with ending.held():
            with ending.held():
                signal.raise_signal(signal.SIGTERM)
                done.append("inner")
            done.append("outer")
        done.append("never")

    with ended_by_signals() as ending, pytest.raises(KeyboardInterrupt):
        work(ending)
    assert done == ["inner", "outer"]


def test_a_signal_that_was_swallowed_ends_at_the_next_step_and_none_ends_what_is_ending() -> None:
    with ended_by_signals() as ending:
        ending.end_if_asked()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            ending.end_if_asked()
        ending.has_begun = True
        signal.raise_signal(signal.SIGTERM)
        ending.end_if_asked()


def test_in_another_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run() -> None:
        with ended_by_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
