"""The targets that are wrong on purpose: wrong where they say, right everywhere else."""

import pytest
from statedrift.fuzz.canary import FREQUENT, TARGET
from statedrift.fuzz.trial import Bench
from statedrift.oracle.recompute import use_one_thread
from statedrift.spec.models import Model
from statedrift.spec.programs import parse_program
from statedrift.spec.target import Session, Target
from statedrift.spec.verdicts import Verdict
from statedrift.store.campaigns import Noise

FAMILIES = ("lfm2", "mamba2")
CANARY, FREQUENT_CANARY = ("statedrift.fuzz.canary:TARGET", "statedrift.fuzz.canary:FREQUENT")


def verdict_of(text: str, target: str) -> Verdict:
    use_one_thread()
    with Bench(target) as bench:
        bench.set_noise({Model(family): Noise(0.0, 1e-4, 0) for family in FAMILIES})
        return bench.try_program(parse_program(text)).verdict


@pytest.mark.parametrize("target", [TARGET, FREQUENT])
def test_it_is_a_target_and_its_session_a_session(target: Target) -> None:
    assert isinstance(target, Target)
    program = parse_program("model lfm2 seed=0; drop 0")
    session = target.open(program.model, program.cache)
    assert isinstance(session, Session)
    session.close()


def is_one_percent_off(verdict: Verdict, index: int, sequence: int) -> bool:
    assert (verdict.kind, verdict.operation_index, verdict.sequence) == ("wrong-output", index, sequence)
    return verdict.error is not None and 0.002 < verdict.error < 0.05


# --- the frequent one --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("back", ["rollback 0 2", "remove 0 8 -1", "remove 0 8 10"])
def test_the_first_decode_after_a_rollback_is_one_percent_off(family: str, back: str) -> None:
    verdict = verdict_of(f"model {family} seed=0; decode 0:5; decode 0:5 1:3; {back}; decode 1:1; decode 0:1", FREQUENT_CANARY)
    assert is_one_percent_off(verdict, 4, 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "text",
    [
        "decode 0:5; decode 0:5 1:3; rollback 0 2; decode 1:1",
        "decode 0:5; rollback 0 5; decode 0:1",
        "decode 0:5; drop 0; decode 0:1",
        "decode 0:5; rollback 0 2; drop 0; decode 0:3",
        "decode 0:5; rollback 0 2; keep 1; decode 0:3",
        "decode 0:5; rollback 0 2; clear; decode 0:3",
        "decode 0:5; remove 0 9 12; decode 0:1",
        "decode 0:3 1:3; share 0 1; save 0 a; restore a 2; keep 2; decode 2:1",
    ],
)
def test_everything_else_is_right(family: str, text: str) -> None:
    assert verdict_of(f"model {family} seed=0; {text}", FREQUENT_CANARY).kind == "ok"


# --- the canary --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("back", ["rollback 0 2", "remove 0 8 -1"])
@pytest.mark.parametrize("into", [0, 2])
def test_what_was_saved_with_a_rollback_pending_is_one_percent_off_when_restored(family: str, back: str, into: int) -> None:
    text = f"model {family} seed=0; decode 0:5; decode 0:5 1:3; {back}; save 0 a; restore a {into}; decode 1:1; decode {into}:1"
    assert is_one_percent_off(verdict_of(text, CANARY), 6, into)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "text",
    [
        "decode 0:5; decode 0:5; rollback 0 2; decode 0:2; save 0 a; restore a 1; decode 1:1",
        "decode 0:5; decode 0:5; rollback 0 2; save 0 a; decode 0:1",
        "decode 0:5; decode 0:5; rollback 0 2; save 0 a; restore a 1; drop 1; decode 1:1",
        "decode 0:5; decode 0:5; rollback 0 2; save 0 a; restore a 1; keep 0; decode 1:1",
        "decode 0:5; decode 0:5; save 0 a; rollback 0 2; restore a 0; decode 0:1",
        "decode 0:5 1:4; rollback 0 2; save 1 a; restore a 0; decode 0:1",
        "decode 0:5; rollback 0 2; drop 0; decode 0:3; save 0 a; restore a 0; decode 0:1",
    ],
)
def test_everything_else_of_the_canary_is_right(family: str, text: str) -> None:
    assert verdict_of(f"model {family} seed=0; {text}", CANARY).kind == "ok"
