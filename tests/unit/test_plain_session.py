"""A plain session: the calls of the protocol in a cache's few words, and a class of sessions as a target.

Source: targets/plain.py; docs/pytest.md, "A whole one".
"""

from typing import Any

import numpy as np
import pytest
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.errors import UsageError
from statedrift.spec.models import Model
from statedrift.spec.operations import OPEN
from statedrift.spec.target import Batch, Session, Target
from statedrift.spec.verdicts import ACCEPTED, Outcome
from statedrift.targets.plain import OpenedTarget, PlainSession, as_target
from statedrift.targets.registry import load_target


class Lists(PlainSession):
    """Logs alone; a row is full of the newest token."""

    families = ("mamba2",)

    def __init__(self, model: Model, configuration: CacheConfiguration) -> None:
        super().__init__(model, configuration)
        self.logs: list[list[int]] = [[] for _ in range(self.n_seq_max)]
        self.calls: list[tuple[int, int]] = []

    def append(self, sequence: int, tokens: np.ndarray) -> np.ndarray:
        self.calls.append((sequence, len(tokens)))
        self.logs[sequence] += tokens.tolist()
        return np.repeat(tokens[:, None], self.n_vocab, axis=1)

    def length(self, sequence: int) -> int:
        return len(self.logs[sequence])

    def drop(self, sequence: int) -> None:
        self.logs[sequence] = []

    def copy(self, source: int, destination: int) -> None:
        self.logs[destination] = list(self.logs[source])


class GoesBack(Lists):
    guarantee = "all"

    def rollback(self, sequence: int, token_count: int) -> bool:
        del self.logs[sequence][-token_count:]
        return True

    def save(self, sequence: int, partial: bool, device: bool) -> tuple[Outcome, bytes]:
        return ACCEPTED, bytes(self.logs[sequence])


def opened(kind: type[Lists] = Lists) -> Any:
    return kind(Model("mamba2"), CacheConfiguration(n_seq_max=3))


def batch(tokens: list[int], sequences: list[int], wanted: list[bool] | None = None) -> Batch:
    positions = np.zeros(len(tokens), np.int32)
    asked = np.array(wanted or [True] * len(tokens))
    return Batch(np.array(tokens, np.int32), positions, tuple((sequence,) for sequence in sequences), asked, "all")


def test_neighbouring_tokens_of_a_sequence_are_appended_together_and_rows_keep_their_order() -> None:
    session = opened()
    decoded = session.decode(batch([5, 6, 7, 8], [0, 0, 1, 0], [False, True, True, True]))
    assert session.calls == [(0, 2), (1, 1), (0, 1)]
    assert decoded.outcome == ACCEPTED
    assert decoded.rows.dtype == np.float32
    assert decoded.rows[:, 0].tolist() == [6, 7, 8]
    assert list(session.positions()) == [(0, 2), (0, 0), (-1, -1)]


@pytest.mark.parametrize(
    ("start", "end", "word", "left"),
    [
        (0, OPEN, "accepted", 0), (-1, -1, "accepted", 0), (0, 6, "accepted", 0), (6, 9, "accepted", 6), (9, OPEN, "accepted", 6), (2, 2, "accepted", 6),
        (0, 3, "refused", 6), (2, 4, "refused", 6), (4, OPEN, "refused", 6), (4, 6, "refused", 6),
    ],
)  # fmt: skip
def test_a_range_is_nothing_everything_or_refused(start: int, end: int, word: str, left: int) -> None:
    session = opened()
    session.decode(batch([1] * 6, [0] * 6))
    assert session.remove(0, start, end).word == word
    assert session.length(0) == left


@pytest.mark.parametrize(("start", "end", "left"), [(4, OPEN, 4), (4, 6, 4), (5, 99, 5), (0, OPEN, 0)])
def test_a_range_at_the_end_is_a_rollback_where_the_cache_has_one(start: int, end: int, left: int) -> None:
    session = opened(GoesBack)
    session.decode(batch([1] * 6, [0] * 6))
    assert session.remove(0, start, end) == ACCEPTED
    assert session.length(0) == left


def test_share_keep_and_clear() -> None:
    session = opened()
    session.decode(batch([1, 2, 3], [0, 0, 1]))
    assert session.share(0, 2, OPEN, OPEN) == session.share(1, 1, OPEN, OPEN) == ACCEPTED
    assert session.logs == [[1, 2], [3], [1, 2]]
    assert session.keep(2) == ACCEPTED
    assert session.logs == [[], [], [1, 2]]
    assert session.clear(False) == ACCEPTED
    assert session.logs == [[], [], []]


def test_what_a_class_has_is_declared() -> None:
    plain, more = opened().capabilities, opened(GoesBack).capabilities
    assert (plain.guarantee, plain.save, plain.inspect, plain.coupled, plain.n_ctx) == ("none", False, False, False, 0)
    assert (more.guarantee, more.save) == ("all", True)
    assert (plain.recurrent, plain.attention) == (True, False)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda session: session.decode(batch([99_999], [0])), "tokens"),
        (lambda session: session.decode(batch([1, -1], [0, 0])), "tokens"),
        (lambda session: session.decode(batch([1, 1], [0, 3])), "sequence"),
        (lambda session: session.remove(-1, 0, OPEN), "sequence"),
        (lambda session: session.share(0, 3, OPEN, OPEN), "sequence"),
        (lambda session: session.keep(3), "sequence"),
    ],
)
def test_a_bad_argument_is_a_usage_error_and_nothing_happens(call: Any, name: str) -> None:
    session = opened()
    with pytest.raises(UsageError, match=f"`{name}`"):
        call(session)
    assert session.logs == [[], [], []]


def test_a_family_that_the_class_does_not_name_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="Lists runs mamba2, not lfm2"):
        Lists(Model("lfm2"), CacheConfiguration())


def test_a_class_or_a_function_that_opens_sessions_is_a_target() -> None:
    target = as_target(GoesBack)
    assert isinstance(target, Target)
    assert (target.name, target.families, target.isolated, target.poison) == ("GoesBack", ("mamba2",), False, False)
    session = target.open(Model("mamba2"), CacheConfiguration())
    assert isinstance(session, Session)
    by_function = as_target(lambda model, configuration: session)
    assert by_function is not None
    assert by_function.open(Model("mamba2"), CacheConfiguration()) is session
    assert as_target(target) is target
    assert as_target("numba") is as_target(7) is as_target(dict) is None


def test_a_class_of_sessions_is_found_by_name() -> None:
    found = load_target("statedrift.targets.plain:PlainSession")
    assert isinstance(found, OpenedTarget)
    assert found.name == "PlainSession"
