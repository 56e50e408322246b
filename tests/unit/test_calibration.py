"""Calibration: what the floor is measured on, the tolerance that follows, and when a target could not be tested.

Rules
- Nothing is measured on a whole set of logs here but once; runs are made from the truth, with errors put in.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from statedrift.fuzz import calibration
from statedrift.fuzz.calibration import (
    LOG_COUNT,
    LOG_TOKENS_MAX,
    calibration_programs,
    measure_noise,
    noise_of,
    remember_noise,
    remembered_noise,
)
from statedrift.fuzz.execution import Run, execute
from statedrift.oracle.recompute import Request, recompute_of
from statedrift.spec.errors import UnavailableError
from statedrift.spec.models import Model
from statedrift.spec.operations import Decode
from statedrift.spec.programs import Program, check_program
from statedrift.store.campaigns import Noise

from tests.scripted_target import Lie, ScriptedTarget, fail, refuse

MODEL = Model("mamba2", 0, (("n_layer", 1),))

# --- what is run ---------------------------------------------------------------------------------------------------------------


def test_calibration_decodes_200_logs_of_up_to_200_tokens_whole_and_token_by_token() -> None:
    programs = calibration_programs(MODEL)
    wholes, singles = programs[0::2], programs[1::2]
    lengths = [program.operations[0].items[0].token_count for program in wholes]  # type: ignore[union-attr]
    assert len(wholes) == len(singles) == LOG_COUNT >= 200
    assert (min(lengths), max(lengths)) == (1, LOG_TOKENS_MAX)
    assert [len(program.operations) for program in wholes] == [1] * LOG_COUNT
    assert [len(program.operations) for program in singles] == lengths


def test_calibration_uses_one_sequence_of_a_fresh_session_and_no_state_operation() -> None:
    for program in calibration_programs(MODEL):
        check_program(program)
        assert (program.cache.n_seq_max, program.cache.start) == (1, "fresh")
        assert program.cache.n_ubatch >= LOG_TOKENS_MAX, "a cut-up batch is a test, not calibration"
        assert all(isinstance(operation, Decode) for operation in program.operations)


def test_calibration_decodes_the_same_tokens_whole_and_token_by_token() -> None:
    target = ScriptedTarget()
    for program in calibration_programs(MODEL)[20:22]:
        execute(program, target, target.progress)
    batches = [arguments[0].tokens.tolist() for _, _, arguments in target.calls]
    assert batches[0] == [token for batch in batches[1:] for token in batch]
    assert len(batches) > 2


def test_hidden_states_are_asked_for_only_where_there_are_some() -> None:
    assert {program.cache.outputs for program in calibration_programs(MODEL)} == {"all", "embeddings"}
    assert {program.cache.outputs for program in calibration_programs(MODEL, embeddings=False)} == {"all"}


# --- the floor -----------------------------------------------------------------------------------------------------------------

FEW_TOKENS = 12


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "LOG_TOKENS_MAX", FEW_TOKENS)


def truthful(programs: Sequence[Program], whole_error: float = 0.0, step_error: float = 0.0, **changes: Any) -> list[Run]:
    """Right runs, with an error in the last row of every whole and every token-by-token decoding."""
    runs = []
    for program in programs:
        target = ScriptedTarget(capabilities=changes)
        runs.append(execute(program, target, target.progress))
    truths = iter(recompute_of(MODEL).rows([Request(span.log, span.indices, span.hidden) for run in runs for span in run.spans]))
    result = []
    for number, run in enumerate(runs):
        rows = {}
        for span in run.spans:
            truth = next(truths)
            table = truth.astype(np.float32)
            table[-1, 0] += (step_error if number % 2 else whole_error) * (1 + np.sqrt(np.mean(truth[-1] ** 2)))
            rows[span.operation_index] = (table.tobytes(), table.shape[1])
        result.append(msgspec.structs.replace(run, rows=rows))
    return result


@pytest.mark.usefixtures("few_tokens")
def test_the_floor_is_the_largest_error_of_all() -> None:
    noise = measure_noise(MODEL, lambda programs: truthful(programs, 2e-5, 5e-5))
    assert noise.floor == pytest.approx(5e-5, rel=0.01)
    assert noise.tolerance == 20 * noise.floor
    assert noise.log_count == LOG_COUNT


@pytest.mark.usefixtures("few_tokens")
def test_a_target_without_hidden_states_is_measured_on_logits() -> None:
    asked: list[Sequence[Program]] = []

    def run_all(programs: Sequence[Program]) -> list[Run]:
        asked.append(programs)
        return truthful(programs, embeddings=False)

    assert measure_noise(MODEL, run_all).floor < 1e-6
    assert {program.cache.outputs for program in asked[-1]} == {"all"}


@pytest.mark.usefixtures("few_tokens")
@pytest.mark.parametrize(("lie", "words"), [(refuse, "scripted"), (fail, "code 7")])
def test_a_target_that_refuses_plain_decodings_could_not_be_tested(lie: Lie, words: str) -> None:
    def run_all(programs: Sequence[Program]) -> list[Run]:
        targets = [ScriptedTarget({0: lie}) for _ in programs]
        return [execute(program, target, target.progress) for program, target in zip(programs, targets, strict=True)]

    with pytest.raises(UnavailableError, match=f"could not test mamba2 .*plain decoding.*{words}"):
        measure_noise(MODEL, run_all)


@pytest.mark.usefixtures("few_tokens")
def test_logs_above_a_targets_largest_batch_are_cut_into_as_few_decodes_as_possible() -> None:
    asked: list[Program] = []

    def run_all(programs: Sequence[Program]) -> list[Run]:
        asked[:] = programs
        return truthful(programs, n_batch=5)

    assert measure_noise(MODEL, run_all).floor < 1e-6
    counts = [[operation.items[0].token_count for operation in program.operations] for program in asked[0::2]]  # type: ignore[union-attr]
    assert max(map(len, counts)) == 3
    assert counts[-1] == [5, 5, 2]


@pytest.mark.usefixtures("few_tokens")
def test_a_run_that_ended_early_could_not_be_tested() -> None:
    def run_all(programs: Sequence[Program]) -> list[Run]:
        runs = truthful(programs)
        return [msgspec.structs.replace(run, steps=run.steps[:-1]) for run in runs]

    with pytest.raises(UnavailableError, match="ended early"):
        measure_noise(MODEL, run_all)


@pytest.mark.usefixtures("few_tokens")
def test_rows_that_are_no_numbers_are_left_to_the_campaign() -> None:
    assert measure_noise(MODEL, lambda programs: truthful(programs, float("nan"), 5e-5)).floor == pytest.approx(5e-5, rel=0.01)


@pytest.mark.usefixtures("few_tokens")
def test_a_target_without_one_finite_row_could_not_be_tested() -> None:
    def spoiled(programs: Sequence[Program]) -> list[Run]:
        runs = truthful(programs)
        rows = [{index: (b"\xff" * len(data), width) for index, (data, width) in run.rows.items()} for run in runs]
        return [msgspec.structs.replace(run, rows=row) for run, row in zip(runs, rows, strict=True)]

    with pytest.raises(UnavailableError, match="nan"):
        measure_noise(MODEL, spoiled)


NOISES = [
    # largest error of whole decodings, of token-by-token ones; floor and tolerance that follow
    (0.0, 0.0, 0.0, 1e-5),
    (1e-7, 2e-7, 2e-7, 1e-5),
    (5e-7, 1e-7, 5e-7, 1e-5),
    (1e-6, 0.0, 1e-6, 2e-5),
    (1e-6, 2e-6, 2e-6, 4e-5),
    (1e-4, 1e-4, 1e-4, 2e-3),
    # steps as wrong as a wrong state would make them are a fault, not noise
    (0.0, 0.5, 0.0, 1e-5),
    (1e-6, 0.5, 1e-6, 2e-5),
    (1e-6, float("inf"), 1e-6, 2e-5),
    (1e-6, float("nan"), 1e-6, 2e-5),
    (1e-6, 2.1e-3, 1e-6, 2e-5),  # just over 100 tolerances of the whole ones
]


@pytest.mark.parametrize(("whole", "steps", "floor", "tolerance"), NOISES)
def test_the_tolerance_is_20_floors_and_never_under_its_least(whole: float, steps: float, floor: float, tolerance: float) -> None:
    noise = noise_of(whole, steps, MODEL)
    assert noise.floor == floor
    assert noise.tolerance == pytest.approx(tolerance, rel=1e-12)
    assert noise.tolerance >= max(20 * noise.floor, 1e-5)


TOO_NOISY = [
    (1.01e-4, 0.0),
    (0.0, 1.01e-4),
    (1e-6, 1e-3),  # worse than noise, not as wrong as a wrong state
    (0.5, 0.5),
    (float("inf"), 0.0),
    (float("nan"), 0.0),
    (float("nan"), float("nan")),
]


@pytest.mark.parametrize(("whole", "steps"), TOO_NOISY)
def test_too_much_noise_could_not_be_tested(whole: float, steps: float) -> None:
    with pytest.raises(UnavailableError, match="could not test mamba2 seed=0 n_layer=1: plain decodings of one sequence are off by"):
        noise_of(whole, steps, MODEL)


# --- the memory ----------------------------------------------------------------------------------------------------------------

NOISE = noise_of(1e-6, 0.0, MODEL)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "statedrift" / "noise-1.json"


def test_a_measurement_is_remembered(memory: Path) -> None:
    assert remembered_noise("engine", "1", MODEL) is None
    remember_noise("engine", "1", MODEL, NOISE)
    assert remembered_noise("engine", "1", MODEL) == NOISE


def test_it_holds_for_its_target_version_and_model_only(memory: Path) -> None:
    remember_noise("engine", "1", MODEL, NOISE)
    assert remembered_noise("other", "1", MODEL) is None
    assert remembered_noise("engine", "2", MODEL) is None
    assert remembered_noise("engine", "1", Model("mamba2", 1, MODEL.dimensions)) is None


def test_measurements_do_not_push_each_other_out(memory: Path) -> None:
    other = Noise(0.0, 1e-5, LOG_COUNT)
    remember_noise("engine", "1", MODEL, NOISE)
    remember_noise("engine", "2", MODEL, other)
    assert remembered_noise("engine", "1", MODEL) == NOISE
    assert remembered_noise("engine", "2", MODEL) == other


DAMAGED = [b"", b"{", b"[]", b"null", b"7", b'"text"', b"\xff\xfe\x00", b"{}", b'{"engine": 1}']


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_memory_is_measured_again_and_mended(memory: Path, content: bytes) -> None:
    memory.parent.mkdir()
    memory.write_bytes(content)
    assert remembered_noise("engine", "1", MODEL) is None
    remember_noise("engine", "1", MODEL, NOISE)
    assert remembered_noise("engine", "1", MODEL) == NOISE


CHANGES: list[Any] = [
    {"floor": "x"},
    {"more": 1},
    {"tolerance": 1.0},
    {"floor": 1.0, "tolerance": 20.0},
    {"floor": -1.0, "tolerance": 1e-5},
    {"floor": float("nan"), "tolerance": float("nan")},
    {"log_count": 3},
]
ENTRIES: list[Any] = [None, 7, [], {}, *({**msgspec.to_builtins(NOISE), **changes} for changes in CHANGES)]


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_an_entry_that_no_measurement_makes_is_measured_again(memory: Path, entry: Any) -> None:
    remember_noise("engine", "1", MODEL, NOISE)
    (key,) = json.loads(memory.read_bytes())
    memory.write_text(json.dumps({key: entry}))
    assert remembered_noise("engine", "1", MODEL) is None


def test_a_memory_that_cannot_be_written_is_only_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    remember_noise("engine", "1", MODEL, NOISE)
    assert remembered_noise("engine", "1", MODEL) is None


def test_a_folder_in_the_place_of_the_memory_leaves_no_litter(memory: Path) -> None:
    memory.mkdir(parents=True)
    remember_noise("engine", "1", MODEL, NOISE)
    assert remembered_noise("engine", "1", MODEL) is None
    assert [path.name for path in memory.parent.iterdir()] == [memory.name]


def test_without_a_home_folder_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    remember_noise("engine", "1", MODEL, NOISE)
    assert remembered_noise("engine", "1", MODEL) is None
