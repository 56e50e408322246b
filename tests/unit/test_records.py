"""What is kept of every program: what is packed is what the trials were, and it comes back as it was."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
from statedrift.fuzz.summaries import distances, summary_of
from statedrift.fuzz.trial import Trial
from statedrift.spec.errors import UsageError
from statedrift.spec.operations import OPERATION_NAMES
from statedrift.spec.programs import parse_program
from statedrift.spec.verdicts import VERDICT_KINDS, OutcomeWord, Verdict
from statedrift.store.campaigns import Tally, read_shards
from statedrift.store.keeping import Change, Store
from statedrift.store.records import ANSWERS, BIN_COUNT, KINDS, OPERATIONS, ShardRecord, answers_of, distances_of, divergent_of, joined

from tests.kept_campaign import identity_of
from tests.unit.test_store import ACCOUNT

PROGRAM = parse_program("model lfm2 seed=0; decode 0:4")


def trial(verdict: Verdict, closeness: Sequence[float] = ()) -> Trial:
    return Trial(PROGRAM, None, verdict, "numba/lfm2 crash at decode (self)", 1e-5, closeness=np.array(closeness, np.float64))


def record(trials: Sequence[Trial], position: int = 0, divergent: str = "", shard: int = 0) -> ShardRecord:
    summary = summary_of(trials, {"decode": {"accepted": 3, "refused": 1}})
    return ShardRecord(position, shard, 0, "lfm2", len(trials), 1.5, 10, 2, divergent, *summary)


TRIALS = [
    trial(Verdict("ok", error=2e-6, tolerance=1e-5), [0.2, 0.1]),
    trial(Verdict("crash", 0)),
    trial(Verdict("nonfinite", 0, tolerance=1e-5)),
]


def test_words_keep_their_numbers() -> None:
    """Every database holds these numbers: new words go to the ends of the lists."""
    assert KINDS == VERDICT_KINDS
    assert tuple(OPERATION_NAMES) == OPERATIONS
    assert get_args(OutcomeWord) == ANSWERS
    assert (KINDS[0], KINDS[8], KINDS[11], OPERATIONS[0], OPERATIONS[15], ANSWERS[6]) == (
        "ok",
        "crash",
        "harness-error",
        "decode",
        "reopen",
        "hang",
    )


def test_what_is_packed_says_what_the_trials_were() -> None:
    records = (record(TRIALS),)
    arrays = joined(records)
    assert [KINDS[kind] for kind in arrays["kinds"]] == ["ok", "crash", "nonfinite"]
    np.testing.assert_allclose(arrays["errors"], [2e-6, np.nan, np.nan], rtol=1e-6)
    np.testing.assert_allclose(arrays["tolerances"], [1e-5, np.nan, 1e-5], rtol=1e-6)
    assert answers_of(records)[0, 0].tolist() == [3, 1, 0, 0, 0, 0, 0]
    assert answers_of(records).sum() == 4
    assert distances_of(records).sum() == 2


@pytest.mark.parametrize(
    ("ratio", "halvings"),
    [(1.0, 0), (0.51, 0), (0.5, 1), (0.26, 1), (0.25, 2), (2.0**-20, 20), (1e-30, BIN_COUNT - 1), (0.0, BIN_COUNT - 1)],
)
def test_rows_are_counted_by_how_often_the_tolerance_is_halved(ratio: float, halvings: int) -> None:
    counts = distances([np.array([ratio])])
    assert np.flatnonzero(counts).tolist() == [halvings]
    assert not counts[halvings] - 1


def test_only_rows_of_right_programs_are_counted() -> None:
    assert distances_of((record([trial(Verdict("wrong-output", 0), [0.5, 3.0])]),)).sum() == 0


def test_records_are_read_back_in_the_order_of_their_programs(tmp_path: Path) -> None:
    first, second = record(TRIALS, 0, "1 numba/lfm2 crash at decode (self)"), record(TRIALS, 3, shard=1)
    with closing(Store(tmp_path)) as store:
        store.begin(identity_of(ACCOUNT), ACCOUNT.started_at, 1, None, 6, "1")
        store.save(Change(ACCOUNT, Tally(6), shards=(second, first)), 1.0, 6)
    assert read_shards(tmp_path) == (first, second)
    assert list(divergent_of(first)) == [(1, "numba/lfm2 crash at decode (self)")]


def test_a_record_that_is_not_whole_is_named(tmp_path: Path) -> None:
    torn = msgspec.structs.replace(record(TRIALS, shard=7), errors=b"123")
    with closing(Store(tmp_path)) as store:
        store.begin(identity_of(ACCOUNT), ACCOUNT.started_at, 1, None, 3, "1")
        store.save(Change(ACCOUNT, Tally(3), shards=(torn,)), 1.0, 3)
    with pytest.raises(UsageError, match="is damaged: what is kept of shard 7 is not whole"):
        read_shards(tmp_path)
