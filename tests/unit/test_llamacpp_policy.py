"""The policy `llamacpp` on its own: each weakness of the real class as one behaviour, its splits, and what preparing undoes.

That it is the real engine's behaviour is shown in tests/engines/test_llamacpp_policy_agrees.py.
"""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statedrift.impl.llamacpp.attention_cells import LlamaAttentionCells
from statedrift.impl.llamacpp.batches import LlamaBatch, Ubatch, engine_order
from statedrift.impl.llamacpp.cells import NONE, LlamaCells
from statedrift.impl.llamacpp.saved_state import BlobError, BlobReader, BlobWriter
from statedrift.impl.llamacpp.session import LlamaPolicySession
from statedrift.impl.llamacpp.switches import Switches
from statedrift.impl.model import prepared
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.errors import EngineAbort, UsageError
from statedrift.spec.models import Model
from statedrift.spec.operations import OPEN
from statedrift.spec.target import Batch

LFM2 = prepared(Model("lfm2", 0))


def cells_with(*lengths, n_rs_seq=3, switches=Switches()):  # noqa: B008  frozen
    """Cells in which sequence i has lengths[i] tokens, each from one ubatch."""
    cells = LlamaCells(len(lengths), n_rs_seq, switches)
    for sequence, length in enumerate(lengths):
        if length:
            append(cells, sequence, length)
    return cells


def append(cells, *pairs):
    """One ubatch with the given (sequence, tokens) in a row; the rows that are read."""
    sets = list(zip(pairs[::2], pairs[1::2], strict=True))
    owners = tuple((sequence,) for sequence, count in sets for _ in range(count))
    firsts = {sequence: cells.bounds(sequence)[1] + 1 for sequence, _ in sets}
    positions = tuple(firsts[sequence] + index for sequence, count in sets for index in range(count))
    blank = (0,) * len(owners)
    assert cells.place(Ubatch(blank, positions, owners, blank, len(sets)))
    return [cells.read_row(cells.head + number) for number in range(cells.count)]


def test_a_new_sequence_reads_the_first_cell_of_its_slot_that_no_cell_refers_to():
    cells = LlamaCells(4, 0, Switches())
    assert append(cells, 2, 5) == [0]
    assert cells.zero_cell == 0
    assert append(cells, 0, 1) == [1]


def test_a_shared_sequence_that_goes_on_reads_the_shared_cell_from_its_own():
    cells = cells_with(5, 0, 0)
    cells.share(0, 1)
    assert append(cells, 1, 1) == [0]
    assert [cells.tail[0], cells.tail[1]] == [0, 1]


def test_cells_of_a_ubatch_are_swapped_into_its_order_and_what_lies_between_travels():
    cells = cells_with(1, 1, 1, 1)
    rows = append(cells, 3, 1, 0, 1)
    assert (cells.head, cells.count) == (0, 4)
    assert rows == [3, 0, 2, 1]
    assert [cells.tail[sequence] for sequence in range(4)] == [1, 3, 2, 0]


def test_a_token_of_two_sequences_takes_the_second_out_of_its_own_cell():
    cells = cells_with(2, 2, 0)
    cells.place(Ubatch((0,), (2,), ((0, 1),), (0,), 1))
    assert cells.tail[0] == cells.tail[1]
    assert cells.owners[cells.tail[0]] == {0, 1}


def test_a_middle_range_is_answered_with_yes_and_nothing_happens():
    cells = cells_with(6)
    assert cells.remove(0, 1, 3)
    assert cells.bounds(0) == (5, 5)


def test_a_tail_is_taken_back_by_its_length_whether_or_not_its_planes_were_written():
    cells = cells_with(1)
    for _ in range(3):
        append(cells, 0, 1)
    assert cells.remove(0, 2, OPEN)
    assert append(cells, 0, 1) == [2]


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_second_rollback_is_refused_while_one_is_pending(first):
    cells = cells_with(8)
    assert cells.remove(0, 8 - first, OPEN)
    assert not cells.remove(0, 7 - first, OPEN)
    assert cells.bounds(0)[1] == 7 - first


