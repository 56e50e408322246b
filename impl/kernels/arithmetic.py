"""Single numbers: exponential and activations.

Rules
- float32 in, float32 out; NaN stays NaN.
- Written out in plain operations so that loops over channels vectorise; the same input gives the same bits wherever it stands.
Source: the exponential's polynomial is that of Cephes' expf (Moshier, public).
"""

import math

import numpy as np

from . import kernel

_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LARGEST = np.float32(88.0)
_SMALLEST = np.float32(-87.0)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)
_SQRT_HALF = np.float32(0.70710678118654752)
_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23


@kernel
def exponential(x: np.float32) -> np.float32:
    """e to the x, float32; within 2 units in the last place. Below -87 and above 88 it is that of -87 and of 88."""
    clamped = _SMALLEST if x < _SMALLEST else (_LARGEST if x > _LARGEST else x)
    power = np.floor(clamped * _LOG2_E + _HALF)
    rest = clamped - power * _LN2_HIGH
    rest = rest - power * _LN2_LOW
    polynomial = ((((_P0 * rest + _P1) * rest + _P2) * rest + _P3) * rest + _P4) * rest + _P5
    mantissa = polynomial * (rest * rest) + rest + _ONE
    scale = np.int32((np.int32(power) + _EXPONENT_BIAS) << _MANTISSA_BITS).view(np.float32)
    result: np.float32 = mantissa * scale
    return result


@kernel
def sigmoid(x: np.float32) -> np.float32:
    """The logistic function, float32."""
    return _ONE / (_ONE + exponential(-x))


@kernel
def hyperbolic_tangent(x: np.float32) -> np.float32:
    """The hyperbolic tangent, float32; within 1e-7."""
    shrunk = exponential(-(abs(x) + abs(x)))
    size = (_ONE - shrunk) / (_ONE + shrunk)
    return -size if x < _ZERO else size


@kernel
def silu(x: np.float32) -> np.float32:
    """x times its logistic function, float32."""
    return x / (_ONE + exponential(-x))


@kernel
def gelu(x: np.float32) -> np.float32:
    """x times the normal distribution's function of x, in the form with erf, float32."""
    result: np.float32 = _HALF * x * (_ONE + np.float32(math.erf(x * _SQRT_HALF)))
    return result


@kernel
def softplus(x: np.float32) -> np.float32:
    """log(1 + e to the x), float32, without overflow."""
    return (x if x > _ZERO else _ZERO) + np.float32(math.log1p(exponential(-abs(x))))
