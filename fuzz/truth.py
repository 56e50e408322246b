"""The engine as its own truth: an output row is right when it is that of a fresh session that was given the whole log at once.

Rules
- A truth is asked for as any program is run: one sequence, no snapshots, no state operation, one decode of the whole log (of more tokens than
  a decode takes, as few as it takes), with the program's own type of attention cells and its flash attention.
- All logs that are asked for go together; one that another extends is not decoded by itself. What was decoded is kept for the next time.
- What cannot be had (a refusal, a death, a row that is not finite) is a `NoTruth` with its reason, never a guess.
- Seen is what an engine does differently when it is driven differently. What it does wrong in the same way every time is not seen.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from ..oracle.contract import Span
from ..spec.configuration import CacheConfiguration
from ..spec.models import Model
from ..spec.operations import Decode, Item, Outputs, Reopen
from ..spec.programs import DECODE_TOKENS_MAX, Program, caches_of
from .engine_child import Failed
from .execution import Run
from .sandbox import Death

Log = tuple[int, ...]
RunAll = Callable[[Sequence[Program]], Sequence[Run | Death | Failed]]

ORACLES = ("own", "engine")
CELLS_STEP = 256
"""A truth's session has room for its log in steps of so many tokens, so that logs of about one length are computed alike."""
BYTES_KEPT_MAX = 1 << 27


class Setting(NamedTuple):
    """What of a cache's configuration changes how an engine rounds: it has a truth and a noise floor of its own."""

    kv: Literal["f32", "f16"] = "f32"
    flash: int = 0


PLAIN_SETTING = Setting()


class Form(NamedTuple):
    """Logs of one form have their truths in common."""

    model: Model
    setting: Setting
    hidden: bool


class NoTruth(NamedTuple):
    """A truth that cannot be had."""

    reason: str


def setting_of(cache: CacheConfiguration) -> Setting:
    """The setting of a session."""
    return Setting(cache.kv, cache.flash)


def settings_of(program: Program) -> list[Setting]:
    """The settings of the program's sessions, each once."""
    return list(dict.fromkeys(map(setting_of, caches_of(program))))


def truth_program(form: Form, log: Log, n_ubatch: int | None = None) -> Program:
    """The program whose output rows are the truth of `log` and of every log that it extends."""
    room = -(-len(log) // CELLS_STEP) * CELLS_STEP
    outputs: Outputs = "embeddings" if form.hidden else "all"
    cache = CacheConfiguration(
        n_seq_max=1, n_rs_seq=0, n_ubatch=n_ubatch or min(room, DECODE_TOKENS_MAX), n_ctx=room, outputs=outputs,
        kv=form.setting.kv, flash=form.setting.flash,
    )  # fmt: skip
    pieces = [log[start : start + DECODE_TOKENS_MAX] for start in range(0, len(log), DECODE_TOKENS_MAX)]
    return Program(form.model, cache, tuple(Decode((Item((0,), len(piece), 0, piece),)) for piece in pieces))


def rows_of(result: Run | Death | Failed, token_count: int) -> np.ndarray | NoTruth:
    """All output rows of a truth's program, float32 [tokens, width]; NoTruth when it was not answered with them."""
    match result:
        case Death(verdict=verdict):
            return NoTruth(f"it ended in a {verdict.kind} ({verdict.reason})")
        case Failed(message=message):
            return NoTruth(message)
        case Run():
            refusal = next((step.outcome for step in result.steps if step.outcome.word != "accepted"), None)
            if refusal is not None:
                return NoTruth(f"it was {refusal.word}" + (f" ({refusal.detail})" if refusal.detail else ""))
            parts = [np.frombuffer(data, np.float32).reshape(-1, width) for _, (data, width) in sorted(result.rows.items())]
            if sum(map(len, parts)) != token_count:
                return NoTruth(result.verdict.reason if result.verdict else "it gave no output rows")
            return np.concatenate(parts)


class EngineTruth:
    """The truths of one target. `run_all` runs programs on it."""

    def __init__(self, run_all: RunAll) -> None:
        self._run_all = run_all
        self._leaves: dict[Form, list[Log]] = {}  # sorted
        self._rows: dict[tuple[Form, Log], np.ndarray | NoTruth] = {}
        self._bytes = 0

    def rows_of_spans(self, programs: Sequence[Program], runs: Sequence[Run]) -> list[list[np.ndarray | NoTruth]]:
        """For every run and every one of its spans the true rows, float64 [rows, width]."""
        asked = [(_form_of(program, span), span) for program, run in zip(programs, runs, strict=True) for span in run.spans]
        self._decode([(form, span.log) for form, span in asked if span.indices])
        truths = iter([self._true_rows(form, span.log, span.indices) for form, span in asked])
        return [[next(truths) for _ in run.spans] for run in runs]

    def _true_rows(self, form: Form, log: Log, indices: Sequence[int]) -> np.ndarray | NoTruth:
        if not indices:
            return np.empty((0, 0))
        leaf = self._leaf(form, log)
        assert leaf is not None
        rows = self._rows[form, leaf]
        if isinstance(rows, NoTruth):
            return rows
        chosen = rows[list(indices)].astype(np.float64)
        return chosen if np.all(np.isfinite(chosen)) else NoTruth("its output rows are not finite")

    def _leaf(self, form: Form, log: Log) -> Log | None:
        """A log that was decoded and begins with `log`: sorted, the first one that does not come before it, if any."""
        leaves = self._leaves.get(form, [])
        place = bisect_left(leaves, log)
        return leaves[place] if place < len(leaves) and leaves[place][: len(log)] == log else None

    def _decode(self, asked: Sequence[tuple[Form, Log]]) -> None:
        """Decode what is not kept, but no log that another one extends."""
        if self._bytes > BYTES_KEPT_MAX:
            self._leaves, self._rows, self._bytes = {}, {}, 0
        missing: dict[Form, set[Log]] = defaultdict(set)
        for form, log in asked:
            if self._leaf(form, log) is None:
                missing[form].add(log)
        longest = [
            (form, log)
            for form, logs in missing.items()
            for log, following in pairwise([*sorted(logs), ()])
            if following[: len(log)] != log
        ]
        results = self._run_all([truth_program(form, log) for form, log in longest])
        for (form, log), result in zip(longest, results, strict=True):
            rows = rows_of(result, len(log))
            self._bytes += 0 if isinstance(rows, NoTruth) else rows.nbytes
            self._rows[form, log] = rows
            insort(self._leaves.setdefault(form, []), log)


def _form_of(program: Program, span: Span) -> Form:
    """The session that gave a span's rows is the one that the last reopen before it opened."""
    number = sum(isinstance(operation, Reopen) for operation in program.operations[: span.operation_index])
    return Form(program.model, setting_of(caches_of(program)[number]), span.hidden)
