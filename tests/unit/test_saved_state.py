"""Saved states: what is read is what was written, and anything else is refused with a reason."""

import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from statedrift.impl import saved_state
from statedrift.impl.hybrid_cache import SequenceState, SessionState
from statedrift.impl.model import prepared
from statedrift.impl.recurrent_cache import States
from statedrift.impl.saved_state import pack, pack_session, unpack, unpack_session
from statedrift.spec.families import doubled
from statedrift.spec.models import Model

MODELS = {
    "mamba2": Model("mamba2", dimensions=(("n_layer", 1),)),
    "lfm2": Model("lfm2"),
    "lfm2-attention": Model("lfm2", dimensions=(("attention_period", 1),)),
    "lfm2-recurrent": Model("lfm2", dimensions=(("attention_period", 9),)),
    "lfm2_swa": Model("lfm2_swa"),
    "nemotron_h": Model("nemotron_h"),
    "qwen35": Model("qwen35"),
    "mamba": Model("mamba"),
    "jamba": Model("jamba"),
    "minimax01": Model("minimax01"),
    "rwkv6": Model("rwkv6", dimensions=(("n_layer", 1),)),
    "rwkv7": Model("rwkv7", dimensions=(("n_layer", 1),)),
    "falcon_h1": Model("falcon_h1"),
    "zamba2": Model("zamba2"),
    "qwen4exp": Model("qwen4exp"),
}
EVERY_MODEL = pytest.mark.parametrize("name", list(MODELS))


def state_of(model, token_count=5, state_count=1, first=0, seed=0):
    generator = np.random.default_rng(seed)

    def draw(*shape):
        return generator.standard_normal(shape).astype(np.float32)

    recurrent, attention = len(model.recurrent_layers), len(model.attention_layers)
    shapes = (model.convolution_shape, model.recurrent_shape, model.embedding_shape)
    layers = (recurrent, recurrent, len(model.embedding_layers))
    states = States(*(draw(state_count, *size) for size in zip(layers, map(math.prod, shapes), strict=True))) if recurrent else None
    cells = (attention, token_count, model.key_heads, model.head_dim)
    held = (draw(*cells), draw(*cells), draw(attention, token_count, model.index_width)) if attention else (None, None, None)
    return SequenceState(token_count, first, first + token_count - 1, states, *held)


def session_of(model):
    """Four sequences: 1 has the states of 0 and most of its cells, 2 is empty, 3 is on its own."""
    alone = state_of(model, 3, 2, 7, seed=1)
    lead = state_of(model, 5, 3)
    held = ()
    if model.attention_layers:
        held = [np.concatenate([getattr(lead, name), getattr(alone, name)], axis=1) for name in ("keys", "values", "index_rows")]
    bare = [state._replace(keys=None, values=None, index_rows=None) for state in (lead, lead._replace(states=None), SequenceState(), alone)]
    cells = tuple(np.array(own, np.int64) for own in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [], [6, 7, 4]))
    same_as = (0, 0, 2, 3) if model.recurrent_layers else (0, 1, 2, 3)
    return SessionState(tuple(bare), same_as, cells if model.attention_layers else (), *held)


def arrays_of(state):
    """All arrays of a sequence's or a session's state, None for those that are not there."""
    own = state.sequences if isinstance(state, SessionState) else (state,)
    found = [None if one.states is None else part for one in own for part in (one.states or (None,) * 3)]
    return [*found, state.keys, state.values, *(state.cells if isinstance(state, SessionState) else ())]


def assert_same(mine, theirs):
    for one, other in zip(arrays_of(mine), arrays_of(theirs), strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.shape == other.shape and np.array_equal(one, other))


def parts(blob):
    """The header as an object, and the bytes of the tensors."""
    end = 8 + int.from_bytes(blob[:8], "little")
    return json.loads(blob[8:end]), blob[end:]


def joined(header, data):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@EVERY_MODEL
@pytest.mark.parametrize(("token_count", "state_count", "first"), [(1, 1, 0), (5, 1, 0), (5, 4, 0), (5, 2, 9)])
def test_a_state_is_read_back_bit_by_bit(name, token_count, state_count, first):
    model = prepared(MODELS[name])
    state = state_of(model, token_count, state_count, first)
    back = unpack(model, pack(model, state))
    assert not isinstance(back, str)
    assert back[:3] == (token_count, first, first + token_count - 1)
    assert_same(state, back)


