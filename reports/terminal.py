"""Texts for a terminal or a pipe: a divergence with its numbered program, and the account of a campaign.

Rules
- Text from data: nothing is printed, run or looked up here. Lines are at most `WIDTH` characters, but for words that cannot be cut
  (a program's own text stays whole, so that it can be copied).
- Short lines, aligned; no decoration that says nothing.
- `>` marks the operation at which target and truth part; what follows it is a consequence and not shown.
"""

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..spec.models import model_text
from ..spec.operations import (
    OPERATION_NAMES,
    AnyOperation,
    Divide,
    Drop,
    Remove,
    Restore,
    Rollback,
    Share,
    Shift,
)  # fmt: skip
from ..spec.programs import Program, cache_text, operation_text
from ..spec.verdicts import DIVERGENCE_KINDS, VERDICT_KINDS, Verdict
from ..store.campaigns import Account, Campaign, Canary, Reach, gone_signatures, is_mostly_known, is_silent
from ..store.findings import Answer, Finding

WIDTH = 100
"""Of lines where the terminal is as wide, or is none."""
WIDTH_MIN = 60
OPERATIONS_SHOWN_MAX = 60
_OPERATION_WIDTH_MAX = 44
_ROW_KINDS = ("wrong-output", "wrong-state", "nonfinite")
_WORD_OF_KIND = {"bad-refusal": "refused", "partial-effect": "refused", "false-success": "accepted", "wrong-position": "accepted"}
"""What a target must have said to come to a verdict, where its answers were not kept."""
_NOTE_INDENT_MAX = 48

PAIRS = "pairs"
LISTS = ("answers", "edges")
"""Tables of reached cells that are lists; the others but the pairs are columns over what an operation is to a sequence."""


def line_width() -> int:
    """Characters of a line: as many as the terminal has, within bounds; what goes into a pipe or a file is always the same."""
    if not sys.stdout.isatty():
        return WIDTH
    return max(WIDTH_MIN, min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns))


