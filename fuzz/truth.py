"""The engine as its own truth: an output row is right when it is that of a fresh session that was given the whole log at once.

Rules
- A truth is asked for as any program is run: one sequence, no snapshots, no state operation, one decode of the whole log (of more tokens than
  a decode of the target takes, as few as it takes), with the program's own type of attention cells and its flash attention.
- All logs that are asked for go together; one that another extends is not decoded by itself, but where the longer one fails, or its rows up to
  there are not finite. What was decoded is kept for the next time.
- What cannot be had (a refusal, a death) is a `NoTruth` with its reason, never a guess, and is asked for again the next time: it may pass. A row
  that is not finite says nothing of itself only.
- Before a divergence counts, the truths that it rests on are decoded once more; where the bits are others, neither is the truth.
- Seen is what an engine does differently when it is driven differently. What it does wrong in the same way every time is not seen.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
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
DECODED_AGAIN = "decoded a second time in a fresh session,"


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


def truth_program(form: Form, log: Log, n_ubatch: int | None = None, decode_tokens_max: int = DECODE_TOKENS_MAX) -> Program:
    """The program whose output rows are the truth of `log` and of every log that it extends; `decode_tokens_max` is what a decode takes."""
    room = -(-len(log) // CELLS_STEP) * CELLS_STEP
    outputs: Outputs = "embeddings" if form.hidden else "all"
    cache = CacheConfiguration(
        n_seq_max=1, n_rs_seq=0, n_ubatch=n_ubatch or min(room, DECODE_TOKENS_MAX), n_ctx=room, outputs=outputs,
        kv=form.setting.kv, flash=form.setting.flash,
    )  # fmt: skip
    pieces = [log[start : start + decode_tokens_max] for start in range(0, len(log), decode_tokens_max)]
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
        self._rows: dict[tuple[Form, Log], np.ndarray] = {}
        self._finite_counts: dict[tuple[Form, Log], int] = {}
        """How many rows are finite before the first that is not."""
        self._bytes = 0

    def rows_of_spans(self, programs: Sequence[Program], runs: Sequence[Run]) -> list[list[np.ndarray | NoTruth]]:
        """For every run and every one of its spans the true rows, float64 [rows, width]; NaN where they are not finite."""
        asked = [(form_of(program, span), span) for program, run in zip(programs, runs, strict=True) for span in run.spans]
        logs: dict[Form, set[Log]] = defaultdict(set)
        for form, span in asked:
            if span.indices:
                logs[form].add(span.log)
        failed = self._decode(logs)
        truths = iter([self._true_rows(form, span.log, span.indices, failed) for form, span in asked])
        return [[next(truths) for _ in run.spans] for run in runs]

    def doubts(self, places: Sequence[tuple[Program, Run, int]]) -> list[str]:
        """For each run and index of an operation: why the truths of that operation's rows are none when they are decoded a second time; empty
        when they are the same bits. What is doubted is not kept."""
        resting = [[(form_of(program, span), span.log) for span in spans_at(run, index) if span.indices] for program, run, index in places]
        leaves = {key: (key[0], leaf) for own in resting for key in own if (leaf := self._leaf(*key)) is not None}
        again = self._decoded(list(dict.fromkeys(leaves.values())))
        reasons = {key: _doubt(self._rows[leaf], again[leaf], len(key[1])) for key, leaf in leaves.items()}
        for form, log in {leaves[key] for key, reason in reasons.items() if reason}:
            self._forget(form, log)
        return [next(filter(None, (reasons.get(key, "") for key in own)), "") for own in resting]

    def _true_rows(self, form: Form, log: Log, indices: Sequence[int], failed: dict[tuple[Form, Log], NoTruth]) -> np.ndarray | NoTruth:
        if not indices:
            return np.empty((0, 0))
        if (form, log) in failed:
            return failed[form, log]
        leaf = self._leaf(form, log)
        assert leaf is not None
        rows: np.ndarray = self._rows[form, leaf][list(indices)].astype(np.float64)
        rows[~np.isfinite(rows).all(axis=1)] = np.nan
        return rows

    def _leaf(self, form: Form, log: Log) -> Log | None:
        """A log that was decoded and begins with `log`: sorted, the first one that does not come before it, if any and if its rows up to there
        are finite; `log` itself in any case."""
        leaves = self._leaves.get(form, [])
        place = bisect_left(leaves, log)
        leaf = leaves[place] if place < len(leaves) else ()
        is_sound = leaf == log or (leaf[: len(log)] == log and self._finite_counts[form, leaf] >= len(log))
        return leaf if leaf and is_sound else None

    def _decode(self, asked: dict[Form, set[Log]]) -> dict[tuple[Form, Log], NoTruth]:
        """Decode what is not kept, but no log that another one extends; what of it cannot be had."""
        if self._bytes > BYTES_KEPT_MAX:
            self._leaves, self._rows, self._finite_counts, self._bytes = {}, {}, {}, 0
        failed: dict[tuple[Form, Log], NoTruth] = {}
        # The longest first; another round only where one of them failed, or is finite in its beginning only.
        ordered = [(form, log) for form, logs in asked.items() for log in sorted(logs)]
        while missing := [key for key in ordered if key not in failed and self._leaf(*key) is None]:
            longest = [key for key, following in zip_longest(missing, missing[1:]) if not _extends(following, key)]
            for (form, log), rows in self._decoded(longest).items():
                if isinstance(rows, NoTruth):
                    failed[form, log] = rows
                else:
                    self._keep(form, log, rows)
        return failed

    def _decoded(self, keys: Sequence[tuple[Form, Log]]) -> dict[tuple[Form, Log], np.ndarray | NoTruth]:
        """Every log in a fresh session: all its rows, float32 [tokens, width]."""
        programs = [truth_program(form, log) for form, log in keys]
        results = list(self._run_all(programs))
        limits = {number: limit for number, result in enumerate(results) if (limit := _limit_broken(programs[number], result))}
        shorter = [truth_program(*keys[number], decode_tokens_max=limit) for number, limit in limits.items()]
        for number, result in zip(limits, self._run_all(shorter) if shorter else (), strict=True):
            results[number] = result
        return {(form, log): rows_of(result, len(log)) for (form, log), result in zip(keys, results, strict=True)}

    def _keep(self, form: Form, log: Log, rows: np.ndarray) -> None:
        is_finite = np.isfinite(rows).all(axis=1)
        self._rows[form, log] = rows
        self._finite_counts[form, log] = len(log) if is_finite.all() else int(np.argmin(is_finite))
        self._bytes += rows.nbytes
        insort(self._leaves.setdefault(form, []), log)

    def _forget(self, form: Form, log: Log) -> None:
        self._leaves[form].remove(log)
        self._bytes -= self._rows.pop((form, log)).nbytes
        del self._finite_counts[form, log]


def _doubt(first: np.ndarray, second: np.ndarray | NoTruth, count: int) -> str:
    """Why the first `count` rows are no truth, by what the same log gave a second time; empty when they are one."""
    if isinstance(second, NoTruth):
        return f"{DECODED_AGAIN} {second.reason}"
    return "" if first[:count].tobytes() == second[:count].tobytes() else f"{DECODED_AGAIN} it gave other bits"


def _extends(longer: tuple[Form, Log] | None, key: tuple[Form, Log]) -> bool:
    return longer is not None and longer[0] == key[0] and longer[1][: len(key[1])] == key[1]


def _limit_broken(program: Program, result: Run | Death | Failed) -> int:
    """The target's largest batch where a decode of the program is larger; else 0."""
    largest = max(operation.items[0].token_count for operation in program.operations if isinstance(operation, Decode))
    limit = result.capabilities.n_batch if isinstance(result, Run) and result.steps else 0
    return limit if limit < largest else 0


def spans_at(run: Run, index: int) -> list[Span]:
    """The spans of a run's operation."""
    return [span for span in run.spans if span.operation_index == index]


def form_of(program: Program, span: Span) -> Form:
    """What a span's truth depends on: the session that gave its rows is the one that the last reopen before it opened."""
    number = sum(isinstance(operation, Reopen) for operation in program.operations[: span.operation_index])
    return Form(program.model, setting_of(caches_of(program)[number]), span.hidden)
