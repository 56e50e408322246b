"""Single numbers on a device: activations, as in `impl/kernels/arithmetic.py`.

Rules
- float32 in, float32 out; NaN stays NaN. Exponential, logarithm and error function are the device's own.
- Arguments are kept within what a float32 exponential can be, as on the CPU: nothing becomes infinite on the way.
"""

import math
from typing import Any

import numpy as np

from . import device_function

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_SMALLEST, _LARGEST = np.float32(-87), np.float32(88)
_SQRT_HALF = np.float32(0.70710678118654752)


@device_function
def exponential(x: Any) -> Any:
    """e to the x, float32. Below -87 and above 88 it is that of -87 and of 88."""
    return np.float32(math.exp(_SMALLEST if x < _SMALLEST else (_LARGEST if x > _LARGEST else x)))


@device_function
def sigmoid(x: Any) -> Any:
    """The logistic function, float32."""
    return _ONE / (_ONE + exponential(-x))


@device_function
def hyperbolic_tangent(x: Any) -> Any:
    """The hyperbolic tangent, float32."""
    shrunk = exponential(-(abs(x) + abs(x)))
    size = (_ONE - shrunk) / (_ONE + shrunk)
    return -size if x < _ZERO else size


@device_function
def silu(x: Any) -> Any:
    """x times its logistic function, float32."""
    return x / (_ONE + exponential(-x))


@device_function
def gelu(x: Any) -> Any:
    """x times the normal distribution's function of x, in the form with erf, float32."""
    return _HALF * x * (_ONE + np.float32(math.erf(x * _SQRT_HALF)))


@device_function
def softplus(x: Any) -> Any:
    """log(1 + e to the x), float32, without overflow."""
    return (x if x > _ZERO else _ZERO) + np.float32(math.log1p(exponential(-abs(x))))


@device_function
def square_root(x: Any) -> Any:
    """The square root, float32."""
    return np.float32(math.sqrt(x))
