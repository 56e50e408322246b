"""States that add an outer product a token and forget by one factor a head: what `mamba2_scan` and `lightning_attention` share.

Rules
- A row is [heads, d_state, head_dim]: the sum over d_state then adds whole vectors of outputs in a written order, which vectorises without
  a reordered sum (it would with head_dim before d_state).
- A token does to every number of a state: state = fused(scaled x, b, what is kept of the state), and to every output, entry after entry of
  d_state: y = fused(state, c, y), from zero on. Nothing else decides the bits.
- Four entries of d_state of many head channels stay in registers over a chunk of tokens, while what was read so far of every token's output
  waits in memory. So neither how head channels, entries or tokens are cut, nor which heads another thread does, changes a bit.
- The state lives in the row of plane 0 between chunks: the first chunk reads the source row, and writes there in the same pass. A snapshot
  is written by the token that makes it.
- Rows that are not read again soon are, when the call writes much, written past the caches: see `may_stream`.
- Plane p receives the state p tokens before the last, for p < tokens of the segment; other planes are not written.
"""

from typing import Any

import numpy as np

from . import inner_kernel
from .rows import copy_rows_of
from .vectors import (
    CHUNK_TOKENS,
    FEW_NUMBERS,
    FLOAT_BYTES,
    PREFETCH_AHEAD_BYTES,
    SPAN_TOKENS,
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


@inner_kernel
def outer_products_in(
    wide: Any,
    first_head: int,
    end_head: int,
    x: np.ndarray,
    scale: np.ndarray,
    factor: np.ndarray,
    loses: Any,
    b: np.ndarray,
    c: np.ndarray,
    rows: np.ndarray,
    segment_start: np.ndarray,
    source_row: np.ndarray,
    plane_row: np.ndarray,
    y: np.ndarray,
) -> None:
    """For the heads from `first_head` up to `end_head`, as many channels at once as `wide` has.

    x              float32 [tokens, heads, head_dim], segment after segment
    scale, factor  float32 [tokens or 1, heads]: what x is multiplied by, and the state; the same for every token if there is but one
    loses          None; else the factor is what the state loses of itself, less than 0: state + state * factor is what stays
    b, c           float32 [tokens, groups, d_state]; a group serves heads / groups neighbouring heads
    The other arguments are those of `mamba2_scan`.
    """
    apart()
    streams = may_stream(rows, source_row.size)
    heads_per_group = x.shape[1] // b.shape[1]
    each = 1 if factor.shape[0] > 1 else 0
    base = segment_start[0]
    for segment in range(source_row.size):
        first, end = segment_start[segment] - base, segment_start[segment + 1] - base
        source, planes = source_row[segment], plane_row[segment]
        if end - first > 1 and (end - first) * rows.shape[2] * rows.shape[3] > FEW_NUMBERS:
            part = slice(first, end)
            _take_many(
                wide, first_head, end_head, x[part], scale[first * each :], factor[first * each :], loses, b[part], c[part],
                rows, source, planes, streams, y[part],
            )  # fmt: skip
            continue
        past_caches = streams and end - first == 1 and source != planes[0]
        for head in range(first_head, end_head):
            group, read = head // heads_per_group, source
            for token in range(first, end):
                line = token * each
                operands = (x[token, head], scale[line, head], factor[line, head], loses, b[token, group], c[token, group])
                _take_one(wide, operands, rows[read, head], rows[planes[0], head], past_caches, y[token, head])
                read = planes[0]
                plane = end - 1 - token
                if 0 < plane < planes.size:
                    copy_rows_of(rows[read, head], rows[planes[plane], head])
    if streams:
        fence()


@inner_kernel
def _take_one(wide: Any, token: Any, source: np.ndarray, state: np.ndarray, past_caches: bool, y: np.ndarray) -> None:
    """One token for one head: the state passes by once, from one end to the other.

    token          x [head_dim], scale, factor, loses, b [d_state], c [d_state]
    source, state  float32 [d_state, head_dim]; state written. They may be the same
    y              float32 [head_dim], written
    """
    in_wide, in_vectors = y.size // lanes_of(wide) * lanes_of(wide), y.size // 16 * 16
    for p in range(0, in_wide, lanes_of(wide)):
        _take_one_in(wide, p, token, source, state, past_caches, y)
    for p in range(in_wide, in_vectors, 16):
        _take_one_in(zeros(16), p, token, source, state, past_caches, y)
    for p in range(in_vectors, y.size):
        _take_one_in(np.float32(0), p, token, source, state, past_caches, y)


@inner_kernel
def _take_one_in(like: Any, p: int, token: Any, source: np.ndarray, state: np.ndarray, past_caches: bool, y: np.ndarray) -> None:
    """`_take_one` in as many head channels as `like` has, from channel p on."""
    apart()
    x, scale, factor, loses, b, c = token
    ahead = PREFETCH_AHEAD_BYTES // (FLOAT_BYTES * source.shape[1])
    factor_each, x_each = spread(factor, like), spread(scale, like) * load(x, (p,), like)
    total = spread(np.float32(0), like)
    for n in range(b.size):
        value = fused(x_each, spread(b[n], like), _kept(load(source, (n, p), like), factor_each, loses))
        total = fused(value, spread(c[n], like), total)
        if past_caches:
            prefetch(source, (n + ahead, p), like)
        write(state, (n, p), value, past_caches)
    store(y, (p,), total)


@inner_kernel
def _kept(number: Any, factor: Any, loses: Any) -> Any:
    """What stays of numbers of a state; `loses` is None or not when this is compiled."""
    if loses is None:
        return number * factor
    return fused(number, factor, number)


@inner_kernel
def _take_many(
    wide: Any,
    first_head: int,
    end_head: int,
    x: np.ndarray,
    scale: np.ndarray,
    factor: np.ndarray,
    loses: Any,
    b: np.ndarray,
    c: np.ndarray,
    rows: np.ndarray,
    source: int,
    planes: np.ndarray,
    streams: bool,
    y: np.ndarray,
) -> None:
    """The tokens of one segment, all arrays but rows and planes being its own: chunk after chunk of them, head after head in every span of chunks."""
    apart()
    tokens, heads, head_dim = x.shape
    d_state, heads_per_group, lanes = b.shape[2], heads // b.shape[1], lanes_of(wide)
    in_wide, in_vectors = head_dim // lanes * lanes, head_dim // 16 * 16
    chunk_tokens = min(tokens, CHUNK_TOKENS)
    chunks = -(-min(tokens, SPAN_TOKENS) // CHUNK_TOKENS)
    room = room_of(chunk_tokens * 2 * lanes).reshape((chunk_tokens, 2, lanes))
    pairs = room_of(chunks * ((d_state + 3) // 4) * chunk_tokens * 8).reshape((chunks, (d_state + 3) // 4, chunk_tokens, 8))
    factors, scales = np.empty(chunk_tokens, np.float32), np.empty(chunk_tokens, np.float32)
    each = 1 if factor.shape[0] > 1 else 0
    for start in range(0, tokens, SPAN_TOKENS):
        stop = min(start + SPAN_TOKENS, tokens)
        packed_group = -1
        for head in range(first_head, end_head):
            group, state = head // heads_per_group, rows[:, head]
            for first in range(start, stop, CHUNK_TOKENS):
                part = slice(first, min(first + CHUNK_TOKENS, stop))
                pairs_of_chunk = pairs[(first - start) // CHUNK_TOKENS]
                if group != packed_group:
                    _pack(b[part, group], c[part, group], pairs_of_chunk)
                for t in range(part.stop - first):
                    line = (first + t) * each
                    scales[t], factors[t] = scale[line, head], factor[line, head]
                follows, its_head = (first + CHUNK_TOKENS, head) if first + CHUNK_TOKENS < stop else (start, head + 1)
                following = (x[follows:, its_head], y[follows:, its_head])
                chunk = (x[part, head], scales, factors, loses, pairs_of_chunk, room, following)
                read = source if first == 0 else planes[0]
                newest_past_caches = streams and part.stop == tokens and read != planes[0]
                for p in range(0, in_wide, lanes):
                    _take_chunk(wide, p, chunk, state, read, planes, tokens - first, streams, newest_past_caches, y[part, head])
                for p in range(in_wide, in_vectors, 16):
                    _take_chunk(zeros(16), p, chunk, state, read, planes, tokens - first, streams, newest_past_caches, y[part, head])
                for p in range(in_vectors, head_dim):
                    _take_channel(p, head, part, x, scales, factors, loses, b[:, group], c[:, group], rows, read, planes, y)
            packed_group = group


@inner_kernel
def _pack(b: np.ndarray, c: np.ndarray, pairs: np.ndarray) -> None:
    """What four entries of d_state take from each token side by side: four of b, four of c.

    b, c   float32 [tokens, d_state]
    pairs  float32 [d_state / 4, rounded up; tokens or more; 8], written where there is an entry
    """
    apart()
    for token in range(b.shape[0]):
        for n in range(0, b.shape[1], 16):
            prefetch(b, (token + 4, n), zeros(16))
            prefetch(c, (token + 4, n), zeros(16))
        n = 0
        while n + 4 <= b.shape[1]:
            store(pairs, (n // 4, token, 0), load(b, (token, n), zeros(4)))
            store(pairs, (n // 4, token, 4), load(c, (token, n), zeros(4)))
            n += 4
        for rest in range(n, b.shape[1]):
            pairs[rest // 4, token, rest % 4] = b[token, rest]
            pairs[rest // 4, token, rest % 4 + 4] = c[token, rest]


@inner_kernel
def _take_chunk(
    like: Any,
    p: int,
    chunk: Any,
    state: np.ndarray,
    source: int,
    planes: np.ndarray,
    tokens_left: int,
    streams: bool,
    newest_past_caches: bool,
    y: np.ndarray,
) -> None:
    """A chunk of tokens in as many channels of one head as `like` has, from channel p on.

    chunk        x [tokens, head_dim], scales and factors [tokens], loses, what `_pack` packed, room for scaled x and for y [tokens, 2, lanes],
                 and the x and y that follow, which are asked for meanwhile: they lie too far apart for the processor to guess
    state        float32 [n_rows, d_state, head_dim], read in row `source`, written in rows `planes`
    tokens_left  of the segment, from the chunk's first on
    y            float32 [tokens, head_dim], written
    """
    apart()
    x, scales, factors, loses, pairs, room, (next_x, next_y) = chunk
    tokens, d_state, newest = x.shape[0], state.shape[1], planes[0]
    for t in range(tokens):
        store(room, (t, 0, 0), spread(scales[t], like) * load(x, (t, p), like))
        store(room, (t, 1, 0), spread(np.float32(0), like))
    ahead = PREFETCH_AHEAD_BYTES // (FLOAT_BYTES * state.shape[2])
    n = 0
    while n + 4 <= d_state:
        entry = n // 4
        s0, s1, s2, s3 = (
            load(state, (source, n, p), like),
            load(state, (source, n + 1, p), like),
            load(state, (source, n + 2, p), like),
            load(state, (source, n + 3, p), like),
        )
        if streams:
            for i in range(4):
                prefetch(state, (source, n + i + ahead, p), like)
        prefetch(next_x, (entry, p), like)
        prefetch(next_y, (entry, p), like)
        for t in range(tokens):
            factor, x_each = spread(factors[t], like), load(room, (t, 0, 0), like)
            s0 = fused(x_each, spread(pairs[entry, t, 0], like), _kept(s0, factor, loses))
            s1 = fused(x_each, spread(pairs[entry, t, 1], like), _kept(s1, factor, loses))
            s2 = fused(x_each, spread(pairs[entry, t, 2], like), _kept(s2, factor, loses))
            s3 = fused(x_each, spread(pairs[entry, t, 3], like), _kept(s3, factor, loses))
            read = fused(s0, spread(pairs[entry, t, 4], like), load(room, (t, 1, 0), like))
            read = fused(s1, spread(pairs[entry, t, 5], like), read)
            read = fused(s2, spread(pairs[entry, t, 6], like), read)
            read = fused(s3, spread(pairs[entry, t, 7], like), read)
            store(room, (t, 1, 0), read)
            plane = tokens_left - 1 - t
            if 0 < plane < planes.size:
                write(state, (planes[plane], n, p), s0, streams)
                write(state, (planes[plane], n + 1, p), s1, streams)
                write(state, (planes[plane], n + 2, p), s2, streams)
                write(state, (planes[plane], n + 3, p), s3, streams)
        write(state, (newest, n, p), s0, newest_past_caches)
        write(state, (newest, n + 1, p), s1, newest_past_caches)
        write(state, (newest, n + 2, p), s2, newest_past_caches)
        write(state, (newest, n + 3, p), s3, newest_past_caches)
        n += 4
    while n < d_state:
        s0 = load(state, (source, n, p), like)
        for t in range(tokens):
            s0 = fused(load(room, (t, 0, 0), like), spread(pairs[n // 4, t, n % 4], like), _kept(s0, spread(factors[t], like), loses))
            store(room, (t, 1, 0), fused(s0, spread(pairs[n // 4, t, n % 4 + 4], like), load(room, (t, 1, 0), like)))
            plane = tokens_left - 1 - t
            if 0 < plane < planes.size:
                write(state, (planes[plane], n, p), s0, streams)
        write(state, (newest, n, p), s0, newest_past_caches)
        n += 1
    for t in range(tokens):
        store(y, (t, p), load(room, (t, 1, 0), like))


@inner_kernel
def _take_channel(
    p: int,
    head: int,
    part: slice,
    x: np.ndarray,
    scales: np.ndarray,
    factors: np.ndarray,
    loses: Any,
    b: np.ndarray,
    c: np.ndarray,
    rows: np.ndarray,
    source: int,
    planes: np.ndarray,
    y: np.ndarray,
) -> None:
    """The chunk of tokens `part` of a segment in one channel that fills no vector, token by token; b and c are the head's."""
    apart()
    never = planes.size == 0
    for token in range(part.start, part.stop):
        t = token - part.start
        operands = (x[token, head], scales[t], factors[t], loses, b[token], c[token])
        _take_one_in(np.float32(0), p, operands, rows[source, head], rows[planes[0], head], never, y[token, head])
        source = planes[0]
        plane = x.shape[0] - 1 - token
        if 0 < plane < planes.size:
            for n in range(rows.shape[2]):
                rows[planes[plane], head, n, p] = rows[source, head, n, p]
