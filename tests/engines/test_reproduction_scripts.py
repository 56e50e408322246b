"""repro.py for llama.cpp: the very calls of a program, without statedrift, and the same answers.

Rules
- The rows that a script prints are compared with the rows that the target gave.
- A script exits 1 when the fault shows, 0 when it does not, 2 when it could not run.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from statedrift.fuzz.reproduction import reproduction_script
from statedrift.fuzz.signatures import fine_signature
from statedrift.fuzz.titles import title_of
from statedrift.fuzz.trial import Bench, Trial
from statedrift.oracle.recompute import use_one_thread
from statedrift.spec.programs import parse_program
from statedrift.spec.verdicts import Verdict
from statedrift.store.findings import Finding

_SPEC = importlib.util.spec_from_file_location("scripts", Path(__file__).parent.parent / "scripts.py")
assert _SPEC is not None
assert _SPEC.loader is not None
scripts = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(scripts)

CONTROL = "model lfm2 seed=0; cache n_seq_max=2 n_rs_seq=3; decode 0:10; decode 0:4; rollback 0 2; decode 0:1/1; decode 0:3/1"


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    use_one_thread()
    with Bench("llamacpp") as bench:
        yield bench


def finding_of(trial: Trial, verdict: Verdict, target: str = "llamacpp") -> Finding:
    """A finding made by hand: `verdict` need not be the trial's."""
    return Finding(
        signature=fine_signature(target, trial.program, verdict),
        title=title_of(trial.program, verdict),
        target=target,
        version="a version",
        family=trial.program.model.family,
        verdict=verdict,
        program=trial.program,
        original=trial.program,
        documented=True,
        undocumented_uses=(),
        reproduced=10,
        reruns=10,
        found_after_programs=1,
        found_after_seconds=0.0,
        first_seen="2026-11-29T12:00:00+00:00",
        last_seen="2026-11-29T12:00:00+00:00",
    )


def write_script(folder: Path, trial: Trial, verdict: Verdict) -> Path:
    script = folder / "repro.py"
    script.write_text(reproduction_script(finding_of(trial, verdict), trial))
    return script


# --- what went wrong shows -----------------------------------------------------------------------------------------------------

FAULTS = [
    ("wrong-output", "cache n_rs_seq=3; decode 0:10; decode 0:4; rollback 0 2; share 0 1; decode 1:1/1", r"largest difference \d"),
    ("wrong-position", "decode 1:1; keep 0", r"first and last positions \[\(-1, -1\), \(0, -1\)"),
    ("false-success", "decode 0:2; remove 0 0 1", "remove was accepted - it must be refused"),
    ("bad-refusal", "decode 0:4; shift 0 2; remove 0 2 75", "remove was refused - it must be accepted"),
    ("partial-effect", "decode 0:1; save 0 a; damage a foreign; restore a 0", "before .* after the refusal"),
    ("crash", "share 0 1 0 2", "ended with -6"),
    ("crash", "cache n_ubatch=4 start=dirty; drop 0", "ended with -6"),
    ("crash", "cache n_ubatch=4; cancel 0:6 at=900", "ended with -6"),
]


@pytest.mark.parametrize(("kind", "text", "words"), FAULTS)
def test_a_script_shows_the_fault(kind: str, text: str, words: str, bench: Bench, tmp_path: Path) -> None:
    trial = bench.try_program(parse_program(f"model lfm2 seed=0; {text}"))
    assert trial.verdict.kind == kind
    script = write_script(tmp_path, trial, trial.verdict)
    assert not re.search(r"^\s*(import|from)\s+statedrift", script.read_text(), re.MULTILINE)
    ran = scripts.run_script(script)
    assert ran.returncode == 1, ran.stderr
    assert re.search(words, ran.stdout), ran.stdout
    assert "Traceback" not in ran.stderr


# --- the same calls give the same rows -------------------------------------------------------------------------------------------

