"""Mamba-2 in float64, as a masked quadratic form.

Rules
- No scan: the output of a layer is Y = (L o C B^T)(dt x) + D x with L the exponential of summed decays, over whole paths, so that it
  shares no algorithm with the recurrences it judges.
- The gated norm is grouped, as in the original code: one root mean square per group of d_inner / n_group channels, after the gate. A
  family's layers may have none.
Sources: Dao and Gu 2024 (arXiv:2405.21060), structured masked attention; Transformers' Mamba2ForCausalLM for names and the order of parts.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.mamba2 import NORM_EPSILON, convolution_channels
from .blocks import causal_convolution, gather, laid_out, root_mean_square_norm, scatter
from .forest import Forest
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = ("in_projection", "out_projection", "output")

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


def prepared(dimensions: Dimensions, weights: Tensors, others: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them (`laid_out`), d for every channel; `others` are a hybrid's own matrices."""
    channels = dimensions["d_inner"] // dimensions["n_head"]
    skips = {name: weight.repeat_interleave(channels) for name, weight in weights.items() if name.rsplit(".", 1)[-1] == "d"}
    return laid_out(weights, (*MATRICES, *others)) | skips


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None = None) -> torch.Tensor:
    """The hidden state of every node before the final norm; float64 [nodes, n_embd].

    trace  takes down the states of its logs: conv [channels, d_conv - 1] and recurrent [heads, head_dim, d_state]
    """
    hidden = weights["token_embedding"].index_select(0, forest.tokens)
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        normed = root_mean_square_norm(hidden, weights[prefix + "norm"], NORM_EPSILON)
        hidden = hidden + mixer(dimensions, weights, prefix, normed, forest, layer, trace)
    return hidden


def final_norm(weights: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    """The norm before the output projection; float64 [nodes, n_embd]."""
    return root_mean_square_norm(hidden, weights["output_norm"], NORM_EPSILON)


def mixer(
    dimensions: Dimensions, weights: Tensors, prefix: str, x: torch.Tensor, forest: Forest, layer: int, trace: Trace | None
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
        trace.convolution(layer, inputs, dimensions["d_conv"] - 1)
        trace.recurrent(layer, states_after(value, step, decay, b, trace))
    y = masked_quadratic_form(value, step, decay, b, c, forest).addcmul_(value, weights[prefix + "d"])
    y = y.mul_(functional.silu(gate))
    if prefix + "gated_norm" in weights:
        grouped = y.view(-1, n_group, d_inner // n_group)
        y = root_mean_square_norm(grouped, weights[prefix + "gated_norm"].view(n_group, -1), NORM_EPSILON).view(-1, d_inner)
    return y @ weights[prefix + "out_projection"]


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


def states_after(value: torch.Tensor, step: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, trace: Trace) -> torch.Tensor:
    """The recurrent states after the logs of a trace, each as one weighted sum over its path; float64 [logs, heads, head_dim, d_state].

    value, step, decay, b  as in `masked_quadratic_form`
    """
    n_head, n_group, d_state = step.shape[1], b.shape[1], b.shape[2]
    result = value.new_empty(len(trace.nodes), n_head, value.shape[1] // n_head, d_state)
    for logs, path, theirs in trace.paths(value.shape[1]):
        log_count, longest = path.shape
        summed = gather(decay, path).masked_fill_(~theirs[:, :, None], 0.0).cumsum(1)  # beyond its end a sum stays what it was
        weight = (summed[:, -1:] - summed).exp_().mul_(gather(step, path)).mul_(theirs[:, :, None])
        values = gather(value, path).view(log_count, longest, n_head, -1).mul_(weight[..., None])
        # Heads of one group stand next to each other: [logs, groups, heads * head_dim, longest] @ [logs, groups, longest, d_state].
        grouped = values.view(log_count, longest, n_group, -1).permute(0, 2, 3, 1)
        states = grouped @ gather(b, path).transpose(1, 2)
        result.index_copy_(0, logs, states.reshape(log_count, n_head, -1, d_state))
    return result
