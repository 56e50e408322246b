"""Tokens that a program does not spell out: a fixed function of sequence, index in the log, and salt.

Rules
- The function never changes: stored programs depend on it; golden tests pin it.
- Tokens of different sequences, indices and salts look unrelated, so that a mix-up shows.
"""

import functools
import hashlib

DIRTY_SALT = 1 << 31
"""The salt of the tokens that a `start=dirty` memory held before."""
DIRTY_TOKEN_COUNT = 17
_BLOCK_TOKENS = 32


@functools.lru_cache(maxsize=8192)
def _block(sequence: int, block: int, salt: int) -> bytes:
    return hashlib.blake2b(b"%d,%d,%d" % (sequence, block, salt), digest_size=2 * _BLOCK_TOKENS).digest()


def implicit_token(sequence: int, index: int, salt: int, vocabulary_size: int) -> int:
    """Token number `index` (from 0) of `sequence`'s log for `salt`, in 0..vocabulary_size-1 (at most 65,536)."""
    block, place = divmod(index, _BLOCK_TOKENS)
    digest = _block(sequence, block, salt)
    return int.from_bytes(digest[2 * place : 2 * place + 2], "little") % vocabulary_size


def implicit_tokens(sequence: int, start: int, count: int, salt: int, vocabulary_size: int) -> tuple[int, ...]:
    """Tokens `start` .. `start + count - 1` of `sequence` for `salt`."""
    return tuple(implicit_token(sequence, index, salt, vocabulary_size) for index in range(start, start + count))
