"""Implicit tokens never change, and tokens of different places look unrelated."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statedrift.spec.tokens import DIRTY_SALT, implicit_token, implicit_tokens

GOLDEN = Path(__file__).parent / "golden" / "implicit_tokens.txt"
"""Lines of: sequence, start, count, salt, size of the vocabulary, a colon, the tokens."""


@pytest.mark.parametrize("line", GOLDEN.read_text().splitlines())
def test_implicit_tokens_never_change(line: str) -> None:
    place, _, tokens = line.partition(":")
    assert implicit_tokens(*map(int, place.split())) == tuple(map(int, tokens.split()))


@given(st.integers(0, 255), st.integers(0, 400), st.integers(1, 80), st.integers(0, 1 << 32), st.integers(1, 65_536))
def test_a_token_depends_on_its_place_alone(sequence: int, start: int, count: int, salt: int, vocabulary_size: int) -> None:
    whole = implicit_tokens(sequence, 0, start + count, salt, vocabulary_size)
    assert implicit_tokens(sequence, start, count, salt, vocabulary_size) == whole[start:]
    assert implicit_token(sequence, start, salt, vocabulary_size) == whole[start]
    assert all(0 <= token < vocabulary_size for token in whole)


@pytest.mark.parametrize("other", [(1, 0), (0, 1), (0, DIRTY_SALT)])
def test_other_sequences_and_salts_have_other_tokens(other: tuple[int, int]) -> None:
    mine = implicit_tokens(0, 0, 1000, 0, 64)
    theirs = implicit_tokens(other[0], 0, 1000, other[1], 64)
    equal = sum(one == two for one, two in zip(mine, theirs, strict=True))
    assert equal <= 40  # 1000 / 64 = 16 by chance


def test_every_token_of_the_vocabulary_is_about_as_frequent() -> None:
    counts = Counter(implicit_tokens(0, 0, 64_000, 0, 64))
    assert len(counts) == 64
    assert 800 <= min(counts.values()) <= max(counts.values()) <= 1200


def test_a_log_does_not_repeat_with_the_length_of_a_block() -> None:
    tokens = implicit_tokens(0, 0, 320, 0, 64)
    blocks = {tokens[start : start + 32] for start in range(0, 320, 32)}
    assert len(blocks) == 10
