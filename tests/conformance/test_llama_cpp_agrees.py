"""The recompute against llama.cpp, on the same weights; it computes in float32 with its own exp and order of sums: 1e-4 in the error of a row."""

from pathlib import Path

import numpy as np
import pytest
from statedrift.oracle.recompute import Recompute, Request
from statedrift.spec.families import FAMILIES
from statedrift.spec.models import Model

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

from tests.conformance.llama_cpp_truth import errors, log_of, their_rows
from tests.conformance.models import LLAMA_CPP_MODELS


@pytest.mark.parametrize("model", LLAMA_CPP_MODELS, ids=lambda model: f"{model.family}-{model.seed}")
def test_the_recompute_equals_llama_cpp(model: Model, tmp_path: Path) -> None:
    log = log_of(model)
    ours = Recompute(model).rows([Request(log, range(len(log)))])[0]
    error = errors(their_rows(model, log, tmp_path), ours).max()
    assert error <= 1e-4


@pytest.mark.parametrize("n_ubatch", [1, 5, 64, 512])
def test_a_window_is_the_same_for_every_size_of_micro_batches(n_ubatch: int, tmp_path: Path) -> None:
    """The log is longer than the 256 cells that llama.cpp keeps for a small window: cells behind it are used again."""
    model = Model("lfm2_swa", 0)
    log = tuple(np.random.default_rng(n_ubatch).integers(0, 64, 400).tolist())
    ours = Recompute(model).rows([Request(log, range(len(log)))])[0]
    error = errors(their_rows(model, log, tmp_path, n_ubatch), ours).max()
    assert error <= 1e-4


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.has_gguf])
def test_another_seed_is_noticed(family: str, tmp_path: Path) -> None:
    log = log_of(Model(family))
    ours = Recompute(Model(family, 1)).rows([Request(log, range(len(log)))])[0]
    assert errors(their_rows(Model(family, 0), log, tmp_path), ours).min() > 0.1
