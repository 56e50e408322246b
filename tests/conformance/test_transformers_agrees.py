"""The recompute against Hugging Face Transformers' own modules, on the same weights: as shipped, and computing in float64."""

import functools

import numpy as np
import pytest
import torch
from statedrift.oracle.recompute import Recompute, Request
from statedrift.spec.models import Model

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.conformance.models import TRANSFORMERS_MODELS
from tests.conformance.transformers_truth import casts_to_float32_lifted, largest_error, logs_of, their_model, their_rows


@functools.lru_cache(maxsize=2)
def our_rows(model: Model) -> list[np.ndarray]:
    return Recompute(model).rows([Request(log, range(len(log))) for log in logs_of(model)])


def name_of(model: Model) -> str:
    return f"{model.family}-{model.seed}"


@pytest.mark.parametrize("model", TRANSFORMERS_MODELS, ids=name_of)
def test_the_recompute_equals_transformers_in_float32(model: Model) -> None:
    module = their_model(model)
    for log, ours in zip(logs_of(model), our_rows(model), strict=True):
        assert largest_error(their_rows(module, log, model), ours) <= 2e-5


@pytest.mark.parametrize("model", TRANSFORMERS_MODELS, ids=name_of)
def test_the_recompute_equals_transformers_in_float64(model: Model) -> None:
    module = their_model(model)
    with casts_to_float32_lifted(module):
        for log, ours in zip(logs_of(model), our_rows(model), strict=True):
            assert largest_error(their_rows(module, log, model), ours) <= 1e-9


@pytest.mark.parametrize("model", [model for model in TRANSFORMERS_MODELS if model.seed == 3], ids=name_of)
def test_a_weight_that_is_slightly_off_is_noticed(model: Model) -> None:
    """Every tensor counts: one element moved by a thousandth shows in the last row of a log of nine, in float64; an indexer's, which only
    selects, moved by a half, in some row of a long log."""
    module, logs = their_model(model), logs_of(model)
    with casts_to_float32_lifted(module):
        short, long = (their_rows(module, logs[number], model) for number in (-2, 0))
        assert largest_error(short, our_rows(model)[-2]) <= 1e-9
        for name, weight in module.named_parameters():
            selects = ".indexer." in name
            log, right, step = (logs[0], long, 0.5) if selects else (logs[-2], short, 1e-3)
            index = log[-1] if "embed" in name and weight.dim() == 2 else 0
            if name.endswith(("mixer.up_proj.weight", "ngram_embedding.weight")):
                index = slice(None)  # one unit of a squared ReLU may be silent throughout, one row of a table unused
            with torch.no_grad():
                weight[index] += step
                moved = their_rows(module, log, model)
                weight[index] -= step
            assert largest_error(moved, right) > 1e-9, name
