"""Qwen4-Exp in float64: delta nets as in qwen35.py, attention as a masked softmax over the keys that token_selection.py says.

Rules
- The streams of the residual stand side by side, [nodes, hyper_connections * n_embd].
- The last mixer is what stands in place of a final norm: `hidden_states` ends after it, and `final_norm` has nothing left to do.
Source: Transformers' Qwen4ExpForCausalLM for names and the order of parts.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch.nn import functional

from ..spec.families import Dimensions
from ..spec.families.qwen4exp import (
    EMBEDDING_LAYER,
    EOS_TOKEN,
    attention_layers,
    convolution_channels,
    embedding_window,
    hash_multipliers,
    hash_offsets,
    hash_sizes,
    inner_channels,
    stream_channels,
)
from ..spec.families.qwen35 import NORM_EPSILON, ROPE_THETA
from .blocks import causal_convolution, expert_mixture, masked_attention, root_mean_square_norm, rotated, windows
from .delta_rule import Levels, gated_delta_rule, levels_of
from .forest import Forest
from .token_selection import selected_keys, smallest_so_far
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MATRICES = (
    "mix_down", "mix_up", "inject", "ngram_key", "ngram_value", "q_projection", "k_projection", "v_projection", "index_q_projection",
    "index_k_projection", "qkv_projection", "gate_projection", "beta_projection", "step_projection", "out_projection", "router",
    "shared_share", "shared_gate", "shared_up", "shared_down", "output",
)  # fmt: skip
MIXERS = ("input_", "ffn_", "output_")


def window(dimensions: Dimensions) -> int:
    """Tokens that a convolution looks at, the current one included."""
    return max(dimensions["d_conv"], embedding_window(dimensions) + 1)


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token; of a state a quarter counts, as in qwen35.py."""
    state = inner_channels(dimensions) * dimensions["d_state"]
    return max(
        state // 4,
        convolution_channels(dimensions),
        stream_channels(dimensions),
        2 * dimensions["n_head"] * dimensions["head_dim"],
        2 * dimensions["n_expert"] * dimensions["n_ff"],
    )


def heads(dimensions: Dimensions) -> int:
    """Heads of the widest query-by-key form."""
    return max(dimensions["n_head"], dimensions["n_index_head"])


def prepared(dimensions: Dimensions, weights: Tensors) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them: matrices [in, out], convolution taps [taps, channels] newest first, decay rates -exp(a_log)."""
    result = {}
    for name, weight in weights.items():
        kind = name.rsplit(".", 1)[-1]
        if kind in MATRICES or any(kind.removeprefix(mixer) in MATRICES[:3] for mixer in MIXERS):
            result[name] = weight.T.contiguous()
        elif kind in ("convolution", "ngram_convolution"):
            result[name] = weight.flip(1).T.contiguous()
        elif kind == "a_log":
            result[name] = -weight.exp()
        else:
            result[name] = weight
    return result


def hidden_states(dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None = None) -> torch.Tensor:
    """The hidden state of every node that the output projection is applied to; float64 [nodes, n_embd].

    trace  takes down the states of its logs: those of qwen35.py, embedding [channels, window] of the layer with n-grams, and index
           [index_dim] a token
    """
    return hidden_states_and_margins(dimensions, weights, forest, trace)[0]


def final_norm(weights: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    """Nothing: the last mixer has done it."""
    return hidden


def hidden_states_and_margins(
    dimensions: Dimensions, weights: Tensors, forest: Forest, trace: Trace | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`hidden_states`, and of every node the smallest margin that its row hangs on, and the one that its states hang on; float64 [nodes]."""
    levels = levels_of(forest)
    streams = weights["token_embedding"].index_select(0, forest.tokens).repeat(1, dimensions["hyper_connections"])
    attention = attention_layers(dimensions)
    row_margins = state_margins = streams.new_full((forest.node_count,), float("inf"))
    for layer in range(dimensions["n_layer"]):
        prefix = f"layers.{layer}."
        if layer == EMBEDDING_LAYER:
            streams = streams + _ngram_embeddings(dimensions, weights, prefix, streams, forest, layer, trace)
        mixed, shares = _mixed(dimensions, weights, prefix + "input_", streams)
        if layer in attention:
            y, margins = _attention(dimensions, weights, prefix, mixed, forest, layer, trace)
            row_margins = torch.minimum(row_margins, margins)
            if layer < dimensions["n_layer"] - 1:  # what comes after it keeps states
                row_margins = state_margins = smallest_so_far(row_margins, levels)
        else:
            y = _delta_net(dimensions, weights, prefix, mixed, forest, levels, layer, trace)
        streams = _injected(streams, y, shares)
        mixed, shares = _mixed(dimensions, weights, prefix + "ffn_", streams)
        streams = _injected(streams, _experts(weights, prefix, mixed), shares)
    return _mixed(dimensions, weights, "output_", streams)[0], row_margins, state_margins


