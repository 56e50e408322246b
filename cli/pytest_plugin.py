"""The pytest plugin: the options of conformance suites, and what is shown of them.

Rules
- Every pytest run imports this module: it imports pytest, and nothing of statedrift before a suite needs it.
- It shows; what is tested and what is wrong is said by fuzz/conformance_suite.py. Texts of findings are those of the command line.
- What a campaign came to goes from an xdist worker to the main process as a property of its test.
"""

import os
import shlex
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..fuzz.conformance import Diverged, Fuzzed, Shown

_FUZZED = "statedrift"
_SHOWN_MAX = 5
"""Findings of a campaign that are shown whole; the others in a line each."""


def _seconds(text: str) -> float:
    from argparse import ArgumentTypeError

    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 30 * 86_400:  # NaN fails, too
        raise ArgumentTypeError(f"must be a number of seconds, 0 or more, not {text}")
    return seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of conformance suites."""
    group = parser.getgroup("statedrift", "conformance suites of caches (statedrift)")
    group.addoption(
        "--statedrift-seconds", type=_seconds, default=10.0, metavar="N", help="time of every suite's fuzz test (10); 0 leaves it out"
    )
    group.addoption("--statedrift-seed", type=int, default=0, metavar="N", help="seed of its programs (0)")
    group.addoption(
        "--statedrift-out",
        default="runs/pytest",
        metavar="DIR",
        help="where programs that went wrong are kept (runs/pytest); made when there is one",
    )
    group.addoption("--statedrift-program", metavar="TEXT", help="try this program in place of a test's own")
    group.addoption(
        "--statedrift-undocumented", action="store_true", help="fail on divergences outside the target's own documentation, too"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In place of a traceback: the program that parts, and how to see it again."""
    report = yield
    if call.excinfo is not None and type(call.excinfo.value).__module__ == "statedrift.fuzz.conformance":
        report.longrepr = failure_text(call.excinfo.value)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A line for each campaign that found nothing: a suite that passes because everything is refused is seen to."""
    reports = [report for group in terminalreporter.stats.values() for report in group if isinstance(report, pytest.TestReport)]
    found = [
        (report.nodeid, value) for report in reports if report.when == "call" for name, value in report.user_properties if name == _FUZZED
    ]
    if found:
        import msgspec

        from ..fuzz.conformance import Fuzzed

        terminalreporter.section("statedrift", sep="-")
        for node, value in found:
            for line in fuzzed_lines(node, msgspec.convert(value, Fuzzed)):
                terminalreporter.write_line(line)


def failure_text(error: BaseException) -> str:
    """What is shown of a test that found its target wrong."""
    from ..fuzz.conformance import Diverged

    return divergence_text(error) if isinstance(error, Diverged) else str(error)


def divergence_text(error: "Diverged") -> str:
    """Every finding with its program, how to see it again, and what the campaign came to."""
    from ..reports.terminal import plural, wrapped

    if error.fuzzed is None:
        return "\n".join(map(_row_text, error.shown))
    parts = [_finding_text(number, shown) for number, shown in enumerate(error.shown[:_SHOWN_MAX], 1)]
    more = [f"{shown.finding.verdict.kind}: {shown.finding.title}\n{_ending(shown)}" for shown in error.shown[_SHOWN_MAX:]]
    parts += [f"and {plural(len(more), 'more divergence')}\n\n" + "\n".join(more)] if more else []
    if error.unreduced:
        lines = [line for text in error.unreduced for line in wrapped("not reduced: " + text, "  ")]
        parts.append("\n".join([*lines, "  more --statedrift-seconds give the time to reduce them"]) + "\n")
    lines = [
        f"{plural(len(error.shown), 'divergence')} in {plural(error.fuzzed.programs, 'program')}",
        *wrapped(accepted_words(error.fuzzed), "  "),
    ]
    return "\n".join([*parts, "\n".join(lines)])


def _row_text(shown: "Shown") -> str:
    from ..reports.terminal import verdict_text

    finding = shown.finding
    undocumented = ", ".join(finding.undocumented_uses)
    text = verdict_text(
        finding.program, finding.verdict, finding.target, finding.version, finding.answers, command_words(shown), undocumented, finding.log
    )  # fmt: skip
    return text + _script_line(shown)


def _finding_text(number: int, shown: "Shown") -> str:
    from ..reports.terminal import finding_text

    return finding_text(number, shown.finding, command_words(shown)) + _script_line(shown)


def _ending(shown: "Shown") -> str:
    return f"  replay   {command_words(shown)}\n{_script_line(shown)}"


def _script_line(shown: "Shown") -> str:
    return f"  script   {os.path.relpath(shown.script)}\n" if shown.script else f"  script   not written: {shown.why_not}\n"


def command_words(shown: "Shown") -> str:
    """The command that shows a finding again, quoted for a shell."""
    path = f"PYTHONPATH={shlex.quote(shown.python_path)} " if shown.python_path else ""
    return path + shlex.join(shown.replay)


def accepted_words(fuzzed: "Fuzzed") -> str:
    """How much of what was asked the target did, e.g. "84 % of 9,412 operations accepted; never accepted: rollback; not offered: cancel"."""
    share = fuzzed.accepted / fuzzed.operations if fuzzed.operations else 0.0
    words = [f"{share:.0%} of {fuzzed.operations:,} operations accepted".replace("%", " %")]
    if fuzzed.never_accepted:
        words.append("never accepted: " + ", ".join(fuzzed.never_accepted))
    if fuzzed.not_offered:
        words.append("not offered: " + ", ".join(fuzzed.not_offered))
    if fuzzed.undocumented:
        words.append(f"{fuzzed.undocumented} divergent only in uses that its documentation does not promise")
    return "; ".join(words)


def fuzzed_lines(node: str, fuzzed: "Fuzzed") -> list[str]:
    """A campaign that found nothing, for the summary."""
    from ..reports.terminal import plural, wrapped

    words = f"{node}: no divergence in {plural(fuzzed.programs, 'program')}, {fuzzed.seconds:.1f} s; {accepted_words(fuzzed)}"
    return wrapped(words, "  ")
