"""The contract, row by row: what is asked of every operation, that a right answer passes, and what every wrong answer is called.

Rules
- A row is a program whose last operation is the one that the contract says something about.
- A perfect target answers; what it answers otherwise is scripted. Nothing here looks at output rows: answers and positions only.
Source: docs/contract.md.
"""

from typing import Any, NamedTuple, get_args

import pytest
from statedrift.fuzz.execution import Run, execute
from statedrift.spec.operations import AnyOperation, Clear, Damage, Keep, Reopen, RestoreAll, sequences_of
from statedrift.spec.programs import parse_program
from statedrift.spec.verdicts import ACCEPTED, Outcome, Verdict

from tests.scripted_target import (
    ATTENTION_ONLY,
    Lie,
    ScriptedTarget,
    and_grow,
    call_it_cancelled,
    do_it,
    do_nothing,
    fail,
    put,
    refuse,
    refuse_and_grow,
    refuse_but_do,
    throw,
    walk,
)  # fmt: skip

MUST, MAY, NO, SKIP, UNDECLARED = "must-accept", "may", "must-refuse", "skip", "undeclared"


class Row(NamedTuple):
    """A program whose last operation is of interest.

    demand   what the contract asks of it
    changes  what the session declares otherwise than a perfect hybrid
    known    False: the sequence that it changes is unchecked before or after it
    """

    text: str
    demand: str
    changes: dict[str, Any] = {}  # noqa: RUF012  # never changed
    known: bool = True


