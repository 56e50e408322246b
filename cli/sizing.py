"""`statedrift size`: bytes of a cache of any real size, and the kinds of layers that are known.

Rules
- Dimensions are bounded by what makes a model of the family, not by the toy sizes that programs run at.
- Everything that is computed is in spec/state_sizes.py; here words are read and numbers are shown.
- Bytes are shown in KiB, MiB and so on with four digits, and exactly with `--json`.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ..reports.terminal import WIDTH, aligned, plural, wrapped
from ..spec.errors import UsageError
from ..spec.families import family_of
from ..spec.models import Model
from ..spec.state_sizes import (
    CACHE_SIZE_KEYS,
    KINDS,
    LAYERS_MAX,
    VALUE_MAX,
    CacheSize,
    DecodeCost,
    SideBytes,
    Size,
    StateLayers,
    planes_decode_cost,
    ring_decode_cost,
    row_bytes,
    size_of,
    width,
)
from . import failures
from .output import say

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_WORD = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)=([^\s=]+)")
_NUMBER = re.compile(r"-?[0-9]{1,40}")


class Sized(msgspec.Struct, frozen=True):
    """A size and what it is of: a family's name and all its dimensions, or "layers" and none."""

    name: str
    dimensions: dict[str, int]
    size: Size


def size_command(families: Sequence[str], model: str | None, layers: Sequence[str], cache: str, as_json: bool) -> int:
    """Show the sizes that were asked for, or all layer kinds when none was; the answer is the exit status."""
    if not families and not layers:
        if model is not None or cache:
            raise UsageError("`size` needs a --family or --layers, as in --family lfm2; without either it lists the layer kinds")
        say(kinds_json() if as_json else kinds_text(), plain=as_json)
        return failures.OK
    shape = read_cache(cache)
    sized = sizes_of(tuple(dict.fromkeys(families)), model, layers, shape)
    say(sizes_json(sized) if as_json else "\n".join(map(size_text, sized)), plain=as_json)
    return failures.OK


# --- reading -----------------------------------------------------------------------------------------------------------------


def sizes_of(families: Sequence[str], model: str | None, layers: Sequence[str], cache: CacheSize) -> list[Sized]:
    """A size for each family, with the given layers added to it; one of the layers alone when there is no family."""
    if model is not None and len(families) != 1:
        raise UsageError("`--model` changes the dimensions of one family; give one --family")
    extra = [read_layers(text) for text in layers]
    if not families:
        return [Sized("layers", {}, size_of(extra, cache))]
    result = []
    for name in families:
        dimensions = family_dimensions(name, model or "")
        groups = [group for group in family_of(Model(name)).state_layers(dimensions) if group.count]
        result.append(Sized(name, dimensions, size_of([*groups, *extra], cache)))
    return result


def family_dimensions(name: str, changes: str) -> dict[str, int]:
    """The family's dimensions after `changes`, which have the form of a program's `model` line: "n_layer=48 n_embd=2048"."""
    family = family_of(Model(name))
    if not family.is_modelled:
        raise UsageError(
            f"what family {name} keeps is known to its engine only; give its layers with --layers, as in `12 {_as_layers('attention')}`"
        )
    dimensions = dict(family.defaults)
    for key, value in _words(changes, "--model"):
        if key not in dimensions:
            raise UsageError(f"--model: family {name} has no dimension `{key}`; it has {', '.join(dimensions)}")
        most = LAYERS_MAX if key == "n_layer" else VALUE_MAX
        dimensions[key] = _whole_number(key, value, "--model")
        if not 1 <= dimensions[key] <= most:
            raise UsageError(f"--model: `{key}` must be a whole number from 1 to {most}, not {value}")
    try:
        family.check(dimensions)
    except UsageError as error:
        raise UsageError(f"--model: {error}") from error
    return dimensions


def read_layers(text: str) -> StateLayers:
    """Layers as in "36 gated_delta_net d_inner=2048 d_state=128 n_group=16 d_conv=4"."""
    count, _, rest = text.strip().partition(" ")
    kind, _, dimensions = rest.strip().partition(" ")
    if not _NUMBER.fullmatch(count) or not kind:
        raise UsageError(f"--layers: `{text[:60]}` must be a count, a layer kind and its dimensions, as in `12 {_as_layers('attention')}`")
    words = {key: _whole_number(key, value, "--layers") for key, value in _words(dimensions, "--layers")}
    return StateLayers(int(count), kind, words)


def read_cache(text: str) -> CacheSize:
    """A cache as in "n_seq_max=4 n_rs_seq=3 n_ctx=8192 kv=f16"; keys that are not given have a program's defaults."""
    changes: dict[str, Any] = {}
    for key, value in _words(text, "--cache"):
        if key not in CACHE_SIZE_KEYS:
            raise UsageError(f"--cache: unknown key `{key}`; there are {', '.join(CACHE_SIZE_KEYS)}")
        changes[key] = value if key in ("kv", "state") else _whole_number(key, value, "--cache")
    return CacheSize(**changes)


