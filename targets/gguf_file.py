"""GGUF files: a toy model as the file that llama.cpp loads.

Rules
- Only facts of the family are written (its metadata and its tensors, all float32), and a tokenizer that is none.
- A file appears whole or not at all: it is written beside its place and then renamed.
- `gguf` is imported when a file is written, or when a target asks whether it is there; never before.
Source: the `gguf` package's GGUFWriter; the key names are llama.cpp's.
"""

import importlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.errors import UnavailableError, UsageError
from ..spec.families import GgufTensor, dimensions_of, family_of
from ..spec.models import Model, model_text
from ..spec.weights import weights_of


def gguf_package() -> Any:
    """The `gguf` package. Raises UnavailableError when it is missing."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise UnavailableError(f"cannot write GGUF files: {error}. pip install 'statedrift[llamacpp]'") from error


def write_gguf(model: Model, path: Path) -> None:
    """Write `model` to `path`, replacing what is there; about 1 ms for a model of the default size.

    Raises UnavailableError when the `gguf` package is missing, UsageError when the model's dimensions are bad or its family is not llama.cpp's.
    """
    gguf_package()
    family, dimensions = family_of(model), dimensions_of(model)
    metadata = family.gguf_metadata(dimensions)
    if not metadata or not family.is_modelled:
        raise UsageError(f"`{model_text(model)}` has no GGUF form of ours; llama.cpp does not run it, or says itself which tensors it has")
    weights = weights_of(model)
    tensors = [(tensor.name, _array(weights[tensor.weight], tensor)) for tensor in family.gguf_tensors(dimensions)]
    write_tensors(metadata, tensors, path)


def write_tensors(metadata: Mapping[str, Any], tensors: Iterable[tuple[str, np.ndarray]], path: Path) -> None:
    """Write a file of these keys (`general.architecture` among them) and float32 tensors. Raises UnavailableError without the `gguf` package."""
    gguf = gguf_package()
    keys = dict(metadata)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    writer = gguf.GGUFWriter(unfinished, keys.pop("general.architecture"))
    try:
        for key, value in keys.items():
            _add(writer, key, value)
        writer.add_tokenizer_model("none")
        for name, array in tensors:
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _array(weight: np.ndarray, tensor: GgufTensor) -> np.ndarray:
    """The weight as it stands in the file, float32."""
    if tensor.transform == "negative exponential":
        weight = (-np.exp(weight.astype(np.float64))).astype(np.float32)
    return weight if tensor.shape is None else weight.reshape(tensor.shape)


def _add(writer: Any, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case tuple():
            writer.add_key_value(key, value, gguf_package().GGUFValueType.ARRAY, sub_type=gguf_package().GGUFValueType.UINT64)
        case _:
            raise TypeError(f"metadata {key} of type {type(value).__name__} has no GGUF form here")