DRAFT: dict[str, Any] = {"guarantee": "draft"}
PURE = "model mamba2; "
ROWS = [
    # decode
    Row("decode 0:3", MUST),
    Row("decode 0:1 2:3 0:2", MUST),
    Row("decode 0:2; rollback 0 1; decode 0:2/1", MUST, DRAFT),
    Row("decode 0:[5,9,9]", MUST),
    Row("decode 0:8", MUST, {"n_batch": 8}),
    Row("decode 0:9", UNDECLARED, {"n_batch": 8}),
    Row("decode 0:5 1:4", UNDECLARED, {"n_batch": 8}),
    Row("decode 0:3 outputs=embeddings", UNDECLARED, {"embeddings": False}),
    Row("cache outputs=embeddings; decode 0:3", UNDECLARED, {"embeddings": False}),
    Row("cache outputs=embeddings; decode 0:3 outputs=last", MUST, {"embeddings": False}),
    # capacity, each sequence its own
    Row("cache n_ctx=8; decode 0:8", MUST),
    Row("cache n_ctx=8; decode 0:9", MAY),
    Row("cache n_ctx=8; decode 0:6; decode 0:2", MUST),
    Row("cache n_ctx=8; decode 0:6; decode 0:2 0:1", MAY),
    Row("cache n_ctx=8; decode 0:8; decode 1:8 2:8 3:8", MUST),
    Row("cache n_ctx=8; decode 0:8; decode 1:1 0:1", MAY),
    Row("cache n_ctx=8; decode 0:8; rollback 0 3; decode 0:3/1", MUST),
    Row("cache n_ctx=8; decode 0:8; shift 0 5; rollback 0 1; decode 0:1", MUST),
    Row(PURE + "cache n_ctx=8; decode 0:300", MUST),
    # capacity, one pool: a shared token counts once
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:16", MUST),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:17", MAY),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:9; decode 1:7", MUST),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:9; decode 1:8", MAY),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:10; share 0 1; decode 1:6", MUST),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:10; share 0 1; decode 1:4; decode 0:2", MUST),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:10; share 0 1; decode 1:4; decode 0:3", MAY),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0+1:12; decode 0:4", MUST),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0+1:12; decode 0:2 1:3", MAY),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0+1:16", MUST),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:8; share 0 1; shift 1 1; decode 0:1", MAY),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:8; save 0 a; restore a 1; decode 0:1", MAY),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:10; share 0 1; drop 0; decode 0:6", MUST),
    # tokens of several sequences
    Row("decode 0+1:2", MUST),
    Row("decode 0+1:2", UNDECLARED, {"coupled": False}),
    Row("decode 0:3; share 0 1; decode 0+1:2", MUST),
    Row("decode 0:[1,2,3] 1:[1,2,3]; decode 0+1:2", MUST),
    Row("decode 0:[1,2] 1:[1,2] 0+1:3", MUST),
    Row("decode 0+1:3; decode 0:1; decode 0+1:1", NO),
    Row("decode 0:3; decode 0+1:1", NO),
    Row("decode 0:1 0+1:1", NO),
    Row("decode 0:3 1:3; decode 0+1:2", SKIP),
    Row("decode 0:[1,2,3] 1:[1,2,4]; decode 0+1:2", SKIP),
    Row("decode 0:[1] 1:[2] 0+1:1", SKIP),
    Row("decode 0:3; share 0 1; shift 1 2; decode 0+1:1", SKIP),
    Row("decode 0:[1,2] 1:[1,2,3,4]; shift 0 2; decode 0+1:1", SKIP),
    Row("decode 0:[1,2] 1:[1,2]; divide 0 1; decode 0+1:1", SKIP),
    Row("decode 0:[1,2]; divide 0 2; share 0 1; decode 0+1:1", MUST),
    Row("decode 0:5; share 0 1; remove 0 1 2; decode 0+1:1", SKIP, ATTENTION_ONLY),
    Row("decode 0:5; remove 0 1 2; decode 1+2:1 0:1", MAY, ATTENTION_ONLY),
    # rollback and drop
    Row("decode 0:5; rollback 0 4", MUST),
    Row("decode 0:5; rollback 0 5", MUST, {"guarantee": "none"}),
    Row("decode 0:5; rollback 0 99", MUST, {"guarantee": "none"}),
    Row("rollback 0 1", MUST, {"guarantee": "none"}),
    Row("decode 0:5; rollback 0 1", MAY, {"guarantee": "none"}),
    Row("decode 0:5; drop 0", MUST, {"guarantee": "none"}),
    Row("drop 0", MUST),
    Row("decode 0:4; decode 0:1; rollback 0 4", MAY, DRAFT),
    # remove
    Row("decode 0:5; remove 0 5 9", MUST),
    Row("decode 0:5; remove 0 9 -1", MUST),
    Row("decode 0:5; remove 0 3 3", MUST),
    Row("decode 0:5; remove 0 4 2", MUST),
    Row("decode 0:5; remove 0 -1 0", MUST),
    Row("remove 0 0 9", MUST),
    Row("remove 0 -1 -1", MUST),
    Row("decode 0:5; shift 0 10; remove 0 0 10", MUST),
    Row("decode 0:5; shift 0 10; remove 0 15 -1", MUST),
    Row("decode 0:5; remove 0 1 3", NO),
    Row("decode 0:5; remove 0 0 4", NO),
    Row("decode 0:5; remove 0 -1 1", NO),
    Row("decode 0:5; shift 0 10; remove 0 0 11", NO),
    Row("decode 0:5; remove 0 1 3", MAY, ATTENTION_ONLY, False),
    Row("decode 0:5; remove 0 3 -1", MUST, DRAFT),
    Row("decode 0:5; remove 0 3 5", MUST, DRAFT),
    Row("decode 0:5; remove 0 4 -1", MUST, DRAFT),
    Row("decode 0:5; remove 0 4 5", MUST, DRAFT),
    Row("decode 0:1; remove 0 0 1", MUST, {"guarantee": "none"}),
    Row("decode 0:5; remove 0 3 4", NO, DRAFT),
    Row("decode 0:5; remove 0 3 6", MUST, DRAFT),
    Row("decode 0:5; remove 0 1 -1", MAY, DRAFT),
    Row("decode 0:5; remove 0 0 -1", MUST, DRAFT),
    Row("decode 0:5; remove 0 -1 5", MUST, DRAFT),
    Row("decode 0:5; remove 0 0 99", MUST, {"guarantee": "none"}),
    Row("decode 0:5; shift 0 10; decode 0:3; remove 0 16 18", MUST, DRAFT),
    Row("decode 0:5; shift 0 10; remove 0 10 15", MUST, {"guarantee": "none"}),
    # share
    Row("decode 0:3; share 0 1", MUST),
    Row("decode 0:3 1:2; share 0 1", MUST),
    Row("decode 1:2; share 0 1", MUST),
    Row("share 0 1", MUST),
    Row("decode 0:3; share 0 0", MUST),
    Row("decode 0:3; rollback 0 1; share 0 1", MUST, DRAFT),
    Row("decode 0:3; share 0 1 0 3", MUST),
    Row("decode 0:3; share 0 1 -1 3", MUST),
    Row("decode 0:3; share 0 1 0 -1", MUST),
    Row("decode 0:3; share 0 1 0 9", MUST, {"partial_share": False}),
    Row("decode 0:3; shift 0 5; share 0 1 5 8", MUST),
    Row("decode 0:3; share 0 1 0 2", NO),
    Row("decode 0:3; share 0 1 1 -1", NO),
    Row("decode 0:3; shift 0 5; share 0 1 0 3", NO),
    Row("decode 0:3; share 0 1 0 2", MAY, ATTENTION_ONLY, False),
    Row("decode 0:3; share 0 1 0 2", UNDECLARED, {"partial_share": False}),
    # cancel
    Row("decode 0:3; cancel 0:4 1:2 at=3", MAY),
    Row("decode 0:3; cancel 0:4 at=99", MAY),
    Row("cancel 0:4 at=0", MAY),
    Row("cancel 0:4 at=1", UNDECLARED, {"cancel": False}),
    Row("cancel 0:9 at=1", UNDECLARED, {"n_batch": 8}),
    Row("decode 0:[1] 1:[2]; cancel 0+1:2 at=1", SKIP),
    Row("cache outputs=embeddings; cancel 0:9 at=1", UNDECLARED, {"embeddings": False}),
    # keep, clear
    Row("decode 0:3 1:2 2:2; keep 1", MUST),
    Row("keep 1", MUST),
    Row("decode 0:3 1:2; clear", MUST),
    Row("clear", MUST),
    # shift
    Row("decode 0:3; shift 0 5", MAY),
    Row("decode 0:3; shift 0 5; shift 0 -5", MAY),
    Row("decode 0:3; shift 0 5; shift 0 -6", SKIP),
    Row("decode 0:3; shift 0 -1", SKIP),
    Row("shift 0 5", SKIP),
    Row("decode 0:3; shift 0 2000000000", SKIP),
    Row("decode 0:3; shift 0 5", UNDECLARED, {"shift": False}),
    # divide
    Row("decode 0:5; divide 0 2", MAY),
    Row("divide 0 2", SKIP),
    Row("decode 0:5; divide 0 2", UNDECLARED, {"divide": False}),
    Row("decode 0:5; divide 0 2; rollback 0 1", SKIP),
    Row("decode 0:5; divide 0 2; rollback 0 5", SKIP),
    Row("decode 0:5; divide 0 2; remove 0 1 2", SKIP),
    Row("decode 0:5; divide 0 2; shift 0 3", SKIP),
    Row("decode 0:5; divide 0 2; share 0 1 0 2", SKIP),
    Row("decode 0:5; divide 0 2; decode 0:2; rollback 0 1", SKIP, DRAFT),
    Row("decode 0:5; divide 0 2; share 0 1; rollback 1 1", SKIP),
    Row("decode 0:5; divide 0 2; save 0 a; restore a 1; rollback 1 1", SKIP),
    Row("decode 0:5; divide 0 2; divide 0 2", MAY),
    Row("decode 0:5; divide 0 2; decode 0:2", MUST),
    Row("decode 0:5; divide 0 2; drop 0", MUST),
    Row("decode 0:5; divide 0 2; drop 0; decode 0:4; rollback 0 1", MUST, DRAFT),
    # unchecked until empty
    Row("decode 0:5; remove 0 1 3; rollback 0 1", MAY, ATTENTION_ONLY, False),
    Row("decode 0:5; remove 0 1 3; remove 0 1 2", MAY, ATTENTION_ONLY, False),
    Row("decode 0:5; remove 0 1 3; remove 0 2 -1", MAY, ATTENTION_ONLY, False),
    Row("decode 0:5; remove 0 1 3; decode 0:2", MAY, ATTENTION_ONLY, False),
    Row("decode 0:5; remove 0 1 3; decode 1:2", MUST, ATTENTION_ONLY),
    Row("decode 0:5; remove 0 1 3; decode 1:2 0:1", MAY, ATTENTION_ONLY),
    Row("decode 0:5; remove 0 1 3; share 0 1; decode 1:2", MAY, ATTENTION_ONLY, False),
    Row("decode 0:5; share 0 1 0 2; decode 0:2", MUST, ATTENTION_ONLY),
    Row("decode 0:5; share 0 1 0 2; decode 1:2", MAY, ATTENTION_ONLY, False),
    Row("decode 0:5; remove 0 1 3; remove 0 0 -1", MUST, ATTENTION_ONLY),
    Row("decode 0:5; remove 0 1 3; drop 0", MUST, ATTENTION_ONLY),
    Row("decode 0:5; remove 0 1 3; drop 0; decode 0:2", MUST, ATTENTION_ONLY),
    Row("decode 0:5; remove 0 1 3; remove 0 0 9; decode 0:2", MUST, ATTENTION_ONLY),
    Row("decode 0:5; remove 0 1 3; keep 1; decode 0:2", MUST, ATTENTION_ONLY),
    Row("decode 0:5; remove 0 1 3; clear; decode 0:2", MUST, ATTENTION_ONLY),
    Row("decode 0:5; remove 0 1 3; share 1 0; decode 0:2", MUST, ATTENTION_ONLY),
    Row("decode 0:5; remove 0 1 3; save 0 a; restore a 1; decode 1:1", MAY, ATTENTION_ONLY, False),
    Row("decode 0:5; shift 0 4; remove 0 5 7; shift 0 -1", SKIP, ATTENTION_ONLY),
    # save
    Row("save 0 a", MUST),
    Row("decode 0:3; save 0 a", MUST),
    Row("decode 0:3; rollback 0 1; save 0 a", MUST, DRAFT),
    Row("decode 0:3; share 0 1; save 1 a", MUST),
    Row("decode 0:3; rollback 0 1; share 0 1; decode 1:2; save 0 a", MUST, DRAFT),
    Row("decode 0:3; divide 0 2; save 0 a", MUST),
    Row("decode 0:3; save 0 a partial", MUST),
    Row("decode 0:3; save 0 a device", MUST),
    Row("decode 0:3; save 0 a partial", UNDECLARED, {"partial": False}),
    Row("decode 0:3; save 0 a device", UNDECLARED, {"device": False}),
    Row("decode 0:3; save 0 a partial device", UNDECLARED, {"device": False}),
    Row("decode 0:3; save 0 a partial device", UNDECLARED, {"partial": False}),
    Row("decode 0:3; save_all a", MUST),
    Row("save_all a", MUST),
    Row("save_all a", UNDECLARED, {"save_all": False}),
    # restore of a whole save
    Row("decode 0:3; save 0 a; restore a 0", MUST),
    Row("decode 0:3; save 0 a; restore a 1", MUST),
    Row("decode 0:3 1:5; save 0 a; restore a 1", MUST),
    Row("decode 0:3; save 0 a; decode 0:4; restore a 0", MUST),
    Row("decode 0:3; rollback 0 1; save 0 a; restore a 1", MUST, DRAFT),
    Row("decode 0:3; save 0 a; rollback 0 1; restore a 0", MUST, DRAFT),
    Row("save 0 a; decode 1:2; restore a 1", MUST),
    Row("decode 0:3; save 0 a; reopen; restore a 1", MUST),
    Row("decode 0:3; save 0 a; reopen n_rs_seq=0 n_ubatch=8 start=dirty; restore a 1", MUST),
    Row("decode 0:3; save 0 a; reopen n_seq_max=2; restore a 1", MAY),
    Row("decode 0:3; save 0 a; reopen unified=1; restore a 1", MAY),
    Row("decode 0:3; save 0 a; reopen n_seq_max=2; reopen n_seq_max=4; restore a 1", MUST),
    Row("decode 3:3; save 3 a; reopen n_seq_max=2; restore a 1", MAY),
    Row("restore a 0", SKIP),
    Row("decode 0:3; save_all a; restore a 0", SKIP),
    Row("decode 0:5; remove 0 1 3; save 0 a; restore a 1", MAY, ATTENTION_ONLY, False),
    # room
    Row("cache n_ctx=16; decode 0:10; save 0 a; reopen n_ctx=10; restore a 0", MUST),
    Row("cache n_ctx=16; decode 0:10; save 0 a; reopen n_ctx=9; restore a 0", MAY),
    Row(PURE + "cache n_ctx=16; decode 0:10; save 0 a; reopen n_ctx=9; restore a 0", MUST),
    Row("cache n_ctx=16; decode 0:10 1:2; save_all a; reopen n_ctx=9; restore_all a", MAY),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:8; save 0 a; restore a 1", MUST),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:9; save 0 a; restore a 1", MAY),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:9; save 0 a; restore a 0", MUST),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:9; share 0 1; save 1 a; restore a 1", MAY),
    Row("cache n_ctx=8 unified=1; decode 3:12; save 3 a; drop 3; decode 0:20; share 0 1; share 0 2; restore a 3", MUST),
    Row("cache n_ctx=8 unified=1; decode 3:12; save 3 a; drop 3; decode 0:21; share 0 1; share 0 2; restore a 3", MAY),
    # restore of a device-bound save
    Row("decode 0:3; save 0 a device; restore a 1", MUST),
    Row("decode 0:3; save 0 a device; save 1 b device; restore a 1", MUST),
    Row("decode 0:3; save 0 a device; save 0 b; restore a 1", MUST),
    Row("decode 0:3; save 0 a device; save 0 b device; restore b 1", MUST),
    Row("decode 0:3; save 0 a device; save 0 a device; restore a 1", MUST),
    Row("decode 0:3; save 0 a device; save 0 b device; restore a 1", SKIP),
    Row("decode 0:3; save 0 a device; save 0 b partial device; restore a 1", SKIP),
    Row("decode 0:3; save 0 a device; reopen; restore a 1", SKIP),
    # restore of a partial save
    Row("decode 0:3; save 0 a partial; restore a 0", MUST),
    Row("decode 0:3; save 0 a partial device; restore a 0", MUST),
    Row("decode 0:3; save 0 a partial; decode 0:2; restore a 0", MUST),
    Row("decode 0:3; save 0 a partial; decode 0:4; rollback 0 3; restore a 0", MUST, DRAFT),
    Row("decode 0:3; save 0 a partial; decode 0:2; rollback 0 2; restore a 0", MUST, DRAFT),
    Row("decode 0:3; share 0 1; save 1 a partial; decode 1:2; share 0 1; restore a 1", MUST),
    Row("save 0 a partial; restore a 0", MUST),
    Row("save 0 a partial; decode 0:3; restore a 0", MUST),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:9; share 0 1; save 1 a partial; decode 1:2; restore a 1", MUST),
    Row("decode 0:3; save 0 a partial; restore a 1", SKIP),
    Row("decode 0:3; share 0 1; save 0 a partial; restore a 1", SKIP),
    Row("decode 0:3; save 0 a partial; rollback 0 1; restore a 0", SKIP, DRAFT),
    Row("decode 0:3; save 0 a partial; rollback 0 1; decode 0:1; restore a 0", SKIP, DRAFT),
    Row("decode 0:3; save 0 a partial; drop 0; decode 0:3; restore a 0", SKIP),
    Row("decode 0:3; save 0 a partial; keep 1; decode 0:3; restore a 0", SKIP),
    Row("decode 0:3; save 0 a partial; clear; decode 0:3; restore a 0", SKIP),
    Row("decode 0:3; save 0 a partial; reopen; decode 0:3; restore a 0", SKIP),
    Row("decode 0:3 1:4; save 0 a partial; share 1 0; restore a 0", SKIP),
    Row("decode 0:3; save 0 a partial; shift 0 2; restore a 0", SKIP),
    Row("decode 0:3; save 0 a partial; divide 0 2; restore a 0", SKIP),
    Row("decode 0:5; save 0 a partial; decode 0:2; remove 0 5 6; restore a 0", SKIP, ATTENTION_ONLY),
    # the whole session
    Row("decode 0:3 1:2; save_all a; restore_all a", MUST),
    Row("decode 0:3 1:2; save_all a; clear; restore_all a", MUST),
    Row("decode 0:3 1:2; save_all a; reopen; decode 2:4; restore_all a", MUST),
    Row("decode 0:3 1:2; save_all a; reopen n_seq_max=2; restore_all a", MAY),
    Row("decode 0:3; save_all a; reopen n_seq_max=6; restore_all a", MAY),
    Row("decode 0:5 1:2; remove 0 1 3; save_all a; restore_all a", MAY, ATTENTION_ONLY, False),
    Row("decode 0:3; save_all a; restore_all a", UNDECLARED, {"save_all": False}),
    Row("decode 0:3; save 0 a; restore_all a", SKIP),
    Row("restore_all a", SKIP),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:8; share 0 1; save_all a; restore_all a", MUST),
    Row("cache n_ctx=8 n_seq_max=2 unified=1; decode 0:9; share 0 1; save_all a; restore_all a", MAY),
    # damage
    Row("decode 0:3; save 0 a; damage a truncate 7", MUST),
    Row("damage a truncate 7", SKIP),
    Row("decode 0:3; save 0 a; damage a truncate 100000", SKIP),
    Row("decode 0:3; save 0 a; damage a flip 100000", SKIP),
    Row("decode 0:3; save 0 a; damage a truncate 7; restore a 1", NO),
    Row("decode 0:3; save 0 a; damage a foreign; restore a 1", NO),
    Row("decode 0:3; save 0 a; damage a header; restore a 1", MAY, {}, False),
    Row("decode 0:3; save 0 a; damage a flip 40; restore a 1", MAY, {}, False),
    Row("decode 0:3; save 0 a; damage a flip 40; damage a flip 40; restore a 1", MUST),
    Row("decode 0:3; save 0 a; damage a flip 40; damage a flip 41; damage a flip 40; damage a flip 41; restore a 1", MUST),
    Row("decode 0:3; save 0 a; damage a flip 40; damage a flip 41; restore a 1", MAY, {}, False),
    Row("decode 0:3; save 0 a; damage a flip 40; damage a flip 40; damage a truncate 7; restore a 1", NO),
    Row("decode 0:3; save 0 a; damage a truncate 7; damage a truncate 7; restore a 1", NO),
    Row("decode 0:3; save 0 a; damage a header; damage a foreign; restore a 1", NO),
    Row("decode 0:3; save 0 a; damage a foreign; damage a flip 40; restore a 1", MAY, {}, False),
    Row("decode 0:3; save 0 a; damage a header; damage a header; restore a 1", MAY, {}, False),
    Row("decode 0:3; save 0 a; damage a truncate 7; save 0 a; restore a 1", MUST),
    Row("decode 0:3; save 0 a; damage a truncate 7; reopen n_seq_max=2; restore a 1", NO),
    Row("decode 0:3; save 0 a partial; damage a truncate 7; restore a 0", NO),
    Row("decode 0:3; save 0 a device; damage a truncate 7; reopen; restore a 1", SKIP),
    Row("decode 0:3; save_all a; damage a truncate 7; restore_all a", NO),
    Row("decode 0:3; save_all a; damage a foreign; restore_all a", NO),
    Row("decode 0:3; save_all a; damage a header; restore_all a", MAY, {}, False),
    # reopen
    Row("decode 0:3; reopen", MUST),
    Row("decode 0:3; reopen n_seq_max=2; decode 0:3", MUST),
    *(
        Row(f"decode 0:3; save 3 a; reopen n_seq_max=2; {lost}", SKIP)
        for lost in (
            "decode 3:1", "decode 0:1 3:1", "cancel 2:1 at=0", "rollback 2 1", "remove 2 0 1", "drop 2", "share 0 2", "share 2 0",
            "keep 2", "shift 2 1", "divide 2 2", "save 2 b", "restore a 2",
        )
    ),
    Row("reopen n_ctx=8; decode 0:9", MAY),
    Row("decode 0:9; reopen n_seq_max=6; decode 5:1", MUST),
]  # fmt: skip
ANSWER_OF = {MUST: {"accepted"}, NO: {"refused"}, SKIP: {"skipped"}, UNDECLARED: {"refused"}, MAY: {"accepted", "refused", "cancelled"}}


