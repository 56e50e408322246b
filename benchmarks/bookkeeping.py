"""What the bookkeeping of a recurrent cache costs: splitting, planning and applying a batch, and the operations that move no state.

    python benchmarks/bookkeeping.py [--cells MODULE:CLASS ...] [--write FILE]

Rules
- No forward runs: what is measured is what comes on top of a model's arithmetic.
- Everything is compared within one run, by ratio; a cost is the least of many single calls, so that a busy machine does not count.
- Cells are any class with the named methods of `statedrift.impl.cells.StrictCells`, made from (n_seq_max, n_rs_seq).
- The sessions that are compared have up to 1,024 sequences: those of a cache, not of program text, which allows 256.
- It ends with status 1 when a stated bound does not hold.
"""

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from statedrift.cli.throughput import machine_facts, markdown_table
from statedrift.impl.batches import OK, SplitBatch, split
from statedrift.impl.hybrid_cache import HybridCache
from statedrift.impl.model import open_cache, prepared
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.models import Model

SESSIONS = (4, 64, 1024)
"""Sequences of the sessions that are compared."""
BATCH = 4
"""Sequences of the small decode."""
N_RS_SEQ = 3
ROUNDS = 1000
PASSES = 3
DECODE_MICROSECONDS_MAX = 20.0
APART_MAX = 2.0
"""How many times a cost that does not follow the session, or the row size, may differ."""
WHOLE_SESSIONS = (256, 1024, 4096)
"""Sequences of the sessions in which all are decoded at once: so many that constant costs do not hide how it grows."""
LINEAR_MAX = 2.0
"""How many times more than in proportion a decode of all sequences may cost in the largest of them than in the smallest."""
CELLS = ("statedrift.impl.cells:StrictCells", "statedrift.impl.ring:RingCells")
MODELS = (Model("mamba2"), Model("lfm2"))
SMALL_ROWS, LARGE_ROWS = Model("mamba2"), Model("mamba2", 0, (("d_inner", 1024), ("d_state", 64)))

CellsClass = Any  # a class; made from (n_seq_max, n_rs_seq)
Call = Callable[[], object]


class Bound(NamedTuple):
    """A stated bound, what was measured, and the most that holds."""

    stated: str
    measured: float
    most: float

    @property
    def holds(self) -> bool:
        return self.measured <= self.most


class WholeDecode(NamedTuple):
    """Microseconds of a decode of all sequences, in each of `WHOLE_SESSIONS`."""

    cells: str
    microseconds: tuple[float, ...]


class Row(NamedTuple):
    """Microseconds of one thing, in each of `SESSIONS`."""

    what: str
    microseconds: tuple[float, ...]


def least_microseconds(call: Call, before: Call = lambda: None, rounds: int = ROUNDS) -> float:
    """The least time of one call, in microseconds; `before` runs before each and is not measured."""
    best = float("inf")
    for _ in range(rounds):
        before()
        start = time.perf_counter_ns()
        call()
        best = min(best, time.perf_counter_ns() - start)
    return best / 1000


# --- cells alone -------------------------------------------------------------------------------------------------------------


class Decoding:
    """Cells in which every sequence holds tokens, and one-token decodes of some of them."""

    def __init__(self, cells_class: CellsClass, n_seq_max: int) -> None:
        self.cells = cells_class(n_seq_max, N_RS_SEQ)
        self.n_seq_max = n_seq_max
        for _ in range(1 + N_RS_SEQ):
            self.decode(np.arange(n_seq_max, dtype=np.int64))

    def split(self, sequences: np.ndarray) -> SplitBatch:
        """One token for each entry; a sequence that occurs several times gets as many."""
        earlier = np.arange(len(sequences)) - np.searchsorted(sequences, sequences)
        return split_batch(sequences, self.cells.position[sequences] + 1 + earlier, self.cells.position)

    def decode(self, sequences: np.ndarray) -> None:
        batch = self.split(sequences)
        self.cells.apply(batch, self.cells.plan(batch))


