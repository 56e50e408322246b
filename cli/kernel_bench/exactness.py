"""What our kernels promise of their results: the same bits however the tokens come, and how far float32 drifts from float64.

Rules
- The promise: bitwise the same outputs and states for any split of the tokens into batches, any order of the sequences in them, into which
  row a state is written, and how many threads run scans at the same time.
- The truth of an error is the NumPy reference beside the kernel, in float64, on exactly the same inputs.
"""

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...impl.memory import aligned, allocate
from .cases import CASES, CONVOLUTION, CONVOLUTION_NAME, CONVOLUTION_REFERENCE, SLOW, USUAL, Arrays, Case, ConvolutionCase, Decays, Size
from .limits import run_together
from .results import Exactness, Growth

SEQUENCES = 3
TOKENS = 40
SIZES = (Size(8, 64, 128), Size(3, 83, 5))
"""Rows that are just large enough to be written past the caches; and what is left over at every width of a vector."""
GROWTH_SIZE = Size(2, 64, 32)
CHECKPOINTS = (10, 100, 1_000, 10_000)


def run_scan(case: Case, arguments: Arrays, rows: np.ndarray, lengths: list[int], source: list[int], target: list[int]) -> np.ndarray:
    """One call without snapshots: segments of these lengths, from row to row; the outputs."""
    y = case.result(arguments)
    segment_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    case.kernel(*arguments, rows, segment_start, np.array(source), np.array(target)[:, None], y)
    return y


def promise(case: Case, trials: int, seed: int = 0) -> Exactness:
    """Compare random splits, orders, rows and threads with one sequence after the other, each in one call."""
    compared = differing = 0
    errors = []
    for size in SIZES:
        for trial in range(trials):
            random = np.random.default_rng((seed, trial))
            arguments = case.arguments(trial, SEQUENCES * TOKENS, size)
            start = case.rows(trial, SEQUENCES, size)
            whole, states = _plainly(case, arguments, start)
            results = (_split_at_random(case, arguments, start, random), _on_threads(case, arguments, start))
            compared += len(results)
            differing += sum(not (_same(y, whole) and _same(rows, states)) for y, rows in results)
            errors.append(_error(whole, _truth(case, arguments, start)))
    return Exactness(case.name, compared, differing, float(np.sqrt(np.mean(np.square(errors)))))


