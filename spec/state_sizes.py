"""Sizes: how many bytes the cache of a model of any real size takes, and how many a decode moves.

Rules
- A layer kind is data: the parts it keeps and each part's width as a formula over named dimensions. What is shown and what is computed is
  the same text.
- A part is a row a state (r, s, p: a fixed size, whatever the length) or a row a token (k, v, i). A cell holds 1 + n_rs_seq states.
- Bytes are those of rows. What an engine adds (lists of cells, lengths rounded up) is not counted; docs/caches.md says where it does.
- Nothing here knows a family: a family says which kinds its layers are (families/family.py, `state_layers`).
Sources: llama.cpp's llama-hparams.cpp (n_embd_r, n_embd_s, ple_conv_state) and llama-kv-cache-iswa.cpp; each kind names its paper.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from .errors import UsageError

VALUE_MAX = (1 << 31) - 1
"""Bound on a dimension."""
LAYERS_MAX = 65536
"""Bound on the layers of one kind, and of a model."""


class Part(msgspec.Struct, frozen=True):
    """One part of what a layer keeps.

    name     r, s, p (a row a state) or k, v (a row a token), as llama.cpp calls them; i (a row a token) of an indexer
    title    what it holds
    formula  elements of a row: whole numbers, + - * and names of dimensions
    """

    name: str
    title: str
    formula: str

    @property
    def per(self) -> str:
        """What has a row of this part: "state" or "token"."""
        return "token" if self.name in ("k", "v", "i") else "state"


class LayerKind(msgspec.Struct, frozen=True):
    """What layers of one kind keep.

    example  the kind's dimensions, at the size of a real model
    source   where the formulas come from
    """

    name: str
    title: str
    example: dict[str, int]
    parts: tuple[Part, ...]
    source: str


_SCAN_STATE = Part("s", "recurrent", "d_state * d_inner")
_SCAN_CONVOLUTION = Part("r", "convolution", "(d_conv - 1) * (d_inner + 2 * n_group * d_state)")
_HEAD_STATE = Part("s", "recurrent", "n_head * head_dim * head_dim")
_KEYS_AND_VALUES = (Part("k", "keys", "n_head_kv * head_dim"), Part("v", "values", "n_head_kv * head_dim"))

KINDS: dict[str, LayerKind] = {
    kind.name: kind
    for kind in (
        LayerKind(
            "rwkv", "RWKV-6 and RWKV-7",
            {"n_embd": 2048, "wkv_head_size": 64, "token_shift_count": 2},
            (Part("r", "token shift", "token_shift_count * n_embd"), Part("s", "recurrent", "n_embd * wkv_head_size")),
            "Peng et al. 2024 (arXiv:2404.05892); llama.cpp, llama-hparams.cpp, n_embd_r and n_embd_s",
        ),
        LayerKind(
            "short_convolution", "LFM2's gated short convolution; it has no recurrent part",
            {"n_embd": 2048, "l_cache": 3},
            (Part("r", "convolution", "n_embd * (l_cache - 1)"),),
            "Transformers' Lfm2ForCausalLM; llama.cpp, llama-hparams.cpp, n_embd_r",
        ),
        LayerKind(
            "kimi_delta_attention", "Kimi Linear's delta attention; q, k and v are convolved apart",
            {"n_head": 32, "head_dim": 128, "d_conv": 4},
            (Part("r", "convolution", "3 * (d_conv - 1) * n_head * head_dim"), _HEAD_STATE),
            "Kimi Team 2025 (arXiv:2510.26692); llama.cpp, llama-hparams.cpp, n_embd_r and n_embd_s",
        ),
        LayerKind(
            "lightning_attention", "MiniMax-01's linear attention; it has no convolution",
            {"n_head": 64, "head_dim": 128},
            (_HEAD_STATE,),
            "MiniMax 2025 (arXiv:2501.08313); llama.cpp, llama-hparams.cpp, n_embd_s",
        ),
        LayerKind(
            "mamba1", "Mamba-1's selective scan",
            {"d_inner": 5120, "d_state": 16, "d_conv": 4},
            (Part("r", "convolution", "(d_conv - 1) * d_inner"), _SCAN_STATE),
            "Gu and Dao 2023 (arXiv:2312.00752); llama.cpp, llama-hparams.cpp, n_embd_r and n_embd_s",
        ),
        LayerKind(
            "mamba2", "Mamba-2's state-space scan; x, B and C are convolved",
            {"d_inner": 2048, "d_state": 128, "n_group": 8, "d_conv": 4},
            (_SCAN_CONVOLUTION, _SCAN_STATE),
            "Dao and Gu 2024 (arXiv:2405.21060); llama.cpp, llama-hparams.cpp, n_embd_r and n_embd_s",
        ),
        LayerKind(
            "gated_delta_net", "Qwen3.5's delta rule; q, k and v are convolved; n_group is key heads",
            {"d_inner": 2048, "d_state": 128, "n_group": 16, "d_conv": 4},
            (_SCAN_CONVOLUTION, _SCAN_STATE),
            "Yang et al. 2024 (arXiv:2412.06464); llama.cpp, llama-hparams.cpp, n_embd_r and n_embd_s",
        ),
        LayerKind(
            "per_layer_embedding", "convolution of n-gram embeddings, beside what else a layer keeps",
            {"n_embd": 2048, "d_conv": 4, "ngram_size": 3, "hyper_connections": 4},
            (Part("p", "convolution", "(d_conv - 1) * ngram_size * hyper_connections * n_embd"),),
            "llama.cpp, llama-hparams.cpp, ple_conv_state",
        ),
        LayerKind(
            "attention", "grouped-query attention: a row for every token",
            {"n_head_kv": 4, "head_dim": 128},
            _KEYS_AND_VALUES,
            "Ainslie et al. 2023 (arXiv:2305.13245); llama.cpp, llama-kv-cache.cpp",
        ),
        LayerKind(
            "latent_attention", "latent attention: keys and values of all heads are made of one row",
            {"kv_lora_rank": 512, "qk_rope_dim": 64},
            (Part("k", "latents", "kv_lora_rank + qk_rope_dim"),),
            "DeepSeek-AI 2024 (arXiv:2405.04434); llama.cpp, llama-kv-cache.cpp",
        ),
        LayerKind(
            "window_attention", "attention that sees only the newest `window` tokens",
            {"n_head_kv": 4, "head_dim": 128, "window": 4096},
            _KEYS_AND_VALUES,
            "Beltagy, Peters and Cohan 2020 (arXiv:2004.05150); llama.cpp, llama-kv-cache-iswa.cpp",
        ),
        LayerKind(
            "indexed_attention", "grouped-query attention to tokens that an indexer selects",
            {"n_head_kv": 2, "head_dim": 256, "index_dim": 128},
            (*_KEYS_AND_VALUES, Part("i", "index keys", "index_dim")),
            "Transformers' Qwen4ExpForCausalLM; llama.cpp, llama-memory-hybrid-idx.cpp",
        ),
    )
}  # fmt: skip


class StateLayers(msgspec.Struct, frozen=True):
    """Layers that keep the same: how many, of which kind, with which dimensions (all of the kind's)."""

    count: int
    kind: str
    dimensions: dict[str, int]


class ElementType(msgspec.Struct, frozen=True):
    """How elements are packed: `block_bytes` for every `block_elements`."""

    block_elements: int
    block_bytes: int


ELEMENT_TYPES: dict[str, ElementType] = {
    "f32": ElementType(1, 4),
    "f16": ElementType(1, 2),
    "bf16": ElementType(1, 2),
    "q8_0": ElementType(32, 34),
    "q4_0": ElementType(32, 18),
}
"""Source of the blocks: llama.cpp, ggml-common.h."""


class CacheSize(msgspec.Struct, frozen=True):
    """How a session's cache is laid out; the keys that a program's `cache` line has too mean the same here.

    n_seq_max  sequences, and cells
    n_rs_seq   snapshots of a cell beside its newest state
    n_ctx      tokens a sequence; the whole pool is n_ctx * n_seq_max
    n_ubatch   tokens a micro-batch: a window's cells hold the window and one of them
    unified    1: all sequences share one pool of attention cells
    swa_full   1: window attention keeps n_ctx tokens
    kv         element type of keys and values
    state      element type of r, s and p
    """

    n_seq_max: int = 4
    n_rs_seq: int = 3
    n_ctx: int = 256
    n_ubatch: int = 64
    unified: int = 0
    swa_full: int = 0
    kv: str = "f32"
    state: str = "f32"


CACHE_SIZE_KEYS: tuple[str, ...] = CacheSize.__struct_fields__
_LEAST = {"n_rs_seq": 0, "unified": 0, "swa_full": 0}
_MOST = {"unified": 1, "swa_full": 1}
_TYPES_OF = {"kv": tuple(ELEMENT_TYPES), "state": ("f32", "f16")}


class PartSize(msgspec.Struct, frozen=True):
    """One part of one group of layers.

    elements       of a row
    type           how they are packed
    row_bytes      of one row
    sequence_rows  rows of a sequence in one layer: 1 + n_rs_seq, or the tokens it can have
    session_rows   rows of the session in one layer
    layer_bytes    session_rows * row_bytes
    bytes          of all layers of the group
    """

    part: Part
    elements: int
    type: str
    row_bytes: int
    sequence_rows: int
    session_rows: int
    layer_bytes: int
    bytes: int


class LayersSize(msgspec.Struct, frozen=True):
    """The parts of one group of layers.

    one_bytes    of one cell, or one token, in one layer
    layer_bytes  of the session in one layer
    """

    layers: StateLayers
    parts: tuple[PartSize, ...]

    @property
    def one_bytes(self) -> int:
        return sum(part.row_bytes for part in self.parts)

    @property
    def layer_bytes(self) -> int:
        return sum(part.layer_bytes for part in self.parts)


class SideBytes(msgspec.Struct, frozen=True):
    """Bytes of the layers that keep states, and of those that keep tokens."""

    recurrent: int
    attention: int

    @property
    def total(self) -> int:
        return self.recurrent + self.attention


class Size(msgspec.Struct, frozen=True):
    """The bytes of a cache.

    cell      one state: a row of every recurrent part in every layer
    token     keys and values of one token in every attention layer
    sequence  1 + n_rs_seq states, and the tokens that a sequence can have
    session   everything
    """

    cache: CacheSize
    layers: tuple[LayersSize, ...]
    cell: int
    token: int
    sequence: SideBytes
    session: SideBytes


def width(part: Part, dimensions: Mapping[str, int]) -> int:
    """Elements of a row of `part`; `dimensions` has every name in its formula."""
    result: int = eval(part.formula, {"__builtins__": {}}, dict(dimensions))  # a constant of this file, never what a user gave
    return result


def row_bytes(elements: int, element_type: str, head_dim: int | None = None) -> int:
    """Bytes of a row. Raises UsageError when the type packs blocks that a head of the row (or the row, without heads) cannot be cut into:
    llama.cpp asks it of every head (llama-context.cpp, llama_init_from_model)."""
    packing = ELEMENT_TYPES[element_type]
    whole = head_dim or elements
    if whole % packing.block_elements:
        raise UsageError(
            f"`kv={element_type}` packs {packing.block_elements} elements in a block, and {'a head' if head_dim else 'a row'} of {whole} "
            "cannot be cut into blocks; choose f16, or other heads"
        )
    return elements // packing.block_elements * packing.block_bytes


def check_cache_size(cache: CacheSize) -> None:
    """Raise UsageError that names the key whose value is out of bounds."""
    for key in CACHE_SIZE_KEYS:
        value = getattr(cache, key)
        if key in _TYPES_OF:
            if value not in _TYPES_OF[key]:
                raise UsageError(f"`{key}` must be one of {', '.join(_TYPES_OF[key])}, not {value}")
        else:
            _check_range(key, value, _LEAST.get(key, 1), _MOST.get(key, VALUE_MAX))


def check_layers(layers: StateLayers) -> None:
    """Raise UsageError for an unknown kind, a dimension that is missing, too many or out of bounds, or a count that is."""
    kind = KINDS.get(layers.kind)
    if kind is None:
        raise UsageError(f"unknown layer kind `{layers.kind}`; there are {', '.join(KINDS)}")
    _check_range("the count of layers", layers.count, 1, LAYERS_MAX)
    for name, value in layers.dimensions.items():
        if name not in kind.example:
            raise UsageError(f"{kind.name} has no dimension `{name}`; it has {', '.join(kind.example)}")
        _check_range(name, value, 1, VALUE_MAX)
    for name, value in kind.example.items():
        if name not in layers.dimensions:
            raise UsageError(f"{kind.name} needs `{name}`, as in {name}={value}")


def _check_range(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        shown = name if " " in name else f"`{name}`"
        raise UsageError(f"{shown} must be a whole number from {least} to {most}, not {value}")


def size_of(layers: Sequence[StateLayers], cache: CacheSize) -> Size:
    """The size of a cache of these layers. Raises UsageError for layers or a cache that cannot be."""
    check_cache_size(cache)
    for group in layers:
        check_layers(group)
    groups = tuple(LayersSize(group, tuple(_part_size(part, group, cache) for part in KINDS[group.kind].parts)) for group in layers)
    once = _summed(groups, lambda part: 1)
    return Size(
        cache=cache,
        layers=groups,
        cell=once.recurrent,
        token=once.attention,
        sequence=_summed(groups, lambda part: part.sequence_rows),
        session=_summed(groups, lambda part: part.session_rows),
    )


def _part_size(part: Part, layers: StateLayers, cache: CacheSize) -> PartSize:
    elements = width(part, layers.dimensions)
    element_type = cache.state if part.per == "state" else cache.kv
    one = row_bytes(elements, element_type, layers.dimensions.get("head_dim") if part.per == "token" else None)
    if part.per == "state":
        sequence_rows = 1 + cache.n_rs_seq
        session_rows = cache.n_seq_max * sequence_rows
    else:
        sequence_rows, session_rows = _tokens_kept(layers.dimensions.get("window"), cache)
    return PartSize(
        part, elements, element_type, one, sequence_rows, session_rows, session_rows * one, layers.count * session_rows * one
    )  # fmt: skip


def _tokens_kept(window: int | None, cache: CacheSize) -> tuple[int, int]:
    """Tokens that an attention layer keeps: at most of one sequence, and of the session."""
    pool = cache.n_ctx * cache.n_seq_max
    if window is None or cache.swa_full:
        return cache.n_ctx, pool
    kept = min(cache.n_ctx, window + cache.n_ubatch)
    return kept, min(pool, window * cache.n_seq_max + cache.n_ubatch) if cache.unified else kept * cache.n_seq_max


def _summed(groups: Sequence[LayersSize], rows: Callable[[PartSize], int]) -> SideBytes:
    """Bytes of as many rows of every part as `rows` says, on each side."""
    sides = {"state": 0, "token": 0}
    for group in groups:
        for size in group.parts:
            sides[size.part.per] += group.layers.count * size.row_bytes * rows(size)
    return SideBytes(sides["state"], sides["token"])


# --- planes and ring ---------------------------------------------------------------------------------------------------------


class DecodeCost(msgspec.Struct, frozen=True):
    """What a decode of `token_count` tokens of one sequence does to its states.

    read_bytes, written_bytes  of states moved; attention is not counted
    copied_bytes               read, and written again, on top of them by the first decode after a share
    depth                      tokens that can be taken back afterwards
    """

    token_count: int
    read_bytes: int
    written_bytes: int
    copied_bytes: int
    depth: int


def planes_decode_cost(size: Size, token_count: int) -> DecodeCost:
    """With planes: one row is read, and a row is written for each of the newest tokens of the batch; what an earlier batch left is void."""
    written = min(token_count, 1 + size.cache.n_rs_seq)
    return DecodeCost(token_count, size.cell, written * size.cell, 0, written - 1)


def ring_decode_cost(size: Size, token_count: int) -> DecodeCost:
    """With a ring whose cell is full: the same rows, each in the next plane, so that those before it stay.

    A sequence that leaves a shared cell copies as many of the states before the batch as remain in reach: its own ring must hold them.
    """
    n_rs_seq = size.cache.n_rs_seq
    written = min(token_count, 1 + n_rs_seq)
    return DecodeCost(token_count, size.cell, written * size.cell, max(0, n_rs_seq - (token_count - 1)) * size.cell, n_rs_seq)
