"""The target that is wrong on purpose: wrong where it says, right everywhere else."""

import pytest
from statedrift.fuzz.canary import TARGET
from statedrift.fuzz.trial import Bench
from statedrift.oracle.recompute import use_one_thread
from statedrift.spec.models import Model
from statedrift.spec.programs import parse_program
from statedrift.spec.target import Session, Target
from statedrift.spec.verdicts import Verdict
from statedrift.store.campaigns import Noise

FAMILIES = ("lfm2", "mamba2")


def verdict_of(text: str) -> Verdict:
    use_one_thread()
    with Bench("statedrift.fuzz.canary:TARGET") as bench:
        bench.set_noise({Model(family): Noise(0.0, 1e-4, 0) for family in FAMILIES})
        return bench.try_program(parse_program(text)).verdict


def test_it_is_a_target_and_its_session_a_session() -> None:
    assert isinstance(TARGET, Target)
    program = parse_program("model lfm2 seed=0; drop 0")
    session = TARGET.open(program.model, program.cache)
    assert isinstance(session, Session)
    session.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("back", ["rollback 0 2", "remove 0 8 -1", "remove 0 8 10"])
def test_the_first_decode_after_a_rollback_is_one_percent_off(family: str, back: str) -> None:
    verdict = verdict_of(f"model {family} seed=0; decode 0:5; decode 0:5 1:3; {back}; decode 1:1; decode 0:1")
    assert (verdict.kind, verdict.operation_index, verdict.sequence) == ("wrong-output", 4, 0)
    assert verdict.error is not None
    assert 0.002 < verdict.error < 0.05


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "text",
    [
        "decode 0:5; decode 0:5 1:3; rollback 0 2; decode 1:1",
        "decode 0:5; rollback 0 5; decode 0:1",
        "decode 0:5; drop 0; decode 0:1",
        "decode 0:5; rollback 0 2; drop 0; decode 0:3",
        "decode 0:5; remove 0 9 12; decode 0:1",
        "decode 0:3 1:3; share 0 1; save 0 a; restore a 2; keep 2; decode 2:1",
    ],
)
def test_everything_else_is_right(family: str, text: str) -> None:
    assert verdict_of(f"model {family} seed=0; {text}").kind == "ok"