def rows(chosen: list[Row]) -> Any:
    return pytest.mark.parametrize(
        "row", chosen, ids=lambda row: f"{row.text}" + "".join(f" {key}={row.changes[key]}" for key in row.changes)
    )


def last_operation(row: Row) -> AnyOperation:
    return parse_program(row.text if row.text.startswith("model") else f"model lfm2; {row.text}").operations[-1]


# those whose last operation is one call of the session
SENT = [row for row in ROWS if row.demand in (MUST, MAY, NO) and not isinstance(last_operation(row), Reopen | Damage)]


def last_verdict(row: Row, lie: Lie) -> tuple[Verdict | None, Run]:
    """What comes of a row when its last operation is answered by a lie: the verdict, which is of the last operation or none."""
    run, _ = walk(row.text, {-1: lie}, **row.changes)
    assert run.verdict is None or run.verdict.operation_index == len(run.steps) - 1
    return run.verdict, run


def last_sequence(row: Row) -> int:
    return len(walk(row.text, **row.changes)[0].steps[-1].positions) - 1


def moves_something(row: Row) -> bool:
    """Whether a right answer to the last operation changes a position."""
    run, _ = walk(row.text, **row.changes)
    before = run.steps[-2].positions if len(run.steps) > 1 else ((-1, -1),) * len(run.steps[-1].positions)
    return run.steps[-1].positions != before


