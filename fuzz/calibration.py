"""How far a target's outputs may be from the truth: its measured noise floor, and the tolerance that follows.

Rules
- The floor is the largest error over single-sequence decodings in fresh sessions, whole and token by token, with no state operation.
  Several sequences and cut-up batches are tests, not calibration: an engine that gets them wrong must not blunt its own check.
- Rows that are not finite are a fault, not noise: they are left out here, and the campaign finds them.
- tolerance = max(20 x floor, 1e-5). Steps as wrong as a wrong state would make them are a fault, not noise. A floor so high that 20 x floor exceeds 2e-3 hides faults: the target is not tested for that family.
- Rows that hang on a selection too close to be judged are counted; a model with many of them cannot be tested. How close is too close follows
  from the tolerance (judgement.margin_min).
- A log that is longer than a decode of the target takes is cut into as few decodes as possible.
- State rows have a floor of their own, over the same logs; where it is too high to be noise they are judged by the outputs' tolerance, and
  the campaign shows what is wrong.
- Where the engine is its own truth, that truth is the whole log in one decode; the floor is then how far token-by-token decodings, and those cut
  into small ubatches, are from it, and it must be the same bits when it is asked for again. Every type of attention cells has its own floor.
- A measured floor is remembered per target version and model, so that it is measured once on a machine.
"""

import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..spec.configuration import CacheConfiguration
from ..spec.errors import UnavailableError, UsageError
from ..spec.models import Model, model_text
from ..spec.operations import Decode, Item, Outputs
from ..spec.programs import DECODE_TOKENS_MAX, Program
from ..spec.weights import weights_digest
from ..store.campaigns import Noise
from ..store.files import write_whole
from .execution import Run
from .judgement import unjudged_rows, why_unknown, worst_error
from .state_judgement import worst_state_error
from .truth import PLAIN_SETTING, EngineTruth, Setting

LOG_COUNT = 200
LOG_TOKENS_MAX = 200
TOLERANCE_MIN = 1e-5
FLOORS_IN_TOLERANCE = 20.0
TOLERANCE_MAX = 2e-3
"""The smallest effect of a wrong state row is 0.015, 7 times as much (tests/quality/test_sensitivity.py)."""
HALF_TOLERANCE_MAX = 0.2
"""With half-precision cells or flash attention, which rounds to half precision inside: only faults that are larger than their noise are seen."""
FAULT_TOLERANCES = 100.0
"""A wrong state row moves an output by at least so many tolerances: the models' weights are chosen for it."""
INSPECTED_ONE_IN = 5
"""Looking at a state may cost a target a whole recompute: only one program in so many is looked at, from short to long."""
INSPECTED_STEPS_MAX = 16
"""Longest log whose state is looked at token by token."""
UNJUDGED_MAX = 0.01
"""Largest share of rows that may hang on a selection too close to be judged."""
CUT_UBATCH = 16
"""Tokens of a ubatch where a log is cut to see what cutting does to rounding."""
_CALIBRATION_SALT = 1 << 30


class Logs(NamedTuple):
    """Over how many logs noise is measured, at least 2, and how many tokens the longest has; the shortest has 1."""

    log_count: int = LOG_COUNT
    tokens_max: int = LOG_TOKENS_MAX


def all_logs() -> Logs:
    """Those that the noise of an installed target is measured over."""
    return Logs(LOG_COUNT, LOG_TOKENS_MAX)


RunAll = Callable[[Sequence[Program]], Sequence[Run]]


def calibration_programs(
    model: Model,
    embeddings: bool = True,
    setting: Setting = PLAIN_SETTING,
    n_ubatch: int = 256,
    decode_tokens_max: int = DECODE_TOKENS_MAX,
    logs: Logs | None = None,
) -> list[Program]:
    """Two programs for every log: the log in as few decodes as possible, and token by token.

    embeddings  every fourth pair asks for hidden states
    decode_tokens_max  most tokens that a decode takes
    logs               `all_logs` unless given
    """
    log_count, tokens_max = logs or all_logs()
    programs = []
    for number in range(log_count):
        length = 1 + number * (tokens_max - 1) // (log_count - 1)
        outputs: Outputs = "embeddings" if embeddings and number % 4 == 3 else "all"
        cache = CacheConfiguration(n_seq_max=1, n_rs_seq=0, n_ubatch=n_ubatch, outputs=outputs, kv=setting.kv, flash=setting.flash)
        salt = _CALIBRATION_SALT + number
        counts = [min(decode_tokens_max, length - start) for start in range(0, length, decode_tokens_max)]
        whole = tuple(Decode((Item((0,), count, salt),)) for count in counts)
        single = tuple(Decode((Item((0,), 1, salt),)) for _ in range(length))
        programs += [Program(model, cache, whole), Program(model, cache, single)]
    return programs


