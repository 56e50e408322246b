"""The run itself: every kernel at every size, what bounds it, and who else does the same.

Rules
- What is held to each other is sampled in turn: a row, the limits that bound it, and the rows it is compared with.
- A row's limit is the longest of some times, as a rule two: its floating-point instructions at the rate of multiply-adds, its bytes at the
  bandwidth.
- Decodes are of so many sequences that no cache holds their states. The states of a row that the caches are to hold are those of one
  sequence, decoded a token at a time, many in one call.
- Every row begins with a run that is compared with each peer; a kernel's later runs go on from the state they left.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from llvmlite import binding  # type: ignore[import-untyped]

from ...impl.kernels.mamba2_scan import mamba2_scan_heads
from ...impl.kernels.threads import scan_on_threads
from ...impl.memory import FLOAT_BYTES
from ...oracle.recompute import use_one_thread
from ..failures import complain
from . import exactness
from .cases import BOTH, CASES, CONVOLUTION, CONVOLUTION_NAME, TAPS, Arrays, Case, ConvolutionCase, Size
from .first_call import first_call
from .limits import Limits, Probe, cache_bytes
from .llamacpp_operators import convolution_operator, library, operator
from .peers import COMPILED, EAGER, LLAMACPP, NUMPY, Work, convolution_work, forget_compiled, measured, numpy_work, torch_work
from .results import Results, Row, What
from .samples import Job, Run, timed_in_turn

SNAPSHOTS = 4
THREADED = "mamba2_scan"
FIRST_CALL_FAMILY = "mamba2"
SEQUENCES_MIN = 64
BEYOND_CACHES = 4
"""An array of so many times the last cache's size is taken to be held by none."""


class Effort(NamedTuple):
    """How much is done.

    tokens         of a prefill
    memory_bytes   of what no cache is to hold
    sequences_min  of a decode
    cached_tokens  decoded in one call where the caches hold the state
    sizes          in place of every case's own; None for those
    seconds, peer_seconds  for each of our rows and each of its limits, and for each peer
    trials         of the promise, for each kernel and size
    checkpoints    tokens after which the error is taken
    is_short       no compiler of PyTorch's, no first call
    """

    tokens: int
    memory_bytes: int
    sequences_min: int
    cached_tokens: int
    sizes: tuple[Size, ...] | None
    seconds: float
    peer_seconds: float
    trials: int
    checkpoints: tuple[int, ...]
    is_short: bool


def full() -> Effort:
    """The run whose figures count."""
    memory_bytes = BEYOND_CACHES * cache_bytes(3)
    return Effort(512, memory_bytes, SEQUENCES_MIN, 128, None, 0.6, 0.4, 8, exactness.CHECKPOINTS, False)


def short() -> Effort:
    """The run that says whether everything works: its times mean nothing."""
    return Effort(128, 1 << 20, 3, 4, (Size(2, 64, 64),), 0.0, 0.0, 2, (10, 100), True)


def measure(effort: Effort) -> Results:
    """Everything of one run. Raises UnavailableError when the first call cannot be timed."""
    use_one_thread()
    run = _Run(effort)
    for case in CASES:
        for size in effort.sizes or case.sizes:
            run.case(case, size)
    for size in effort.sizes or BOTH:
        run.convolution(size)
    complain("comparing bits, and with float64")
    promises = exactness.all_promises(effort.trials)
    grown = exactness.all_growth(effort.checkpoints)
    first = None
    if not effort.is_short:
        complain(f"timing the first call of {FIRST_CALL_FAMILY}")
        first = first_call(FIRST_CALL_FAMILY)
    run.limits.close()
    return Results(
        effort.is_short, run.limits.measured(), tuple(run.rows), promises, grown, first, tuple(dict.fromkeys(run.gaps)), _facts()
    )


def _facts() -> tuple[tuple[str, str], ...]:
    """What bears on these figures beside the machine's name."""
    own = library()
    return (
        ("processor to LLVM", str(binding.get_host_cpu_name())),
        ("caches", ", ".join(f"level {level}: {cache_bytes(level) >> 10:,} KiB" for level in (1, 2, 3))),
        ("llama.cpp's operators", own if isinstance(own, str) else f"built for {own.vectors}"),
    )


class Need(NamedTuple):
    """One thing a figure cannot do without: work that a probe does, the quickest of `probes` where there are several. name: in words."""

    name: str
    work: float
    probes: tuple[Probe, ...]


class Figure(NamedTuple):
    """What a row is measured with; the rest as in `Row`."""

    what: What
    size: str
    threads: int
    elements: int
    run: Run
    needs: tuple[Need, ...]


