"""The delta rule, with one decay for a head or one for every channel of a key: what `gated_delta_net` and `kimi_delta_attention` share.

Rules
- A row is [heads, d_state, head_dim]: what the state holds along a key, and what a query reads, are sums of whole vectors over d_state in a
  written order, which vectorise without a reordered sum.
- A token reads a state once, before it changes it: held = state^T (decay * key), seen = state^T (decay * query), each one fused product and
  sum after the other; added = beta * (value - held); y = fused(added, query . key, seen). Then every number of the state becomes
  fused(key, added, state * decay). Nothing else decides the bits.
- While tokens of a chunk follow each other, some channels of a state wait in memory of their own, small enough for the first cache, and one
  pass changes them for a token and reads them for the next. So neither how head channels or tokens are cut, nor which heads another thread
  does, changes a bit.
- Where the state lives between chunks, when a snapshot is written, and what is written past the caches: as in outer_products.py.
"""

from typing import Any

import numpy as np

from . import inner_kernel
from .dense import sum_of_products
from .rows import copy_rows_of
from .vectors import (
    CHUNK_TOKENS,
    FEW_NUMBERS,
    FLOAT_BYTES,
    LANES,
    PREFETCH_AHEAD_BYTES,
    apart,
    fence,
    fused,
    lanes_of,
    load,
    may_stream,
    prefetch,
    room_of,
    spread,
    store,
    write,
    zeros,
)

_DECAY, _KEY, _HELD_BY, _SEEN_BY = range(4)
"""What a token's operands are, one float32 [d_state] after the other: decay, key, decay * key, decay * query."""


@inner_kernel
def delta_rule_in(
    wide: Any,
    first_head: int,
    end_head: int,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    y: np.ndarray,
) -> None:
    """The heads from `first_head` up to `end_head`, as many channels at once as `wide` has.

    decay  float32 [tokens, value heads, d_state or 1], factors
    The other arguments are those of `gated_delta_net`.
    """
    apart()
    streams = may_stream(rows, source_row.size)
    base = segment_start[0]
    for segment in range(source_row.size):
        first, end = segment_start[segment] - base, segment_start[segment + 1] - base
        source, planes = source_row[segment], plane_row[segment]
        if end - first > 1 and (end - first) * rows.shape[2] * rows.shape[3] > FEW_NUMBERS:
            part = slice(first, end)
            _take_many(
                wide, first_head, end_head, query[part], key[part], value[part], decay[part], beta[part],
                rows, source, planes, streams, y[part],
            )  # fmt: skip
            continue
        past_caches = streams and end - first == 1 and source != planes[0]
        for head in range(first_head, end_head):
            key_head, read = head % key.shape[1], source
            for token in range(first, end):
                q, k = query[token, key_head], key[token, key_head]
                one = (q, k, decay[token, head], sum_of_products(q, k), value[token, head], beta[token, head])
                _take_one(zeros(LANES), 0, one, rows[read, head], rows[planes[0], head], past_caches, y[token, head])
                read = planes[0]
                plane = end - 1 - token
                if 0 < plane < planes.size:
                    copy_rows_of(rows[read, head], rows[planes[plane], head])
    if streams:
        fence()


@inner_kernel
def _take_one(wide: Any, start: int, one: Any, source: np.ndarray, state: np.ndarray, past_caches: bool, y: np.ndarray) -> None:
    """One token in the channels of one head from `start` on.

    one            query, key [d_state], decay [d_state or 1], query . key, value [head_dim], beta
    source, state  float32 [d_state, head_dim]; state written. They may be the same
    y              float32 [head_dim], written
    """
    in_wide = (y.size - start) // lanes_of(wide) * lanes_of(wide) + start
    in_vectors = (y.size - start) // 16 * 16 + start
    for p in range(start, in_wide, lanes_of(wide)):
        _take_one_in(wide, p, one, source, state, past_caches, y)
    for p in range(in_wide, in_vectors, 16):
        _take_one_in(zeros(16), p, one, source, state, past_caches, y)
    for p in range(in_vectors, y.size):
        _take_one_in(np.float32(0), p, one, source, state, past_caches, y)


