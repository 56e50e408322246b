"""Mamba-2 in float64, as a masked quadratic form.

Rules
- No scan: the output of a layer is Y = (L o C B^T)(dt x) + D x with L the exponential of summed decays, over whole paths, so that it
  shares no algorithm with the recurrences it judges.
- The gated norm is grouped, as in the original code: one root mean square per group of d_inner / n_group channels, after the gate.
Sources: Dao and Gu 2024 (arXiv:2405.21060), structured masked attention; Transformers' Mamba2ForCausalLM for names and the order of parts.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.mamba2 import NORM_EPSILON, convolution_channels
from ..spec.target import StateRow
from .blocks import causal_convolution, convolution_row, gather, root_mean_square_norm, scatter
from .forest import Forest

Tensors = Mapping[str, torch.Tensor]

EXPONENT_MAX = 300.0
"""Bound on exponents of decay factors: the product of two factors stays far inside float64."""


def window(dimensions: Dimensions) -> int:
    """Tokens that a convolution looks at, the current one included."""
    return dimensions["d_conv"]


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token."""
    return dimensions["d_inner"] + convolution_channels(dimensions) + dimensions["n_head"]


def heads(dimensions: Dimensions) -> int:
    """Heads of the widest query-by-key form."""
    return dimensions["n_head"]


def prepared(dimensions: Dimensions, weights: Tensors) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them: matrices [in, out], convolution taps [taps, channels] newest first, decays -exp(a_log), d for every channel."""
    result = {}
    for name, weight in weights.items():
        kind = name.rsplit(".", 1)[-1]
        if kind in ("in_projection", "out_projection", "output"):
            result[name] = weight.T.contiguous()
        elif kind == "convolution":
            result[name] = weight.flip(1).T.contiguous()
        elif kind == "a_log":
            result[name] = -weight.exp()
        elif kind == "d":
            result[name] = weight.repeat_interleave(dimensions["d_inner"] // dimensions["n_head"])
        else:
            result[name] = weight
    return result


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: list[StateRow] | None = None) -> torch.Tensor:
    """The hidden state of every node before the final norm; float64 [nodes, n_embd].

    trace  receives the state rows after the last node, layer by layer: conv [channels, d_conv - 1] oldest first, then
           recurrent [heads, head_dim, d_state]; the forest must then be one log
    """
    hidden = weights["token_embedding"].index_select(0, forest.tokens)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        normed = root_mean_square_norm(hidden, weights[prefix + "norm"], NORM_EPSILON)
        hidden = hidden + mixer(dimensions, weights, prefix, normed, forest, layer, trace)
    return hidden


def mixer(
    dimensions: Dimensions, weights: Tensors, prefix: str, x: torch.Tensor, forest: Forest, layer: int, trace: list[StateRow] | None
) -> torch.Tensor:
    """One Mamba-2 layer without its norm and its residual; float64 [nodes, n_embd] in and out.

    dimensions, weights  in mamba2's names, prepared; the layer's weights begin with `prefix`
    trace                as in `hidden_states`
    """
    d_inner, n_head, n_group, d_state = (dimensions[name] for name in ("d_inner", "n_head", "n_group", "d_state"))
    projected = x @ weights[prefix + "in_projection"]
    gate, inputs, step = torch.split_with_sizes(projected, (d_inner, convolution_channels(dimensions), n_head), dim=-1)
    convolved = causal_convolution(inputs, weights[prefix + "convolution"], forest).add_(weights[prefix + "convolution_bias"])
    value, b, c = torch.split_with_sizes(functional.silu(convolved), (d_inner, n_group * d_state, n_group * d_state), dim=-1)
    # From threshold on torch takes softplus(x) = x; 50 makes that exact in float64.
    step = functional.softplus(step + weights[prefix + "dt_bias"], threshold=50)
    decay = step * weights[prefix + "a_log"]
    b, c = b.reshape(-1, n_group, d_state), c.reshape(-1, n_group, d_state)
    if trace is not None:
        trace.append(StateRow(layer, "conv", convolution_row(inputs, forest, dimensions["d_conv"] - 1).float().numpy()))
        trace.append(StateRow(layer, "recurrent", _last_state(value, step, decay, b).float().numpy()))
    y = masked_quadratic_form(value, step, decay, b, c, forest).addcmul_(value, weights[prefix + "d"])
    y = y.mul_(functional.silu(gate)).view(-1, n_group, d_inner // n_group)
    y = root_mean_square_norm(y, weights[prefix + "gated_norm"].view(n_group, -1), NORM_EPSILON)
    return y.view(-1, d_inner) @ weights[prefix + "out_projection"]


def masked_quadratic_form(
    value: torch.Tensor, step: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, forest: Forest
) -> torch.Tensor:
    """y[t] = sum over s on the path to t of exp(decay[s+1] + ... + decay[t]) (c[t] . b[s]) step[s] value[s]; float64 [nodes, d_inner].

    value   float64 [nodes, d_inner], heads side by side
    step    float64 [nodes, heads], dt after softplus
    decay   float64 [nodes, heads], dt * A, not above 0
    b, c    float64 [nodes, groups, d_state]; a group serves heads / groups neighbouring heads

    The mask L is exp(sum to t - sum to s) where s is t or before it, else 0. It is applied as a product of a factor of t and a factor of
    s, both relative to the sum at the piece's middle query, so that one masked C B^T serves all heads of a group. Raises ArithmeticError
    if a piece's decays are so large that a factor could overflow.
    Source: Dao and Gu 2024, structured masked attention with L = exp(segsum(dt A)).
    """
    n_head, n_group = step.shape[1], b.shape[1]
    result = torch.empty_like(value)
    for batch in forest.batches:
        piece_count, query_count, key_count = batch.allowed.shape
        summed = gather(decay, batch.key).cumsum(1)  # along the path: [pieces, keys, heads]
        summed_query = summed.gather(1, (batch.allowed.sum(-1) - 1)[:, :, None].expand(-1, -1, n_head))
        middle = summed_query[:, query_count // 2, None]
        if not (summed_query - middle).abs().max() <= EXPONENT_MAX:
            raise ArithmeticError(f"decays sum to more than {EXPONENT_MAX} within {query_count} tokens")
        # Only keys beyond every query, which the mask drops, can reach the bound.
        factor = (middle - summed).clamp_(max=EXPONENT_MAX).exp_().mul_(gather(step, batch.key))
        values = gather(value, batch.key).view(piece_count, key_count, n_head, -1).mul_(factor[..., None])
        scores = gather(c, batch.query).transpose(1, 2) @ gather(b, batch.key).permute(0, 2, 3, 1)  # [pieces, groups, queries, keys]
        y = scores.mul_(batch.allowed[:, None]) @ values.view(piece_count, key_count, n_group, -1).transpose(1, 2)
        y = y.transpose(1, 2).reshape(piece_count, query_count, n_head, -1).mul_((summed_query - middle).exp_()[..., None])
        scatter(result, batch, y.reshape(piece_count, query_count, -1))
    return result


def _last_state(value: torch.Tensor, step: torch.Tensor, decay: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The recurrent state after the last node of a single log, as one weighted sum; float64 [heads, head_dim, d_state]."""
    n_head = step.shape[1]
    summed = decay.cumsum(0)
    weight = (summed[-1] - summed).exp() * step
    b = b.repeat_interleave(n_head // b.shape[1], dim=1)
    return torch.einsum("th,thp,thn->hpn", weight, value.reshape(len(value), n_head, -1), b)
