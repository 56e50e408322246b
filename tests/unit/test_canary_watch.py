"""The watch on campaigns: which shards are tried on the canary, what blinds it, and what its silence does to a campaign."""

from collections.abc import Iterator

import msgspec
import pytest
from statedrift.cli.fuzzing import status_of_campaign
from statedrift.fuzz import canary_watch
from statedrift.fuzz.canary_watch import WATCH_EVERY, CanaryWatch
from statedrift.fuzz.pair import open_bench
from statedrift.fuzz.trial import Bench
from statedrift.oracle.recompute import use_one_thread
from statedrift.reports.terminal import account_text, canary_words, verdict_sentence
from statedrift.spec.errors import UnavailableError
from statedrift.spec.models import Model
from statedrift.store.campaigns import Account, Campaign, Canary, Noise, is_silent

MODELS = [Model("lfm2", seed) for seed in (0, 1)]
SEEING, UNSEEING = 2, 6
"""Seeds whose first shard shows the canary twice, and never."""


def bench_of(tolerance: float, target: str = "numba", against: str | None = None, oracle: str = "own") -> Bench:
    use_one_thread()
    bench = open_bench(target, against, oracle=oracle)
    bench.set_noise({model: Noise(0.0, tolerance, 0) for model in MODELS})
    return bench


@pytest.fixture(scope="module")
def watch() -> Iterator[CanaryWatch]:
    with bench_of(5e-5) as bench:
        yield CanaryWatch(bench, ("lfm2",))


def test_a_shard_is_tried_as_a_pure_function_of_seed_and_number(watch: CanaryWatch) -> None:
    assert watch.watch(SEEING, 0, 64) == Canary(64, 2)
    with bench_of(5e-5) as bench:
        assert CanaryWatch(bench, ("lfm2",)).watch(SEEING, 0, 64) == Canary(64, 2)
    assert watch.watch(UNSEEING, 0, 64) == Canary(64, 0)


def test_only_some_shards_are_tried(watch: CanaryWatch) -> None:
    assert [watch.watch(0, shard, 1).programs for shard in (0, 1, WATCH_EVERY - 1, WATCH_EVERY, 3 * WATCH_EVERY)] == [1, 0, 0, 1, 1]


def test_a_smaller_tolerance_than_our_own_caches_does_not_make_it_seen_more_often() -> None:
    with bench_of(1e-9) as bench:
        assert CanaryWatch(bench, ("lfm2",)).watch(SEEING, 0, 64) == Canary(64, 2)


def test_a_tolerance_that_hides_one_percent_makes_it_silent() -> None:
    with bench_of(0.2) as bench:
        assert CanaryWatch(bench, ("lfm2",)).watch(SEEING, 0, 64) == Canary(64, 0)


@pytest.mark.parametrize(("against", "oracle"), [("numba-ring", "own"), (None, "engine")])
def test_it_is_judged_as_the_campaign_judges(against: str | None, oracle: str) -> None:
    with bench_of(5e-5, "numba", against, oracle) as bench:
        watch = CanaryWatch(bench, ("lfm2",))
        assert watch.canary is not None
        assert (watch.canary.against_name, watch.canary.oracle) == (against and "numba", oracle)
        assert watch.watch(SEEING, 0, 64) == Canary(64, 2)


def test_a_campaign_of_families_that_our_cache_does_not_have_is_watched_on_another() -> None:
    with bench_of(5e-5) as bench:
        assert CanaryWatch(bench, ("deepseek4",)).watch(SEEING, 0, 64) == Canary(64, 2)


def test_a_canary_that_cannot_be_tried_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object, **named: object) -> Bench:
        raise UnavailableError("no compiler here")

    monkeypatch.setattr(canary_watch, "open_bench", missing)
    with bench_of(5e-5) as bench:
        canary = CanaryWatch(bench, ("lfm2",)).watch(SEEING, 0, 64)
    assert canary == Canary(why_not="no compiler here")
    assert canary_words(canary) == "could not be tried: no compiler here"
    assert not is_silent(canary)


# --- silence -----------------------------------------------------------------------------------------------------------------

ACCOUNT = Account(
    target="numba", version="1", families=("lfm2",), seed=0, jobs=1, started_at="2026-01-02T03:04:05+00:00", seconds=1.0, programs=99_000,
    operations=30, outcomes={}, verdicts={"ok": 99_000}, noise={}, could_not_test={}, seconds_generating=0.0, seconds_running=0.0,
    seconds_judging=0.0, seconds_reducing=0.0, complete=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("canary", "silent"),
    [(None, False), (Canary(1472, 0), False), (Canary(1536, 0), True), (Canary(100_000, 1), False), (Canary(), False)],
)
def test_silence_needs_so_many_programs_that_it_is_no_chance(canary: Canary | None, silent: bool) -> None:
    assert is_silent(canary) is silent
    campaign = Campaign(msgspec.structs.replace(ACCOUNT, canary=canary), ())
    assert status_of_campaign(campaign, False) == (2 if silent else 0)
    assert ("could not test: the canary stayed silent" in verdict_sentence(campaign)) is silent
    assert ("could not test: the canary, a target that is wrong on purpose" in account_text(campaign.account)) is silent


@pytest.mark.parametrize(
    ("canary", "words"),
    [
        (Canary(256, 3), "seen 3 times in 256 programs"),
        (Canary(64, 0), "not seen in 64 programs, too few to mean anything"),
        (Canary(2048, 0), "silent in 2,048 programs, about one in a hundred of which shows a planted fault"),
    ],
)
def test_the_account_says_how_often_it_was_seen(canary: Canary, words: str) -> None:
    assert canary_words(canary) == words
    assert f"canary       {words}" in account_text(msgspec.structs.replace(ACCOUNT, canary=canary))
