"""How often the canary is seen: rarely enough to be a watch on a campaign, often enough that its silence means something."""

import pytest
from statedrift.fuzz.canary_watch import CANARY, TOLERANCE_MIN
from statedrift.fuzz.shards import SHARD_PROGRAMS, shard_model, shard_programs
from statedrift.fuzz.trial import Bench
from statedrift.oracle.recompute import use_one_thread
from statedrift.store.campaigns import CANARY_RATE, Noise

PROGRAMS = 3008


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_about_one_program_in_a_hundred_shows_the_canary(family: str) -> None:
    """Measured over 3,200 programs: 0.94 % of lfm2's, 0.91 % of mamba2's. Each judged as in a campaign."""
    use_one_thread()
    seen = 0
    with Bench(CANARY) as bench:
        for shard in range(PROGRAMS // SHARD_PROGRAMS):
            bench.set_noise({shard_model(1, shard, (family,)): Noise(0.0, TOLERANCE_MIN, 0)})
            seen += sum(trial.verdict.is_divergence for trial in bench.try_programs(shard_programs(1, shard, (family,))))
    assert 0.005 <= seen / PROGRAMS <= 0.02
    assert seen / PROGRAMS > 0.8 * CANARY_RATE