def split_batch(sequences: np.ndarray, positions: np.ndarray, last_position: np.ndarray) -> SplitBatch:
    """A batch of zeros, split."""
    tokens, wanted = np.zeros(len(sequences), np.int64), np.ones(len(sequences), np.bool_)
    code, _, batch = split(tokens, positions, sequences, wanted, last_position, 64, 4096, 1 + N_RS_SEQ)
    assert code == OK
    return batch


def spread(n_seq_max: int, count: int) -> np.ndarray:
    """`count` sequences, evenly spread, the last one included; int64."""
    return np.linspace(0, n_seq_max - 1, count).astype(np.int64)


def measure_cells(name: str, cells_class: CellsClass) -> list[Row]:
    """Decodes and moves of one class of cells."""
    return _rows(name, lambda n_seq_max: _cells_costs(cells_class, n_seq_max))


def _rows(name: str, costs_of: Callable[[int], dict[str, float]]) -> list[Row]:
    """A row for each cost, with the least of several passes over all sessions, so that they are measured under the same conditions."""
    passes = [[costs_of(n_seq_max) for n_seq_max in SESSIONS] for _ in range(PASSES)]
    return [
        Row(f"{name}: {what}", tuple(min(columns[i][what] for columns in passes) for i in range(len(SESSIONS)))) for what in passes[0][0]
    ]


def _decode_cost(cells: Any, sequences: np.ndarray, rounds: int) -> float:
    """Microseconds of splitting, planning and applying one token for each of `sequences`, all different."""
    positions = np.empty(0, np.int64)

    def ready() -> None:
        nonlocal positions
        positions = cells.position[sequences] + 1

    def decode() -> None:
        batch = split_batch(sequences, positions, cells.position)
        cells.apply(batch, cells.plan(batch))

    return least_microseconds(decode, ready, rounds)


def _cells_costs(cells_class: CellsClass, n_seq_max: int) -> dict[str, float]:
    decoding = Decoding(cells_class, n_seq_max)
    cells = decoding.cells
    some = spread(n_seq_max, BATCH)
    kept: dict[str, Any] = {}

    def ready() -> None:
        kept["positions"] = cells.position[some] + 1

    def splitted() -> None:
        kept["batch"] = split_batch(some, kept["positions"], cells.position)

    def planned() -> None:
        kept["plan"] = cells.plan(kept["batch"])

    def applied() -> None:
        cells.apply(kept["batch"], kept["plan"])

    def all_before_apply() -> None:
        ready()
        splitted()
        planned()

    costs = {
        f"decode of {BATCH}": _decode_cost(cells, some, ROUNDS),
        "split of it": least_microseconds(splitted, ready),
        "plan of it": least_microseconds(planned),
        "apply of it": least_microseconds(applied, all_before_apply),
    }
    source, other = n_seq_max // 2, n_seq_max - 1
    newest = np.full(1 + N_RS_SEQ, source, np.int64)

    def rollback(token_count: int, refused: bool) -> None:
        assert (cells.rollback(source, token_count) is not None) == refused

    costs["share"] = least_microseconds(lambda: cells.share(source, other), lambda: cells.drop(other))
    costs["drop"] = least_microseconds(lambda: cells.drop(other), lambda: cells.share(source, other))
    costs["rollback"] = least_microseconds(lambda: rollback(2, False), lambda: decoding.decode(newest))
    costs["refused rollback"] = least_microseconds(lambda: rollback(N_RS_SEQ + 2, True))
    return costs


