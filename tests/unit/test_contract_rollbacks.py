"""How many tokens a target must be able to take back: the arithmetic of every guarantee over series of operations.

Rules
- A row is a program and, for every guarantee, the largest n for which `rollback 0 n` must be accepted after it (short of the whole log).
Source: docs/contract.md, "The rollback guarantee a target declares".
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statedrift.fuzz.execution import execute
from statedrift.oracle.contract import Checker
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.models import Model
from statedrift.spec.operations import Rollback
from statedrift.spec.programs import Program, parse_program

from tests.scripted_target import ScriptedTarget, declared

# n_rs_seq, program, promised by `draft`, promised by `any`
PROMISES = [
    # one decode
    (3, "decode 0:1", 0, 0),
    (3, "decode 0:2", 1, 1),
    (3, "decode 0:4", 3, 3),
    (3, "decode 0:9", 3, 3),
    (0, "decode 0:9", 0, 0),
    (3, "decode 0:2 0:3", 3, 3),
    # series of decodes
    (3, "decode 0:9; decode 0:1", 0, 3),
    (3, "decode 0:9; decode 0:3", 2, 3),
    (5, "decode 0:2; decode 0:1; decode 0:1", 0, 3),
    (5, "decode 0:1; decode 0:1; decode 0:1", 0, 2),
    (5, "decode 0:1; decode 0:4", 3, 4),
    (5, "decode 0:9; decode 1:3", 5, 5),
    (5, "decode 0:9 1:2", 5, 5),
    # rollbacks
    (5, "decode 0:9; rollback 0 2", 0, 3),
    (5, "decode 0:9; rollback 0 2; rollback 0 3", 0, 0),
    (5, "decode 0:9; rollback 0 2; decode 0:1", 0, 4),
    (5, "decode 0:9; rollback 0 2; decode 0:4", 3, 5),
    (5, "decode 0:9; rollback 0 8", 0, 0),
    (5, "decode 0:9; rollback 0 8; decode 0:3", 2, 3),
    (5, "decode 0:9; remove 0 7 -1", 0, 3),
    (5, "decode 0:9; remove 0 7 9", 0, 3),
    (5, "decode 0:9; remove 0 9 -1", 5, 5),
    (5, "decode 0:9; rollback 0 9; decode 0:4", 3, 3),
    (5, "decode 0:9; drop 0; decode 0:4", 3, 3),
    (5, "decode 0:9; drop 1", 5, 5),
    (5, "decode 0:9; decode 1:9; rollback 1 2", 5, 5),
    # share
    (5, "decode 0:9; share 0 1", 0, 5),
    (5, "decode 0:9; share 0 1; decode 0:3", 2, 5),
    (5, "decode 0:9; share 0 1; decode 1:3", 0, 5),
    (5, "decode 1:9; share 1 0", 0, 5),
    (5, "decode 1:3; decode 1:1; share 1 0", 0, 3),
    (5, "decode 0:9 1:2; share 1 0; decode 0:3", 2, 4),
    (5, "decode 0:9; share 1 2", 5, 5),
    (5, "decode 0:9; share 0 0", 5, 5),
    (5, "decode 0:9; share 0 1 0 9", 0, 5),
    # save and restore
    (5, "decode 0:9; save 0 a", 5, 5),
    (5, "decode 0:9; save 0 a; restore a 0", 0, 0),
    (5, "decode 0:9; save 0 a; restore a 1", 5, 5),
    (5, "decode 0:9; save 0 a; restore a 0; decode 0:3", 2, 3),
    (5, "decode 0:9; save 0 a partial; decode 0:1; restore a 0", 0, 0),
    (5, "decode 0:9; save_all a; restore_all a", 0, 0),
    # the others
    (5, "decode 0:9; keep 0", 5, 5),
    (5, "decode 0:9; keep 1; decode 0:4", 3, 3),
    (5, "decode 0:9; shift 0 4", 0, 5),
    (5, "decode 0:9; shift 1 4", 5, 5),
    (5, "decode 0:9; shift 0 4; decode 0:2", 1, 5),
    (5, "decode 0:9; clear; decode 0:3", 2, 2),
    (5, "decode 0:9; reopen n_rs_seq=2; decode 0:5", 2, 2),
    # cancel
    (5, "decode 0:9; cancel 0:4 at=2", 0, 0),
    (5, "decode 0:9; cancel 0:4 at=0", 0, 0),
    (5, "decode 0:9; cancel 0:4 at=2; decode 0:3", 2, 3),
    (5, "decode 0:9; cancel 1:4 at=2", 5, 5),
    (5, "decode 0:9; cancel 0:4 at=99", 3, 5),
    # coupled tokens: `draft` promises nothing, `any` counts them
    (5, "decode 0+1:9", 0, 5),
    (5, "decode 0:3; share 0 1; decode 0+1:4", 0, 5),
    (5, "decode 0:[1,2] 1:[1,2] 0+1:3", 0, 4),
    (5, "decode 0+1:4; decode 0:3", 2, 5),
]  # fmt: skip


def promised(guarantee: str, n_rs_seq: int, text: str, sequence: int = 0, saves_snapshots: bool = False) -> int:
    """The largest n that must be accepted, short of the whole log, found by asking for every n."""
    program = parse_program(f"model lfm2; cache n_rs_seq={n_rs_seq}; {text}")
    length = 0
    demands: dict[int, str] = {}
    while not demands or length:
        token_count = len(demands) + 1
        target = ScriptedTarget(capabilities={"guarantee": guarantee, "saves_snapshots": saves_snapshots})
        asked = Program(program.model, program.cache, (*program.operations, Rollback(sequence, token_count)))
        run = execute(asked, target, target.progress)
        assert run.verdict is None
        length = run.steps[-1].positions[sequence][1] + 1
        demands[token_count] = run.steps[-1].demand
        if run.steps[-1].positions[sequence][1] == -1:
            break
    words = [demands[token_count] for token_count in sorted(demands)][:-1]  # the last one is the whole log
    count = words.count("must-accept")
    assert words == ["must-accept"] * count + ["may"] * (len(words) - count)
    return count


@pytest.mark.parametrize(("n_rs_seq", "text", "draft", "depth"), PROMISES)
def test_draft_promises_the_last_decode_of_its_own(n_rs_seq: int, text: str, draft: int, depth: int) -> None:
    assert promised("draft", n_rs_seq, text) == draft


@pytest.mark.parametrize(("n_rs_seq", "text", "draft", "depth"), PROMISES)
def test_any_promises_the_depth(n_rs_seq: int, text: str, draft: int, depth: int) -> None:
    assert promised("any", n_rs_seq, text) == depth


@pytest.mark.parametrize(("n_rs_seq", "text", "draft", "depth"), PROMISES[::6])
def test_none_promises_nothing_and_all_promises_everything(n_rs_seq: int, text: str, draft: int, depth: int) -> None:
    assert promised("none", n_rs_seq, text) == 0
    assert promised("all", n_rs_seq, text) >= depth


def test_all_promises_every_token_but_the_whole_log() -> None:
    assert promised("all", 0, "decode 0:9; share 0 1; shift 0 3") == 8


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("decode 0:9; save 0 a; restore a 0", 5),
        ("decode 0:9; rollback 0 2; save 0 a; decode 0:3; restore a 0", 3),
        ("decode 0:9; save 0 a; reopen n_rs_seq=2; restore a 0", 2),
        ("decode 0:9; save 0 a; restore a 0; decode 0:1", 5),
        ("decode 1:3; decode 0:9; save_all a; clear; restore_all a", 5),
        ("decode 0:9; save 0 a; clear; decode 0:1; restore a 1", 0),
    ],
)
def test_a_save_that_carries_snapshots_gives_its_depth_back(text: str, depth: int) -> None:
    assert promised("any", 5, text, saves_snapshots=True) == depth
    assert promised("draft", 5, text, saves_snapshots=True) == 0
    if "decode 0:1" not in text:
        assert promised("any", 5, text) == 0


def test_a_sharer_has_the_depth_of_its_source() -> None:
    assert promised("any", 5, "decode 0:9; rollback 0 2; share 0 1", sequence=1) == 3


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 8), st.integers(0, 3))
def test_depth_never_exceeds_the_snapshots_nor_the_log(counts: list[int], n_rs_seq: int, back: int) -> None:
    checker = Checker(CacheConfiguration(n_rs_seq=n_rs_seq), 64, declared(guarantee="any", n_rs_seq=n_rs_seq))
    for count in counts:
        checker.ledger.append(0, tuple(range(count)), checker.ledger.new_marks(count), True, n_rs_seq)
        if back:
            checker.ledger.cut(0, back)
        log = checker.ledger.logs[0]
        assert 0 <= log.depth <= min(n_rs_seq, max(0, len(log.tokens) - 1))


def test_the_engines_own_number_of_snapshots_counts_not_the_one_asked_for() -> None:
    target = ScriptedTarget(capabilities={"guarantee": "draft", "n_rs_seq": 1})
    program: Any = parse_program("model lfm2; cache n_rs_seq=5; decode 0:9; rollback 0 2")
    assert execute(program, target, target.progress).steps[-1].demand == "may"
    assert program.model == Model("lfm2")