# --- what is asked, and a right answer --------------------------------------------------------------------------------------


@rows(ROWS)
def test_the_contract_asks_what_its_table_says_and_a_right_answer_passes(row: Row) -> None:
    run, _ = walk(row.text, **row.changes)
    assert run.verdict is None
    assert run.steps[-1].demand == row.demand
    assert run.steps[-1].outcome.word in ANSWER_OF[row.demand]


@rows([row for row in ROWS if row.demand in (SKIP, UNDECLARED)])
def test_what_is_skipped_or_undeclared_reaches_no_session(row: Row) -> None:
    run, target = walk(row.text, **row.changes)
    assert not [call for call in target.calls if call[0] == len(run.steps) - 1]


# --- wrong answers -----------------------------------------------------------------------------------------------------------


@rows([row for row in SENT if row.demand == MUST])
def test_refusing_what_must_be_accepted_is_a_bad_refusal(row: Row) -> None:
    verdict, _ = last_verdict(row, refuse)
    assert verdict is not None
    assert (verdict.kind, verdict.relation) == ("bad-refusal", "self")


@rows([row for row in SENT if row.demand == NO])
def test_accepting_what_must_be_refused_is_a_false_success(row: Row) -> None:
    verdict, _ = last_verdict(row, do_nothing)
    assert verdict is not None
    assert (verdict.kind, verdict.relation) == ("false-success", "self")