def wrapped(line: str, indent: str) -> list[str]:
    """The line, cut at spaces into lines of at most `line_width()` characters; those after the first begin with `indent`."""
    width = line_width()
    if len(line) <= width:
        return [line.rstrip()]
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def plural(count: int, noun: str) -> str:
    """A count with its noun, e.g. "1 program", "2,412 programs"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def short_version(version: str) -> str:
    """A version without what stands in brackets behind it (the build and where it lies)."""
    return version.split(" (", 1)[0]


def aligned(rows: Sequence[Sequence[str]], numbers_from: int = 1) -> list[str]:
    """A table as lines: columns two spaces apart; those from `numbers_from` on are set right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return [
        "  ".join(
            cell.rjust(width) if column >= numbers_from else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# --- one program -------------------------------------------------------------------------------------------------------------


def setting_text(program: Program) -> str:
    """The program's model and cache on one line, as in program text."""
    cache = cache_text(program.cache)
    return f"model {model_text(program.model)}" + (f"; cache {cache}" if cache else "")


def _moved_sequence(operation: AnyOperation) -> int | None:
    """The one sequence whose position tells whether the operation had its effect; None when decodes or several do."""
    match operation:
        case Rollback(sequence=sequence) | Remove(sequence=sequence) | Drop(sequence=sequence) | Restore(sequence=sequence):
            return sequence
        case Shift(sequence=sequence) | Divide(sequence=sequence) | Share(destination=sequence):
            return sequence
        case _:
            return None


def _note(operation: AnyOperation, answer: Answer) -> str:
    if answer.outcome.word != "accepted":
        return answer.outcome.detail
    sequence = _moved_sequence(operation)
    if sequence is None or sequence >= len(answer.last_positions):
        return ""
    position = answer.last_positions[sequence]
    return f"position {position}" if position >= 0 else "empty"


def place_text(verdict: Verdict) -> str:
    """Which sequence went wrong, and where, e.g. "sequence 0, position 12"; empty when the verdict does not say."""
    words = [] if verdict.sequence is None else [f"sequence {verdict.sequence}"]
    if verdict.position is not None and verdict.kind in _ROW_KINDS:
        words.append(f"position {verdict.position}")
    if verdict.relation == "other":
        words.append("relation other")
    return ", ".join(words)


def _parting(verdict: Verdict, operation: AnyOperation, answer: Answer | None, title: str) -> tuple[str, str]:
    """The outcome and the note of the operation at which they part."""
    if verdict.kind in _ROW_KINDS:
        return verdict.reason or verdict.kind, place_text(verdict)
    word = answer.outcome.word if answer else _WORD_OF_KIND.get(verdict.kind, verdict.kind)
    return word, verdict.reason if verdict.reason not in ("", title) else place_text(verdict)


class ProgramRow(NamedTuple):
    """An operation as it is shown: its number from 1, its text, what was said to it, a note, and whether target and truth part at it."""

    number: int
    text: str
    outcome: str
    note: str
    is_parting: bool


def program_rows(program: Program, verdict: Verdict, answers: Sequence[Answer] = (), title: str = "") -> list[ProgramRow]:
    """The newest operations up to the one at which they part, at most `OPERATIONS_SHOWN_MAX`; arguments as of `numbered_program`."""
    parting = verdict.operation_index if verdict.kind != "ok" else None
    end = len(program.operations) if parting is None else min(parting + 1, len(program.operations))
    rows = []
    for index in range(max(0, end - OPERATIONS_SHOWN_MAX), end):
        operation = program.operations[index]
        answer = answers[index] if index < len(answers) else None
        if index == parting:
            outcome, note = _parting(verdict, operation, answer, title)
        elif answer is not None:
            outcome, note = answer.outcome.word, _note(operation, answer)
        else:
            outcome, note = ("" if not answers else "not run"), ""
        rows.append(ProgramRow(index + 1, operation_text(operation), outcome, note, index == parting))
    return rows


def numbered_program(program: Program, verdict: Verdict, answers: Sequence[Answer] = (), title: str = "") -> list[str]:
    """The program as numbered lines with what the target answered; `>` marks the operation at which they part.

    answers   of the operations that were reached, in order; may be empty when they are not known
    title     already said above: not said again
    """
    rows = program_rows(program, verdict, answers, title)
    start = rows[0].number - 1 if rows else 0
    number_width = len(str(rows[-1].number if rows else 1))
    text_width = min(max((len(row.text) for row in rows), default=0), _OPERATION_WIDTH_MAX)
    outcome_width = max((len(row.outcome) for row in rows if row.note and not row.is_parting), default=0)
    lines = wrapped("    " + setting_text(program), "      ")
    if start:
        lines.append(f"    ... {plural(start, 'operation')} before")
    indent = " " * (4 + number_width + 2 + 2)
    for number, text, outcome, note, is_parting in rows:
        mark = ">" if is_parting else " "
        line = f"  {mark} {number:<{number_width}}  {text:<{text_width}}  {outcome:<{outcome_width}}  "
        lines += wrapped((line + note).rstrip(), " " * len(line) if note and len(line) <= _NOTE_INDENT_MAX else indent)
    return lines


def _labelled(label: str, value: str) -> str:
    return f"  {label:<8} {value}"  # never wrapped: it is there to be copied


def log_lines(log: Sequence[str]) -> list[str]:
    """The engine's last words as lines of text; none when it said nothing."""
    return ["  the engine's last words", *(line for words in log for line in wrapped("    " + words, "      "))] if log else []


def undocumented_lines(undocumented: str, sentences: Sequence[str]) -> list[str]:
    """What a program needs that the target's documentation does not promise, and the sentences of the documentation about it."""
    lines = wrapped("  undocumented: " + undocumented, "    ")
    return lines + [line for sentence in sentences for line in wrapped("    " + sentence, "      ")]


def right_lines(verdict: Verdict, compared: bool, states: int = 0) -> list[str]:
    """What is known of a program that is right. `compared`: an output row was compared with the truth; `states`: so many cached states."""
    if verdict.reason:
        return wrapped("  " + verdict.reason, "    ")
    if not compared:
        return ["  no output was compared; nothing else is wrong"]
    if verdict.error is None or verdict.tolerance is None:
        return []
    inspected = f"; {plural(states, 'cached state')} compared, and right" if states else ""
    return wrapped(
        f"  every answer is right; outputs are off by at most {verdict.error:.2g} (tolerance {verdict.tolerance:.2g}){inspected}", "    "
    )


def verdict_text(
    program: Program, verdict: Verdict, target: str, version: str, answers: Sequence[Answer], replay: str,
    undocumented: str = "", log: Sequence[str] = (), sentences: Sequence[str] = (), compared: bool = True, states: int = 0,
) -> str:  # fmt: skip
    """One program on one target, for people: the verdict, the numbered program, and how to see it again.

    replay         the command that does it again
    undocumented   what the program needs that the target's own documentation does not promise; empty when nothing
    log            the engine's last lines, for a crash or a hang
    sentences      of that documentation, on which `undocumented` rests
    compared       whether any output row was compared with the truth
    """
    lines = wrapped(f"{verdict.kind} · {target} {version} · {program.model.family}", "  ")
    title = verdict.reason if verdict.kind not in (*_ROW_KINDS, "ok") else ""
    if verdict.kind == "ok":
        lines += right_lines(verdict, compared, states)
    if title:
        lines += wrapped("  " + title, "    ")
    if undocumented and verdict.kind in DIVERGENCE_KINDS:
        lines += undocumented_lines(undocumented, sentences)
    lines += numbered_program(program, verdict, answers, title)
    lines += log_lines(log)
    lines.append(_labelled("replay", replay))
    return "\n".join(lines) + "\n"


def judged_by_words(oracle: str) -> str:
    """What a heading says after the version of a target that was its own truth."""
    return "" if oracle == "own" else " judged by its own recompute"


def _against(finding: Finding) -> str:
    if finding.against is None:
        return judged_by_words(finding.oracle)
    return f" against {finding.against} {short_version(finding.against_version or '')}"


def finding_text(number: int, finding: Finding, replay: str, script: str = "") -> str:
    """A finding, for people: what went wrong, the numbered program, and how to see it again.

    number    its place among the campaign's findings, from 1
    replay    the command that does it again
    script    path of the reproduction that needs no statedrift; empty when there is none
    """
    seconds = f"{finding.found_after_seconds:.1f} s"
    heading = " · ".join(
        [
            f"{number} {finding.verdict.kind}",
            f"{finding.target} {short_version(finding.version)}" + _against(finding),
            finding.family,
            f"found after {plural(finding.found_after_programs, 'program')}, {seconds}",
            f"reproducible {finding.reproduced}/{finding.reruns}",
        ]
    )
    lines = wrapped(heading, "    ")
    lines += wrapped("  " + finding.title, "    ")
    if not finding.documented:
        lines += wrapped("  undocumented: it needs " + ", ".join(finding.undocumented_uses), "    ")
    lines += numbered_program(finding.program, finding.verdict, finding.answers, finding.title)
    lines += log_lines(finding.log)
    lines.append(_labelled("replay", replay))
    if script:
        lines.append(_labelled("script", script))
    return "\n".join(lines) + "\n"


# --- a campaign --------------------------------------------------------------------------------------------------------------


def _share(part: int, whole: int) -> str:
    if not part or not whole:
        return "-"
    percent = 100 * part / whole
    return f"{percent:.1f} %" if percent >= 0.05 else "< 0.1 %"


def _operation_lines(account: Account) -> list[str]:
    """Operations by kind: how many, and which share was answered how."""
    words = ["accepted", "refused", "skipped"]
    words += [word for word in ("cancelled", "error", "crash", "hang") if any(counts.get(word) for counts in account.outcomes.values())]
    rows = [["operation", "count", *words]]
    for name in OPERATION_NAMES:
        counts = account.outcomes.get(name, {})
        total = sum(counts.values())
        if total:
            rows.append([name, f"{total:,}", *(_share(counts.get(word, 0), total) for word in words)])
    return aligned(rows) if len(rows) > 1 else []


def never_executed(account: Account) -> tuple[str, ...]:
    """Operations that no program of the campaign came to, that were skipped every time, or that the target does not offer."""
    not_offered = account.reach.not_offered if account.reach is not None else ()
    return tuple(
        name for name in OPERATION_NAMES
        if name in not_offered or not any(count for word, count in account.outcomes.get(name, {}).items() if word != "skipped")
    )  # fmt: skip


def never_accepted(account: Account) -> tuple[str, ...]:
    """Operations that were refused whenever they were executed."""
    silent = never_executed(account)
    return tuple(
        name for name in OPERATION_NAMES
        if name not in silent and not any(account.outcomes[name].get(word) for word in ("accepted", "cancelled"))
    )  # fmt: skip


def never_executed_words(account: Account) -> str:
    """The operations that were never executed, each with the reason, e.g. "cancel, divide (not offered by the target); damage (in no program)"."""
    reasons: dict[str, list[str]] = {"not offered by the target": [], "skipped every time": [], "in no program": []}
    for name in never_executed(account):
        if account.reach is not None and name in account.reach.not_offered:
            reasons["not offered by the target"].append(name)
        elif account.outcomes.get(name):
            reasons["skipped every time"].append(name)
        else:
            reasons["in no program"].append(name)
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items() if names)


def missing_cells(reach: Reach) -> Iterator[tuple[str, str]]:
    """Table and name of every cell that was never reached, in the account's order."""
    for table, counts in reach.cells.items():
        for name, number in counts.items():
            if not number:
                yield table, name


def cell_text(table: str, name: str) -> str:
    """A cell in words, wherever it stands, e.g. "save while shared by two"."""
    return name if table in (*LISTS, PAIRS) else f"{name} while {table}"


def reach_line(reach: Reach) -> str:
    """ "reach        187 of 210 cells; never: ..." on one line, with as many names as it has room for."""
    total = sum(len(counts) for counts in reach.cells.values())
    names = [cell_text(table, name) for table, name in missing_cells(reach)]
    line = f"reach        {total - len(names):,} of {total:,} cells"
    for number, name in enumerate(names):
        added = (", " if number else "; never: ") + name
        left = len(names) - number
        if len(line + added) + (len(f", {left - 1} more") if left > 1 else 0) > line_width():
            return line + (f", {left} more" if number else f"; never: {left} of them")
        line += added
    return line


def canary_words(canary: Canary) -> str:
    """How often the target that is wrong on purpose was seen to be."""
    if canary.why_not and not canary.programs:
        return f"could not be tried: {canary.why_not}"
    if canary.seen:
        return f"seen {plural(canary.seen, 'time')} in {plural(canary.programs, 'program')}"
    if is_silent(canary):
        return f"silent in {plural(canary.programs, 'program')}, about one in a hundred of which shows a planted fault"
    return f"not seen in {plural(canary.programs, 'program')}, too few to mean anything"


def _noise_lines(account: Account) -> list[str]:
    rows = [["family", "noise floor", "tolerance", "logs measured"]]
    rows += [[family, f"{noise.floor:.2g}", f"{noise.tolerance:.2g}", f"{noise.log_count:,}"] for family, noise in account.noise.items()]
    for family, noise in account.noise.items():
        if noise.state_floor is not None and noise.state_tolerance is not None:
            rows.append([f"{family} states", f"{noise.state_floor:.2g}", f"{noise.state_tolerance:.2g}", f"{noise.log_count:,}"])
    lines = aligned(rows) if len(rows) > 1 else []
    for family, noise in account.noise.items():
        if noise.unjudged:
            lines.append(
                f"  {family}: {noise.unjudged:.2%} of the rows measured hang on a selection too close to be judged; such rows are passed over"
            )
    return lines


def _time_line(account: Account) -> str:
    spent = {
        "generating": account.seconds_generating,
        "running": account.seconds_running,
        "judging": account.seconds_judging,
        "reducing": account.seconds_reducing,
    }
    return "time         " + " · ".join(f"{name} {seconds:.1f} s" for name, seconds in spent.items())


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:,.0f}/s" if seconds > 0 else "-"