@inner_kernel
def _take_one_in(like: Any, p: int, one: Any, source: np.ndarray, state: np.ndarray, past_caches: bool, y: np.ndarray) -> None:
    """`_take_one` in as many channels as `like` has, from channel p on."""
    apart()
    query, key, decay, met, value, beta = one
    ahead, each = PREFETCH_AHEAD_BYTES // (FLOAT_BYTES * source.shape[1]), min(decay.size - 1, 1)
    held, seen = spread(np.float32(0), like), spread(np.float32(0), like)
    for n in range(key.size):
        number, factor = load(source, (n, p), like), decay[n * each]
        if past_caches:
            prefetch(source, (n + ahead, p), like)
        held = fused(number, spread(factor * key[n], like), held)
        seen = fused(number, spread(factor * query[n], like), seen)
    added = spread(beta, like) * (load(value, (p,), like) - held)
    store(y, (p,), fused(added, spread(met, like), seen))
    for n in range(key.size):
        kept = load(source, (n, p), like) * spread(decay[n * each], like)
        write(state, (n, p), fused(spread(key[n], like), added, kept), past_caches)


@inner_kernel
def _take_many(
    wide: Any,
    first_head: int,
    end_head: int,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
    rows: np.ndarray,
    source: int,
    planes: np.ndarray,
    streams: bool,
    y: np.ndarray,
) -> None:
    """The tokens of one segment, all arrays but rows and planes being its own: head after head, and of each, chunk after chunk."""
    apart()
    d_state, head_dim, lanes, tokens = rows.shape[2], rows.shape[3], lanes_of(wide), value.shape[0]
    in_wide, in_vectors = head_dim // lanes * lanes, head_dim // 16 * 16
    chunk_tokens = min(CHUNK_TOKENS, tokens)
    operands = room_of(chunk_tokens * 4 * d_state).reshape((chunk_tokens, 4, d_state))
    block = room_of(d_state * lanes).reshape((d_state, lanes))
    met = np.empty(chunk_tokens, np.float32)
    for head in range(first_head, end_head):
        key_head, read = head % key.shape[1], source
        for first in range(0, tokens, CHUNK_TOKENS):
            stop = min(first + CHUNK_TOKENS, tokens)
            for token in range(first, stop):
                _lay_out(query[token, key_head], key[token, key_head], decay[token, head], operands[token - first])
                met[token - first] = sum_of_products(query[token, key_head], key[token, key_head])
            newest_past_caches = streams and stop - first == tokens and read != planes[0]
            follows, its_head = (stop, head) if stop < tokens else (0, head + 1)
            following = (query[follows:, its_head % key.shape[1]], key[follows:, its_head % key.shape[1]], decay[follows:, its_head])
            for p in range(0, in_wide, lanes):
                _take_chunk(
                    wide, p, head, first, stop, value, beta, operands, met, following, rows, read, planes, streams, newest_past_caches, block, y
                )  # fmt: skip
            for p in range(in_wide, in_vectors, 16):
                _take_chunk(
                    zeros(16), p, head, first, stop, value, beta, operands, met, following, rows, read, planes, streams, newest_past_caches, block, y
                )  # fmt: skip
            if in_vectors < head_dim:
                for token in range(first, stop):
                    q, k = query[token, key_head], key[token, key_head]
                    one = (q, k, decay[token, head], met[token - first], value[token, head], beta[token, head])
                    _take_one(zeros(LANES), in_vectors, one, rows[read, head], rows[planes[0], head], newest_past_caches, y[token, head])
                    read = planes[0]
                    plane = tokens - 1 - token
                    if 0 < plane < planes.size:
                        for n in range(d_state):
                            for p in range(in_vectors, head_dim):
                                rows[planes[plane], head, n, p] = rows[read, head, n, p]
            read = planes[0]


