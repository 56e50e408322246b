"""HypoFuzz, for comparison: the state machine of the naive way, its examples bred by coverage instead of drawn afresh.

Rules
- The machine, its sizes and its settings are those of fuzz/naive_baseline.py; only who chooses the examples is another.
- HypoFuzz as it comes: its own coverage (all Python lines of the target and of the recompute; sys.monitoring from Python 3.12 on, else the
  slower sys.settrace), its corpus, its mutators. Its database is in memory; no dashboard, no other process, no file.
- An example is run as `FuzzTarget.run_one` does it, up to the first that fails: what HypoFuzz does then, shrinking, is not in the time.
- Its two sources of chance are seeded. It also looks at the clock (when to run an example again), so that a seed repeats it nearly, not always.
- HypoFuzz is imported only when it is run; it comes with `pip install 'statedrift[bench]'`.
Source: HypoFuzz 25.11.1, hypofuzz/hypofuzz.py (FuzzTarget), hypofuzz/provider.py (HypofuzzProvider), hypofuzz/coverage.py.
"""

import contextlib
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

from ..oracle.recompute import use_one_thread
from ..spec.errors import UnavailableError
from ..spec.models import Model
from ..spec.target import Target
from .naive_baseline import SEARCH_EXAMPLES, Mix, SearchLimit, nothing_left_behind, quick_settings, state_machine

MISSING = "HypoFuzz is not installed and was left out: pip install 'statedrift[bench]'"


def is_installed() -> bool:
    """Whether HypoFuzz can be run here."""
    return find_spec("hypofuzz") is not None


def search_by_coverage(target: Target, model: Model, tolerance: float, seed: int, limit_seconds: float) -> tuple[bool, float, int]:
    """Run the state machine on a target until it fails; whether it did, CPU seconds, and examples until then.

    The end is looked for between examples, also by the clock (`WALL_FACTOR_MAX`). Raises ImportError where HypoFuzz is not installed,
    UnavailableError when HypoFuzz itself fails.
    """
    use_one_thread()
    with nothing_left_behind(), _observability_restored():
        _search(target, model, tolerance, seed, 0.0)  # one example: what happens once in a process is not in the time
        return _search(target, model, tolerance, seed, limit_seconds)


def _search(target: Target, model: Model, tolerance: float, seed: int, limit_seconds: float) -> tuple[bool, float, int]:
    """At least one example."""
    from hypofuzz.database import HypofuzzDatabase
    from hypofuzz.hypofuzz import FailedFatally, FuzzTarget
    from hypothesis.database import InMemoryExampleDatabase
    from hypothesis.stateful import get_state_machine_test

    mix = Mix()
    limit = SearchLimit(limit_seconds)
    machine = state_machine(target, model, tolerance, mix)
    test = get_state_machine_test(machine, settings=quick_settings(SEARCH_EXAMPLES, derandomize=False))
    fuzzed = FuzzTarget.from_hypothesis_test(test, database=HypofuzzDatabase(InMemoryExampleDatabase()))
    fuzzed.random.seed(seed)
    fuzzed.provider.random.seed(seed)
    try:
        fuzzed._enter_fixtures()
        while True:
            fuzzed._execute_once(fuzzed.new_conjecture_data(), observability_callback=fuzzed.provider.on_observation)
            if fuzzed.has_found_failure or limit.is_over:
                return bool(fuzzed.has_found_failure), limit.seconds, mix.programs
    except FailedFatally as error:
        cause = str(error.__context__).partition("\n")[0]
        raise UnavailableError(f"could not test: HypoFuzz {version('hypofuzz')} failed in itself on {target.name}: {cause}") from error


@contextlib.contextmanager
def _observability_restored() -> Iterator[None]:
    """HypoFuzz sets what Hypothesis observes for the whole process; as before afterwards."""
    from hypothesis.internal import observability

    before = observability.OBSERVABILITY_CHOICES, observability.OBSERVABILITY_COLLECT_COVERAGE
    try:
        yield
    finally:
        observability.OBSERVABILITY_CHOICES, observability.OBSERVABILITY_COLLECT_COVERAGE = before
