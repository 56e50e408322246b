"""The incremental forward of qwen4exp.

Rules
- One call does one ubatch through all layers, as in qwen35.py. The tokens of a ubatch and their raw index keys are written into their
  cells before anything of it reads them.
- The convolution of n-gram embeddings is the ordinary one: its taps stand apart because those between them are zero.
Source: Transformers' Qwen4ExpForCausalLM for the order of the parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..spec.families.delta_net import NORM_EPSILON, key_heads_in_turn
from ..spec.families.family import Dimensions, Weights, other_layers, periodic_layers
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
from .batches import SplitBatch
from .cells import Plan
from .delta_net_mixer import DeltaNetWeights, delta_net_room, delta_net_shapes, mix_delta_net, prepare_delta_nets
from .expert_layer import ExpertWeights, mix_experts, prepare_experts
from .forwards import FULL, Memory, Sights
from .gated_attention import (
    GatedAttentionRoom,
    GatedAttentionWeights,
    attend_gated,
    gated_attention_room,
    gated_attention_shapes,
    prepare_gated_attention,
)
from .hyper_connections import MixerWeights, mix_streams, norm_streams, prepare_mixers
from .kernels import kernel
from .kernels.attention import Sight
from .kernels.causal_convolution import causal_convolution
from .kernels.dense import embed, linear, rms_norm, rotate
from .kernels.ngram import embed_ngrams
from .kernels.streams import (
    add_with_silu,
    inject,
    repeat_rows,
    values_by_match,
    write_raw_keys,
    write_tokens,
    write_wanted_products,
)
from .kernels.token_selection import selected_sight
from .memory import aligned
from .stacking import places, stacked_matrices, stacked_norms
from .ubatches import begin_ubatch

_EPSILON = np.float32(NORM_EPSILON)


class NgramWeights(NamedTuple):
    """Weights of the layer with n-gram embeddings; matrices [in, out], float32."""

    multipliers: np.ndarray  # int64 [longest n-gram]
    sizes: np.ndarray  # int64 [hashes]
    offsets: np.ndarray  # int64 [hashes]
    table: np.ndarray  # [rows, n_embd / hashes]
    key: np.ndarray  # [n_embd, channels of all streams]
    value: np.ndarray  # [n_embd, n_embd]
    key_norm: np.ndarray  # [streams, n_embd]
    query_norm: np.ndarray  # [streams, n_embd]
    convolution_norm: np.ndarray  # [streams, n_embd]
    taps: np.ndarray  # [window + 1, channels of all streams], zero between the taps
    no_bias: np.ndarray  # [channels of all streams], zero


class IndexerWeights(NamedTuple):
    """Weights of the indexers, stacked over the attention layers; matrices [in, out], float32."""

    q_projection: np.ndarray  # [layers, n_embd, heads * size]
    k_projection: np.ndarray  # [layers, n_embd, size]
    q_norm: np.ndarray  # [layers, 1, size]
    k_norm: np.ndarray  # [layers, 1, size]
    block_size: int
    block_count: int


class Qwen4ExpWeights(NamedTuple):
    """Weights as the forward uses them; matrices [in, out]."""

    place: np.ndarray  # int64 [layers], index among the delta nets, or -1 - index among the attention layers
    embedding: np.ndarray  # [n_vocab, n_embd]
    ngram: NgramWeights
    input_mixers: MixerWeights
    ffn_mixers: MixerWeights
    output_mixer: MixerWeights
    delta_net: DeltaNetWeights
    attention: GatedAttentionWeights
    indexer: IndexerWeights
    experts: ExpertWeights
    output: np.ndarray  # [n_embd, n_vocab]


def prepare(dimensions: Dimensions, weights: Weights) -> Qwen4ExpWeights:
    """Lay the family's weights out for `forward`."""
    every = tuple(range(dimensions["n_layer"]))
    recurrent, attention = other_layers(dimensions), periodic_layers(dimensions)
    return Qwen4ExpWeights(
        place=places(dimensions["n_layer"], recurrent, attention),
        embedding=aligned(weights["token_embedding"]),
        ngram=_ngram_weights(dimensions, weights),
        input_mixers=prepare_mixers(dimensions, weights, [f"layers.{layer}.input_" for layer in every]),
        ffn_mixers=prepare_mixers(dimensions, weights, [f"layers.{layer}.ffn_" for layer in every]),
        output_mixer=prepare_mixers(dimensions, weights, ["output_"]),
        delta_net=prepare_delta_nets(dimensions, weights, recurrent, key_heads_in_turn(dimensions), gates_by_sigmoid=True),
        attention=prepare_gated_attention(dimensions, weights, attention),
        indexer=_indexer_weights(dimensions, weights, attention),
        experts=prepare_experts(dimensions, weights, every, dimensions["n_ff"], "shared_share"),
        output=aligned(weights["output"].T),
    )


