"""A session of the policy `llamacpp`: the calls of llama.h over the policy's memory and our own forwards.

Rules
- Every call does what the call of llama.h that the target `llamacpp` makes would do; what the engine refuses is refused with the same word.
- Where the engine's process would end, `EngineAbort` is raised; the session is then of no use any more.
- Bad arguments are UsageError, as in every session: they reach no memory.
- `cancel` is not declared: which nodes of a graph had run when it was aborted is not the memory's affair. Nor are tokens of several
  sequences where the graph strays.
Source: llama.cpp's src/llama-context.cpp.
"""

from collections.abc import Sequence

import numpy as np

from ...spec.configuration import CacheConfiguration
from ...spec.errors import EngineAbort, UsageError
from ...spec.families import family_of
from ...spec.models import Model
from ...spec.operations import OPEN
from ...spec.pictures import Reading, Snapshot, SnapshotCell
from ...spec.target import Batch, Capabilities, Decoded, StateRow
from ...spec.verdicts import ACCEPTED, Outcome, refused
from ..batches import SplitBatch
from ..hybrid_cache import POSITION_MAX
from ..model import check_session, prepared
from ..snapshots import digests, recurrent_rows
from .architectures import ARCHITECTURES
from .batches import LlamaBatch, engine_order
from .cells import required
from .memory import LlamaMemory, Placed
from .saved_state import MAGIC, BlobError, BlobReader, BlobWriter
from .switches import Switches

EVERY = -1
"""All sequences, in the engine's own words."""


