"""Mutants of a forward: what its kernels are told to read and write, and what they leave in the rows.

Rules
- As in mutant.py. No kernel is compiled for a mutant: arguments are changed before the call, or rows after it.
"""

import numpy as np

from ...impl.batches import OK, SplitBatch
from ...impl.cells import NONE, Plan
from ...impl.forwards import Sights
from ...impl.session import NumbaSession
from ...spec.target import Batch, Decoded
from ...spec.verdicts import refused
from .mutant import CLASSIC, Probe, mutant


class _Session(NumbaSession):
    probe: Probe


def _segments(ordered: SplitBatch, ubatch: int) -> range:
    return range(int(ordered.ubatch_start[ubatch]), int(ordered.ubatch_start[ubatch + 1]))


def _snapshot_rows(ordered: SplitBatch, plan: Plan, ubatch: int) -> np.ndarray:
    """Rows of all planes beyond the first that a ubatch writes; int64."""
    rows = plan.plane_row[_segments(ordered, ubatch), 1:].ravel() if len(plan.plane_row) else plan.plane_row.ravel()
    found: np.ndarray = rows[rows != NONE]
    return found


@mutant("vllm-project/vllm#53229", "model lfm2; decode 0:2; rollback 0 1; decode 0:1")
class SnapshotWindowOneTokenLate(_Session):
    """The convolution window of a snapshot is that of the token after it."""

    def _run_ubatch(self, ordered: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray) -> None:
        super()._run_ubatch(ordered, plan, sights, ubatch, hidden, y)
        rows = self._memory.convolution_rows
        if self.probe.strikes(rows.size > 0 and len(_snapshot_rows(ordered, plan, ubatch)) > 0):
            for segment in _segments(ordered, ubatch):
                written = plan.plane_row[segment][plan.plane_row[segment] != NONE]
                rows[:, written[1:]] = rows[:, written[:-1]].copy()


@mutant("ggml-org/llama.cpp#28123", "model kimi_linear; decode 0:2; rollback 0 1; decode 0:1")
class SnapshotWithoutConvolution(_Session):
    """Snapshots hold the recurrent state, and a convolution window that was never written."""

    def _run_ubatch(self, ordered: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray) -> None:
        snapshots, rows = _snapshot_rows(ordered, plan, ubatch), self._memory.convolution_rows
        before = rows[:, snapshots].copy()
        super()._run_ubatch(ordered, plan, sights, ubatch, hidden, y)
        if self.probe.strikes(before.size > 0):
            rows[:, snapshots] = before


@mutant("ggml-org/llama.cpp#28466", "model qwen3next; decode 0:2; rollback 0 1; decode 0:1")
class SnapshotWithoutRecurrentState(_Session):
    """Snapshots hold the convolution window, and a recurrent state that was never written."""

    def _run_ubatch(self, ordered: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray) -> None:
        snapshots, rows = _snapshot_rows(ordered, plan, ubatch), self._memory.recurrent_rows
        before = rows[:, snapshots].copy()
        super()._run_ubatch(ordered, plan, sights, ubatch, hidden, y)
        if self.probe.strikes(before.size > 0):
            rows[:, snapshots] = before


class _NearestSnapshot(_Session):
    def _run_ubatch(self, ordered: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray) -> None:
        nearest = plan.plane_row[_segments(ordered, ubatch), 1:2].ravel() if len(plan.plane_row) else plan.plane_row.ravel()
        nearest, rows = nearest[nearest != NONE], self._memory.recurrent_rows
        before = rows[:, nearest].copy()
        super()._run_ubatch(ordered, plan, sights, ubatch, hidden, y)
        if self.probe.strikes(before.size > 0):
            rows[:, nearest] = before


@mutant(CLASSIC, "model qwen35; decode 0:2; rollback 0 1; decode 0:1")
class NearestSnapshotNotWrittenByADeltaNet(_NearestSnapshot):
    """A gated delta net writes its state and the deeper snapshots of it, and not the one of the token before."""


@mutant(CLASSIC, "model mamba; decode 0:2; rollback 0 1; decode 0:1")
class NearestSnapshotNotWrittenByAScan(_NearestSnapshot):
    """A selective scan writes its state and the deeper snapshots of it, and not the one of the token before."""


@mutant(CLASSIC, "model lfm2; decode 0:1; decode 0:1")
class WindowLacksTheNewestToken(_Session):
    """The convolution windows that a decode leaves, its snapshots' too, end one token too early."""

    def _run_ubatch(self, ordered: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray) -> None:
        segments, rows = _segments(ordered, ubatch), self._memory.convolution_rows
        fresh, source = plan.zero_row[segments] != NONE, plan.source_row[segments]
        found = np.where(fresh[:, None], 0, rows[:, source])
        super()._run_ubatch(ordered, plan, sights, ubatch, hidden, y)
        if self.probe.strikes(found.size > 0):
            for place, segment in enumerate(segments):
                written = plan.plane_row[segment][plan.plane_row[segment] != NONE]
                rows[:, written[:-1]] = rows[:, written[1:]].copy()
                if ordered.segment_start[segment + 1] - ordered.segment_start[segment] == len(written):
                    rows[:, written[-1]] = found[:, place]


