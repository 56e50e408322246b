"""The recompute against the `rwkv` package's own models, on the same weights: as shipped, and computing in float64."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from statedrift.oracle.recompute import Recompute, Request
from statedrift.spec.models import Model

pytest.importorskip("rwkv", reason="rwkv is not installed")

from tests.conformance.models import RWKV_MODELS
from tests.conformance.rwkv_truth import float64, largest_error, logs_of, state_dict, their_model, their_rows


@functools.lru_cache(maxsize=2)
def our_rows(model: Model) -> list[np.ndarray]:
    return Recompute(model).rows([Request(log, range(len(log))) for log in logs_of(model)])


def name_of(model: Model) -> str:
    return f"{model.family}-{model.seed}"


@pytest.mark.parametrize("model", RWKV_MODELS, ids=name_of)
def test_the_recompute_equals_the_package_in_float32(model: Model, tmp_path: Path) -> None:
    module = their_model(model, tmp_path, state_dict(model))
    for log, ours in zip(logs_of(model), our_rows(model), strict=True):
        assert largest_error(their_rows(module, log), ours) <= 2e-5


@pytest.mark.parametrize("model", RWKV_MODELS, ids=name_of)
def test_the_recompute_equals_the_package_in_float64(model: Model, tmp_path: Path) -> None:
    with float64():
        module = their_model(model, tmp_path, state_dict(model), is_double=True)
        for log, ours in zip(logs_of(model), our_rows(model), strict=True):
            assert largest_error(their_rows(module, log), ours) <= 1e-9


@pytest.mark.parametrize("model", [model for model in RWKV_MODELS if model.seed == 3], ids=name_of)
def test_a_weight_that_is_slightly_off_is_noticed(model: Model, tmp_path: Path) -> None:
    """Every tensor counts: one row moved by a thousandth shows in the last row of a log of nine, in float64."""
    log, right = logs_of(model)[-2], our_rows(model)[-2]
    with float64():
        for name, weight in state_dict(model).items():
            state = state_dict(model)
            # Not by the same everywhere: a norm may take that away.
            state[name][log[-1] if name == "emb.weight" else slice(None)] += 1e-3 * (1 + torch.arange(weight.shape[-1]) % 2)
            moved = their_rows(their_model(model, tmp_path, state, is_double=True), log)
            assert largest_error(moved, right) > 1e-9, name
