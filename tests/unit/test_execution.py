"""Walking a program through a session: how a decode is laid out, what memory held before, and what a misbehaving session comes to."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from statedrift.fuzz.execution import Layout, execute, lay_out, open_session
from statedrift.oracle.contract import Checker, Piece
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.errors import UnavailableError, UsageError
from statedrift.spec.families import doubled
from statedrift.spec.models import Model, model_text
from statedrift.spec.programs import parse_program
from statedrift.spec.target import Decoded, Session
from statedrift.spec.tokens import DIRTY_SALT, implicit_tokens
from statedrift.spec.verdicts import ACCEPTED, Outcome

from tests.perfect_target import _opened
from tests.scripted_target import ScriptedSession, ScriptedTarget, declared, refuse, throw, walk

MODEL = Model("lfm2")

# --- layout ------------------------------------------------------------------------------------------------------------------


def laid_out(text: str, interleave: bool = False, outputs: Any = "all", before: str = "") -> Layout:
    """The layout of a decode, after other decodes."""
    checker = Checker(CacheConfiguration(), 64, declared())
    program = parse_program(f"model lfm2; {before}; decode {text}" if before else f"model lfm2; decode {text}")
    for index, operation in enumerate(program.operations[:-1]):
        checker.take_effect(index, operation, ACCEPTED, [])
    return lay_out(checker.pieces(program.operations[-1].items), interleave, outputs)  # type: ignore[union-attr]


def owners(layout: Layout) -> str:
    return " ".join("+".join(map(str, ids)) for ids in layout.batch.sequences)


ORDERS = [
    # items, interleaved, sequences token by token, positions
    ("0:3", False, "0 0 0", [0, 1, 2]),
    ("0:2 1:3", False, "0 0 1 1 1", [0, 1, 0, 1, 2]),
    ("1:3 0:2", False, "1 1 1 0 0", [0, 1, 2, 0, 1]),
    ("0:2 1:1 0:2", False, "0 0 1 0 0", [0, 1, 0, 2, 3]),
    ("0+1:2 0:1", False, "0+1 0+1 0", [0, 1, 2]),
    ("0:2 1:3", True, "0 1 0 1 1", [0, 0, 1, 1, 2]),
    ("1:3 0:2", True, "1 0 1 0 1", [0, 0, 1, 1, 2]),
    ("0:2 1:1 0:2", True, "0 1 0 0 0", [0, 0, 1, 2, 3]),
    ("0:1 1:1 2:1", True, "0 1 2", [0, 0, 0]),
    ("0+1:2 2:2", True, "0+1 0+1 2 2", [0, 1, 0, 1]),
]


@pytest.mark.parametrize(("items", "interleave", "sequences", "positions"), ORDERS)
def test_tokens_come_item_by_item_or_round_robin(items: str, interleave: bool, sequences: str, positions: list[int]) -> None:
    layout = laid_out(items, interleave)
    assert owners(layout) == sequences
    assert layout.batch.positions.tolist() == positions
    assert (layout.batch.tokens.dtype, layout.batch.positions.dtype, layout.batch.wanted.dtype) == (np.int32, np.int32, bool)


LASTS = [
    # items, interleaved, wanted token by token
    ("0:3", False, "001"),
    ("0:2 1:3", False, "01001"),
    ("0:2 1:1 0:2", False, "00101"),
    ("0:2 1:3", True, "00101"),
    ("0:2 1:1 0:2", True, "01001"),
    ("0+1:2", False, "01"),
    ("0+1:2 0:1", False, "011"),
    ("0+1:2 0:1 1:1", False, "0011"),
]


@pytest.mark.parametrize(("items", "interleave", "wanted"), LASTS)
def test_last_wants_the_last_token_of_every_sequence(items: str, interleave: bool, wanted: str) -> None:
    layout = laid_out(items, interleave, "last")
    assert "".join(str(int(want)) for want in layout.batch.wanted) == wanted


def test_later_decodes_go_on_where_the_log_ends() -> None:
    layout = laid_out("0:2 1:1", before="decode 0:5 1:2; shift 1 4")
    assert layout.batch.positions.tolist() == [5, 6, 6]
    assert layout.batch.tokens.tolist() == [*implicit_tokens(0, 5, 2, 0, 64), *implicit_tokens(1, 2, 1, 0, 64)]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from(["all", "last", "embeddings"]),
)
def test_every_place_leads_to_its_own_token(items: list[tuple[int, int]], interleave: bool, outputs: Any) -> None:
    added: dict[int, int] = {}
    pieces = []
    for number, (sequence, count) in enumerate(items):
        start = added.get(sequence, 0)
        pieces.append(Piece((sequence,), tuple(100 * number + index for index in range(count)), start, start))
        added[sequence] = start + count
    layout = lay_out(tuple(pieces), interleave, outputs)
    rows = layout.batch.tokens[layout.batch.wanted]  # a session that answers with the token itself
    seen = 0
    for piece, places, wanted in zip(pieces, layout.places, layout.wanted, strict=True):
        for token, place, want in zip(piece.tokens, places, wanted, strict=True):
            assert (place >= 0) == want
            if want:
                assert rows[place] == token
                seen += 1
    assert seen == len(rows) == (len(added) if outputs == "last" else sum(count for _, count in items))
    for sequence in added:  # within a sequence the order stays
        positions = layout.batch.positions[[ids == (sequence,) for ids in layout.batch.sequences]]
        assert positions.tolist() == list(range(added[sequence]))


# --- spans -------------------------------------------------------------------------------------------------------------------


def test_a_coupled_item_is_judged_once_under_its_lowest_sequence() -> None:
    run, _ = walk("decode 2+1:3 0:1")
    assert [(span.sequence, span.indices, span.places) for span in run.spans] == [(1, (0, 1, 2), (0, 1, 2)), (0, (0,), (3,))]
    assert run.spans[0].log == implicit_tokens(1, 0, 3, 0, 64)


def test_items_of_one_sequence_make_spans_that_append() -> None:
    run, _ = walk("decode 0:2 0:[7]")
    assert [(len(span.log), span.indices) for span in run.spans] == [(2, (0, 1)), (3, (2,))]
    assert run.spans[1].log[-1] == 7


def test_a_decode_overrides_the_outputs_of_the_cache() -> None:
    run, _ = walk("cache outputs=last; decode 0:3; decode 0:3 outputs=all; decode 0:2 outputs=embeddings")
    assert [(len(span.indices), span.hidden) for span in run.spans] == [(1, False), (3, False), (2, True)]
    assert [width for _, width in run.rows.values()] == [64, 64, 32]


def test_a_late_effect_is_the_last_operations_fault() -> None:
    run, _ = walk("decode 0:3 1:3; rollback 1 1; decode 0:1 1:1 2:1")
    assert [span.relation for span in run.spans if span.operation_index == 2] == ["other", "self", "other"]
    run, _ = walk("decode 0:3 1:3; clear; decode 0:1 1:1")
    assert [span.relation for span in run.spans if span.operation_index == 2] == ["self", "self"]


# --- the memory before -------------------------------------------------------------------------------------------------------


def before_the_first(text: str, poison: bool = True, **capabilities: Any) -> list[tuple[str, tuple[Any, ...]]]:
    target = ScriptedTarget(capabilities=capabilities)
    target.poison = poison
    execute(parse_program(f"model lfm2; {text}"), target, target.progress)
    return [(name, arguments) for index, name, arguments in target.calls if index == -1]


def test_fresh_memory_is_left_alone() -> None:
    assert before_the_first("cache start=fresh; decode 0:1") == []


def test_dirty_memory_was_used_by_every_sequence_and_cleared_without_data() -> None:
    calls = before_the_first("cache start=dirty n_seq_max=3; decode 0:1")
    assert [name for name, _ in calls] == ["decode", "decode", "decode", "clear"]
    assert calls[-1][1] == (False,)
    for sequence, (_, (batch,)) in enumerate(calls[:-1]):
        assert batch.sequences == ((sequence,),) * 17
        assert batch.tokens.tolist() == list(implicit_tokens(sequence, 0, 17, DIRTY_SALT, 64))


@pytest.mark.parametrize("limit", ["n_ctx", "n_batch"])
def test_dirty_decodes_fit_the_target(limit: str) -> None:
    calls = before_the_first("cache start=dirty n_seq_max=1; decode 0:1", **{limit: 5})
    assert len(calls[0][1][0].tokens) == 5


def test_poison_is_dirty_where_memory_cannot_be_poisoned() -> None:
    assert before_the_first("cache start=poison; decode 0:1", poison=True) == []
    names = [name for name, _ in before_the_first("cache start=poison n_seq_max=2; decode 0:1", poison=False)]
    assert names == ["decode", "decode", "clear"]


def test_a_reopened_session_starts_over_dirty_memory_again() -> None:
    _, target = walk("cache start=dirty n_seq_max=2; decode 0:1; reopen n_seq_max=1")
    assert [name for index, name, _ in target.calls if index == 1] == ["decode", "clear"]


def test_a_log_after_a_dirty_start_is_empty() -> None:
    run, target = walk("cache start=dirty; decode 0:2")
    assert run.verdict is None
    assert target.calls[-1][2][0].positions.tolist() == [0, 1]


# --- damage ------------------------------------------------------------------------------------------------------------------


def damaged_blob(how: str, text: str = "decode 0:3; save 0 a") -> tuple[bytes, bytes]:
    """What was saved, and what is restored after the damage."""
    damages = "; ".join(f"damage a {words}" for words in how.split(", "))
    restoring = "restore_all a" if "save_all" in text else "restore a 1"
    _, target = walk(f"{text}; {damages}; {restoring}", {-1: refuse})
    clean, clean_target = walk(f"{text}; {restoring}")
    assert clean.verdict is None
    blob, original = target.calls[-1][2], clean_target.calls[-1][2]
    return (original[0], blob[0]) if "save_all" in text else (original[1], blob[1])


def test_damage_is_done_to_the_bytes() -> None:
    original, blob = damaged_blob("truncate 7")
    assert blob == original[:-7]
    original, blob = damaged_blob("flip 12")
    assert blob == original[:12] + bytes([original[12] ^ 1]) + original[13:]
    original, blob = damaged_blob("header")
    assert blob == b"\xff" * 16 + original[16:]
    original, blob = damaged_blob("flip 12, flip 12")
    assert blob == original
    original, blob = damaged_blob("truncate 7, truncate 3")
    assert blob == original[:-10]


def test_a_header_of_a_short_blob_does_not_grow_it() -> None:
    original, blob = damaged_blob("flip 0")
    original, blob = damaged_blob(f"truncate {len(original) - 5}, header")
    assert blob == b"\xff" * 5


def test_a_foreign_blob_holds_the_same_log_of_a_wider_model() -> None:
    original, blob = damaged_blob("foreign", "decode 0:3; decode 0:2; save 0 a")
    own, foreign = _opened(original), _opened(blob)
    assert own is not None
    assert foreign is not None
    assert foreign.model == model_text(doubled(MODEL))
    assert [cell.token for cell in foreign.logs[0]] == [cell.token for cell in own.logs[0]]


def test_a_foreign_blob_of_a_whole_session_holds_every_log() -> None:
    _, blob = damaged_blob("foreign", "decode 0:3 2:2; save_all a")
    foreign = _opened(blob)
    assert foreign is not None
    assert [len(log) for log in foreign.logs] == [3, 0, 2, 0]


def test_a_foreign_blob_of_a_sequence_that_is_lost_still_holds_its_log() -> None:
    _, blob = damaged_blob("foreign", "decode 3:4; save 3 a; reopen n_seq_max=2")
    foreign = _opened(blob)
    assert foreign is not None
    assert [len(log) for log in foreign.logs] == [4]


def test_a_foreign_blob_of_a_whole_session_leaves_out_sequences_that_are_lost() -> None:
    _, blob = damaged_blob("foreign", "decode 0:3 2:2; save_all a; reopen n_seq_max=2")
    foreign = _opened(blob)
    assert foreign is not None
    assert [len(log) for log in foreign.logs] == [3, 0]


def test_making_a_foreign_blob_never_passes_the_largest_batch() -> None:
    _, target = walk("decode 0:4; decode 0:4; decode 0:2; save 0 a; damage a foreign", n_batch=4)
    sizes = [len(arguments[0].tokens) for index, name, arguments in target.calls if index == 4 and name == "decode"]
    assert sizes == [4, 4, 2]


def test_the_session_of_a_foreign_blob_is_closed_also_when_it_fails() -> None:
    run, target = walk("decode 0:4; save 0 a; damage a foreign", {-1: throw})
    assert run.verdict is not None
    assert run.verdict.kind == "bad-refusal"
    assert [session.is_closed for session in target.sessions] == [True, True]


# --- what a session may not answer ---------------------------------------------------------------------------------------------


def answering(rows: Any) -> Any:
    """The run of one decode of three tokens whose rows are these."""
    target = ScriptedTarget()
    target.script = {0: lambda session, do: Decoded(ACCEPTED, rows)}  # type: ignore[dict-item,return-value]
    return execute(parse_program("model lfm2; decode 0:3"), target, target.progress)


WRONG_ROWS = [
    None,
    np.zeros((2, 64), np.float32),
    np.zeros((4, 64), np.float32),
    np.zeros((3, 63), np.float32),
    np.zeros((3, 32), np.float32),
    np.zeros((3, 64), np.float64),
    np.zeros((3, 64), np.float16),
    np.zeros(3 * 64, np.float32),
    np.zeros((1, 3, 64), np.float32),
    [[0.0] * 64] * 3,
]


@pytest.mark.parametrize("rows", WRONG_ROWS, ids=lambda rows: f"{getattr(rows, 'shape', type(rows).__name__)} {getattr(rows, 'dtype', '')}")
def test_rows_of_a_wrong_shape_or_type_are_an_error(rows: Any) -> None:
    run = answering(rows)
    assert run.steps[0].outcome.word == "error"
    assert run.verdict.kind == "bad-refusal"
    assert run.spans == ()


def test_rows_are_kept_as_they_came() -> None:
    rows = np.arange(3 * 64, dtype=np.float32).reshape(64, 3).T  # not contiguous
    target = ScriptedTarget()

    def lie(session: ScriptedSession, do: Any) -> Any:
        do()
        return Decoded(ACCEPTED, rows)

    target.script = {0: lie}
    run = execute(parse_program("model lfm2; decode 0:3"), target, target.progress)
    data, width = run.rows[0]
    assert np.array_equal(np.frombuffer(data, np.float32).reshape(-1, width), rows)


def test_rows_of_a_decode_that_is_not_judged_are_not_kept() -> None:
    run, _ = walk("decode 0:4; divide 0 2; decode 0:1")
    assert list(run.rows) == [0]


POSITIONS: list[Any] = [None, [], [(0, 2)] * 3, [(0, 2)] * 5, [0, 1, 2, 3], "abcd"]


@pytest.mark.parametrize("answer", POSITIONS, ids=str)
def test_positions_that_are_not_one_pair_a_sequence_are_an_error(answer: Any) -> None:
    target = ScriptedTarget()
    target.positions_lie = lambda right: answer
    run = execute(parse_program("model lfm2; decode 0:3"), target, target.progress)
    assert run.steps[0].outcome.word == "error"
    assert run.verdict is not None
    assert run.verdict.kind == "bad-refusal"


def test_positions_may_be_lists_of_numpy_numbers() -> None:
    target = ScriptedTarget()
    target.positions_lie = lambda right: np.array(right).tolist() if target.index else [np.array(pair) for pair in right]
    run = execute(parse_program("model lfm2; decode 0:3; save 0 a; damage a header; restore a 0"), target, target.progress)
    assert run.verdict is None
    assert run.steps[0].positions[0] == (0, 2)


def test_the_reason_of_an_exception_is_one_line_of_bounded_length() -> None:
    def lie(session: ScriptedSession, do: Any) -> Outcome:
        raise ValueError("x" * 5000)

    run, _ = walk("decode 0:3", {0: lie})
    assert run.steps[0].outcome.detail.startswith("ValueError: xxx")
    assert len(run.steps[0].outcome.detail) <= 300


# --- always ------------------------------------------------------------------------------------------------------------------


def test_progress_is_told_of_every_operation_before_it_is_sent() -> None:
    told: list[int] = []
    target = ScriptedTarget()

    def progress(index: int) -> None:
        assert not [call for call in target.calls if call[0] == index]
        told.append(index)
        target.progress(index)

    execute(parse_program("model lfm2; decode 0:1; restore a 0; reopen; decode 0:1"), target, progress)
    assert told == [0, 1, 2, 3]


def test_the_walk_stops_at_the_first_divergence() -> None:
    run, target = walk("decode 0:1; drop 0; decode 0:1", {1: refuse})
    assert len(run.steps) == 2
    assert max(index for index, _, _ in target.calls) == 1


@pytest.mark.parametrize("text", ["decode 0:1", "decode 0:1; reopen; decode 0:1", "cache start=dirty; decode 0:1; reopen"])
def test_every_session_is_closed_once(text: str) -> None:
    _, target = walk(text)
    assert [session.is_closed for session in target.sessions] == [True] * len(target.sessions)


@pytest.mark.parametrize("error", [UsageError("scripted"), UnavailableError("scripted"), KeyboardInterrupt()])
def test_the_session_is_closed_when_the_walk_cannot_go_on(error: BaseException) -> None:
    def lie(session: ScriptedSession, do: Any) -> Outcome:
        raise error

    target = ScriptedTarget({0: lie})
    with pytest.raises(type(error)):
        execute(parse_program("model lfm2; decode 0:1"), target, target.progress)
    assert target.sessions[0].is_closed


def test_the_session_is_closed_when_its_memory_cannot_be_used_beforehand() -> None:
    target = ScriptedTarget({-1: throw})
    with pytest.raises(RuntimeError):
        open_session(target, MODEL, CacheConfiguration(start="dirty"))
    assert target.sessions[0].is_closed


def test_a_session_that_cannot_be_opened_again_is_an_error_and_not_closed_twice() -> None:
    class OnlyOnce(ScriptedTarget):
        def open(self, model: Model, configuration: CacheConfiguration) -> ScriptedSession:
            if self.sessions:
                raise RuntimeError("no second time")
            return super().open(model, configuration)

    target = OnlyOnce()
    run = execute(parse_program("model lfm2; decode 0:1; reopen; decode 0:1"), target, target.progress)
    assert run.steps[-1].outcome.word == "error"
    assert run.verdict is not None
    assert (run.verdict.kind, run.verdict.operation_index) == ("bad-refusal", 1)
    assert target.sessions[0].is_closed


def test_capabilities_of_every_session_are_kept() -> None:
    run, _ = walk("cache n_rs_seq=3; decode 0:1; reopen n_rs_seq=1; reopen n_rs_seq=0")
    assert [capabilities.n_rs_seq for capabilities in run.sessions] == [3, 1, 0]
    assert run.capabilities == run.sessions[-1]


def test_a_rollback_is_sent_as_positions_and_a_whole_one_as_an_open_range() -> None:
    _, target = walk("decode 0:5; shift 0 10; rollback 0 2; rollback 0 3")
    assert [arguments for _, name, arguments in target.calls if name == "remove"] == [(0, 13, -1), (0, 0, -1)]


def test_a_range_is_shared_as_given_and_as_a_whole_where_ranges_are_unknown() -> None:
    for capable, sent in [(True, (0, 1, 0, 3)), (False, (0, 1, -1, -1))]:
        _, target = walk("decode 0:3; share 0 1 0 3", partial_share=capable)
        assert target.calls[-1][2] == sent


def test_clear_clears_the_data_too() -> None:
    _, target = walk("decode 0:3; clear")
    assert target.calls[-1][2] == (True,)


def test_a_scripted_session_is_a_session() -> None:
    assert isinstance(ScriptedTarget().open(MODEL, CacheConfiguration()), Session)
