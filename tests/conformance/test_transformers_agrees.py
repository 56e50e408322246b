"""The recompute against Hugging Face Transformers' own modules, on the same weights.

Rules
- As shipped they compute in float32: the error is theirs, and small.
- With their casts to float32 lifted (inside this file only) they compute in float64: then both must agree to nearly the last digit.
- Lfm2ForCausalLM has no window: lfm2_swa is run with a mask that is given to it.
Source: transformers' Mamba2ForCausalLM, Lfm2ForCausalLM, NemotronHForCausalLM and Qwen3_5ForCausalLM.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from statedrift.oracle.recompute import Recompute, Request
from statedrift.spec.families import dimensions_of, family_of
from statedrift.spec.models import Model
from statedrift.spec.weights import weights_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LENGTHS = (70, 1, 2, 3, 7, 8, 9, 40)
"""70: Transformers takes a delta rule 64 tokens at a time."""
MODELS = (
    Model("mamba2", 0),
    Model("mamba2", 1),
    Model("mamba2", 2, (("d_conv", 2), ("d_state", 8), ("n_layer", 1))),
    Model("mamba2", 3, (("d_inner", 96), ("n_group", 2), ("n_head", 6))),
    Model("mamba2", 4, (("n_embd", 64), ("n_group", 4), ("n_vocab", 100))),
    Model("lfm2", 0),
    Model("lfm2", 1),
    Model("lfm2", 2, (("attention_period", 1), ("n_layer", 2))),
    Model("lfm2", 3, (("l_cache", 4), ("n_head", 4), ("n_head_kv", 2), ("n_layer", 6))),
    Model("lfm2", 4, (("n_embd", 48), ("n_ff", 80), ("n_head", 3), ("n_vocab", 100))),
    Model("lfm2_swa", 0),
    Model("lfm2_swa", 1),
    Model("lfm2_swa", 2, (("attention_period", 1), ("n_layer", 2), ("n_swa", 1))),
    Model("lfm2_swa", 3, (("l_cache", 4), ("n_head", 4), ("n_head_kv", 2), ("n_layer", 6), ("n_swa", 13))),
    Model("nemotron_h", 0),
    Model("nemotron_h", 1),
    Model("nemotron_h", 2, (("attention_period", 1), ("n_layer", 2))),
    Model(
        "nemotron_h",
        3,
        (("attention_period", 4), ("d_inner", 96), ("n_group", 2), ("n_head", 4), ("n_head_kv", 2), ("n_head_ssm", 6), ("n_layer", 8)),
    ),
    Model(
        "nemotron_h",
        4,
        (("attention_period", 2), ("d_conv", 2), ("d_state", 8), ("n_embd", 48), ("n_head", 3), ("n_layer", 4), ("n_vocab", 100)),
    ),
    Model("qwen35", 0),
    Model("qwen35", 1),
    Model("qwen35", 2, (("attention_period", 1), ("head_dim", 12), ("n_head", 4), ("n_head_kv", 2), ("n_layer", 2), ("n_rot", 12))),
    Model("qwen35", 3, (("d_conv", 2), ("d_state", 8), ("n_group", 3), ("n_layer", 6), ("n_rot", 4), ("n_value_head", 6))),
    Model("qwen35", 4, (("attention_period", 4), ("n_embd", 48), ("n_ff", 80), ("n_group", 1), ("n_vocab", 100))),
)


def their_model(model: Model) -> Any:
    """Transformers' module with our weights; every weight of theirs is one of ours, and the other way round."""
    family, dimensions = family_of(model), dimensions_of(model)
    made: Any = getattr(transformers, family.transformers_class)
    module = made(made.config_class(**family.transformers_configuration(dimensions), attn_implementation="eager"))
    state = {name: torch.from_numpy(array.copy()) for name, array in family.state_dict(dimensions, weights_of(model)).items()}
    module.load_state_dict(state, strict=True)
    return module.eval()


