"""A campaign as Markdown, for the page of a CI job: the verdict, a table of what is new, known, gone and expired, and the new programs.

Rules
- At most `LINES_MAX` lines, so that it fits a comment of a pull request, and `BYTES_MAX`: what there is no room for is counted.
- What is new comes first. Text of targets and people never becomes markup: cells are escaped, programs are fenced.
"""

import re

from ..store.findings import Finding
from ..store.gate import sorted_out
from .gate import entries_words, gate_rows, gate_sentence
from .report import Report, replays_of
from .terminal import in_order, log_lines, numbered_program, plural, short_version, stopped_words, verdict_sentence

BYTES_MAX = 60_000
"""A comment takes 65,536 characters."""
LINES_MAX = 59
_ROOM_FOR_TABLE = 30_000
_ROWS_MAX = 20
_PROGRAM_LINES_MAX = 16
_LOG_LINES_MAX = 4
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~&$])")


def markdown_text(report: Report) -> str:
    """The page, with a line end at its end."""
    campaign, gate, replays = report.campaign, report.gate, replays_of(report)
    account = campaign.account
    sentence = verdict_sentence(campaign) if gate is None else gate_sentence(campaign, gate)
    both = account.target if account.against is None else f"{account.target} against {account.against}"
    baseline = "" if gate is None else f" · baseline {gate.file} ({entries_words(gate.entries)}, {len(gate.replayed)} replayed)"
    what = f"{both} {short_version(account.version)} · {', '.join(account.families)} · {plural(account.programs, 'program')}, {account.seconds:.0f} s"
    what += stopped_words(account) if gate is None else ""
    head = f"## statedrift · {escaped(sentence)}\n\n{escaped(what + baseline)}\n"
    findings = in_order(campaign.findings)
    if gate is None:
        rows = [("new" if finding.documented else "undocumented", finding.signature) for finding in findings]
        shown = findings
    else:
        parts = sorted_out(account, campaign.findings, gate)
        rows = gate_rows(campaign, parts)
        shown = [*in_order(parts.new), *in_order(parts.passed_over)]
    return _within(
        head + _table(rows), [_finding_section(findings.index(finding) + 1, finding, replays[finding.signature]) for finding in shown]
    )


def escaped(text: str) -> str:
    """Text on one line that Markdown shows as it is."""
    line = "".join(character if character.isprintable() else " " for character in " ".join(text.split()))
    return _MARKUP.sub(r"\\\1", line)


def fenced(text: str) -> str:
    """Text as a code block, whose fence is longer than any in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    visible = "".join(c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text)
    return f"{fence}text\n{visible.rstrip()}\n{fence}\n"


def _table(rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = ["", "| | divergence |", "|---|---|"]
    size = 0
    for number, (label, words) in enumerate(rows):
        line = f"| {escaped(label)} | {escaped(words)} |"
        size += len(line.encode()) + 1
        if size > _ROOM_FOR_TABLE or number == _ROWS_MAX:
            lines.append(f"| | and {len(rows) - number:,} more |")
            break
        lines.append(line)
    return "\n".join(lines) + "\n"


def _finding_section(number: int, finding: Finding, replay: str) -> str:
    lines = _shortened(numbered_program(finding.program, finding.verdict, finding.answers, finding.title))
    lines += log_lines(finding.log[-_LOG_LINES_MAX:])
    heading = f"{number} {finding.verdict.kind} · {finding.family} · reproducible {finding.reproduced}/{finding.reruns}"
    undocumented = "" if finding.documented else f"\nundocumented: it needs {escaped(', '.join(finding.undocumented_uses))}\n"
    return f"\n### {escaped(heading)}\n\n{escaped(finding.title)}\n{undocumented}\n" + fenced("\n".join([*lines, f"  replay   {replay}"]))


def _shortened(lines: list[str]) -> list[str]:
    """The first line, which says the model, and the newest ones."""
    left_out = len(lines) - _PROGRAM_LINES_MAX
    return lines if left_out <= 0 else [lines[0], f"    ... {plural(left_out + 1, 'line')}", *lines[left_out + 2 :]]


def _within(text: str, sections: list[str]) -> str:
    """The text and as many sections as there is room for."""
    for number, section in enumerate(sections):
        more = f"\nand {len(sections) - number:,} more programs; `statedrift report` has them all\n"
        if len((text + section + more).encode()) > BYTES_MAX or (text + section + more).count("\n") > LINES_MAX:
            return text + more
        text += section
    return text