def _mixed(dimensions: Dimensions, weights: Tensors, prefix: str, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a block is given, float64 [nodes, n_embd], and each stream's share of what it gives, [nodes, hyper_connections]."""
    normed = _stream_norm(dimensions, streams, weights[prefix + "mix_norm"])
    count = dimensions["hyper_connections"]
    low = functional.silu(normed @ weights[prefix + "mix_down"] / count)
    weighed = normed * (low @ weights[prefix + "mix_up"]).sigmoid()
    inject = weights.get(prefix + "inject")
    shares = normed[:, :count] if inject is None else 2 * (normed @ inject / count).sigmoid()
    return weighed.view(-1, count, dimensions["n_embd"]).mean(1), shares


def _stream_norm(dimensions: Dimensions, streams: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Every stream normed by itself; float64 [nodes, channels of all streams]."""
    apart = streams.view(-1, dimensions["hyper_connections"], dimensions["n_embd"])
    return root_mean_square_norm(apart, weight.view(apart.shape[1:]), NORM_EPSILON).flatten(1)


def _injected(streams: torch.Tensor, y: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    return streams + (y[:, None, :] * shares[:, :, None]).flatten(1)


def _ngram_embeddings(
    dimensions: Dimensions, weights: Tensors, prefix: str, streams: torch.Tensor, forest: Forest, layer: int, trace: Trace | None
) -> torch.Tensor:
    """What n-grams add to every stream; float64 [nodes, channels of all streams]."""
    count, n_embd = dimensions["hyper_connections"], dimensions["n_embd"]
    embedding = weights[prefix + "ngram_table"][_table_rows(dimensions, forest)].flatten(1)
    key = _stream_norm(dimensions, embedding @ weights[prefix + "ngram_key"], weights[prefix + "ngram_key_norm"])
    query = _stream_norm(dimensions, streams, weights[prefix + "ngram_query_norm"])
    alike = (key * query).view(-1, count, n_embd).sum(-1) / math.sqrt(n_embd)
    share = (alike.abs().clamp(min=1e-6).sqrt() * alike.sign()).sigmoid()
    added = ((embedding @ weights[prefix + "ngram_value"])[:, None, :] * share[:, :, None]).flatten(1)
    inputs = _stream_norm(dimensions, added, weights[prefix + "ngram_convolution_norm"])
    if trace is not None:
        trace.convolution(layer, inputs, embedding_window(dimensions), "embedding")
    past = windows(inputs, forest, 0, embedding_window(dimensions) + 1)[:: dimensions["ngram_size"]]
    taps = weights[prefix + "ngram_convolution"]
    return added + functional.silu(torch.stack([value * tap for value, tap in zip(past, taps, strict=True)]).sum(0))


def _table_rows(dimensions: Dimensions, forest: Forest) -> torch.Tensor:
    """The rows of the table for every node, int64 [nodes, hashes]: n-grams of 2 tokens, of 3, and so on, with all hashes of each."""
    tokens = np.append(forest.tokens.numpy(), EOS_TOKEN)
    newest = [tokens[:-1]]
    ended = np.zeros(forest.node_count, bool)
    for back in range(1, dimensions["ngram_size"]):
        token = tokens[forest.ancestors[back].numpy()]
        ended |= token == EOS_TOKEN
        newest.append(np.where(ended, EOS_TOKEN, token))
    sizes, offsets, multipliers = hash_sizes(dimensions), hash_offsets(dimensions), hash_multipliers(dimensions)
    rows = []
    joined = newest[0] * multipliers[0]
    for token, multiplier in zip(newest[1:], multipliers[1:], strict=True):
        joined = joined ^ (token * multiplier)
        for _ in range(dimensions["ngram_hashes"]):
            rows.append(joined % sizes[len(rows)] + offsets[len(rows)])
    return torch.from_numpy(np.stack(rows, axis=1))


def _delta_net(
    dimensions: Dimensions, weights: Tensors, prefix: str, x: torch.Tensor, forest: Forest, levels: Levels, layer: int, trace: Trace | None
) -> torch.Tensor:
    n_group, n_value_head, d_state = (dimensions[name] for name in ("n_group", "n_value_head", "d_state"))
    inputs = x @ weights[prefix + "qkv_projection"]
    convolved = functional.silu(causal_convolution(inputs, weights[prefix + "convolution"], forest)).view(
        -1, 2 * n_group + n_value_head, d_state
    )
    query, key, value = torch.split_with_sizes(convolved, (n_group, n_group, n_value_head), dim=1)
    # Value head h is served by key head h modulo n_group.
    query, key = (_unit_length(part).repeat(1, n_value_head // n_group, 1) for part in (query, key))
    # From threshold on torch takes softplus(x) = x; 50 makes that exact in float64.
    step = functional.softplus(x @ weights[prefix + "step_projection"] + weights[prefix + "dt_bias"], threshold=50)
    decay = (step * weights[prefix + "a_log"]).exp()
    beta = (x @ weights[prefix + "beta_projection"]).sigmoid()
    y, states = gated_delta_rule(query / math.sqrt(d_state), key, value, decay, beta, levels, None if trace is None else trace.nodes)
    if trace is not None:
        trace.convolution(layer, inputs, dimensions["d_conv"] - 1)
        trace.recurrent(layer, states)
    y = root_mean_square_norm(y, weights[prefix + "gated_norm"], NORM_EPSILON).view(-1, n_value_head * d_state)
    return (y * (x @ weights[prefix + "gate_projection"]).sigmoid()) @ weights[prefix + "out_projection"]


def _attention(
    dimensions: Dimensions, weights: Tensors, prefix: str, x: torch.Tensor, forest: Forest, layer: int, trace: Trace | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [nodes, n_embd], and the margins of the selection."""
    n_head, n_head_kv, head_dim, n_rot = (dimensions[name] for name in ("n_head", "n_head_kv", "head_dim", "n_rot"))
    index_dim, block_size = dimensions["index_dim"], dimensions["compress_ratio"]
    raw_key = x @ weights[prefix + "index_k_projection"]
    index_query = root_mean_square_norm(
        (x @ weights[prefix + "index_q_projection"]).view(-1, dimensions["n_index_head"], index_dim),
        weights[prefix + "index_q_norm"],
        NORM_EPSILON,
    )

    def finished(means: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        normed = root_mean_square_norm(means, weights[prefix + "index_k_norm"], NORM_EPSILON)
        return _partly_rotated(normed[:, None, :], starts, n_rot)[:, 0]

    selected, margins = selected_keys(
        _partly_rotated(index_query, forest.depths, n_rot), raw_key, finished, forest, block_size, dimensions["top_k"] // block_size
    )
    # Every head's query stands before its gate.
    query, gate = (x @ weights[prefix + "q_projection"]).view(-1, n_head, 2 * head_dim).chunk(2, dim=-1)
    query = root_mean_square_norm(query, weights[prefix + "q_norm"], NORM_EPSILON)
    key = root_mean_square_norm(
        (x @ weights[prefix + "k_projection"]).view(-1, n_head_kv, head_dim), weights[prefix + "k_norm"], NORM_EPSILON
    )
    value = (x @ weights[prefix + "v_projection"]).view(-1, n_head_kv, head_dim)
    if trace is not None:
        trace.attention(layer, key, value)
        trace.index(layer, raw_key)
    query, key = _partly_rotated(query, forest.depths, n_rot), _partly_rotated(key, forest.depths, n_rot)
    y = masked_attention(query, key, value, forest, selected=selected) * gate.reshape(-1, n_head * head_dim).sigmoid()
    return y @ weights[prefix + "out_projection"], margins


def _experts(weights: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
    shares = (x @ weights[prefix + "router"]).softmax(-1)
    shared = functional.silu(x @ weights[prefix + "shared_gate"]) * (x @ weights[prefix + "shared_up"])
    own = expert_mixture(x, shares, *(weights[prefix + name] for name in ("expert_gate", "expert_up", "expert_down")))
    return own + (x @ weights[prefix + "shared_share"]).sigmoid() * (shared @ weights[prefix + "shared_down"])


def _unit_length(x: torch.Tensor) -> torch.Tensor:
    """x / |x| over the last axis, with the norms' epsilon under the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


def _partly_rotated(x: torch.Tensor, positions: torch.Tensor, n_rot: int) -> torch.Tensor:
    """Rotary embedding of the first n_rot channels of x, float64 [nodes, heads, size], at int64 positions [nodes]."""
    return torch.cat((rotated(x[..., :n_rot], positions, ROPE_THETA), x[..., n_rot:]), dim=-1)
