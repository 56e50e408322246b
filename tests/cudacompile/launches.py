"""What every CUDA kernel is compiled with: the scans and the convolution at the sizes of real models, the others at any."""

import importlib
from collections.abc import Iterator

import numpy as np

from tests.cudacompile.compiling import Launch, taken_down
from tests.cudasim.cases import CASES, SCANS, operands_of

REAL_SIZES = {
    "mamba1_scan": [(16, 4096)],
    "mamba2_scan": [(128, 64), (256, 64), (64, 64)],
    "lightning_attention": [(128, 128), (96, 96)],
    "gated_delta_net": [(128, 128)],
    "kimi_delta_attention": [(128, 128)],
    "rwkv6_wkv": [(64, 64)],
    "rwkv7_wkv": [(64, 64)],
}
"""d_state and head_dim of models that exist; what does not fill its lanes (96) among them."""
MADE_ON_THE_HOST = ("dense.rotary_table",)
"""They start no kernel."""
SEGMENTS = (np.array([0, 4]), np.array([0]), np.array([[0, 1, 2, 3]]))


def scan_launches() -> Iterator[tuple[str, Launch]]:
    """Name with sizes, and launch, of every scan and convolution."""
    for name in SCANS:
        function = getattr(importlib.import_module(f"statedrift.kernels_cuda.{name}"), name)
        for d_state, head_dim in REAL_SIZES[name]:
            operands = operands_of(name, d_state, head_dim, heads=2, tokens=4)
            is_mamba1 = name == "mamba1_scan"
            rows = np.zeros((4, d_state, head_dim) if is_mamba1 else (4, 2, d_state, head_dim), np.float32)
            y = np.zeros((4, head_dim) if is_mamba1 else (4, 2, head_dim), np.float32)
            with taken_down() as launches:
                function(*operands, rows, *SEGMENTS, y)
            yield f"{name} {d_state} x {head_dim}", launches[0]
    convolution = importlib.import_module("statedrift.kernels_cuda.causal_convolution").causal_convolution
    for taps in (3, 4):
        x = np.zeros((4, 256), np.float32)
        with taken_down() as launches:
            convolution(x, np.zeros((taps, 256), np.float32), x[0], np.zeros((4, taps - 1, 256), np.float32), *SEGMENTS, np.zeros_like(x))
        yield f"causal_convolution {taps} taps", launches[0]


def other_launches() -> Iterator[tuple[str, Launch]]:
    """The same of every other kernel."""
    from statedrift.kernels_cuda.arrays import to_device

    for case, arguments in CASES.items():
        if case in MADE_ON_THE_HOST:
            continue
        module, function = case.split(".")
        with taken_down() as launches:
            given = [to_device(argument) if isinstance(argument, np.ndarray | tuple) else argument for argument in arguments()]
            getattr(importlib.import_module(f"statedrift.kernels_cuda.{module}"), function)(*given)
        for launch in launches:
            yield f"{case} ({launch.kernel.__name__})", launch
