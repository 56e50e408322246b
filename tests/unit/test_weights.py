"""Weights are a pure function of the model: pinned, because stored programs depend on them."""

import hashlib

import numpy as np
import pytest
from statedrift.spec.families import FAMILIES, dimensions_of, family_of
from statedrift.spec.models import Model
from statedrift.spec.weights import weights_of

GOLDEN = {
    ("mamba2", 0): "17077c4ad382def2",
    ("mamba2", 1): "49b5c3c097abd3d1",
    ("mamba2", 2): "b1c9b8cd656a519a",
    ("mamba2", 3): "705bb297bd33eefb",
    ("lfm2", 0): "b231dad2ca0015d3",
    ("lfm2", 1): "44cff216c0417127",
    ("lfm2", 2): "db78d2d8b14b92c4",
    ("lfm2", 3): "38dd70b846568854",
    ("lfm2_swa", 0): "d5638ab9b1413d6b",
    ("lfm2_swa", 1): "f209019ae228d7d8",
    ("lfm2_swa", 2): "f3b22a0b8f32bb92",
    ("lfm2_swa", 3): "348200b285413a84",
    ("nemotron_h", 0): "507df30852d486d8",
    ("nemotron_h", 1): "0aa084d4847d7abb",
    ("nemotron_h", 2): "bc78de799c44a15b",
    ("nemotron_h", 3): "e84160019c954f12",
    ("qwen35", 0): "b24eba4c8efebc9c",
    ("qwen35", 1): "eac5daa59a48d1bd",
    ("qwen35", 2): "da3e8083bb725f9d",
    ("qwen35", 3): "9a170f1c2f6be1e8",
    ("falcon_h1", 0): "1c8e39c098e2f823",
    ("falcon_h1", 1): "79e707f99769c752",
    ("falcon_h1", 2): "3d1a5746c6394955",
    ("falcon_h1", 3): "80ae548c17089ecc",
    ("zamba2", 0): "5910c0cf10a712d0",
    ("zamba2", 1): "2f6ecf7a5ef84815",
    ("zamba2", 2): "f984b848bc480a76",
    ("zamba2", 3): "52b4eebfb76a1c42",
}


def checksum(model: Model) -> str:
    """Over names, shapes and bytes of all weights, in order of name."""
    digest = hashlib.blake2b(digest_size=8)
    for name, array in sorted(weights_of(model).items()):
        digest.update(f"{name} {array.shape} ".encode())
        digest.update(array.astype("<f4").tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(("family", "seed"), GOLDEN)
def test_the_draws_never_change(family: str, seed: int) -> None:
    assert checksum(Model(family, seed)) == GOLDEN[family, seed]


def test_every_family_is_pinned() -> None:
    assert {family for family, _ in GOLDEN} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_finite_float32_and_read_only(family: str) -> None:
    for name, array in weights_of(Model(family)).items():
        assert array.dtype == np.float32, name
        assert np.isfinite(array).all(), name
        assert not array.flags.writeable, name


@pytest.mark.parametrize("family", FAMILIES)
def test_another_seed_changes_every_tensor(family: str) -> None:
    first, second = weights_of(Model(family, 0)), weights_of(Model(family, 1))
    assert [name for name in first if np.array_equal(first[name], second[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_one_more_layer_leaves_the_other_layers_as_they_are(family: str) -> None:
    model = Model(family)
    deeper = Model(family, 0, (("n_layer", dimensions_of(model)["n_layer"] + 3),))
    for name, array in weights_of(model).items():
        assert np.array_equal(weights_of(deeper)[name], array), name


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_and_transformers_get_every_weight(family: str) -> None:
    """What Transformers has under several names, since parts of it are shared, is one array."""
    model = Model(family)
    facts, weights, dimensions = family_of(model), weights_of(model), dimensions_of(model)
    if facts.has_gguf:
        assert sorted(tensor.weight for tensor in facts.gguf_tensors(dimensions)) == sorted(weights)
    if facts.transformers_class:
        arrays = facts.state_dict(dimensions, weights).values()
        assert len({array.__array_interface__["data"][0] for array in arrays}) == len(weights)
