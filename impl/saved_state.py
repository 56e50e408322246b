"""Saved states: the logical state of one sequence as a safetensors container.

Rules
- One tensor for every layer and part: `layers.<index>.convolution`, `.recurrent`, `.key`, `.value`, all float32. An empty sequence has none.
- What is saved is the logical state: a pending rollback is carried out in the copy, snapshots are not saved.
- The metadata says what the tensors are of: format version, fingerprints of model and cache, position, checksum. The checksum covers both.
  It is one entry, a JSON object as text: safetensors writes several entries in an order of its own each time, and equal states must
  give equal bytes.
- Reading checks everything before it returns anything, believes no size that the bytes themselves do not bear out, and answers with a reason
  instead of an exception: a blob may be anything.
Source: the safetensors format, https://github.com/huggingface/safetensors#format.
"""

import hashlib
import math
from collections.abc import Mapping

import msgspec
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save as save_tensors

from .forwards import PreparedModel
from .hybrid_cache import SequenceState

FORMAT = "statedrift-state"
FORMAT_VERSION = "1"
CACHE_FINGERPRINT = "float32 rows-1"
"""What must agree between the caches: element type, and version of what a row holds and in which order. Numbers of sequences, snapshots and
cells need not agree."""
POSITION_MAX = (1 << 31) - 2
_LENGTH_BYTES = 8


class _Metadata(msgspec.Struct, frozen=True):
    format: str
    format_version: str
    model: str
    cache: str
    position: int
    checksum: str


class _Entry(msgspec.Struct, frozen=True):
    statedrift: str


class _Header(msgspec.Struct, frozen=True, rename={"metadata": "__metadata__"}):
    metadata: _Entry


def _shapes(model: PreparedModel, token_count: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a state of `token_count` tokens, in the order of the checksum."""
    if token_count == 0:
        return {}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in model.recurrent_layers:
        shapes[f"layers.{layer}.convolution"] = model.convolution_shape
        if math.prod(model.recurrent_shape):
            shapes[f"layers.{layer}.recurrent"] = model.recurrent_shape
    for layer in model.attention_layers:
        shapes[f"layers.{layer}.key"] = shapes[f"layers.{layer}.value"] = (token_count, model.key_heads, model.head_dim)
    return shapes


def _checksum(model_fingerprint: str, position: int, tensors: Mapping[str, np.ndarray | bytes]) -> str:
    digest = hashlib.blake2b(f"{FORMAT} {FORMAT_VERSION} {model_fingerprint} {CACHE_FINGERPRINT} {position}".encode(), digest_size=32)
    for tensor in tensors.values():
        digest.update(bytes(tensor))
    return digest.hexdigest()


def pack(model: PreparedModel, state: SequenceState) -> bytes:
    """The container of `state`, which is one of `model`'s."""
    tensors: dict[str, np.ndarray] = {}
    parts: dict[str, np.ndarray] = {}
    for layers, names, arrays in (
        (model.recurrent_layers, ("convolution", "recurrent"), (state.convolution, state.recurrent)),
        (model.attention_layers, ("key", "value"), (state.keys, state.values)),
    ):
        for index, layer in enumerate(layers):
            for name, array in zip(names, arrays, strict=True):
                if array is not None:
                    parts[f"layers.{layer}.{name}"] = array[index]
    for name, shape in _shapes(model, state.position + 1).items():
        tensors[name] = np.ascontiguousarray(parts[name]).reshape(shape)
    checksum = _checksum(model.fingerprint, state.position, tensors)
    metadata = _Metadata(FORMAT, FORMAT_VERSION, model.fingerprint, CACHE_FINGERPRINT, state.position, checksum)
    return bytes(save_tensors(tensors, {"statedrift": msgspec.json.encode(metadata).decode()}))


def unpack(model: PreparedModel, blob: bytes) -> SequenceState | str:
    """The state that `blob` holds, or the reason why it is refused. Raises nothing, whatever the bytes are."""
    metadata = _read_metadata(blob)
    if isinstance(metadata, str):
        return metadata
    reason = _why_not(metadata, model)
    if reason is not None:
        return reason
    position = metadata.position
    shapes = _shapes(model, position + 1)
    try:
        found = dict(deserialize(bytes(blob)))  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError) as error:
        return f"the saved state is damaged: {error}"
    if found.keys() != shapes.keys():
        odd = sorted(found.keys() ^ shapes.keys())[0]
        return f"the saved state is damaged: tensor {odd} is missing or does not belong there"
    for name, shape in shapes.items():
        if found[name]["dtype"] != "F32" or tuple(found[name]["shape"]) != shape:
            return f"the saved state is damaged: tensor {name} is not float32 of shape {shape}"
    content = {name: bytes(found[name]["data"]) for name in shapes}
    if _checksum(model.fingerprint, position, content) != metadata.checksum:
        return "the saved state is damaged: its checksum does not agree"
    return _state(model, position, {name: np.frombuffer(content[name], np.float32) for name in shapes})


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


def _why_not(metadata: _Metadata, model: PreparedModel) -> str | None:
    """Why a state with this metadata is not one for `model`, or None."""
    if metadata.format != FORMAT or metadata.format_version != FORMAT_VERSION:
        return f"this is not a saved state of {FORMAT} version {FORMAT_VERSION}"
    if metadata.model != model.fingerprint:
        return "the saved state is one of another model"
    if metadata.cache != CACHE_FINGERPRINT:
        return f"the saved state is one of another cache: {metadata.cache}, not {CACHE_FINGERPRINT}"
    if not -1 <= metadata.position <= POSITION_MAX:
        return "the saved state is damaged: its position is out of range"
    return None


def _state(model: PreparedModel, position: int, tensors: Mapping[str, np.ndarray]) -> SequenceState:
    """Tensors of checked sizes, stacked over layers."""
    if position < 0:
        return SequenceState(-1)
    convolution = recurrent = keys = values = None
    if model.recurrent_layers:
        convolution = np.stack([tensors[f"layers.{layer}.convolution"] for layer in model.recurrent_layers])
        none = np.zeros(0, np.float32)
        recurrent = np.stack([tensors.get(f"layers.{layer}.recurrent", none) for layer in model.recurrent_layers])
    if model.attention_layers:
        shape = (len(model.attention_layers), position + 1, model.key_heads, model.head_dim)
        keys = np.stack([tensors[f"layers.{layer}.key"] for layer in model.attention_layers]).reshape(shape)
        values = np.stack([tensors[f"layers.{layer}.value"] for layer in model.attention_layers]).reshape(shape)
    return SequenceState(position, convolution, recurrent, keys, values)
