"""benchmarks/gpu.py: it runs in the simulator, says what is wrong, and compares with peers that compute the same. Nothing is timed here."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from statedrift.targets import cuda_session

from tests.cudasim import cases

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch):
    found = importlib.util.spec_from_file_location("gpu", BENCHMARK)
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "gpu", module)
    found.loader.exec_module(module)
    return module


def test_it_runs_at_toy_size(gpu, tmp_path, capsys):
    written, data = tmp_path / "page.md", tmp_path / "data.json"
    assert gpu.main(["--toy", "--seed", "5", "--write", str(written), "--json", str(data)]) == 0
    text = capsys.readouterr().out
    assert written.read_text(encoding="utf-8") == text
    assert "device: simulated device" in text
    assert "0 of them wrong" in text
    assert "None: this was the simulator." in text
    found = json.loads(data.read_text(encoding="utf-8"))
    assert {row["target"]: row["programs"] for row in found["fuzz"]} == {"cuda": 2, "cuda-ring": 2}
    assert len(found["kernels"]) > len(cases.CASES)


def test_a_wrong_kernel_is_an_error(gpu, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "check_kernels", lambda *arguments: [gpu.Checked("dense.linear", float("nan"), 1e-5)])
    monkeypatch.setattr(gpu, "fuzz", lambda *arguments: [gpu.Fuzzed("cuda", ("lfm2",), 1, 0, ())])
    monkeypatch.setattr(gpu, "_toy_speeds", lambda: {"speeds": None})
    assert gpu.main(["--toy"]) == 1
    assert "WRONG: dense.linear is off by nan" in capsys.readouterr().out


def test_a_kernel_that_cannot_be_run_is_wrong_and_the_others_are_compared(gpu, monkeypatch):
    def broken(name):
        raise OSError("no\nmodule")

    monkeypatch.setattr(gpu.tests_cases(), "difference_from_namesake", broken)
    monkeypatch.setattr(gpu.tests_cases(), "SCANS", ("mamba2_scan",))
    found = gpu.check_kernels((), 0, lambda text: None)
    broken_ones = [row for row in found if not row.is_right]
    assert {row.failure for row in broken_ones} == {"OSError: no module"}
    assert 0 < len(broken_ones) < len(found)


def test_what_could_not_be_tested_is_said(gpu, monkeypatch):
    """Convolutions that do nothing: too far from the truth for their noise to be measured."""
    from statedrift.kernels_cuda import causal_convolution

    cuda_session.on_device.cache_clear()
    monkeypatch.setattr(causal_convolution, "causal_convolution", lambda *arguments: None)
    found = gpu.fuzz(0, ("lfm2",), None, 1)
    cuda_session.on_device.cache_clear()
    assert all(row.failure for row in found)
    kernels = [{"kernel": "a", "difference": 0.0, "tolerance": 1.0}]
    result = {"machine": {}, "seed": 0, "seconds": 1.0, "kernels": kernels, "fuzz": [row._asdict() for row in found], "speeds": None}
    assert "COULD NOT TEST cuda-ring: " in gpu.page(result)


def test_real_sizes_are_not_for_the_simulator(gpu, capsys):
    assert gpu.main([]) == 64
    assert "--toy go together" in capsys.readouterr().err


def test_what_is_timed_is_queued_and_shown(gpu, monkeypatch):
    """The simulator's events have no times; everything around them is the device's way."""
    monkeypatch.setattr(gpu, "SHAPES", gpu.TOY_SHAPES[:2])
    monkeypatch.setattr(gpu, "WORKS", gpu.TOY_WORKS)
    monkeypatch.setattr(gpu, "AHEAD_BYTES", 64)
    monkeypatch.setattr(gpu, "SERIES", 1)
    monkeypatch.setattr(gpu, "LAUNCHES", 1)
    found = gpu._speeds(0, lambda text: None)
    assert [row["who"] for row in found["speeds"]] == ["statedrift"] * 4
    assert not any("scan" in text for text in found["not_measured"])
    result = {"machine": {}, "seed": 0, "seconds": 1.0, "kernels": [{"kernel": "a", "difference": 0.0, "tolerance": 1.0}], "fuzz": []}
    text = gpu.page(result | found | {"below_bound": ["mamba2_scan: decode of 64: 70 %"]})
    assert "mamba2_scan: decode of 3 | 2 x 4 x 8 | statedrift" in text
    assert "below 80 % of the copy: mamba2_scan" in text
    assert "not measured: PyTorch" in text


@pytest.mark.parametrize("name", cases.SCANS)
def test_what_it_calls_pytorch_computes_the_same(gpu, monkeypatch, name):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    outputs = []
    step = gpu.STEPS[name]
    monkeypatch.setitem(gpu.STEPS, name, lambda *arguments: outputs.append(step(*arguments)))
    shape, work = gpu.Shape(name, 1 if name == "mamba1_scan" else 2, 8, 4), gpu.Work("", 2, 3, 1)
    gpu._torch_steps(shape, work, compiled=False)()
    y = torch.stack(outputs, 1).numpy()

    operands = cases.operands_of(name, 8, 4, shape.heads, 6)
    heads = () if name == "mamba1_scan" else (2,)
    rows, truth = np.zeros((2, *heads, 8, 4)), np.zeros((6, *heads, 4))
    reference = getattr(importlib.import_module(f"statedrift.impl.kernels.{name}"), f"{name}_reference")
    reference(*(operand.astype(float) for operand in operands), rows, np.array([0, 3, 6]), np.arange(2), np.arange(2)[:, None], truth)
    np.testing.assert_allclose(y.reshape(truth.shape), truth, rtol=1e-5, atol=1e-5)