def test_a_rollback_beyond_the_planes_is_refused():
    assert not cells_with(8).remove(0, 4, OPEN)


def test_taking_back_a_shared_tail_moves_the_position_of_every_sharer():
    cells = cells_with(5, 0)
    cells.share(0, 1)
    assert cells.remove(0, 3, OPEN)
    assert cells.bounds(1) == (2, 2)
    assert cells.rollback_index == [2, 0]


def test_the_switch_refuses_a_rollback_of_a_shared_cell():
    cells = cells_with(5, 0, switches=Switches(refuses_shared_rollback=True))
    cells.share(0, 1)
    assert not cells.remove(0, 3, OPEN)
    assert cells.bounds(0) == cells.bounds(1) == (4, 4)


def test_a_pending_rollback_is_not_shared():
    cells = cells_with(5, 0)
    cells.remove(0, 3, OPEN)
    cells.share(0, 1)
    cells.remove(0, 0, OPEN)
    assert append(cells, 1, 1) == [0]


def test_only_the_lowest_owner_of_a_cell_is_asked_for_its_rollback():
    cells = cells_with(0, 5)
    cells.share(1, 0)
    cells.remove(1, 3, OPEN)
    rows = append(cells, 0, 1)
    assert 2 * 2 not in rows
    assert cells.rollback_index[1] == 2


def test_a_removal_of_everything_keeps_the_rollback_index_unless_both_ends_are_open():
    cells = cells_with(5)
    cells.remove(0, 3, OPEN)
    cells.remove(0, 0, 9)
    assert cells.rollback_index == [2]
    cells.remove(0, 0, OPEN)
    assert cells.rollback_index == [0]


def test_the_rollback_indices_of_sequences_that_are_not_kept_stay():
    cells = cells_with(5, 5)
    cells.remove(0, 3, OPEN)
    cells.keep(1)
    assert cells.bounds(0) == (NONE, NONE)
    assert cells.rollback_index[0] == 2


def test_shift_and_divide_move_every_sharer():
    cells = cells_with(5, 0)
    cells.share(0, 1)
    cells.shift(0, 3)
    cells.divide(1, 2)
    assert cells.bounds(0) == cells.bounds(1) == (3, 3)


def test_saving_all_aborts_when_owners_of_a_cell_have_different_rollback_indices():
    cells = cells_with(5, 0)
    cells.share(0, 1)
    cells.remove(0, 3, OPEN)
    cells.write_fields(BlobWriter(), 0)
    with pytest.raises(EngineAbort, match="different rollback indices"):
        cells.write_fields(BlobWriter(), -1)


def test_saved_rows_are_those_of_the_logical_plane():
    cells = cells_with(5, 4, 0)
    cells.remove(1, 2, OPEN)
    assert cells.write_fields(BlobWriter(), 1) == [2 * 3 + 1]


@given(st.lists(st.tuples(st.sampled_from("adskrt"), st.integers(0, 3), st.integers(0, 3), st.integers(1, 4)), max_size=12), st.data())
@settings(max_examples=60, deadline=None)
def test_preparing_changes_no_cell(history, data):
    cells = LlamaCells(4, 3, Switches())
    for what, one, other, count in history:
        match what:
            case "a":
                append(cells, one, count)
            case "d":
                cells.remove(one, 0, OPEN)
            case "s":
                cells.share(one, other)
            case "k":
                cells.keep(one)
            case "r":
                cells.remove(one, max(cells.bounds(one)[1] - count + 1, 0), OPEN)
            case "t" if one != other:
                append(cells, one, count, other, count)
    before = copy.deepcopy(cells.__dict__)
    one = data.draw(st.integers(0, 3))
    position = cells.bounds(one)[1] + 1
    cells.prepare([Ubatch((0,), (position,), ((one,),), (0,), 1), Ubatch((0,), (position + 1,), ((one,),), (0,), 1)])
    after = cells.__dict__ | {name: before[name] for name in ("zero_cell", "count")}  # of the last ubatch that was placed
    assert after == before


