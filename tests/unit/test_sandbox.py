"""The child process of a native target: whatever a program does to it costs that program only."""

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).parent.parent
FOLDERS = [str(TESTS), str(TESTS / "fixtures")]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

import fake_engine as fake  # noqa: E402
from statedrift.fuzz import engine_child  # noqa: E402
from statedrift.fuzz.engine_child import Failed  # noqa: E402
from statedrift.fuzz.execution import Run  # noqa: E402
from statedrift.fuzz.sandbox import Death, Sandbox  # noqa: E402
from statedrift.fuzz.trial import Bench  # noqa: E402
from statedrift.fuzz.workers import ReductionTask, reduce_task  # noqa: E402
from statedrift.spec.errors import UnavailableError, UsageError  # noqa: E402
from statedrift.spec.models import Model  # noqa: E402
from statedrift.spec.programs import Program, parse_program  # noqa: E402
from statedrift.store.campaigns import Noise  # noqa: E402

TARGET = "fake_engine:TARGET"
HANG_SECONDS = 1.0


def deed(token: int) -> Program:
    """A program whose operation number 1 does what `token` stands for."""
    return parse_program(f"model lfm2 seed=0; decode 0:[{fake.GOOD}]; decode 0:[{token}]; drop 0")


def opening(seed: int) -> Program:
    return parse_program(f"model lfm2 seed={seed}; drop 0")


GOOD = deed(fake.GOOD)


def is_alive(process: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_end(processes: tuple[int, ...], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, processes))


def death_of(result: object) -> Death:
    assert isinstance(result, Death), result
    return result


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(TARGET, HANG_SECONDS)
    yield sandbox
    sandbox.close()


def test_the_child_says_which_version_it_drives(sandbox: Sandbox) -> None:
    assert sandbox.version == "fake 1"
    assert sandbox.description == "plain lists, in this process"


def test_programs_are_answered_in_their_order(sandbox: Sandbox) -> None:
    runs = sandbox.run([GOOD, parse_program("model lfm2 seed=0; drop 0"), GOOD])
    assert [len(run.steps) for run in runs if isinstance(run, Run)] == [3, 1, 3]
    assert sandbox.run([]) == []


DEATHS = [
    (fake.ABORT, "crash", "the process died (SIGABRT)"),
    (fake.SEGFAULT, "crash", "the process died (SIGSEGV)"),
    (fake.EXIT_134, "crash", "the process died (exit code 134)"),
    (fake.EXIT_0, "crash", "the process died (exit code 0)"),
    (fake.SYSTEM_EXIT, "crash", "the process died (exit code 7)"),
    (fake.ASSERTION, "crash", "the process died (SIGABRT): cache.cpp:12: ASSERT(cells > 0) failed"),
    (fake.HANG, "hang", "no answer within 1 s"),
]


@pytest.mark.parametrize(("token", "kind", "reason"), DEATHS)
def test_a_death_in_the_middle_of_a_batch_is_a_verdict_and_costs_nobody_else(sandbox: Sandbox, token: int, kind: str, reason: str) -> None:
    before, death, after = sandbox.run([GOOD, deed(token), GOOD])
    assert isinstance(before, Run)
    assert isinstance(after, Run)
    assert len(after.steps) == 3
    verdict = death_of(death).verdict
    assert (verdict.kind, verdict.operation_index, verdict.sequence, verdict.relation) == (kind, 1, 0, "self")
    assert verdict.reason.startswith(reason)


def test_every_program_of_a_batch_may_die(sandbox: Sandbox) -> None:
    results = sandbox.run([deed(fake.ABORT), deed(fake.SEGFAULT), deed(fake.EXIT_134)])
    assert [death_of(result).verdict.kind for result in results] == ["crash"] * 3


def test_the_last_words_are_those_of_the_program_that_died(sandbox: Sandbox) -> None:
    _, death = sandbox.run([deed(fake.ASSERTION), deed(fake.SEGFAULT)])
    assert "ASSERT" not in " ".join(death_of(death).log)
    assert "Segmentation fault" in death_of(death).verdict.reason
    _, death = sandbox.run([deed(fake.WARNING), deed(fake.ABORT)])
    assert "warning" not in " ".join(death_of(death).log)