@EVERY_MODEL
def test_a_recurrent_half_is_read_back_without_the_attention_half(name):
    model = prepared(MODELS[name])
    state = state_of(model, 5, 2)
    back = unpack(model, pack(model, state, partial=True), partial=True)
    assert not isinstance(back, str)
    assert back[:3] == state[:3]
    assert_same(state._replace(keys=None, values=None), back)


@EVERY_MODEL
def test_a_session_is_read_back_with_what_its_sequences_share(name):
    model = prepared(MODELS[name])
    state = session_of(model)
    back = unpack_session(model, pack_session(model, state, True), 4, True)
    assert not isinstance(back, str)
    assert [own[:3] for own in back.sequences] == [own[:3] for own in state.sequences]
    assert back.same_as == state.same_as
    assert_same(state, back)


@EVERY_MODEL
def test_the_state_of_an_empty_sequence_is_read_back(name):
    model = prepared(MODELS[name])
    back = unpack(model, pack(model, SequenceState()))
    assert not isinstance(back, str)
    assert back[:4] == (0, -1, -1, None)


@EVERY_MODEL
def test_a_session_of_empty_sequences_is_read_back(name):
    model = prepared(MODELS[name])
    cells = (np.zeros(0, np.int64),) * 2 if model.attention_layers else ()
    no_cells = np.zeros((len(model.attention_layers), 0, model.key_heads, model.head_dim), np.float32) if cells else None
    no_index = np.zeros((len(model.attention_layers), 0, model.index_width), np.float32) if cells else None
    state = SessionState((SequenceState(),) * 2, (0, 1), cells, no_cells, no_cells, no_index)
    back = unpack_session(model, pack_session(model, state, False), 2, False)
    assert not isinstance(back, str)
    assert_same(state, back)


def test_a_third_row_part_is_saved_like_the_others():
    lfm2 = prepared(MODELS["lfm2"])
    model = msgspec.structs.replace(lfm2, embedding_shape=(3, 8), embedding_layers=lfm2.recurrent_layers[1:3])
    state = state_of(model, 5, 2)
    back = unpack(model, pack(model, state))
    assert not isinstance(back, str)
    assert back.states.embedding.shape == (2, 2, 24)
    assert_same(state, back)


def test_a_blob_is_refused_where_another_kind_is_asked_for():
    model = prepared(MODELS["lfm2"])
    state = state_of(model)
    blobs = {"sequence": pack(model, state), "partial": pack(model, state, True), "session": pack_session(model, session_of(model), False)}
    for kind, blob in blobs.items():
        answers = {"sequence": unpack(model, blob), "partial": unpack(model, blob, True), "session": unpack_session(model, blob, 4, False)}
        assert {asked: isinstance(answer, str) for asked, answer in answers.items()} == {asked: asked != kind for asked in answers}


@pytest.mark.parametrize(("n_seq_max", "unified"), [(3, True), (5, True), (4, False)])
def test_a_session_of_another_number_of_sequences_or_another_pool_is_refused(n_seq_max, unified):
    model = prepared(MODELS["lfm2"])
    reason = unpack_session(model, pack_session(model, session_of(model), True), n_seq_max, unified)
    assert isinstance(reason, str)
    assert "4 sequences with unified=1" in reason


def test_a_state_that_holds_nan_is_read_back():
    model = prepared(MODELS["mamba2"])
    state = state_of(model)
    state.states.convolution[:] = np.nan
    assert np.isnan(unpack(model, pack(model, state)).states.convolution).all()


@EVERY_MODEL
def test_every_shorter_blob_is_refused(name):
    model = prepared(MODELS[name])
    blob = pack(model, state_of(model, 1))
    for length in [*range(0, len(blob), 97), len(blob) - 1]:
        assert isinstance(unpack(model, blob[:length]), str)