@mutant(CLASSIC, "model qwen4exp; decode 0:3; drop 0; decode 0:1")
class TokenHistoryNotZeroed(_Session):
    """A new sequence starts from zero states, and from the last owner's convolution of per-layer embeddings."""

    def _run_ubatch(self, ordered: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray) -> None:
        fresh, memory = plan.zero_row[_segments(ordered, ubatch)], self._memory
        fresh = fresh[fresh != NONE]
        if self.probe.strikes(bool(memory.embedding_rows[:, fresh].any())):
            memory.convolution_rows[:, fresh] = memory.recurrent_rows[:, fresh] = 0
            plan = plan._replace(zero_row=np.full_like(plan.zero_row, NONE))
        super()._run_ubatch(ordered, plan, sights, ubatch, hidden, y)


@mutant("ggml-org/llama.cpp#19531", "model lfm2; decode 0:1 1:1; decode 1:1")
class WindowsOfOneSequenceForAll(_Session):
    """With several sequences in a ubatch all are left with the first one's convolution window."""

    def _run_ubatch(self, ordered: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray) -> None:
        super()._run_ubatch(ordered, plan, sights, ubatch, hidden, y)
        segments, rows = _segments(ordered, ubatch), self._memory.convolution_rows
        if self.probe.strikes(rows.size > 0 and len(segments) > 1):
            rows[:, plan.plane_row[segments, 0]] = rows[:, plan.plane_row[segments[:1], 0]]


@mutant("ggml-org/llama.cpp#11445", "model rwkv6; decode 0:1; decode 0:1")
class TokenShiftNotWrittenBySingleTokens(_Session):
    """A decode of one token leaves the token-shift row as it was; a prompt writes it."""

    def _run_ubatch(self, ordered: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray) -> None:
        segments, rows = _segments(ordered, ubatch), self._memory.convolution_rows
        single = [segment for segment in segments if ordered.segment_start[segment + 1] - ordered.segment_start[segment] == 1]
        source = np.where(plan.zero_row[single] == NONE, plan.source_row[single], NONE)
        before = np.where((source == NONE)[:, None], 0, rows[:, source])
        super()._run_ubatch(ordered, plan, sights, ubatch, hidden, y)
        if self.probe.strikes(before.size > 0):
            rows[:, plan.plane_row[single, 0]] = before


@mutant("sgl-project/sglang#37836", "model mamba2; decode 0:1 1:1")
class EverySequenceReadsTheFirstOnesState(_Session):
    """Within a ubatch the row to read is worked out for the first sequence and used for all."""

    def _run_ubatch(self, ordered: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray) -> None:
        segments = _segments(ordered, ubatch)
        if self.probe.strikes(len(segments) > 1 and len(plan.source_row) > 0):
            source = plan.source_row.copy()
            source[segments] = source[segments[0]]
            plan = plan._replace(source_row=source)
        super()._run_ubatch(ordered, plan, sights, ubatch, hidden, y)


@mutant("huggingface/transformers#48256", "model mamba2; decode 0:1 1:2; decode 0:1")
class PaddingDecaysTheState(_Session):
    """In a ubatch of unequal lengths the states of the shorter sequences decay over the padding."""

    def _run_ubatch(self, ordered: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray) -> None:
        super()._run_ubatch(ordered, plan, sights, ubatch, hidden, y)
        segments, rows = _segments(ordered, ubatch), self._memory.recurrent_rows
        tokens = np.diff(ordered.segment_start)[segments]
        if self.probe.strikes(rows.size > 0 and len(set(tokens.tolist())) > 1):
            for segment, missing in zip(segments, (tokens.max() - tokens).tolist(), strict=True):
                rows[:, plan.plane_row[segment, 0]] *= np.float32(0.9**missing)


@mutant("ggml-org/llama.cpp#14211", "model mamba2; decode 0:1 1:1 0:1")
class OutputRowsInTheOrderOfTheUbatch(_Session):
    """Output rows come in the order in which a batch was cut, and not in that of its tokens."""

    def _split(self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, wanted: np.ndarray) -> tuple[int, int, SplitBatch]:
        code, wrong, ordered = super()._split(tokens, positions, sequences, wanted)
        rows = ordered.output_row.copy()
        rows[rows != NONE] = np.sort(rows[rows != NONE])
        if self.probe.strikes(code == OK and not np.array_equal(rows, ordered.output_row)):
            ordered = ordered._replace(output_row=rows)
        return code, wrong, ordered


@mutant("ggml-org/llama.cpp#14575", "model mamba2; cache n_ubatch=4; decode 0:5", "bad-refusal")
class SecondUbatchRefused(_Session):
    """Whether a batch was used up is asked inside the loop over ubatches: one that takes several of them fails."""

    def decode(self, batch: Batch) -> Decoded:
        if self.probe.strikes(len(batch.tokens) > self._ubatch_size):
            return Decoded(refused("the batch was not used up"))
        return super().decode(batch)


@mutant(CLASSIC, "model zamba2; cache n_ubatch=4; decode 0:5")
class LaterUbatchesSeeEarlierCellsOnly(_Session):
    """Attention of a later ubatch does not see the tokens of the same batch that came in an earlier one."""

    def _run_ubatch(self, ordered: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray) -> None:
        full, windowed = sights
        first_place = ordered.segment_start[ordered.ubatch_start[ubatch]]
        if self.probe.strikes(ubatch > 0 and len(full.length) > 0):
            own = np.arange(len(full.length)) - first_place + 1  # at least the token itself, at most this ubatch's
            hidden_count = np.where(own > 0, np.maximum(full.length - own, 0), 0)
            full = full._replace(first=full.first + hidden_count, length=full.length - hidden_count)
        super()._run_ubatch(ordered, plan, (full, windowed), ubatch, hidden, y)
