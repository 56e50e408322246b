"""Which tensors llama.cpp wants of a model that statedrift has no forward for, and that model as a file.

Rules
- The library is asked itself: a model is made of metadata alone, and every tensor that it makes says its name and shape.
- What is then loaded is an ordinary GGUF file of those tensors but the ones that the family's rule leaves out, so that a script can make the same.
- A process that must not load the library asks another one (`asked_tensors`).
Source: llama.h, llama_model_init_from_user; ggml.h, struct ggml_tensor.
"""

import functools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from ..spec.errors import UnavailableError, UsageError
from ..spec.families import TensorFact, dimensions_of, family_of
from ..spec.models import Model, model_text
from ..spec.weights import drawn
from .gguf_file import write_tensors
from .llama_library import Library, SetTensorCallback
from .llama_loading import load_library

TIME_LIMIT_SECONDS = 60


def tensors_of(library: Library, model: Model) -> tuple[TensorFact, ...]:
    """The weights of `model`, each named as its tensor, in the order in which the library makes them.

    Raises UsageError when the library makes no model of the family's metadata.
    """
    rule = family_of(model).engine_tensor
    assert rule is not None
    shapes: dict[str, tuple[int, ...]] = {}

    def note(address: int, _: int | None) -> None:
        name, counts = library.tensor_fact(address)
        rank = max((place for place, count in enumerate(counts, 1) if count != 1), default=1)
        shapes[name] = tuple(reversed(counts[:rank]))

    _make_without_data(library, model, SetTensorCallback(note))
    facts = (rule(name, shape) for name, shape in shapes.items())
    return tuple(fact for fact in facts if fact is not None)


def _make_without_data(library: Library, model: Model, note: Any) -> None:
    call = library.call
    library.require("llama_model_init_from_user")
    line_count = library.log.line_count
    with tempfile.TemporaryDirectory(prefix="statedrift-") as folder:
        path = Path(folder) / "metadata.gguf"
        write_tensors(family_of(model).gguf_metadata(dimensions_of(model)), (), path)
        metadata = library.metadata_of(path)
    if not metadata:
        raise UsageError(f"llama.cpp does not read the metadata of model `{model_text(model)}`")
    parameters = call.llama_model_default_params()
    parameters.n_gpu_layers = 0
    handle = call.llama_model_init_from_user(metadata, library.function(note), library.null, parameters)
    call.gguf_free(metadata)
    if not handle:
        raise UsageError(f"llama.cpp makes no model of `{model_text(model)}`: {library.log.first_since(line_count)}")
    call.llama_model_free(handle)


def write_engine_only(library: Library, model: Model, path: Path) -> None:
    """Write `model`, of a family that only an engine can judge, to `path`. Raises UsageError and UnavailableError as its parts do."""
    metadata = family_of(model).gguf_metadata(dimensions_of(model))
    write_tensors(metadata, [(fact.name, drawn(model, fact)) for fact in tensors_of(library, model)], path)


@functools.cache
def asked_tensors(model: Model) -> tuple[TensorFact, ...]:
    """`tensors_of`, asked of the library in a process of its own. Raises UnavailableError when that gives no answer."""
    command = [sys.executable, "-c", f"from {__name__} import print_tensors; print_tensors()"]
    try:
        answer = subprocess.run(command, input=msgspec.json.encode(model), capture_output=True, timeout=TIME_LIMIT_SECONDS, check=False)
        return msgspec.json.decode(answer.stdout, type=tuple[TensorFact, ...])
    except (subprocess.TimeoutExpired, OSError, msgspec.DecodeError) as error:
        raise UnavailableError(f"the library does not say which tensors `{model_text(model)}` has: {error}") from error


def print_tensors() -> None:
    """In the process of its own: read a model as JSON from standard input, print its tensors as JSON."""
    facts = tensors_of(load_library(), msgspec.json.decode(sys.stdin.buffer.read(), type=Model))
    sys.stdout.write(msgspec.json.encode(facts).decode())