ROWS = [
    ("the control", CONTROL),
    ("round-robin order", "model lfm2 seed=0; cache interleave=1; decode 0:5 1:7; decode 1:2 0:4 2:3"),
    ("hidden states", "model lfm2 seed=0; cache outputs=embeddings; decode 0:4; decode 0:3 1:2"),
    ("hidden states of one decode", "model mamba2 seed=1; decode 0:4; decode 1:3 0:2 outputs=embeddings"),
    ("last rows", "model lfm2 seed=0; cache outputs=last; decode 0:4 1:3; decode 1:2 0:3"),
    ("used memory", "model lfm2 seed=1; cache start=dirty n_seq_max=3; decode 0:4; decode 2:3"),
    ("another session", "model lfm2 seed=0; decode 0:6; save 0 a; reopen n_seq_max=2 start=dirty; restore a 1; decode 1:2/1"),
    ("tokens of two sequences", "model lfm2 seed=0; cache unified=1; decode 0+1:5; decode 1:2/1 0:3"),
    ("a shared pool", "model lfm2 seed=0; cache unified=1 n_ctx=100 n_seq_max=3; decode 0:9; share 0 2; decode 2:2/1"),
    ("small ubatches", "model lfm2 seed=0; cache n_ubatch=8; decode 0:20 1:5; decode 1:9 0:1"),
    ("explicit tokens", "model lfm2 seed=0; decode 0:[5,9,9]; decode 0:[1,0,63]"),
    ("a cancelled decode of another", "model lfm2 seed=0; decode 0:4; cancel 1:3 at=2; decode 0:2"),
    ("a refused foreign blob", "model lfm2 seed=0; decode 0:4 1:3; save 0 a; damage a truncate 9; restore a 3; decode 1:2"),
    ("a whole session", "model mamba2 seed=0; cache n_rs_seq=0; decode 0:4 1:3; save_all z; clear; restore_all z; decode 1:2 0:1"),
    ("a partial save", "model lfm2 seed=0; cache n_rs_seq=0; decode 0:6; save 0 a partial; decode 0:3; restore a 0; decode 0:2/1"),
    ("a save on the device", "model lfm2 seed=0; decode 0:6; save 0 a device; restore a 0; decode 0:2/1"),
    ("moved positions", "model lfm2 seed=0; decode 0:6; shift 0 9; decode 0:2"),
    ("changed dimensions", "model lfm2 seed=3 n_layer=5 l_cache=4; decode 0:6; decode 0:2"),
]


def printed_row(text: str, name: str) -> np.ndarray:
    match = re.search(rf"^{name} \[([^\]]*)\]", text, re.MULTILINE)
    assert match is not None, text
    return np.array(match[1].split(), dtype=np.float32)


def judged_row(trial: Trial) -> tuple[np.ndarray, Verdict]:
    """The newest judged row of the last operation, and a verdict that calls it wrong."""
    assert trial.run is not None
    last = len(trial.program.operations) - 1
    span = [span for span in trial.run.spans if span.operation_index == last][-1]
    data, width = trial.run.rows[last]
    row = np.frombuffer(data, np.float32).reshape(-1, width)[span.places[-1]]
    return row, Verdict("wrong-output", last, span.sequence, span.offset + span.indices[-1], "self", 1.0, trial.tolerance)


@pytest.mark.parametrize("text", [text for _, text in ROWS], ids=[name for name, _ in ROWS])
def test_a_script_gets_the_rows_that_the_target_got(text: str, bench: Bench, tmp_path: Path) -> None:
    trial = bench.try_program(parse_program(text))
    row, verdict = judged_row(trial)
    ran = scripts.run_script(write_script(tmp_path, trial, verdict))
    assert ran.returncode in (0, 1), ran.stderr
    assert np.abs(printed_row(ran.stdout, "given") - row[:8]).max() <= 2e-4
    assert ran.returncode == int(trial.verdict.kind == "wrong-output" and trial.verdict.operation_index == verdict.operation_index)


# --- exit statuses ---------------------------------------------------------------------------------------------------------------

NO_FAULT = [
    Verdict("wrong-output", 3, 0, 12, "self", 1.0, 1e-5, reason="logits off by 1"),
    Verdict("wrong-position", 2, 0, 11, "self", reason="after rollback sequence 0 ends at position 11"),
    Verdict("bad-refusal", 2, 0, None, "self", reason="rollback must be accepted but was refused"),
    Verdict("false-success", 2, 0, 13, "self", reason="rollback was accepted, but sequence 0 still ends at position 13"),
    Verdict("crash", 4, 0, None, "self", reason="the process died (SIGABRT): no message"),
    Verdict("hang", 4, 0, None, "self", reason="no answer within 30 s"),
]


