"""Sizes: llama.cpp says on its log how many bytes each part of a session takes, and `statedrift size` has the same numbers.

Rules
- Tokens a sequence, and a window with its micro-batch, are multiples of 256 here: the engine rounds them up.
- The log has two digits of a MiB; the sessions are large enough for them to tell parts apart.
"""

import ctypes
import importlib.util
import re

import pytest
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.families import dimensions_of, family_of
from statedrift.spec.models import Model
from statedrift.spec.state_sizes import CacheSize, Size, size_of
from statedrift.targets import llama_library, llama_loading
from statedrift.targets.llamacpp import TARGET

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python, which is not installed")
_PART = re.compile(r"\b([KVRSP]) \(f32\): +([0-9.]+) MiB")


def logged_sizes(model: Model, configuration: CacheConfiguration) -> tuple[dict[str, float], int]:
    """MiB of each part (k, v, r, s, p) of a session, as the engine's log has them, and the snapshots that it keeps.

    A part that it logs several times is summed.
    """
    library = llama_loading.load_library()
    lines: list[str] = []
    keep = llama_library.LogCallback(lambda level, text, _: lines.append(ctypes.string_at(text).decode()))
    library.call.llama_log_set(keep, None)
    try:
        session = TARGET.open(model, configuration)
        n_rs_seq = session.capabilities.n_rs_seq
        session.close()
    finally:
        library.call.llama_log_set(library._callbacks[0], None)
    found: dict[str, float] = {}
    for line in lines:
        if ": size = " in line:
            for part, size in _PART.findall(line):
                found[part.lower()] = found.get(part.lower(), 0.0) + float(size)
    return found, n_rs_seq


def computed_sizes(size: Size) -> dict[str, float]:
    """MiB of each part."""
    found: dict[str, float] = {}
    for group in size.layers:
        for part in group.parts:
            name = "k" if part.part.name == "i" else part.part.name  # an indexer's keys are keys to the engine
            found[name] = found.get(name, 0.0) + part.bytes / (1 << 20)
    return found


@pytest.mark.parametrize("unified", [0, 1])
@pytest.mark.parametrize(
    "model",
    [
        Model("mamba2"),
        Model("lfm2"),
        Model("nemotron_h"),
        Model("qwen35"),
        Model("mamba"),
        Model("jamba"),
        Model("lfm2_swa", 0, (("n_swa", 192),)),
        Model("minimax01"),
        Model("qwen4exp"),
        Model("rwkv6"),
        Model("rwkv7"),
        Model("falcon_h1"),
    ],
    ids=lambda model: model.family,
)
def test_the_engine_takes_the_bytes_that_are_computed(model: Model, unified: int) -> None:
    if model.family == "lfm2_swa" and unified:
        model = Model("lfm2_swa", 0, (("n_swa", 3),))  # 64 windows of 3 and a micro-batch of 64: 256 cells
    configuration = CacheConfiguration(n_seq_max=64, n_rs_seq=15, n_ctx=512, n_ubatch=64, unified=unified)
    logged, n_rs_seq = logged_sizes(model, configuration)  # a pure recurrent model has no snapshots there
    cache = CacheSize(n_seq_max=64, n_rs_seq=n_rs_seq, n_ctx=512, n_ubatch=64, unified=unified)
    groups = [group for group in family_of(model).state_layers(dimensions_of(model)) if group.count]
    computed = computed_sizes(size_of(groups, cache))
    assert {name for name, size in logged.items() if size > 0} == set(computed)
    for name, size in computed.items():
        assert abs(logged[name] - size) <= 0.00501, name
