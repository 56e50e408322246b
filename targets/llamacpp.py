"""llamacpp: the real llama.cpp, as the library that llama-cpp-python installs, or another build (llama_builds.py).

Rules
- One call of the session is one call of the library; only the restore of a partial blob is two, as a server does it: the recurrent
  part is read back, then the attention cells past its position are removed.
- The library's own words are kept: a false, a 0, a return code of 1 or -1 is a refusal, 2 is cancelled, any other code an error.
- Nothing is cleaned up for the library: what it leaves after a refusal is what the contract judges.
- A session has a context of its own; models are kept, because loading one costs more than a program.
  Contexts are not kept: measured, that is slower (benchmarks/KEPT_SESSIONS.md, with what survives a clear; LLAMACPP_SPEED.md: what a program costs).
- Float32 caches, no flash attention and one thread unless the configuration says otherwise, so that rounding hides nothing.
Source: llama.h; what is declared was read in llama-context.cpp, llama-memory-recurrent.cpp, llama-memory-hybrid.cpp and llama-kv-cache.cpp.
"""

import collections
import ctypes
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.configuration import CacheConfiguration
from ..spec.errors import UnavailableError, UsageError
from ..spec.families import ENGINE_ONLY, FAMILIES, dimensions_of, family_of
from ..spec.models import Model, model_text
from ..spec.operations import OPEN
from ..spec.target import Batch, Capabilities, Decoded, StateRow, Undocumented
from ..spec.verdicts import ACCEPTED, Outcome, refused
from .gguf_file import gguf_package, write_gguf
from .llama_builds import environment_of
from .llama_library import BatchArrays, CancelCallback, Library, set_present
from .llama_loading import load_library
from .llama_tensors import write_engine_only

ENGINE = "llama.cpp"
BATCH_TOKENS_MAX = 4096
"""Most tokens in one decode; the library takes fewer when its whole pool is smaller."""
_CELLS_STEP = 256
_MODELS_KEPT = 8


class LoadedModel:
    """A model in the library's memory, and how many sessions use it."""

    def __init__(self, library: Library, model: Model) -> None:
        _check_head_size(model)
        call = library.call
        parameters = call.llama_model_default_params()
        parameters.n_gpu_layers = 0
        # read, not mapped: the file is gone once the model is loaded; and no repacked weights: one way of computing
        set_present(parameters, load_mode=0, use_mmap=False, use_extra_bufts=False)
        line_count = library.log.line_count
        with tempfile.TemporaryDirectory(prefix="statedrift-") as folder:
            path = Path(folder) / "model.gguf"
            if family_of(model).is_modelled:
                write_gguf(model, path)
            else:
                write_engine_only(library, model, path)
            self.handle: Any = call.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.handle:
            raise UsageError(f"llama.cpp does not load model `{model_text(model)}`: {library.log.first_since(line_count)}")
        self.vocabulary_size: int = call.llama_vocab_n_tokens(call.llama_model_get_vocab(self.handle))
        self.output_width: int = call.llama_model_n_embd_out(self.handle)
        self.has_attention_cache = not call.llama_model_is_recurrent(self.handle)
        family, dimensions = family_of(model), dimensions_of(model)
        self.shows_hidden_states = self.output_width == dimensions["n_embd"]
        self.has_recurrent_layers = bool(family.recurrent_layers(dimensions))
        self.has_attention_layers = bool(family.attention_layers(dimensions))
        self.has_window = bool(family.attention_window(dimensions))
        if self.has_attention_cache and not (self.has_recurrent_layers and self.has_attention_layers):
            call.llama_model_free(self.handle)
            raise UsageError(
                f"llama.cpp does not run `{model_text(model)}`: it aborts on a {model.family} without recurrent or without attention layers; "
                "give it both"
            )
        self.session_count = 0


