"""Weights from a seed: the same numbers for the oracle, our implementation, llama.cpp and Transformers.

Rules
- Every tensor has its own generator, keyed by the family, the seed and the tensor's name, so that adding a tensor changes no other.
- The draws never change for a given tensor fact: stored programs depend on them; a golden test pins a checksum per family.
"""

import functools
import hashlib
from pathlib import Path

import numpy as np
from numpy.random import PCG64, Generator  # imported here, not when the first weight is drawn: NumPy loads it lazily

from .families import dimensions_of, engine_only, family_of
from .families.family import TensorFact
from .models import Model


def drawn(model: Model, fact: TensorFact) -> np.ndarray:
    """One weight of `model`: read-only float32 array of the fact's shape."""
    key = hashlib.blake2b(f"{model.family},{model.seed},{fact.name}".encode(), digest_size=16).digest()
    generator = Generator(PCG64(int.from_bytes(key, "little")))
    sample = generator.standard_normal(fact.shape) if fact.draw == "normal" else generator.random(fact.shape)
    array: np.ndarray = (fact.offset + fact.scale * sample).astype(np.float32)
    array.flags.writeable = False
    return array


@functools.lru_cache(maxsize=16)
def weights_of(model: Model) -> dict[str, np.ndarray]:
    """All weights of `model`: name -> read-only float32 array. Raises UsageError when the model's dimensions are bad."""
    return {fact.name: drawn(model, fact) for fact in family_of(model).tensors(dimensions_of(model))}


def weights_digest(model: Model) -> str:
    """What tells these weights from others, 16 hex digits: a hash of them, or, where only an engine knows the tensors, of the rules they are drawn by."""
    digest = hashlib.blake2b(digest_size=8)
    if not family_of(model).is_modelled:
        digest.update(Path(engine_only.__file__).read_bytes())
    for weight in weights_of(model).values():
        digest.update(weight.tobytes())
    return digest.hexdigest()
