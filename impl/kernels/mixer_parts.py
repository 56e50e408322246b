"""What mixers do between their products with matrices, convolutions and scans: to single numbers, channels and heads.

Rules
- Tokens are rows; a token's result depends on its own row alone, in a fixed order of summation.
Sources: the mixers' own, named in `impl/*_mixer.py` and `impl/latent_attention.py`.
"""

import numpy as np

from . import kernel
from .arithmetic import exponential, sigmoid, silu, softplus


@kernel
def softplus_rows(step: np.ndarray, bias: np.ndarray) -> None:
    """step = softplus(step + bias) in place; float32 [tokens, channels], bias [channels]."""
    for token in range(step.shape[0]):
        row = step[token]
        for i in range(row.size):
            row[i] = softplus(row[i] + bias[i])


@kernel
def skip_channels(value: np.ndarray, d: np.ndarray, y: np.ndarray) -> None:
    """y += d * value, a factor for every channel; float32 [tokens, d_inner], d [d_inner]."""
    for token in range(y.shape[0]):
        source, result = value[token], y[token]
        for i in range(result.size):
            result[i] = result[i] + d[i] * source[i]


@kernel
def split_mamba2(convolved: np.ndarray, value: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Split the convolution's output into value, B and C, with SiLU; float32 [tokens, channels] each, the last three written."""
    d_inner, width = value.shape[1], b.shape[1]
    for token in range(convolved.shape[0]):
        source = convolved[token]
        own_value, own_b, own_c = value[token], b[token], c[token]
        x_part, b_part, c_part = source[:d_inner], source[d_inner : d_inner + width], source[d_inner + width :]
        for i in range(d_inner):
            own_value[i] = silu(x_part[i])
        for i in range(width):
            own_b[i] = silu(b_part[i])
            own_c[i] = silu(c_part[i])


@kernel
def skip_heads(value: np.ndarray, d: np.ndarray, y: np.ndarray) -> None:
    """y += d * value, a factor for every head; float32 [tokens, heads, head_dim]."""
    for token in range(y.shape[0]):
        for head in range(y.shape[1]):
            source, result = value[token, head], y[token, head]
            for p in range(result.size):
                result[p] = result[p] + d[head] * source[p]


@kernel
def split_delta_net(
    convolved: np.ndarray, groups: int, key_heads: np.ndarray, query: np.ndarray, key: np.ndarray, value: np.ndarray
) -> None:
    """Split the convolution's output into q, k and v, with SiLU, and lay the heads of q and k out in the order of `key_heads`.

    convolved   float32 [tokens, (2 * groups + value heads) * d_state]
    query, key  float32 [tokens, len(key_heads) * d_state], written
    value       float32 [tokens, value heads * d_state], written
    """
    d_inner, d_state = value.shape[1], query.shape[1] // key_heads.size
    width = groups * d_state
    for token in range(convolved.shape[0]):
        source = convolved[token]
        q_part, k_part, v_part = source[:width], source[width : 2 * width], source[2 * width :]
        for head in range(key_heads.size):
            here, there = head * d_state, key_heads[head] * d_state
            own_query, own_key = query[token, here : here + d_state], key[token, here : here + d_state]
            q_head, k_head = q_part[there : there + d_state], k_part[there : there + d_state]
            for i in range(d_state):
                own_query[i] = silu(q_head[i])
                own_key[i] = silu(k_head[i])
        own_value = value[token]
        for i in range(d_inner):
            own_value[i] = silu(v_part[i])


@kernel
def delta_net_rates(step: np.ndarray, step_bias: np.ndarray, a: np.ndarray, beta: np.ndarray) -> None:
    """step = a * softplus(step + step_bias), the logarithm of the decay; beta = sigmoid(beta). In place, float32 [tokens, value heads]."""
    for token in range(step.shape[0]):
        for head in range(step.shape[1]):
            step[token, head] = a[head] * softplus(step[token, head] + step_bias[head])
            beta[token, head] = sigmoid(beta[token, head])


@kernel
def split_kimi_delta(convolved: np.ndarray, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    """Split the convolution's output into q, k and v, with SiLU; float32 [tokens, channels] each, the last three written."""
    width = query.shape[1]
    for token in range(convolved.shape[0]):
        source = convolved[token]
        own_query, own_key, own_value = query[token], key[token], value[token]
        q_part, k_part, v_part = source[:width], source[width : 2 * width], source[2 * width :]
        for i in range(width):
            own_query[i] = silu(q_part[i])
            own_key[i] = silu(k_part[i])
            own_value[i] = silu(v_part[i])


@kernel
def kimi_delta_rates(decay: np.ndarray, step_bias: np.ndarray, a: np.ndarray, beta: np.ndarray) -> None:
    """decay = exp(a * softplus(decay + step_bias)), a factor; beta = sigmoid(beta). In place.

    decay      float32 [tokens, heads * head_dim]
    step_bias  float32 [heads * head_dim]
    a          float32 [heads]
    beta       float32 [tokens, heads]
    """
    head_dim = step_bias.size // a.size
    for token in range(decay.shape[0]):
        own = decay[token]
        for i in range(own.size):
            own[i] = exponential(a[i // head_dim] * softplus(own[i] + step_bias[i]))
        for head in range(a.size):
            beta[token, head] = sigmoid(beta[token, head])


@kernel
def multiply_heads(x: np.ndarray, matrices: np.ndarray, y: np.ndarray) -> None:
    """y = x @ the head's matrix: every output sums its inputs from the first to the last.

    x         float32 [tokens, heads, in or more], its first channels are read
    matrices  float32 [heads, in, out]
    y         float32 [tokens, heads, out or more], its first channels are written
    """
    n_in, n_out = matrices.shape[1], matrices.shape[2]
    for token in range(x.shape[0]):
        for head in range(x.shape[1]):
            source, result = x[token, head], y[token, head]
            for o in range(n_out):
                result[o] = np.float32(0)
            for i in range(n_in):
                xi, row = source[i], matrices[head, i]
                for o in range(n_out):
                    result[o] = result[o] + xi * row[o]


@kernel
def copy_last_channels(x: np.ndarray, count: int, y: np.ndarray) -> None:
    """The last `count` channels of y = those of x; float32 [tokens, heads, channels], as many or not."""
    for token in range(x.shape[0]):
        for head in range(x.shape[1]):
            source, result = x[token, head], y[token, head]
            for i in range(count):
                result[result.size - count + i] = source[source.size - count + i]


@kernel
def join_rows(first: np.ndarray, second: np.ndarray, y: np.ndarray) -> None:
    """y = first and second side by side; float32 [tokens, channels]."""
    for token in range(y.shape[0]):
        own_first, own_second, result = first[token], second[token], y[token]
        for i in range(own_first.size):
            result[i] = own_first[i]
        for i in range(own_second.size):
            result[own_first.size + i] = own_second[i]


@kernel
def scale_rows_by_sigmoid(share: np.ndarray, x: np.ndarray) -> None:
    """x *= sigmoid(share), a factor for every row, in place; float32 [tokens, channels], share [tokens, 1]."""
    for token in range(x.shape[0]):
        factor, source = sigmoid(share[token, 0]), x[token]
        for i in range(source.size):
            source[i] = source[i] * factor