def measure_noise(model: Model, run_all: RunAll, logs: Logs | None = None) -> Noise:
    """Measure the floor of a target for a model, over `all_logs` unless others are given.

    Raises UnavailableError ("could not test") when the target refuses plain decodings, or is too noisy to be judged.
    """
    logs = logs or all_logs()
    _, runs = _plain_runs(model, run_all, PLAIN_SETTING, logs)
    noise = noise_of(worst_error(model, runs[0::2]), worst_error(model, runs[1::2]), model)
    return msgspec.structs.replace(_with_unjudged(noise, model, runs[0::2]), log_count=logs.log_count)


def _with_unjudged(noise: Noise, model: Model, runs: Sequence[Run]) -> Noise:
    """The noise with the share of rows that are not judged. Raises UnavailableError when there are many."""
    unjudged, row_count = unjudged_rows(model, runs, noise.tolerance)
    if unjudged > UNJUDGED_MAX * row_count:
        raise UnavailableError(
            f"could not test {model_text(model)}: {unjudged / row_count:.2%} of all rows hang on a selection too close to be judged"
        )
    return msgspec.structs.replace(noise, unjudged=unjudged / row_count)


def _plain_runs(model: Model, run_all: RunAll, setting: Setting, logs: Logs | None = None) -> tuple[list[Program], Sequence[Run]]:
    """The calibration programs and what came of them. Raises UnavailableError when one of them was not accepted to its end."""
    (shortest,) = run_all(calibration_programs(model, setting=setting)[:1])
    declared = shortest.capabilities
    decode_tokens_max = declared.n_batch or DECODE_TOKENS_MAX
    programs = calibration_programs(model, declared.embeddings, setting, decode_tokens_max=decode_tokens_max, logs=logs)
    runs = run_all(programs)
    _check_accepted(model, programs, runs)
    return programs, runs


def _check_accepted(model: Model, programs: Sequence[Program], runs: Sequence[Run]) -> None:
    for program, run in zip(programs, runs, strict=True):
        if len(run.steps) != len(program.operations) or any(step.outcome.word != "accepted" for step in run.steps):
            refusals = (step.outcome.detail for step in run.steps if step.outcome.word != "accepted")
            said = run.verdict.reason if run.verdict else next(refusals, "it ended early")
            raise UnavailableError(f"could not test {model_text(model)}: a plain decoding of one sequence failed ({said})")


def measure_own_noise(model: Model, setting: Setting, run_all: RunAll, own_truth: EngineTruth) -> Noise:
    """Measure the floor of a target that is its own truth.

    Raises UnavailableError when plain decodings are refused, the truth cannot be had, are other bits a second time, or is too noisy.
    """
    programs, runs = _plain_runs(model, run_all, setting)
    cut = [_cut(program) for program in programs[0::2]]
    cut_runs = run_all(cut)
    _check_accepted(model, cut, cut_runs)
    steps, cut_truths = own_truth.rows_of_spans(programs[1::2], runs[1::2]), own_truth.rows_of_spans(cut, cut_runs)
    unknown = next((reason for own in (*steps, *cut_truths) for truth in own if (reason := why_unknown(truth)) is not None), None)
    if unknown is not None:
        raise UnavailableError(f"could not test {model_text(model)}: the target's own recompute of a log failed: {unknown}")
    if any(first.rows != second.rows for first, second in zip(runs[0::2], run_all(programs[0::2]), strict=True)):
        raise UnavailableError(f"could not test {model_text(model)}: the same log decoded twice in fresh sessions gives different bits")
    errors = worst_error(model, runs[1::2], steps), worst_error(model, cut_runs, cut_truths)
    # In half precision rounding is as large as what is a fault in single precision.
    is_plain = setting == PLAIN_SETTING
    noise = noise_of(min(errors), max(errors), model) if is_plain else _noise(max(errors), model, tolerance_max(setting))
    return _with_unjudged(noise, model, runs[0::2])