def _ngram_weights(dimensions: Dimensions, weights: Weights) -> NgramWeights:
    prefix, streams = f"layers.{EMBEDDING_LAYER}.ngram_", (dimensions["hyper_connections"], dimensions["n_embd"])
    channels = stream_channels(dimensions)
    taps = np.zeros((embedding_window(dimensions) + 1, channels), np.float32)
    taps[:: dimensions["ngram_size"]] = weights[prefix + "convolution"].T
    return NgramWeights(
        multipliers=np.array(hash_multipliers(dimensions), np.int64),
        sizes=np.array(hash_sizes(dimensions), np.int64),
        offsets=np.array(hash_offsets(dimensions), np.int64),
        table=aligned(weights[prefix + "table"]),
        key=aligned(weights[prefix + "key"].T),
        value=aligned(weights[prefix + "value"].T),
        key_norm=aligned(weights[prefix + "key_norm"].reshape(streams)),
        query_norm=aligned(weights[prefix + "query_norm"].reshape(streams)),
        convolution_norm=aligned(weights[prefix + "convolution_norm"].reshape(streams)),
        taps=aligned(taps),
        no_bias=aligned(np.zeros(channels, np.float32)),
    )


def _indexer_weights(dimensions: Dimensions, weights: Weights, layers: tuple[int, ...]) -> IndexerWeights:
    n_embd, size = dimensions["n_embd"], dimensions["index_dim"]
    return IndexerWeights(
        q_projection=stacked_matrices(weights, "index_q_projection", layers, dimensions["n_index_head"] * size, n_embd),
        k_projection=stacked_matrices(weights, "index_k_projection", layers, size, n_embd),
        q_norm=stacked_norms(weights, "index_q_norm", layers, size),
        k_norm=stacked_norms(weights, "index_k_norm", layers, size),
        block_size=dimensions["compress_ratio"],
        block_count=dimensions["top_k"] // dimensions["compress_ratio"],
    )


def shapes(dimensions: Dimensions) -> dict[str, Any]:
    """The shapes of a layer's state rows and attention cells. An indexer's row is its raw key, and the token."""
    return (
        delta_net_shapes(dimensions)
        | gated_attention_shapes(dimensions)
        | {
            "embedding_shape": (embedding_window(dimensions), stream_channels(dimensions)),
            "embedding_layers": (EMBEDDING_LAYER,),
            "index_width": dimensions["index_dim"] + 1,
        }
    )


@kernel
def _add_ngrams(
    weights: NgramWeights,
    n_vocab: int,
    memory: Memory,
    sight: Sight,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    streams: np.ndarray,
) -> None:
    """Add what n-grams give to every stream, float32 [tokens, channels of all streams]."""
    tokens, channels = streams.shape
    n_embd = weights.key_norm.shape[1]
    window = weights.taps.shape[0] - 1
    embedding, value = np.empty((tokens, n_embd), np.float32), np.empty((tokens, n_embd), np.float32)
    key, query = np.empty((tokens, channels), np.float32), np.empty((tokens, channels), np.float32)
    cell_tokens = memory.index_rows[0, :, memory.index_rows.shape[2] - 1]
    embed_ngrams(
        cell_tokens, sight, segment_start[0], weights.multipliers, weights.sizes, weights.offsets, EOS_TOKEN, n_vocab, weights.table, embedding
    )  # fmt: skip
    linear(embedding, weights.key, key)
    linear(embedding, weights.value, value)
    norm_streams(key, weights.key_norm, _EPSILON, key)
    norm_streams(streams, weights.query_norm, _EPSILON, query)
    values_by_match(query, value, key)
    added, inputs, convolved = key, query, np.empty((tokens, channels), np.float32)
    norm_streams(added, weights.convolution_norm, _EPSILON, inputs)
    rows = memory.embedding_rows[0].reshape((memory.embedding_rows.shape[1], window, channels))
    causal_convolution(inputs, weights.taps, weights.no_bias, rows, segment_start, source_row, plane_row, convolved)
    add_with_silu(added, convolved, streams)