def test_the_log_of_a_death_has_the_engines_words_before_the_interpreters(sandbox: Sandbox) -> None:
    (death,) = sandbox.run([deed(fake.ASSERTION)])
    assert death_of(death).log[:2] == ("a warning that means nothing", "cache.cpp:12: ASSERT(cells > 0) failed")


def test_what_the_engine_prints_is_no_answer(sandbox: Sandbox) -> None:
    before, talker, after = sandbox.run([GOOD, deed(fake.GARBAGE), GOOD])
    assert [len(run.steps) for run in (before, talker, after) if isinstance(run, Run)] == [3, 3, 3]


@pytest.mark.parametrize(("seed", "kind"), [(1, "crash"), (4, "hang")])
def test_a_death_while_opening_has_no_operation(sandbox: Sandbox, seed: int, kind: str) -> None:
    death, after = sandbox.run([opening(seed), GOOD])
    assert (death_of(death).verdict.kind, death_of(death).verdict.operation_index) == (kind, None)
    assert isinstance(after, Run)


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        (opening(2), "usage", "no such model"),
        (opening(3), "unavailable", "no memory for this model"),
        (deed(fake.USAGE), "usage", "this cannot be asked of me"),
        (deed(fake.UNAVAILABLE), "unavailable", "not here"),
    ],
)
def test_a_program_that_the_target_does_not_take_is_said_and_the_next_one_runs(
    sandbox: Sandbox, program: Program, kind: str, message: str
) -> None:
    failed, after = sandbox.run([program, GOOD])
    assert failed == Failed(kind, message)  # type: ignore[arg-type]
    assert isinstance(after, Run)


def test_an_exception_of_the_target_is_its_answer(sandbox: Sandbox) -> None:
    (run,) = sandbox.run([deed(fake.BUG)])
    assert isinstance(run, Run)
    assert run.steps[1].outcome.word == "error"


def dying(seed: int, token: int = fake.ABORT) -> Program:
    return parse_program(f"model lfm2 seed={seed}; decode 0:[{token}]")


@pytest.mark.parametrize(
    ("programs", "loaded"),
    [
        ([dying(5)], [5]),
        ([dying(5), dying(6), dying(5, fake.SEGFAULT), dying(7, fake.HANG)], [5, 6, 5, 7]),
        ([opening(5), dying(6)], [6]),
        ([dying(5), opening(1)], [5]),  # it died while opening: of loading, perhaps
        ([opening(1)], []),
        ([dying(fake.CANNOT_LOAD), dying(5)], [5]),
        ([opening(5)], []),
    ],
)
def test_the_workers_after_a_death_find_the_model_loaded(programs: list[Program], loaded: list[int]) -> None:
    sandbox = Sandbox("fake_engine:LOADING", HANG_SECONDS)
    *_, said = sandbox.run([*programs, opening(fake.ASKS)])
    assert said == Failed("usage", f"loaded: {loaded}")
    sandbox.close()


def test_a_model_that_is_too_long_to_note_takes_the_place_of_the_one_before() -> None:
    model = dying(0).model
    with mmap.mmap(-1, engine_child.PLACE_BYTES) as place:
        engine_child._note_model(place, model)
        assert engine_child._noted_model(place) == model
        engine_child._note_model(place, Model("lfm2", 0, tuple((f"dimension_{number}", number) for number in range(400))))
        assert engine_child._noted_model(place) is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_from_outside_is_no_finding(number: signal.Signals) -> None:
    sandbox = Sandbox(TARGET, 60.0)
    timer = threading.Timer(0.3, lambda: os.kill(sandbox.processes[1], number))
    timer.start()
    death, after = sandbox.run([deed(fake.HANG), GOOD])
    assert (death_of(death).verdict.kind, death_of(death).verdict.operation_index) == ("unknown", 1)
    assert isinstance(after, Run)
    sandbox.close()


