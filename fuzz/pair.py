"""Two targets held to each other instead of one to the oracle: the same calls to both, and their answers side by side.

Rules
- The second target is the truth. What either of them does not declare is sent to neither.
- Nothing is judged by the contract: a program goes on until it ends, or one of them dies; its first difference decides.
- Two targets of one engine (Capabilities.engine) have to agree in all of it; others may differ in what the contract leaves free: the first
  position of a sequence, how many snapshots are kept, the bytes of a blob.
- Answers are compared before positions, and positions before output rows; after an operation at which both die there is nothing to compare.
- An output row of one against the other's: err as everywhere (fuzz/judgement.py), right when err <= the sum of both tolerances. Rows that
  are finite in neither agree.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from ..oracle.contract import Span
from ..spec.configuration import CacheConfiguration
from ..spec.errors import UsageError
from ..spec.models import Model
from ..spec.operations import AnyOperation, Reopen, operation_name, sequences_of
from ..spec.programs import Program, caches_of
from ..spec.target import Capabilities, Target
from ..spec.verdicts import Outcome, Relation, Verdict
from ..store.campaigns import Noise
from .engine_child import Failed
from .execution import NOTHING_DECLARED, Manner, Run, Step, dead_at_opening
from .judgement import close_rows, row_errors
from .sandbox import Death
from .trial import Bench, Trial, check_judgeable, failed_verdict
from .two_builds import TwoBuilds

BOTH_TRUTHS = "--inspect compares state rows with the truth, and --against has another target for it; leave out one of them"
TWO_TRUTHS = "--against has another target for the truth, and --oracle engine the target itself; leave out one of them"
OPTIONAL = ("coupled", "cancel", "shift", "divide", "save_all", "partial", "device", "embeddings", "partial_share", "save")


class Names(NamedTuple):
    """The two targets, as they are called in verdicts."""

    own: str
    other: str


def label_of(target: str, against: str | None) -> str:
    """A target in signatures, with the one that it is held to."""
    return target if against is None else f"{target} against {against}"


def common_capabilities(own: Capabilities, other: Capabilities) -> Capabilities:
    """What both sessions can do; what is a fact of the model or a promise is the other's."""
    limits = [capabilities.n_ctx for capabilities in (own, other) if capabilities.n_ctx]
    return msgspec.structs.replace(
        other,
        n_batch=min(own.n_batch, other.n_batch),
        n_ctx=min(limits, default=0),
        engine=other.engine if own.engine == other.engine else "",
        **{name: getattr(own, name) and getattr(other, name) for name in OPTIONAL},
    )


# --- comparing ---------------------------------------------------------------------------------------------------------------


def compare(program: Program, own: Run, other: Run, tolerance: float, names: Names) -> Verdict:
    """The first difference between two followed runs of one program, as a verdict on the first of them; `ok` when they agree."""
    parting = _parting_step(program, own, other, names)
    rows = _first_wrong_rows(program.model, own, other, tolerance, names, parting[0] if parting else len(program.operations))
    if rows.verdict is not None:
        return rows.verdict
    if parting is not None:
        return parting[1]
    how = "both targets die" if _has_died(own) else "both targets answer alike"
    reason = f"{how}; their outputs differ by at most {rows.error:.2g} (tolerance {tolerance:.2g})"
    return Verdict("ok", error=rows.error, tolerance=tolerance, reason=reason)


def _has_died(run: Run) -> bool:
    return run.verdict is not None and run.verdict.kind in ("crash", "hang")


def _died_opening(run: Run) -> bool:
    return _has_died(run) and not run.steps


def _parting_step(program: Program, own: Run, other: Run, names: Names) -> tuple[int, Verdict] | None:
    """The first operation with different answers or positions, and the verdict; -1 is the opening."""
    if _died_opening(own) or _died_opening(other):
        return None if _died_opening(own) and _died_opening(other) else (-1, _opening_difference(own, other, names))
    shared = other.capabilities
    exact = bool(shared.engine) or not (shared.recurrent or shared.windowed)
    for index, (operation, mine, its) in enumerate(zip(program.operations, own.steps, other.steps, strict=False)):
        if mine.outcome.word != its.outcome.word:
            return index, _outcome_difference(index, operation, mine.outcome, its.outcome, names)
        if mine.outcome.word in ("crash", "hang"):
            return None
        if (difference := _position_difference(index, operation, mine, its, names, exact)) is not None:
            return index, difference
    if len(own.steps) != len(other.steps):
        return min(len(own.steps), len(other.steps)), Verdict("harness-error", reason="one target was sent more operations than the other")
    return None


