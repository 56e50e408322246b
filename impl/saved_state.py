"""Saved states: what one sequence, or every sequence of a session, holds, as a safetensors container.

Rules
- Of one sequence, of its recurrent half only (`partial`), or of a whole session; a reader says which it wants.
- Tensors, where there is something to hold: `layers.<index>.convolution`, `.recurrent`, `.embedding`, float32 [states, ...], the states of
  all sequences one after the other, the present state of each before its snapshots; `.key` and `.value` (where it is kept), float32 [cells,
  key heads, head_dim]; `.index`, float32 [cells, index width]; and `cells`, int32 [tokens of all sequences], the cell of each. What sequences
  share is there once.
- What is saved is the logical state: a pending rollback is carried out in the copy. Snapshots are saved by a cache that says so.
- The metadata says what the tensors are of: format version, fingerprints of model and cache, lengths and positions, checksum, which covers
  everything. It is one entry, a JSON object as text: safetensors writes several entries in an order of its own each time, and equal states
  must give equal bytes.
- Reading checks everything before it returns anything, believes no size that the bytes themselves do not bear out, and answers with a reason
  instead of an exception: a blob may be anything.
Source: the safetensors format, https://github.com/huggingface/safetensors#format.
"""

import hashlib
import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Literal

import msgspec
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save as save_tensors

from .forwards import PreparedModel
from .hybrid_cache import POSITION_MAX, SequenceState, SessionState
from .recurrent_cache import States

FORMAT = "statedrift-state"
FORMAT_VERSION = "2"
CACHE_FINGERPRINT = "float32 rows-1"
"""What must agree between the caches: element type, and version of what a row holds and in which order. Numbers of sequences, snapshots and
cells need not agree for one sequence."""
_LENGTH_BYTES = 8

Kind = Literal["sequence", "partial", "session"]
_KIND_WORDS = {"sequence": "of one sequence", "partial": "of a recurrent half", "session": "of a whole session"}