@rows([row for row in SENT if row.demand == MAY])
def test_refusing_what_may_be_refused_is_fine(row: Row) -> None:
    verdict, run = last_verdict(row, refuse)
    assert verdict is None
    assert run.steps[-1].outcome.word == "refused"


@rows(SENT)
def test_an_error_is_a_bad_refusal_whatever_was_asked(row: Row) -> None:
    verdict, _ = last_verdict(row, fail)
    assert verdict is not None
    assert verdict.kind == "bad-refusal"
    assert "code 7" in verdict.reason


@rows(SENT)
def test_an_exception_is_an_error(row: Row) -> None:
    verdict, run = last_verdict(row, throw)
    assert verdict is not None
    assert verdict.kind == "bad-refusal"
    assert run.steps[-1].outcome.word == "error"
    assert "RuntimeError: scripted" in run.steps[-1].outcome.detail


@rows([row for row in SENT if row.demand != NO and row.known and moves_something(row)])
def test_saying_yes_and_doing_nothing_is_a_false_success(row: Row) -> None:
    verdict, _ = last_verdict(row, do_nothing)
    assert verdict is not None
    assert verdict.kind == "false-success"
    assert verdict.sequence is not None


@rows([row for row in SENT if row.demand in (MAY, NO)])
def test_a_refusal_that_changes_another_sequence_is_a_partial_effect(row: Row) -> None:
    verdict, _ = last_verdict(row, refuse_and_grow(-1))  # no row changes the last sequence
    assert verdict is not None
    assert verdict.kind == "partial-effect"