@EVERY_MODEL
def test_a_blob_with_any_bit_flipped_is_refused(name):
    model = prepared(MODELS[name])
    blob = pack(model, state_of(model, 1))
    header_end = 8 + int.from_bytes(blob[:8], "little")
    for place in [*range(header_end), *range(header_end, len(blob), 61)]:
        for bit in (1, 32, 128):
            damaged = bytearray(blob)
            damaged[place] ^= bit
            assert isinstance(unpack(model, bytes(damaged)), str), (place, bit)


def test_a_blob_of_another_model_is_refused():
    model = MODELS["mamba2"]
    for other in (doubled(model), Model("mamba2", 1, model.dimensions), MODELS["lfm2"]):
        foreign = prepared(other)
        reason = unpack(prepared(model), pack(foreign, state_of(foreign)))
        assert reason == "the saved state is one of another model"


def test_a_header_of_ones_is_refused():
    model = prepared(MODELS["mamba2"])
    blob = pack(model, state_of(model))
    assert isinstance(unpack(model, b"\xff" * 16 + blob[16:]), str)


def with_metadata(model, blob, change):
    """The blob with other metadata whose checksum is right: a liar, not an accident."""
    header, data = parts(blob)
    text = json.dumps({**json.loads(header["__metadata__"]["statedrift"]), **change})
    try:
        metadata = msgspec.json.decode(text, type=saved_state._Metadata)
    except msgspec.ValidationError:
        pass
    else:
        found = dict(deserialize(blob))
        tensors = {name: bytes(found[name]["data"]) for name in saved_state._shapes(model, metadata) if name in found}
        text = msgspec.json.encode(msgspec.structs.replace(metadata, checksum=saved_state._checksum(metadata, tensors))).decode()
    header["__metadata__"]["statedrift"] = text
    return joined(header, data)


SEQUENCE = [5, 0, 4, 1, 0]
LIES = [
    {"sequences": [sequence]}
    for sequence in (
        [4, 0, 3, 1, 0], [6, 0, 5, 1, 0], [5, -1, 4, 1, 0], [5, 0, 5, 1, 0], [5, 3, 2, 1, 0], [5, 0, 4, 0, 0], [5, 0, 4, 2, 0], [5, 0, 4, 1, 1],
        [5, 0, 4, 1, -1], [0, -1, -1, 0, 0], [1 << 40, 0, 4, 1, 0], [5, 0, 4.5, 1, 0], [5, 0, 4, 1], [5, 0, 4, 1, 0, 0], ["5", 0, 4, 1, 0], None,
    )
]  # fmt: skip
LIES += [{"sequences": []}, {"sequences": [SEQUENCE, SEQUENCE]}, {"cells": 4}, {"cells": 6}, {"cells": -1}, {"cells": 1 << 50}]
LIES += [{"kind": "session"}, {"kind": "other"}, {"unified": 1}, {"format": "other"}, {"format_version": "1"}, {"cache": "float16 rows-1"}]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_metadata_that_lies_is_refused_although_its_checksum_is_right(lie):
    model = prepared(MODELS["lfm2"])
    blob = pack(model, state_of(model))
    assert json.loads(parts(blob)[0]["__metadata__"]["statedrift"])["sequences"] == [SEQUENCE]
    assert isinstance(unpack(model, with_metadata(model, blob, lie)), str)


def test_metadata_that_was_made_anew_and_does_not_lie_is_accepted():
    model = prepared(MODELS["lfm2"])
    blob = pack(model, state_of(model))
    assert not isinstance(unpack(model, with_metadata(model, blob, {})), str)