def account_text(account: Account) -> str:
    """What a campaign ran, what was answered, how exactly it could judge, and what it did not reach."""
    both = account.target if account.against is None else f"{account.target} against {account.against}"
    lines = wrapped(
        f"{both} · {', '.join(account.families)} · seed {account.seed} · {plural(account.jobs, 'job')} · {account.seconds:.1f} s"
        + ("" if account.complete else " · stopped before its end"),
        "  ",
    )
    lines += wrapped(f"version      {account.version}", " " * 13)
    if account.profile != "swarm":
        lines.append(f"profile      {account.profile}")
    if account.oracle != "own":
        lines += wrapped(
            "oracle       engine: an output is right when a fresh session that is given the whole log at once gives it, too", " " * 13
        )
    if account.against_version is not None:
        lines += wrapped(f"against      {account.against_version}", " " * 13)
    lines.append(
        f"programs     {account.programs:,} ({_rate(account.programs, account.seconds)}), "
        f"{plural(account.operations, 'operation')} ({_rate(account.operations, account.seconds)})"
    )
    lines += also_in_old_lines(account)
    kinds = [f"{kind} {account.verdicts[kind]:,}" for kind in VERDICT_KINDS if account.verdicts.get(kind)]
    lines += wrapped("verdicts     " + (" · ".join(kinds) if kinds else "none"), " " * 13)
    if account.replayed is not None:
        lines += wrapped("went on      " + replayed_words(account), " " * 13)
    if account.against is not None:
        lines.append(f"agreed       in {account.verdicts.get('ok', 0):,} of {plural(account.programs, 'program')}")
    if account.inspected is not None:
        lines.append(f"inspected    {plural(account.inspected, 'state')}")
    lines.append(f"unknown      {account.verdicts.get('unknown', 0):,}")
    if account.reach is not None and account.programs:
        lines.append(reach_line(account.reach))
    if account.canary is not None and account.programs:
        lines += wrapped("canary       " + canary_words(account.canary), " " * 13)
    lines.append(_time_line(account))
    for table in (_operation_lines(account), _noise_lines(account)):
        if table:
            lines += ["", *("  " + line for line in table)]
    gaps = []
    if words := never_executed_words(account):
        gaps += wrapped("never executed: " + words, "  ")
    if names := never_accepted(account):
        gaps += wrapped("never accepted: " + ", ".join(names), "  ")
    for left in account.unreduced:
        gaps += wrapped(f"not reduced: {plural(left.programs, 'program')} with {left.signature}", "  ")
        gaps += wrapped(f"  {left.program}", "    ") if left.program else []
    for signature in gone_signatures(account):
        gaps += wrapped(f"not reproduced any more: {signature}", "  ")
    for reason, text in account.not_judged:
        gaps += wrapped(f"not judged: {reason}", "  ") + wrapped(f"  {text}", "    ")
    for family, reason in account.could_not_test.items():
        gaps += wrapped(f"could not test {family}: {reason.removeprefix('could not test: ')}", "  ")
    if account.ended_by is not None:
        gaps += wrapped(f"ended before its time: {account.ended_by}", "  ")
    if is_silent(account.canary):
        gaps += wrapped(
            "could not test: the canary, a target that is wrong on purpose, stayed silent; programs or their judgement are blind here, and "
            "that nothing was found means nothing (`statedrift doctor` looks closer)", "  "
        )  # fmt: skip
    return "\n".join([*lines, *([""] if gaps else []), *gaps]) + "\n"