@pytest.mark.parametrize("pause", [0.0, 0.003, 0.2])
def test_a_worker_that_is_killed_between_two_batches_shifts_no_answer(pause: float) -> None:
    sandbox = Sandbox(TARGET, HANG_SECONDS)
    sandbox.run([GOOD])
    os.kill(sandbox.processes[1], signal.SIGKILL)
    time.sleep(pause)
    programs = [parse_program("model lfm2 seed=0; " + "; ".join(["drop 0"] * count)) for count in (1, 2, 3)]
    assert [len(run.steps) for run in sandbox.run(programs) if isinstance(run, Run)] == [1, 2, 3]
    assert [len(run.steps) for run in sandbox.run(programs[::-1]) if isinstance(run, Run)] == [3, 2, 1]
    sandbox.close()


def test_a_child_process_that_is_replaced_leaves_the_folder_to_the_next() -> None:
    sandbox = Sandbox(TARGET, HANG_SECONDS)
    stdin = sandbox._process.stdin
    assert stdin is not None

    def close() -> None:
        stdin.close()
        time.sleep(0.5)  # time for a child to see it, and to clear up as after a parent that is gone

    sandbox._process.stdin = SimpleNamespace(close=close)  # type: ignore[assignment]
    sandbox._end(0)
    assert (sandbox._in_flight.parent / "place").is_file()
    sandbox._restart()
    assert isinstance(sandbox.run([GOOD])[0], Run)
    sandbox.close()


def test_a_child_process_that_is_killed_is_replaced() -> None:
    sandbox = Sandbox(TARGET, 60.0)
    first = sandbox.processes
    timer = threading.Timer(0.3, lambda: os.kill(first[0], signal.SIGKILL))
    timer.start()
    death, after = sandbox.run([deed(fake.HANG), GOOD])
    assert death_of(death).verdict.kind == "unknown"
    assert isinstance(after, Run)
    assert sandbox.processes != first
    assert all_end(first, 3.0)
    sandbox.close()


def test_a_child_process_that_died_in_the_meantime_is_replaced() -> None:
    sandbox = Sandbox(TARGET, HANG_SECONDS)
    for process in sandbox.processes:
        os.kill(process, signal.SIGKILL)
    time.sleep(0.2)
    lost, after = sandbox.run([GOOD, GOOD])
    assert death_of(lost).verdict.kind == "unknown"
    assert isinstance(after, Run)
    sandbox.close()


@pytest.mark.parametrize("token", [fake.GOOD, fake.HANG])
def test_nothing_is_left_when_the_parent_is_killed(token: int) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(FOLDERS)}
    program = f"model lfm2 seed=0; decode 0:[{token}]"
    holder = subprocess.Popen([sys.executable, TESTS / "fixtures" / "holder.py", program], stdout=subprocess.PIPE, env=environment)
    assert holder.stdout is not None
    processes = tuple(map(int, holder.stdout.readline().split()))
    time.sleep(0.2)
    assert all(map(is_alive, processes))
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert all_end(processes, 5.0)


