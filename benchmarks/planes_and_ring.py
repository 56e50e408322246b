"""What a ring costs beside planes: whole decodes of the same model, with rows that fit the processor's caches and rows that do not, and the
kernels alone.

    python benchmarks/planes_and_ring.py [--write FILE]

Rules
- Both take the same turns in one run, so that they see the same machine; what counts is the ratio of the least times.
- The memory of both is the same; it is shown as `statedrift size` computes it.
- The kernels stand beside a loop that only doubles every number: what the memory itself asks for reading one row and writing another.
- It ends with status 1 when a stated bound does not hold.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from statedrift.cli.throughput import machine_facts, markdown_table
from statedrift.impl.cells import StrictCells
from statedrift.impl.kernels import kernel
from statedrift.impl.kernels.gated_delta_net import gated_delta_net
from statedrift.impl.kernels.mamba2_scan import mamba2_scan
from statedrift.impl.kernels.vectors import FLOAT_BYTES, PREFETCH_AHEAD_BYTES, fence, load, prefetch, store, store_nontemporal, zeros
from statedrift.impl.memory import allocate
from statedrift.impl.ring import RingCells
from statedrift.impl.session import NumbaSession
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.families import dimensions_of, family_of
from statedrift.spec.models import Model
from statedrift.spec.state_sizes import CacheSize, Size, size_of
from statedrift.spec.target import Batch
from statedrift.spec.verdicts import ACCEPTED

MODELS = {
    "mamba2, small rows": Model("mamba2"),
    "mamba2, 1 MiB in 2 layers": Model("mamba2", 0, (("d_inner", 2048), ("d_state", 128), ("n_layer", 2))),
    "mamba2, 1 MiB in 16 layers": Model(
        "mamba2", 0, (("n_embd", 256), ("d_inner", 2048), ("d_state", 128), ("n_head", 32), ("n_layer", 16))
    ),
    "qwen35, small rows": Model("qwen35"),
    "qwen35, 1 MiB in 2 layers": Model("qwen35", 0, (("d_state", 128), ("n_group", 8), ("n_value_head", 16), ("n_layer", 3))),
    "qwen35, 1 MiB in 16 layers": Model(
        "qwen35", 0, (("n_embd", 128), ("d_state", 128), ("n_group", 8), ("n_value_head", 16), ("n_layer", 24))
    ),
}
SEQUENCES = 4
N_RS_SEQ = 3
TOKENS = (1, 1 + N_RS_SEQ)
"""Tokens of the decodes that are compared, for each sequence."""
ROUNDS = 40
DECODE_RATIO_MAX = 1.25
BETWEEN = "in 2 layers"
BETWEEN_RATIO_MAX = 1.6
"""Of a decode whose present states fit the processor's caches, but not all their planes: 8 MiB and 32 here."""
KERNEL_RATIO_MAX = 1.25
"""Of a kernel alone, or what the loop that only doubles takes, if that is more."""

KERNEL_LAYERS = 48
KERNEL_ROUNDS = 60
ROW_SHAPES = {"mamba2_scan": (32, 128, 64), "gated_delta_net": (16, 128, 128), "doubling": (32, 128, 64)}
"""Heads, d_state and head_dim of the kernels' rows, all of one size: those of Mamba-2 370M, which has 48 layers."""


class Comparison(NamedTuple):
    """Microseconds of one decode, with planes and with a ring."""

    what: str
    token_count: int
    planes: float
    ring: float

    @property
    def ratio(self) -> float:
        return self.ring / self.planes


def batch_at(position: int, token_count: int) -> Batch:
    """`token_count` tokens for each of `SEQUENCES` sequences, from `position` on; only the last of each is answered."""
    tokens = np.ones(SEQUENCES * token_count, np.int32)
    positions = np.tile(np.arange(position, position + token_count, dtype=np.int32), SEQUENCES)
    sequences = tuple((sequence,) for sequence in range(SEQUENCES) for _ in range(token_count))
    wanted = np.tile(np.arange(token_count) == token_count - 1, SEQUENCES)
    return Batch(tokens, positions, sequences, wanted, "all")


