"""`statedrift explain`: one program step by step, what was sent and said beside what is true, and where they part.

Rules
- Nothing is run twice: the steps are retraced from one recorded run.
- At the step that parts, what was expected stands above what was given.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..fuzz.execution import Run, Step
from ..fuzz.filming import film_of
from ..fuzz.judgement import judged_errors, span_errors
from ..fuzz.pair import row_differences, row_texts, wrong_span
from ..fuzz.retrace import Moment, retrace
from ..fuzz.trial import Trial, answers_of
from ..oracle.contract import MAY, Span
from ..oracle.recompute import Request, recompute_of
from ..reports.pictures import cell_lines
from ..reports.terminal import log_lines, place_text, plural, right_lines, setting_text, undocumented_lines, wrapped
from ..spec.configuration import CacheConfiguration
from ..spec.operations import (
    OPEN,
    AnyOperation,
    Cancel,
    Clear,
    Damage,
    Decode,
    Divide,
    Drop,
    Item,
    Keep,
    Remove,
    Reopen,
    Restore,
    RestoreAll,
    Rollback,
    Save,
    SaveAll,
    Share,
    Shift,
    operation_name,
)  # fmt: skip
from ..spec.pictures import Film, FilmStep
from ..spec.programs import operation_text
from ..spec.tokens import DIRTY_TOKEN_COUNT
from ..spec.verdicts import DIVERGENCE_KINDS
from .given import read_given, replay_words
from .output import say
from .replaying import heading_words, sentences_of, states_compared, status_of, tried, was_compared

TOKENS_SHOWN_MAX = 12
LOGITS_SHOWN = 3

_DEMANDS = {
    "must-accept": "must be accepted",
    "must-refuse": "must be refused",
    "may": "either answer is right",
    "skip": "not sent",
    "undeclared": "refused without a call",
}


def explain_command(
    argument: str,
    target_name: str,
    undocumented: bool,
    campaign: Path | None,
    against: str | None = None,
    inspect: bool = False,
    oracle: str = "own",
) -> int:
    """Run one program and print every step; the answer is the exit status."""
    given = read_given(argument, campaign)
    trial, documented, uses, bench = tried(given.program, target_name, against, inspect, oracle)
    lines = wrapped(f"{trial.verdict.kind} · {' '.join(heading_words(bench))} · {trial.program.model.family}", "  ")
    if not documented:
        lines += undocumented_lines(f"it needs {', '.join(uses)}", sentences_of(uses, bench.target))
    if trial.verdict.kind == "ok":
        lines += right_lines(trial.verdict, was_compared(trial), states_compared(trial))
    lines += wrapped("    " + setting_text(trial.program), "      ")
    film = film_of(trial.program, target_name, answers_of(trial), trial.tolerance) if against is None else None
    lines += step_lines(trial, bench.target.poison, film) if against is None else pair_step_lines(trial, (target_name, against))
    lines.append("")
    lines += log_lines(trial.log)
    if film is not None and film.steps and film.note:
        lines += wrapped(f"  cells    {film.note}", " " * 11)
    lines.append(f"  replay   {replay_words(given, target_name, against, inspect, oracle)}")
    say("\n".join(lines) + "\n")
    return status_of(trial.verdict, documented, undocumented)


def step_lines(trial: Trial, poisons: bool = False, film: Film | None = None) -> list[str]:
    """Every step that counts, as lines of text: those after a divergence are left out.

    poisons  the target honours `start=poison`
    film     of the program: what the cells hold after each step is shown, too
    """
    run = trial.run
    if trial.verdict.kind in ("crash", "hang") and trial.verdict.operation_index is None:
        return _opening_lines(trial, poisons)
    if run is None:
        return wrapped(f"  nothing is known of its steps: {trial.verdict.reason}", "    ")
    parting = trial.verdict.operation_index if trial.verdict.kind != "ok" else None
    rows = _rows_of_steps(trial, run)
    pictures = {step.index: step for step in film.steps} if film is not None else {}
    lines: list[str] = []
    unfinished: Moment | None = None
    for moment in retrace(trial.program, run):
        if unfinished:
            lines += _truth_lines(unfinished, rows) + _cell_lines(pictures.get(unfinished.index))
        is_parting = moment.index == parting
        unfinished = None if is_parting or moment.step.demand in ("skip", "undeclared") else moment
        lines.append("")
        lines += wrapped(f"  {'>' if is_parting else ' '} {moment.index + 1}  {operation_text(moment.operation)}", "       ")
        for label, value in _facts(moment):
            lines += _fact_lines(label, value)
        if is_parting:
            for label, value in _parting_facts(moment, trial, run):
                lines += _fact_lines(label, value)
            return lines + _cell_lines(pictures.get(moment.index))
    return lines + (_truth_lines(unfinished, rows) + _cell_lines(pictures.get(unfinished.index)) if unfinished else [])


def pair_step_lines(trial: Trial, names: tuple[str, str]) -> list[str]:
    """Every step of two targets that are held to each other, up to their first difference: what was sent, and what each of them said."""
    own, other = trial.run, trial.other
    if own is None or other is None:
        return wrapped(f"  nothing is known of its steps: {trial.verdict.reason}", "    ")
    parting = trial.verdict.operation_index if trial.verdict.kind != "ok" else None
    rows = row_texts(own, other, trial.tolerance)
    lines: list[str] = []
    if trial.verdict.kind != "ok" and parting is None:
        return ["", "  > opening", *_fact_lines("parted", f"{trial.verdict.kind}: {trial.verdict.reason}")]
    for moment, its in zip(retrace(trial.program, own), other.steps, strict=False):
        is_parting = moment.index == parting
        lines.append("")
        lines += wrapped(f"  {'>' if is_parting else ' '} {moment.index + 1}  {operation_text(moment.operation)}", "       ")
        for label, value in _pair_facts(moment, its, names):
            lines += _fact_lines(label, value)
        if moment.index in rows:
            lines += _fact_lines("rows", rows[moment.index])
        if is_parting:
            lines += _fact_lines("parted", f"{trial.verdict.kind}{_in_brackets(place_text(trial.verdict))}: {trial.verdict.reason}")
            span = wrong_span(own, trial.verdict) if trial.verdict.kind in ("wrong-output", "nonfinite") else None
            if span is not None:
                lines += _pair_row_lines(own, other, span, trial.tolerance, names)
            return lines
    return lines


def _pair_facts(moment: Moment, its: Step, names: tuple[str, str]) -> Iterator[tuple[str, str]]:
    own = moment.step
    if own.demand in ("skip", "undeclared"):
        yield "said", f"{own.outcome.word}, and not sent: {own.reason}"
        return
    yield "sent", sent_text(moment)
    texts = [_answer_text(step) for step in (own, its)]
    if (own.outcome.word, own.positions) == (its.outcome.word, its.positions):
        yield "both said", texts[0]
    else:
        yield from (("said", f"{name}: {text}") for name, text in zip(names, texts, strict=True))


def _answer_text(step: Step) -> str:
    detail = f" ({step.outcome.detail})" if step.outcome.detail else ""
    return step.outcome.word + detail + (f"; last positions {_positions_text(step)}" if step.positions else "")


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _pair_row_lines(own: Run, other: Run, span: Span, tolerance: float, names: tuple[str, str]) -> list[str]:
    """The first wrong row, as both targets gave it."""
    mine, its = _given_rows(own, span), _given_rows(other, span)
    first = int(np.argmax(~(row_differences(mine, its) <= tolerance)))
    lines = _fact_lines("row", f"after token {span.indices[first] + 1}, position {span.offset + span.indices[first]}")
    for name, rows in zip(names, (mine, its), strict=True):
        lines += _fact_lines("given", f"{name}: {_largest_text(rows[first], span.hidden)}")
    return lines


def _opening_lines(trial: Trial, poisons: bool) -> list[str]:
    """The one step of a program whose target did not come to its first operation."""
    verdict = trial.verdict
    lines = ["", "  > opening"]
    for label, value in (
        ("sent", opening_text(trial.program.cache, poisons)),
        ("said", verdict.kind),
        ("parted", f"{verdict.kind} while opening" + (f": {verdict.reason}" if verdict.reason else "")),
        ("expected", "an open session, or a refusal to open one"),
    ):
        lines += _fact_lines(label, value)
    return lines


def opening_text(cache: CacheConfiguration, poisons: bool) -> str:
    """What a target is sent before the first operation, in words. `poisons`: it honours `start=poison`."""
    if cache.start == "fresh" or (cache.start == "poison" and poisons):
        return "open a session" + (" over poisoned memory" if cache.start == "poison" else "")
    return (
        f"open a session; then {DIRTY_TOKEN_COUNT} tokens to every sequence of 0..{cache.n_seq_max - 1}, one decode a sequence; "
        "then clear everything but the data"
    )


def _fact_lines(label: str, value: str) -> list[str]:
    return wrapped(f"       {label:<10}{value}", " " * 17)


def _facts(moment: Moment) -> Iterator[tuple[str, str]]:
    step = moment.step
    was_sent = step.demand not in ("skip", "undeclared")
    if was_sent:
        yield "sent", sent_text(moment)
    because = step.reason or _why(moment.operation, step.demand)
    if step.demand:
        yield "contract", _DEMANDS[step.demand] + (f": {because}" if because else "")
    has_detail = was_sent and step.outcome.detail and step.outcome.word not in ("crash", "hang")  # these say it as what parted
    detail = f" ({step.outcome.detail})" if has_detail else ""
    yield "said", step.outcome.word + detail + (f"; last positions {_positions_text(step)}" if step.positions and was_sent else "")


def _truth_lines(moment: Moment, rows: dict[int, str]) -> list[str]:
    """The logs' positions after a step (the checker has moved on past it), and its output rows."""
    logs = moment.checker.ledger.logs
    unchecked = [str(sequence) for sequence, log in enumerate(logs) if log.unchecked]
    text = f"last positions {ledger_text([log.position for log in logs])}"
    text += f" (not checked: {', '.join(unchecked)})" if unchecked else ""
    return _fact_lines("truth", text + (f"; {rows[moment.index]}" if moment.index in rows else ""))