@pytest.mark.parametrize("token", [fake.GOOD, fake.ABORT, fake.HANG])
def test_closing_leaves_nothing_and_may_be_repeated(token: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    descriptors = len(os.listdir("/proc/self/fd"))
    sandbox = Sandbox(TARGET, HANG_SECONDS)
    processes = sandbox.processes
    sandbox.run([deed(token)])
    processes += sandbox.processes
    sandbox.close()
    sandbox.close()
    assert all_end(processes, 0.0)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_closing_ends_a_worker_that_hangs(tmp_path: Path) -> None:
    sandbox = Sandbox(TARGET, 60.0)
    processes = sandbox.processes

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        sandbox.run([deed(fake.HANG)])
    signal.signal(signal.SIGALRM, before)
    sandbox.close()
    assert all_end(processes, 1.0)


def test_the_log_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("statedrift.fuzz.sandbox.LOG_BYTES_MAX", 1 << 20)
    sandbox = Sandbox(TARGET, HANG_SECONDS)
    (log,) = tmp_path.glob("statedrift-*/log")
    sandbox.run([deed(fake.WARNING)] * 200)
    assert log.stat().st_size < 100
    (death,) = sandbox.run([deed(fake.TALK)])
    assert death_of(death).verdict.kind == "hang"
    assert death_of(death).log[-1] == "again and again"
    sandbox.run([GOOD])
    assert log.stat().st_size < 100
    sandbox.close()


@pytest.mark.parametrize(
    ("attribute", "error", "message"),
    [
        ("NOT_INSTALLED", UnavailableError, r"^the fake library is not installed\. pip install fake$"),
        ("DIES_AT_START", UnavailableError, "child process did not start: cannot load libfake.so"),
        ("BROKEN_AT_START", UnavailableError, "^target fake_engine:BROKEN_AT_START is not available: ValueError: version 0 of the fake"),
        ("NOWHERE", UsageError, "has no `NOWHERE`"),
    ],
)
def test_a_child_that_cannot_start_says_why_and_leaves_nothing(
    attribute: str, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(error, match=message):
        Sandbox(f"fake_engine:{attribute}")
    assert list(tmp_path.iterdir()) == []


def test_a_worker_can_be_renewed_and_has_run_nothing() -> None:
    sandbox = Sandbox(TARGET, HANG_SECONDS)
    sandbox.run([GOOD])
    child, worker = sandbox.processes
    sandbox.renew_worker()
    assert sandbox.processes[0] == child
    assert sandbox.processes[1] != worker
    (run,) = sandbox.run([GOOD])
    assert isinstance(run, Run)
    os.kill(child, signal.SIGKILL)  # a child that is gone is replaced with its worker
    sandbox.renew_worker()
    assert sandbox.processes[0] != child
    (run,) = sandbox.run([GOOD])
    assert isinstance(run, Run)
    sandbox.close()


def test_what_hangs_on_an_earlier_program_is_not_reproduced() -> None:
    """Who replays a finding does it in a process of its own."""
    with Bench("fake_engine:WORN") as bench:
        bench.set_noise({Model("lfm2"): Noise(0.0, 1e-4, 0)})
        first, second = bench.try_programs([opening(0), opening(0)])
        assert (first.verdict.kind, second.verdict.kind) == ("ok", "crash")
        assert reduce_task(bench, ReductionTask(second, frozenset(), ("lfm2",), None)).reproduced == 0


@pytest.mark.parametrize(
    ("attribute", "kind", "reason"),
    [
        ("CLEAR_EXITS", "crash", "the engine would have died (abort): sys.exit(0)"),
        ("CLEAR_IS_SKIPPED", "bad-refusal", "the answer must be accepted, refused, cancelled or error, not skipped"),
    ],
)
def test_a_target_in_this_process_that_exits_or_says_what_it_must_not_is_judged(attribute: str, kind: str, reason: str) -> None:
    with Bench(f"faulty:{attribute}") as bench:
        bench.set_noise({Model("lfm2"): Noise(0.0, 1e-4, 0)})
        verdict = bench.try_program(parse_program("model lfm2 seed=0; decode 0:1; clear; decode 0:1")).verdict
    assert (verdict.kind, verdict.operation_index) == (kind, 1)
    assert reason in verdict.reason


def test_a_child_that_dies_of_loading_the_model_again_is_replaced() -> None:
    """The crash that was found is the answer; what the nursery does afterwards costs nobody an answer."""
    sandbox = Sandbox("fake_engine:LOADING_DIES", HANG_SECONDS)
    death, after = sandbox.run([deed(fake.ASSERTION), GOOD])
    assert death_of(death).verdict.kind == "crash"
    assert "ASSERT(cells > 0) failed" in death_of(death).verdict.reason
    assert isinstance(after, Run)
    sandbox.close()


def test_a_child_that_is_lost_while_it_starts_is_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox(TARGET, HANG_SECONDS)
    start, lost = Sandbox._start, []

    def lost_once(self: Sandbox) -> None:
        start(self)
        if not lost:
            lost.append(True)
            os.kill(self.processes[0], signal.SIGKILL)
            raise UnavailableError("the target's child process did not start")

    monkeypatch.setattr(Sandbox, "_start", lost_once)
    os.killpg(sandbox.processes[0], signal.SIGKILL)
    results = sandbox.run([GOOD, GOOD])
    assert lost
    assert isinstance(results[-1], Run)
    sandbox.close()