def replayed_words(account: Account) -> str:
    """What a campaign that went on tried again, e.g. "in run 3, after 12 findings (1 not reproduced any more) and 210 programs of the corpus"."""
    replayed = account.replayed
    assert replayed is not None
    words = f"in run {account.runs:,}, after {plural(replayed.findings, 'finding')}"
    if replayed.gone:
        words += f" ({len(replayed.gone):,} not reproduced any more)"
    words += f" and {plural(replayed.corpus, 'program')} of the corpus"
    if replayed.corpus_diverged:
        words += f" ({replayed.corpus_diverged:,} of which had been right, and diverged)"
    return words + (f"; the version before was {replayed.version_before}" if replayed.version_before is not None else "")


def also_in_old_lines(account: Account) -> list[str]:
    """With another build beside the one that is tested: which, and what both do, without what a crash said; () where there is none."""
    if account.against_library is None:
        return []
    ways: Counter[str] = Counter()
    for signature, programs in account.also_in_old.items():
        ways[signature.partition(" ")[2].partition(" [")[0]] += programs
    both = ", ".join(f"{way} ({programs:,})" for way, programs in ways.most_common())
    lines = wrapped(f"other build  {account.against_library}", " " * 13)
    return lines + wrapped(f"also there   {plural(ways.total(), 'program')}" + (f": {both}" if both else ""), " " * 13)