def _cell_lines(step: FilmStep | None) -> list[str]:
    """What the cells hold after a step, a fact for each."""
    return [line for text in cell_lines(step) for line in _fact_lines("cell", text)] if step is not None else []


def _positions_text(step: Step) -> str:
    return ledger_text([last for _, last in step.positions])


def ledger_text(last_positions: Sequence[int]) -> str:
    """Last positions of the sequences that are not empty, e.g. "0:13 2:4"; "all empty" when there are none."""
    return " ".join(f"{sequence}:{last}" for sequence, last in enumerate(last_positions) if last >= 0) or "all empty"


# --- what was sent -----------------------------------------------------------------------------------------------------------


def _range_text(start: int, end: int) -> str:
    first = "the first position" if start in (0, OPEN) else f"position {start}"
    return f"from {first} on" if end == OPEN else f"positions {max(start, 0)}..{end - 1}"


def _tokens_text(tokens: Sequence[int]) -> str:
    shown = " ".join(map(str, tokens[:TOKENS_SHOWN_MAX]))
    return f"[{shown}{' ...' if len(tokens) > TOKENS_SHOWN_MAX else ''}]"


def _items_text(moment: Moment, items: tuple[Item, ...]) -> str:
    texts = []
    for piece in moment.checker.pieces(items):
        owners = "+".join(map(str, piece.sequences))
        last = piece.first_position + len(piece.tokens) - 1
        place = f"position {last}" if len(piece.tokens) == 1 else f"positions {piece.first_position}..{last}"
        texts.append(f"sequence {owners} {_tokens_text(piece.tokens)} at {place}")
    return "one batch: " + ", ".join(texts)