@pytest.mark.parametrize("verdict", NO_FAULT, ids=lambda verdict: verdict.kind)
def test_a_script_of_a_program_that_is_right_exits_0(verdict: Verdict, bench: Bench, tmp_path: Path) -> None:
    trial = bench.try_program(parse_program(CONTROL))
    assert trial.verdict.kind == "ok"
    ran = scripts.run_script(write_script(tmp_path, trial, verdict))
    assert ran.returncode == 0, (ran.stdout, ran.stderr)


@pytest.mark.parametrize("verdict", [NO_FAULT[0], NO_FAULT[4]], ids=lambda verdict: verdict.kind)
@pytest.mark.parametrize("blocked", ["gguf", "llama_cpp", "numpy"])
def test_a_script_that_cannot_run_exits_2_and_says_why(verdict: Verdict, blocked: str, bench: Bench, tmp_path: Path) -> None:
    trial = bench.try_program(parse_program(CONTROL))
    ran = scripts.run_script(write_script(tmp_path, trial, verdict), (blocked,))
    assert ran.returncode == 2
    assert ran.stderr == f"could not run: there is no {blocked} here\n"


def test_a_model_that_the_library_does_not_load_exits_2(bench: Bench, tmp_path: Path) -> None:
    trial = bench.try_program(parse_program(CONTROL))
    for verdict in (NO_FAULT[0], NO_FAULT[4]):
        script = write_script(tmp_path, trial, verdict)
        script.write_text(script.read_text().replace("'general.architecture': 'lfm2'", "'general.architecture': 'none'"))
        ran = scripts.run_script(script)
        assert ran.returncode == 2, (ran.stdout, ran.stderr)
        assert "does not load the model" in ran.stderr


# --- how it reads ----------------------------------------------------------------------------------------------------------------


def test_a_script_begins_with_what_is_wrong_and_the_calls(bench: Bench, tmp_path: Path) -> None:
    trial = bench.try_program(parse_program("model lfm2 seed=0; decode 0:2; remove 0 0 1"))
    text = write_script(tmp_path, trial, trial.verdict).read_text()
    tree = ast.parse(text)
    document = ast.get_docstring(tree) or ""
    assert trial.verdict.reason in document
    assert "    decode 0:2\n    remove 0 0 1\n" in document
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert functions == ["main", "write_model", "load_model", "open_context", "decode"]
    assert "accepted = llama.llama_memory_seq_rm(memory, 0, 0, 1)  # remove 0 0 1\n" in text


def test_a_script_of_a_build_of_its_own_says_how_it_is_run_there(bench: Bench) -> None:
    trial = bench.try_program(parse_program("model lfm2 seed=0; decode 0:1"))
    hints = {}
    for version in ("llama.cpp 7.0 (library 1f9a03c2)", "llama-cpp-python 0.3.36 (llama.cpp 0.5.0-dev, library 1f9a03c2)"):
        finding = msgspec.structs.replace(
            finding_of(trial, Verdict("wrong-output", 0, sequence=0, position=0, error=1.0, tolerance=0.1)), version=version
        )
        hints[version[:9]] = "LLAMA_CPP_LIB_PATH" in reproduction_script(finding, trial)
    assert hints == {"llama.cpp": True, "llama-cpp": False}


def test_text_of_the_engine_cannot_end_the_head_of_a_script(bench: Bench, tmp_path: Path) -> None:
    trial = bench.try_program(parse_program("model lfm2 seed=0; share 0 1 0 2"))
    verdict = Verdict("crash", 0, 0, None, "self", reason='the process died: """\nimport os \\n \\x')
    ran = scripts.run_script(write_script(tmp_path, trial, verdict))
    assert ran.returncode == 1, ran.stderr


def test_the_script_of_another_target_replays_it(bench: Bench) -> None:
    trial = bench.try_program(parse_program(CONTROL))
    text = reproduction_script(finding_of(trial, NO_FAULT[0], "somebody.cache:TARGET"), trial)
    ast.parse(text)
    assert '"replay", PROGRAM, "--target", "somebody.cache:TARGET"' in text
