"""What CUDA kernels are tried with, and the differences from the CPU's kernels of the same name.

Rules
- Whatever a kernel must not read is NaN, and so is what it has to write.
- Numbers are drawn afresh for every `draw.salt`; sizes are small, with lanes that are not full and more than one segment.
- For tests in the simulator, for the compile check, and for benchmarks/gpu.py on a device.
"""

import importlib
from types import SimpleNamespace

import numpy as np
from numba import cuda
from statedrift.impl.kernels.attention import Sight
from statedrift.impl.memory import aligned
from statedrift.kernels_cuda.arrays import Twin, to_device

TOKENS = (5, 1, 3)
SEGMENT_START = np.cumsum([7, *TOKENS])
SOURCE_ROW, PLANE_ROW = np.array([0, 1, 2]), np.array([[3, 4, 0], [1, 5, 6], [7, 8, 9]])
N_ROWS, SCRATCH = 12, 11
COUNT = sum(TOKENS)
TOLERANCE = 2e-5
"""Largest difference, of the number itself where it is above 1."""
draw = SimpleNamespace(salt=0)


def normal(seed, *shape):
    return np.random.default_rng((draw.salt, seed)).standard_normal(shape).astype(np.float32)


def between(seed, low, high, *shape):
    return np.random.default_rng((draw.salt, seed)).uniform(low, high, shape).astype(np.float32)


