"""Sessions of target llamacpp: each operation does what the contract says where the engine is known to be right.

Rules
- The truth is a fresh decode of one sequence in the same engine; whether the engine computes the right model is tested elsewhere.
- The engine's faults are not tested here: programs with known verdicts are.
"""

import contextlib
import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.errors import UnavailableError, UsageError
from statedrift.spec.families import FAMILIES
from statedrift.spec.models import Model
from statedrift.spec.operations import OPEN, Outputs
from statedrift.spec.target import Batch, Session, Target
from statedrift.spec.tokens import implicit_tokens
from statedrift.spec.verdicts import ACCEPTED
from statedrift.targets import llamacpp
from statedrift.targets.llamacpp import TARGET

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python, which is not installed")
MODELLED = tuple(name for name in TARGET.families if name in FAMILIES)
TOLERANCE = 1e-4
FULL = tuple(int(token) for token in implicit_tokens(0, 0, 40, 0, 64))
Item = tuple[int | tuple[int, ...], Sequence[int], int]  # sequences, tokens, first position


@contextlib.contextmanager
def opened(family: str, model: Model | None = None, **keys: Any) -> Iterator[Session]:
    session = TARGET.open(model or Model(family), CacheConfiguration(**keys))
    try:
        yield session
    finally:
        session.close()


def batch_of(*items: Item, outputs: Outputs = "all", wanted: Sequence[bool] | None = None) -> Batch:
    tokens = [token for _, item, _ in items for token in item]
    positions = [first + index for _, item, first in items for index in range(len(item))]
    sequences = [ids if isinstance(ids, tuple) else (ids,) for ids, item, _ in items for _ in item]
    marks = np.ones(len(tokens), bool) if wanted is None else np.array(wanted, bool)
    return Batch(np.array(tokens, np.int32), np.array(positions, np.int32), tuple(sequences), marks, outputs)


def rows_of(session: Session, *items: Item, outputs: Outputs = "all") -> np.ndarray:
    decoded = session.decode(batch_of(*items, outputs=outputs))
    assert decoded.outcome == ACCEPTED
    assert decoded.rows is not None
    return decoded.rows


def recompute(family: str, log: Sequence[int], outputs: Outputs = "all") -> np.ndarray:
    with opened(family, n_seq_max=1, n_rs_seq=0) as session:
        return rows_of(session, (0, log, 0), outputs=outputs)


def error(rows: np.ndarray, truth: np.ndarray) -> float:
    assert rows.shape == truth.shape
    return float((np.abs(rows - truth).max(axis=1) / (1 + np.sqrt((truth**2).mean(axis=1)))).max())


@pytest.mark.parametrize("family", MODELLED)
def test_decoding_token_by_token_gives_the_rows_of_a_whole_decode(family: str) -> None:
    with opened(family) as session:
        single = np.concatenate([rows_of(session, (1, [token], position)) for position, token in enumerate(FULL)])
    assert error(single, recompute(family, FULL)) <= TOLERANCE


@settings(max_examples=30, deadline=None)
@given(
    family=st.sampled_from(("mamba2", "lfm2", "lfm2_swa", "nemotron_h", "qwen35")),  # others abort at some sizes: docs/findings
    cuts=st.sets(st.integers(1, len(FULL) - 1)),
    n_ubatch=st.integers(1, 64),
    outputs=st.sampled_from(("all", "embeddings")),
)
def test_rows_do_not_depend_on_how_a_log_is_cut(family: str, cuts: set[int], n_ubatch: int, outputs: Outputs) -> None:
    edges = [0, *sorted(cuts), len(FULL)]
    with opened(family, n_ubatch=n_ubatch, n_rs_seq=0) as session:
        rows = [rows_of(session, (0, FULL[start:end], start), outputs=outputs) for start, end in itertools.pairwise(edges)]
    assert error(np.concatenate(rows), recompute(family, FULL, outputs)) <= TOLERANCE


@pytest.mark.parametrize("family", MODELLED)
def test_rows_come_in_batch_order_when_sequences_are_mixed(family: str) -> None:
    first, second = FULL[:6], FULL[10:14]
    items: list[Item] = [(2, [first[0]], 0), (0, second[:3], 0), (2, first[1:5], 1), (0, second[3:], 3), (2, first[5:], 5)]
    with opened(family) as session:
        rows = rows_of(session, *items)
    mixed = [True, False, False, False, True, True, True, True, False, True]
    assert error(rows[np.array(mixed)], recompute(family, first)) <= TOLERANCE
    assert error(rows[~np.array(mixed)], recompute(family, second)) <= TOLERANCE


