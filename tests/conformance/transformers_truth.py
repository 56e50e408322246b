"""Outside truth: Hugging Face Transformers' own modules on our weights.

Rules
- As shipped they compute in float32; with their casts lifted (inside this file only) in float64.
- Lfm2ForCausalLM has no window: lfm2_swa is run with a mask that is given to it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from statedrift.spec.families import dimensions_of, family_of
from statedrift.spec.models import Model
from statedrift.spec.weights import weights_of

LENGTHS = (70, 1, 2, 3, 7, 8, 9, 40)
"""70: Transformers takes a delta rule 64 tokens at a time."""


def their_model(model: Model) -> Any:
    """Transformers' module with our weights; every weight of theirs is one of ours, and the other way round."""
    family, dimensions = family_of(model), dimensions_of(model)
    made: Any = getattr(transformers, family.transformers_class)
    module = made(
        made.config_class(**family.transformers_configuration(dimensions), attn_implementation="eager", experts_implementation="eager")
    )
    module.given = {name: torch.from_numpy(array.copy()) for name, array in family.state_dict(dimensions, weights_of(model)).items()}
    module.load_state_dict(module.given, strict=True)
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

    def type_kept(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
        return kept(tensor, dtype)

    def softmax_kept(scores: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
        return softmax(scores, dim=dim)

    module.double()
    module.load_state_dict(module.given, strict=True)  # buffers are given in float64
    if rotary := getattr(getattr(module, "model", None), "rotary_emb", None):
        base, size = rotary.config.rope_parameters["rope_theta"], 2 * len(rotary.inv_freq)
        rotary.inv_freq = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    with (
        mock.patch.object(torch.Tensor, "float", lambda tensor: tensor.double()),
        mock.patch.object(torch.Tensor, "to", kept),
        mock.patch.object(torch.Tensor, "type", type_kept),
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


def largest_error(theirs: np.ndarray, ours: np.ndarray) -> float:
    """The largest difference, relative to the largest value."""
    return float(np.abs(theirs - ours).max() / np.abs(ours).max())
