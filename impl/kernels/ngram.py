"""Embeddings of the newest tokens together: which rows of a table an n-gram is hashed to.

Rules
- The token itself and those before it stand in the cells that it sees, in order; before the first stands `end`, and a token `end` hides
  what is before it.
- A cell that holds no token (nothing wrote it) gives NaN: it must show.
Source: Transformers' Qwen4ExpForCausalLM, whose hash is that of Bloom embeddings with exclusive or.
"""

import numpy as np

from . import kernel
from .attention import Sight
from .rows import copy_row


@kernel
def embed_ngrams(
    cell_tokens: np.ndarray,
    sight: Sight,
    start: int,
    multipliers: np.ndarray,
    sizes: np.ndarray,
    offsets: np.ndarray,
    end: int,
    n_vocab: int,
    table: np.ndarray,
    y: np.ndarray,
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
    width, hashes = table.shape[1], sizes.size
    of_each = hashes // (multipliers.size - 1)
    for token in range(y.shape[0]):
        first, length = sight.first[start + token], sight.length[start + token]
        joined, ended, is_known = np.int64(0), False, True
        for back in range(multipliers.size):
            own = np.int64(end)
            if back < length and not ended:
                held = cell_tokens[sight.listed[first + length - 1 - back]]
                if held >= 0 and held < n_vocab:
                    own = np.int64(held)
                else:
                    is_known = False
            else:
                ended = True
            if back > 0 and own == end:
                ended = True
            joined ^= own * multipliers[back]
            for hashed in range((back - 1) * of_each, back * of_each):  # none for the token alone
                result = y[token, hashed * width : (hashed + 1) * width]
                if is_known:
                    copy_row(table[joined % sizes[hashed] + offsets[hashed]], result)
                else:
                    for i in range(width):
                        result[i] = np.float32(np.nan)