def _said(outcome: Outcome) -> str:
    return outcome.word + (f" ({outcome.detail})" if outcome.detail else "")


def _opening_difference(own: Run, other: Run, names: Names) -> Verdict:
    words = [f"died ({run.verdict.reason})" if run.verdict and _died_opening(run) else "a session" for run in (own, other)]
    hangs = any(run.verdict and run.verdict.kind == "hang" for run in (own, other))
    reason = f"while opening, {names.own}: {words[0]}; {names.other}: {words[1]}"
    return Verdict("hang" if hangs else "crash", relation="self", reason=reason)


def _outcome_difference(index: int, operation: AnyOperation, own: Outcome, other: Outcome, names: Names) -> Verdict:
    words = (own.word, other.word)
    said = [f"{names.own}: {_said(own)}", f"{names.other}: {_said(other)}"]
    if own.word in ("crash", "hang"):  # what a death says of itself comes last
        said.reverse()
    reason = "; ".join(said)
    if "skipped" in words:
        return Verdict("harness-error", index, reason=f"{operation_name(operation)} was sent to one target only ({reason})")
    kind: Literal["hang", "crash", "false-success", "bad-refusal"] = "bad-refusal"
    if "hang" in words:
        kind = "hang"
    elif "crash" in words:
        kind = "crash"
    elif own.word in ("accepted", "cancelled"):
        kind = "false-success"
    named = sorted(sequences_of(operation))
    return Verdict(kind, index, named[0] if named else None, relation="self", reason=reason)


def _judged(positions: tuple[int, int], exact: bool) -> tuple[int, int]:
    """What of a first and a last position has to agree: without `exact` only whether there is a first one."""
    return positions if exact else (min(positions[0], 0), positions[1])


def _position_difference(index: int, operation: AnyOperation, own: Step, other: Step, names: Names, exact: bool) -> Verdict | None:
    pairs = list(zip(own.positions, other.positions, strict=True))
    differing = [sequence for sequence, (mine, its) in enumerate(pairs) if _judged(mine, exact) != _judged(its, exact)]
    if not differing:
        return None
    sequence = differing[0]
    mine, its = pairs[sequence]
    named = sequences_of(operation)
    relation: Relation = "self" if sequence in named or not named else "other"
    reason = f"sequence {sequence} is at {_range(mine)} in {names.own}, at {_range(its)} in {names.other}"
    return Verdict("wrong-position", index, sequence, mine[1], relation, reason=reason)


def _range(positions: tuple[int, int]) -> str:
    return "no position" if positions == (-1, -1) else f"positions {positions[0]} to {positions[1]}"


class _Rows(NamedTuple):
    """The verdict of the first operation with wrong rows, and the largest error of all rows that were compared."""

    verdict: Verdict | None
    error: float


def row_differences(own: np.ndarray, other: np.ndarray) -> np.ndarray:
    """err of every row, float32 [n, width] both; 0 where neither row is finite, not finite where one of them is not."""
    errors = row_errors(own, other.astype(np.float64))
    errors[~np.isfinite(own).all(axis=1) & ~np.isfinite(other).all(axis=1)] = 0.0
    return errors


def _rows_of(run: Run, index: int) -> np.ndarray:
    data, width = run.rows[index]
    return np.frombuffer(data, np.float32).reshape(-1, width)


def _first_wrong_rows(model: Model, own: Run, other: Run, tolerance: float, names: Names, end: int) -> _Rows:
    """Compare the rows of all operations before `end`, at once where one width allows it. Rows that differ and hang on a selection too close to
    be judged are not compared."""
    indices = [index for index in sorted(own.rows) if index < end and index in other.rows and own.rows[index] != other.rows[index]]
    largest = 0.0
    first: tuple[int, np.ndarray] | None = None
    close: dict[int, list[int]] | None = None
    for width in sorted({own.rows[index][1] for index in indices}):
        chosen = [index for index in indices if own.rows[index][1] == width]
        pairs = [(_rows_of(own, index), _rows_of(other, index)) for index in chosen]
        errors = row_differences(np.concatenate([mine for mine, _ in pairs]), np.concatenate([its for _, its in pairs]))
        if not np.all(errors <= tolerance):
            close = close_rows(model, own, tolerance) if close is None else close
            ends = np.cumsum([len(mine) for mine, _ in pairs])
            for index, part in zip(chosen, np.split(errors, ends[:-1]), strict=True):
                not_judged = [place for place in close.get(index, ()) if np.isfinite(part[place])]
                part[not_judged] = 0.0  # a view of `errors`
                if not np.all(part <= tolerance) and (first is None or index < first[0]):
                    first = index, part
        largest = max(largest, float(errors.max(initial=0.0)))
    return _Rows(None if first is None else _wrong_rows(own, first[0], first[1], tolerance, names), largest)


