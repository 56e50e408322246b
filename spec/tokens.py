"""Tokens that a program does not spell out: a fixed function of sequence, index in the log, and salt.

Rules
- The function never changes: stored programs depend on it; golden tests pin it.
- Tokens of different sequences, indices and salts look unrelated, so that a mix-up shows.
"""

import functools
import hashlib
import struct

DIRTY_SALT = 1 << 31
"""The salt of the tokens that a `start=dirty` memory held before."""
DIRTY_TOKEN_COUNT = 17
_BLOCK_TOKENS = 32
_NUMBERS = struct.Struct(f"<{_BLOCK_TOKENS}H")


@functools.lru_cache(maxsize=8192)
def _block(sequence: int, block: int, salt: int, vocabulary_size: int) -> tuple[int, ...]:
    """Tokens `32 * block` .. `32 * block + 31`: the two-byte numbers of one hash, brought into the vocabulary."""
    digest = hashlib.blake2b(b"%d,%d,%d" % (sequence, block, salt), digest_size=_NUMBERS.size).digest()
    return tuple(number % vocabulary_size for number in _NUMBERS.unpack(digest))


def implicit_token(sequence: int, index: int, salt: int, vocabulary_size: int) -> int:
    """Token number `index` (from 0) of `sequence`'s log for `salt`, in 0..vocabulary_size-1 (at most 65,536)."""
    block, place = divmod(index, _BLOCK_TOKENS)
    return _block(sequence, block, salt, vocabulary_size)[place]


def implicit_tokens(sequence: int, start: int, count: int, salt: int, vocabulary_size: int) -> tuple[int, ...]:
    """Tokens `start` .. `start + count - 1` of `sequence` for `salt`."""
    block, place = divmod(start, _BLOCK_TOKENS)
    tokens = _block(sequence, block, salt, vocabulary_size)
    while len(tokens) < place + count:
        block += 1
        tokens += _block(sequence, block, salt, vocabulary_size)
    return tokens[place : place + count]
