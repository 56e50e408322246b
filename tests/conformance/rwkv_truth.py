"""Outside truth: the `rwkv` package's own models on our weights.

Rules
- A model is read from a file, as the package asks; what it prints on the way is dropped. It runs on the CPU, eagerly, without its CUDA kernels.
- The package is one module for all versions, and its environment says which it offers: it is loaded once for each, under names of its own.
- As shipped it computes in float32; with `float64` (inside this file only) in float64: what it casts to float32 it casts to that instead.
Source: the `rwkv` package (BlinkDL), version 0.8.
"""

import contextlib
import functools
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from statedrift.spec.families import Dimensions, dimensions_of
from statedrift.spec.models import Model
from statedrift.spec.weights import weights_of

LENGTHS = (70, 1, 2, 3, 7, 8, 9, 40)

ENDS = {
    "emb.weight": "token_embedding", "blocks.0.ln0.weight": "embedding_norm", "blocks.0.ln0.bias": "embedding_norm_bias",
    "ln_out.weight": "output_norm", "ln_out.bias": "output_norm_bias", "head.weight": "output",
}  # fmt: skip
BOTH = {
    "ln1.weight": "time_mix_norm", "ln1.bias": "time_mix_norm_bias", "ln2.weight": "channel_mix_norm", "ln2.bias": "channel_mix_norm_bias",
    "att.receptance.weight": "receptance_projection", "att.key.weight": "key_projection", "att.value.weight": "value_projection",
    "att.output.weight": "out_projection", "att.ln_x.weight": "head_norm", "att.ln_x.bias": "head_norm_bias",
    "ffn.key.weight": "channel_key_projection", "ffn.value.weight": "channel_value_projection",
}  # fmt: skip
OF_FAMILY = {
    "rwkv6": {
        "att.gate.weight": "gate_projection", "att.time_maa_x": "blend_base", "att.time_maa_w1": "blend_down", "att.time_maa_w2": "blend_up",
        "att.time_decay": "decay_base", "att.time_decay_w1": "decay_down", "att.time_decay_w2": "decay_up", "att.time_faaaa": "first",
        "ffn.time_maa_k": "channel_blend_key", "ffn.time_maa_r": "channel_blend_receptance",
        "ffn.receptance.weight": "channel_receptance_projection",
    },
    "rwkv7": {
        "att.w0": "decay_base", "att.w1": "decay_down", "att.w2": "decay_up", "att.a0": "rate_base", "att.a1": "rate_down",
        "att.a2": "rate_up", "att.v0": "value_residual_base", "att.v1": "value_residual_down", "att.v2": "value_residual_up",
        "att.g1": "gate_down", "att.g2": "gate_up", "att.k_k": "key_removal", "att.k_a": "key_rate", "att.r_k": "first",
        "ffn.x_k": "channel_blend_key",
    },
}  # fmt: skip
EAGERLY_ON_CPU = {"RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
"""What the package looks up in its environment, when it is loaded and whenever it runs."""
BLEND_NAMES = {"rwkv6": ("att.time_maa_", "wkvrg"), "rwkv7": ("att.x_", "rwkvag")}


@functools.cache
def package(version: int) -> Any:
    """The package's module, offering version 6 or 7."""
    found = importlib.util.find_spec("rwkv.model")
    assert found is not None
    assert found.origin is not None
    spec = importlib.util.spec_from_file_location(f"rwkv_model_version_{version}", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    environment = EAGERLY_ON_CPU | {"RWKV_V7_ON": "1" if version == 7 else "0"}
    eager: Any = (
        mock.patch.object(torch.jit, "ScriptModule", torch.nn.Module),
        mock.patch.object(torch.jit, "script", lambda function: function),
        mock.patch.object(torch.jit, "script_method", lambda function: function),
    )
    with contextlib.ExitStack() as stack:
        for patch in (*eager, mock.patch.dict(os.environ, environment), contextlib.redirect_stdout(io.StringIO())):
            stack.enter_context(patch)
        spec.loader.exec_module(module)
    return module


def state_dict(model: Model) -> dict[str, torch.Tensor]:
    """Our weights under the package's names; every one of them."""
    weights, dimensions = weights_of(model), dimensions_of(model)
    state = {theirs: torch.from_numpy(weights[ours].copy()) for theirs, ours in ENDS.items()}
    used = set(ENDS.values())
    blends, letters = BLEND_NAMES[model.family]
    for layer in range(dimensions["n_layer"]):
        for theirs, ours in (BOTH | OF_FAMILY[model.family]).items():
            name = f"layers.{layer}.{ours}"
            if name in weights:  # layer 0 has no value residual
                used.add(name)
                state[f"blocks.{layer}.{theirs}"] = _turned(theirs, torch.from_numpy(weights[name].copy()), dimensions)
        used.add(f"layers.{layer}.blends")
        for letter, blend in zip(letters, weights[f"layers.{layer}.blends"], strict=True):
            state[f"blocks.{layer}.{blends}{letter}"] = torch.from_numpy(blend.copy()).view(1, 1, -1)
    assert used == set(weights)
    return state


def _turned(theirs: str, weight: torch.Tensor, dimensions: Dimensions) -> torch.Tensor:
    """Their matrices in two steps are [in, out]; ours, and their others, [out, in]."""
    if theirs in ("att.time_faaaa", "att.r_k"):
        return weight.view(-1, dimensions["wkv_head_size"])
    return weight.transpose(-1, -2).contiguous() if theirs[-1] in "12" else weight


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Make the package load and compute in float64 throughout."""
    with (
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch.Tensor, "float", lambda tensor: tensor.double()),
    ):
        yield


def their_model(model: Model, folder: Path, state: dict[str, torch.Tensor], is_double: bool = False) -> Any:
    """The package's model with the weights `state`; it needs `float64` around it, and around its use, when they are to be doubles."""
    path = folder / "model"
    torch.save({name: weight.double() if is_double else weight for name, weight in state.items()}, f"{path}.pth")
    module = package(7 if model.family == "rwkv7" else 6)
    with (
        mock.patch.dict(os.environ, EAGERLY_ON_CPU),
        mock.patch("gc.collect"),  # version 6 collects garbage at every layer, which takes most of the time of a small model
        contextlib.redirect_stdout(io.StringIO()),
    ):
        return module.RWKV(model=str(path), strategy="cpu fp32")


def logs_of(model: Model) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(model.seed)
    return [tuple(generator.integers(0, dimensions_of(model)["n_vocab"], length).tolist()) for length in LENGTHS]


def their_rows(module: Any, log: tuple[int, ...]) -> np.ndarray:
    """Logits after every token of the log, decoded at once; float64 [tokens, n_vocab]."""
    with mock.patch.dict(os.environ, EAGERLY_ON_CPU):
        logits, _ = module.forward(list(log), None, full_output=True)
    return np.asarray(logits.double().numpy()).reshape(len(log), -1)


def largest_error(theirs: np.ndarray, ours: np.ndarray) -> float:
    """The largest difference, relative to the largest value."""
    return float(np.abs(theirs - ours).max() / np.abs(ours).max())
