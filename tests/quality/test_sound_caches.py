"""Does the fuzzer stay silent where nothing is wrong: our own caches, every family."""

import pytest
from statedrift.fuzz.campaign import Settings, run_campaign
from statedrift.spec.families import FAMILIES

PROGRAMS = 64
CACHES = [(target, family) for target in ("numba", "numba-ring") for family in FAMILIES]


@pytest.mark.parametrize(("target", "family"), [*CACHES, ("statedrift.targets.numba:RING_WITHOUT_SNAPSHOTS", "lfm2")])
def test_a_sound_cache_stays_silent(target: str, family: str) -> None:
    campaign = run_campaign(Settings(target, (family,), programs=PROGRAMS))
    assert campaign.findings == ()
    assert campaign.account.verdicts == {"ok": PROGRAMS}
