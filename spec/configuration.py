"""Cache configuration: the keys of a program's `cache` line, their defaults and their bounds.

Rules
- Field order is the canonical key order of program text; a value equal to its default is not written.
- Bounds refuse absurd sizes before anything is allocated.
"""

from typing import Literal

import msgspec

from .errors import UsageError
from .operations import Outputs

Start = Literal["fresh", "dirty", "poison"]


class CacheConfiguration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a session is opened.

    n_seq_max   sequences
    n_rs_seq    rollback snapshots per sequence asked for; an engine may clamp it
    n_ubatch    tokens a micro-batch
    n_ctx       tokens a sequence; the whole pool is n_ctx * n_seq_max
    unified     1: all sequences share the pool of attention cells
    start       what memory holds before: fresh, dirty (another use, cleared without data), poison (NaN; in-house targets only)
    interleave  1: the tokens of a batch's items go round-robin
    outputs     what a decode returns unless it says otherwise
    swa_full    1: sliding-window layers keep everything
    kv          element type of the attention cache
    flash       1: flash attention
    """

    n_seq_max: int = 4
    n_rs_seq: int = 3
    n_ubatch: int = 64
    n_ctx: int = 256
    unified: int = 0
    start: Start = "fresh"
    interleave: int = 0
    outputs: Outputs = "all"
    swa_full: int = 0
    kv: Literal["f32", "f16"] = "f32"
    flash: int = 0


BOUNDS: dict[str, tuple[int, int]] = {
    "n_seq_max": (1, 256),
    "n_rs_seq": (0, 255),
    "n_ubatch": (1, 4096),
    "n_ctx": (1, 16384),
    "unified": (0, 1),
    "interleave": (0, 1),
    "swa_full": (0, 1),
    "flash": (0, 1),
}
WORDS: dict[str, tuple[str, ...]] = {
    "start": ("fresh", "dirty", "poison"),
    "outputs": ("all", "last", "embeddings"),
    "kv": ("f32", "f16"),
}
CACHE_KEYS: tuple[str, ...] = CacheConfiguration.__struct_fields__
POOL_TOKENS_MAX = 1 << 18
"""Bound on n_ctx * n_seq_max."""


def check_key(key: str, value: int | str) -> None:
    """Raise UsageError unless `key` is a cache key and `value` is allowed for it."""
    if key in BOUNDS:
        low, high = BOUNDS[key]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise UsageError(f"`{key}` must be a whole number from {low} to {high}, not {value}")
    elif key in WORDS:
        if value not in WORDS[key]:
            raise UsageError(f"`{key}` must be one of {', '.join(WORDS[key])}, not {value}")
    else:
        raise UsageError(f"unknown cache key `{key}`; there are {', '.join(CACHE_KEYS)}")


def check_configuration(configuration: CacheConfiguration) -> None:
    """Raise UsageError when a value is out of its bounds, or the pool is absurdly large."""
    for key in CACHE_KEYS:
        check_key(key, getattr(configuration, key))
    if configuration.n_ctx * configuration.n_seq_max > POOL_TOKENS_MAX:
        raise UsageError(
            f"n_ctx={configuration.n_ctx} for n_seq_max={configuration.n_seq_max} sequences asks for more than {POOL_TOKENS_MAX} cached tokens; "
            "make one of them smaller"
        )


def changed(configuration: CacheConfiguration, changes: dict[str, int | str]) -> CacheConfiguration:
    """The configuration after a `reopen` with these changed keys. Raises UsageError for a bad key or value."""
    for key, value in changes.items():
        check_key(key, value)
    result: CacheConfiguration = msgspec.structs.replace(configuration, **changes)
    check_configuration(result)
    return result