def sent_text(moment: Moment) -> str:
    """The call that the operation became, in words."""
    logs = moment.checker.ledger.logs
    match moment.operation:
        case Decode(items=items):
            return _items_text(moment, items)
        case Cancel(items=items, at=at):
            return f"{_items_text(moment, items)}, aborted at chance {at}"
        case Rollback(sequence=sequence, token_count=token_count):
            if token_count >= len(logs[sequence].tokens):
                return f"remove all of sequence {sequence}"
            return f"remove of sequence {sequence} {_range_text(logs[sequence].position - token_count + 1, OPEN)}"
        case Remove(sequence=sequence, start=start, end=end):
            return f"remove of sequence {sequence} {_range_text(start, end)}"
        case Drop(sequence=sequence):
            return f"remove all of sequence {sequence}"
        case Share(source=source, destination=destination, start=start, end=end):
            what = "all" if (start, end) == (OPEN, OPEN) else _range_text(start, end)
            return f"copy {what} of sequence {source} to sequence {destination}"
        case Keep(sequence=sequence):
            return f"keep only sequence {sequence}"
        case Shift(sequence=sequence, delta=delta):
            return f"add {delta} to every position of sequence {sequence}"
        case Divide(sequence=sequence, divisor=divisor):
            return f"divide every position of sequence {sequence} by {divisor}"
        case Save(sequence=sequence, slot=slot, partial=partial, device=device):
            what = "the recurrent part of" if partial else "all of"
            return f"save {what} sequence {sequence}{' on the device' if device else ''} as {slot}"
        case Restore(slot=slot, sequence=sequence):
            return f"restore {slot} into sequence {sequence}"
        case SaveAll(slot=slot):
            return f"save the whole session as {slot}"
        case RestoreAll(slot=slot):
            return f"restore the whole session from {slot}"
        case Damage(slot=slot):
            return f"nothing: the bytes of {slot} are damaged here"
        case Clear():
            return "clear everything"
        case Reopen():
            return "close the session and open a new one"