@pytest.mark.parametrize("outputs", ["all", "embeddings"])
def test_only_wanted_rows_are_returned(outputs: Outputs) -> None:
    wanted = [False, True, False, True, True]
    with opened("lfm2") as session:
        decoded = session.decode(batch_of((0, FULL[:5], 0), outputs=outputs, wanted=wanted))
    assert decoded.rows is not None
    assert error(decoded.rows, recompute("lfm2", FULL[:5], outputs)[wanted]) <= TOLERANCE


def test_logits_and_hidden_states_take_turns() -> None:
    with opened("lfm2") as session:
        hidden = rows_of(session, (0, FULL[:3], 0), outputs="embeddings")
        logits = rows_of(session, (0, FULL[3:5], 3))
        more = rows_of(session, (0, FULL[5:6], 5), outputs="embeddings")
    assert error(np.concatenate([hidden, more]), recompute("lfm2", FULL[:6], "embeddings")[[0, 1, 2, 5]]) <= TOLERANCE
    assert error(logits, recompute("lfm2", FULL[:5])[3:]) <= TOLERANCE


@pytest.mark.parametrize("family", ["lfm2", "lfm2_swa", "nemotron_h", "qwen35", "qwen4exp"])
def test_a_draft_rolled_back_is_forgotten(family: str) -> None:
    with opened(family) as session:
        rows_of(session, (0, FULL[:10], 0))
        rows_of(session, (0, [1, 2, 3, 4], 10))
        assert session.remove(0, 11, OPEN) == ACCEPTED
        assert session.positions()[0][1] == 10
        rows = rows_of(session, (0, FULL[20:23], 11))
    assert error(rows, recompute(family, [*FULL[:10], 1, *FULL[20:23]])[11:]) <= TOLERANCE


def test_a_rollback_without_a_snapshot_is_refused_and_changes_nothing() -> None:
    with opened("mamba2") as session:
        assert session.capabilities.guarantee == "none"
        rows_of(session, (0, FULL[:8], 0))
        assert session.remove(0, 6, OPEN).word == "refused"
        assert error(rows_of(session, (0, FULL[8:9], 8)), recompute("mamba2", FULL[:9])[8:]) <= TOLERANCE


@pytest.mark.parametrize("family", MODELLED)
def test_a_dropped_sequence_starts_anew(family: str) -> None:
    with opened(family) as session:
        rows_of(session, (0, FULL[:8], 0), (1, FULL[:2], 0))
        assert session.remove(0, 0, OPEN) == ACCEPTED
        assert session.positions()[0] == (-1, -1)
        assert session.positions()[1][1] == 1
        assert error(rows_of(session, (0, FULL[9:12], 0)), recompute(family, FULL[9:12])) <= TOLERANCE


@pytest.mark.parametrize("unified", [0, 1])
@pytest.mark.parametrize("family", MODELLED)
def test_a_share_is_a_copy_that_goes_its_own_way(family: str, unified: int) -> None:
    with opened(family, unified=unified) as session:
        rows_of(session, (0, FULL[:6], 0))
        assert session.share(0, 3, OPEN, OPEN) == ACCEPTED
        assert session.positions()[3] == session.positions()[0]
        rows = rows_of(session, (0, FULL[6:9], 6), (3, FULL[20:22], 6))
    assert error(rows[:3], recompute(family, FULL[:9])[6:]) <= TOLERANCE
    assert error(rows[3:], recompute(family, [*FULL[:6], *FULL[20:22]])[6:]) <= TOLERANCE


@pytest.mark.parametrize(("family", "unified"), [("mamba2", 0), ("mamba2", 1), ("lfm2", 1)])
def test_keep_empties_every_other_sequence(family: str, unified: int) -> None:
    with opened(family, unified=unified) as session:
        rows_of(session, (0, FULL[:3], 0), (1, FULL[:4], 0), (2, FULL[:5], 0))
        assert session.keep(1) == ACCEPTED
        assert [last for _, last in session.positions()] == [-1, 3, -1, -1]
        rows = rows_of(session, (1, FULL[4:6], 4), (2, FULL[7:9], 0))
    assert error(rows[:2], recompute(family, FULL[:6])[4:]) <= TOLERANCE
    assert error(rows[2:], recompute(family, FULL[7:9])) <= TOLERANCE