class LlamaPolicySession:
    """One opened context. See `spec.target.Session` for what the calls mean."""

    def __init__(self, model: Model, configuration: CacheConfiguration, switches: Switches) -> None:
        """Raises UsageError for a model or a configuration that cannot be had, EngineAbort for one that the engine dies of."""
        self._model = prepared(model)
        check_session(self._model, configuration)
        family = family_of(model)
        is_hybrid = bool(family.attention_layers(family.defaults))
        if not self._model.recurrent_layers or (is_hybrid and not self._model.attention_layers):
            raise UsageError(
                f"the policy llamacpp runs a {model.family} only with recurrent and attention layers, as the engine does; give it both"
            )
        architecture = ARCHITECTURES[model.family]
        self._is_open = True
        self._leaps, self._strays = architecture.leaps, architecture.strays
        self._memory = LlamaMemory(self._model, configuration, architecture, switches)
        if architecture.one_sequence and not configuration.unified:
            n_ubatch, n_seq_max = self._memory.n_ubatch, configuration.n_seq_max
            required(n_ubatch >= n_seq_max, "ggml_nelements(a) == ne0*ne1*ne2")
            required(n_ubatch % n_seq_max == 0, "ggml_can_repeat(b, a)")
        self._n_seq_max = configuration.n_seq_max
        self._architecture_name = str(family.gguf_metadata(self._model.dimensions)["general.architecture"]).encode()
        self._kept_on_device: dict[int, list[bytes]] = {}
        self.capabilities = self._capabilities(configuration)

    def _capabilities(self, configuration: CacheConfiguration) -> Capabilities:
        """As targets/llamacpp.py declares them for the engine, without `cancel`, and without `coupled` where the graph strays."""
        memory, unified = self._memory, bool(configuration.unified)
        sizes = {cells.size for cells in memory.attention}
        can_shift = not self._leaps and len(sizes) <= 1
        return Capabilities(
            guarantee="draft" if memory.n_rs_seq else "none",
            n_rs_seq=memory.n_rs_seq,
            n_batch=memory.n_batch,
            n_ctx=(memory.n_ctx // self._n_seq_max if unified else memory.n_ctx) if memory.is_hybrid else 0,
            recurrent=True,
            attention=memory.is_hybrid,
            windowed=memory.has_window,
            coupled=memory.is_hybrid and unified and not self._strays,
            shift=can_shift,
            divide=can_shift,
            save_all=True,
            partial=True,
            device=True,
            embeddings=True,
            partial_share=True,
            engine="llama.cpp",
        )

    def decode(self, batch: Batch) -> Decoded:
        """llama_decode: refused with -1 for positions or sets it does not take, with 1 when there is no room."""
        token_count = len(batch.tokens)
        owners = self._owners(batch)
        if token_count > self.capabilities.n_batch:
            return Decoded(refused(f"{token_count} tokens in a batch; this session takes {self.capabilities.n_batch}"))
        if not self.capabilities.coupled and any(len(sequences) > 1 for sequences in owners):
            return Decoded(refused("tokens of several sequences: not a capability of this configuration"))
        memory, hidden = self._memory, batch.outputs == "embeddings"
        arriving = LlamaBatch(batch.tokens.tolist(), batch.positions.tolist(), owners)
        reason = arriving.refusal(memory.bounds, self._leaps)
        if reason is not None:
            return Decoded(refused(f"-1: {reason}"))
        memory.update()
        prepared_ubatches = memory.prepare(arriving, hidden)
        if prepared_ubatches is None:
            return Decoded(refused("1: no slot for the batch"))
        row_of = np.where(batch.wanted, np.cumsum(batch.wanted) - 1, -1)
        dimensions = self._model.dimensions
        y = np.empty((int(np.count_nonzero(batch.wanted)), dimensions["n_embd" if hidden else "n_vocab"]), np.float32)
        for placed in prepared_ubatches:
            self._compute(placed, row_of, hidden, y)
        return Decoded(ACCEPTED, y)

    def _compute(self, placed: Placed, row_of: np.ndarray, hidden: bool, y: np.ndarray) -> None:
        ubatch = placed.ubatch
        plan, sights = self._memory.apply(placed)
        split = SplitBatch(
            np.array(ubatch.tokens, np.int64),
            np.array(ubatch.positions, np.int64),
            row_of[list(ubatch.rows)].astype(np.int64),
            np.array([ubatch.owners[number * ubatch.set_tokens][0] for number in range(ubatch.set_count)], np.int64),
            np.arange(ubatch.set_count + 1, dtype=np.int64) * ubatch.set_tokens,
            np.array([0, ubatch.set_count], np.int64),
        )
        self._model.forward(self._model.weights, self._memory.arrays, split, plan, sights, 0, hidden, y)

    def cancel(self, batch: Batch, at: int) -> Decoded:
        """Refused: not declared."""
        return Decoded(refused("the policy does not model a decode that is aborted"))

    def remove(self, sequence: int, start: int, end: int) -> Outcome:
        """llama_memory_seq_rm."""
        self._check_sequence(sequence)
        return ACCEPTED if self._memory.remove(sequence, start, end) else refused("llama_memory_seq_rm returned false")

    def share(self, source: int, destination: int, start: int, end: int) -> Outcome:
        """llama_memory_seq_cp, which has no way to refuse."""
        self._check_sequence(source, "source")
        self._check_sequence(destination, "destination")
        self._memory.share(source, destination, start, end)
        return ACCEPTED

    def keep(self, sequence: int) -> Outcome:
        """llama_memory_seq_keep."""
        self._check_sequence(sequence)
        self._memory.keep(sequence)
        return ACCEPTED

    def shift(self, sequence: int, delta: int) -> Outcome:
        """llama_memory_seq_add over all positions."""
        self._check_sequence(sequence)
        if not self.capabilities.shift:
            return refused("shift: not a capability of this model")
        last = self._memory.bounds(sequence)[1]
        if not -POSITION_MAX <= delta <= POSITION_MAX - max(last, 0):
            raise UsageError(f"`delta` must leave positions between 0 and {POSITION_MAX}; {delta} does not")
        self._memory.shift(sequence, delta)
        return ACCEPTED

    def divide(self, sequence: int, divisor: int) -> Outcome:
        """llama_memory_seq_div over all positions."""
        self._check_sequence(sequence)
        if not 1 <= divisor <= POSITION_MAX:
            raise UsageError(f"`divisor` must be from 1 to {POSITION_MAX}, not {divisor}")
        if not self.capabilities.divide:
            return refused("divide: not a capability of this model")
        self._memory.divide(sequence, divisor)
        return ACCEPTED

    def save(self, sequence: int, partial: bool, device: bool) -> tuple[Outcome, bytes]:
        """llama_state_seq_get_data_ext."""
        self._check_sequence(sequence)
        kept: list[bytes] = []
        writer = BlobWriter(kept if device else None)
        writer.write("Ii", MAGIC, sequence)
        self._memory.write(writer, sequence, partial)
        if device and (kept or sequence not in self._kept_on_device):  # a save without tensor data leaves what was kept before
            self._kept_on_device[sequence] = kept
        return ACCEPTED, writer.blob()

    def save_all(self) -> tuple[Outcome, bytes]:
        """llama_state_get_data."""
        self._check_open()
        writer = BlobWriter()
        writer.write("I", len(self._architecture_name))
        writer.write_bytes(self._architecture_name)
        self._memory.write(writer, EVERY, False)
        return ACCEPTED, writer.blob()

    def restore(self, sequence: int, blob: bytes, partial: bool, device: bool) -> Outcome:
        """llama_state_seq_set_data_ext; after a partial one the attention cells past its end are removed, as a server does."""
        self._check_sequence(sequence)
        outcome = self._restored(BlobReader(blob, self._kept_for(blob) if device else None), sequence, partial)
        if outcome is ACCEPTED and partial:
            end = self._memory.bounds(sequence)[1] + 1
            if not self._memory.remove(sequence, end, OPEN):
                return Outcome("error", f"restored, but the attention cells from position {end} on were not removed")
        return outcome

    def _kept_for(self, blob: bytes) -> list[bytes]:
        """What stayed on the device for the sequence that a blob names. Raises EngineAbort when the blob does not say, or nothing did."""
        try:
            magic, saved_sequence = BlobReader(blob).read("Ii")
        except BlobError as error:
            raise EngineAbort(f"terminate called: {error}") from error
        if magic != MAGIC or saved_sequence not in self._kept_on_device:
            raise EngineAbort("no tensor data are kept for this blob")
        return self._kept_on_device[saved_sequence]

    def _restored(self, reader: BlobReader, sequence: int, partial: bool) -> Outcome:
        try:
            if reader.read("Ii")[0] != MAGIC:
                return refused("wrong sequence state magic")
            self._memory.read(reader, sequence, partial)
        except BlobError as error:
            return refused(str(error))
        reader.finish()
        return ACCEPTED

    def restore_all(self, blob: bytes) -> Outcome:
        """llama_state_set_data."""
        self._check_open()
        reader = BlobReader(blob)
        try:
            if reader.read_bytes(reader.read("I")[0]) != self._architecture_name:
                return refused("wrong model arch")
            self._memory.read(reader, EVERY, False)
        except BlobError as error:
            return refused(str(error))
        reader.finish()
        return ACCEPTED

    def clear(self, data: bool) -> Outcome:
        """llama_memory_clear."""
        self._check_open()
        self._memory.clear(data)
        return ACCEPTED

    def positions(self) -> Sequence[tuple[int, int]]:
        """llama_memory_seq_pos_min and _max of every sequence."""
        self._check_open()
        return [self._memory.bounds(sequence) for sequence in range(self._n_seq_max)]

    def inspect(self, sequence: int) -> Sequence[StateRow]:
        """Not offered: the states of this policy are wrong where the engine's are."""
        raise UsageError("target numba-llamacpp does not show its state rows")

    def snapshot(self) -> Snapshot:
        """The cells of the recurrent side as the policy keeps them, what their planes hold, and where every sequence is read from next."""
        self._check_open()
        side = self._memory.recurrent
        cells = side.cells
        size, planes = cells.size, 1 + cells.n_rs_seq
        held = digests((side.convolution_rows, side.recurrent_rows), size * planes)
        shown = [
            SnapshotCell(tuple(sorted(owners)), position, tuple(held[cell::size]))
            for cell, (owners, position) in enumerate(zip(cells.owners, cells.position, strict=True))
        ]
        readings = []
        for sequence, cell in enumerate(cells.tail):
            if cell >= 0 and cells.source[cell] >= 0:
                plane = cells.rollback_index[sequence]
                readings.append(Reading(sequence, cells.source[cell], plane, plane))
        rows = [reading.plane * size + reading.cell for reading in readings]
        states = [tuple(recurrent_rows(self._model, side.convolution_rows[:, row], side.recurrent_rows[:, row])) for row in rows]
        attention = tuple(self._memory.attention[-1].bounds(sequence) for sequence in range(size)) if self._memory.attention else ()
        return Snapshot(tuple(shown), tuple(readings), tuple(states), attention)

    def close(self) -> None:
        """Every later call is an error."""
        self._is_open = False

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError("the session is closed; open a new one")

    def _check_sequence(self, sequence: int, name: str = "sequence") -> None:
        self._check_open()
        if not 0 <= sequence < self._n_seq_max:
            raise UsageError(f"`{name}` must be from 0 to {self._n_seq_max - 1}, not {sequence}")

    def _owners(self, batch: Batch) -> list[tuple[int, ...]]:
        """The sequences of every token, in the engine's order. Raises UsageError for a batch that does not fit together."""
        self._check_open()
        token_count = len(batch.tokens)
        if batch.outputs not in ("all", "last", "embeddings"):
            raise UsageError(f"`outputs` must be all, last or embeddings, not {batch.outputs}")
        if not token_count:
            raise UsageError("`tokens` is empty; a decode needs at least one token")
        if not len(batch.positions) == len(batch.sequences) == len(batch.wanted) == token_count:
            raise UsageError("`positions`, `sequences` and `wanted` must be as long as `tokens`")
        n_vocab = self._model.dimensions["n_vocab"]
        low, high = int(batch.tokens.min()), int(batch.tokens.max())
        if low < 0 or high >= n_vocab:
            raise UsageError(f"`tokens` must be from 0 to {n_vocab - 1}, not {low if low < 0 else high}")
        if batch.positions.min() < 0:
            raise UsageError(f"`positions` must not be negative, as {batch.positions.min()} is")
        for sequences in batch.sequences:
            if not sequences or len(set(sequences)) != len(sequences):
                raise UsageError(f"`sequences` of a token must be different ids, at least one, not {sequences}")
            for sequence in sequences:
                self._check_sequence(sequence, "sequences")
        return [engine_order(sequences) for sequences in batch.sequences]