def _why(operation: AnyOperation, demand: str) -> str:
    """The contract's reason where the checker gives none (docs/contract.md has them all)."""
    if demand not in ("must-accept", "may"):
        return ""
    match operation:
        case Decode():
            return "the batch fits" if demand == "must-accept" else ""
        case Rollback() | Remove():
            return "all of a sequence can always go" if demand == "must-accept" else "not within the rollbacks that the target guarantees"
        case Drop() | Keep() | Clear() | Reopen():
            return "forgetting everything is always possible"
        case Share():
            return "a whole sequence can always be shared"
        case Save() | SaveAll():
            return "every state can be saved"
        case Restore() | RestoreAll():
            return "an undamaged save of the same configuration, and there is room"
        case Cancel() | Shift() | Divide():
            return f"{operation_name(operation)} is optional"
        case Damage():
            return ""


# --- what is true ------------------------------------------------------------------------------------------------------------


def _spans_at(run: Run, index: int) -> list[Span]:
    return [span for span in run.spans if span.operation_index == index]


def _given_rows(run: Run, span: Span) -> np.ndarray:
    data, width = run.rows[span.operation_index]
    return np.frombuffer(data, dtype=np.float32).reshape(-1, width)[list(span.places)]


def _true_rows(trial: Trial, run: Run, span: Span) -> np.ndarray:
    """The rows of a span that is known to be wrong, as they had to be."""
    if trial.truths:
        rows: np.ndarray = trial.truths[run.spans.index(span)]
        return rows
    return recompute_of(trial.program.model).rows([Request(span.log, span.indices, span.hidden)])[0]


def _rows_of_steps(trial: Trial, run: Run) -> dict[int, str]:
    """Operation index -> how far its output rows are from the truth, for operations that gave any."""
    errors: dict[int, list[np.ndarray]] = {}
    allowed = trial.tolerances or (trial.tolerance,) * len(run.spans)
    found = span_errors(trial.program.model, [run], [trial.truths] if trial.truths else None, [allowed])[0]
    for span, span_error in zip(run.spans, found, strict=True):
        errors.setdefault(span.operation_index, []).append(span_error)
    tolerances = {span.operation_index: tolerance for span, tolerance in zip(run.spans, allowed, strict=True)}
    texts = {}
    for index, parts in errors.items():
        rows = np.concatenate(parts)
        if not len(rows):
            texts[index] = "not known: the target's own recompute of the log failed"
            continue
        texts[index] = f"{plural(len(rows), 'output row')} off by at most {rows.max():.2g} (tolerance {tolerances[index]:.2g})"
    for index, count in Counter(inspection.operation_index for inspection in run.inspections).items():
        texts[index] = "; ".join([*([texts[index]] if index in texts else []), f"{plural(count, 'new state')} shown"])
    return texts


def _parting_facts(moment: Moment, trial: Trial, run: Run) -> Iterator[tuple[str, str]]:
    verdict = trial.verdict
    place = place_text(verdict)
    yield "parted", verdict.kind + (f" ({place})" if place else "") + (f": {verdict.reason}" if verdict.reason else "")
    if verdict.kind not in DIVERGENCE_KINDS:
        return
    spans = [span for span in _spans_at(run, moment.index) if span.sequence == verdict.sequence]
    if verdict.kind in ("wrong-state", "nonfinite") and verdict.part is not None:
        yield from _state_facts(trial, run)
    elif verdict.kind == "partial-effect" and verdict.part is not None:
        yield "expected", "every state row as it was before"
    elif verdict.kind in ("wrong-output", "nonfinite") and spans:
        yield from _row_facts(trial, run, spans[-1])
    elif verdict.kind in ("bad-refusal", "crash", "hang"):
        yield "expected", "accepted" if moment.step.demand == "must-accept" else "an answer"
    elif moment.step.demand == "must-refuse":
        yield "expected", "refused, and nothing changed"
    else:
        yield "expected", "last positions " + _expected_positions(moment, verdict.kind)
        yield "given", "last positions " + _positions_text(moment.step)