def _plainly(case: Case, arguments: Arrays, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every sequence whole and alone; outputs and states at the end."""
    rows, y = aligned(start), case.result(arguments)
    for sequence in range(SEQUENCES):
        tokens = slice(sequence * TOKENS, (sequence + 1) * TOKENS)
        y[tokens] = run_scan(case, case.of_tokens(arguments, tokens), rows, [TOKENS], [sequence], [sequence])
    return y, rows


def _split_at_random(case: Case, arguments: Arrays, start: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Batches of some sequences in any order, each with some of its next tokens, from either of its two rows to either."""
    rows = allocate((2 * SEQUENCES, *start.shape[1:]), poison=True)
    rows[:SEQUENCES] = start
    y = case.result(arguments)
    done, place = [0] * SEQUENCES, list(range(SEQUENCES))
    while min(done) < TOKENS:
        batch = [int(s) for s in random.permutation(SEQUENCES) if done[s] < TOKENS and random.random() < 0.7]
        lengths = [int(random.integers(1, min(TOKENS - done[s], 17) + 1)) for s in batch]
        if not batch:
            continue
        tokens = np.concatenate(
            [np.arange(s * TOKENS + done[s], s * TOKENS + done[s] + length) for s, length in zip(batch, lengths, strict=True)]
        )
        target = [s + SEQUENCES * int(random.integers(2)) for s in batch]
        y[tokens] = run_scan(case, case.of_tokens(arguments, tokens), rows, lengths, [place[s] for s in batch], target)
        for s, length, row in zip(batch, lengths, target, strict=True):
            done[s] += length
            place[s] = row
    return y, rows[place]


def _on_threads(case: Case, arguments: Arrays, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A thread for each sequence, all at the same time, on the same rows."""
    rows, y = aligned(start), case.result(arguments)

    def one(sequence: int) -> None:
        tokens = slice(sequence * TOKENS, (sequence + 1) * TOKENS)
        y[tokens] = run_scan(case, case.of_tokens(arguments, tokens), rows, [TOKENS], [sequence], [sequence])

    with ThreadPoolExecutor(SEQUENCES) as pool:
        run_together(pool, [functools.partial(one, sequence) for sequence in range(SEQUENCES)])
    return y, rows


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() == other.tobytes()


def _truth(case: Case, arguments: Arrays, start: np.ndarray) -> np.ndarray:
    """The outputs in float64."""
    exact = tuple(array.astype(np.float64) for array in arguments)
    y = np.full(exact[case.values].shape, np.nan)
    every = np.arange(SEQUENCES)
    case.reference(*exact, start.astype(np.float64), np.arange(SEQUENCES + 1) * TOKENS, every, every[:, None], y)
    return y


def _error(y: np.ndarray, truth: np.ndarray) -> float:
    """rms of the difference as a share of the rms of the truth."""
    return float(np.sqrt(np.mean((y - truth) ** 2) / np.mean(truth**2)))


def convolution_promise(trials: int) -> Exactness:
    """The same of the causal convolution, for random splits."""
    case = ConvolutionCase(Size(1, 64, 5))
    compared = differing = 0
    errors = []
    for trial in range(trials):
        random = np.random.default_rng(trial)
        arguments = case.arguments(trial, TOKENS)
        _, taps, bias = arguments
        results = []
        for cuts in ([], sorted(set(random.integers(1, TOKENS, 9).tolist()))):
            rows, y = case.rows(trial), np.full_like(arguments[0], np.nan)
            for first, last in zip([0, *cuts], [*cuts, TOKENS], strict=True):
                part = np.full_like(y[first:last], np.nan)
                x = np.ascontiguousarray(arguments[0][first:last])
                CONVOLUTION(x, taps, bias, rows, np.array([0, last - first]), np.array([0]), np.array([[0]]), part)
                y[first:last] = part
            results.append((y, rows))
        compared += 1
        differing += not (_same(results[0][0], results[1][0]) and _same(results[0][1], results[1][1]))
        exact = [array.astype(np.float64) for array in arguments]
        truth = np.full(exact[0].shape, np.nan)
        rows = case.rows(trial).astype(np.float64)
        CONVOLUTION_REFERENCE(exact[0], exact[1], exact[2], rows, np.array([0, TOKENS]), np.array([0]), np.array([[0]]), truth)
        errors.append(_error(results[0][0], truth))
    return Exactness(CONVOLUTION_NAME, compared, differing, float(np.sqrt(np.mean(np.square(errors)))))


def growth(case: Case, decays: Decays, checkpoints: tuple[int, ...] = CHECKPOINTS) -> Growth:
    """Run one long sequence in float32 and in float64."""
    tokens = checkpoints[-1]
    arguments = case.arguments(1, tokens, GROWTH_SIZE, decays)
    rows = case.rows(1, 1, GROWTH_SIZE)
    exact = tuple(array.astype(np.float64) for array in arguments)
    truth = np.full(exact[case.values].shape, np.nan)
    one = np.array([0])
    case.reference(*exact, rows.astype(np.float64), np.array([0, tokens]), one, one[:, None], truth)
    y = run_scan(case, arguments, rows, [tokens], [0], [0])
    windows = [slice(last - max(1, last // 10), last) for last in checkpoints]
    return Growth(case.name, decays.name, checkpoints, tuple(_error(y[window], truth[window]) for window in windows))


def all_promises(trials: int) -> tuple[Exactness, ...]:
    """Of every kernel."""
    return (*(promise(case, trials) for case in CASES), convolution_promise(trials))


def all_growth(checkpoints: tuple[int, ...] = CHECKPOINTS) -> tuple[Growth, ...]:
    """Of every kernel with a state, for usual and for slow decays."""
    return tuple(growth(case, decays, checkpoints) for case in CASES for decays in (USUAL, SLOW))