@rows([row for row in SENT if row.demand == MAY and row.known and moves_something(row)])
def test_a_refusal_that_does_it_all_the_same_is_a_partial_effect(row: Row) -> None:
    verdict, _ = last_verdict(row, refuse_but_do)
    assert verdict is not None
    assert (verdict.kind, verdict.relation) == ("partial-effect", "self")


@rows([row for row in SENT if row.demand == MAY and not row.known])
def test_of_an_unchecked_sequence_nothing_is_judged(row: Row) -> None:
    for lie in (do_nothing, refuse, do_it):
        assert last_verdict(row, lie)[0] is None


# one more token in the last sequence, which the last operation neither names nor empties
ALONE = [
    row for row in SENT
    if row.demand == MUST and last_sequence(row) not in sequences_of(last_operation(row)) and not isinstance(last_operation(row), Keep | Clear | RestoreAll)
]  # fmt: skip


@rows(ALONE)
def test_an_operation_that_moves_another_sequence_leaves_a_wrong_position(row: Row) -> None:
    verdict, _ = last_verdict(row, and_grow(last_sequence(row)))
    assert verdict is not None
    assert (verdict.kind, verdict.sequence) == ("wrong-position", last_sequence(row))
    named = sequences_of(last_operation(row))
    assert verdict.relation == ("other" if named else "self")


