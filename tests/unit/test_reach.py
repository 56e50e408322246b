"""What programs reach: which cells an operation counts in, which a target has, and what adding up shards keeps."""

import msgspec
import pytest
from statedrift.fuzz.execution import Run, execute
from statedrift.fuzz.reach import IMPOSSIBLE_PAIRS, NOTHING_REACHED, TABLES, Atlas, ReachCounter, abilities_of, cells
from statedrift.fuzz.trial import Bench
from statedrift.spec.operations import OPERATION_NAMES
from statedrift.spec.programs import Program, parse_program
from statedrift.spec.target import Capabilities, Guarantee
from statedrift.store.campaigns import Reach

from tests.perfect_target import PerfectTarget


def counter_of(
    text: str, family: str = "lfm2", guarantee: Guarantee = "draft", optional: bool = True, poison: bool = False
) -> ReachCounter:
    """What one program reaches on the perfect target."""
    program = parse_program(f"model {family} seed=0; {text}")
    counter = ReachCounter(poison)
    counter.add(program, execute(program, PerfectTarget(guarantee, optional)))
    return counter


def reached(text: str, table: str, family: str = "lfm2", optional: bool = True, poison: bool = False) -> dict[str, int]:
    return counter_of(text, family, optional=optional, poison=poison).reached().counts[table]


# --- pairs -------------------------------------------------------------------------------------------------------------------


def test_a_pair_is_of_operations_on_the_same_sequence() -> None:
    assert reached("decode 0:3; decode 1:2; save 0 a; drop 1", "pairs") == {
        "decode after nothing": 2, "save after decode": 1, "drop after decode": 1,
    }  # fmt: skip


def test_an_operation_that_names_no_sequence_comes_after_the_one_before_and_before_all() -> None:
    pairs = reached("decode 0:3; drop 1; clear; decode 0:1; decode 1:1", "pairs")
    assert pairs == {"decode after nothing": 1, "drop after nothing": 1, "clear after drop": 1, "decode after clear": 2}


def test_both_sequences_of_a_share_have_it_behind_them() -> None:
    pairs = reached("decode 0:3; share 0 1; save 0 a; save 1 b", "pairs")
    assert pairs == {"decode after nothing": 1, "share after decode": 1, "share after nothing": 1, "save after share": 2}


def test_what_was_skipped_or_is_not_offered_is_no_part_of_a_pair() -> None:
    assert reached("decode 0:3; restore a 0; divide 0 2; save 0 a", "pairs", optional=False) == {
        "decode after nothing": 1, "save after decode": 1,
    }  # fmt: skip


# --- answers -----------------------------------------------------------------------------------------------------------------


def test_answers_count_what_was_sent() -> None:
    counter = counter_of("decode 0:3; remove 0 0 1; restore a 0; divide 0 2; cancel 0:3 at=1", optional=False)
    assert counter.reached().counts["answers"] == {"decode accepted": 1, "remove refused": 1}
    assert counter.outcomes == {
        "decode": {"accepted": 1}, "cancel": {"refused": 1}, "remove": {"refused": 1}, "divide": {"refused": 1}, "restore": {"skipped": 1},
    }  # fmt: skip


# --- states ------------------------------------------------------------------------------------------------------------------

PENDING = [
    ("decode 0:4; rollback 0 2; save 0 a; save 0 b; decode 0:1; save 0 a", {"save": 2, "decode": 1}),
    ("decode 0:4; remove 0 2 -1; share 0 1; drop 1", {"share": 1, "drop": 1}),
    ("decode 0:4 1:4; rollback 0 2; share 1 0; drop 0", {"share onto": 1}),
    ("decode 0:4 1:4; rollback 0 2; keep 1; decode 0:1", {"keep another": 1}),
    ("decode 0:4; rollback 0 2; clear; decode 0:1", {"clear": 1}),
    ("decode 0:4; rollback 0 4; decode 0:1; remove 0 5 -1; decode 0:1", {}),
    ("decode 0:4; save 0 a; rollback 0 1; restore a 0; decode 0:1", {"restore": 1}),
    ("decode 0:4; rollback 0 1; rollback 0 2; reopen; decode 0:1", {"rollback": 1, "reopen": 1}),
]


@pytest.mark.parametrize(("text", "expected"), PENDING)
def test_a_rollback_is_pending_until_the_sequence_goes_on(text: str, expected: dict[str, int]) -> None:
    assert reached(text, "pending") == expected


def test_a_state_is_shared_until_one_of_its_sequences_goes_on() -> None:
    text = "decode 0:4; share 0 1; save 0 a; share 1 2; save 0 a; decode 2:1; save 1 a; decode 1:1; save 0 a"
    assert reached(text, "shared by 2") == {"save": 2, "share": 1, "decode": 1}
    assert reached(text, "shared by 3+") == {"save": 1, "decode": 1}


