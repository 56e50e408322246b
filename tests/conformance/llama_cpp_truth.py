"""Outside truth: llama.cpp on our weights, written as a GGUF file.

Rules
- The plain use of llama.cpp only: one sequence, a fresh context, one decode; no state operation.
- Importing this loads the library and silences it.
Source: llama.h; the library that llama-cpp-python installs.
"""

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp as package
import numpy as np
from statedrift.spec.families import dimensions_of
from statedrift.spec.models import Model
from statedrift.targets.gguf_file import write_gguf

llama_cpp: Any = package

TOKEN_COUNT = 60
QUIET = llama_cpp.llama_log_callback(lambda level, text, data: None)
"""The library keeps the callback, so it must live as long as the process."""


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
