"""What is kept of every program of a shard, from its trials (store/records.py says what, and how it is packed).

Rules
- It costs a few microseconds a program: arrays are filled once a shard, and what was counted elsewhere is taken from there.
- Of rows only those of programs that were right are counted by their distance from the tolerance: rows before a divergence say nothing more.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..store.records import ANSWERS, BIN_COUNT, KINDS, OPERATIONS, Summary
from .trial import Trial

_KIND = {word: number for number, word in enumerate(KINDS)}
_OPERATION = {word: number for number, word in enumerate(OPERATIONS)}
_ANSWER = {word: number for number, word in enumerate(ANSWERS)}
_UINT16_MAX = 0xFFFF


def summary_of(trials: Sequence[Trial], outcomes: Mapping[str, Mapping[str, int]]) -> Summary:
    """The summary of a shard's trials; `outcomes`: operation name -> outcome word -> count, of all of them together."""
    steps = [trial.run.steps if trial.run is not None else () for trial in trials]
    answers = np.zeros((len(OPERATIONS), len(ANSWERS)), "<u4")
    for name, counts in outcomes.items():
        for word, count in counts.items():
            answers[_OPERATION[name], _ANSWER[word]] += count
    return Summary(
        np.array([_KIND[trial.verdict.kind] for trial in trials], "<u1").tobytes(),
        np.array([min(len(own), _UINT16_MAX) for own in steps], "<u2").tobytes(),
        np.array([min(sum(step.outcome.word == "accepted" for step in own), _UINT16_MAX) for own in steps], "<u2").tobytes(),
        _numbers([trial.verdict.error for trial in trials]),
        _numbers([trial.verdict.tolerance for trial in trials]),
        answers.tobytes(),
        distances([trial.closeness for trial in trials if trial.verdict.kind == "ok" and trial.closeness is not None]).tobytes(),
    )


def _numbers(values: Sequence[float | None]) -> bytes:
    return np.array([np.nan if value is None else value for value in values], "<f4").tobytes()


def distances(closeness: Sequence[np.ndarray]) -> np.ndarray:
    """Rows by how far they are under their tolerance: uint32 [BIN_COUNT], as `records.BIN_COUNT` says.

    closeness  arrays of error / tolerance of rows, each at most 1
    """
    if not closeness:
        return np.zeros(BIN_COUNT, "<u4")
    ratios = np.concatenate(closeness)
    mantissas, exponents = np.frexp(ratios)  # ratio = mantissa * 2^exponent with a mantissa in [0.5, 1); 0 has exponent 0
    halvings = np.where(ratios > 0, -exponents + (mantissas == 0.5), BIN_COUNT)
    return np.bincount(np.clip(halvings, 0, BIN_COUNT - 1), minlength=BIN_COUNT).astype("<u4")