def _check_head_size(model: Model) -> None:
    """Raise UsageError for attention heads of one channel, on which the library aborts while it builds the graph."""
    metadata = family_of(model).gguf_metadata(dimensions_of(model))
    if any(key.endswith(".attention.key_length") and value == 1 for key, value in metadata.items()):
        raise UsageError(
            f"llama.cpp does not run `{model_text(model)}`: it aborts on attention heads of one channel (n_embd / n_head is 1); "
            "give it a larger n_embd or a smaller n_head"
        )


class LoadedModels:
    """The models last used; the oldest that no session uses makes room."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._models: collections.OrderedDict[Model, LoadedModel] = collections.OrderedDict()

    def get(self, model: Model) -> LoadedModel:
        """The loaded `model`, loading it when it is not kept."""
        if model not in self._models:
            self._models[model] = LoadedModel(self.library, model)
        self._models.move_to_end(model)
        idle = [kept for kept, loaded in self._models.items() if not loaded.session_count and kept != model]
        for kept in idle[: max(0, len(self._models) - _MODELS_KEPT)]:
            self.library.call.llama_model_free(self._models.pop(kept).handle)
        return self._models[model]


@functools.cache
def _models() -> LoadedModels:
    return LoadedModels(load_library())


@functools.cache
def _shared_batch() -> tuple[BatchArrays, Any]:
    """Arrays for the largest batch, and the one struct that points at them; a decode fills their beginning, and the library is done with them
    when it returns. All sessions share them: what is used again and again stays in the processor's cache."""
    tokens, positions, sequence_counts = (np.empty(BATCH_TOKENS_MAX, np.int32) for _ in range(3))
    arrays = BatchArrays(tokens, positions, sequence_counts, np.empty(BATCH_TOKENS_MAX, np.uint64), np.empty(BATCH_TOKENS_MAX, np.int8))
    return arrays, load_library().batch(arrays)


