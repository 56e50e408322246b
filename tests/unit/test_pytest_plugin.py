"""The pytest plugin, as somebody uses it: a test file, a run of pytest, and what it prints.

Rules
- Runs are real ones: in this process where nothing dies, else in one of their own.
- Of our own caches one family is enough here; that every row's test can fail is in test_conformance_suite.py.
Source: docs/pytest.md.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from statedrift.fuzz import canary, conformance, mutants  # noqa: F401
from statedrift.fuzz.trial import check
from statedrift.spec.programs import parse_program

pytest_plugins = ["pytester"]
CACHE_HOME = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "my_cache" / "test_my_cache.py"
OWN = """
    import pytest
    import statedrift
    from statedrift.targets.numba import RING, TARGET

    class TestOwn(statedrift.ConformanceSuite):
        families = ("mamba2",)
        target = "numba"
"""
SHARE = "test_a_share_makes_an_independent_copy"


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    """A run in this process forgets the modules that it loaded, and neither NumPy nor Numba can be loaded twice: they are loaded before."""
    for target in ("numba", "numba-ring"):
        assert check(parse_program("model mamba2; decode 0:2; rollback 0 1; share 0 1; save 0 a; decode 0:1 1:1"), target).kind == "ok"


@pytest.fixture(autouse=True)
def _remembered_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pytester` gives every test a home of its own; what was measured of our own caches is in the old one."""
    monkeypatch.setenv("XDG_CACHE_HOME", CACHE_HOME)


def run(pytester: pytest.Pytester, text: str, *words: str, name: str = "test_cache") -> pytest.RunResult:
    """A run of a file in this process, without a fuzz test unless it is asked for."""
    pytester.makepyfile(**{name: dedent(text)})
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--statedrift-seconds=0", *words)


def said(result: pytest.RunResult) -> str:
    return "\n".join([*result.outlines, *result.errlines])


def command(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=600)


# --- cost --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statement", ["import statedrift.cli.pytest_plugin", "import statedrift; statedrift.ConformanceSuite"])
def test_a_run_without_a_suite_pays_nothing(statement: str) -> None:
    heavy = ("torch", "numba", "hypothesis", "numpy", "pandas", "rich", "typer", "msgspec")
    code = f"import pytest, sys; before = set(sys.modules); {statement}; print([name for name in {heavy!r} if name in set(sys.modules) - before])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_plugin_is_there_without_being_asked_for() -> None:
    from importlib.metadata import entry_points

    (entry,) = (entry for entry in entry_points(group="pytest11") if entry.name == "statedrift")
    assert entry.value == "statedrift.cli.pytest_plugin"


# --- the example -------------------------------------------------------------------------------------------------------------------


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60


def test_the_page_shows_the_example_as_it_is() -> None:
    assert f"```python\n{EXAMPLE.read_text()}```" in (ROOT / "docs" / "pytest.md").read_text()


