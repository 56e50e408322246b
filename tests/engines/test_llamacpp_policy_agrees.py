"""The policy `llamacpp` is the real llama.cpp, fault for fault: random programs, aborts, and saved states byte for byte.

Rules
- The truth is the engine that is installed; a campaign of any size is `statedrift fuzz --target numba-llamacpp --against llamacpp`.
"""

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest
from statedrift.fuzz.pair import Pair
from statedrift.fuzz.shards import shard_programs
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.models import Model
from statedrift.spec.operations import OPEN
from statedrift.spec.programs import parse_program, program_text
from statedrift.spec.target import Batch, Session
from statedrift.store.campaigns import Noise
from statedrift.targets.llama_probe import probed_switches
from statedrift.targets.numba_llamacpp import TARGET as POLICY
from statedrift.targets.registry import load_target

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python, which is not installed")
FAMILIES = POLICY.families
TOLERANCE = 3e-4
PROGRAMS = 96


@pytest.fixture(scope="module")
def pair():
    with Pair("numba-llamacpp", "llamacpp") as opened:
        yield opened


def tried(pair, programs):
    pair.set_noise({program.model: Noise(TOLERANCE / 20, TOLERANCE, 200) for program in programs})
    return pair.try_programs(programs)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_programs_end_the_same_in_the_policy_and_in_the_engine(pair, family):
    programs = [program for shard in (0, 1) for program in shard_programs(11, shard, [family], PROGRAMS // 2)]
    trials = tried(pair, programs)
    differing = [f"{trial.verdict.reason}\n{program_text(trial.program)}" for trial in trials if trial.verdict.kind != "ok"]
    assert not differing
    accepted = sum(step.outcome.word == "accepted" for trial in trials if trial.run for step in trial.run.steps)
    assert accepted > 5 * PROGRAMS


@pytest.mark.parametrize(
    "text",
    [
        "model lfm2; cache n_ubatch=4; decode 0:2",  # no room for the tail
        "model lfm2; cache n_ubatch=4 start=dirty; decode 0:2",
        "model lfm2; decode 0:5; share 0 1; rollback 0 2; save_all a",  # different rollback indices in one cell
        "model lfm2; decode 0:9; share 0 1 2 5",  # a part across streams
        "model lfm2_swa; decode 0:2; shift 0 3; decode 0:1",  # a shift with no layer to turn
        "model kimi_linear; cache n_seq_max=3; decode 0:1",  # three streams and a graph of 64 tokens of one sequence
    ],
)
def test_where_the_engine_aborts_the_policy_ends_in_the_same_crash(pair, text):
    (trial,) = tried(pair, [parse_program(text)])
    assert trial.verdict.kind == "ok", trial.verdict.reason
    assert trial.run is not None
    assert trial.run.verdict is not None
    assert trial.run.verdict.kind == "crash"


@pytest.mark.parametrize(
    "text",
    [
        "model lfm2; cache n_ubatch=16; decode 0:1; decode 0:1; rollback 0 1; decode 0:1",  # a plane that was never written
        "model lfm2; decode 0:9; share 0 1; rollback 0 2; decode 0:1 1:1",
        "model lfm2; cache unified=1; decode 2:1 0:1; share 2 0; decode 0+2:1",  # the order of a hash set
        "model lfm2_swa; cache unified=1; decode 0:1 1:1; decode 1:7; rollback 0 1; share 0 1; decode 0:1 1:1; decode 0:1",  # NaN spreads
        "model qwen35; decode 0:9; decode 0:1; rollback 0 2; decode 0:1",  # its convolution planes are filled, its states are not
    ],
)
def test_known_faults_give_the_same_wrong_rows(pair, text):
    (trial,) = tried(pair, [parse_program(text)])
    assert trial.verdict.kind == "ok", trial.verdict.reason


SAVES: dict[str, Callable[[Session], bytes]] = {
    "a sequence": lambda session: session.save(1, False, False)[1],
    "with a pending rollback, shared": lambda session: session.save(0, False, False)[1],
    "an empty sequence": lambda session: session.save(3, False, False)[1],
    "the recurrent half": lambda session: session.save(1, True, False)[1],
    "on the device": lambda session: session.save(1, False, True)[1],
    "everything": lambda session: session.save_all()[1],
}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("unified", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_states_are_the_engines_bytes_but_for_rounding(family, unified, save):
    blobs = []
    for name in ("numba-llamacpp", "llamacpp"):
        session = load_target(name).open(Model(family), CacheConfiguration(unified=unified, n_ubatch=16))
        try:
            for sequence, count in ((1, 13), (0, 6)):
                places = np.arange(count, dtype=np.int32)
                session.decode(Batch(places, places, ((sequence,),) * count, np.ones(count, bool), "all"))
            session.share(0, 2, OPEN, OPEN)
            session.remove(1, 11, OPEN)
            blobs.append(SAVES[save](session))
        finally:
            session.close()
    ours, theirs = blobs
    assert len(ours) == len(theirs)
    skipped = 4 + theirs[0] if save == "everything" else 0  # the name of the architecture
    count = (len(theirs) - skipped) // 4
    own, other = np.frombuffer(ours, np.int32, count, skipped), np.frombuffer(theirs, np.int32, count, skipped)
    differing = own != other
    with np.errstate(all="ignore"):
        error = np.abs(own.view(np.float32) - other.view(np.float32)) / (1 + np.abs(other.view(np.float32)))
    assert np.all(error[differing] <= 1e-4)
    assert ours[:skipped] == theirs[:skipped]


def test_the_probe_finds_what_the_engine_does_with_a_shared_tail():
    session = load_target("llamacpp").open(Model("nemotron_h"), CacheConfiguration())
    try:
        places = np.arange(5, dtype=np.int32)
        session.decode(Batch(places, places, ((0,),) * 5, np.ones(5, bool), "last"))
        session.share(0, 1, OPEN, OPEN)
        refuses = session.remove(0, 4, OPEN).word == "refused"
    finally:
        session.close()
    assert probed_switches().refuses_shared_rollback is refuses
