"""The kernels that are measured: at which sizes, on which inputs, and how many vector instructions their formulas cannot do without.

Rules
- All scans end in the same arguments: rows, segment_start, source_row, plane_row, y. What stands before them is a case's own.
- `operations` counts, for 16 state elements and one token, the floating-point instructions of the formula with every product that can be
  fused with a sum: what a state element is multiplied by does not count where it is the same for a whole row of the state.
- Inputs are drawn so that states neither vanish nor grow: keys have length 1 where a rule divides the state by them, and decays are
  given by how many tokens a state remembers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...impl.kernels.causal_convolution import causal_convolution, causal_convolution_reference
from ...impl.kernels.gated_delta_net import gated_delta_net, gated_delta_net_reference
from ...impl.kernels.kimi_delta_attention import kimi_delta_attention, kimi_delta_attention_reference
from ...impl.kernels.lightning_attention import lightning_attention, lightning_attention_reference
from ...impl.kernels.mamba1_scan import mamba1_scan, mamba1_scan_reference
from ...impl.kernels.mamba2_scan import mamba2_scan, mamba2_scan_reference
from ...impl.kernels.rwkv6_wkv import rwkv6_wkv, rwkv6_wkv_reference
from ...impl.kernels.rwkv7_wkv import rwkv7_wkv, rwkv7_wkv_reference
from ...impl.memory import aligned, allocate

Arrays = tuple[np.ndarray, ...]


class Size(NamedTuple):
    """How large a state is: `heads` of [d_state, head_dim]."""

    heads: int
    head_dim: int
    d_state: int

    def __str__(self) -> str:
        return f"{self.heads} heads x {self.head_dim} x {self.d_state}"


class Decays(NamedTuple):
    """For how many tokens states remember: drawn between these, evenly on a logarithmic scale."""

    name: str
    tokens_min: float
    tokens_max: float

    def rates(self, random: np.random.Generator, *shape: int) -> np.ndarray:
        """One over so many tokens, float32."""
        logarithms = random.uniform(np.log(self.tokens_min), np.log(self.tokens_max), shape)
        return np.exp(-logarithms).astype(np.float32)


USUAL = Decays("usual", 3, 300)
SLOW = Decays("slow", 3_000, 300_000)


class Case(NamedTuple):
    """One kernel.

    operations  vector instructions for 16 state elements and a token
    sizes       that it is measured at
    make        what stands before the rows in its arguments, for so many tokens
    constants   which of them are the same for all tokens
    values      which of them has the shape of the result
    row_shape   of one state
    """

    name: str
    kernel: Callable[..., None]
    reference: Callable[..., None]
    operations: int
    sizes: tuple[Size, ...]
    make: Callable[[np.random.Generator, int, Size, Decays], Arrays]
    constants: frozenset[int]
    values: int
    row_shape: Callable[[Size], tuple[int, ...]]

    def arguments(self, seed: int, tokens: int, size: Size, decays: Decays = USUAL) -> Arrays:
        """Its inputs, in memory as the caches have it."""
        return tuple(aligned(array) for array in self.make(np.random.default_rng(seed), tokens, size, decays))

    def of_tokens(self, arguments: Arrays, tokens: Any) -> Arrays:
        """The inputs of some tokens: a slice, or their places."""
        return tuple(array if i in self.constants else np.ascontiguousarray(array[tokens]) for i, array in enumerate(arguments))

    def rows(self, seed: int, count: int, size: Size) -> np.ndarray:
        """`count` states."""
        shape = self.row_shape(size)
        result = allocate((count, *shape))
        random = np.random.default_rng(seed)
        for row in result:
            row[...] = random.standard_normal(shape, np.float32) * np.float32(0.1)
        return result

    def result(self, arguments: Arrays) -> np.ndarray:
        """Room for the outputs; NaN, so that what is not written shows."""
        return allocate(arguments[self.values].shape, poison=True)


def _normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape, np.float32)


def _unit(random: np.random.Generator, *shape: int) -> np.ndarray:
    array = _normal(random, *shape)
    array /= np.linalg.norm(array, axis=-1, keepdims=True)
    return array


def _even(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.random(shape, np.float32)


def groups_of(heads: int) -> int:
    """How many groups share an input and an output vector of Mamba-2, as models have them."""
    return 8 if heads >= 64 else 1


def key_heads_of(heads: int) -> int:
    """How many key heads serve so many value heads of a gated delta net: half, as models have them."""
    return max(1, heads // 2)


def _mamba1(random: np.random.Generator, tokens: int, size: Size, decays: Decays) -> Arrays:
    channels = size.heads * size.head_dim
    dt = _even(random, tokens, channels) + np.float32(0.5)
    a = -decays.rates(random, size.d_state, channels)
    return _normal(random, tokens, channels), dt, a, _unit(random, tokens, size.d_state), _unit(random, tokens, size.d_state)


def _mamba2(random: np.random.Generator, tokens: int, size: Size, decays: Decays) -> Arrays:
    groups = groups_of(size.heads)
    dt = _even(random, tokens, size.heads) + np.float32(0.5)
    a = -decays.rates(random, size.heads)
    b, c = (_unit(random, tokens, groups, size.d_state) for _ in range(2))
    return _normal(random, tokens, size.heads, size.head_dim), dt, a, b, c


def _gated_delta_net(random: np.random.Generator, tokens: int, size: Size, decays: Decays) -> Arrays:
    query, key = (_unit(random, tokens, key_heads_of(size.heads), size.d_state) for _ in range(2))
    log_decay = -decays.rates(random, size.heads) * (_even(random, tokens, size.heads) + np.float32(0.5))
    return query, key, _normal(random, tokens, size.heads, size.head_dim), log_decay, _even(random, tokens, size.heads)


def _factors(random: np.random.Generator, tokens: int, size: Size, decays: Decays) -> np.ndarray:
    """Decays of every channel of a key, which move a little from token to token."""
    return np.exp(-decays.rates(random, size.heads, size.d_state) * (_even(random, tokens, size.heads, size.d_state) + np.float32(0.5)))


def _kimi_delta_attention(random: np.random.Generator, tokens: int, size: Size, decays: Decays) -> Arrays:
    query, key = (_unit(random, tokens, size.heads, size.d_state) for _ in range(2))
    value, beta = _normal(random, tokens, size.heads, size.head_dim), _even(random, tokens, size.heads)
    return query, key, value, _factors(random, tokens, size, decays), beta


def _lightning_attention(random: np.random.Generator, tokens: int, size: Size, decays: Decays) -> Arrays:
    query, key = (_unit(random, tokens, size.heads, size.d_state) for _ in range(2))
    return query, key, _normal(random, tokens, size.heads, size.head_dim), np.expm1(-decays.rates(random, size.heads))


def _rwkv6_wkv(random: np.random.Generator, tokens: int, size: Size, decays: Decays) -> Arrays:
    receptance, key = (_unit(random, tokens, size.heads, size.d_state) for _ in range(2))
    value = _normal(random, tokens, size.heads, size.head_dim)
    return receptance, key, value, _factors(random, tokens, size, decays), _normal(random, size.heads, size.d_state)


def _rwkv7_wkv(random: np.random.Generator, tokens: int, size: Size, decays: Decays) -> Arrays:
    receptance, key, removal = (_unit(random, tokens, size.heads, size.d_state) for _ in range(3))
    value, rate = _normal(random, tokens, size.heads, size.head_dim), _even(random, tokens, size.heads, size.d_state)
    return receptance, key, value, _factors(random, tokens, size, decays), removal, rate


def _of_heads(size: Size) -> tuple[int, ...]:
    return (size.heads, size.d_state, size.head_dim)


def _of_channels(size: Size) -> tuple[int, ...]:
    return (size.d_state, size.heads * size.head_dim)


BOTH = (Size(64, 64, 128), Size(16, 64, 128))
SQUARE = Size(32, 128, 128)
MAMBA1_SIZES = (Size(64, 64, 16), Size(16, 64, 16))
RWKV_SIZES = (*BOTH, Size(64, 64, 64))

CASES: tuple[Case, ...] = (
    Case("mamba2_scan", mamba2_scan, mamba2_scan_reference, 3, BOTH, _mamba2, frozenset({2}), 0, _of_heads),
    Case("gated_delta_net", gated_delta_net, gated_delta_net_reference, 4, (*BOTH, SQUARE), _gated_delta_net, frozenset(), 2, _of_heads),
    Case(
        "kimi_delta_attention",
        kimi_delta_attention,
        kimi_delta_attention_reference,
        4,
        (*BOTH, SQUARE),
        _kimi_delta_attention,
        frozenset(),
        2,
        _of_heads,
    ),
    Case(
        "lightning_attention",
        lightning_attention,
        lightning_attention_reference,
        3,
        (*BOTH, SQUARE),
        _lightning_attention,
        frozenset({3}),
        2,
        _of_heads,
    ),
    Case("mamba1_scan", mamba1_scan, mamba1_scan_reference, 22, MAMBA1_SIZES, _mamba1, frozenset({2}), 0, _of_channels),
    Case("rwkv6_wkv", rwkv6_wkv, rwkv6_wkv_reference, 3, RWKV_SIZES, _rwkv6_wkv, frozenset({4}), 2, _of_heads),
    Case("rwkv7_wkv", rwkv7_wkv, rwkv7_wkv_reference, 5, RWKV_SIZES, _rwkv7_wkv, frozenset(), 2, _of_heads),
)

OPERATIONS_IN_WORDS = {
    "mamba2_scan": "3: the state times its decay; plus b (dt x), fused; times c into y, fused",
    "gated_delta_net": "4: times the key into what is held, fused; times its decay; plus key times what is added, fused; times the query into y, fused",
    "kimi_delta_attention": "4: as the gated delta net; the decay of a key's channel is folded into the key where what is held is summed",
    "lightning_attention": "3: plus the state times its loss, fused; plus key value, fused; times the query into y, fused",
    "mamba1_scan": "22: 3 as Mamba-2; dt times a; 18 for e to the power of it (to within the range 2, to a whole power 2, its rest 2, the polynomial 5, and its end 3, to an integer and into the exponent 3, scaling 1)",
    "rwkv6_wkv": "3: times the receptance into y, fused; times its decay; plus key value, fused (what the first token adds to y is one number times the value)",
    "rwkv7_wkv": "5: times the removal into what is held, fused; times its decay; minus what is removed, fused; plus key value, fused; times the receptance into y, fused",
    "causal_convolution": "4: one for each tap, fused, for 16 outputs",
}
"""How `operations` is counted, for the notes of the table."""

TAPS = 4


class ConvolutionCase(NamedTuple):
    """The causal convolution before a Mamba-2 scan of this size: x, b and c side by side."""

    size: Size

    @property
    def channels(self) -> int:
        return self.size.heads * self.size.head_dim + 2 * groups_of(self.size.heads) * self.size.d_state

    def arguments(self, seed: int, tokens: int) -> Arrays:
        """x, taps and bias (zero: the peers have none)."""
        random = np.random.default_rng(seed)
        taps = _normal(random, TAPS, self.channels)
        return aligned(_normal(random, tokens, self.channels)), aligned(taps), allocate((self.channels,))

    def rows(self, seed: int) -> np.ndarray:
        """One window."""
        return aligned(_normal(np.random.default_rng(seed), 1, TAPS - 1, self.channels))


CONVOLUTION = causal_convolution
CONVOLUTION_REFERENCE = causal_convolution_reference
CONVOLUTION_NAME = "causal_convolution"
