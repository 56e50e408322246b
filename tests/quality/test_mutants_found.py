"""Does the fuzzer find what it should, and does the reducer end where it should: a whole campaign on each of our own caches with one fault.

Rules
- Every campaign is of seed 0, and its limits are counted in programs and trials: what it finds hangs on no clock.
- Tolerances are those of the sound cache, measured once a model: measuring the same plain decodings for every mutant would be most
  of the time, and a fault that shows in them would count as noise.
- How soon a mutant is found over many seeds is for `statedrift bench mutants` to say.
"""

import pytest
from statedrift.fuzz import known as known_module
from statedrift.fuzz.campaign import Settings, run_campaign
from statedrift.fuzz.mutants import MUTANTS
from statedrift.fuzz.mutants.search import sound_noise, try_twin
from statedrift.fuzz.trial import Bench
from statedrift.spec.models import Model
from statedrift.spec.programs import program_text
from statedrift.store.campaigns import Noise

OPERATIONS_MAX = 6
PROGRAMS = 64
TWIN_PROGRAMS = 48
RARE = {
    "coupled_token_reaches_one_sequence": 256,
    "partial_restore_keeps_later_keys": 256,
    "partial_restore_keeps_the_position": 256,
    "pending_rollback_lost_on_share": 256,
    "pool_refuses_its_last_cell": 256,
    "restore_all_gives_everyone_the_same_state": 256,
    "restored_cell_keeps_old_planes": 1024,
    "ring_leaves_its_states_behind": 1024,
    "saved_snapshots_numbered_backwards": 1024,
}
"""Mutants that 64 programs do not show, and within how many they are found."""
NOT_FOUND = {"ring_leaves_its_oldest_state_behind"}
"""Not in 2,048 programs of this seed."""


@pytest.fixture(scope="module")
def noises() -> dict[Model, Noise]:
    """Of the sound cache, for the families that were asked for."""
    return {}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fixed_twin_is_sound(name: str, noises: dict[Model, Noise]) -> None:
    mutant = MUTANTS[name]
    if Model(mutant.family) not in noises:
        noises.update(sound_noise([mutant]))
    assert try_twin(mutant, 0, noises, TWIN_PROGRAMS).alarms == ()


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in NOT_FOUND])
def test_a_mutant_is_found_and_reduced(name: str, noises: dict[Model, Noise], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    if Model(mutant.family) not in noises:
        noises.update(sound_noise([mutant]))
    monkeypatch.setattr(Bench, "_measured_noise", lambda bench, model, setting: noises[model])
    monkeypatch.setattr(known_module, "EXPLAINED_REDUCTIONS_MAX", 2)  # one fault needs no search for others behind it
    target = f"statedrift.fuzz.mutants:FAULTY.{name}"
    campaign = run_campaign(Settings(target, (mutant.family,), programs=RARE.get(name, PROGRAMS)))
    assert campaign.account.complete, "a signal ended the campaign"
    assert campaign.account.could_not_test == {}
    for finding in campaign.findings:
        assert len(finding.program.operations) <= OPERATIONS_MAX, program_text(finding.program)
        assert finding.reproduced == finding.reruns, program_text(finding.program)
    found = [len(finding.program.operations) for finding in campaign.findings if finding.verdict.kind == mutant.kind]
    assert found, f"no {mutant.kind} in {campaign.account.programs} programs"
    assert min(found) <= len(mutant.program.operations) + 1
