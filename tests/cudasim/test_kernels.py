"""Every CUDA kernel against the CPU's kernel of the same name, on the same arguments, and the laws that a kernel keeps: any split of the
tokens and any order of the segments gives the same bits; what nothing wrote is never read, and what is not a plane is never written."""

import importlib

import numpy as np
import pytest
from numba import cuda
from statedrift.impl.kernels.attention import Sight
from statedrift.kernels_cuda.arrays import Twin, to_device

from tests.cudasim.cases import (
    CASES,
    COUNT,
    N_ROWS,
    PER_HEAD,
    PLANE_ROW,
    SCANS,
    SEGMENT_START,
    SIZES,
    SOURCE_ROW,
    TOKENS,
    TOLERANCE,
    WINDOWS,
    difference_from_namesake,
    difference_from_recurrence,
    difference_of_windows,
    normal,
    operands_of,
    rows_of,
    scanned,
)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCANS)
def test_a_scan_is_the_recurrence(name, size, both_orders_of_threads):
    assert difference_from_recurrence(name, *size) <= TOLERANCE


@pytest.mark.parametrize("size", SIZES[:3])
@pytest.mark.parametrize("name", SCANS)
def test_a_scan_gives_the_same_bits_for_every_split(name, size):
    operands, rows = operands_of(name, *size), rows_of(name, *size)
    plane_row = np.array([[3, 4, 5]])
    whole, y = scanned(name, operands, rows, np.array([0, COUNT]), np.array([0]), plane_row)
    for sizes in ((1,) * COUNT, (4, 2, 3)):
        split, parts, at, source = rows, [], 0, 0
        for count in sizes:
            part = [operand if (name, place) in PER_HEAD else operand[at : at + count] for place, operand in enumerate(operands)]
            split, own = scanned(name, part, split, np.array([0, count]), np.array([source]), plane_row)
            parts.append(own)
            at, source = at + count, 3
        np.testing.assert_array_equal(np.concatenate(parts), y)
        np.testing.assert_array_equal(split[3], whole[3])


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_gives_the_same_bits_for_every_order_of_segments(name):
    operands, rows = operands_of(name, 24, 4), rows_of(name, 24, 4)
    given, y = scanned(name, operands, rows, SEGMENT_START, SOURCE_ROW, PLANE_ROW)
    order = [2, 0, 1]
    starts = SEGMENT_START - SEGMENT_START[0]
    tokens = np.concatenate([np.arange(starts[segment], starts[segment + 1]) for segment in order])
    turned = [operand if (name, place) in PER_HEAD else operand[tokens] for place, operand in enumerate(operands)]
    ends = np.cumsum([0, *(TOKENS[segment] for segment in order)])
    other, other_y = scanned(name, turned, rows, ends, SOURCE_ROW[order], PLANE_ROW[order])
    np.testing.assert_array_equal(other, given)
    np.testing.assert_array_equal(other_y, y[tokens])


# --- convolution, token shift ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "shape"), WINDOWS)
def test_windows_and_their_planes_are_those_of_the_cpu(module, shape, both_orders_of_threads):
    assert difference_of_windows(module, shape) <= TOLERANCE


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


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_its_namesake_on_the_cpu(name, both_orders_of_threads):
    assert difference_from_namesake(name) <= TOLERANCE


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