def _expected_positions(moment: Moment, kind: str) -> str:
    """Last positions as the logs have them after the operation; after a refusal, as before it."""
    before = [log.position for log in moment.checker.ledger.logs]
    if kind == "partial-effect":
        return ledger_text(before)
    # this brings the logs up to date; what it judges is known already
    moment.checker.conclude(moment.index, moment.operation, MAY, moment.step.outcome, moment.step.positions)
    return ledger_text([log.position for log in moment.checker.ledger.logs])


def _row_facts(trial: Trial, run: Run, span: Span) -> Iterator[tuple[str, str]]:
    given, truth = _given_rows(run, span), _true_rows(trial, run, span)
    if given.shape != truth.shape:
        yield "expected", f"rows of {truth.shape[1]} numbers"
        yield "given", f"rows of {given.shape[1]} numbers"
        return
    errors = judged_errors(given, truth)
    first = int(np.argmax(~(errors <= trial.tolerance)))
    yield "log", f"sequence {span.sequence} has {plural(len(span.log), 'token')}: {_last_tokens_text(span.log)}"
    yield "row", f"after token {span.indices[first] + 1}, position {span.offset + span.indices[first]}; off by {errors[first]:.3g}"
    yield "expected", _largest_text(truth[first], span.hidden)
    yield "given", _largest_text(given[first], span.hidden)
    difference = np.abs(np.nan_to_num(given[first].astype(np.float64) - truth[first], nan=np.inf))
    place = int(np.argmax(difference))
    yield "worst", f"number {place}: expected {truth[first][place]:.4f}, given {given[first][place]:.4f}"


def _state_facts(trial: Trial, run: Run) -> Iterator[tuple[str, str]]:
    """The wrong state row beside the true one."""
    verdict = trial.verdict
    found = [own for own in run.inspections if (own.operation_index, own.sequence) == (verdict.operation_index, verdict.sequence)]
    if not found:
        return
    (inspection,) = found
    yield "log", f"sequence {inspection.sequence} has {plural(len(inspection.log), 'token')}: {_last_tokens_text(inspection.log)}"
    row = (verdict.layer, verdict.part)
    given = {
        (layer, part): (shape, data) for (layer, part, shape), data in zip(inspection.shown.layout, inspection.shown.rows, strict=True)
    }
    (states,) = recompute_of(trial.program.model).states([inspection.log])
    truth = next((state.values for state in states if (state.layer, state.part) == row), None)
    if row not in given or truth is None or given[row][0] != truth.shape:
        yield "expected", "no row" if truth is None else f"a row {list(truth.shape)}"
        yield "given", "no row" if row not in given else f"a row {list(given[row][0])}"
        return
    own = np.frombuffer(given[row][1], np.float32).reshape(truth.shape)
    difference = np.abs(np.nan_to_num(own.astype(np.float64) - truth, nan=np.inf))
    place = np.unravel_index(int(np.argmax(difference)), truth.shape)
    yield (
        "state",
        f"{verdict.part} of layer {verdict.layer}, {list(truth.shape)}; {np.count_nonzero(difference > trial.tolerance)} of {truth.size} numbers differ",
    )
    yield "worst", f"number {[int(index) for index in place]}: expected {truth[place]:.4f}, given {own[place]:.4f}"


def _last_tokens_text(log: Sequence[int]) -> str:
    shown = " ".join(map(str, log[-TOKENS_SHOWN_MAX:]))
    return f"[{'... ' if len(log) > TOKENS_SHOWN_MAX else ''}{shown}]"


def _largest_text(row: np.ndarray, hidden: bool) -> str:
    order = np.argsort(-np.nan_to_num(row, nan=-np.inf))[:LOGITS_SHOWN]
    what = "largest hidden states" if hidden else "likeliest tokens"
    return f"{what} " + ", ".join(f"{number} ({row[number]:.3f})" for number in order)
