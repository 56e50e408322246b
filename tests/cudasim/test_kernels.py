"""Every CUDA kernel against the CPU's kernel of the same name, on the same arguments, and the laws that a kernel keeps: any split of the
tokens and any order of the segments gives the same bits; what nothing wrote is never read, and what is not a plane is never written."""

import importlib

import numpy as np
import pytest
from numba import cuda
from statedrift.impl.kernels.attention import Sight
from statedrift.kernels_cuda.arrays import Twin, to_device

TOKENS = (5, 1, 3)
SEGMENT_START = np.cumsum([7, *TOKENS])
SOURCE_ROW, PLANE_ROW = np.array([0, 1, 2]), np.array([[3, 4, 0], [1, 5, 6], [7, 8, 9]])
N_ROWS, SCRATCH = 12, 11
COUNT = sum(TOKENS)
TOLERANCE = 2e-5


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def between(seed, low, high, *shape):
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


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


def scan(name, operands, rows, segment_start, source_row, plane_row):
    """A scan on the device; its rows afterwards, and its output."""
    function = getattr(importlib.import_module(f"statedrift.kernels_cuda.{name}"), name)
    shape = rows.shape[-1:] if name == "mamba1_scan" else (rows.shape[1], rows.shape[3])
    y = cuda.to_device(np.full((segment_start[-1] - segment_start[0], *shape), np.nan, np.float32))
    on_device = cuda.to_device(rows)
    function(*map(cuda.to_device, operands), on_device, Twin(segment_start), Twin(source_row), Twin(plane_row), y)
    return on_device.copy_to_host(), y.copy_to_host()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCANS)