class _Sequence(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One sequence of the container; state_count is 0 when same_as is another sequence, or there is no recurrent half."""

    token_count: int
    first: int
    last: int
    state_count: int
    same_as: int


class _Metadata(msgspec.Struct, frozen=True):
    format: str
    format_version: str
    kind: str
    model: str
    cache: str
    unified: int
    sequences: tuple[_Sequence, ...]
    cells: int
    checksum: str


class _Entry(msgspec.Struct, frozen=True):
    statedrift: str


class _Header(msgspec.Struct, frozen=True, rename={"metadata": "__metadata__"}):
    metadata: _Entry


Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Names of tensors with their dtype and shape, in the order of the checksum."""


def _shapes(model: PreparedModel, metadata: _Metadata) -> Shapes:
    shapes: Shapes = {}
    state_count = sum(sequence.state_count for sequence in metadata.sequences)
    if state_count:
        parts = {"convolution": model.convolution_shape, "recurrent": model.recurrent_shape, "embedding": model.embedding_shape}
        for layer in model.recurrent_layers:
            for name, shape in parts.items():
                if math.prod(shape) and layer in _layers_with(model, name):
                    shapes[f"layers.{layer}.{name}"] = ("F32", (state_count, *shape))
    if metadata.cells:
        shapes["cells"] = ("I32", (sum(sequence.token_count for sequence in metadata.sequences),))
        for layer in model.attention_layers:
            for name in ("key", "value")[: 1 + model.keeps_values]:
                shapes[f"layers.{layer}.{name}"] = ("F32", (metadata.cells, model.key_heads, model.head_dim))
            if model.index_width:
                shapes[f"layers.{layer}.index"] = ("F32", (metadata.cells, model.index_width))
    return shapes


def _layers_with(model: PreparedModel, part: str) -> tuple[int, ...]:
    """The recurrent layers that have a part."""
    return model.embedding_layers if part == "embedding" else model.recurrent_layers


def _checksum(metadata: _Metadata, tensors: Mapping[str, np.ndarray | bytes]) -> str:
    digest = hashlib.blake2b(msgspec.json.encode(msgspec.structs.replace(metadata, checksum="")), digest_size=32)
    for tensor in tensors.values():
        digest.update(bytes(tensor))
    return digest.hexdigest()


# --- writing ---------------------------------------------------------------------------------------------------------------


def pack(model: PreparedModel, state: SequenceState, partial: bool = False) -> bytes:
    """The container of what one sequence of `model` holds; `partial`: of its recurrent half, whatever else `state` has."""
    cells = () if partial or not model.attention_layers else (np.arange(state.token_count),)
    whole = SessionState((state,), (0,), cells, *(() if partial else (state.keys, state.values, state.index_rows)))
    return _packed(model, "partial" if partial else "sequence", 0, whole)


def pack_session(model: PreparedModel, state: SessionState, unified: bool) -> bytes:
    """The container of what all sequences of a session hold."""
    return _packed(model, "session", int(unified), state)


def _packed(model: PreparedModel, kind: Kind, unified: int, state: SessionState) -> bytes:
    sequences = tuple(
        _Sequence(own.token_count, own.first, own.last, 0 if own.states is None else len(own.states.convolution), like)
        for own, like in zip(state.sequences, state.same_as, strict=True)
    )
    cell_count = 0 if state.keys is None else state.keys.shape[1]
    metadata = _Metadata(FORMAT, FORMAT_VERSION, kind, model.fingerprint, CACHE_FINGERPRINT, unified, sequences, cell_count, "")
    parts: dict[str, np.ndarray] = {}
    held = [own.states for own in state.sequences if own.states is not None]
    for name in States._fields if held else ():
        for index, layer in enumerate(_layers_with(model, name)):
            parts[f"layers.{layer}.{name}"] = np.concatenate([getattr(states, name)[:, index] for states in held])
    if cell_count:
        assert state.keys is not None
        assert state.values is not None
        assert state.index_rows is not None
        parts["cells"] = np.concatenate(state.cells).astype(np.int32)
        for index, layer in enumerate(model.attention_layers):
            parts[f"layers.{layer}.key"], parts[f"layers.{layer}.value"] = state.keys[index], state.values[index]
            parts[f"layers.{layer}.index"] = state.index_rows[index]
    tensors = {name: np.ascontiguousarray(parts[name]).reshape(shape) for name, (_, shape) in _shapes(model, metadata).items()}
    metadata = msgspec.structs.replace(metadata, checksum=_checksum(metadata, tensors))
    return bytes(save_tensors(tensors, {"statedrift": msgspec.json.encode(metadata).decode()}))


# --- reading ---------------------------------------------------------------------------------------------------------------


def unpack(model: PreparedModel, blob: bytes, partial: bool = False) -> SequenceState | str:
    """What one sequence held, or the reason why `blob` is refused. Raises nothing, whatever the bytes are."""
    kind: Kind = "partial" if partial else "sequence"
    state = _unpacked(model, blob, kind, 1, 0)
    return (
        state if isinstance(state, str) else state.sequences[0]._replace(keys=state.keys, values=state.values, index_rows=state.index_rows)
    )


def unpack_session(model: PreparedModel, blob: bytes, n_seq_max: int, unified: bool) -> SessionState | str:
    """What all sequences held, or the reason why `blob` is refused: one of another number of sequences, too. Raises nothing."""
    return _unpacked(model, blob, "session", n_seq_max, int(unified))


def _unpacked(model: PreparedModel, blob: bytes, kind: Kind, sequence_count: int, unified: int) -> SessionState | str:
    metadata = _read_metadata(blob)
    if isinstance(metadata, str):
        return metadata
    reason = _why_not(metadata, model, kind, sequence_count, unified)
    if reason is not None:
        return reason
    shapes = _shapes(model, metadata)
    try:
        found = dict(deserialize(bytes(blob)))  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError) as error:
        return f"the saved state is damaged: {error}"
    if found.keys() != shapes.keys():
        odd = sorted(found.keys() ^ shapes.keys())[0]
        return f"the saved state is damaged: tensor {odd} is missing or does not belong there"
    for name, (dtype, shape) in shapes.items():
        if found[name]["dtype"] != dtype or tuple(found[name]["shape"]) != shape:
            return f"the saved state is damaged: tensor {name} is not {dtype} of shape {shape}"
    content = {name: bytes(found[name]["data"]) for name in shapes}
    if _checksum(metadata, content) != metadata.checksum:
        return "the saved state is damaged: its checksum does not agree"
    return _state(model, metadata, content)


def _read_metadata(blob: bytes) -> _Metadata | str:
    if len(blob) < _LENGTH_BYTES:
        return "the saved state is damaged: it is too short"
    header_end = _LENGTH_BYTES + int.from_bytes(blob[:_LENGTH_BYTES], "little")
    if header_end > len(blob):
        return "the saved state is damaged: it is shorter than its header says"
    try:
        entry = msgspec.json.decode(blob[_LENGTH_BYTES:header_end], type=_Header).metadata
        return msgspec.json.decode(entry.statedrift, type=_Metadata)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"the saved state is damaged or something else: its header cannot be read ({error})"


