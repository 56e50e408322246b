"""Saved states: what is read is what was written, and anything else is refused with a reason."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statedrift.impl.hybrid_cache import SequenceState
from statedrift.impl.model import prepared
from statedrift.impl.saved_state import pack, unpack
from statedrift.spec.families import doubled
from statedrift.spec.models import Model

MODELS = {
    "mamba2": Model("mamba2", dimensions=(("n_layer", 1),)),
    "lfm2": Model("lfm2"),
    "lfm2-attention": Model("lfm2", dimensions=(("attention_period", 1),)),
    "lfm2-recurrent": Model("lfm2", dimensions=(("attention_period", 9),)),
    "nemotron_h": Model("nemotron_h"),
    "qwen35": Model("qwen35"),
}
EVERY_MODEL = pytest.mark.parametrize("name", list(MODELS))


def state_of(model, position=4):
    generator = np.random.default_rng(position)

    def draw(*shape):
        return generator.standard_normal(shape).astype(np.float32)

    recurrent, attention = len(model.recurrent_layers), len(model.attention_layers)
    cells = (attention, position + 1, model.key_heads, model.head_dim)
    return SequenceState(
        position,
        draw(recurrent, np.prod(model.convolution_shape)) if recurrent else None,
        draw(recurrent, np.prod(model.recurrent_shape)) if recurrent else None,
        draw(*cells) if attention else None,
        draw(*cells) if attention else None,
    )


def parts(blob):
    """The header as an object, and the bytes of the tensors."""
    end = 8 + int.from_bytes(blob[:8], "little")
    return json.loads(blob[8:end]), blob[end:]


def joined(header, data):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@EVERY_MODEL
@pytest.mark.parametrize("position", [0, 4])
def test_a_state_is_read_back_bit_by_bit(name, position):
    model = prepared(MODELS[name])
    state = state_of(model, position)
    back = unpack(model, pack(model, state))
    assert not isinstance(back, str)
    assert back.position == position
    for mine, theirs in zip(state[1:], back[1:], strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or np.array_equal(mine, theirs)


@EVERY_MODEL
def test_the_state_of_an_empty_sequence_is_read_back(name):
    model = prepared(MODELS[name])
    assert unpack(model, pack(model, SequenceState(-1))) == SequenceState(-1)


def test_a_state_that_holds_nan_is_read_back():
    model = prepared(MODELS["mamba2"])
    state = state_of(model)
    state.convolution[:] = np.nan
    assert np.isnan(unpack(model, pack(model, state)).convolution).all()


@EVERY_MODEL
def test_every_shorter_blob_is_refused(name):
    model = prepared(MODELS[name])
    blob = pack(model, state_of(model, 0))
    for length in [*range(0, len(blob), 97), len(blob) - 1]:
        assert isinstance(unpack(model, blob[:length]), str)


@EVERY_MODEL
def test_a_blob_with_any_bit_flipped_is_refused(name):
    model = prepared(MODELS[name])
    blob = pack(model, state_of(model, 0))
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


@pytest.mark.parametrize("position", [-2, 3, 5, 1 << 31, 1 << 70, 4.5, "4", None])
def test_a_position_that_lies_is_refused(position):
    model = prepared(MODELS["lfm2"])
    header, data = parts(pack(model, state_of(model)))
    metadata = json.loads(header["__metadata__"]["statedrift"])
    assert metadata["position"] == 4
    header["__metadata__"]["statedrift"] = json.dumps({**metadata, "position": position})
    assert isinstance(unpack(model, joined(header, data)), str)


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