@inner_kernel
def _lay_out(query: np.ndarray, key: np.ndarray, decay: np.ndarray, operands: np.ndarray) -> None:
    """A token's operands, float32 [4, d_state], written."""
    whole = key.size // 16 * 16
    for n in range(0, whole, 16):
        _lay_out_some(zeros(16), n, query, key, decay, operands)
    for n in range(whole, key.size):
        _lay_out_some(np.float32(0), n, query, key, decay, operands)


@inner_kernel
def _lay_out_some(like: Any, n: int, query: np.ndarray, key: np.ndarray, decay: np.ndarray, operands: np.ndarray) -> None:
    """`_lay_out` for as many channels of the key as `like` has, from n on."""
    factor, k = load(decay, (n,), like) if decay.size > 1 else spread(decay[0], like), load(key, (n,), like)
    store(operands, (_DECAY, n), factor)
    store(operands, (_KEY, n), k)
    store(operands, (_HELD_BY, n), factor * k)
    store(operands, (_SEEN_BY, n), factor * load(query, (n,), like))


@inner_kernel
def _take_chunk(
    like: Any,
    p: int,
    head: int,
    first: int,
    stop: int,
    value: np.ndarray,
    beta: np.ndarray,
    operands: np.ndarray,
    met: np.ndarray,
    following: Any,
    rows: np.ndarray,
    source: int,
    planes: np.ndarray,
    streams: bool,
    newest_past_caches: bool,
    block: np.ndarray,
    y: np.ndarray,
) -> None:
    """The tokens from `first` up to `stop` of a segment, in as many channels of a head as `like` has, from channel p on.

    operands, met  of these tokens: float32 [tokens, 4, d_state] and [tokens]
    following      query, key and decay of the tokens that follow, asked for meanwhile: they lie too far apart for the processor to guess
    rows           read in row `source`, written in rows `planes`
    block          float32 [d_state, lanes], room for these channels of the state
    """
    apart()
    d_state = rows.shape[2]
    held, seen = spread(np.float32(0), like), spread(np.float32(0), like)
    for n in range(d_state):
        number = load(rows, (source, head, n, p), like)
        store(block, (n, 0), number)
        held = fused(number, spread(operands[0, _HELD_BY, n], like), held)
        seen = fused(number, spread(operands[0, _SEEN_BY, n], like), seen)
    for token in range(first, stop - 1):
        t = token - first
        prefetch(value, (token + 4, head, p), like)
        prefetch(y, (token + 4, head, p), like)
        for n in range(0, d_state, 64):
            prefetch(following[0], (t, n), zeros(64))
            prefetch(following[1], (t, n), zeros(64))
        for n in range(0, following[2].shape[1], 64):
            prefetch(following[2], (t, n), zeros(64))
        added = spread(beta[token, head], like) * (load(value, (token, head, p), like) - held)
        store(y, (token, head, p), fused(added, spread(met[t], like), seen))
        held, seen = spread(np.float32(0), like), spread(np.float32(0), like)
        for n in range(d_state):
            kept = load(block, (n, 0), like) * spread(operands[t, _DECAY, n], like)
            number = fused(spread(operands[t, _KEY, n], like), added, kept)
            held = fused(number, spread(operands[t + 1, _HELD_BY, n], like), held)
            seen = fused(number, spread(operands[t + 1, _SEEN_BY, n], like), seen)
            store(block, (n, 0), number)
        plane = y.shape[0] - 1 - token
        if 0 < plane < planes.size:
            for n in range(d_state):
                write(rows, (planes[plane], head, n, p), load(block, (n, 0), like), streams)
    t = stop - 1 - first
    added = spread(beta[stop - 1, head], like) * (load(value, (stop - 1, head, p), like) - held)
    store(y, (stop - 1, head, p), fused(added, spread(met[t], like), seen))
    plane = y.shape[0] - stop
    for n in range(d_state):
        kept = load(block, (n, 0), like) * spread(operands[t, _DECAY, n], like)
        number = fused(spread(operands[t, _KEY, n], like), added, kept)
        write(rows, (planes[0], head, n, p), number, newest_past_caches)
        if 0 < plane < planes.size:
            write(rows, (planes[plane], head, n, p), number, streams)
