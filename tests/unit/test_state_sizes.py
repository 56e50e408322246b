"""Sizes of caches: the widths of the literature and of engines, a worked account, and the bytes that our own caches take.

Source: llama.cpp's llama-hparams.cpp, for the widths.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statedrift.impl.cells import StrictCells
from statedrift.impl.model import open_cache, prepared, session_bytes
from statedrift.impl.ring import RingCells
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.errors import UsageError
from statedrift.spec.families import FAMILIES
from statedrift.spec.models import Model
from statedrift.spec.state_sizes import (
    ELEMENT_TYPES,
    KINDS,
    CacheSize,
    SideBytes,
    StateLayers,
    planes_decode_cost,
    ring_decode_cost,
    row_bytes,
    size_of,
    width,
)

KIB, MIB = 1 << 10, 1 << 20
DELTA_NETS = StateLayers(36, "gated_delta_net", {"d_inner": 2048, "d_state": 128, "n_group": 16, "d_conv": 4})
ATTENTION = StateLayers(12, "attention", {"n_head_kv": 4, "head_dim": 128})
ACCOUNT = CacheSize(n_seq_max=4, n_rs_seq=0, n_ctx=8192, kv="f16")


def widths(kind: str, **dimensions: int) -> dict[str, int]:
    return {part.name: width(part, dimensions) for part in KINDS[kind].parts}


@pytest.mark.parametrize(
    ("kind", "dimensions", "expected"),
    [
        ("rwkv", {"n_embd": 2048, "wkv_head_size": 64, "token_shift_count": 2}, {"r": 4096, "s": 131_072}),
        ("rwkv", {"n_embd": 768, "wkv_head_size": 64, "token_shift_count": 1}, {"r": 768, "s": 49_152}),
        ("short_convolution", {"n_embd": 1024, "l_cache": 3}, {"r": 2048}),
        ("kimi_delta_attention", {"n_head": 32, "head_dim": 128, "d_conv": 4}, {"r": 36_864, "s": 524_288}),
        ("lightning_attention", {"n_head": 64, "head_dim": 128}, {"s": 1_048_576}),
        ("mamba1", {"d_inner": 5120, "d_state": 16, "d_conv": 4}, {"r": 15_360, "s": 81_920}),
        ("mamba2", {"d_inner": 2048, "d_state": 128, "n_group": 8, "d_conv": 4}, {"r": 12_288, "s": 262_144}),
        ("gated_delta_net", {"d_inner": 2048, "d_state": 128, "n_group": 16, "d_conv": 4}, {"r": 18_432, "s": 262_144}),
        ("per_layer_embedding", {"n_embd": 4096, "d_conv": 4, "ngram_size": 3, "hyper_connections": 4}, {"p": 147_456}),
        ("attention", {"n_head_kv": 4, "head_dim": 128}, {"k": 512, "v": 512}),
        ("window_attention", {"n_head_kv": 8, "head_dim": 64, "window": 1024}, {"k": 512, "v": 512}),
    ],
)
def test_a_row_is_as_wide_as_the_engine_makes_it(kind: str, dimensions: dict[str, int], expected: dict[str, int]) -> None:
    assert widths(kind, **dimensions) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_uses_all_its_dimensions_and_no_other(kind: str) -> None:
    names = {name for part in KINDS[kind].parts for name in compile(part.formula, kind, "eval").co_names}
    assert names == set(KINDS[kind].example) - {"window"}


def test_the_worked_account_comes_out() -> None:
    size = size_of([DELTA_NETS, ATTENTION], ACCOUNT)
    delta_nets, attention = size.layers
    assert [(part.elements, part.row_bytes) for part in delta_nets.parts] == [(18_432, 72 * KIB), (262_144, MIB)]
    assert delta_nets.one_bytes == MIB + 72 * KIB
    assert (attention.one_bytes, attention.layer_bytes) == (2048, 64 * MIB)
    assert size.cell / MIB == pytest.approx(38.53, abs=0.005)
    assert size.session.attention == 768 * MIB
    assert size.session.recurrent / MIB == pytest.approx(154.1, abs=0.05)


def test_snapshots_multiply_the_states_and_nothing_else() -> None:
    size = size_of([DELTA_NETS, ATTENTION], CacheSize(n_seq_max=4, n_rs_seq=3, n_ctx=8192, kv="f16"))
    assert size.session == SideBytes(4 * 4 * size.cell, 768 * MIB)
    assert size.session.recurrent / MIB == pytest.approx(616.5)


@pytest.mark.parametrize(
    ("element_type", "expected"), [("f32", 2048), ("f16", 1024), ("bf16", 1024), ("q8_0", 512 // 32 * 34), ("q4_0", 512 // 32 * 18)]
)
def test_a_row_is_packed_by_its_type(element_type: str, expected: int) -> None:
    assert row_bytes(512, element_type) == expected


@pytest.mark.parametrize("element_type", ["q8_0", "q4_0"])
def test_a_row_that_is_no_whole_number_of_blocks_is_refused(element_type: str) -> None:
    with pytest.raises(UsageError, match=f"`kv={element_type}` packs 32 elements"):
        row_bytes(80, element_type)


def test_every_head_must_be_a_whole_number_of_blocks() -> None:
    layers = [StateLayers(1, "attention", {"n_head_kv": 8, "head_dim": 100})]
    with pytest.raises(UsageError, match="a head of 100"):
        size_of(layers, CacheSize(kv="q8_0"))


def test_states_have_a_type_of_their_own() -> None:
    full = size_of([DELTA_NETS, ATTENTION], ACCOUNT)
    half = size_of([DELTA_NETS, ATTENTION], CacheSize(n_seq_max=4, n_rs_seq=0, n_ctx=8192, kv="f16", state="f16"))
    assert (half.session.recurrent * 2, half.session.attention) == (full.session.recurrent, full.session.attention)


@pytest.mark.parametrize(
    ("keys", "sequence_tokens", "session_tokens"),
    [
        ({}, 1024 + 64, 4 * (1024 + 64)),
        ({"unified": 1}, 1024 + 64, 4 * 1024 + 64),
        ({"swa_full": 1}, 8192, 4 * 8192),
        ({"n_ctx": 1000}, 1000, 4000),
        ({"n_ctx": 1000, "unified": 1}, 1000, 4000),
    ],
)
def test_a_window_keeps_itself_and_a_micro_batch(keys: dict[str, int], sequence_tokens: int, session_tokens: int) -> None:
    layers = StateLayers(1, "window_attention", {"n_head_kv": 4, "head_dim": 128, "window": 1024})
    part = size_of([layers], CacheSize(**{"n_ctx": 8192, **keys})).layers[0].parts[0]  # type: ignore[arg-type]
    assert (part.sequence_rows, part.session_rows) == (sequence_tokens, session_tokens)


@given(
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(0, 5),
    st.sampled_from(sorted(ELEMENT_TYPES)),
)
def test_the_parts_add_up(kinds: list[str], n_seq_max: int, n_rs_seq: int, kv: str) -> None:
    cache = CacheSize(n_seq_max=n_seq_max, n_rs_seq=n_rs_seq, n_ctx=512, kv=kv)
    size = size_of([StateLayers(count, kind, KINDS[kind].example) for count, kind in enumerate(kinds, 1)], cache)
    assert sum(part.bytes for group in size.layers for part in group.parts) == size.session.total
    assert sum(group.layers.count * group.layer_bytes for group in size.layers) == size.session.total
    assert size.session.recurrent == n_seq_max * size.sequence.recurrent == n_seq_max * (1 + n_rs_seq) * size.cell


@pytest.mark.parametrize(
    ("layers", "cache", "words"),
    [
        (StateLayers(1, "rwkv9", {}), CacheSize(), "rwkv9.*there are rwkv, short_convolution"),
        (StateLayers(0, "lightning_attention", {"n_head": 1, "head_dim": 1}), CacheSize(), "count of layers"),
        (StateLayers(1, "lightning_attention", {"n_head": 1}), CacheSize(), "needs `head_dim`, as in head_dim=128"),
        (StateLayers(1, "lightning_attention", {"n_head": 1, "head_dim": 1, "d_conv": 4}), CacheSize(), "no dimension `d_conv`"),
        (StateLayers(1, "lightning_attention", {"n_head": 1, "head_dim": 0}), CacheSize(), "`head_dim` must be a whole number from 1"),
        (StateLayers(1, "lightning_attention", {"n_head": 1, "head_dim": 1 << 31}), CacheSize(), "`head_dim` must be a whole number"),
        (ATTENTION, CacheSize(n_seq_max=0), "`n_seq_max`"),
        (ATTENTION, CacheSize(n_rs_seq=-1), "`n_rs_seq`"),
        (ATTENTION, CacheSize(unified=2), "`unified` must be a whole number from 0 to 1"),
        (ATTENTION, CacheSize(kv="q5_0"), "`kv` must be one of f32, f16, bf16, q8_0, q4_0"),
        (ATTENTION, CacheSize(state="q8_0"), "`state` must be one of f32, f16"),
    ],
)
def test_what_cannot_be_is_refused_by_name(layers: StateLayers, cache: CacheSize, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        size_of([layers], cache)


# --- planes and ring ---------------------------------------------------------------------------------------------------------


def test_a_ring_moves_what_planes_move_and_keeps_more() -> None:
    size = size_of([DELTA_NETS], CacheSize(n_rs_seq=3))
    planes, ring = planes_decode_cost(size, 1), ring_decode_cost(size, 1)
    assert (planes.read_bytes, planes.written_bytes, planes.depth) == (size.cell, size.cell, 0)
    assert (ring.read_bytes, ring.written_bytes, ring.depth) == (size.cell, size.cell, 3)


@pytest.mark.parametrize(("token_count", "written", "depth", "copied"), [(1, 1, 0, 3), (2, 2, 1, 2), (4, 4, 3, 0), (100, 4, 3, 0)])
def test_a_batch_writes_a_row_for_each_of_its_newest_tokens(token_count: int, written: int, depth: int, copied: int) -> None:
    size = size_of([DELTA_NETS], CacheSize(n_rs_seq=3))
    planes, ring = planes_decode_cost(size, token_count), ring_decode_cost(size, token_count)
    assert planes.written_bytes == ring.written_bytes == written * size.cell
    assert planes.depth == depth
    assert (planes.copied_bytes, ring.copied_bytes) == (0, copied * size.cell)


# --- families, and our own caches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_says_the_same_of_its_layers_as_of_its_rows(family: str) -> None:
    facts = FAMILIES[family]
    layers = facts.state_layers(facts.defaults)
    embeddings = [group for group in layers if group.kind == "per_layer_embedding"]  # beside what else a layer keeps
    layers = tuple(group for group in layers if group not in embeddings)
    recurrent = [group for group in layers if KINDS[group.kind].parts[0].per == "state"]
    assert sum(group.count for group in recurrent) == len(facts.recurrent_layers(facts.defaults))
    assert sum(group.count for group in layers) - sum(group.count for group in recurrent) == len(facts.attention_layers(facts.defaults))
    for group in recurrent:
        parts = {part.name: width(part, group.dimensions) for part in KINDS[group.kind].parts}
        assert (parts.get("r", 0), parts.get("s", 0)) == facts.row_widths(facts.defaults)[:2]
    part_widths = [width(KINDS[group.kind].parts[0], group.dimensions) for group in embeddings]
    assert part_widths == [facts.row_widths(facts.defaults).embedding] * len(embeddings)


@pytest.mark.parametrize("cells_class", [StrictCells, RingCells])
@pytest.mark.parametrize("unified", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_our_own_caches_take_these_bytes(family: str, unified: int, cells_class: type[StrictCells] | type[RingCells]) -> None:
    configuration = CacheConfiguration(n_seq_max=3, n_rs_seq=2, n_ctx=40, unified=unified)
    # our windows limit what is seen, not what is kept
    cache = CacheSize(n_seq_max=3, n_rs_seq=2, n_ctx=40, unified=unified, swa_full=1)
    size = size_of(FAMILIES[family].state_layers(FAMILIES[family].defaults), cache)
    model = prepared(Model(family))
    _, memory = open_cache(model, configuration, cells_class)
    assert memory.convolution_rows.nbytes + memory.recurrent_rows.nbytes + memory.embedding_rows.nbytes == size.session.recurrent
    tokens = memory.index_rows[..., -1:].nbytes  # beside an indexer's key stands the token, which an engine keeps in its list of cells
    assert sum(array.nbytes for array in (*memory.keys, *memory.values, memory.index_rows)) == size.session.attention + tokens
    lists = tokens + 3 * 40 * (3 if unified else 1) * 4 + 3 * 40 * 12  # which cell has which token, and which are free
    assert session_bytes(model, configuration) == size.session.total + (lists if model.attention_layers else 0)
