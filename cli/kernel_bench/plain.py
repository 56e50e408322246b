"""The same recurrences as one writes them down, for NumPy and for PyTorch: what a user has without any kernel.

Rules
- A step takes all sequences one token further: state [sequences, heads, d_state, head_dim] (Mamba-1: [sequences, d_state, d_inner]) and the
  arguments of the kernel for one token of each sequence. It returns the new state and the outputs.
- `array` is the module `numpy` or `torch`; nothing here is tuned to either.
- Many tokens: one step after the other; where the decay is one number a head (Mamba-2, lightning), in chunks of matrix products instead.
Source of the chunked form: Dao and Gu 2024 (arXiv:2405.21060), section 6, as listing 1 there.
"""

from collections.abc import Callable
from typing import Any

Step = Callable[..., tuple[Any, Any]]

CHUNK = 64
"""Tokens in a chunk; 32 and 128 were no quicker."""


def mamba1_step(array: Any, state: Any, x: Any, dt: Any, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    state = state * array.exp(dt[:, None, :] * a) + b[:, :, None] * (dt * x)[:, None, :]
    return state, (c[:, None, :] @ state)[:, 0]


def mamba2_step(array: Any, state: Any, x: Any, dt: Any, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    sequences, heads, d_state, head_dim = state.shape
    groups = b.shape[1]
    scaled = (dt[:, :, None] * x).reshape(sequences, groups, heads // groups, 1, head_dim)
    added = (b[:, :, None, :, None] * scaled).reshape(state.shape)
    state = state * array.exp(dt * a)[:, :, None, None] + added
    y = c[:, :, None, None, :] @ state.reshape(sequences, groups, heads // groups, d_state, head_dim)
    return state, y.reshape(x.shape)


def gated_delta_net_step(array: Any, state: Any, query: Any, key: Any, value: Any, log_decay: Any, beta: Any) -> tuple[Any, Any]:
    sequences, heads, d_state, head_dim = state.shape
    key_heads = key.shape[1]
    by_key = (sequences, heads // key_heads, key_heads)
    state = (state * array.exp(log_decay)[:, :, None, None]).reshape(*by_key, d_state, head_dim)
    held = (key[:, None, :, None, :] @ state)[..., 0, :]
    added = beta.reshape(*by_key, 1) * (value.reshape(*by_key, head_dim) - held)
    state = state + key[:, None, :, :, None] * added[..., None, :]
    y = (query[:, None, :, None, :] @ state)[..., 0, :]
    return state.reshape(sequences, heads, d_state, head_dim), y.reshape(value.shape)


def kimi_delta_attention_step(array: Any, state: Any, query: Any, key: Any, value: Any, decay: Any, beta: Any) -> tuple[Any, Any]:
    state = state * decay[..., None]
    added = beta[..., None] * (value - (key[..., None, :] @ state)[..., 0, :])
    state = state + key[..., None] * added[..., None, :]
    return state, (query[..., None, :] @ state)[..., 0, :]


def lightning_attention_step(array: Any, state: Any, query: Any, key: Any, value: Any, loss: Any) -> tuple[Any, Any]:
    state = state + state * loss[:, None, None] + key[..., None] * value[..., None, :]
    return state, (query[..., None, :] @ state)[..., 0, :]


def rwkv6_step(array: Any, state: Any, receptance: Any, key: Any, value: Any, decay: Any, first: Any) -> tuple[Any, Any]:
    added = key[..., None] * value[..., None, :]
    y = (receptance[..., None, :] @ (state + first[..., None] * added))[..., 0, :]
    return state * decay[..., None] + added, y


def rwkv7_step(array: Any, state: Any, receptance: Any, key: Any, value: Any, decay: Any, removal: Any, rate: Any) -> tuple[Any, Any]:
    held = removal[..., None, :] @ state
    state = state * decay[..., None] - (rate * removal)[..., None] * held + key[..., None] * value[..., None, :]
    return state, (receptance[..., None, :] @ state)[..., 0, :]


STEPS: dict[str, Step] = {
    "mamba1_scan": mamba1_step,
    "mamba2_scan": mamba2_step,
    "gated_delta_net": gated_delta_net_step,
    "kimi_delta_attention": kimi_delta_attention_step,
    "lightning_attention": lightning_attention_step,
    "rwkv6_wkv": rwkv6_step,
    "rwkv7_wkv": rwkv7_step,
}
"""By the kernel's name."""


def mamba2_chunk(array: Any, state: Any, x: Any, dt: Any, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    """Some tokens of one sequence at once: state [1, heads, d_state, head_dim], the rest as the kernel's arguments."""
    return _chunk(array, state, dt[:, :, None] * x, dt * a, b, c)


def lightning_chunk(array: Any, state: Any, query: Any, key: Any, value: Any, loss: Any) -> tuple[Any, Any]:
    """As `mamba2_chunk`."""
    return _chunk(array, state, value, array.log(1 + loss) + 0 * value[:, :, 0], key, query)


def _chunk(array: Any, state: Any, x: Any, log_decay: Any, b: Any, c: Any) -> tuple[Any, Any]:
    """x [tokens, heads, head_dim], log_decay [tokens, heads], b and c [tokens, groups, d_state]."""
    tokens, heads, head_dim = x.shape
    groups, d_state = b.shape[1:]
    in_group = heads // groups
    inputs = x.reshape(tokens, groups, in_group, head_dim).swapaxes(0, 2).swapaxes(0, 1)  # [groups, heads, tokens, head_dim]
    b, c = b.swapaxes(0, 1), c.swapaxes(0, 1)  # [groups, tokens, d_state]
    reach = array.cumsum(log_decay, 0).swapaxes(0, 1).reshape(groups, in_group, tokens)
    later = array.triu(array.ones((tokens, tokens), dtype=x.dtype), 1) * -1e30
    decays = array.exp(reach[..., :, None] - reach[..., None, :] + later)
    within = ((c @ b.swapaxes(1, 2))[:, None] * decays) @ inputs
    before = state.reshape(groups, in_group, d_state, head_dim)
    across = (c[:, None] @ before) * array.exp(reach)[..., None]
    left = array.exp(reach[..., -1:] - reach)[..., None] * inputs
    after = before * array.exp(reach[..., -1])[..., None, None] + b.swapaxes(1, 2)[:, None] @ left
    y = (within + across).swapaxes(0, 1).swapaxes(0, 2).reshape(tokens, heads, head_dim)
    return after.reshape(state.shape), y


CHUNKED: dict[str, Step] = {"mamba2_scan": mamba2_chunk, "lightning_attention": lightning_chunk}
"""By the kernel's name."""


def convolution(array: Any, window: Any, x: Any, taps: Any) -> tuple[Any, Any]:
    """The causal convolution of one sequence: window [taps - 1, channels], x [tokens, channels], taps [taps, channels]."""
    inputs = array.concatenate([window, x])
    y = inputs[: len(x)] * taps[0]
    for j in range(1, len(taps)):
        y = y + inputs[j : j + len(x)] * taps[j]
    return inputs[len(x) :], y