class LlamaSession:
    """One `llama_context`. See spec.target.Session."""

    def __init__(self, library: Library, loaded: LoadedModel, model: Model, configuration: CacheConfiguration) -> None:
        self._library = library
        self._call = call = library.call
        self._log = library.log
        self._loaded = loaded
        self._sequence_count = configuration.n_seq_max
        line_count = self._log.line_count
        self._context: Any = call.llama_init_from_model(loaded.handle, _context_parameters(library, loaded, configuration))
        if not self._context:
            raise UsageError(f"llama.cpp does not open `{model_text(model)}` with this cache: {self._log.first_since(line_count)}")
        loaded.session_count += 1
        self._check_pool(configuration)
        self._memory: Any = call.llama_get_memory(self._context)
        self.capabilities = _capabilities(library, self._context, loaded, configuration)
        self._embeddings_on = False
        self._chances_left = 0
        self._prepare_batch()

    def _check_pool(self, configuration: CacheConfiguration) -> None:
        """The last flags of the parameters have defaults that a shifted layout can imitate; what the library made of `unified` cannot be."""
        n_ctx_seq = _cells_of_sequence(self._call, self._context, configuration)
        pool = _pool_cells(configuration)
        expected = pool if configuration.unified else pool // configuration.n_seq_max
        if self._loaded.has_attention_cache and n_ctx_seq != expected:
            self.close()
            raise UnavailableError(
                f"target llamacpp is not available: the library at {load_library().path} opened {n_ctx_seq} cells a sequence, not {expected}; "
                "its llama_context_params are not those that describe it"
            )

    def _prepare_batch(self) -> None:
        """The shared arrays, and where the library reads the ids of the sequences of a token."""
        self._arrays, self._batch = _shared_batch()
        self._ids = np.arange(self._sequence_count, dtype=np.int32)
        base = self._ids.ctypes.data
        self._address_of: dict[tuple[int, ...], int] = {(sequence,): base + 4 * sequence for sequence in range(self._sequence_count)}
        self._coupled_ids: list[ctypes.Array[ctypes.c_int32]] = []

    def decode(self, batch: Batch) -> Decoded:
        token_count = len(batch.tokens)
        self._check_batch(batch)
        if token_count > self.capabilities.n_batch:
            return Decoded(refused(f"{token_count} tokens in a batch; this session takes {self.capabilities.n_batch}"))
        counts = list(map(len, batch.sequences))
        if not self.capabilities.coupled and max(counts) > 1:
            return Decoded(refused("tokens of several sequences: not a capability of this configuration"))
        embeddings = batch.outputs == "embeddings"
        if embeddings != self._embeddings_on:
            self._call.llama_set_embeddings(self._context, embeddings)
            self._embeddings_on = embeddings
        arrays = self._arrays
        arrays.tokens[:token_count] = batch.tokens
        arrays.positions[:token_count] = batch.positions
        arrays.sequence_addresses[:token_count] = list(map(self._address, batch.sequences))
        arrays.sequence_counts[:token_count] = counts
        # with embeddings on the library computes every row, and warns when not all were asked for
        arrays.wanted[:token_count] = True if embeddings else batch.wanted
        self._batch.n_tokens = token_count
        line_count = self._log.line_count
        code = self._call.llama_decode(self._context, self._batch)
        if code != 0:
            return Decoded(_decode_outcome(code, self._log.first_since(line_count)))
        return Decoded(ACCEPTED, self._rows(batch, embeddings))

    def _rows(self, batch: Batch, embeddings: bool) -> np.ndarray:
        """The wanted rows: float32 [wanted tokens, vocabulary or hidden width], in batch order as the library keeps them."""
        count = len(batch.tokens) if embeddings else int(np.count_nonzero(batch.wanted))
        width = self._loaded.output_width if embeddings else self._loaded.vocabulary_size
        if not count:
            return np.empty((0, width), np.float32)
        source = self._call.llama_get_embeddings(self._context) if embeddings else self._call.llama_get_logits(self._context)
        rows = np.frombuffer(self._library.read(source, 4 * count * width), np.float32).reshape(count, width)
        return rows[batch.wanted] if embeddings else rows

    def _check_batch(self, batch: Batch) -> None:
        token_count = len(batch.tokens)
        if not token_count:
            raise UsageError("`tokens` is empty; a decode needs at least one token")
        if not len(batch.positions) == len(batch.sequences) == len(batch.wanted) == token_count:
            raise UsageError("`positions`, `sequences` and `wanted` must be as long as `tokens`")
        tokens: list[int] = batch.tokens.tolist()  # a batch is small: quicker than NumPy's reductions
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self._loaded.vocabulary_size:
            raise UsageError(f"`tokens` must be from 0 to {self._loaded.vocabulary_size - 1}, not {low if low < 0 else high}")
        first = min(batch.positions.tolist())
        if first < 0:
            raise UsageError(f"`positions` must not be negative, as {first} is")
        for ids in set(batch.sequences):
            if ids not in self._address_of:
                if not ids or len(set(ids)) != len(ids):
                    raise UsageError(f"`sequences` of a token must be different ids, at least one, not {ids}")
                for sequence in ids:
                    self._check_sequence(sequence, "sequences")

    def _address(self, ids: tuple[int, ...]) -> int:
        address = self._address_of.get(ids)
        if address is None:
            array = (ctypes.c_int32 * len(ids))(*ids)
            self._coupled_ids.append(array)
            address = self._address_of[ids] = ctypes.addressof(array)
        return address

    def _check_sequence(self, sequence: int, name: str = "sequence") -> None:
        if not 0 <= sequence < self._sequence_count:
            raise UsageError(f"`{name}` must be from 0 to {self._sequence_count - 1}, not {sequence}")

    def cancel(self, batch: Batch, at: int) -> Decoded:
        if at < 0:
            raise UsageError(f"`at` must not be negative, as {at} is")
        self._chances_left = at
        callback = CancelCallback(self._chance)  # not kept: it holds the session, which would then end as garbage
        self._call.llama_set_abort_callback(self._context, self._library.function(callback), self._library.null)
        try:
            return self.decode(batch)
        finally:
            self._call.llama_set_abort_callback(self._context, self._library.function(None), self._library.null)

    def _chance(self, _: int | None) -> bool:
        self._chances_left -= 1
        return self._chances_left < 0

    def remove(self, sequence: int, start: int, end: int) -> Outcome:
        self._check_sequence(sequence)
        line_count = self._log.line_count
        if self._call.llama_memory_seq_rm(self._memory, sequence, start, end):
            return ACCEPTED
        return refused(self._log.first_since(line_count) or "llama_memory_seq_rm returned false")

    def share(self, source: int, destination: int, start: int, end: int) -> Outcome:
        self._check_sequence(source, "source")
        self._check_sequence(destination, "destination")
        self._call.llama_memory_seq_cp(self._memory, source, destination, start, end)
        return ACCEPTED

    def keep(self, sequence: int) -> Outcome:
        self._check_sequence(sequence)
        self._call.llama_memory_seq_keep(self._memory, sequence)
        return ACCEPTED

    def shift(self, sequence: int, delta: int) -> Outcome:
        self._check_sequence(sequence)
        if not self.capabilities.shift:
            return refused("shift: not a capability of this model")
        self._call.llama_memory_seq_add(self._memory, sequence, OPEN, OPEN, delta)
        return ACCEPTED

    def divide(self, sequence: int, divisor: int) -> Outcome:
        self._check_sequence(sequence)
        if divisor < 1:
            raise UsageError(f"`divisor` must be at least 1, not {divisor}")
        if not self.capabilities.divide:
            return refused("divide: not a capability of this model")
        self._call.llama_memory_seq_div(self._memory, sequence, OPEN, OPEN, divisor)
        return ACCEPTED

    def save(self, sequence: int, partial: bool, device: bool) -> tuple[Outcome, bytes]:
        self._check_sequence(sequence)
        flags = self._state_flags(partial, device)
        line_count = self._log.line_count
        size = self._call.llama_state_seq_get_size_ext(self._context, sequence, flags)
        blob = self._library.buffer(size) if size else b""
        written = self._call.llama_state_seq_get_data_ext(self._context, blob, size, sequence, flags) if size else 0
        return self._saved(blob, written, line_count)

    def save_all(self) -> tuple[Outcome, bytes]:
        line_count = self._log.line_count
        size = self._call.llama_state_get_size(self._context)
        blob = self._library.buffer(size) if size else b""
        written = self._call.llama_state_get_data(self._context, blob, size) if size else 0
        return self._saved(blob, written, line_count)

    def _saved(self, blob: Any, written: int, line_count: int) -> tuple[Outcome, bytes]:
        if not written:
            return refused(self._log.first_since(line_count) or "0 bytes were saved"), b""
        return ACCEPTED, self._library.read(blob, written)

    def _state_flags(self, partial: bool, device: bool) -> int:
        """A flag that the library does not have is no capability, and never asked for."""
        constants = self._library.constants
        return (constants.partial_only or 0) * partial | (constants.on_device or 0) * device

    def restore(self, sequence: int, blob: bytes, partial: bool, device: bool) -> Outcome:
        self._check_sequence(sequence)
        line_count = self._log.line_count
        if not self._call.llama_state_seq_set_data_ext(self._context, blob, len(blob), sequence, self._state_flags(partial, device)):
            return refused(self._log.first_since(line_count) or "0 bytes were restored")
        if partial:
            end = self._call.llama_memory_seq_pos_max(self._memory, sequence) + 1
            if not self._call.llama_memory_seq_rm(self._memory, sequence, end, OPEN):
                return Outcome("error", f"restored, but the attention cells from position {end} on were not removed")
        return ACCEPTED

    def restore_all(self, blob: bytes) -> Outcome:
        line_count = self._log.line_count
        if self._call.llama_state_set_data(self._context, blob, len(blob)):
            return ACCEPTED
        return refused(self._log.first_since(line_count) or "0 bytes were restored")

    def clear(self, data: bool) -> Outcome:
        self._call.llama_memory_clear(self._memory, data)
        return ACCEPTED

    def positions(self) -> Sequence[tuple[int, int]]:
        first, last, memory = self._call.llama_memory_seq_pos_min, self._call.llama_memory_seq_pos_max, self._memory
        return [(first(memory, sequence), last(memory, sequence)) for sequence in range(self._sequence_count)]

    def inspect(self, sequence: int) -> Sequence[StateRow]:
        raise UsageError("target llamacpp does not show its state rows")

    def close(self) -> None:
        if self._context:
            self._call.llama_free(self._context)
            self._context = None
            self._loaded.session_count -= 1