def test_a_scan_is_the_recurrence(name, size, both_orders_of_threads):
    operands, rows = operands_of(name, *size), rows_of(name, *size)
    reference = getattr(importlib.import_module(f"statedrift.impl.kernels.{name}"), name + "_reference")
    expected, truth = rows.astype(np.float64), np.full((COUNT, *((size[1],) if name == "mamba1_scan" else (2, size[1]))), np.nan)
    reference(*(operand.astype(np.float64) for operand in operands), expected, SEGMENT_START, SOURCE_ROW, PLANE_ROW, truth)
    given, y = scan(name, operands, rows, SEGMENT_START, SOURCE_ROW, PLANE_ROW)
    np.testing.assert_allclose(y, truth, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(given, expected, rtol=TOLERANCE, atol=TOLERANCE)
    written = {3, 4, 0, 1, 7, 8, 9}  # planes 5 and 6 are of tokens that the second segment does not have
    same = [row for row in range(N_ROWS) if row not in written]
    np.testing.assert_array_equal(given[same], rows[same])


@pytest.mark.parametrize("size", SIZES[:3])
@pytest.mark.parametrize("name", SCANS)
def test_a_scan_gives_the_same_bits_for_every_split(name, size):
    operands, rows = operands_of(name, *size), rows_of(name, *size)
    plane_row = np.array([[3, 4, 5]])
    whole, y = scan(name, operands, rows, np.array([0, COUNT]), np.array([0]), plane_row)
    for sizes in ((1,) * COUNT, (4, 2, 3)):
        split, parts, at, source = rows, [], 0, 0
        for count in sizes:
            part = [operand if (name, place) in PER_HEAD else operand[at : at + count] for place, operand in enumerate(operands)]
            split, own = scan(name, part, split, np.array([0, count]), np.array([source]), plane_row)
            parts.append(own)
            at, source = at + count, 3
        np.testing.assert_array_equal(np.concatenate(parts), y)
        np.testing.assert_array_equal(split[3], whole[3])


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_gives_the_same_bits_for_every_order_of_segments(name):
    operands, rows = operands_of(name, 24, 4), rows_of(name, 24, 4)
    given, y = scan(name, operands, rows, SEGMENT_START, SOURCE_ROW, PLANE_ROW)
    order = [2, 0, 1]
    starts = SEGMENT_START - SEGMENT_START[0]
    tokens = np.concatenate([np.arange(starts[segment], starts[segment + 1]) for segment in order])
    turned = [operand if (name, place) in PER_HEAD else operand[tokens] for place, operand in enumerate(operands)]
    ends = np.cumsum([0, *(TOKENS[segment] for segment in order)])
    other, other_y = scan(name, turned, rows, ends, SOURCE_ROW[order], PLANE_ROW[order])
    np.testing.assert_array_equal(other, given)
    np.testing.assert_array_equal(other_y, y[tokens])


# --- convolution, token shift ------------------------------------------------------------------------------------------------

UNWRITTEN = np.array([[3, 4, 0], [1, -1, 6], [7, -1, 9]])


@pytest.mark.parametrize(("module", "shape"), [("causal_convolution", (3, 6)), ("causal_convolution", (1, 5)), ("token_shift", (2, 6))])
def test_windows_and_their_planes_are_those_of_the_cpu(module, shape, both_orders_of_threads):
    channels = shape[1]
    x, rows = normal(0, COUNT, channels), normal(1, N_ROWS, *shape)
    rows[10:] = np.nan
    before = (normal(2, shape[0] + 1, channels), normal(3, channels)) if module == "causal_convolution" else (1,)
    results = []
    for room, move, back in (("impl.kernels", np.copy, np.asarray), ("kernels_cuda", to_device, lambda a: a.copy_to_host())):
        function = getattr(importlib.import_module(f"statedrift.{room}.{module}"), module)
        own_rows, y = move(rows), move(np.full_like(x, np.nan))
        whole = [move(argument) if isinstance(argument, np.ndarray) else argument for argument in before]
        function(move(x), *whole, own_rows, move(SEGMENT_START), move(SOURCE_ROW), move(UNWRITTEN), y)
        results.append((back(own_rows), back(y)))
    (expected_rows, expected), (given_rows, given) = results
    np.testing.assert_array_equal(given_rows, expected_rows)
    np.testing.assert_allclose(given, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_window_gives_the_same_bits_for_every_split():
    module = importlib.import_module("statedrift.kernels_cuda.causal_convolution")
    x, taps, bias, rows = normal(0, COUNT, 6), normal(1, 4, 6), normal(2, 6), normal(3, N_ROWS, 3, 6)

    def run(given, parts):
        own, answers, at, source = cuda.to_device(given), [], 0, 0
        for count in parts:
            y = cuda.to_device(np.full((count, 6), np.nan, np.float32))
            constants = (cuda.to_device(taps), cuda.to_device(bias))
            planes = Twin(np.array([[3, 4]]))
            module.causal_convolution(
                cuda.to_device(x[at : at + count]), *constants, own, Twin(np.array([0, count])), Twin(np.array([source])), planes, y
            )
            answers.append(y.copy_to_host())
            at, source = at + count, 3
        return own.copy_to_host()[3], np.concatenate(answers)

    whole = run(rows, (COUNT,))
    for parts in ((1,) * COUNT, (4, 2, 3)):
        for one, other in zip(run(rows, parts), whole, strict=True):
            np.testing.assert_array_equal(one, other)


# --- everything else: by name, on the same arguments --------------------------------------------------------------------------

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


def arrays_of(arguments):
    return [argument for argument in arguments if isinstance(argument, np.ndarray)]


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_its_namesake_on_the_cpu(name, both_orders_of_threads):
    module, function = name.split(".")
    arguments = CASES[name]()
    given = [to_device(argument) if isinstance(argument, np.ndarray | tuple) else argument for argument in arguments]
    getattr(importlib.import_module(f"statedrift.kernels_cuda.{module}"), function)(*given)
    getattr(importlib.import_module(f"statedrift.impl.kernels.{module}"), function)(*arguments)
    results = [argument for argument in given if not isinstance(argument, Twin | tuple) and hasattr(argument, "copy_to_host")]
    floats = [array for array in arrays_of(arguments) if array.dtype == np.float32]
    assert results
    for one, other in zip(results, floats, strict=True):
        np.testing.assert_allclose(one.copy_to_host(), other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 13, 96])
def test_what_stands_in_for_a_device_function_gives_its_bits(size):
    from statedrift.kernels_cuda.dense import product, sum_of_products

    x, y, matrix = normal(0, size), normal(1, size), normal(2, max(size - 1, 1), 3)
    x[0] = -0.0
    for quick, arguments in (
        (sum_of_products, (x, y)),
        (product, (x, matrix, np.uint64(1))),
        (product, (abs(x) * 0, -abs(matrix), np.uint64(0))),
    ):
        one, other = np.float32(quick(*arguments)), np.float32(quick.of_one_thread(*arguments))
        assert one.tobytes() == other.tobytes()


def test_every_kernel_of_the_cpu_has_a_namesake_that_was_compared():
    """What a forward can call: public functions of impl.kernels that write into their last argument, and selected_sight."""
    compared = {name.split(".")[1] for name in CASES} | set(SCANS) | {"causal_convolution", "token_shift", "selected_sight"}
    asked = set()
    for module in forwards():
        for value in vars(module).values():
            home = getattr(getattr(value, "py_func", None), "__module__", "")
            if home.startswith("statedrift.impl.kernels."):
                asked.add(value.py_func.__name__)
    assert asked - compared - {"sum_of_products", "copy_row"} == set()


def forwards():
    import pkgutil

    import statedrift.impl as impl

    for found in pkgutil.iter_modules(impl.__path__):
        module = importlib.import_module(f"statedrift.impl.{found.name}")
        if hasattr(module, "forward") or found.name.endswith(("mixer", "attention", "block", "layer", "connections", "forward")):
            yield module


def test_selected_cells_are_those_of_the_cpu():
    """Ties and NaN included: blocks of two tokens, of which the best two are taken, and what makes no whole block."""
    from statedrift.impl.kernels.token_selection import selected_sight as on_cpu
    from statedrift.kernels_cuda.token_selection import selected_sight as on_device

    raw = normal(0, 12, 5)
    raw[[2, 3]] = raw[[0, 1]]  # two blocks score the same but for their rotation
    raw[6, 0] = np.nan
    listed = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 10], np.int32)
    length = np.array([1, 4, 5, 9, 10, 2])
    sight = Sight(np.arange(6), np.array([0, 0, 0, 0, 0, 10]), length, listed, np.zeros((0, 2), np.int64))
    segment_start = np.array([0, 5, 6])
    constants = (2, 2, normal(1, 1, 4), np.float32(1e-5), 1e4, 1)
    query = normal(2, 6, 3, 4)
    expected = on_cpu(query, raw, sight, segment_start, *constants)
    on_both = [to_device(constant) if isinstance(constant, np.ndarray) else constant for constant in constants]
    given = on_device(to_device(query), to_device(raw), to_device(sight), Twin(segment_start), *on_both)
    np.testing.assert_array_equal(given.first.host, expected.first)
    np.testing.assert_array_equal(given.length.host, expected.length)
    np.testing.assert_array_equal(given.listed.copy_to_host()[: expected.length.sum()], expected.listed[: expected.length.sum()])