def unit(seed, *shape):
    x = normal(seed, *shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def operands_of(name, d_state, head_dim, heads=2, tokens=COUNT):
    """The arguments of a scan before its rows."""
    keyed, valued = (tokens, heads, d_state), (tokens, heads, head_dim)
    match name:
        case "mamba1_scan":
            channels, narrow = (tokens, head_dim), (tokens, d_state)
            return (
                normal(0, *channels),
                between(1, 0.1, 1, *channels),
                -between(2, 0.1, 2, d_state, head_dim),
                normal(3, *narrow),
                normal(4, *narrow),
            )
        case "mamba2_scan":
            grouped = (tokens, 1, d_state)
            return (
                normal(0, *valued),
                between(1, 0.1, 1, tokens, heads),
                -between(2, 0.1, 2, heads),
                normal(3, *grouped),
                normal(4, *grouped),
            )
        case "lightning_attention":
            return normal(0, *keyed), normal(1, *keyed), normal(2, *valued), -between(3, 0, 1, heads)
        case "gated_delta_net":
            shared = (tokens, 1, d_state)
            return unit(0, *shared), unit(1, *shared), normal(2, *valued), -between(3, 0, 2, tokens, heads), between(4, 0, 1, tokens, heads)
        case "kimi_delta_attention":
            return unit(0, *keyed), unit(1, *keyed), normal(2, *valued), between(3, 0, 1, *keyed), between(4, 0, 1, tokens, heads)
        case "rwkv6_wkv":
            return normal(0, *keyed), normal(1, *keyed), normal(2, *valued), between(3, 0, 1, *keyed), normal(4, heads, d_state)
        case "rwkv7_wkv":
            return (
                normal(0, *keyed), normal(1, *keyed), normal(2, *valued), between(3, 0, 1, *keyed), unit(4, *keyed), between(5, 0, 1, *keyed),
            )  # fmt: skip
    raise AssertionError(name)


SCANS = ("mamba1_scan", "mamba2_scan", "lightning_attention", "gated_delta_net", "kimi_delta_attention", "rwkv6_wkv", "rwkv7_wkv")
PER_HEAD = {("mamba2_scan", 2), ("lightning_attention", 3), ("rwkv6_wkv", 4), ("mamba1_scan", 2)}
"""Operands that are not of a token."""
SIZES = ((16, 8), (5, 3), (24, 4), (40, 1))
"""d_state and head_dim: whole vectors, single channels with a lane's last entries missing, two and more lanes, one channel."""


def rows_of(name, d_state, head_dim, heads=2):
    rows = normal(9, *((N_ROWS, d_state, head_dim) if name == "mamba1_scan" else (N_ROWS, heads, d_state, head_dim)))
    rows[10:] = np.nan  # nothing wrote these
    return rows


X, Y, W = (4, 6), (4, 6), (2, 6)
ROW_LIST = np.array([2, 0, 3])
SIGHT = Sight(
    np.array([5, 1, 7]), np.array([0, 2, 3]), np.array([2, 1, 4]), np.array([5, 2, 1, 0, 5, 3, 7], np.int32), np.zeros((0, 2), np.int64)
)
CASES = {
    "dense.linear": lambda: (normal(0, 4, 11), normal(1, 11, 5), np.full((4, 5), np.nan, np.float32)),
    "dense.add_rows": lambda: (normal(0, *X), normal(1, *Y)),
    "dense.add_to_scaled_rows": lambda: (normal(0, *X), normal(1, *X), np.float32(1.5), normal(2, *Y)),
    "dense.rms_norm": lambda: (normal(0, *X), normal(1, *W), np.float32(1e-5), np.full(Y, np.nan, np.float32)),
    "dense.to_length": lambda: (normal(0, *X), np.float32(0.5), np.float32(1e-5)),
    "dense.layer_norm": lambda: (normal(0, *X), normal(1, *W), normal(2, *W), np.float32(1e-5), np.full(Y, np.nan, np.float32)),
    "dense.silu_rows": lambda: (100 * normal(0, *X),),
    "dense.multiply_rows": lambda: (normal(0, *X), normal(1, *Y)),
    "dense.gated_linear_unit": lambda: (normal(0, *X), normal(1, *Y)),
    "dense.gated_gelu_unit": lambda: (normal(0, *X), normal(1, *Y)),
    "dense.gate_by_sigmoid": lambda: (normal(0, *X), normal(1, *Y)),
    "dense.squared_relu": lambda: (normal(0, *X),),
    "dense.rotary_table": lambda: (np.array([0, 7, 4095, 1]), 3, 1e6, np.zeros((4, 3), np.float32), np.zeros((4, 3), np.float32)),
    "dense.rotate": lambda: (normal(0, 4, 2, 8), between(1, -1, 1, 4, 3), between(2, -1, 1, 4, 3)),
    "dense.embed": lambda: (np.array([3, 0, 9, 3]), normal(0, 10, 6), np.full(Y, np.nan, np.float32)),
    "dense.write_wanted_rows": lambda: (
        normal(0, *X), np.array([1, -1, 0, -1]), normal(1, 1, 6), np.float32(1e-5), normal(2, 6, 9), False, np.full((2, 9), np.nan, np.float32),
    ),
    "dense.write_wanted_layer_norm_rows": lambda: (
        normal(0, *X), np.array([1, -1, 0, -1]), normal(1, 1, 6), normal(3, 1, 6), np.float32(1e-5), normal(2, 6, 9), True,
        np.full((2, 6), np.nan, np.float32),
    ),
    "rows.zero_rows": lambda: (normal(0, 2, 5, 3), np.array([3, -1, 0])),
    "rows.copy_rows": lambda: (normal(0, 2, 5, 3), np.array([3, 3]), np.array([0, 1])),
    "rows.gather_rows": lambda: (normal(0, 2, 5, 3), ROW_LIST, np.full((2, 3, 3), np.nan, np.float32)),
    "rows.scatter_rows": lambda: (normal(0, 2, 3, 3), ROW_LIST, normal(1, 2, 5, 3)),
    "rows.copy_rows_of": lambda: (normal(0, *X), normal(1, *Y)),
    "token_shift.blend": lambda: (normal(0, *X), normal(1, *X), normal(2, 1, 6), np.full(Y, np.nan, np.float32)),
    "time_mix.through_tanh": lambda: (normal(0, *X),),
    "time_mix.add_to_rows": lambda: (normal(0, 6), normal(1, *Y)),
    "time_mix.to_double_exponential_decay": lambda: (normal(0, *X), normal(1, 6)),
    "time_mix.to_bounded_decay": lambda: (normal(0, *X), np.float32(0.6)),
    "time_mix.squash": lambda: (normal(0, 6), normal(1, *X)),
    "time_mix.removals": lambda: (normal(0, *X), normal(1, 6), 2, np.full(Y, np.nan, np.float32)),
    "time_mix.slow_keys": lambda: (normal(0, *X), normal(1, 6), normal(2, *X)),
    "time_mix.add_own": lambda: (normal(0, 4, 2, 3), normal(1, 4, 2, 3), normal(2, 4, 2, 3), normal(3, 2, 3), normal(4, 4, 2, 3)),
    "experts.softmax_shares": lambda: (normal(0, *X),),
    "experts.sigmoid_shares": lambda: (normal(0, *X), np.float32(2.5)),
    "experts.expert_mixture": lambda: (
        normal(0, *X), between(1, 0, 1, 4, 3), normal(2, 3, 6, 5), normal(3, 3, 6, 5), normal(4, 3, 5, 6), np.full(Y, np.nan, np.float32),
    ),
    "mixer_parts.softplus_rows": lambda: (30 * normal(0, *X), normal(1, 6)),
    "mixer_parts.skip_channels": lambda: (normal(0, *X), normal(1, 6), normal(2, *Y)),
    "mixer_parts.split_mamba2": lambda: (normal(0, 4, 12), *(np.full((4, n), np.nan, np.float32) for n in (6, 3, 3))),
    "mixer_parts.skip_heads": lambda: (normal(0, 4, 2, 3), normal(1, 2), normal(2, 4, 2, 3)),
    "mixer_parts.split_delta_net": lambda: (
        normal(0, 4, 18), 2, np.array([1, 0, 1]), *(np.full((4, n), np.nan, np.float32) for n in (9, 9, 6)),
    ),
    "mixer_parts.delta_net_rates": lambda: (normal(0, 4, 3), normal(1, 3), -between(2, 0, 1, 3), normal(3, 4, 3)),
    "mixer_parts.split_kimi_delta": lambda: (normal(0, 4, 18), *(np.full((4, 6), np.nan, np.float32) for _ in range(3))),
    "mixer_parts.kimi_delta_rates": lambda: (normal(0, 4, 6), normal(1, 6), -between(2, 0, 1, 2), normal(3, 4, 2)),
    "mixer_parts.multiply_heads": lambda: (normal(0, 4, 2, 5), normal(1, 2, 3, 4), normal(2, 4, 2, 6)),
    "mixer_parts.copy_last_channels": lambda: (normal(0, 4, 2, 5), 2, normal(1, 4, 2, 6)),
    "mixer_parts.join_rows": lambda: (normal(0, 4, 2), normal(1, 4, 3), np.full((4, 5), np.nan, np.float32)),
    "mixer_parts.scale_rows_by_sigmoid": lambda: (normal(0, 4, 1), normal(1, *X)),
    "streams.repeat_rows": lambda: (normal(0, 4, 3), np.full(Y, np.nan, np.float32)),
    "streams.silu_of_scaled_rows": lambda: (np.float32(0.5), normal(0, *X)),
    "streams.gated_mean": lambda: (normal(0, *X), normal(1, *X), np.float32(0.5), np.full((4, 3), np.nan, np.float32)),
    "streams.twice_sigmoid_of_scaled_rows": lambda: (np.float32(0.5), normal(0, *X)),
    "streams.inject": lambda: (normal(0, 4, 3), normal(1, 4, 2), normal(2, *Y)),
    "streams.values_by_match": lambda: (normal(0, *X), normal(1, 4, 3), normal(2, *X)),
    "streams.add_with_silu": lambda: (normal(0, *X), normal(1, *X), normal(2, *Y)),
    "streams.write_tokens": lambda: (np.array([5, 60]), np.array([2, 0]), normal(0, 2, 3, 4)),
    "streams.write_raw_keys": lambda: (normal(0, 2, 3), np.array([2, 0]), normal(1, 3, 4)),
    "streams.write_wanted_products": lambda: (
        normal(0, *X), np.array([1, -1, 0, -1]), normal(2, 6, 9), False, np.full((2, 9), np.nan, np.float32),
    ),
    "attention.write_cells": lambda: (normal(0, 3, 2, 4), np.array([5, 1, 7]), normal(1, 8, 2, 4)),
    "attention.remember_and_attend": lambda: (
        normal(0, 3, 4, 6), normal(1, 3, 2, 6), normal(2, 3, 2, 6), cells_with_nan(3), cells_with_nan(4), SIGHT, 0,
        np.full((3, 4, 6), np.nan, np.float32),
    ),
    "ngram.embed_ngrams": lambda: (
        np.array([3, 9, 9, 1, 4, 9, 2, 5], np.float32), SIGHT, 0, np.array([3, 0x1234567, 77]), np.array([5, 7, 11, 13]),
        np.array([0, 5, 12, 23]), 9, 10, normal(0, 36, 2), np.full((3, 8), np.nan, np.float32),
    ),
}  # fmt: skip
"""Kernel -> arguments; every array that a kernel writes is among them."""


def cells_with_nan(seed):
    """Cells 4 and 6, which nobody sees, hold NaN."""
    cells = normal(seed, 8, 2, 6)
    cells[[4, 6]] = np.nan
    return cells


UNWRITTEN = np.array([[3, 4, 0], [1, -1, 6], [7, -1, 9]])
WINDOWS = (("causal_convolution", (3, 6)), ("causal_convolution", (1, 5)), ("token_shift", (2, 6)))
"""Kernels of windows, with the shape of a row."""


def difference_of_windows(module, shape):
    """How far outputs and rows are from the CPU's; infinite when rows differ at all, which are only copied."""
    channels = shape[1]
    x, rows = normal(0, COUNT, channels), normal(1, N_ROWS, *shape)
    rows[10:] = np.nan
    before = (normal(2, shape[0] + 1, channels), normal(3, channels)) if module == "causal_convolution" else (1,)
    results = []
    for room, move, back in (("impl.kernels", as_on_the_cpu, np.asarray), ("kernels_cuda", to_device, lambda array: array.copy_to_host())):
        function = getattr(importlib.import_module(f"statedrift.{room}.{module}"), module)
        own_rows, y = move(rows), move(np.full_like(x, np.nan))
        whole = [move(argument) if isinstance(argument, np.ndarray) else argument for argument in before]
        function(move(x), *whole, own_rows, move(SEGMENT_START), move(SOURCE_ROW), move(UNWRITTEN), y)
        results.append((back(own_rows), back(y)))
    (expected_rows, expected), (given_rows, given) = results
    return difference(given, expected) if np.array_equal(given_rows, expected_rows, equal_nan=True) else np.inf


def as_on_the_cpu(array):
    """A copy as the CPU's kernels want it."""
    return aligned(array) if is_floats(array) else array.copy()


def difference(one, other):
    """The largest difference of two arrays, over 1 + the number; infinite where one alone is NaN."""
    unlike = np.isnan(one) != np.isnan(other)
    if one.shape != other.shape or np.any(unlike):
        return np.inf
    return float(np.nanmax(np.abs(one - other) / (1 + np.abs(other)), initial=0))


def difference_from_namesake(name):
    """How far what a kernel wrote is from what the CPU's wrote; `name` is one of CASES."""
    module, function = name.split(".")
    arguments = [aligned(argument) if is_floats(argument) else argument for argument in CASES[name]()]
    given = [to_device(argument) if isinstance(argument, np.ndarray | tuple) else argument for argument in arguments]
    getattr(importlib.import_module(f"statedrift.kernels_cuda.{module}"), function)(*given)
    getattr(importlib.import_module(f"statedrift.impl.kernels.{module}"), function)(*arguments)
    pairs = [(one.copy_to_host(), other) for one, other in zip(given, arguments, strict=True) if is_floats(other)]
    assert pairs
    return max(difference(one, other) for one, other in pairs)


def is_floats(argument):
    return isinstance(argument, np.ndarray) and argument.dtype == np.float32


def difference_from_recurrence(name, d_state, head_dim, heads=2):
    """How far a scan's outputs and rows are from the reference's, in float64; infinite when it changed a row that is none of its planes."""
    operands, rows = operands_of(name, d_state, head_dim, heads), rows_of(name, d_state, head_dim, heads)
    shape = (COUNT, head_dim) if name == "mamba1_scan" else (COUNT, heads, head_dim)
    expected, truth = rows.astype(np.float64), np.full(shape, np.nan)
    reference = getattr(importlib.import_module(f"statedrift.impl.kernels.{name}"), name + "_reference")
    reference(*(operand.astype(np.float64) for operand in operands), expected, SEGMENT_START, SOURCE_ROW, PLANE_ROW, truth)
    given, y = scanned(name, operands, rows, SEGMENT_START, SOURCE_ROW, PLANE_ROW)
    written = {3, 4, 0, 1, 7, 8, 9}  # planes 5 and 6 are of tokens that the second segment does not have
    same = [row for row in range(N_ROWS) if row not in written]
    if not np.array_equal(given[same], rows[same], equal_nan=True):
        return np.inf
    return max(difference(y, truth), difference(given, expected))


def scanned(name, operands, rows, segment_start, source_row, plane_row):
    """A scan on the device; its rows afterwards, and its output."""
    function = getattr(importlib.import_module(f"statedrift.kernels_cuda.{name}"), name)
    shape = rows.shape[-1:] if name == "mamba1_scan" else (rows.shape[1], rows.shape[3])
    y = cuda.to_device(np.full((segment_start[-1] - segment_start[0], *shape), np.nan, np.float32))
    on_device = cuda.to_device(rows)
    function(*map(cuda.to_device, operands), on_device, Twin(segment_start), Twin(source_row), Twin(plane_row), y)
    return on_device.copy_to_host(), y.copy_to_host()