def _wrong_rows(run: Run, index: int, errors: np.ndarray, tolerance: float, names: Names) -> Verdict:
    """The verdict for the sequence with the worst row; its first wrong row gives the position."""
    spans = [span for span in run.spans if span.operation_index == index]
    span = max(spans, key=lambda span: _badness(errors[list(span.places)]))
    own = errors[list(span.places)]
    first = int(np.argmax(~(own <= tolerance)))
    finite = bool(np.all(np.isfinite(own)))
    error = float(own.max()) if finite else None
    what = "hidden states" if span.hidden else "logits"
    differ = (
        f"{what} differ from {names.other}'s by {error:.3g} (tolerance {tolerance:.2g})"
        if finite
        else f"{what} are finite in one target only"
    )
    position = span.offset + span.indices[first]
    return Verdict(
        "wrong-output" if finite else "nonfinite", index, span.sequence, position, span.relation, error, tolerance, reason=differ
    )


def _badness(errors: np.ndarray) -> float:
    return float("inf") if not np.all(np.isfinite(errors)) else float(errors.max(initial=0.0))


def row_texts(own: Run, other: Run, tolerance: float) -> dict[int, str]:
    """Operation index -> how far the rows of both are apart, for operations that gave both of them rows."""
    texts = {}
    for index in sorted(own.rows.keys() & other.rows.keys()):
        errors = row_differences(_rows_of(own, index), _rows_of(other, index))
        rows = f"{len(errors)} output row" + ("" if len(errors) == 1 else "s")
        texts[index] = f"{rows} {errors.max(initial=0.0):.2g} apart at most (tolerance {tolerance:.2g})"
    return texts


def wrong_span(run: Run, verdict: Verdict) -> Span | None:
    """The span of a wrong row; None when the verdict is about something else."""
    spans = [span for span in run.spans if span.operation_index == verdict.operation_index and span.sequence == verdict.sequence]
    return next((span for span in spans if verdict.position in {span.offset + index for index in span.indices}), None)


# --- trying programs ---------------------------------------------------------------------------------------------------------


class _Opening(NamedTuple):
    """A session as both targets open it; None where one of them cannot."""

    own: Capabilities | None
    other: Capabilities | None

    @property
    def common(self) -> Capabilities | None:
        if self.own is None or self.other is None:
            return self.own or self.other
        return common_capabilities(self.own, self.other)

    @property
    def snapshots_differ(self) -> bool:
        """Of two sessions of one engine."""
        return self.own is not None and self.other is not None and bool(self.own.engine) and self.own.n_rs_seq != self.other.n_rs_seq