def verdict_sentence(campaign: Campaign) -> str:
    """The campaign in one sentence: "no divergence in 2,412 programs", or how many divergences, and what could not be tested."""
    account, count = campaign.account, len(campaign.findings)
    if not account.programs:
        return "nothing was tested: it ended before the first program" + could_not_test_words(account)
    undocumented = sum(not finding.documented for finding in campaign.findings)
    unreduced = sum(left.programs for left in account.unreduced)
    programs = plural(account.programs, "program")
    if unreduced and not count:
        return f"{unreduced} of {programs} diverged, and none was reduced" + could_not_test_words(account)
    is_new = "" if account.against_library is None else "new "
    sentence = (f"{plural(count, is_new + 'divergence')}" if count else f"no {is_new}divergence") + f" in {programs}"
    if both := sum(account.also_in_old.values()):
        sentence += f"; {plural(both, 'program')} diverged as in the other build"
    if undocumented:
        sentence += f"; {undocumented} of them only in uses that the target's own documentation does not promise"
    if gone := gone_signatures(account):
        sentence += f"; {len(gone):,} of them not reproduced any more"
    if unreduced:
        sentence += f"; {plural(unreduced, 'divergent program')} not reduced"
    return sentence + could_not_test_words(account)


def could_not_test_words(account: Account) -> str:
    """What a campaign says nothing about, to stand behind a sentence, e.g. "; could not test lfm2"; empty when it tested everything."""
    gaps = [f"could not test {', '.join(account.could_not_test)}"] if account.could_not_test else []
    if account.ended_by is not None:
        gaps.append("could not go on")
    if not is_mostly_known(account.verdicts):
        gaps.append(f"could not test: {account.verdicts['unknown']:,} of them are unknown")
    if is_silent(account.canary):
        gaps.append("could not test: the canary stayed silent")
    return "".join(f"; {gap}" for gap in gaps)


def stopped_words(account: Account) -> str:
    """That a campaign was stopped, to stand behind a sentence; empty for one that came to its end or could not go on."""
    return "" if account.complete or account.ended_by is not None else "; stopped before its end"


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Findings in the order in which they are numbered: documented ones first, each in the order they were found."""
    return sorted(findings, key=lambda finding: (not finding.documented, finding.found_after_programs, finding.signature))


def campaign_text(campaign: Campaign, replay_of: Callable[[Finding], str], script_of: Callable[[Finding], str], details: str = "") -> str:
    """The account, the findings (`in_order`), and the sentence that says how it ended.

    replay_of, script_of   the command and the script that show a finding again; an empty script is left out
    details                more about the account, shown after it
    """
    parts = [account_text(campaign.account), *([details] if details else [])]
    parts += [
        finding_text(number, finding, replay_of(finding), script_of(finding))
        for number, finding in enumerate(in_order(campaign.findings), 1)
    ]
    parts.append("\n".join(wrapped(verdict_sentence(campaign), "  ")) + "\n")
    return "\n".join(parts)