def measure_whole_decodes(name: str, cells_class: CellsClass) -> WholeDecode:
    """Microseconds of a decode of one token for every sequence, in each of `WHOLE_SESSIONS`."""
    costs = []
    for n_seq_max in WHOLE_SESSIONS:
        decoding = Decoding(cells_class, n_seq_max)
        cells, every = decoding.cells, np.arange(n_seq_max, dtype=np.int64)
        costs.append(_decode_cost(cells, every, max(ROUNDS // 20, 1)))
    return WholeDecode(name, tuple(costs))


# --- whole caches ------------------------------------------------------------------------------------------------------------


def measure_cache(name: str, cells_class: CellsClass, model: Model) -> list[Row]:
    """Decodes and moves of the whole cache of a model: recurrent side, attention side, and the arguments of its forward."""
    return _rows(f"{name}, {model.family}", lambda n_seq_max: _cache_costs(filled_cache(cells_class, model, n_seq_max), n_seq_max))


def filled_cache(cells_class: CellsClass, model: Model, n_seq_max: int) -> HybridCache:
    """A cache in which every sequence holds 1 + N_RS_SEQ tokens, given in one batch."""
    configuration = CacheConfiguration(n_seq_max=n_seq_max, n_rs_seq=N_RS_SEQ, n_ctx=32)
    cache, _ = open_cache(prepared(model), configuration, cells_class)
    sequences = np.repeat(np.arange(n_seq_max, dtype=np.int64), 1 + N_RS_SEQ)
    decode_cache(cache, sequences, np.tile(np.arange(1 + N_RS_SEQ), n_seq_max))
    return cache


def decode_cache(cache: HybridCache, sequences: np.ndarray, positions: np.ndarray) -> None:
    """A decode of one token an entry, but for its forward."""
    batch = split_batch(sequences, positions, cache.last_positions())
    plan = cache.prepare(batch)
    assert not isinstance(plan, str)
    cache.apply(batch, plan)
    cache.sights(batch)


def _cache_costs(cache: HybridCache, n_seq_max: int) -> dict[str, float]:
    some = spread(n_seq_max, BATCH)
    source, other = n_seq_max // 2, n_seq_max - 1
    here = np.full(1 + N_RS_SEQ, source, np.int64)
    positions = cache.last_positions()[some] + 1

    def restart() -> None:
        for sequence in some:
            if cache.last_position(sequence) >= 8:
                cache.drop(sequence)
        positions[:] = cache.last_positions()[some] + 1

    def refill() -> None:
        cache.drop(source)
        decode_cache(cache, here, np.arange(1 + N_RS_SEQ))

    def remove(start: int, end: int, refused: bool) -> None:
        assert (cache.remove(source, start, end) is not None) == refused

    def accepted() -> None:
        remove(N_RS_SEQ, -1, False)

    def refused() -> None:
        remove(1, 2, True)

    result = {f"decode of {BATCH}": least_microseconds(lambda: decode_cache(cache, some, positions), restart)}
    refill()
    result["share"] = least_microseconds(lambda: cache.share(source, other), lambda: cache.drop(other))
    result["drop"] = least_microseconds(lambda: cache.drop(other), lambda: cache.share(source, other))
    result["rollback"] = least_microseconds(accepted, refill)
    refill()
    result["refused remove"] = least_microseconds(refused)
    return result


def measure_row_sizes(name: str, cells_class: CellsClass) -> list[tuple[str, float, float]]:
    """Decodes and moves in a cache with small and with large rows: (what, microseconds, microseconds)."""
    passes = [
        [_cache_costs(filled_cache(cells_class, model, SESSIONS[0]), SESSIONS[0]) for model in (SMALL_ROWS, LARGE_ROWS)]
        for _ in range(PASSES)
    ]
    return [(f"{name}: {what}", min(small[what] for small, _ in passes), min(large[what] for _, large in passes)) for what in passes[0][0]]


# --- bounds and report -------------------------------------------------------------------------------------------------------


def bounds_of(rows: Sequence[Row], whole: Sequence[WholeDecode], sizes: Sequence[tuple[str, float, float]]) -> list[Bound]:
    """Every stated bound."""
    result = []
    for what, costs in rows:
        result.append(Bound(f"{what}: at most {APART_MAX:g} times apart", max(costs) / min(costs), APART_MAX))
        if ": decode" in what:
            result.append(Bound(f"{what}: at most {DECODE_MICROSECONDS_MAX:g} µs", max(costs), DECODE_MICROSECONDS_MAX))
    for name, costs in whole:
        growth = costs[-1] / costs[0] / (WHOLE_SESSIONS[-1] / WHOLE_SESSIONS[0])
        stated = f"{name}: decode of all, a sequence at {WHOLE_SESSIONS[-1]:,} against {WHOLE_SESSIONS[0]:,}: at most {LINEAR_MAX:g} times"
        result.append(Bound(stated, growth, LINEAR_MAX))
    for what, small, large in sizes:
        stated = f"{what}, rows of {row_text(LARGE_ROWS)} against {row_text(SMALL_ROWS)}: at most {APART_MAX:g} times"
        result.append(Bound(stated, large / small, APART_MAX))
    return result


def row_text(model: Model) -> str:
    """The bytes of a model's state rows in one layer."""
    shape = prepared(model)
    return f"{4 * (np.prod(shape.convolution_shape) + np.prod(shape.recurrent_shape)) / 1024:,.0f} KiB"


def report_markdown(rows: Sequence[Row], whole: Sequence[WholeDecode], bounds: Sequence[Bound]) -> str:
    """The measurement as a Markdown page."""
    parts = [
        "# Bookkeeping",
        "Written by `python benchmarks/bookkeeping.py --write FILE`. Microseconds of one call, the least of many, in one run; no forward, one\n"
        f"thread. `decode of {BATCH}` gives one token to each of {BATCH} sequences in a session of so many. Cells alone, then with a model's name\n"
        "the whole cache of that model; its share of separate attention pools copies keys and values, here of 4 tokens.",
        markdown_table(("", *(f"{count:,} sequences" for count in SESSIONS)), [[row.what, *(f"{cost:.2f}" for cost in row.microseconds)] for row in rows]),
        "One token for every sequence of a session:",
        markdown_table(
            ("", *(f"{count:,} sequences" for count in WHOLE_SESSIONS)),
            [[f"{name}: decode of all", *(f"{cost:.1f}" for cost in costs)] for name, costs in whole],
        ),
        "## Stated bounds",
        markdown_table(("bound", "measured", "holds"), [[b.stated, f"{b.measured:.2f}", "yes" if b.holds else "**no**"] for b in bounds]),
        "## Measured on",
        markdown_table(("", ""), [list(fact) for fact in machine_facts()]),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def cells_named(name: str) -> CellsClass:
    """The class that "module:class" names."""
    module, _, attribute = name.partition(":")
    found: CellsClass = getattr(importlib.import_module(module), attribute)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when a stated bound does not hold."""
    parser = argparse.ArgumentParser(description="Costs of the bookkeeping of recurrent caches.")
    parser.add_argument("--cells", action="append", metavar="MODULE:CLASS", help="measure these cells; may be given several times")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the report as Markdown")
    given = parser.parse_args(arguments)
    names = given.cells or [name for name in CELLS if importlib.util.find_spec(name.partition(":")[0])]
    rows: list[Row] = []
    whole: list[WholeDecode] = []
    sizes: list[tuple[str, float, float]] = []
    for name in names:
        word, cells_class = name.partition(":")[2], cells_named(name)
        rows += measure_cells(word, cells_class)
        whole.append(measure_whole_decodes(word, cells_class))
        for model in MODELS:
            rows += measure_cache(word, cells_class, model)
        sizes += measure_row_sizes(word, cells_class)
    bounds = bounds_of(rows, whole, sizes)
    report = report_markdown(rows, whole, bounds)
    print(report, end="")
    if given.write:
        given.write.write_text(report, encoding="utf-8")
    return 0 if all(bound.holds for bound in bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
