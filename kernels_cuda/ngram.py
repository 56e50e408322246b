"""Embeddings of the newest tokens together, as in `impl/kernels/ngram.py`: which rows of a table an n-gram is hashed to.

Rules
- One thread takes one number of one hash of one token: it hashes the n-gram for itself.
- A cell that holds no token (nothing wrote it) gives NaN: it must show.
"""

from typing import Any

import numpy as np

from . import for_each


def embed_ngrams(
    cell_tokens: Any,
    sight: Any,
    start: Any,
    multipliers: Any,
    sizes: Any,
    offsets: Any,
    end: Any,
    n_vocab: Any,
    table: Any,
    y: Any,
) -> None:
    """The rows of the 2-gram, the 3-gram, ... that end at each token, side by side.

    cell_tokens     float32 [cells], the tokens that cells hold
    sight           of the whole batch: the cells that each token sees, its own last
    start           place of the ubatch's first token
    multipliers     int64 [n], of the newest token first; n is the longest n-gram
    sizes, offsets  int64 [hashes], rows of the table of each hash, and the first of them; the same number of hashes for each length
    end, n_vocab    the token that ends an n-gram, and how many tokens there are
    table           float32 [rows, width]
    y               float32 [tokens, hashes * width], written
    """
    tokens = slice(start, start + y.shape[0])
    lists = (sight.first[tokens], sight.length[tokens], sight.listed)
    _embed(y.size, cell_tokens, *lists, multipliers, sizes, offsets, end, n_vocab, table, y)


@for_each
def _embed(
    place: Any,
    cell_tokens: Any,
    first: Any,
    length: Any,
    listed: Any,
    multipliers: Any,
    sizes: Any,
    offsets: Any,
    end: Any,
    n_vocab: Any,
    table: Any,
    y: Any,
) -> None:
    channels, width = np.uint64(y.shape[1]), np.uint64(table.shape[1])
    token, i = place // channels, place % channels
    hashed = i // width
    of_each = np.uint64(sizes.size) // np.uint64(multipliers.size - 1)
    joined, ended, is_known = np.int64(0), False, True
    for back in range(np.int64(hashed // of_each) + 2):  # of the token itself, and as many before it as the n-gram has
        own = np.int64(end)
        if back < length[token] and not ended:
            held = cell_tokens[np.uint64(listed[np.uint64(first[token] + length[token] - 1 - back)])]
            if held >= np.float32(0) and held < np.float32(n_vocab):
                own = np.int64(held)
            else:
                is_known = False
        else:
            ended = True
        if back > 0 and own == end:
            ended = True
        joined ^= own * multipliers[np.uint64(back)]
    row = joined % sizes[hashed] + offsets[hashed]
    y[token, i] = table[np.uint64(row), i % width] if is_known else np.float32(np.nan)
