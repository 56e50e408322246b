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
from ..spec.families.delta_net import NORM_EPSILON, key_heads_in_turn
from ..spec.families.family import periodic_layers
from ..spec.families.gated_attention import ROPE_THETA
from ..spec.families.qwen4exp import (
    EMBEDDING_LAYER,
    EOS_TOKEN,
    embedding_window,
    hash_multipliers,
    hash_offsets,
    hash_sizes,
    stream_channels,
)
from . import delta_net as delta_net_block
from . import gated_attention as attention_block
from .blocks import laid_out, mixture_beside_a_shared_expert, partly_rotated, root_mean_square_norm, windows
from .delta_net import delta_net, delta_net_channels
from .delta_rule import levels_of
from .forest import Forest
from .gated_attention import gated_attention, gated_attention_channels
from .token_selection import selected_keys, smallest_so_far
from .trace import Trace

Tensors = Mapping[str, torch.Tensor]
MIXER_MATRICES = ("mix_down", "mix_up", "inject")
MATRICES = (
    *delta_net_block.MATRICES, *attention_block.MATRICES, *(mixer + name for mixer in ("input_", "ffn_", "output_") for name in MIXER_MATRICES),
    "ngram_key", "ngram_value", "index_q_projection", "index_k_projection", "router", "shared_share", "shared_gate", "shared_up",
    "shared_down", "output",
)  # fmt: skip


def window(dimensions: Dimensions) -> int:
    """Tokens that a convolution looks at, the current one included."""
    return max(dimensions["d_conv"], embedding_window(dimensions) + 1)


def channels(dimensions: Dimensions) -> int:
    """Width of the widest activation of one token."""
    return max(
        delta_net_channels(dimensions),
        gated_attention_channels(dimensions),
        stream_channels(dimensions),
        2 * dimensions["n_expert"] * dimensions["n_ff"],
    )


def heads(dimensions: Dimensions) -> int:
    """Heads of the widest query-by-key form."""
    return max(dimensions["n_head"], dimensions["n_index_head"])


def prepared(dimensions: Dimensions, weights: Tensors) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them (`laid_out`)."""
    return laid_out(weights, MATRICES, ("convolution", "ngram_convolution"))


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
    attention, key_heads = periodic_layers(dimensions), key_heads_in_turn(dimensions)
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
            y = delta_net(dimensions, weights, prefix, mixed, key_heads, forest, levels, layer, trace, torch.sigmoid)
        streams = _injected(streams, y, shares)
        mixed, shares = _mixed(dimensions, weights, prefix + "ffn_", streams)
        streams = _injected(streams, mixture_beside_a_shared_expert(mixed, weights, prefix, "shared_share"), shares)
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
    rows: list[np.ndarray] = []
    joined = newest[0] * multipliers[0]
    for token, multiplier in zip(newest[1:], multipliers[1:], strict=True):
        joined = joined ^ (token * multiplier)
        for _ in range(dimensions["ngram_hashes"]):
            rows.append(joined % sizes[len(rows)] + offsets[len(rows)])
    return torch.from_numpy(np.stack(rows, axis=1))


def _attention(
    dimensions: Dimensions, weights: Tensors, prefix: str, x: torch.Tensor, forest: Forest, layer: int, trace: Trace | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [nodes, n_embd], and the margins of the selection."""
    index_dim, n_rot, block_size = dimensions["index_dim"], dimensions["n_rot"], dimensions["compress_ratio"]
    raw_key = x @ weights[prefix + "index_k_projection"]
    index_query = root_mean_square_norm(
        (x @ weights[prefix + "index_q_projection"]).view(-1, dimensions["n_index_head"], index_dim),
        weights[prefix + "index_q_norm"],
        NORM_EPSILON,
    )

    def finished(means: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        normed = root_mean_square_norm(means, weights[prefix + "index_k_norm"], NORM_EPSILON)
        return partly_rotated(normed[:, None, :], starts, ROPE_THETA, n_rot)[:, 0]

    selected, margins = selected_keys(
        partly_rotated(index_query, forest.depths, ROPE_THETA, n_rot),
        raw_key,
        finished,
        forest,
        block_size,
        dimensions["top_k"] // block_size,
    )
    y = gated_attention(dimensions, weights, prefix, x, forest, layer, trace, selected)
    if trace is not None:
        trace.index(layer, raw_key)
    return y, margins