# --- batches ---------------------------------------------------------------------------------------------------------------


def cut(owners, n_ubatch, sequential=True, keep_tail=0, hidden=False):
    """The rows of every ubatch."""
    batch = LlamaBatch([0] * len(owners), list(range(len(owners))), owners)
    ubatches = []
    while (ubatch := batch.split_by_sequence(n_ubatch) if hidden else batch.split_equal(n_ubatch, sequential, keep_tail)) is not None:
        ubatches.append(list(ubatch.rows))
    return ubatches


def of(*sequences):
    return [(sequence,) for sequence in sequences]


@pytest.mark.parametrize(
    ("owners", "n_ubatch", "keep_tail", "expected"),
    [
        (of(0, 0, 0, 0, 0), 3, 0, [[0, 1, 2], [3, 4]]),
        (of(0, 1, 0, 1, 1), 8, 0, [[0, 2, 1, 3], [4]]),
        (of(0, 2, 2), 8, 0, [[0], [1, 2]]),  # a gap between sequences ends a ubatch
        (of(1, 0), 8, 0, [[0], [1]]),  # as does a lower one
        (of(0, 0, 0, 0, 0), 4, 3, [[0, 1], [2, 3, 4]]),  # the last three stay together
        (of(0, 0, 0, 0), 4, 3, [[0, 1, 2, 3]]),
        (of(0, 0, 1, 1, 1), 8, 2, [[0, 1], [2, 3, 4]]),  # the second would leave half a tail, and waits
        (of(0, 0, 1), 8, 2, [[0, 1], [2]]),  # the first would, and is finished alone
    ],
)
def test_equal_splits(owners, n_ubatch, keep_tail, expected):
    assert cut(owners, n_ubatch, keep_tail=keep_tail) == expected


def test_a_ubatch_without_room_for_the_tail_aborts():
    with pytest.raises(EngineAbort, match="n_keep_tail"):
        cut(of(0, 0, 0), 4, keep_tail=4)


def test_coupled_tokens_cannot_be_cut_one_sequence_after_the_other():
    assert cut([(0, 1), (0, 1)], 8) == []
    assert cut([(0, 1), (0, 1)], 8, sequential=False) == [[0, 1]]


def test_splits_for_hidden_states_follow_subsets_and_keep_no_tail_together():
    assert cut([(0, 1), (0,), (2,), (0,)], 8, hidden=True) == [[0, 1, 3], [2]]
    assert cut(of(0, 0, 0, 0), 3, keep_tail=2, hidden=True) == [[0, 1, 2], [3]]


@pytest.mark.parametrize(
    ("given", "expected"),
    [  # as libstdc++'s std::unordered_set<int> iterates after these insertions
        ((0, 2), (2, 0)),
        ((14, 1, 3), (3, 1, 14)),
        ((5, 18, 31, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14, 44, 57), (57, 44, 14, 5, 18, 31, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13)),
    ],
)
def test_the_sequences_of_a_token_are_in_the_order_of_the_engines_set(given, expected):
    assert engine_order(given) == expected


@pytest.mark.parametrize(
    ("positions", "owners", "leaps", "reason"),
    [
        ([3], of(0), False, "goes on at position 3"),
        ([1], of(0), True, "goes on at position 1"),
        ([2, 4], of(0, 0), False, "not continuous"),
        ([2, 2], [(0, 1), (1,)], False, None),
        ([2, 3], [(0, 1), (1, 2)], False, "diverged"),
        ([2, 3, 3], [(0, 1), (0,), (1,)], False, None),
        ([3, 2], of(0, 0), False, "decrease"),
        ([7, 9], of(0, 0), True, None),
    ],
)
def test_what_a_batch_is_refused_for(positions, owners, leaps, reason):
    found = LlamaBatch([0] * len(positions), positions, owners).refusal({0: (1, 1), 1: (1, 1), 2: (NONE, NONE)}.__getitem__, leaps)
    assert (found is None) if reason is None else (found is not None and reason in found)


