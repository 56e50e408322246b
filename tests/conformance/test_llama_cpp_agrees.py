"""The recompute against llama.cpp, on the same weights, written as a GGUF file.

Rules
- The plain use of llama.cpp only: one sequence, a fresh context, one decode; no state operation.
- llama.cpp computes in float32 with its own exp and its own order of sums: agreement is held to 1e-4 in the error of a row.
Source: llama.h; the library that llama-cpp-python installs.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from statedrift.oracle.recompute import Recompute, Request
from statedrift.spec.families import FAMILIES, dimensions_of
from statedrift.spec.models import Model
from statedrift.targets.gguf_file import write_gguf

llama_cpp: Any = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

TOKEN_COUNT = 60
MODELS = (
    Model("mamba2", 0),
    Model("mamba2", 1),
    Model("mamba2", 2, (("d_conv", 3), ("d_state", 32), ("n_layer", 2))),
    Model("mamba2", 3, (("d_inner", 96), ("n_group", 2), ("n_head", 6))),
    Model("lfm2", 0),
    Model("lfm2", 1),
    Model("lfm2", 2, (("attention_period", 2), ("n_layer", 5))),
    Model("lfm2", 3, (("l_cache", 4), ("n_embd", 64), ("n_head", 4), ("n_head_kv", 2), ("n_layer", 6))),
    Model("lfm2_swa", 0),
    Model("lfm2_swa", 1),
    Model("lfm2_swa", 2, (("attention_period", 3), ("l_cache", 4), ("n_embd", 64), ("n_head", 4), ("n_head_kv", 2), ("n_layer", 6))),
    Model("lfm2_swa", 3, (("n_swa", 1),)),
    Model("lfm2_swa", 4, (("n_layer", 5), ("n_swa", 17))),
    Model("nemotron_h", 0),
    Model("nemotron_h", 1),
    Model("nemotron_h", 2, (("attention_period", 2), ("d_conv", 2), ("n_embd", 48), ("n_head", 3), ("n_layer", 4))),
    Model(
        "nemotron_h",
        3,
        (("attention_period", 4), ("d_inner", 96), ("n_group", 2), ("n_head", 4), ("n_head_kv", 2), ("n_head_ssm", 6), ("n_layer", 9)),
    ),
    Model("qwen35", 0),
    Model("qwen35", 1),
    Model("qwen35", 2, (("attention_period", 2), ("d_state", 8), ("n_group", 1), ("n_layer", 5), ("n_rot", 16))),
    Model(
        "qwen35", 3, (("d_conv", 3), ("head_dim", 12), ("n_embd", 64), ("n_head", 4), ("n_head_kv", 2), ("n_rot", 4), ("n_value_head", 6))
    ),
)


QUIET = llama_cpp.llama_log_callback(lambda level, text, data: None)
"""The library keeps the callback, so it must live as long as the process."""


@pytest.fixture(scope="module", autouse=True)
def quiet_library() -> None:
    llama_cpp.llama_log_set(QUIET, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()


def log_of(model: Model) -> tuple[int, ...]:
    return tuple(np.random.default_rng(model.seed).integers(0, dimensions_of(model)["n_vocab"], TOKEN_COUNT).tolist())


def their_rows(model: Model, log: tuple[int, ...], folder: Path, n_ubatch: int = 256) -> np.ndarray:
    """Logits of every token of the log, decoded at once in micro-batches of `n_ubatch` tokens; float64 [tokens, n_vocab]."""
    path = folder / "model.gguf"
    write_gguf(model, path)
    model_parameters = llama_cpp.llama_model_default_params()
    model_parameters.n_gpu_layers = 0
    loaded = llama_cpp.llama_model_load_from_file(str(path).encode(), model_parameters)
    assert loaded, "llama.cpp does not load the file"
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = 512, 512, n_ubatch
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32
    parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(loaded, parameters)
    assert context, "llama.cpp makes no context"
    batch = llama_cpp.llama_batch_init(len(log), 0, 1)
    batch.n_tokens = len(log)
    for index, token in enumerate(log):
        batch.token[index], batch.pos[index], batch.logits[index] = token, index, 1
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
    try:
        assert llama_cpp.llama_decode(context, batch) == 0
        shape = (len(log), dimensions_of(model)["n_vocab"])
        return np.array(np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape=shape), np.float64)
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(loaded)


def errors(theirs: np.ndarray, ours: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(theirs - ours).max(-1) / (1 + np.sqrt(np.square(ours).mean(-1))))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.family}-{model.seed}")
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


@pytest.mark.parametrize("family", FAMILIES)
def test_another_seed_is_noticed(family: str, tmp_path: Path) -> None:
    log = log_of(Model(family))
    ours = Recompute(Model(family, 1)).rows([Request(log, range(len(log)))])[0]
    assert errors(their_rows(Model(family, 0), log, tmp_path), ours).min() > 0.1