@rows([row for row in SENT if row.demand == MUST])
def test_an_operation_that_nobody_cancelled_cannot_be_cancelled(row: Row) -> None:
    verdict, _ = last_verdict(row, call_it_cancelled)
    assert verdict is not None
    assert verdict.kind == "bad-refusal"


# --- effects that are not whole ----------------------------------------------------------------------------------------------

EFFECTS = [
    # program, what the last operation leaves instead, kind, sequence, relation
    ("decode 0:3; decode 0:3", {0: 5}, "wrong-position", 0, "self"),
    ("decode 0:3; decode 0:3 1:2", {0: 6}, "false-success", 1, "self"),
    ("decode 0:5; rollback 0 2", {0: 4}, "wrong-position", 0, "self"),
    ("decode 0:5; rollback 0 2", {0: 0}, "wrong-position", 0, "self"),
    ("decode 0:5; remove 0 3 -1", {0: 5}, "false-success", 0, "self"),
    ("decode 0:5; remove 0 9 -1", {0: 0}, "wrong-position", 0, "self"),
    ("decode 0:5; drop 0", {0: 1}, "wrong-position", 0, "self"),
    ("decode 0:5 1:2; share 0 1", {1: 4}, "wrong-position", 1, "self"),
    ("decode 0:5 1:2; share 0 1", {0: 2, 1: 5}, "wrong-position", 0, "self"),
    ("decode 0:5 1:2; share 0 1", {1: 2}, "false-success", 1, "self"),
    ("decode 1:2; share 0 1", {1: 2}, "false-success", 1, "self"),
    ("decode 0:5; share 0 0", {0: 0}, "wrong-position", 0, "self"),
    ("decode 0:5 1:2 2:3; keep 1", {0: 0, 2: 3}, "false-success", 2, "other"),
    ("decode 0:5 1:2 2:3; keep 1", {0: 0, 1: 0, 2: 0}, "wrong-position", 1, "self"),
    ("decode 0:5 1:2 2:3; keep 1", {0: 1, 2: 0}, "wrong-position", 0, "other"),
    ("decode 0:5 1:2; clear", {0: 0}, "false-success", 1, "self"),
    ("decode 0:5 1:2; clear", {0: 1, 1: 0}, "wrong-position", 0, "self"),
    ("decode 0:5; shift 0 3", {0: 7}, "wrong-position", 0, "self"),
    ("decode 0:5; divide 0 2", {0: 2}, "wrong-position", 0, "self"),
    ("decode 0:5; save 0 a", {0: 4}, "wrong-position", 0, "self"),
    ("decode 0:5; save 0 a; restore a 1", {1: 4}, "wrong-position", 1, "self"),
    ("decode 0:5; save 0 a; restore a 1", {0: 0, 1: 5}, "wrong-position", 0, "other"),
    ("decode 0:5; save_all a; decode 1:2; restore_all a", {1: 2}, "false-success", 1, "self"),
    ("decode 0:5; save_all a; decode 1:2; restore_all a", {0: 4, 1: 0}, "wrong-position", 0, "self"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "left", "kind", "sequence", "relation"), EFFECTS)