# --- attention cells -------------------------------------------------------------------------------------------------------


def attention(unified=False, window=0, size=256, n_seq_max=4):
    return LlamaAttentionCells(LFM2, 1, window, n_seq_max, size, unified, False)


def attend(cells, sequence, positions):
    """Place one ubatch of one sequence; whether it fits, and the cells."""
    ubatch = Ubatch((0,) * len(positions), tuple(positions), ((sequence,),) * len(positions), (0,) * len(positions), 1)
    slots = cells.prepare([ubatch])
    if slots is None:
        return None
    cells.place(slots[0], ubatch)
    return slots[0].cells[0].tolist()


def test_cells_are_searched_from_a_head_that_removals_pull_back():
    cells = attention(unified=True)
    attend(cells, 0, range(6))
    cells.remove(0, 2, 4)
    assert attend(cells, 1, range(3)) == [2, 3, 6]


def test_a_copy_across_streams_changes_positions_at_once_and_data_before_the_next_decode():
    cells = attention()
    attend(cells, 0, range(3))
    cells.keys[:, 0:3] = 7
    cells.share(0, 2, OPEN, OPEN)
    assert cells.bounds(2) == (0, 2)
    assert not cells.keys[:, 512:515].any()
    cells.update()
    assert np.all(cells.keys[:, 512:515] == 7)


def test_clearing_leaves_a_queued_copy_which_then_takes_whatever_is_there():
    cells = attention()
    attend(cells, 0, range(3))
    cells.share(0, 1, OPEN, OPEN)
    cells.clear(True)
    cells.keys[:, 0] = 3
    cells.update()
    assert np.all(cells.keys[:, 256] == 3)


def test_a_part_across_streams_aborts():
    with pytest.raises(EngineAbort, match="full KV buffers"):
        attention().share(0, 1, 2, OPEN)


def test_in_one_stream_the_destination_keeps_what_it_had():
    cells = attention(unified=True)
    attend(cells, 0, range(2))
    attend(cells, 1, range(5))
    cells.share(0, 1, OPEN, OPEN)
    assert np.count_nonzero(cells.owned[0, :, 1]) == 7


def test_keeping_touches_one_stream():
    cells = attention()
    attend(cells, 0, range(2))
    attend(cells, 1, range(2))
    cells.keep(0)
    assert cells.bounds(1) == (0, 1)


def test_a_division_leaves_a_turn_in_the_wrong_direction():
    cells = attention()
    attend(cells, 0, [6])
    cells.divide(0, 2)
    assert cells.bounds(0) == (3, 3)
    assert cells.shift[0, 0] == 3


def test_a_failed_preparation_gives_the_head_of_the_first_stream_to_the_one_that_was_used():
    cells = attention()
    attend(cells, 0, range(5))
    fits = Ubatch((0,) * 250, tuple(range(250)), ((2,),) * 250, (0,) * 250, 1)
    beyond = Ubatch((0,) * 10, tuple(range(250, 260)), ((2,),) * 10, (0,) * 10, 1)
    assert cells.prepare([fits, beyond]) is None
    assert cells.heads == [5, 0, 5, 0]
    assert cells.bounds(2) == (NONE, NONE)


def test_a_window_gives_cells_away_that_nobody_sees_and_forgets_what_lies_below():
    cells = attention(window=4)
    attend(cells, 0, range(256))
    assert attend(cells, 0, range(256, 258)) == [0, 1]
    assert cells.bounds(0) == (2, 257)


def test_shifts_without_a_layer_abort():
    cells = LlamaAttentionCells(LFM2, 0, 0, 2, 256, False, False)
    attend(cells, 0, range(2))
    cells.move(0, 1)
    with pytest.raises(EngineAbort):
        cells.update()