class Pair(Bench):
    """Two targets, ready to try programs on; the second is the truth for the first.

    Raises UsageError and UnavailableError as a `Bench` does.
    """

    def __init__(self, target: str | Target, against: str | Target) -> None:
        super().__init__(target)
        try:
            self.against = Bench(against)
        except BaseException:
            super().close()
            raise
        self.against.spent = self.spent
        self.against_name, self.against_version = self.against.target_name, self.against.version
        self.names = Names(self.target_name, self.against.target_name)
        self._both: dict[Model, Noise] = {}
        self._openings: dict[tuple[Model, CacheConfiguration], _Opening] = {}

    @property
    def label(self) -> str:
        return label_of(*self.names)

    def close(self) -> None:
        """End the child processes."""
        super().close()
        self.against.close()

    def renew(self) -> None:
        """Go on with native targets in processes that ran nothing yet."""
        super().renew()
        self.against.renew()

    def noise(self, model: Model) -> Noise:
        """Both floors and both tolerances, added. Raises UnavailableError when one of the targets cannot be judged on the model."""
        if model not in self._both:
            own, other = super().noise(model), self.against.noise(model)
            self._both[model] = Noise(own.floor + other.floor, own.tolerance + other.tolerance, min(own.log_count, other.log_count))
        return self._both[model]

    def set_noise(self, noise: dict[Model, Noise]) -> None:
        self._both.update(noise)

    def try_programs(self, programs: Sequence[Program]) -> list[Trial]:
        """Run programs on both targets and compare; the answer has the programs' order."""
        for program in programs:
            check_judgeable(program)
            self.noise(program.model)
        self._learn_openings(programs)
        manners = [Manner(follow=True, allowed=self._allowed(program)) for program in programs]
        results = list(zip(self.run(programs, manners), self.against.run(programs, manners), strict=True))
        known = [
            (_known(self, program, manner, own), _known(self.against, program, manner, other))
            for program, manner, (own, other) in zip(programs, manners, results, strict=True)
        ]
        started = perf_counter()
        trials = [self._trial_of(program, own, other) for program, (own, other) in zip(programs, known, strict=True)]
        self.spent.judging += perf_counter() - started
        return trials

    def _trial_of(self, program: Program, own: Run | Verdict, other: Run | Verdict) -> Trial:
        if isinstance(own, Verdict) or isinstance(other, Verdict):
            named = [(self.names.own, own), (self.names.other, other)]
            name, verdict = next((name, result) for name, result in named if isinstance(result, Verdict))
            verdict = Verdict(verdict.kind, verdict.operation_index, reason=f"{name}: {verdict.reason}")
            return self.trial(program, own if isinstance(own, Run) else None, verdict)
        verdict = compare(program, own, other, self.tolerance(program.model), self.names)
        return self.trial(program, own, self._snapshot_difference(program, own, verdict) or verdict, other=other)

    # --- what may be sent --------------------------------------------------------------------------------------------------

    def _learn_openings(self, programs: Sequence[Program]) -> None:
        """Open a session of every kind that the programs need on both targets, once, to see what it declares."""
        keys = {_opening_key(program.model, cache): None for program in programs for cache in caches_of(program)}
        unknown = [key for key in keys if key not in self._openings]
        empty = [Program(model, cache, ()) for model, cache in unknown]
        for key, own, other in zip(unknown, self.run(empty), self.against.run(empty), strict=True):
            self._openings[key] = _Opening(*(result.capabilities if isinstance(result, Run) else None for result in (own, other)))

    def _openings_of(self, program: Program) -> list[_Opening]:
        return [self._openings[_opening_key(program.model, cache)] for cache in caches_of(program)]

    def _allowed(self, program: Program) -> tuple[Capabilities, ...]:
        common = [opening.common for opening in self._openings_of(program)]
        return tuple(capabilities for capabilities in common if capabilities is not None) if None not in common else ()

    def _snapshot_difference(self, program: Program, run: Run, verdict: Verdict) -> Verdict | None:
        """Sessions that keep different numbers of snapshots are a difference of their own, where it is the first."""
        places = [-1, *(index for index, operation in enumerate(program.operations) if isinstance(operation, Reopen))]
        for index, opening in zip(places, self._openings_of(program), strict=True):
            is_first = not verdict.is_divergence or (verdict.operation_index is not None and index <= verdict.operation_index)
            if opening.snapshots_differ and index < len(run.steps) and is_first:
                assert opening.own is not None
                assert opening.other is not None
                counts = (opening.own.n_rs_seq, opening.other.n_rs_seq)
                reason = f"snapshots (n_rs_seq) that a session keeps, {self.names.own}: {counts[0]}; {self.names.other}: {counts[1]}"
                kind: Literal["false-success", "bad-refusal"] = "false-success" if counts[0] > counts[1] else "bad-refusal"
                return Verdict(kind, None if index < 0 else index, relation="self", reason=reason)
        return None


def _opening_key(model: Model, cache: CacheConfiguration) -> tuple[Model, CacheConfiguration]:
    """What a session declares does not depend on what memory held, or on what is asked of a decode."""
    return model, msgspec.structs.replace(cache, start="fresh", outputs="all", interleave=0)


def _known(bench: Bench, program: Program, manner: Manner, result: Run | Death | Failed) -> Run | Verdict:
    """A run, also of what came before a death; a verdict when nothing can be compared."""
    match result:
        case Run():
            return result
        case Failed():
            return failed_verdict(result)
        case Death(verdict=verdict):
            before = bench.run_before(program, result, manner) if verdict.is_divergence else None
            if before is None and verdict.is_divergence and verdict.operation_index is None:
                return dead_at_opening(verdict, NOTHING_DECLARED, manner)  # over fresh memory, too
            return before or Verdict(
                "unknown", verdict.operation_index, reason=f"it ended in a way that did not come back: {verdict.reason}"
            )


def open_bench(
    target: str | Target,
    against: str | Target | None = None,
    inspect: bool = False,
    oracle: str = "own",
    against_library: str | None = None,
) -> Bench:
    """A target that is held to an oracle (`inspect`: its state rows, too), or to another target; errors as of `Bench`.

    against_library  another build of the target, whose own divergences are none (two_builds.py)
    """
    if against is None and against_library is not None:
        return TwoBuilds(target, against_library, inspect, oracle)
    if against is None:
        return Bench(target, inspect, oracle)
    if oracle != "own":
        raise UsageError(TWO_TRUTHS)
    if inspect:
        raise UsageError(BOTH_TRUTHS)
    return Pair(target, against)
