"""The run itself: every kernel at every size, what bounds it, and who else does the same.

Rules
- The limit of a row is measured just before and just after it, and the better one counts.
- A row's limit is the longer of two times: its floating-point instructions at the rate of multiply-adds, its bytes at the bandwidth.
- Decodes are of so many sequences that no cache holds their states. The states of a row that the caches are to hold are those of one
  sequence, decoded a token at a time, many in one call.
- Every row begins with a run that is compared with each peer; a kernel's later runs go on from the state they left.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from llvmlite import binding  # type: ignore[import-untyped]

from ...impl.memory import FLOAT_BYTES
from ...oracle.recompute import use_one_thread
from ..failures import complain
from . import exactness
from .cases import BOTH, CASES, CONVOLUTION, CONVOLUTION_NAME, TAPS, Arrays, Case, ConvolutionCase, Size
from .first_call import first_call
from .limits import Limits, cache_bytes, run_together
from .llamacpp_operators import convolution_operator, library, operator
from .peers import COMPILED, EAGER, LLAMACPP, NUMPY, Work, convolution_work, forget_compiled, measured, numpy_work, torch_work
from .results import Peer, Results, Row, What
from .samples import timed

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
    seconds, limit_seconds, peer_seconds  for each row of ours, each limit, each peer
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
    limit_seconds: float
    peer_seconds: float
    trials: int
    checkpoints: tuple[int, ...]
    is_short: bool


def full() -> Effort:
    """The run whose figures count."""
    memory_bytes = BEYOND_CACHES * cache_bytes(3)
    return Effort(512, memory_bytes, SEQUENCES_MIN, 128, None, 0.8, 0.15, 0.5, 8, exactness.CHECKPOINTS, False)


def short() -> Effort:
    """The run that says whether everything works: its times mean nothing."""
    return Effort(128, 1 << 20, 3, 4, (Size(2, 64, 64),), 0.0, 0.0, 0.0, 2, (10, 100), True)


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


class _Run:
    """Rows as they are measured."""

    def __init__(self, effort: Effort) -> None:
        self.effort = effort
        self.limits = Limits(effort.limit_seconds, effort.memory_bytes)
        self.rows: list[Row] = []
        self.gaps: list[str] = []

    def case(self, case: Case, size: Size) -> None:
        complain(f"measuring {case.name} at {size}")
        self.prefill(case, size)
        if case.name == THREADED:
            self.prefill_on_two_threads(case, size)
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
        row = self.row(case.name, "prefill", size, 1, _elements(case, size, tokens), run, lambda: self.arithmetic(case, size, tokens))
        self.rows.append(self.with_peers(row, case, arguments, states, ours))

    def prefill_on_two_threads(self, case: Case, size: Size) -> None:
        """Each thread has half of the heads, in arrays of its own."""
        if _processors() < 2:
            self.gaps.append("Two threads: there is one core.")
            return
        tokens, half = self.effort.tokens, Size(size.heads // 2, size.head_dim, size.d_state)
        jobs = []
        for _ in range(2):
            arguments, rows, y = _inputs(case, half, tokens, 1)
            jobs.append(_call(case, arguments, rows, [0, tokens], [0], [[0]], y))
        with ThreadPoolExecutor(2) as pool:
            self.rows.append(
                self.row(
                    case.name,
                    "prefill",
                    size,
                    2,
                    _elements(case, size, tokens),
                    lambda: run_together(pool, jobs),
                    lambda: self.arithmetic(case, size, tokens, threads=2),
                )
            )

    def decode(self, case: Case, size: Size) -> None:
        """A token of each of so many sequences that no cache holds their states."""
        row_bytes = FLOAT_BYTES * _elements(case, size, 1)
        sequences = max(self.effort.sequences_min, -(-self.effort.memory_bytes // row_bytes))
        arguments, rows, y = _inputs(case, size, sequences, 2 * sequences)
        every = np.arange(sequences)
        states = rows[:sequences].copy()
        start = np.arange(sequences + 1)
        in_place = _call(case, arguments, rows, start, every, every[:, None], y)
        there = _call(case, arguments, rows, start, every, every[:, None] + sequences, y)
        back = _call(case, arguments, rows, start, every + sequences, every[:, None], y)
        elements = _elements(case, size, sequences)
        in_place()
        ours = y.copy()
        name = f"{size}, {sequences} sequences"

        def limit() -> tuple[str, float]:
            return max(self.arithmetic(case, size, sequences), self.memory(elements, None), key=_seconds)

        row = self.row(case.name, "decode in place", name, 1, elements, in_place, limit)
        self.rows.append(self.with_peers(row, case, arguments, states, ours))
        self.rows.append(self.row(case.name, "decode to another row", name, 1, elements, _in_turn(there, back), limit))

    def cached(self, case: Case, size: Size) -> None:
        """One sequence, token by token: each is a segment that goes on from the row of the one before."""
        tokens = self.effort.cached_tokens
        arguments, rows, y = _inputs(case, size, tokens, 2)
        if 2 * rows[0].nbytes > cache_bytes(2):
            return
        start, here = np.arange(tokens + 1), np.zeros(tokens, np.int64)
        other = np.arange(tokens) % 2
        elements = _elements(case, size, tokens)

        def limit() -> tuple[str, float]:
            return max(self.arithmetic(case, size, tokens), self.memory(elements, rows[0].nbytes), key=_seconds)

        in_place = _call(case, arguments, rows, start, here, here[:, None], y)
        to_another = _call(case, arguments, rows, start, other, 1 - other[:, None], y)
        self.rows.append(self.row(case.name, "cached in place", size, 1, elements, in_place, limit))
        self.rows.append(self.row(case.name, "cached to another row", size, 1, elements, to_another, limit))

    def snapshots(self, case: Case, size: Size) -> None:
        """A batch of as many tokens a sequence as states are kept; the newest state stands where the one before the batch stood."""
        state_elements = _elements(case, size, 1)
        sequences = max(2, -(-self.effort.memory_bytes // (FLOAT_BYTES * state_elements * SNAPSHOTS)))
        arguments, rows, y = _inputs(case, size, sequences * SNAPSHOTS, sequences * SNAPSHOTS)
        every = np.arange(sequences)
        planes = every[:, None] + sequences * np.arange(SNAPSHOTS)
        states = rows[:sequences].copy()
        run = _call(case, arguments, rows, SNAPSHOTS * np.arange(sequences + 1), every, planes, y)
        run()
        ours = y.copy()

        def limit() -> tuple[str, float]:
            return "bytes written", FLOAT_BYTES * state_elements * sequences * SNAPSHOTS / self.limits.written()

        name = f"{size}, {sequences} sequences"
        row = self.row(case.name, "snapshots", name, 1, state_elements * sequences * SNAPSHOTS, run, limit)
        with operator(case, arguments, states, SNAPSHOTS) as work:
            peer = measured(LLAMACPP, lambda: work, ours, self.effort.peer_seconds)
        self.rows.append(_with(row, (peer,)))

    def convolution(self, size: Size) -> None:
        """Before a Mamba-2 scan of this size."""
        complain(f"measuring {CONVOLUTION_NAME} at {size}")
        case, tokens = ConvolutionCase(size), self.effort.tokens
        arguments, rows = case.arguments(1, tokens), case.rows(1)
        x, taps, bias = arguments
        window, y = rows[0].copy(), np.full_like(x, np.nan)
        one = np.array([0])
        start = np.array([0, tokens])

        def run() -> None:
            CONVOLUTION(x, taps, bias, rows, start, one, one[:, None], y)

        def limit() -> tuple[str, float]:
            arithmetic = x.size * TAPS / self.limits.multiply_adds()
            return max(("arithmetic", arithmetic), ("bytes copied", 2 * x.nbytes / self.limits.copied(x.nbytes)), key=_seconds)

        run()
        ours = y.copy()
        row = self.row(CONVOLUTION_NAME, "prefill", f"{case.channels} channels, {TAPS} taps", 1, x.size, run, limit)
        peers = []
        with convolution_operator(arguments, window) as work:
            peers.append(measured(LLAMACPP, lambda: work, ours, self.effort.peer_seconds))
        for name in self.libraries:
            peers.append(
                measured(name, lambda name=name: convolution_work(name, arguments, window), ours, self.effort.peer_seconds)  # type: ignore[misc]
            )
        self.rows.append(_with(row, peers))

    def row(
        self,
        kernel: str,
        what: What,
        size: object,
        threads: int,
        elements: int,
        run: Callable[[], object],
        limit: Callable[[], tuple[str, float]],
    ) -> Row:
        """One row without peers, its limit measured on both sides of it."""
        run()
        before = limit()
        timing = timed(run, self.effort.seconds)
        name, seconds = min(before, limit(), key=_seconds)
        return Row(kernel, str(size), what, threads, elements, timing, name, seconds)

    def arithmetic(self, case: Case, size: Size, tokens: int, threads: int = 1) -> tuple[str, float]:
        """How long the instructions of the formula take."""
        return "arithmetic", _elements(case, size, tokens) * case.operations / self.limits.multiply_adds(threads)

    def memory(self, elements: int, row_bytes: int | None) -> tuple[str, float]:
        """How long it takes to read and write every element of the state where it stands; row_bytes: of a state that the caches hold."""
        return ("memory" if row_bytes is None else "cache"), 2 * FLOAT_BYTES * elements / self.limits.in_place(row_bytes)

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
            peers.append(measured(name, lambda name=name: _work(name, case, arguments, states, sequences), ours, seconds))  # type: ignore[misc]
        return _with(row, peers)


def _work(name: str, case: Case, arguments: Arrays, states: np.ndarray, sequences: int) -> Work | str:
    if name == NUMPY:
        return numpy_work(case, arguments, states, sequences)
    return torch_work(case, arguments, states, sequences, name == COMPILED)


def _with(row: Row, peers: Sequence[Peer]) -> Row:
    return Row(row.kernel, row.size, row.what, row.threads, row.elements, row.timing, row.limit, row.limit_seconds, tuple(peers))


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


def _elements(case: Case, size: Size, tokens: int) -> int:
    return size.heads * size.head_dim * size.d_state * tokens


def _seconds(limit: tuple[str, float]) -> float:
    return limit[1]


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