def _pool_cells(configuration: CacheConfiguration) -> int:
    """Attention cells of all sequences, in the steps the library makes of them.

    It would pad a smaller number itself, but limits the batch, and with it the ubatch, by the number before padding.
    """
    n_ctx, n_seq_max = configuration.n_ctx, configuration.n_seq_max
    return _padded(n_ctx * n_seq_max) if configuration.unified else _padded(n_ctx) * n_seq_max


def _padded(cells: int) -> int:
    return -(-cells // _CELLS_STEP) * _CELLS_STEP


def _context_parameters(library: Library, loaded: LoadedModel, configuration: CacheConfiguration) -> Any:
    parameters = library.call.llama_context_default_params()
    parameters.n_ctx = _pool_cells(configuration) if loaded.has_attention_cache else BATCH_TOKENS_MAX
    parameters.n_batch = BATCH_TOKENS_MAX
    parameters.n_ubatch = configuration.n_ubatch
    parameters.n_seq_max = configuration.n_seq_max
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.pooling_type = library.constants.pooling_none
    parameters.type_k = parameters.type_v = library.constants.f16 if configuration.kv == "f16" else library.constants.f32
    parameters.kv_unified = bool(configuration.unified)
    parameters.swa_full = bool(configuration.swa_full)
    parameters.no_perf = True
    parameters.offload_kqv = False
    set_present(
        parameters,
        n_rs_seq=configuration.n_rs_seq,
        flash_attn_type=configuration.flash,
        flash_attn=bool(configuration.flash),
        op_offload=False,
    )
    return parameters


def _cells_of_sequence(call: Any, context: Any, configuration: CacheConfiguration) -> int:
    """The attention cells of one sequence, or of all where they have one pool; older libraries say those of all."""
    if hasattr(call, "llama_n_ctx_seq"):
        n_ctx_seq: int = call.llama_n_ctx_seq(context)
        return n_ctx_seq
    n_ctx: int = call.llama_n_ctx(context)
    return n_ctx if configuration.unified else n_ctx // configuration.n_seq_max


def _capabilities(library: Library, context: Any, loaded: LoadedModel, configuration: CacheConfiguration) -> Capabilities:
    """What this build really does for this model and configuration.

    n_ctx          without an attention cache nothing limits a sequence, and the context's size only limits the batch
    guarantee      snapshots are of the last decode only and a rollback is single-use: `draft`. Only some architectures keep any.
    coupled        recurrent batches are split sequence by sequence, which coupled tokens refuse; only a hybrid with a unified pool
                   splits otherwise (with embeddings on, every split is by sequence, and coupled tokens pass)
    cancel         the CPU backend asks after every node of a graph
    shift, divide  not where positions have several parts (M-RoPE), nor where the cells of windowed layers are fewer than n_ctx: the memory says so
    save_all, partial, device
                   for every memory here, if the library is young enough to have the flags; a pure recurrent memory ignores `partial`, its
                   recurrent part being all
    embeddings     not where the library says that hidden states are wider than what the model computes (qwen4exp): reading them aborts
    partial_share  the call takes a range, and has no way to refuse one
    """
    call = library.call
    n_rs_seq: int = call.llama_n_rs_seq(context)
    can_shift = bool(call.llama_memory_can_shift(call.llama_get_memory(context)))
    n_ctx_seq = _cells_of_sequence(call, context, configuration)
    n_ctx = n_ctx_seq // configuration.n_seq_max if configuration.unified else n_ctx_seq
    return Capabilities(
        guarantee="draft" if n_rs_seq else "none",
        n_rs_seq=n_rs_seq,
        n_batch=min(BATCH_TOKENS_MAX, call.llama_n_batch(context)),
        n_ctx=n_ctx if loaded.has_attention_cache else 0,
        recurrent=loaded.has_recurrent_layers,
        attention=loaded.has_attention_layers,
        windowed=loaded.has_window,
        coupled=loaded.has_attention_cache and bool(configuration.unified),
        cancel=True,
        shift=can_shift,
        divide=can_shift,
        save_all=True,
        partial=library.constants.partial_only is not None,
        device=library.constants.on_device is not None,
        embeddings=loaded.shows_hidden_states,
        partial_share=True,
        engine=ENGINE,
    )


def _decode_outcome(code: int, reason: str) -> Outcome:
    detail = f"llama_decode returned {code}" + (f": {reason}" if reason else "")
    if code in (1, -1):
        return refused(detail)
    return Outcome("cancelled" if code == 2 else "error", detail)


class LlamaTarget:
    """See spec.target.Target."""

    name = "llamacpp"
    isolated = True
    families = (*(family.name for family in FAMILIES.values() if family.has_gguf), *ENGINE_ONLY)
    poison = False
    undocumented = (
        Undocumented(
            "share-onto-nonempty",
            "llama_memory_seq_cp: \"Copy all tokens that belong to the specified sequence to another sequence\"; "
            "what becomes of tokens the other sequence already has is not said",
        ),
        Undocumented(
            "partial-share",
            "llama_memory_seq_cp: p0 and p1 limit the positions that are copied; it returns nothing, so a memory that cannot copy a part cannot say so",
        ),
        Undocumented(
            "shift-of-shared",
            "llama_memory_seq_add: the delta is added \"to all tokens that belong to the specified sequence\"; "
            "whether a token that belongs to two sequences moves for both is not said",
        ),
        Undocumented(
            "divide",
            "llama_memory_seq_div: \"Integer division of the positions\"; positions of several tokens become equal, and what a decode then sees is not said",
        ),
        Undocumented(
            "small-ubatch",
            "n_rs_seq: \"number of recurrent-state snapshots per seq for rollback\", marked experimental; how it bounds n_ubatch is not said",
        ),
        Undocumented(
            "foreign-partial-restore",
            "LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: \"work only with partial states, such as SWA KV cache or recurrent cache\"; "
            "a partial state is complete only beside the rest of the sequence it was saved from",
        ),
    )  # fmt: skip

    def version(self) -> str:
        """The package and the build, e.g. "llama-cpp-python 0.3.36 (llama.cpp 0.5.0-dev, library 1f9a03c2)", or the build alone; see `open`
        for errors.

        Everything that models are loaded with is imported here, so that a process that forks workers does it once.
        """
        gguf_package()
        return load_library().version

    def describe(self) -> str:
        return f"{self.version()} at {load_library().path}"

    def open(self, model: Model, configuration: CacheConfiguration) -> LlamaSession:
        """A new context of `model`. Raises UnavailableError when the library cannot be used, UsageError for what it cannot open."""
        if model.family not in self.families:
            raise UsageError(f"target llamacpp does not run family `{model.family}`; it runs {', '.join(self.families)}")
        models = _models()
        return LlamaSession(models.library, models.get(model), model, configuration)

    def environment_of(self, build: str) -> dict[str, str]:
        """See spec.target.HasBuilds: a source tree with its build, a library, or llama-cpp-python."""
        return environment_of(build)

    def load(self, model: Model) -> None:
        """See spec.target.LoadsModels: making a model's file and reading it takes longer than a program."""
        _models().get(model)


def last_log_lines() -> list[str]:
    """The library's last warnings and errors, at most 40, oldest first."""
    return list(load_library().log.lines)


TARGET = LlamaTarget()
