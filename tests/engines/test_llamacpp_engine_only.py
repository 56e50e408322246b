"""Families that only llama.cpp itself can judge: they load, they remember, their noise is low, and what is wrong with them is found."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from statedrift.fuzz.reproduction import reproduction_script
from statedrift.fuzz.signatures import fine_signature
from statedrift.fuzz.titles import title_of
from statedrift.fuzz.trial import Bench, Trial
from statedrift.fuzz.truth import Setting
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.families import ENGINE_ONLY, doubled
from statedrift.spec.models import Model
from statedrift.spec.operations import Decode, Item
from statedrift.spec.programs import Program, parse_program
from statedrift.store.campaigns import Noise
from statedrift.store.findings import Finding
from statedrift.targets.llama_tensors import asked_tensors

_SPEC = importlib.util.spec_from_file_location("scripts", Path(__file__).parent.parent / "scripts.py")
assert _SPEC is not None
assert _SPEC.loader is not None
scripts = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(scripts)

TOLERANCE = 2e-3
"""Above that of every family, so that nothing has to be measured here."""
FLOOR_MAX = 1e-4
MIXES_SEQUENCES = "plamo2"
"""Its forward confuses tokens and sequences where a batch has several of both."""
KEEP_SNAPSHOTS = ("nemotron_h_moe", "lfm2moe", "qwen35moe", "kimi_k3", "bailingmoe3", "glm5_next", "deepseek4")
NEVER_WRITTEN = "decode 0:3; decode 0:1; rollback 0 3; decode 0:1"
"""Three tokens are taken back after a decode of one: the snapshots that this needs were never written."""
DRAFT = "cache n_seq_max=2; decode 0:9; decode 0:4; rollback 0 2; decode 0:1/1 1:5; drop 1; decode 0:3/1 1:2/2"


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench("llamacpp", oracle="engine") as bench:
        bench.set_noise({Model(name, seed): Noise(TOLERANCE / 20, TOLERANCE, 200) for name in ENGINE_ONLY for seed in range(2)})
        yield bench


def rows_of(bench: Bench, programs: list[Program]) -> list[np.ndarray]:
    """The output rows of plain programs of one sequence, float64 [tokens, n_vocab]."""
    trials = bench.try_programs(programs)
    rows = []
    for trial in trials:
        assert trial.run is not None, (trial.program, trial.verdict)
        assert trial.verdict.kind == "ok", (trial.program, trial.verdict)
        parts = [np.frombuffer(data, np.float32).reshape(-1, width) for _, (data, width) in sorted(trial.run.rows.items())]
        rows.append(np.concatenate(parts).astype(np.float64))
    return rows


def off_by(rows: np.ndarray, truth: np.ndarray) -> np.ndarray:
    error: np.ndarray = np.max(np.abs(rows - truth), axis=1) / (1 + np.sqrt(np.mean(truth * truth, axis=1)))
    return error


@pytest.mark.parametrize("family", ENGINE_ONLY)
@pytest.mark.parametrize("seed", range(2))
def test_steps_are_the_whole_and_an_old_token_shows(bench: Bench, family: str, seed: int) -> None:
    model, cache = Model(family, seed), CacheConfiguration(n_seq_max=1)
    log = tuple(int(token) for token in np.random.default_rng(7).integers(0, 64, 60))
    changed = (*log[:-11], (log[-11] + 7) % 64, *log[-10:])
    whole = [Program(model, cache, (Decode((Item((0,), len(tokens), 0, tokens),)),)) for tokens in (log, changed)]
    steps = Program(model, cache, tuple(Decode((Item((0,), 1, 0, (token,)),)) for token in log))
    given, other, by_steps = rows_of(bench, [*whole, steps])
    assert off_by(by_steps, given).max() <= FLOOR_MAX
    assert off_by(other[-1:], given[-1:])[0] >= 1e-2
    assert np.sqrt(np.mean(given**2)) >= 0.5
    assert np.abs(given).max() <= 6


@pytest.mark.parametrize("family", [name for name in ENGINE_ONLY if name != MIXES_SEQUENCES])
def test_what_the_engine_does_right_is_right(bench: Bench, family: str) -> None:
    trial = bench.try_program(parse_program(f"model {family} seed=0; {DRAFT}"))
    assert trial.verdict.kind == "ok", trial.verdict
    assert trial.run is not None
    assert trial.run.capabilities.n_rs_seq == (3 if family in KEEP_SNAPSHOTS else 0)


def test_a_forward_that_mixes_the_sequences_of_a_batch_is_found(bench: Bench) -> None:
    apart, together = bench.try_programs(
        [parse_program(f"model {MIXES_SEQUENCES} seed=0; {text}") for text in ("decode 0:2; decode 1:2", "decode 0:2 1:2")]
    )
    assert apart.verdict.kind == "ok"
    if together.verdict.kind == "ok":
        pytest.skip("this build does not mix them")
    assert (together.verdict.kind, together.verdict.operation_index) == ("wrong-output", 0)


@pytest.mark.parametrize("family", [name for name in KEEP_SNAPSHOTS if name != "deepseek4"])
def test_a_rollback_to_a_snapshot_that_was_never_written_is_found(bench: Bench, family: str) -> None:
    trial = bench.try_program(parse_program(f"model {family} seed=0; {NEVER_WRITTEN}"))
    assert trial.run is not None
    if trial.run.steps[2].outcome.word == "refused":
        pytest.skip("this build refuses such a rollback")
    assert (trial.verdict.kind, trial.verdict.operation_index) == ("wrong-output", 3)


@pytest.mark.parametrize("family", ENGINE_ONLY)
def test_the_state_of_a_doubled_model_is_foreign(bench: Bench, family: str) -> None:
    trial = bench.try_program(parse_program(f"model {family} seed=0; decode 0:5; save 0 a; damage a foreign; restore a 1"))
    assert trial.run is not None
    assert trial.run.steps[3].outcome.word == "refused", trial.verdict


@pytest.mark.parametrize("setting", [Setting("f16", 0), Setting("f32", 1)])
def test_half_precision_cells_and_flash_attention_are_held_to_their_own_kind(bench: Bench, setting: Setting) -> None:
    bench._noise[Model("lfm2moe"), setting] = Noise(5e-3, 0.1, 200)
    cache = f"cache kv={setting.kv} flash={setting.flash}"
    control = bench.try_program(parse_program(f"model lfm2moe seed=0; {cache}; decode 0:9; decode 0:4; rollback 0 2; decode 0:1/1"))
    wrong = bench.try_program(parse_program(f"model lfm2moe seed=0; {cache}; {NEVER_WRITTEN}"))
    assert control.verdict.kind == "ok"
    assert wrong.run is not None
    if wrong.run.steps[2].outcome.word != "refused":
        assert (wrong.verdict.kind, wrong.tolerance) == ("wrong-output", 0.1)


def finding_of(trial: Trial) -> Finding:
    verdict = trial.verdict
    return Finding(
        signature=fine_signature("llamacpp", trial.program, verdict), title=title_of(trial.program, verdict), target="llamacpp",
        version="a version", family=trial.program.model.family, verdict=verdict, program=trial.program, original=trial.program,
        documented=True, undocumented_uses=(), reproduced=10, reruns=10, found_after_programs=1, found_after_seconds=0.0,
        first_seen="2026-11-29T12:00:00+00:00", last_seen="2026-11-29T12:00:00+00:00", oracle="engine",
    )  # fmt: skip


@pytest.mark.parametrize("family", [name for name in KEEP_SNAPSHOTS if name != "deepseek4"])
def test_the_script_makes_the_same_model_without_statedrift(bench: Bench, family: str, tmp_path: Path) -> None:
    trial = bench.try_program(parse_program(f"model {family} seed=0; {NEVER_WRITTEN}"))
    if trial.verdict.kind != "wrong-output":
        pytest.skip("this build refuses such a rollback")
    assert trial.verdict.error is not None
    script = tmp_path / "repro.py"
    script.write_text(reproduction_script(finding_of(trial), trial))
    ran = scripts.run_script(script)
    assert ran.returncode == 1, (ran.stdout, ran.stderr)
    difference = float(ran.stdout.split("largest difference ")[1].split(",")[0])
    truth = trial.truths[-1]
    assert difference / (1 + np.sqrt(np.mean(truth**2))) == pytest.approx(trial.verdict.error, rel=0.05)


def test_the_tensors_of_a_model_are_the_librarys_own_and_optional_ones_are_left_out() -> None:
    facts = {fact.name: fact for fact in asked_tensors(Model("rwkv6qwen2"))}
    assert facts["token_embd.weight"].shape == (64, 128)
    assert facts["blk.0.time_mix_key.weight"].shape == (128, 128)
    assert not any("time_mix_first" in name for name in facts)
    wide = {fact.name: fact for fact in asked_tensors(doubled(Model("rwkv6qwen2")))}
    assert wide["token_embd.weight"].shape == (64, 256)
