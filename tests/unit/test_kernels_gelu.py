"""The GELU of kernels against its definition, in float64."""

import math

import numpy as np
import pytest
from statedrift.impl.kernels.arithmetic import gelu
from statedrift.impl.kernels.dense import gated_gelu_unit


def truth(x: float) -> float:
    """x times the normal distribution's function of x."""
    return x * math.erfc(-x / math.sqrt(2)) / 2


@pytest.mark.parametrize("x", [-200.0, -20.0, -3.0, -0.7, -1e-4, 0.0, 1e-4, 0.5, 2.0, 20.0, 200.0])
def test_it_is_x_times_the_normal_distribution_of_x(x: float) -> None:
    assert abs(gelu(np.float32(x)) - truth(float(np.float32(x)))) <= 3e-7 * max(1.0, abs(x))


def test_nan_stays_nan() -> None:
    assert np.isnan(gelu(np.float32(np.nan)))


def test_a_value_is_multiplied_by_the_gelu_of_its_gate() -> None:
    generator = np.random.default_rng(0)
    gate, value = generator.standard_normal((2, 5, 7)).astype(np.float32)
    expected = value * np.vectorize(truth)(gate.astype(np.float64))
    alone = value[3:4].copy()
    gated_gelu_unit(gate, value)
    assert np.abs(value - expected).max() <= 1e-6
    gated_gelu_unit(gate[3:4], alone)
    assert np.array_equal(alone[0], value[3])