def test_an_effect_that_is_not_whole_is_named(text: str, left: dict[int, int], kind: str, sequence: int, relation: str) -> None:
    run, _ = walk(text, {-1: put(left, ACCEPTED)})
    assert run.verdict is not None
    assert (run.verdict.kind, run.verdict.sequence, run.verdict.relation) == (kind, sequence, relation)


def test_only_the_first_divergence_counts() -> None:
    run, _ = walk("decode 0:3; drop 0; keep 1; decode 0:1", {1: refuse, 2: and_grow(2)})
    assert run.verdict is not None
    assert (run.verdict.kind, run.verdict.operation_index, len(run.steps)) == ("bad-refusal", 1, 2)


# --- first positions ---------------------------------------------------------------------------------------------------------

FIRSTS = [
    # what is answered for a log at positions 0..2, changes, is it right
    ((0, 2), {}, True),
    ((2, 2), {}, True),
    ((1, 2), {}, True),
    ((-1, 2), {}, False),
    ((3, 2), {}, False),
    ((1, 2), {"windowed": True, **ATTENTION_ONLY}, True),
    ((1, 2), ATTENTION_ONLY, False),
    ((0, 2), ATTENTION_ONLY, True),
    ((0, -1), {}, False),
]


@pytest.mark.parametrize(("answer", "changes", "is_right"), FIRSTS)
def test_the_first_position_is_held_to_what_an_engine_can_know(answer: tuple[int, int], changes: dict[str, Any], is_right: bool) -> None:
    target = ScriptedTarget(capabilities=changes)
    target.positions_lie = lambda right: [answer, *right[1:]]
    verdict = execute(parse_program("model lfm2; decode 0:3"), target, target.progress).verdict
    assert (verdict is None) == is_right
    if verdict is not None:
        assert verdict.kind in ("wrong-position", "false-success")


# --- cancel ------------------------------------------------------------------------------------------------------------------

CANCELLED = [
    # lengths left after `decode 0:3 2:2; cancel 0:4 1:2 at=3` was cancelled; the kind, None when that is right
    ({}, None),
    ({0: 3}, None),
    ({0: 5}, None),
    ({0: 7, 1: 2}, None),
    ({0: 0, 1: 1}, None),
    ({0: 0, 1: 0}, None),
    ({0: 2}, "wrong-position"),
    ({0: 8}, "wrong-position"),
    ({1: 3}, "wrong-position"),
    ({2: 3}, "wrong-position"),
    ({2: 0}, "wrong-position"),
]


@pytest.mark.parametrize(("left", "kind"), CANCELLED)
def test_a_cancelled_decode_leaves_a_prefix_or_nothing(left: dict[int, int], kind: str | None) -> None:
    run, _ = walk("decode 0:3 2:2; cancel 0:4 1:2 at=3", {-1: put(left, Outcome("cancelled"))})
    assert (run.verdict.kind if run.verdict else None) == kind


@pytest.mark.parametrize("kept", range(5))
def test_going_on_after_a_cancel_is_asked_for_from_the_prefix(kept: int) -> None:
    run, target = walk(f"decode 0:3; cancel 0:4/7 at={kept}; decode 0:2")
    assert run.verdict is None
    batch = target.calls[-1][2][0]
    assert batch.positions.tolist() == [3 + kept, 4 + kept]
    cancelled, ordinary = target.calls[1][2][0], run.spans[-1]
    assert ordinary.log[3 : 3 + kept] == tuple(cancelled.tokens[:kept].tolist())


def test_the_relation_of_a_keep_that_empties_nothing_is_other() -> None:
    verdict, _ = last_verdict(Row("decode 0:1 1:1; keep 1", MUST), do_nothing)
    assert verdict is not None
    assert (verdict.kind, verdict.sequence, verdict.relation) == ("false-success", 0, "other")


def test_every_kind_of_operation_has_a_row() -> None:
    seen = {type(last_operation(row)) for row in ROWS}
    assert seen == set(get_args(AnyOperation))