@pytest.mark.parametrize(
    "family", ["mamba2", "lfm2", "nemotron_h", "mamba", "jamba", "falcon_h1"]
)  # lfm2_swa: tests/cases/shift-with-a-window.drift
def test_a_shift_moves_positions_and_no_output(family: str) -> None:
    with opened(family) as session:
        rows_of(session, (0, FULL[:6], 0))
        assert session.shift(0, 17) == ACCEPTED
        assert session.positions()[0][1] == 22
        assert error(rows_of(session, (0, FULL[6:9], 23)), recompute(family, FULL[:9])[6:]) <= TOLERANCE


def test_positions_of_several_parts_are_neither_shifted_nor_divided() -> None:
    with opened("qwen35") as session:
        rows_of(session, (0, FULL[:6], 0))
        assert session.shift(0, 17).word == session.divide(0, 2).word == "refused"
        assert session.positions()[0][1] == 5


def test_a_division_divides_positions() -> None:
    with opened("mamba2") as session:
        rows_of(session, (0, FULL[:9], 0))
        assert session.divide(0, 3) == ACCEPTED
        assert session.positions()[0] == (2, 2)


@pytest.mark.parametrize("family", MODELLED)
def test_a_saved_sequence_goes_on_in_another_session(family: str) -> None:
    with opened(family) as session:
        rows_of(session, (2, FULL[:7], 0))
        outcome, blob = session.save(2, partial=False, device=False)
    assert outcome == ACCEPTED
    assert isinstance(blob, bytes)
    with opened(family) as session:
        rows_of(session, (1, FULL[30:34], 0))
        assert session.restore(1, blob, partial=False, device=False) == ACCEPTED
        assert session.positions()[1][1] == 6
        assert error(rows_of(session, (1, FULL[7:9], 7)), recompute(family, FULL[:9])[7:]) <= TOLERANCE


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("family", MODELLED)
def test_a_checkpoint_takes_back_what_came_after_it(family: str, partial: bool, device: bool) -> None:
    with opened(family) as session:
        rows_of(session, (0, FULL[:7], 0))
        outcome, blob = session.save(0, partial, device)
        assert outcome == ACCEPTED
        rows_of(session, (0, FULL[7:12], 7))
        assert session.restore(0, blob, partial, device) == ACCEPTED
        assert session.positions()[0][1] == 6
        assert error(rows_of(session, (0, FULL[20:22], 7)), recompute(family, [*FULL[:7], *FULL[20:22]])[7:]) <= TOLERANCE


@pytest.mark.parametrize("family", MODELLED)
def test_a_saved_session_comes_back_whole(family: str) -> None:
    with opened(family) as session:
        rows_of(session, (0, FULL[:7], 0), (3, FULL[:2], 0))
        outcome, blob = session.save_all()
        assert outcome == ACCEPTED
        rows_of(session, (0, FULL[:1], 7), (1, FULL[:1], 0))
        assert session.restore_all(blob) == ACCEPTED
        assert [last for _, last in session.positions()] == [6, -1, -1, 1]
        assert error(rows_of(session, (3, FULL[2:5], 2)), recompute(family, FULL[:5])[2:]) <= TOLERANCE


@pytest.mark.parametrize("family", MODELLED)
def test_a_truncated_blob_is_refused(family: str) -> None:
    with opened(family) as session:
        rows_of(session, (0, FULL[:7], 0))
        _, blob = session.save(0, partial=False, device=False)
        assert session.restore(1, blob[:-7], partial=False, device=False).word == "refused"


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("family", MODELLED)
def test_a_cleared_session_is_as_new(family: str, data: bool) -> None:
    with opened(family) as session:
        rows_of(session, (0, FULL[:7], 0), (3, FULL[:2], 0))
        assert session.clear(data) == ACCEPTED
        assert set(session.positions()) == {(-1, -1)}
        assert error(rows_of(session, (0, FULL[9:12], 0)), recompute(family, FULL[9:12])) <= TOLERANCE


@pytest.mark.parametrize("family", MODELLED)
def test_a_decode_cancelled_at_its_first_chance_returns_no_rows(family: str) -> None:
    with opened(family) as session:
        decoded = session.cancel(batch_of((0, FULL[:5], 0)), 0)
        assert decoded.outcome.word == "cancelled"
        assert decoded.rows is None


def test_a_decode_with_too_few_chances_is_an_ordinary_one_and_so_is_the_next() -> None:
    with opened("lfm2") as session:
        decoded = session.cancel(batch_of((0, FULL[:5], 0)), 100_000)
        assert decoded.outcome == ACCEPTED
        assert decoded.rows is not None
        assert error(decoded.rows, recompute("lfm2", FULL[:5])) <= TOLERANCE
        session.cancel(batch_of((1, FULL[:5], 0)), 3)
        assert session.decode(batch_of((0, FULL[5:6], 5))).outcome == ACCEPTED