def test_the_example_passes(tmp_path: Path) -> None:
    (tmp_path / EXAMPLE.name).write_text(EXAMPLE.read_text())
    ended = command(["-m", "pytest", "-q", "-p", "no:cacheprovider", "--statedrift-seconds=1"], tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert re.search(r"TestMyCache::test_fuzz: no divergence in \d+ programs", ended.stdout)
    assert "not offered: cancel" in ended.stdout.replace("\n  ", " ")
    assert not (tmp_path / "runs").exists()


def test_a_mistake_planted_in_the_example_is_shown_as_the_smallest_program(tmp_path: Path) -> None:
    right = EXAMPLE.read_text()
    wrong = right.replace("for kept in (self.lengths, self.windows, self.states):", "for kept in (self.lengths, self.windows):")
    assert wrong != right
    folder = tmp_path / "tests of mine"
    folder.mkdir()
    (folder / EXAMPLE.name).write_text(wrong)
    ended = command(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", f"{SHARE} or appends", str(folder)], tmp_path)
    assert ended.returncode == 1
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout
    program = "model mamba seed=0; decode 0:1; share 0 1; decode 1:1"
    shown = dedent(r"""
        wrong-output · MyCache in development · mamba
            model mamba seed=0
            1  decode 0:1  accepted
            2  share 0 1   accepted  position 0
          > 3  decode 1:1  logits off by (\S+) \(tolerance (\S+)\)  sequence 1, position 1
          replay   PYTHONPATH='tests of mine' statedrift replay '([^']+)' --target test_my_cache:MyCache
          script   (runs/pytest/wrong-output-\w+/repro.py)
        """)  # fmt: skip
    found = re.search(shown, ended.stdout)
    assert found is not None, ended.stdout
    assert found[3] == program
    assert "Traceback" not in ended.stdout
    assert "conformance" not in ended.stdout
    script = (tmp_path / found[4]).read_text()
    assert f"FOLDER = {str(tmp_path)!r}" in script
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text(script.replace(f"FOLDER = {str(tmp_path)!r}", "FOLDER = '/no/such/folder'"))
    moved = subprocess.run([sys.executable, elsewhere], capture_output=True, text=True)
    assert (moved.returncode, moved.stderr.count("\n"), "/no/such/folder is not here" in moved.stderr) == (2, 1, True)
    assert f"COMMAND = {['statedrift', 'replay', program, '--target', 'test_my_cache:MyCache', '--undocumented']!r}" in script
    assert "'tests of mine'" in script


# --- how it is collected and chosen ---------------------------------------------------------------------------------------------------


def test_rows_are_tests_with_names_and_nothing_runs_when_they_are_collected(pytester: pytest.Pytester) -> None:
    text = """
        import statedrift

        def opened(model, configuration):
            raise AssertionError("opened")

        class TestOne(statedrift.ConformanceSuite):
            target = opened
            families = ("lfm2", "rwkv7")
            caches = ("", "n_rs_seq=0 n_ubatch=8")
    """
    result = run(pytester, text, "--collect-only", "-q", "-k", "refused_rollback")
    result.stdout.fnmatch_lines([
        "test_cache.py::TestOne::test_a_refused_rollback_changes_nothing[[]lfm2]",
        "test_cache.py::TestOne::test_a_refused_rollback_changes_nothing[[]lfm2-n_rs_seq=0,n_ubatch=8]",
        "test_cache.py::TestOne::test_a_refused_rollback_changes_nothing[[]rwkv7]",
        "test_cache.py::TestOne::test_a_refused_rollback_changes_nothing[[]rwkv7-n_rs_seq=0,n_ubatch=8]",
    ])  # fmt: skip


def test_the_suite_itself_is_not_collected(pytester: pytest.Pytester) -> None:
    result = run(pytester, "from statedrift import ConformanceSuite\n\ndef test_one(): pass\n")
    result.assert_outcomes(passed=1)


def test_several_suites_and_a_parametrized_fixture_in_one_file(pytester: pytest.Pytester) -> None:
    text = (
        OWN
        + """
    class TestBoth(statedrift.ConformanceSuite):
        families = ("mamba2",)

        @pytest.fixture(params=[TARGET, RING], ids=["planes", "ring"])
        def target(self, request):
            return request.param

    class TestOpened(statedrift.ConformanceSuite):
        families = ("mamba2",)

        @pytest.fixture
        def target(self):
            return lambda model, configuration: TARGET.open(model, configuration)
    """
    )
    result = run(pytester, text, "-v", "-k", f"{SHARE} or test_a_promised_rollback")
    result.assert_outcomes(passed=8)
    assert {"mamba2-planes", "mamba2-ring"} <= set(re.findall(r"\[([\w-]+)\] PASSED", said(result)))


def test_it_runs_on_several_processes_and_their_campaigns_are_summed_up(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(dedent(OWN))
    words = ("-p", "no:cacheprovider", "-n2", "--statedrift-seconds=0.2", "-k", "test_fuzz or test_a_clear")
    result = pytester.runpytest_subprocess(*words)
    result.assert_outcomes(passed=2)
    assert re.search(r"TestOwn::test_fuzz: no divergence in \d+ programs, .* accepted", said(result).replace("\n  ", " "))


def test_the_fuzz_test_can_be_left_out_and_has_a_seed(pytester: pytest.Pytester) -> None:
    result = run(pytester, OWN, "-rs", "-k", "test_fuzz")
    result.assert_outcomes(skipped=1)
    assert "left out (--statedrift-seconds 0)" in said(result)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--statedrift-seconds=0.1", "--statedrift-seed=7", "-k", "test_fuzz")
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("word", ["-1", "nan", "much"])
def test_a_bad_number_of_seconds_is_a_usage_error(pytester: pytest.Pytester, word: str) -> None:
    result = pytester.runpytest_inprocess(f"--statedrift-seconds={word}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"must be a number of seconds, 0 or more, not {word}" in said(result)


# --- what goes wrong ------------------------------------------------------------------------------------------------------------------


def test_an_operation_that_was_never_accepted_is_named(pytester: pytest.Pytester) -> None:
    text = """
        import msgspec
        import statedrift
        from statedrift.spec.verdicts import refused
        from statedrift.targets.numba import TARGET

        def opened(model, configuration):
            session = TARGET.open(model, configuration)
            session.shift = lambda sequence, delta: refused("never")
            return session

        class TestNever(statedrift.ConformanceSuite):
            families = ("mamba2",)
            target = opened
    """
    result = run(pytester, text, "--statedrift-seconds=1", "-k", "test_fuzz")
    result.assert_outcomes(passed=1)
    assert "never accepted: shift; not offered: cancel" in said(result).replace("\n  ", " ")


def test_a_cache_that_refuses_everything_does_not_pass(pytester: pytest.Pytester) -> None:
    text = """
        import statedrift
        from statedrift.spec.target import Decoded
        from statedrift.spec.verdicts import refused

        class Refuser(statedrift.PlainSession):
            families = ("mamba2",)
            def decode(self, batch): return Decoded(refused("no"))
            def length(self, sequence): return 0
            def drop(self, sequence): pass
            def copy(self, source, destination): pass

        class TestRefuser(statedrift.ConformanceSuite):
            target = Refuser
    """
    result = run(pytester, text, "-k", "test_a_share_makes or test_keep or test_a_refused_rollback or test_fuzz")
    result.assert_outcomes(errors=3, failed=1)
    assert "could not test" in said(result)
    assert "a plain decoding of one sequence failed" in said(result)


def test_a_constructor_that_raises_is_said_with_the_place_in_the_target(pytester: pytest.Pytester) -> None:
    text = """
        import statedrift

        class Broken(statedrift.PlainSession):
            families = ("mamba2",)
            def __init__(self, model, configuration):
                super().__init__(model, configuration)
                self.table = {}["weights"]

        class TestBroken(statedrift.ConformanceSuite):
            target = Broken
    """
    result = run(pytester, text, "-k", SHARE)
    result.assert_outcomes(errors=1)
    text = said(result)
    assert "could not test: Broken cannot be opened with mamba2: KeyError: 'weights'" in text
    assert re.search(r"test_cache\.py:\d+: __init__: self\.table = \{\}\[\"weights\"\]", text)
    assert "conformance.py" not in text
    assert "Traceback" not in text


def test_a_suite_without_a_target_is_said(pytester: pytest.Pytester) -> None:
    result = run(pytester, "import statedrift\n\nclass TestNone(statedrift.ConformanceSuite):\n    pass\n", "-k", SHARE)
    result.assert_outcomes(errors=2)
    assert "TestNone does not say what it tests: give it `target = MyCache`" in said(result)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('families = ("mamba3",)', "unknown family `mamba3`"),
        ('caches = ("n_rs_sex=1",)', "n_rs_sex"),
        ('target = "nowhere:TARGET"', "there is no module `nowhere` here"),
        ('target = "statedrift.fuzz.mutants:FAULTY.share_forgets_attention"', "does not run family mamba2; it runs lfm2. Set `families`"),
    ],
)
def test_what_the_class_says_wrongly_is_said(pytester: pytest.Pytester, line: str, message: str) -> None:
    result = run(pytester, OWN + f"        {line}\n", "-k", SHARE)
    result.assert_outcomes(errors=1)
    assert message in said(result)
    assert "Traceback" not in said(result)


@pytest.mark.parametrize("line", ["families = ()", 'families = "mamba"', "caches = ()"])
def test_a_suite_that_would_test_nothing_is_an_error(pytester: pytest.Pytester, line: str) -> None:
    result = run(pytester, OWN + f"        {line}\n", "-k", SHARE)
    result.assert_outcomes(errors=1)
    assert "are tuples that are not empty" in said(result)


LEAVING = """
    import statedrift

    class Leaving(statedrift.PlainSession):
        def __init__(self, model, configuration):
            raise SystemExit(3)

    class TestLeaving(statedrift.ConformanceSuite):
        families = ("mamba2",)
        target = Leaving
"""


def test_a_constructor_that_leaves_is_one_that_cannot_be_opened(pytester: pytest.Pytester) -> None:
    result = run(pytester, LEAVING, "-k", SHARE)
    assert "Leaving cannot be opened with mamba2: SystemExit: 3" in said(result)
    assert "Traceback" not in said(result)


DYING = """
    import os
    import time
    import statedrift
    from statedrift.targets.numba import TARGET

    class Native(statedrift.PlainSession):
        isolated = True
        families = ("mamba2",)

        def __new__(cls, model, configuration):
            session = TARGET.open(model, configuration)
            session.share = lambda *arguments: {deed}
            return session

    class TestNative(statedrift.ConformanceSuite):
        target = Native
        program_seconds = 5.0
"""


@pytest.mark.parametrize(("deed", "kind", "shown"), [("os.abort()", "crash", "died"), ("time.sleep(600)", "hang", "no answer")])
def test_a_target_that_dies_or_hangs_in_its_child_process_fails_its_row_alone(
    pytester: pytest.Pytester, deed: str, kind: str, shown: str
) -> None:
    pytester.makepyfile(test_native=dedent(DYING.format(deed=deed)))
    names = "test_a_share_of_a_pending_rollback or test_a_decode_appends or test_a_clear"
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--statedrift-seconds=0", "-k", names)
    result.assert_outcomes(passed=2, failed=1)
    text = said(result)
    assert f"{kind} · test_native:Native" in text
    assert shown in text
    assert re.search(r"  > \d+  share 0 \d", text)  # how far it is reduced is a matter of time
    assert re.search(r"replay   statedrift replay '.*share 0 \d' --target test_native:Native", text)


def test_a_target_without_a_name_is_tried_again_through_pytest(pytester: pytest.Pytester) -> None:
    text = """
        import pytest
        import statedrift
        from statedrift.fuzz.mutants import MUTANTS, MutantTarget

        class TestNameless(statedrift.ConformanceSuite):
            families = ("mamba2",)

            @pytest.fixture
            def target(self):
                return MutantTarget(MUTANTS["keep_spares_the_next_sequence"])
    """
    result = run(pytester, text, "-k", "test_keep_empties")
    result.assert_outcomes(failed=1)
    found = re.search(r"replay   pytest '?(\S+?)'? --statedrift-program '([^']+)'", said(result))
    assert found is not None, said(result)
    assert found[1] == "test_cache.py::TestNameless::test_keep_empties_every_other_sequence[mamba2]"
    assert re.search(r"script   runs/pytest/false-success-\w+/repro.py", said(result))
    again = pytester.runpytest_inprocess("-p", "no:cacheprovider", found[1], "--statedrift-program", found[2])
    again.assert_outcomes(failed=1)
    right = pytester.runpytest_inprocess("-p", "no:cacheprovider", found[1], "--statedrift-program", "model mamba2; decode 0:1")
    right.assert_outcomes(passed=1)


def test_findings_go_where_they_are_asked_to_and_a_folder_that_cannot_be_made_is_said(pytester: pytest.Pytester) -> None:
    text = """
        import statedrift

        class TestWrong(statedrift.ConformanceSuite):
            families = ("mamba2",)
            target = "statedrift.fuzz.mutants:FAULTY.keep_spares_the_next_sequence"
    """
    result = run(pytester, text, "-k", "test_keep_empties", "--statedrift-out=kept")
    result.assert_outcomes(failed=1)
    (script,) = (pytester.path / "kept").glob("false-success-*/repro.py")
    assert script.with_name("program.drift").is_file()
    assert command([str(script)], pytester.path).returncode == 1
    (pytester.path / "file").write_text("")
    result = run(pytester, text, "-k", "test_keep_empties", "--statedrift-out=file")
    result.assert_outcomes(failed=1)
    assert "script   not written: " in said(result)


def test_a_campaign_that_finds_something_shows_it_and_what_was_accepted(pytester: pytest.Pytester) -> None:
    text = """
        import statedrift

        class TestWrong(statedrift.ConformanceSuite):
            families = ("mamba2",)
            target = "statedrift.fuzz.canary:FREQUENT"
    """
    result = run(pytester, text, "-k", "test_fuzz", "--statedrift-seconds=2")
    result.assert_outcomes(failed=1)
    text = said(result).replace("\n    ", " ")
    assert re.search(r"1 wrong-output · statedrift\.fuzz\.canary:FREQUENT .* · mamba2 · found after", text)
    assert re.search(r"replay   statedrift replay 'model mamba2.*' --target statedrift\.fuzz\.canary:FREQUENT", text)
    assert re.search(r"\d+ divergences? in \d[\d,]* programs?\n\d+ % of [\d,]+ operations accepted", text)
    assert "Traceback" not in text