def test_coupled_tokens_share_a_state_and_empty_sequences_share_none() -> None:
    coupled = "cache n_seq_max=2 unified=1; decode 0+1:3; save 0 a; decode 0+1:1; save 1 a; decode 1:1; save 0 a"
    assert reached(coupled, "shared by 2") == {"save": 2, "decode": 3}
    assert reached("decode 1:2; share 0 1; save 0 a; save 1 b", "shared by 2") == {}


def test_a_sequence_is_moved_by_a_batch_that_is_not_the_one_before() -> None:
    assert reached("decode 0:1 1:1; decode 0:1 1:1; save 0 a", "moved") == {}
    assert reached("decode 0:1; decode 0:1; save 0 a", "moved") == {}
    assert reached("decode 0:1 1:1; decode 1:1 0:1; save 0 a; decode 0:1; save 0 a", "moved") == {"save": 1, "decode": 1}
    assert reached("decode 0:1; decode 0:1 1:1; save 0 a; save 1 a", "moved") == {"save": 1}  # 1 had nothing that could be moved


# --- edges -------------------------------------------------------------------------------------------------------------------

EDGES = [
    ("decode 0:10; rollback 0 1; rollback 0 3; rollback 0 4; rollback 0 1", {"rollback of 1": 2, "rollback of n_rs_seq": 1, "rollback of n_rs_seq+1": 1}),
    ("decode 0:9; rollback 0 20; rollback 0 20", {"rollback of the whole log": 1}),
    (
        "cache n_ubatch=8 n_rs_seq=2; decode 0:1; decode 0:3; decode 0:7; decode 0:8; decode 0:9; decode 0:10",
        {
            "decode of 1": 1, "decode of n_rs_seq+1": 1, "decode of n_ubatch-1": 1, "decode of n_ubatch": 1, "decode of n_ubatch+1": 1,
            "decode above n_ubatch+1": 1,
        },
    ),
    ("decode 0:1 1:2 0:1", {"decode of 1": 2, "decode of several sequences": 1, "decode of a sequence twice": 1}),
    ("cache unified=1; decode 0+1:2", {"decode of coupled tokens": 1, "decode of several sequences": 1, "unified 1": 1}),
    ("decode 0:2 outputs=last; decode 0:2 outputs=embeddings", {"decode for last rows": 1, "decode for embeddings": 1}),
    ("cache n_ctx=8; decode 0:9", {"decode beyond the capacity": 1}),
    ("decode 0:2; save 0 a; restore a 0; restore a 1", {"restore into the same sequence": 1, "restore into another sequence": 1}),
    ("decode 0:2; save 0 a; reopen; restore a 0", {"restore into the same sequence": 1, "restore in a later session": 1}),
    ("decode 0:2; save 0 a partial; restore a 0", {"restore into the same sequence": 1, "restore of a partial save": 1}),
    ("decode 0:2; save 0 a device; restore a 0", {"restore into the same sequence": 1, "restore of a device save": 1}),
    ("decode 0:2; save 0 a; damage a truncate 3; restore a 0", {"restore of a damaged save": 1}),
    ("cache start=dirty interleave=1 n_rs_seq=0; drop 0", {"start dirty": 1, "interleave 1": 1, "n_rs_seq 0": 1}),
    ("reopen unified=1; drop 0", {"unified 0": 1, "unified 1": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), EDGES)
def test_edges_are_where_the_numbers_say(text: str, expected: dict[str, int]) -> None:
    words = {name.split()[0] for name in expected}
    assert {name: number for name, number in reached(text, "edges").items() if name.split()[0] in words} == expected


def test_a_log_longer_than_the_window_is_an_edge_of_models_with_one() -> None:
    assert "decode past the window" not in reached("decode 0:8", "edges", "lfm2_swa")
    assert reached("decode 0:8; rollback 0 3; decode 0:3; decode 0:1; decode 0:1", "edges", "lfm2_swa")["decode past the window"] == 2
    assert "decode past the window" not in reached("decode 0:20", "edges")


@pytest.mark.parametrize(("poison", "name"), [(True, "start poison"), (False, "start dirty")])
def test_poison_counts_as_what_the_target_makes_of_it(poison: bool, name: str) -> None:
    counted = reached("cache start=poison; drop 0", "edges", poison=poison)
    assert {cell: number for cell, number in counted.items() if cell.startswith("start")} == {name: 1}


# --- which cells there are ---------------------------------------------------------------------------------------------------

PLAIN = Capabilities("draft", 3, 64, 256, True, True)


def test_a_target_has_cells_only_for_what_it_offers() -> None:
    plain, able = cells(abilities_of(PLAIN)), cells(abilities_of(msgspec.structs.replace(PLAIN, divide=True, device=True, coupled=True)))
    assert not [name for names in plain.values() for name in names if "divide" in name or "cancel" in name or "restore_all" in name]
    assert {"divide accepted", "divide after decode", "divide"} <= {name for names in able.values() for name in names}
    assert set(able["edges"]) - set(plain["edges"]) == {"restore of a device save", "decode of coupled tokens"}
    assert "rollback refused" in plain["answers"]
    assert "rollback refused" not in cells(abilities_of(msgspec.structs.replace(PLAIN, guarantee="all")))["answers"]


def test_no_cell_is_one_that_no_program_can_reach() -> None:
    assert not IMPOSSIBLE_PAIRS & set(cells(frozenset((*abilities_of(PLAIN), "shift", "divide", "save_all")))["pairs"])
    for text in (
        "shift 0 1",
        "divide 0 2",
        "restore_all w",
        "damage a header",
        "drop 0; shift 0 1",
        "clear; divide 0 2",
        "reopen; shift 0 2",
    ):
        assert reached(text, "answers").keys() <= {"drop accepted", "clear accepted", "reopen accepted"}
    for text in ("rollback 0 1", "remove 0 1 -1", "shift 0 1"):
        assert reached(f"decode 0:4; divide 0 2; {text}", "answers").keys() == {"decode accepted", "divide accepted"}


# --- adding up ---------------------------------------------------------------------------------------------------------------


def test_an_atlas_adds_shards_up_and_names_what_none_of_them_reached() -> None:
    atlas = Atlas()
    for text in ("decode 0:3; drop 0", "decode 0:3; drop 0; decode 0:1"):
        atlas.add(counter_of(text).reached())
    reach = atlas.reach()
    assert tuple(reach.cells) == TABLES
    assert [reach.cells["answers"][f"{name} accepted"] for name in ("decode", "drop", "share")] == [3, 2, 0]
    assert reach.cells["pairs"]["decode after drop"] == 1
    assert reach.cells["pairs"]["share after drop"] == 0
    assert reach.not_offered == ()


def test_an_atlas_does_not_depend_on_the_order_of_shards() -> None:
    texts = ("decode 0:3; drop 0", "decode 0:3; share 0 1; keep 1", "decode 0:2; rollback 0 1; save 0 a")
    forward, backward = Atlas(), Atlas()
    for text in texts:
        forward.add(counter_of(text).reached())
    for text in reversed(texts):
        backward.add(counter_of(text).reached())
    assert forward.reach() == backward.reach()


def test_what_is_not_offered_is_named() -> None:
    atlas = Atlas()
    atlas.add(counter_of("decode 0:3; divide 0 2", optional=False).reached())
    assert atlas.reach().not_offered == ("cancel", "shift", "divide", "save_all", "restore_all")


def test_nothing_was_reached_where_nothing_ran() -> None:
    atlas = Atlas()
    atlas.add(NOTHING_REACHED)
    assert atlas.reach() == Reach({table: {} for table in TABLES})


def test_a_reached_cell_that_the_target_was_not_thought_to_have_is_shown() -> None:
    atlas = Atlas()
    atlas.add(counter_of("decode 0:3").reached())
    atlas.add(msgspec.structs.replace(NOTHING_REACHED, counts={"answers": {"drop refused": 1}}))
    assert atlas.reach().cells["answers"]["drop refused"] == 1


def test_a_run_that_ended_early_counts_as_far_as_it_came() -> None:
    program = parse_program("model lfm2 seed=0; decode 0:3; drop 0; decode 0:1")
    run = execute(Program(program.model, program.cache, program.operations[:2]), PerfectTarget("draft"))
    counter = ReachCounter(False)
    counter.add(program, run)
    assert counter.reached().counts["answers"] == {"decode accepted": 1, "drop accepted": 1}
    counter.add(program, Run((), (), {}, None, PLAIN))
    assert sum(counter.reached().counts["answers"].values()) == 2


def test_a_shard_tells_what_it_reached() -> None:
    from statedrift.fuzz.shards import ShardTask, run_shard
    from statedrift.spec.models import Model
    from statedrift.store.campaigns import Noise

    with Bench("numba") as bench:
        bench.set_noise({Model("lfm2", seed): Noise(0.0, 1e-4, 0) for seed in (0, 1)})
        result = run_shard(bench, ShardTask(0, 0, ("lfm2",), 16))
    answers = result.reached.counts["answers"]
    assert answers["decode accepted"] == result.outcomes["decode"]["accepted"]
    assert {name.split()[0] for name in answers} <= set(OPERATION_NAMES)
    assert "poison" in result.reached.abilities
