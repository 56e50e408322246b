"""GGUF files: they hold the family's facts, appear whole, and what cannot be written is said."""

import sys
from pathlib import Path

import numpy as np
import pytest
from statedrift.spec.errors import UnavailableError, UsageError
from statedrift.spec.families import dimensions_of, family_of
from statedrift.spec.models import Model
from statedrift.spec.weights import weights_of
from statedrift.targets.gguf_file import write_gguf

gguf = pytest.importorskip("gguf", reason="needs the gguf package, which is not installed")


@pytest.mark.parametrize(
    "model",
    [
        Model("lfm2", 1),
        Model("mamba2", 2, (("n_layer", 2),)),
        Model("lfm2_swa", 1),
        Model("nemotron_h", 1),
        Model("qwen35", 1),
        Model("mamba", 1),
        Model("jamba", 1),
        Model("minimax01", 1),
        Model("rwkv6", 1),
        Model("rwkv7", 1),
        Model("falcon_h1", 1),
        Model("falcon_h1", 1, (("ssm_norm", 1),)),
        Model("qwen4exp", 1),
    ],
)
def test_a_file_holds_the_familys_metadata_and_tensors(model: Model, tmp_path: Path) -> None:
    write_gguf(model, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    family, dimensions = family_of(model), dimensions_of(model)
    written = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    expected = {**family.gguf_metadata(dimensions), "tokenizer.ggml.model": "none"}
    assert written.keys() == expected.keys()
    for key, value in expected.items():
        assert written[key] == (
            pytest.approx(value, rel=1e-6) if isinstance(value, float) else list(value) if isinstance(value, tuple) else value
        ), key
    facts = {tensor.name: tensor for tensor in family.gguf_tensors(dimensions)}
    assert {tensor.name for tensor in reader.tensors} == facts.keys()
    for tensor in reader.tensors:
        weight = weights_of(model)[facts[tensor.name].weight]
        expected = -np.exp(weight.astype(np.float64)) if tensor.name.endswith("ssm_a") else weight
        assert tensor.data.dtype == np.float32
        assert np.array_equal(tensor.data.ravel(), expected.astype(np.float32).ravel()), tensor.name


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_gguf(Model("lfm2"), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_nothing_but_the_file_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("old")
    write_gguf(Model("mamba2"), tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert (tmp_path / "model.gguf").read_bytes().startswith(b"GGUF")


def test_a_model_that_is_none_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        write_gguf(Model("lfm2", 0, (("n_embd", 7),)), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_said_with_the_way_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnavailableError, match=r"pip install 'statedrift\[llamacpp\]'"):
        write_gguf(Model("lfm2"), tmp_path / "model.gguf")


def test_a_model_that_the_engine_runs_otherwise_has_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="compress_ratio=4"):
        write_gguf(Model("qwen4exp", 0, (("compress_ratio", 4),)), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())