@pytest.mark.parametrize(
    "sequences",
    [
        [[5, 0, 4, 3, 0], [5, 0, 4, 0, 2], [0, -1, -1, 0, 2], [3, 7, 9, 2, 3]],
        [[5, 0, 4, 3, 0], [5, 0, 4, 0, 3], [0, -1, -1, 0, 2], [3, 7, 9, 2, 3]],
        [[5, 0, 4, 3, 0], [4, 0, 3, 0, 0], [0, -1, -1, 0, 2], [4, 7, 10, 2, 3]],
        [[5, 0, 4, 0, 1], [5, 0, 4, 3, 1], [0, -1, -1, 0, 2], [3, 7, 9, 2, 3]],
        [[5, 0, 4, 3, 0], [5, 0, 4, 0, -1], [0, -1, -1, 0, 2], [3, 7, 9, 2, 3]],
        [[5, 0, 4, 3, 0], [5, 0, 4, 0, 0], [0, -1, -1, 0, 1], [3, 7, 9, 2, 3]],
    ],
)
def test_a_session_whose_sequences_have_the_states_of_what_they_cannot_have_is_refused(sequences):
    model = prepared(MODELS["lfm2"])
    blob = pack_session(model, session_of(model), False)
    assert not isinstance(unpack_session(model, with_metadata(model, blob, {}), 4, False), str)
    assert isinstance(unpack_session(model, with_metadata(model, blob, {"sequences": sequences}), 4, False), str)


@pytest.mark.parametrize("cells", [[0, 0, 0, 0, 0], [4, 3, 2, 1, 0], [0, 1, 0, 1, 2]])
def test_the_cells_of_a_saved_sequence_are_in_order_and_each_its_own(cells):
    model = prepared(MODELS["lfm2"])
    alone = state_of(model)
    count = max(cells) + 1
    forged = SessionState((alone,), (0,), (np.array(cells),), alone.keys[:, :count], alone.values[:, :count], alone.index_rows[:, :count])
    assert isinstance(unpack(model, saved_state._packed(model, "sequence", 0, forged)), str)


def test_two_tokens_of_a_sequence_cannot_be_in_one_cell():
    model = prepared(MODELS["lfm2"])
    state = session_of(model)
    doubled_up = state._replace(cells=(np.array([0, 1, 2, 3, 3]), np.array([0, 1, 2, 4, 5]), *state.cells[2:]))
    assert isinstance(unpack_session(model, pack_session(model, doubled_up, True), 4, True), str)


@pytest.mark.parametrize("cells", [[0, 1, 2, 3, 8], [0, 1, 2, 3, -1], [0, 1, 2, 3, 3]])
def test_cells_that_are_not_there_or_nobodys_are_refused(cells):
    model = prepared(MODELS["lfm2"])
    state = session_of(model)
    listed = (np.array(cells, np.int64), *state.cells[1:])
    if cells[-1] == 3:
        listed = (listed[0], listed[0], listed[2], np.array([6, 7, 3]))
    assert isinstance(unpack_session(model, pack_session(model, state._replace(cells=listed), False), 4, False), str)


@EVERY_MODEL
def test_equal_states_give_equal_bytes(name):
    model = prepared(MODELS[name])
    assert len({pack(model, state_of(model)) for _ in range(8)}) == 1


def test_a_tensor_that_is_missing_renamed_or_of_another_shape_is_refused():
    model = prepared(MODELS["mamba2"])
    header, data = parts(pack(model, state_of(model)))
    name = "layers.0.convolution"
    renamed = {("layers.9.convolution" if key == name else key): value for key, value in header.items()}
    flat = {**header, name: {**header[name], "shape": [int(np.prod(header[name]["shape"]))]}}
    integers = {**header, name: {**header[name], "dtype": "I32"}}
    huge = {**header, name: {**header[name], "shape": [1 << 40, 1 << 20]}}
    missing = {key: value for key, value in header.items() if key != name}
    for changed in (renamed, flat, integers, huge, missing):
        assert isinstance(unpack(model, joined(changed, data)), str)


def test_an_unchanged_blob_that_is_taken_apart_and_joined_is_accepted():
    model = prepared(MODELS["mamba2"])
    header, data = parts(pack(model, state_of(model)))
    assert not isinstance(unpack(model, joined(header, data)), str)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_refused_with_a_reason(blob):
    assert isinstance(unpack(prepared(MODELS["mamba2"]), blob), str)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    )
)
@settings(max_examples=100, deadline=None)
def test_any_readable_header_is_refused_with_a_reason(header):
    assert isinstance(unpack(prepared(MODELS["mamba2"]), joined(header, b"")), str)


def test_a_deeply_nested_header_is_refused():
    text = b"[" * 100000
    assert isinstance(unpack(prepared(MODELS["mamba2"]), len(text).to_bytes(8, "little") + text), str)