class _Run:
    """Rows as they are measured."""

    def __init__(self, effort: Effort) -> None:
        self.effort = effort
        self.limits = Limits(effort.memory_bytes)
        self.rows: list[Row] = []
        self.gaps: list[str] = []

    def case(self, case: Case, size: Size) -> None:
        complain(f"measuring {case.name} at {size}")
        self.prefill(case, size)
        self.decode(case, size)
        self.cached(case, size)
        self.snapshots(case, size)

    def prefill(self, case: Case, size: Size) -> None:
        tokens = self.effort.tokens
        arguments, rows, y = _inputs(case, size, tokens, 1)
        states = rows.copy()
        run = _call(case, arguments, rows, [0, tokens], [0], [[0]], y)
        run()
        ours = y.copy()
        figures = [Figure("prefill", str(size), 1, _elements(size, tokens), run, (self.arithmetic(case, size, tokens),))]
        if case.name == THREADED:
            figures += self.on_two_threads(case, size)
        first, *others = self.measure(case.name, figures)
        self.rows += [self.with_peers(first, case, arguments, states, ours), *others]

    def on_two_threads(self, case: Case, size: Size) -> list[Figure]:
        """The same on two threads: each takes half of the heads."""
        if _processors() < 2:
            self.gaps.append("Two threads: there is one core.")
            return []
        tokens = self.effort.tokens
        arguments, rows, y = _inputs(case, size, tokens, 1)
        one = np.array([0])
        scan = (*arguments, rows, np.array([0, tokens]), one, one[:, None], y)
        run = functools.partial(scan_on_threads, self.limits.pool, 2, mamba2_scan_heads, size.heads, *scan)
        return [Figure("prefill", str(size), 2, _elements(size, tokens), run, (self.arithmetic(case, size, tokens, threads=2),))]

    def decode(self, case: Case, size: Size) -> None:
        """A token of each of so many sequences that no cache holds their states."""
        sequences = max(self.effort.sequences_min, -(-self.effort.memory_bytes // (FLOAT_BYTES * _elements(size, 1))))
        arguments, rows, y = _inputs(case, size, sequences, 2 * sequences)
        every = np.arange(sequences)
        states = rows[:sequences].copy()
        start = np.arange(sequences + 1)
        in_place = _call(case, arguments, rows, start, every, every[:, None], y)
        there = _call(case, arguments, rows, start, every, every[:, None] + sequences, y)
        back = _call(case, arguments, rows, start, every + sequences, every[:, None], y)
        in_place()
        ours = y.copy()
        elements, name = _elements(size, sequences), f"{size}, {sequences} sequences"
        needs = (self.arithmetic(case, size, sequences), self.memory(elements, None))
        first, other = self.measure(
            case.name,
            [
                Figure("decode in place", name, 1, elements, in_place, needs),
                Figure("decode to another row", name, 1, elements, _in_turn(there, back), needs),
            ],
        )
        self.rows += [self.with_peers(first, case, arguments, states, ours), other]

    def cached(self, case: Case, size: Size) -> None:
        """One sequence, token by token: each is a segment that goes on from the row of the one before."""
        tokens = self.effort.cached_tokens
        arguments, rows, y = _inputs(case, size, tokens, 2)
        if rows.nbytes > cache_bytes(2):
            return
        start, here = np.arange(tokens + 1), np.zeros(tokens, np.int64)
        other = np.arange(tokens) % 2
        elements = _elements(size, tokens)
        in_place = _call(case, arguments, rows, start, here, here[:, None], y)
        to_another = _call(case, arguments, rows, start, other, 1 - other[:, None], y)
        needs = (self.arithmetic(case, size, tokens), self.memory(elements, rows[0].nbytes))
        self.rows += self.measure(
            case.name,
            [
                Figure("cached in place", str(size), 1, elements, in_place, needs),
                Figure("cached to another row", str(size), 1, elements, to_another, needs),
            ],
        )

    def snapshots(self, case: Case, size: Size) -> None:
        """A batch of as many tokens a sequence as states are kept; the newest state stands where the one before the batch stood."""
        sequences = max(2, -(-self.effort.memory_bytes // (FLOAT_BYTES * _elements(size, SNAPSHOTS))))
        tokens = sequences * SNAPSHOTS
        arguments, rows, y = _inputs(case, size, tokens, tokens)
        every = np.arange(sequences)
        planes = every[:, None] + sequences * np.arange(SNAPSHOTS)
        states = rows[:sequences].copy()
        run = _call(case, arguments, rows, SNAPSHOTS * np.arange(sequences + 1), every, planes, y)
        run()
        ours = y.copy()
        elements = _elements(size, tokens)
        needs = (self.arithmetic(case, size, tokens), Need("bytes written", FLOAT_BYTES * elements, (self.limits.written(),)))
        (row,) = self.measure(case.name, [Figure("snapshots", f"{size}, {sequences} sequences", 1, elements, run, needs)])
        with operator(case, arguments, states, SNAPSHOTS) as work:
            peer = measured(LLAMACPP, lambda: work, ours, self.effort.peer_seconds)
        self.rows.append(msgspec.structs.replace(row, peers=(peer,)))

    def convolution(self, size: Size) -> None:
        """Before a Mamba-2 scan of this size."""
        complain(f"measuring {CONVOLUTION_NAME} at {size}")
        case, tokens = ConvolutionCase(size), self.effort.tokens
        arguments, rows = case.arguments(1, tokens), case.rows(1)
        x, taps, bias = arguments
        window, y = rows[0].copy(), np.full_like(x, np.nan)
        one = np.array([0])
        run = functools.partial(CONVOLUTION, x, taps, bias, rows, np.array([0, tokens]), one, one[:, None], y)
        run()
        ours = y.copy()
        needs = (
            Need("arithmetic", x.size * TAPS, (self.limits.multiply_adds(),)),
            Need("bytes copied", 2 * x.nbytes, self.limits.copied(x.nbytes)),
        )
        (row,) = self.measure(CONVOLUTION_NAME, [Figure("prefill", f"{case.channels} channels, {TAPS} taps", 1, x.size, run, needs)])
        peers = []
        with convolution_operator(arguments, window) as work:
            peers.append(measured(LLAMACPP, lambda: work, ours, self.effort.peer_seconds))
        for name in self.libraries:
            forget_compiled()
            make = functools.partial(convolution_work, name, arguments, window)
            peers.append(measured(name, make, ours, self.effort.peer_seconds))
        self.rows.append(msgspec.structs.replace(row, peers=tuple(peers)))

    def measure(self, kernel: str, figures: Sequence[Figure]) -> list[Row]:
        """Sample figures, and all that bounds them, in turn."""
        probes = list({probe.name: probe for figure in figures for need in figure.needs for probe in need.probes}.values())
        jobs = [*(Job(figure.run, figure.threads) for figure in figures), *(Job(probe.run, probe.threads) for probe in probes)]
        timings = timed_in_turn(jobs, self.effort.seconds * len(jobs))
        seconds_each: dict[str, float] = {}
        for probe, timing in zip(probes, timings[len(figures) :], strict=True):
            self.limits.remember(probe, timing)
            seconds_each[probe.name] = timing.seconds / probe.work
        rows = []
        for figure, timing in zip(figures, timings[: len(figures)], strict=True):
            times = [(need.work * min(seconds_each[probe.name] for probe in need.probes), need.name) for need in figure.needs]
            seconds, name = max(times)
            rows.append(Row(kernel, figure.size, figure.what, figure.threads, figure.elements, timing, name, seconds))
        return rows

    def arithmetic(self, case: Case, size: Size, tokens: int, threads: int = 1) -> Need:
        """The instructions of the formula."""
        return Need("arithmetic", _elements(size, tokens) * case.operations, (self.limits.multiply_adds(threads),))

    def memory(self, elements: int, row_bytes: int | None) -> Need:
        """Every element of the state read and written where it stands; row_bytes: of a state that the caches hold."""
        return Need("memory" if row_bytes is None else "cache", 2 * FLOAT_BYTES * elements, (self.limits.in_place(row_bytes),))

    @property
    def libraries(self) -> tuple[str, ...]:
        """The peers that are libraries."""
        return (EAGER, NUMPY) if self.effort.is_short else (EAGER, COMPILED, NUMPY)

    def with_peers(self, row: Row, case: Case, arguments: Arrays, states: np.ndarray, ours: np.ndarray) -> Row:
        """The row with every peer beside it. states: of every sequence, before our first run."""
        seconds, sequences = self.effort.peer_seconds, len(states)
        peers = []
        with operator(case, arguments, states) as work:
            peers.append(measured(LLAMACPP, lambda: work, ours, seconds))
        for name in self.libraries:
            forget_compiled()
            peers.append(measured(name, functools.partial(_work, name, case, arguments, states, sequences), ours, seconds))
        return msgspec.structs.replace(row, peers=tuple(peers))


def _work(name: str, case: Case, arguments: Arrays, states: np.ndarray, sequences: int) -> Work | str:
    if name == NUMPY:
        return numpy_work(case, arguments, states, sequences)
    return torch_work(case, arguments, states, sequences, name == COMPILED)


def _inputs(case: Case, size: Size, tokens: int, row_count: int) -> tuple[Arrays, np.ndarray, np.ndarray]:
    arguments = case.arguments(1, tokens, size)
    return arguments, case.rows(1, row_count, size), case.result(arguments)


def _call(
    case: Case,
    arguments: Arrays,
    rows: np.ndarray,
    segment_start: Sequence[int] | np.ndarray,
    source_row: Sequence[int] | np.ndarray,
    plane_row: Sequence[Sequence[int]] | np.ndarray,
    y: np.ndarray,
) -> Callable[[], None]:
    """A call of the kernel, its integers as it wants them."""
    start, source, planes = (np.ascontiguousarray(array, np.int64) for array in (segment_start, source_row, plane_row))
    return lambda: case.kernel(*arguments, rows, start, source, planes, y)


def _in_turn(one: Callable[[], object], other: Callable[[], object]) -> Callable[[], object]:
    """A function that does one, the other, one, ..."""
    calls = [one, other]

    def run() -> None:
        calls[0]()
        calls.reverse()

    return run


def _elements(size: Size, tokens: int) -> int:
    """State elements times tokens."""
    return size.heads * size.head_dim * size.d_state * tokens


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