def test_tokens_of_several_sequences_advance_each_of_them() -> None:
    with opened("lfm2", unified=1) as session:
        assert session.capabilities.coupled
        rows = rows_of(session, ((0, 2), FULL[:5], 0))
        after = rows_of(session, (0, FULL[5:7], 5), (2, FULL[20:21], 5))
        assert [last for _, last in session.positions()] == [6, -1, 5, -1]
    assert error(np.concatenate([rows, after[:2]]), recompute("lfm2", FULL[:7])) <= TOLERANCE
    assert error(after[2:], recompute("lfm2", [*FULL[:5], FULL[20]])[5:]) <= TOLERANCE


@pytest.mark.parametrize(("family", "unified"), [("lfm2", 0), ("mamba2", 0), ("mamba2", 1)])
def test_tokens_of_several_sequences_are_refused_where_not_declared(family: str, unified: int) -> None:
    with opened(family, unified=unified) as session:
        assert not session.capabilities.coupled
        assert session.decode(batch_of(((0, 1), FULL[:2], 0))).outcome.word == "refused"
        assert set(session.positions()) == {(-1, -1)}


def test_a_batch_above_the_limit_is_refused_before_the_engine_sees_it() -> None:
    with opened("lfm2", n_seq_max=1) as session:
        n_batch = session.capabilities.n_batch
        assert session.decode(batch_of((0, [1] * (n_batch + 1), 0))).outcome.word == "refused"
        assert session.positions() == [(-1, -1)]


@pytest.mark.parametrize(
    ("keys", "n_ctx"), [({"n_ctx": 5}, 256), ({"n_ctx": 300}, 512), ({"n_ctx": 100, "n_seq_max": 3, "unified": 1}, 170)]
)
def test_tokens_fit_the_capacity_that_is_reported(keys: dict[str, Any], n_ctx: int) -> None:
    with opened("lfm2", **keys) as session:
        assert session.capabilities.n_ctx == n_ctx
        for sequence, _ in enumerate(session.positions()):
            assert session.decode(batch_of((sequence, [sequence] * n_ctx, 0))).outcome == ACCEPTED


