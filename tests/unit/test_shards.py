"""Shards: the work of a campaign, cut so that it is the same on one process and on many."""

import os
import platform
import subprocess
import sys

import msgspec
import pytest
from statedrift.fuzz.shards import SHARD_PROGRAMS, ShardResult, ShardTask, run_shard, shard_model, shard_programs
from statedrift.fuzz.trial import Bench
from statedrift.oracle.recompute import use_one_thread
from statedrift.spec.models import Model
from statedrift.spec.programs import program_id
from statedrift.store.campaigns import Noise

CANARY = "statedrift.fuzz.canary:FREQUENT"
FAMILIES = ("lfm2", "mamba2")
QUIET = {Model(family, seed): Noise(0.0, 1e-4, 0) for family in FAMILIES for seed in (0, 1)}


def canary_bench() -> Bench:
    use_one_thread()
    bench = Bench(CANARY)
    bench.set_noise(QUIET)
    return bench


def test_a_shard_is_a_function_of_seed_and_number() -> None:
    assert shard_programs(7, 3, FAMILIES) == shard_programs(7, 3, FAMILIES)
    assert len(shard_programs(7, 3, FAMILIES)) == SHARD_PROGRAMS


def test_a_smaller_shard_is_the_beginning_of_the_whole_one() -> None:
    assert shard_programs(7, 3, FAMILIES, 5) == shard_programs(7, 3, FAMILIES)[:5]


def test_no_two_shards_share_their_programs() -> None:
    """A tiny program may occur twice by chance; programs of more than six operations do not."""
    seen: dict[str, tuple[int, int]] = {}
    for seed in (0, 1):
        for shard in range(6):
            for program in shard_programs(seed, shard, ("lfm2",)):
                if len(program.operations) > 6:
                    assert seen.setdefault(program_id(program), (seed, shard)) == (seed, shard)
    assert len(seen) > 400


def test_all_programs_of_a_shard_are_of_one_model_and_families_take_turns() -> None:
    for shard in range(6):
        models = {program.model for program in shard_programs(0, shard, FAMILIES)}
        assert models == {shard_model(0, shard, FAMILIES)}
        assert next(iter(models)).family == FAMILIES[shard % 2]


def test_both_models_of_a_family_have_shards() -> None:
    assert {shard_model(0, shard, ("lfm2",)).seed for shard in range(32)} == {0, 1}


def test_the_result_counts_what_was_run() -> None:
    result = run_shard(canary_bench(), ShardTask(0, 0, ("lfm2",), 40))
    assert result.programs == sum(result.verdicts.values()) == 40
    assert result.operations == sum(count for counts in result.outcomes.values() for count in counts.values())
    assert len(result.divergent) == sum(count for kind, count in result.verdicts.items() if kind != "ok")
    programs = shard_programs(0, 0, ("lfm2",), 40)
    for divergent in result.divergent:
        assert divergent.trial.program == programs[divergent.number]
        assert divergent.trial.run is not None
        assert divergent.trial.run.rows == {}


def test_a_result_crosses_processes_unchanged() -> None:
    result = run_shard(canary_bench(), ShardTask(0, 0, ("lfm2",), 40))
    assert result.divergent
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=ShardResult) == result


PAGES = """
import resource
import numpy as np
from statedrift.fuzz.shards import settled_heap

def pages_taken(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        np.ones(1 << 18, np.float32)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

outside = pages_taken(20)
with settled_heap():
    pages_taken(1)
    print(outside, pages_taken(20))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept_where_dask_tells_glibc_to_give_it_back() -> None:
    """A MiB is 256 pages."""
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536"}
    outside, inside = map(int, subprocess.check_output([sys.executable, "-c", PAGES], env=environment, text=True).split())
    assert outside > 20 * 200
    assert inside < 200