def _cut(program: Program) -> Program:
    return msgspec.structs.replace(program, cache=msgspec.structs.replace(program.cache, n_ubatch=CUT_UBATCH))


def _tolerance(floor: float) -> float:
    return max(FLOORS_IN_TOLERANCE * floor, TOLERANCE_MIN)


def noise_of(whole: float, steps: float, model: Model) -> Noise:
    """The floor and tolerance that follow from the largest errors of whole and of token-by-token decodings (or of the smaller and the larger
    difference from the whole ones, where these are the truth).

    Steps that are off by as much as a wrong state row would be, where whole decodings are right, are a fault and no noise: then
    the floor is that of the whole ones, and the campaign shows the fault. Raises UnavailableError when the floor is too high, or
    not a number.
    """
    floor = max(whole, steps) if steps <= FAULT_TOLERANCES * _tolerance(whole) else whole
    return _noise(floor, model, tolerance_max(PLAIN_SETTING))


def tolerance_max(setting: Setting) -> float:
    """A tolerance above this would hide too much."""
    return TOLERANCE_MAX if setting == PLAIN_SETTING else HALF_TOLERANCE_MAX


def _noise(floor: float, model: Model, most: float) -> Noise:
    if not FLOORS_IN_TOLERANCE * floor <= most:
        raise UnavailableError(
            f"could not test {model_text(model)}: plain decodings of one sequence are off by {floor:.3g}; "
            f"faults would hide in a tolerance of {FLOORS_IN_TOLERANCE:g} times that"
        )
    return Noise(floor, _tolerance(floor), LOG_COUNT)


def measure_state_noise(model: Model, noise: Noise, inspect_all: Callable[[Sequence[Program]], Sequence[Run]]) -> Noise:
    """The same noise with the floor of a target's state rows: after some whole logs, and after every token of some short ones."""
    programs = [program for program in calibration_programs(model, embeddings=False) if len(program.operations) <= INSPECTED_STEPS_MAX]
    floor = worst_state_error(model, inspect_all(programs[::INSPECTED_ONE_IN]))
    tolerance = _tolerance(floor) if FLOORS_IN_TOLERANCE * floor <= TOLERANCE_MAX else noise.tolerance
    return msgspec.structs.replace(noise, state_floor=floor, state_tolerance=tolerance)


def _memory_path() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "statedrift" / "noise-1.json"


def _memory_key(target: str, version: str, model: Model, states: bool, judged_by: str) -> str:
    """A measurement holds for the target, its version, the very weights, the machine, and what it was held to."""
    more = [*(["states"] * states), *([judged_by] if judged_by else [])]
    return " | ".join([target, version, model_text(model), weights_digest(model), platform.machine(), platform.node(), *more])


def remembered_noise(
    target: str,
    version: str,
    model: Model,
    states: bool = False,
    judged_by: str = "",
    setting: Setting = PLAIN_SETTING,
    log_count: int = LOG_COUNT,
) -> Noise | None:
    """What was measured before for this target, version and model (and its state rows); None when nothing was, or the memory cannot be read.

    judged_by  what the rows were held to, where it was not our own recompute
    """
    try:
        entries = json.loads(_memory_path().read_bytes())
        noise = msgspec.convert(entries[_memory_key(target, version, model, states, judged_by)], Noise)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, msgspec.ValidationError):  # RuntimeError: there is no home folder
        return None
    is_sound = (
        noise.floor >= 0 and FLOORS_IN_TOLERANCE * noise.floor <= tolerance_max(setting) and noise.tolerance == _tolerance(noise.floor)
    )
    is_sound &= not states or (noise.state_tolerance is not None and TOLERANCE_MIN <= noise.state_tolerance <= TOLERANCE_MAX)
    return noise if is_sound and noise.log_count >= log_count else None


def remember_noise(target: str, version: str, model: Model, noise: Noise, judged_by: str = "") -> None:
    """Keep a measurement; a memory that cannot be written is only slower."""
    try:
        path = _memory_path()
        try:
            entries = json.loads(path.read_bytes())
        except (OSError, ValueError):
            entries = {}
        if not isinstance(entries, dict):
            entries = {}
        entries[_memory_key(target, version, model, noise.state_tolerance is not None, judged_by)] = msgspec.to_builtins(noise)
        write_whole(path, json.dumps(entries, indent=1).encode())
    except (OSError, RuntimeError, UsageError):
        return
