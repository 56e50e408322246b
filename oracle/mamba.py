"""Mamba-1 in float64, as a masked form.

Rules
- No scan: what a token reads of the state is one masked sum over its path, each term weighed by the exponential of the steps between, for
  every channel and each of its d_state numbers, so that it shares no algorithm with the recurrences it judges.
- Steps, B and C go through norms of their own where the weights have them (Jamba).
Sources: Gu and Dao 2023 (arXiv:2312.00752), eq. 2 and 4 unrolled; Transformers' MambaForCausalLM for names and the order of parts.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.mamba import NORM_EPSILON, inner_channels
from .blocks import causal_convolution, gather, laid_out, root_mean_square_norm, scatter
from .forest import Forest
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]

MATRICES = ("in_projection", "x_projection", "dt_projection", "out_projection", "output")
EXPONENT_MAX = 300.0
"""Bound on exponents of decay factors: the product of two factors stays far inside float64."""


def window(dimensions: Dimensions) -> int:
    """Tokens that a convolution looks at, the current one included."""
    return dimensions["d_conv"]


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token: what it adds to a state."""
    return inner_channels(dimensions) * dimensions["d_state"]


def heads(dimensions: Dimensions) -> int:
    """Heads of the widest query-by-key form."""
    return 1


def prepared(dimensions: Dimensions, weights: Tensors) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them (`laid_out`)."""
    return laid_out(weights, MATRICES)


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None = None) -> torch.Tensor:
    """The hidden state of every node before the final norm; float64 [nodes, n_embd].

    trace  takes down the states of its logs: conv [d_inner, d_conv - 1] and recurrent [1, d_inner, d_state]
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
    """One Mamba-1 layer without its norm and its residual; float64 [nodes, n_embd] in and out.

    dimensions, weights  in mamba's names, prepared; the layer's weights begin with `prefix`
    trace                as in `hidden_states`
    """
    d_state, rank = dimensions["d_state"], dimensions["dt_rank"]
    inputs, gate = (x @ weights[prefix + "in_projection"]).chunk(2, dim=-1)
    value = functional.silu(causal_convolution(inputs, weights[prefix + "convolution"], forest).add_(weights[prefix + "convolution_bias"]))
    narrow, b, c = torch.split_with_sizes(value @ weights[prefix + "x_projection"], (rank, d_state, d_state), dim=-1)
    if prefix + "dt_norm" in weights:
        narrow, b, c = (
            root_mean_square_norm(part, weights[prefix + name], NORM_EPSILON)
            for part, name in ((narrow, "dt_norm"), (b, "b_norm"), (c, "c_norm"))
        )
    # From threshold on torch takes softplus(x) = x; 50 makes that exact in float64.
    step = functional.softplus(narrow @ weights[prefix + "dt_projection"] + weights[prefix + "dt_bias"], threshold=50)
    rates = weights[prefix + "a_log"]
    if trace is not None:
        trace.convolution(layer, inputs, dimensions["d_conv"] - 1)
        trace.recurrent(layer, _states_after(value * step, step, rates, b, trace)[:, None])
    y = masked_form(value * step, step, rates, b, c, forest).addcmul_(value, weights[prefix + "d"])
    return y.mul_(functional.silu(gate)) @ weights[prefix + "out_projection"]


def masked_form(
    added: torch.Tensor, step: torch.Tensor, rates: torch.Tensor, b: torch.Tensor, c: torch.Tensor, forest: Forest
) -> torch.Tensor:
    """y[t, i] = sum over s on the path to t and over n of exp(rates[i, n] (step[s+1, i] + ... + step[t, i])) c[t, n] b[s, n] added[s, i].

    added  float64 [nodes, d_inner], step times value
    step   float64 [nodes, d_inner], after softplus
    rates  float64 [d_inner, d_state], negative
    b, c   float64 [nodes, d_state]
    Returns float64 [nodes, d_inner].

    The exponential is a product of a factor of t and a factor of s, both relative to the steps' sum at the piece's middle query, so that the
    sum over s is a product with the mask. Raises ArithmeticError if a piece's decays are so large that a factor could overflow.
    """
    d_inner, d_state = rates.shape
    steepest = -float(rates.min())
    result = torch.empty_like(added)
    for batch in forest.batches:
        piece_count, query_count, key_count = batch.allowed.shape
        summed = gather(step, batch.key).cumsum(1)  # along the path: [pieces, keys, d_inner]
        summed_query = summed.gather(1, (batch.allowed.sum(-1) - 1)[:, :, None].expand(-1, -1, d_inner))
        middle = summed_query[:, query_count // 2, None]
        if not (summed_query - middle).abs().max() * steepest <= EXPONENT_MAX:
            raise ArithmeticError(f"decays sum to more than {EXPONENT_MAX} within {query_count} tokens")
        # Only keys beyond every query, which the mask drops, can reach the bound.
        to_middle = (middle - summed).clamp_(min=-EXPONENT_MAX / steepest)
        terms = (to_middle[..., None] * rates).exp_()
        terms.mul_(gather(added, batch.key)[..., None]).mul_(gather(b, batch.key)[:, :, None])
        held = (batch.allowed.to(terms.dtype) @ terms.view(piece_count, key_count, -1)).view(piece_count, query_count, d_inner, d_state)
        held.mul_(((summed_query - middle)[..., None] * rates).exp_())
        scatter(result, batch, (held @ gather(c, batch.query)[..., None]).squeeze(-1))
    return result


def _states_after(added: torch.Tensor, step: torch.Tensor, rates: torch.Tensor, b: torch.Tensor, trace: Trace) -> torch.Tensor:
    """The recurrent states after the logs of a trace, each as one weighted sum over its path; float64 [logs, d_inner, d_state].

    added, step, rates, b  as in `masked_form`
    """
    result = added.new_empty(len(trace.nodes), *rates.shape)
    for logs, path, theirs in trace.paths(rates.numel()):
        summed = gather(step, path).masked_fill_(~theirs[:, :, None], 0.0).cumsum(1)  # beyond its end a sum stays what it was
        weight = ((summed[:, -1:] - summed)[..., None] * rates).exp_().mul_(gather(b, path)[:, :, None])
        result.index_copy_(0, logs, weight.mul_((gather(added, path) * theirs[:, :, None])[..., None]).sum(1))
    return result