def _why_not(metadata: _Metadata, model: PreparedModel, kind: Kind, sequence_count: int, unified: int) -> str | None:
    """Why a state with this metadata is not one that is wanted, or None."""
    if metadata.format != FORMAT or metadata.format_version != FORMAT_VERSION:
        return f"this is not a saved state of {FORMAT} version {FORMAT_VERSION}"
    if metadata.kind != kind:
        return f"the saved state is {_KIND_WORDS.get(metadata.kind, 'of something else')}, not {_KIND_WORDS[kind]}"
    if metadata.model != model.fingerprint:
        return "the saved state is one of another model"
    if metadata.cache != CACHE_FINGERPRINT:
        return f"the saved state is one of another cache: {metadata.cache}, not {CACHE_FINGERPRINT}"
    if len(metadata.sequences) != sequence_count or metadata.unified != unified:
        return f"the saved state is of {len(metadata.sequences)} sequences with unified={metadata.unified}, not of {sequence_count} with {unified}"
    for index, sequence in enumerate(metadata.sequences):
        if not _is_sound(metadata.sequences, index, bool(model.recurrent_layers)):
            return f"the saved state is damaged: what it says of its sequence {index} is out of range ({sequence})"
    tokens = sum(sequence.token_count for sequence in metadata.sequences)
    has_cells = bool(model.attention_layers) and kind != "partial" and tokens > 0
    if not (1 if has_cells else 0) <= metadata.cells <= (tokens if has_cells else 0):
        return "the saved state is damaged: its number of attention cells is out of range"
    return None


def _is_sound(sequences: tuple[_Sequence, ...], index: int, is_recurrent: bool) -> bool:
    own = sequences[index]
    if own.token_count == 0:
        return (own.first, own.last, own.state_count, own.same_as) == (-1, -1, 0, index)
    if not (0 <= own.first <= own.last <= POSITION_MAX and own.last - own.first < own.token_count <= POSITION_MAX):
        return False
    if not is_recurrent:
        return own.state_count == 0 and own.same_as == index
    if own.same_as == index:
        return 1 <= own.state_count <= own.token_count
    if not 0 <= own.same_as < index or own.state_count:
        return False
    like = sequences[own.same_as]
    return like.same_as == own.same_as and like.token_count == own.token_count


def _state(model: PreparedModel, metadata: _Metadata, content: Mapping[str, bytes]) -> SessionState | str:
    """Tensors of checked sizes, taken apart by sequence and stacked over layers."""
    states = _states(model, metadata, content)
    sequences = tuple(
        SequenceState(own.token_count, own.first, own.last, own_states) for own, own_states in zip(metadata.sequences, states, strict=True)
    )
    same_as = tuple(own.same_as for own in metadata.sequences)
    if not model.attention_layers or metadata.kind == "partial":
        return SessionState(sequences, same_as, ())
    listed = np.frombuffer(content.get("cells", b""), np.int32).astype(np.int64)
    ends = list(accumulate(own.token_count for own in metadata.sequences))
    cells = tuple(listed[end - own.token_count : end] for own, end in zip(metadata.sequences, ends, strict=True))
    reason = _wrong_cells(metadata, listed, cells)
    if reason is not None:
        return reason
    shape = (len(model.attention_layers), metadata.cells, model.key_heads)
    keys, values, index = (
        np.frombuffer(b"".join(content.get(f"layers.{layer}.{name}", b"") for layer in model.attention_layers), np.float32)
        for name in ("key", "value", "index")
    )
    keys, values = keys.reshape(*shape, model.head_dim), values.reshape(*shape, model.head_dim * model.keeps_values)
    return SessionState(sequences, same_as, cells, keys, values, index.reshape(*shape[:2], model.index_width))


def _wrong_cells(metadata: _Metadata, listed: np.ndarray, cells: tuple[np.ndarray, ...]) -> str | None:
    """What is wrong with the attention cells of all tokens, int64 [tokens], and of each sequence's, or None."""
    if np.array_equal(listed, np.arange(metadata.cells)):  # nothing is shared
        return None
    if not np.array_equal(np.unique(listed), np.arange(metadata.cells)):
        return "the saved state is damaged: its attention cells are not those that its tokens are in"
    if any(len(np.unique(own)) < len(own) for own in cells):
        return "the saved state is damaged: two tokens of one sequence are in one attention cell"
    if metadata.kind == "sequence":
        return "the saved state is damaged: the attention cells of its one sequence are not in order"
    return None


def _states(model: PreparedModel, metadata: _Metadata, content: Mapping[str, bytes]) -> list[States | None]:
    """For every sequence its states, or None; views."""
    counts = [own.state_count for own in metadata.sequences]
    if not sum(counts):
        return [None] * len(counts)
    parts = []
    for name in States._fields:
        layers = [content.get(f"layers.{layer}.{name}", b"") for layer in _layers_with(model, name)]
        width = len(layers[0]) // (4 * sum(counts)) if layers else 0
        parts.append(np.frombuffer(b"".join(layers), np.float32).reshape(len(layers), sum(counts), width).transpose(1, 0, 2))
    ends = accumulate(counts)
    return [States(*(part[end - count : end] for part in parts)) if count else None for count, end in zip(counts, ends, strict=True)]