@contextlib.contextmanager
def casts_to_float32_lifted(module: Any) -> Iterator[None]:
    """Make `module` compute in float64 throughout: what it casts to float32 stays as it is."""
    to, softmax = torch.Tensor.to, torch.nn.functional.softmax

    def kept(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        arguments = tuple(torch.float64 if argument is torch.float32 else argument for argument in arguments)
        if keywords.get("dtype") is torch.float32:
            keywords["dtype"] = torch.float64
        return to(tensor, *arguments, **keywords)

    def softmax_kept(scores: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
        return softmax(scores, dim=dim)

    module.double()
    if rotary := getattr(getattr(module, "model", None), "rotary_emb", None):
        base, size = rotary.config.rope_parameters["rope_theta"], 2 * len(rotary.inv_freq)
        rotary.inv_freq = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    with (
        mock.patch.object(torch.Tensor, "float", lambda tensor: tensor.double()),
        mock.patch.object(torch.Tensor, "to", kept),
        mock.patch.object(torch.nn.functional, "softmax", softmax_kept),
        mock.patch.object(torch, "float", torch.float64),
    ):
        yield


def logs_of(model: Model) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(model.seed)
    return [tuple(generator.integers(0, dimensions_of(model)["n_vocab"], length).tolist()) for length in LENGTHS]


def mask_of(model: Model, length: int, dtype: torch.dtype) -> dict[str, Any] | None:
    """What Transformers is to add to the scores, by kind of layer, where it cannot make that itself."""
    n_swa = dimensions_of(model).get("n_swa", 0)
    if not n_swa:
        return None
    tokens_back = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (tokens_back < 0) | (tokens_back >= n_swa)
    return {"full_attention": torch.zeros(1, 1, length, length, dtype=dtype).masked_fill(hidden, float("-inf")), "conv": None}


def their_rows(module: Any, log: tuple[int, ...], model: Model) -> np.ndarray:
    with torch.no_grad():
        logits = module(torch.tensor([log]), attention_mask=mask_of(model, len(log), module.dtype)).logits[0]
    return np.asarray(logits.double().numpy())


def our_rows(model: Model) -> list[np.ndarray]:
    return Recompute(model).rows([Request(log, range(len(log))) for log in logs_of(model)])


def largest_error(theirs: np.ndarray, ours: np.ndarray) -> float:
    """The largest difference, relative to the largest value."""
    return float(np.abs(theirs - ours).max() / np.abs(ours).max())


def name_of(model: Model) -> str:
    return f"{model.family}-{model.seed}"


@pytest.mark.parametrize("model", MODELS, ids=name_of)
def test_the_recompute_equals_transformers_in_float32(model: Model) -> None:
    module = their_model(model)
    for log, ours in zip(logs_of(model), our_rows(model), strict=True):
        assert largest_error(their_rows(module, log, model), ours) <= 2e-5


@pytest.mark.parametrize("model", MODELS, ids=name_of)
def test_the_recompute_equals_transformers_in_float64(model: Model) -> None:
    module = their_model(model)
    with casts_to_float32_lifted(module):
        for log, ours in zip(logs_of(model), our_rows(model), strict=True):
            assert largest_error(their_rows(module, log, model), ours) <= 1e-9


@pytest.mark.parametrize("model", [model for model in MODELS if model.seed == 3], ids=name_of)
def test_a_weight_that_is_slightly_off_is_noticed(model: Model) -> None:
    """Every tensor counts: one element moved by a thousandth shows in the last row of a log of nine, in float64."""
    module, log = their_model(model), logs_of(model)[-2]
    with casts_to_float32_lifted(module):
        right = their_rows(module, log, model)
        assert largest_error(right, our_rows(model)[-2]) <= 1e-9
        for name, weight in module.named_parameters():
            index = log[-1] if "embed" in name and weight.dim() == 2 else 0
            if name.endswith("mixer.up_proj.weight"):
                index = slice(None)  # one unit of a squared ReLU may be silent throughout
            with torch.no_grad():
                weight[index] += 1e-3
                moved = their_rows(module, log, model)
                weight[index] -= 1e-3
            assert largest_error(moved, right) > 1e-9, name