# --- sessions --------------------------------------------------------------------------------------------------------------


def session(family="lfm2", **keys):
    return LlamaPolicySession(Model(family, 0), CacheConfiguration(**keys), Switches())


def tokens_of(sequence, first, count, outputs="all"):
    places = np.arange(first, first + count, dtype=np.int32)
    return Batch(places % 60, places, ((sequence,),) * count, np.ones(count, bool), outputs)


def test_a_device_save_stays_with_its_session_and_its_blob_holds_no_tensor():
    opened = session()
    opened.decode(tokens_of(0, 0, 5))
    on_device, in_blob = opened.save(0, False, True)[1], opened.save(0, False, False)[1]
    assert len(on_device) < len(in_blob) // 4
    opened.decode(tokens_of(0, 5, 2))
    assert opened.restore(0, on_device, False, True).word == "accepted"
    assert opened.positions()[0] == (4, 4)


def test_a_device_blob_of_another_session_aborts():
    one = session()
    one.decode(tokens_of(0, 0, 5))
    with pytest.raises(EngineAbort):
        session().restore(0, one.save(0, False, True)[1], False, True)


@pytest.mark.parametrize("cut_bytes", [1, 40, 400])
def test_a_truncated_blob_is_refused_and_leaves_its_destination_empty(cut_bytes):
    opened = session()
    opened.decode(tokens_of(0, 0, 5))
    opened.decode(tokens_of(1, 0, 3))
    blob = opened.save(0, False, False)[1][:-cut_bytes]
    assert opened.restore(1, blob, False, False).word == "refused"
    assert opened.positions() == [(4, 4), (-1, -1), (-1, -1), (-1, -1)]


def test_a_reader_stops_at_the_end_of_the_bytes():
    with pytest.raises(BlobError, match="end of buffer"):
        BlobReader(b"abc").read("I")


def test_a_family_that_keeps_no_snapshots_takes_none():
    assert session("mamba2").capabilities.n_rs_seq == 0
    assert session("mamba2").capabilities.guarantee == "none"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"tokens": np.array([64], np.int32)}, "tokens"),
        ({"positions": np.array([-1], np.int32)}, "positions"),
        ({"sequences": ((4,),)}, "sequences"),
        ({"sequences": ((1, 1),)}, "sequences"),
        ({"wanted": np.ones(2, bool)}, "wanted"),
    ],
)
def test_bad_arguments_are_named(change, name):
    plain = {"tokens": np.zeros(1, np.int32), "positions": np.zeros(1, np.int32), "sequences": ((0,),), "wanted": np.ones(1, bool)}
    with pytest.raises(UsageError, match=name):
        session().decode(Batch(**(plain | change), outputs="all"))


def test_outputs_that_there_are_not_are_named():
    with pytest.raises(UsageError, match="outputs"):
        session().decode(tokens_of(0, 0, 1, outputs="x"))


@pytest.mark.parametrize("delta", [1 << 31, 1 << 70, -(1 << 70)])
def test_a_shift_beyond_the_engines_integers_is_named(delta):
    opened = session()
    opened.decode(tokens_of(0, 0, 3))
    with pytest.raises(UsageError, match="delta"):
        opened.shift(0, delta)


@pytest.mark.parametrize("call", ["positions", "save_all", "keep 0", "clear True", "decode", "restore_all"])
def test_a_closed_session_says_so(call):
    opened = session()
    opened.close()
    calls = {
        "positions": opened.positions, "save_all": opened.save_all, "keep 0": lambda: opened.keep(0), "clear True": lambda: opened.clear(True),
        "decode": lambda: opened.decode(tokens_of(0, 0, 1)), "restore_all": lambda: opened.restore_all(b""),
    }  # fmt: skip
    with pytest.raises(UsageError, match="closed"):
        calls[call]()