@kernel
def _selection(
    weights: IndexerWeights, place: int, memory: Memory, sight: Sight, segment_start: np.ndarray, room: GatedAttentionRoom, x: np.ndarray
) -> Sight:
    """Write the tokens' raw keys into their cells, and say what each token attends to; x float32 [tokens, n_embd]."""
    tokens, size = x.shape[0], weights.k_norm.shape[2]
    heads = weights.q_projection.shape[2] // size
    query, raw = np.empty((tokens, heads * size), np.float32), np.empty((tokens, size), np.float32)
    linear(x, weights.q_projection[place], query)
    linear(x, weights.k_projection[place], raw)
    query_rows = query.reshape((tokens * heads, size))
    rms_norm(query_rows, weights.q_norm[place], _EPSILON, query_rows)
    rotate(query.reshape((tokens, heads, size)), room.cosine, room.sine)
    rows = memory.index_rows[place]
    write_raw_keys(raw, sight.cell[segment_start[0] : segment_start[0] + tokens], rows)
    return selected_sight(
        query.reshape((tokens, heads, size)), rows, sight, segment_start, weights.block_size, weights.block_count, weights.k_norm[place],
        _EPSILON, ROPE_THETA, room.cosine.shape[1],
    )  # fmt: skip


@kernel
def forward(
    weights: Qwen4ExpWeights, memory: Memory, batch: SplitBatch, plan: Plan, sights: Sights, ubatch: int, hidden: bool, y: np.ndarray
) -> None:
    """One ubatch through the model.

    weights, memory, batch, plan  Qwen4ExpWeights, Memory, SplitBatch, Plan
    sights                        of the attention layers without and with a window
    ubatch                        which of the batch's ubatches
    hidden                        True: the last mixer's output instead of logits
    y                             float32 [wanted rows, n_vocab or n_embd], its rows of this ubatch written
    """
    start, end, segment_start, source_row, plane_row = begin_ubatch(memory, batch, plan, ubatch)
    tokens, (n_vocab, n_embd) = end - start, weights.embedding.shape
    count = weights.output_mixer.norm.shape[1]
    stream, mixed = np.empty((tokens, n_embd), np.float32), np.empty((tokens, n_embd), np.float32)
    streams, normed = np.empty((tokens, count * n_embd), np.float32), np.empty((tokens, count * n_embd), np.float32)
    shares = np.empty((tokens, count), np.float32)
    delta_room = delta_net_room(weights.delta_net, tokens)
    attention_room = gated_attention_room(weights.attention, batch.positions[start:end])

    write_tokens(batch.tokens[start:end], sights[FULL].cell[start:end], memory.index_rows)
    embed(batch.tokens[start:end], weights.embedding, stream)
    repeat_rows(stream, streams)
    for layer in range(weights.place.size):
        if layer == EMBEDDING_LAYER:
            _add_ngrams(weights.ngram, n_vocab, memory, sights[FULL], segment_start, source_row, plane_row, streams)
        mix_streams(weights.input_mixers, layer, streams, _EPSILON, normed, shares, mixed)
        place = weights.place[layer]
        if place >= 0:
            mix_delta_net(weights.delta_net, place, memory, segment_start, source_row, plane_row, delta_room, mixed, mixed)
        else:
            own = _selection(weights.indexer, -1 - place, memory, sights[FULL], segment_start, attention_room, mixed)
            attend_gated(weights.attention, -1 - place, memory, (own, own), 0, attention_room, mixed, mixed)
        inject(mixed, shares, streams)
        mix_streams(weights.ffn_mixers, layer, streams, _EPSILON, normed, shares, mixed)
        mix_experts(weights.experts, layer, mixed, stream)
        inject(stream, shares, streams)

    mix_streams(weights.output_mixer, 0, streams, _EPSILON, normed, shares, mixed)
    write_wanted_products(mixed, batch.output_row[start:end], weights.output, hidden, y)