def _words(text: str, option: str) -> list[tuple[str, str]]:
    """The `key=value` words of an option, no key twice."""
    result: list[tuple[str, str]] = []
    for word in text.split():
        match = _WORD.fullmatch(word)
        if match is None:
            raise UsageError(f"{option}: `{word[:40]}` must be a key and its value, as in n_embd=2048")
        if any(key == match[1] for key, _ in result):
            raise UsageError(f"{option}: `{match[1]}` is given twice")
        result.append((match[1], match[2]))
    return result


def _whole_number(key: str, value: str, option: str) -> int:
    if not _NUMBER.fullmatch(value):
        raise UsageError(f"{option}: `{key}` must be a whole number, not {value[:40]}")
    return int(value)


def _as_layers(kind: str) -> str:
    """A layer kind at its example size, as it is written after a count."""
    return " ".join([kind, *(f"{name}={value}" for name, value in KINDS[kind].example.items())])


# --- showing -----------------------------------------------------------------------------------------------------------------


def bytes_text(count: int) -> str:
    """Bytes for people: four digits, rounded half up, without zeros at the end."""
    unit = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    size = 1 << 10 * unit
    scale = 10 ** max(4 - len(str(count // size)), 0)
    rounded = (2 * count * scale + size) // (2 * size)
    fraction = str(scale + rounded % scale)[1:].rstrip("0")
    return f"{rounded // scale:,}{'.' if fraction else ''}{fraction} {_UNITS[unit]}"


def size_text(sized: Sized) -> str:
    """One size as text: what each part takes, sums, and what planes and a ring make of it."""
    size = sized.size
    words = [sized.name, *(f"{name}={value}" for name, value in sized.dimensions.items())]
    lines = wrapped(" ".join(words), "  ") if sized.dimensions else []
    lines += wrapped(f"cache {_cache_words(size.cache)}", "  ")
    for group in size.layers:
        lines += wrapped(
            f"{plural(group.layers.count, 'layer')} {group.layers.kind} "
            + " ".join(f"{name}={value}" for name, value in group.layers.dimensions.items())
            + f": {bytes_text(group.one_bytes)} a layer and {group.parts[0].part.per}, {bytes_text(group.layer_bytes)} a layer",
            "  ",
        )
    lines += ["", *_part_lines(size), "", *_sum_lines(size)]
    if size.cell:
        lines += ["", *_policy_lines(size)]
    return "\n".join(lines) + "\n"


def _cache_words(cache: CacheSize) -> str:
    return " ".join(f"{key}={getattr(cache, key)}" for key in CACHE_SIZE_KEYS)


def _part_lines(size: Size) -> list[str]:
    heading = ["layers", "part", "elements", "type", "a row", "rows a layer", "a layer", "all layers"]
    rows = [
        [
            f"{group.layers.count:,} {group.layers.kind}" if index == 0 else "",
            f"{part.part.name} {part.part.title}",
            f"{part.elements:,}",
            part.type,
            bytes_text(part.row_bytes),
            f"{part.session_rows:,}",
            bytes_text(part.layer_bytes),
            bytes_text(part.bytes),
        ]
        for group in size.layers
        for index, part in enumerate(group.parts)
    ]
    return aligned([heading, *rows], numbers_from=2)


def _sum_lines(size: Size) -> list[str]:
    cache = size.cache
    holds = [plural(1 + cache.n_rs_seq, "state")] * bool(size.cell) + [plural(cache.n_ctx, "token")] * bool(size.token)
    rows = [
        ["", "recurrent", "attention", "total"],
        ["a state", *_side_texts(SideBytes(size.cell, 0))],
        ["a token", *_side_texts(SideBytes(0, size.token))],
        [f"a sequence, {' and '.join(holds)}", *_side_texts(size.sequence)],
        [f"the session, {plural(cache.n_seq_max, 'sequence')}", *_side_texts(size.session)],
    ]
    return aligned(rows)


def _side_texts(side: SideBytes) -> list[str]:
    return [bytes_text(count) if count else "-" for count in (side.recurrent, side.attention, side.total)]


def _policy_lines(size: Size) -> list[str]:
    """Planes and a ring whose cells are full, side by side."""
    memory = bytes_text(size.session.recurrent)
    rows = [["states", "planes", "ring, full"], ["memory", memory, memory], ["share, rollback, drop", "0 B", "0 B"]]
    for planes, ring in _costs(size):
        batch = f"a decode of {plural(planes.token_count, 'token')}"
        rows += [
            [f"{batch}: reads, writes", _moved(planes), _moved(ring)],
            ["  of a sequence that shared: copies besides", bytes_text(planes.copied_bytes), bytes_text(ring.copied_bytes)],
            ["  can be taken back then", plural(planes.depth, "token"), plural(ring.depth, "token")],
        ]
    return aligned(rows)


def _costs(size: Size) -> list[tuple[DecodeCost, DecodeCost]]:
    """Costs of a decode of one token, and of the shortest one after which planes hold all snapshots."""
    return [
        (planes_decode_cost(size, token_count), ring_decode_cost(size, token_count)) for token_count in sorted({1, 1 + size.cache.n_rs_seq})
    ]


def _moved(cost: DecodeCost) -> str:
    return f"{bytes_text(cost.read_bytes)}, {bytes_text(cost.written_bytes)}"


def sizes_json(sized: Sequence[Sized]) -> str:
    """The sizes as one JSON object and a line end; bytes are exact."""
    entries = [
        {
            "name": one.name,
            "dimensions": one.dimensions,
            "cache": msgspec.to_builtins(one.size.cache),
            "layers": [
                {
                    "count": group.layers.count,
                    "kind": group.layers.kind,
                    "dimensions": group.layers.dimensions,
                    "parts": [
                        {
                            "part": part.part.name,
                            "per": part.part.per,
                            "elements": part.elements,
                            "type": part.type,
                            "row_bytes": part.row_bytes,
                            "rows_per_layer": part.session_rows,
                            "layer_bytes": part.layer_bytes,
                            "bytes": part.bytes,
                        }
                        for part in group.parts
                    ],
                }
                for group in one.size.layers
            ],
            "cell_bytes": one.size.cell,
            "token_bytes": one.size.token,
            "sequence_bytes": _side_object(one.size.sequence),
            "session_bytes": _side_object(one.size.session),
            "decodes": {
                "planes": [msgspec.to_builtins(planes) for planes, _ in _costs(one.size)],
                "ring": [msgspec.to_builtins(ring) for _, ring in _costs(one.size)],
            },
        }
        for one in sized
    ]
    return _json({"format": 1, "sizes": entries})


def _side_object(side: SideBytes) -> dict[str, int]:
    return {"recurrent": side.recurrent, "attention": side.attention, "total": side.total}


def kinds_text() -> str:
    """All layer kinds at their example sizes, and how to ask for more."""
    blocks = [
        [part.name, part.title, part.formula, f"{width(part, kind.example):,}", bytes_text(row_bytes(width(part, kind.example), "f32")), part.per]
        for kind in KINDS.values()
        for part in kind.parts
    ]  # fmt: skip
    texts = iter(_part_texts(blocks))
    lines = ["Layer kinds, each at the size of a real model, in f32", ""]
    for kind in KINDS.values():
        lines += wrapped(f"{kind.name}  {kind.title}", "  ")
        lines += ["  " + next(texts) for _ in kind.parts]
        lines += wrapped("  at " + " ".join(f"{name}={value}" for name, value in kind.example.items()), "     ")
        lines += wrapped(f"  {kind.source}", "  ")
    lines += ["", "The bytes of a cache, of layers or of a family's model:"]
    lines += [f"  statedrift size --layers '36 {_as_layers('gated_delta_net')}' \\", f"    --layers '12 {_as_layers('attention')}'"]
    lines += ["  statedrift size --family lfm2 --model 'n_layer=16 n_embd=2048' --cache 'n_ctx=8192 kv=f16'"]
    return "\n".join(lines) + "\n"


def _part_texts(rows: Sequence[Sequence[str]]) -> list[str]:
    """Part, title, formula, elements and bytes in columns, then what has such a row."""
    head = aligned([row[:3] for row in rows], numbers_from=3)
    tail = aligned([row[3:5] for row in rows], numbers_from=0)
    left = max(map(len, head))
    result = [f"{text.ljust(left)} {numbers} a {row[5]}" for text, numbers, row in zip(head, tail, rows, strict=True)]
    assert max(map(len, result)) + 2 <= WIDTH
    return result


def kinds_json() -> str:
    """All layer kinds as one JSON object and a line end."""
    entries = [
        {
            "kind": kind.name,
            "title": kind.title,
            "source": kind.source,
            "example": kind.example,
            "parts": [
                {
                    "part": part.name, "per": part.per, "title": part.title, "formula": part.formula,
                    "elements": width(part, kind.example), "row_bytes": row_bytes(width(part, kind.example), "f32"),
                }
                for part in kind.parts
            ],
        }
        for kind in KINDS.values()
    ]  # fmt: skip
    return _json({"format": 1, "kinds": entries})


def _json(value: Any) -> str:
    return json.dumps(value) + "\n"
