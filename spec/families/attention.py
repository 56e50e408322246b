"""Facts of grouped-query attention: what families with such layers share.

Rules
- A layer's weights are q_projection, k_projection, v_projection, norms of a head's queries and keys (q_norm, k_norm) where a family has them, and
  a projection out, whose name is the family's.
- Heads have `head_dim` channels where a family has that dimension; else all heads together are as wide as the stream.
- Of a head the first `n_rot` channels are rotated where a family has that dimension, else all; none without a `rope_theta`.
Source: Ainslie et al. 2023 (grouped queries, arXiv:2305.13245).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from .family import Dimensions, TensorFact, head_size


class Attention(NamedTuple):
    """What a family's attention layers are, beside its dimensions.

    rope_theta     base of the rotation of queries and keys; 0: they are not rotated
    norm_epsilon   of the norms of queries and keys
    window         newest tokens that a layer sees, a token's own included; 0: all
    """

    rope_theta: float = 0.0
    norm_epsilon: float = 1e-5
    window: Callable[[Dimensions], int] = lambda dimensions: 0


def head_channels(dimensions: Dimensions) -> int:
    """Channels of one head."""
    return dimensions.get("head_dim") or head_size(dimensions)


def attention_state(dimensions: Dimensions) -> dict[str, int]:
    """The dimensions that an attention layer's cells depend on."""
    return {"n_head_kv": dimensions["n_head_kv"], "head_dim": head_channels(dimensions)}


def attention_tensors(
    dimensions: Dimensions, prefix: str, mildness: float, value_gain: float, out_gain: float, out: str = "out_projection"
) -> list[TensorFact]:
    """The weights of one layer but its norms.

    mildness    root mean square of the queries and keys of inputs of 1
    value_gain, out_gain  the same of values, and of what the projection out makes
    out         what that projection is called
    """
    n_embd = dimensions["n_embd"]
    n_embd_q, n_embd_kv = (dimensions[heads] * head_channels(dimensions) for heads in ("n_head", "n_head_kv"))
    scale = 1 / math.sqrt(n_embd)
    return [
        TensorFact(prefix + "q_projection", (n_embd_q, n_embd), "normal", mildness * scale),
        TensorFact(prefix + "k_projection", (n_embd_kv, n_embd), "normal", mildness * scale),
        TensorFact(prefix + "v_projection", (n_embd_kv, n_embd), "normal", value_gain * scale),
        TensorFact(prefix + out, (n_embd, n_embd_q), "normal", out_gain * (1 / math.sqrt(n_embd_q))),
    ]