@pytest.mark.parametrize(
    ("family", "keys", "expected"),
    [
        ("lfm2", {}, {"guarantee": "draft", "n_rs_seq": 3, "recurrent": True, "attention": True, "n_ctx": 256}),
        ("lfm2", {"n_rs_seq": 0}, {"guarantee": "none", "n_rs_seq": 0}),
        ("lfm2", {"n_ctx": 512}, {"windowed": False, "n_ctx": 512, "shift": True}),
        ("lfm2_swa", {}, {"guarantee": "draft", "n_rs_seq": 3, "windowed": True, "n_ctx": 256, "shift": True, "divide": True}),
        ("lfm2_swa", {"n_ctx": 512}, {"n_ctx": 512, "shift": False, "divide": False}),  # 256 cells are enough for the window
        ("lfm2_swa", {"n_ctx": 512, "swa_full": 1}, {"n_ctx": 512, "shift": True, "divide": True}),
        ("lfm2_swa", {"unified": 1}, {"shift": False, "coupled": True, "n_ctx": 256}),
        ("nemotron_h", {}, {"guarantee": "draft", "n_rs_seq": 3, "recurrent": True, "attention": True, "n_ctx": 256, "shift": True}),
        ("falcon_h1", {}, {"guarantee": "none", "n_rs_seq": 0, "recurrent": True, "attention": True, "n_ctx": 256, "shift": True}),
        (
            "qwen35",
            {},
            {"guarantee": "draft", "n_rs_seq": 3, "recurrent": True, "attention": True, "n_ctx": 256, "shift": False, "divide": False},
        ),
        ("mamba", {}, {"guarantee": "none", "n_rs_seq": 0, "recurrent": True, "attention": False, "n_ctx": 0, "n_batch": 4096}),
        ("jamba", {}, {"guarantee": "none", "n_rs_seq": 0, "recurrent": True, "attention": True, "n_ctx": 256, "shift": True}),
        ("qwen3next", {}, {"guarantee": "none", "n_rs_seq": 0, "recurrent": True, "attention": True, "n_ctx": 256, "shift": True}),
        ("kimi_linear", {}, {"guarantee": "none", "n_rs_seq": 0, "recurrent": True, "attention": True, "n_ctx": 256, "shift": True}),
        ("qwen4exp", {}, {"guarantee": "draft", "n_rs_seq": 3, "n_ctx": 256, "shift": False, "embeddings": False}),
        ("mamba2", {}, {"guarantee": "none", "n_rs_seq": 0, "recurrent": True, "attention": False, "n_ctx": 0, "n_batch": 4096}),
    ],
)
def test_capabilities_are_those_of_model_and_configuration(family: str, keys: dict[str, Any], expected: dict[str, object]) -> None:
    with opened(family, **keys) as session:
        assert {name: getattr(session.capabilities, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("tokens", lambda session: session.decode(batch_of((0, [64], 0)))),
        ("tokens", lambda session: session.decode(batch_of((0, [-1], 0)))),
        ("tokens", lambda session: session.decode(batch_of())),
        ("positions", lambda session: session.decode(batch_of((0, [1], -3)))),
        ("sequences", lambda session: session.decode(batch_of((4, [1], 0)))),
        ("sequences", lambda session: session.decode(batch_of(((0, -1), [1], 0)))),
        ("sequences", lambda session: session.decode(batch_of(((1, 1), [1], 0)))),
        ("sequences", lambda session: session.decode(batch_of(((), [1], 0)))),
        ("sequences", lambda session: session.cancel(batch_of((9, [1], 0)), 0)),
        ("at", lambda session: session.cancel(batch_of((0, [1], 0)), -1)),
        ("sequence", lambda session: session.remove(4, 0, OPEN)),
        ("source", lambda session: session.share(-1, 0, OPEN, OPEN)),
        ("destination", lambda session: session.share(0, 4, OPEN, OPEN)),
        ("sequence", lambda session: session.keep(-1)),
        ("sequence", lambda session: session.shift(4, 1)),
        ("divisor", lambda session: session.divide(0, 0)),
        ("sequence", lambda session: session.save(4, False, False)),
        ("sequence", lambda session: session.restore(4, b"", False, False)),
    ],
)
def test_a_bad_argument_is_named(name: str, call: Callable[[Session], object]) -> None:
    with opened("lfm2", unified=1) as session:
        with pytest.raises(UsageError, match=f"`{name}`"):
            call(session)
        assert set(session.positions()) == {(-1, -1)}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model("rwkv9"), "does not run family `rwkv9`"),
        (Model("lfm2", 0, (("attention_period", 64),)), "without attention layers"),
        (Model("lfm2", 0, (("n_embd", 33),)), "n_embd"),
        (Model("jamba", 0, (("n_embd", 2),)), "heads of one channel"),
    ],
)
def test_a_model_that_cannot_be_opened_is_said(model: Model, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TARGET.open(model, CacheConfiguration())


def test_a_flag_that_the_library_reads_elsewhere_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters_of = llamacpp._context_parameters

    def misplaced(*arguments: Any) -> Any:
        parameters = parameters_of(*arguments)
        parameters.kv_unified = not parameters.kv_unified
        return parameters

    monkeypatch.setattr(llamacpp, "_context_parameters", misplaced)
    with pytest.raises(UnavailableError, match="opened 1024 cells a sequence, not 256"):
        TARGET.open(Model("lfm2"), CacheConfiguration())


def test_a_session_outlives_the_models_that_others_load() -> None:
    with opened("lfm2", Model("lfm2", 1000)) as session:
        rows = rows_of(session, (0, FULL[:3], 0))
        for seed in range(1001, 1012):
            with opened("lfm2", Model("lfm2", seed), n_seq_max=1) as other:
                rows_of(other, (0, FULL[:3], 0))
        session.clear(True)
        assert np.array_equal(rows_of(session, (0, FULL[:3], 0)), rows)


def test_an_abort_of_the_engine_ends_the_process_with_its_reason() -> None:
    code = (
        "import numpy as np\n"
        "from statedrift.spec.configuration import CacheConfiguration\n"
        "from statedrift.spec.models import Model\n"
        "from statedrift.targets.llamacpp import TARGET\n"
        "session = TARGET.open(Model('lfm2'), CacheConfiguration())\n"
        "print('open', flush=True)\n"
        "session.share(0, 1, 2, 5)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "open\n"
    assert ended.returncode == 134
    assert ended.stderr.splitlines()[-1].startswith("llama.cpp aborted: ")
    assert "seq_cp()" in ended.stderr


def test_target_and_session_follow_the_protocol() -> None:
    assert isinstance(TARGET, Target)
    with opened("lfm2") as session:
        assert isinstance(session, Session)
        assert isinstance(session, llamacpp.LlamaSession)
