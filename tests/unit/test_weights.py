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
    ("mamba", 0): "009fc087d88f0f24",
    ("mamba", 1): "e72598532d7cec76",
    ("mamba", 2): "575527f3b5602827",
    ("mamba", 3): "4b7ae1d1b77fb08f",
    ("jamba", 0): "74dee256cc3b5dc6",
    ("jamba", 1): "9290d9d04fe45016",
    ("jamba", 2): "7830f285b0c84eca",
    ("jamba", 3): "aa01fc11c498ceeb",
    ("minimax01", 0): "84b109516364238b",
    ("minimax01", 1): "3b7a37cbacfa8785",
    ("minimax01", 2): "d6d4348cdbbc6999",
    ("minimax01", 3): "91faea7045583e47",
    ("qwen3next", 0): "ade9f998ace1f711",
    ("qwen3next", 1): "322ce93509a5e714",
    ("qwen3next", 2): "768ce3413297946b",
    ("qwen3next", 3): "85aa3af526aaac99",
    ("kimi_linear", 0): "6a1ee059858e2834",
    ("kimi_linear", 1): "5ccc5e74c499fa7c",
    ("kimi_linear", 2): "49d31b4dfab4a592",
    ("kimi_linear", 3): "4be5077dce6c245f",
    ("rwkv6", 0): "6a1777576c410179",
    ("rwkv6", 1): "af287f6970f494a8",
    ("rwkv6", 2): "85f4a7111fbd6913",
    ("rwkv6", 3): "e0021d9718bf9454",
    ("rwkv7", 0): "53941f6ed1321fb4",
    ("rwkv7", 1): "713d6325bb9b51f6",
    ("rwkv7", 2): "4d339e93ab1e2de3",
    ("rwkv7", 3): "ea270522defeb58d",
    ("falcon_h1", 0): "1c8e39c098e2f823",
    ("falcon_h1", 1): "79e707f99769c752",
    ("falcon_h1", 2): "3d1a5746c6394955",
    ("falcon_h1", 3): "80ae548c17089ecc",
    ("zamba2", 0): "5910c0cf10a712d0",
    ("zamba2", 1): "2f6ecf7a5ef84815",
    ("zamba2", 2): "f984b848bc480a76",
    ("zamba2", 3): "52b4eebfb76a1c42",
    ("qwen4exp", 0): "a971fc5705ec3261",
    ("qwen4exp", 1): "dde7b049fc20886e",
    ("qwen4exp", 2): "6fff4a6c51cf6db0",
    ("qwen4exp", 3): "60bff46b3f757a4f",
    ("qwen4exp_blocks", 0): "a4abac69446b7337",
    ("qwen4exp_blocks", 1): "e0d1982ce1d898d4",
    ("qwen4exp_blocks", 2): "f8b408093c5bab76",
    ("qwen4exp_blocks", 3): "6974ab4fd5a1888b",
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


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.has_gguf])
def test_gguf_gets_every_weight(family: str) -> None:
    model = Model(family)
    assert {tensor.weight for tensor in family_of(model).gguf_tensors(dimensions_of(model))} == set(weights_of(model))  # twice, it may be


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.transformers_class])
def test_transformers_gets_every_weight(family: str) -> None:
    """A weight that moves, moves something of theirs; and what they get in float32 is made of weights."""
    model = Model(family)
    weights, dimensions = weights_of(model), dimensions_of(model)
    before = family_of(model).state_dict(dimensions, weights)
    reached = set()
    for name, array in weights.items():
        after = family_of(model).state_dict(dimensions, weights | {name: array + np.float32(1)})
        moved = {theirs for theirs in before if not np.array_equal(before[theirs], after[theirs])}
        assert moved, name
        reached |= moved
    assert reached == {name for name, array in before.items() if array.dtype == np.float32}