def compare(what: str, model: Model, token_count: int) -> Comparison:
    """The least time of a decode in both, over rounds in which each has its turn."""
    configuration = CacheConfiguration(n_seq_max=SEQUENCES, n_rs_seq=N_RS_SEQ, n_ctx=(ROUNDS + 1) * token_count)
    sessions = [NumbaSession(model, configuration, cells_class) for cells_class in (StrictCells, RingCells)]
    best = [float("inf")] * len(sessions)
    for turn in range(ROUNDS + 1):
        batch = batch_at(turn * token_count, token_count)
        for index, session in enumerate(sessions):
            start = time.perf_counter_ns()
            outcome = session.decode(batch).outcome
            spent = (time.perf_counter_ns() - start) / 1000
            assert outcome == ACCEPTED
            if turn:  # the first compiles
                best[index] = min(best[index], spent)
    return Comparison(what, token_count, *best)


@kernel
def double_rows(rows: np.ndarray, source_row: np.ndarray, plane_row: np.ndarray) -> None:
    """rows[plane_row[i, 0]] = 2 * rows[source_row[i]], past the caches when it is another row.

    rows  float32 [n_rows, heads, d_state, head_dim], 64-byte aligned, of whole vectors of 64; read and written
    """
    for segment in range(source_row.size):
        for head in range(rows.shape[1]):
            source, target = rows[source_row[segment], head].reshape(-1), rows[plane_row[segment, 0], head].reshape(-1)
            for i in range(0, source.size, 64):
                number = load(source, (i,), zeros(64))
                if source_row[segment] == plane_row[segment, 0]:
                    store(target, (i,), number + number)
                else:
                    prefetch(source, (i + PREFETCH_AHEAD_BYTES // FLOAT_BYTES,), number)
                    store_nontemporal(target, (i,), number + number)
    fence()


Advance = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
"""Advances rows by one token a sequence, from source rows to plane rows."""


def kernel_of(name: str) -> Advance:
    """The kernel `name` with inputs for one token a sequence."""
    heads, d_state, head_dim = ROW_SHAPES[name]
    generator = np.random.default_rng(0)
    segment_start = np.arange(SEQUENCES + 1)
    value, y = generator.standard_normal((SEQUENCES, heads, head_dim), np.float32), np.empty((SEQUENCES, heads, head_dim), np.float32)
    rates = generator.random((SEQUENCES, heads), np.float32)
    key, query = generator.standard_normal((2, SEQUENCES, 1, d_state), np.float32) / np.float32(np.sqrt(d_state))
    if name == "mamba2_scan":
        return lambda rows, *where: mamba2_scan(value, rates, -np.ones(heads, np.float32), key, query, rows, segment_start, *where, y)
    if name == "gated_delta_net":
        return lambda rows, *where: gated_delta_net(query, key, value, -rates, rates, rows, segment_start, *where, y)
    return double_rows


def compare_kernels() -> list[Comparison]:
    """The least times of one token for all layers and sequences, in place and from plane to plane, over rounds in which all have their turns."""
    planes = 1 + N_RS_SEQ
    kernels = {name: kernel_of(name) for name in ROW_SHAPES}
    layers = allocate((KERNEL_LAYERS, planes * SEQUENCES, *ROW_SHAPES["doubling"]))
    layers.fill(1e-3)
    cells = np.arange(SEQUENCES)
    best = {name: [float("inf")] * 2 for name in kernels}
    for turn in range(KERNEL_ROUNDS + 1):
        step = turn % planes * SEQUENCES + cells, (turn + 1) % planes * SEQUENCES + cells
        for name, advance in kernels.items():
            for index, (source_row, target_row) in enumerate(((cells, cells), step)):
                plane_row = np.full((SEQUENCES, planes), -1)
                plane_row[:, 0] = target_row
                start = time.perf_counter_ns()
                for rows in layers.reshape((KERNEL_LAYERS, planes * SEQUENCES, *ROW_SHAPES[name])):
                    advance(rows, source_row, plane_row)
                spent = (time.perf_counter_ns() - start) / 1000
                if turn:
                    best[name][index] = min(best[name][index], spent)
    return [Comparison(name, 1, *times) for name, times in best.items()]


def size_of_model(model: Model) -> Size:
    """The size of both sessions."""
    return size_of([group for group in family_of(model).state_layers(dimensions_of(model)) if group.count], CacheSize(SEQUENCES, N_RS_SEQ))


def decode_holds(decode: Comparison) -> bool:
    """Whether a decode keeps its bound."""
    return decode.ratio <= (BETWEEN_RATIO_MAX if decode.what.endswith(BETWEEN) else DECODE_RATIO_MAX)


def kernel_holds(one: Comparison, kernels: Sequence[Comparison]) -> bool:
    """Whether one of `kernels`, among which the loop that only doubles is, keeps its bound."""
    return one.ratio <= max(KERNEL_RATIO_MAX, *(other.ratio for other in kernels if other.what == "doubling"))


def report_markdown(decodes: Sequence[Comparison], kernels: Sequence[Comparison]) -> str:
    """The measurement as a Markdown page."""
    kernel_rows_bytes = KERNEL_LAYERS * (1 + N_RS_SEQ) * SEQUENCES * math.prod(ROW_SHAPES["doubling"]) * FLOAT_BYTES
    parts = [
        "# Planes and ring",
        "Written by `python benchmarks/planes_and_ring.py --write FILE`. Microseconds, the least of many; planes and ring take turns in one run.",
        "## Whole decodes",
        f"With a ring a decode costs at most {DECODE_RATIO_MAX:g} times what it costs with planes; where the present states fit the processor's caches but\n"
        f"not all their planes, as where there are 2 layers here, {BETWEEN_RATIO_MAX:g} times.",
        markdown_table(
            ("", "MiB of states", "planes, µs", "ring, µs", "times", "holds"),
            [[_decode_title(one), _mib(size_of_model(MODELS[one.what]).session.recurrent), *_times(one, decode_holds(one))] for one in decodes],
        ),
        "## Kernels alone",
        f"One token for {SEQUENCES} sequences in {KERNEL_LAYERS} layers, in place and from plane to plane: at most {KERNEL_RATIO_MAX:g} times as long, or as many times as\n"
        "the last line says, if that is more. It does nothing but double every number, and so shows what the memory asks: a processor\n"
        "does not wait for what it writes back in place, but it does for what it writes elsewhere.",
        markdown_table(
            ("", "MiB of states", "in place, µs", "plane to plane, µs", "times", "holds"),
            [[one.what, _mib(kernel_rows_bytes), *_times(one, kernel_holds(one, kernels))] for one in kernels],
        ),
        "## Measured on",
        markdown_table(("", ""), [list(fact) for fact in machine_facts()]),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _decode_title(one: Comparison) -> str:
    return f"{one.what}: {one.token_count} token{'s' * (one.token_count > 1)} for {SEQUENCES} sequences"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.2f}"


def _times(one: Comparison, holds: bool) -> list[str]:
    return [f"{one.planes:,.0f}", f"{one.ring:,.0f}", f"{one.ratio:.2f}", "yes" if holds else "**no**"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when the bound does not hold."""
    parser = argparse.ArgumentParser(description="A ring beside planes.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the report as Markdown")
    given = parser.parse_args(arguments)
    decodes = [compare(what, model, token_count) for what, model in MODELS.items() for token_count in TOKENS]
    kernels = compare_kernels()
    report = report_markdown(decodes, kernels)
    print(report, end="")
    if given.write:
        given.write.write_text(report, encoding="utf-8")
    return 0 if all(map(decode_holds, decodes)) and all(kernel_holds(one, kernels) for one in kernels) else 1


if __name__ == "__main__":
    sys.exit(main())
