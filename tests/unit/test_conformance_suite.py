"""The conformance suite: it has a test for every row of the contract, right caches pass them, and each of them fails on a fault of its row.

Rules
- Mutants of our own caches, one fault each, stand for wrong caches; faults that no mutant has are planted here, in a session around a right one.
- Tests of the suite are called as functions: what pytest makes of them is in test_pytest_plugin.py.
Source: docs/contract.md; docs/mutants.md.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from statedrift.fuzz import conformance
from statedrift.fuzz.conformance import Conformance, Diverged, Misused, Place
from statedrift.fuzz.conformance_suite import ConformanceSuite, _Contract
from statedrift.fuzz.mutants import MUTANTS, MutantTarget
from statedrift.fuzz.trial import Bench
from statedrift.oracle.recompute import use_one_thread
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.errors import UsageError
from statedrift.spec.models import Model
from statedrift.spec.operations import OPEN
from statedrift.spec.target import Target
from statedrift.spec.verdicts import ACCEPTED, Outcome
from statedrift.store.campaigns import Noise
from statedrift.targets.plain import OpenedTarget
from statedrift.targets.registry import load_target

ROOT = Path(__file__).resolve().parents[2]
ROWS = sorted(name for name in vars(ConformanceSuite) if name.startswith("test_") and name != "test_fuzz")

TESTS_OF_ROWS: dict[str, tuple[str, ...]] = {
    "`decode` one or more": (
        "a_decode_appends_its_tokens", "only_the_last_outputs_are_asked_for", "hidden_states_are_right", "up_to_its_capacity_every_decode_is_accepted",
        "beyond_its_capacity_a_decode_happens_wholly_or_not_at_all",
    ),
    "`decode` with a token": ("tokens_of_several_sequences_count_for_each", "tokens_of_unequal_sequences_are_refused"),
    "`rollback s n`, 1 <=": (
        "a_promised_rollback_is_accepted", "an_accepted_rollback_takes_back_its_tokens", "a_rollback_reaches_into_an_earlier_ubatch",
    ),
    "`rollback s n`, n >=": ("a_drop_empties_the_sequence", "a_rollback_of_everything_empties_the_sequence"),
    "`remove s p0 p1`, a range that holds no": ("removing_a_range_without_tokens_changes_nothing",),
    "`remove s p0 p1`, a range that leaves": ("removing_the_middle_is_refused",),
    "`remove s p0 p1`, a range that covers": ("removing_the_tail_is_a_rollback",),
    "`share s d` |": (
        "a_share_makes_an_independent_copy", "a_share_replaces_what_was_there", "a_share_of_a_pending_rollback_shares_what_is_left",
        "after_a_share_each_goes_back_to_its_own_states",
    ),
    "`share s d p0 p1`": ("a_share_of_a_part_is_refused",),
    "`cancel`": ("a_cancelled_decode_keeps_a_prefix",),
    "`keep s`": ("keep_empties_every_other_sequence",),
    "`shift s k`": ("a_shift_moves_positions_and_no_output",),
    "`divide s k`": ("divided_positions_are_right_until_it_is_empty",),
    "`save s`": ("a_save_is_accepted_and_changes_nothing", "a_save_of_a_pending_rollback_saves_what_is_left", "a_shared_sequence_is_saved_and_restored"),
    "`restore blob d`": (
        "a_restore_brings_back_what_was_saved", "a_saved_sequence_survives_a_reopen", "restored_snapshots_can_be_gone_back_to",
        "after_a_restore_it_goes_back_to_what_was_saved",
    ),
    "refused `restore`": ("a_truncated_save_is_refused_and_changes_nothing",),
    "`restore` of a partial": ("a_partial_save_is_restored_where_it_was_taken", "a_save_on_the_device_is_restored"),
    "`restore` of a damaged": ("a_save_of_another_model_is_refused", "a_damaged_save_harms_nobody_else"),
    "`save_all` /": ("a_whole_session_is_saved_and_restored",),
    "`clear`": ("a_clear_empties_everything",),
    "`reopen`": ("a_reopened_session_is_empty",),
    "G1": ("a_refused_rollback_changes_nothing",),
    "G2": (),  # of every accepted operation
    "G3": (
        "sequences_of_a_batch_do_not_disturb_each_other", "a_rollback_leaves_sharers_alone", "forgetting_a_sharer_leaves_the_other",
        "a_shift_leaves_sharers_alone",
    ),
    "G4": (),  # positions are asked after every operation
    "G5": (
        "the_order_of_a_batch_changes_nothing", "a_long_batch_is_the_same_in_small_ubatches", "memory_that_was_used_before_does_not_show",
        "poisoned_memory_does_not_show",
    ),
    "G6": ("a_bad_argument_is_a_clear_error",),
}  # fmt: skip
"""Row of docs/contract.md (how it begins) -> tests."""

KILLED_BY: dict[str, tuple[str, ...]] = {
    "a_decode_appends_its_tokens": ("window_lacks_the_newest_token",),
    "only_the_last_outputs_are_asked_for": ("every_sequence_reads_the_first_ones_state",),
    "hidden_states_are_right": ("every_sequence_reads_the_first_ones_state",),
    "sequences_of_a_batch_do_not_disturb_each_other": ("output_rows_in_the_order_of_the_ubatch",),
    "the_order_of_a_batch_changes_nothing": ("output_rows_in_the_order_of_the_ubatch",),
    "a_long_batch_is_the_same_in_small_ubatches": (
        "ring_ubatch_starts_from_the_first",
        "zeroed_again_in_every_ubatch",
        "second_ubatch_refused",
    ),
    "memory_that_was_used_before_does_not_show": ("drop_leaves_the_state_behind", "ring_new_owner_not_zeroed"),
    "poisoned_memory_does_not_show": ("ring_new_owner_not_zeroed",),
    "up_to_its_capacity_every_decode_is_accepted": ("pool_refuses_its_last_cell",),
    "beyond_its_capacity_a_decode_happens_wholly_or_not_at_all": ("window_lacks_the_newest_token",),
    "tokens_of_several_sequences_count_for_each": ("coupled_token_reaches_one_sequence",),
    "a_promised_rollback_is_accepted": ("newest_token_takes_all_with_it", "snapshots_of_neighbours_exchanged"),
    "an_accepted_rollback_takes_back_its_tokens": ("deeper_planes_kept_by_shorter_batch", "rollback_applied_twice"),
    "a_rollback_reaches_into_an_earlier_ubatch": ("tail_cut_by_ubatch",),
    "a_refused_rollback_changes_nothing": ("refused_rollback_cuts_attention", "rollback_resets_the_state"),
    "a_drop_empties_the_sequence": ("drop_leaves_the_state_behind",),
    "a_rollback_of_everything_empties_the_sequence": ("drop_leaves_the_state_behind",),
    "removing_a_range_without_tokens_changes_nothing": ("trim_of_nothing_refused",),
    "removing_the_tail_is_a_rollback": ("rollback_leaves_keys_behind",),
    "keep_empties_every_other_sequence": ("keep_spares_the_next_sequence",),
    "a_share_makes_an_independent_copy": ("shared_cell_written_in_place", "share_forgets_attention", "ring_share_forgets_index"),
    "a_share_replaces_what_was_there": ("share_leaves_out_the_newest_token",),
    "a_share_of_a_pending_rollback_shares_what_is_left": ("pending_rollback_lost_on_share",),
    "a_rollback_leaves_sharers_alone": ("rollback_binds_sharers",),
    "after_a_share_each_goes_back_to_its_own_states": ("ring_leaves_its_states_behind", "ring_leaves_its_oldest_state_behind"),
    "forgetting_a_sharer_leaves_the_other": ("shared_cell_freed_with_its_first_owner", "shared_cells_not_counted"),
    "a_shift_moves_positions_and_no_output": ("shift_turns_new_keys_only",),
    "a_shift_leaves_sharers_alone": ("shift_moves_sharers",),
    "divided_positions_are_right_until_it_is_empty": ("division_rounds_up",),
    "a_restore_brings_back_what_was_saved": ("restore_refuses_another_sequence", "restore_clears_everyones_keys"),
    "a_save_of_a_pending_rollback_saves_what_is_left": ("save_forgets_pending_rollback",),
    "a_shared_sequence_is_saved_and_restored": ("restore_clears_everyones_keys",),
    "a_saved_sequence_survives_a_reopen": ("save_forgets_the_convolution",),
    "restored_snapshots_can_be_gone_back_to": ("saved_snapshots_numbered_backwards",),
    "after_a_restore_it_goes_back_to_what_was_saved": ("restored_cell_keeps_old_planes", "ring_restore_claims_depth"),
    "a_truncated_save_is_refused_and_changes_nothing": ("damaged_state_accepted", "refused_restore_leaves_a_half"),
    "a_save_of_another_model_is_refused": ("restore_says_yes_and_does_nothing",),
    "a_damaged_save_harms_nobody_else": ("drop_leaves_the_state_behind",),
    "a_partial_save_is_restored_where_it_was_taken": ("partial_restore_keeps_later_keys",),
    "a_whole_session_is_saved_and_restored": ("restore_all_gives_everyone_the_same_state",),
    "a_reopened_session_is_empty": ("every_sequence_reads_the_first_ones_state",),
}
"""Test -> mutants that fail it, and whose fixed twins pass it."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Divergences are not reduced: that is tested where the whole is."""
    use_one_thread()
    monkeypatch.setattr(Conformance, "finding", lambda self, trial: conformance._finding(trial, trial, (), self.session.bench, 1, 1))
    monkeypatch.chdir(tmp_path)


def contract_of(target: Target, family: str) -> _Contract:
    bench, model = Bench(target), Model(family)
    bench.set_noise({model: Noise(0.0, 1e-4, 0)})
    return _Contract(Conformance(conformance.Session(bench, None, {}), model, CacheConfiguration(), Place("here", Path("out"))))


def result_of(name: str, target: Target, family: str) -> str:
    """What a test of the suite came to: passed, skipped and why, or the kind of the divergence."""
    suite: Any = object.__new__(ConformanceSuite)
    try:
        getattr(suite, f"test_{name}")(contract_of(target, family))
    except pytest.skip.Exception as why:
        return f"skipped: {why}"
    except Diverged as wrong:
        return wrong.shown[0].finding.verdict.kind
    except Misused as wrong:
        return f"misused: {wrong}"
    return "passed"


# --- every row has its tests -----------------------------------------------------------------------------------------------------


def test_every_row_of_the_contract_has_a_test() -> None:
    page = (ROOT / "docs" / "contract.md").read_text()
    operations = [
        line.removeprefix("| ") for line in page.split("## Operations")[1].split("## The rollback")[0].splitlines() if line.startswith("| ")
    ][1:]
    rules = [line.removeprefix("| ") for line in page.split("## Rules")[1].split("## Operations")[0].splitlines() if line.startswith("| G")]
    rows = [row for row in operations if row] + rules
    keys = [[key for key in TESTS_OF_ROWS if row.startswith(key)] for row in rows]
    assert [row[:40] for row, found in zip(rows, keys, strict=True) if len(found) != 1] == []
    assert {found[0] for found in keys} == set(TESTS_OF_ROWS)


def test_every_test_of_the_suite_is_of_a_row() -> None:
    named = [f"test_{name}" for names in TESTS_OF_ROWS.values() for name in names]
    assert sorted(named) == ROWS


def test_the_page_names_every_test() -> None:
    page = (ROOT / "docs" / "pytest.md").read_text()
    assert [name for name in (*ROWS, "test_fuzz") if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", [name.removeprefix("test_") for name in ROWS])
def test_our_own_caches_pass(name: str) -> None:
    results = [result_of(name, load_target(target), family) for target in ("numba", "numba-ring") for family in ("mamba2", "lfm2")]
    assert [result for result in results if result != "passed" and not result.startswith("skipped: ")] == []
    if name not in ("a_share_of_a_part_is_refused", "a_cancelled_decode_keeps_a_prefix", "a_save_on_the_device_is_restored"):
        assert "passed" in results


# --- every test can fail -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mutant"), [(name, mutant) for name, mutants in KILLED_BY.items() for mutant in mutants])
def test_a_mutant_fails_the_test_of_its_row(name: str, mutant: str) -> None:
    wrong = MUTANTS[mutant]
    result = result_of(name, MutantTarget(wrong), wrong.family)
    assert result != "passed"
    assert not result.startswith("skipped")
    fixed = result_of(name, MutantTarget(wrong, is_faulty=False), wrong.family)
    assert fixed == "passed" or fixed.startswith("skipped")


class Wrong:
    """A right session, but for the methods that are given."""

    def __init__(self, session: Any, methods: dict[str, Callable[..., Any]], **declared: bool) -> None:
        self.session, self.methods = session, methods
        self.capabilities = msgspec.structs.replace(session.capabilities, **declared)

    def __getattr__(self, name: str) -> Any:
        if name in self.methods:
            return lambda *arguments: self.methods[name](self.session, *arguments)
        return getattr(self.session, name)


def wrong_target(within: str, methods: dict[str, Callable[..., Any]], **declared: bool) -> Target:
    right = load_target(within)
    return OpenedTarget(lambda model, configuration: Wrong(right.open(model, configuration), methods, **declared))


def _shares_all(session: Any, source: int, destination: int, start: int, end: int) -> Outcome:
    return session.share(source, destination, OPEN, OPEN)


def _keeps_a_token(session: Any, data: bool) -> Outcome:
    session.remove(0, 1, OPEN)
    return ACCEPTED


def _takes_other_tokens(session: Any, batch: Any, at: int) -> Any:
    decoded = session.decode(msgspec.structs.replace(batch, tokens=batch.tokens ^ 1))
    return msgspec.structs.replace(decoded, outcome=Outcome("cancelled"), rows=None)


def _does_nothing_with_part(session: Any, sequence: int, start: int, end: int) -> Outcome:
    last = session.positions()[sequence][1]
    return ACCEPTED if 0 <= end <= last else session.remove(sequence, start, end)


def _coupled_one_by_one(session: Any, batch: Any) -> Any:
    lowest = tuple((min(owners),) for owners in batch.sequences)
    return session.decode(msgspec.structs.replace(batch, sequences=lowest))


def _saves_and_clears(session: Any, sequence: int, partial: bool, device: bool) -> Any:
    answer = session.save(sequence, partial, False)
    session.remove(sequence, 0, OPEN)
    return answer


PLANTED: dict[str, tuple[Target, str]] = {
    "a_share_of_a_part_is_refused": (wrong_target("numba", {"share": _shares_all}, partial_share=True), "false-success"),
    "a_clear_empties_everything": (wrong_target("numba", {"clear": _keeps_a_token}), "wrong-position"),
    "a_cancelled_decode_keeps_a_prefix": (wrong_target("numba", {"cancel": _takes_other_tokens}, cancel=True), "wrong-output"),
    "removing_the_middle_is_refused": (wrong_target("numba", {"remove": _does_nothing_with_part}), "false-success"),
    "tokens_of_unequal_sequences_are_refused": (wrong_target("numba", {"decode": _coupled_one_by_one}), "false-success"),
    "a_save_is_accepted_and_changes_nothing": (wrong_target("numba", {"save": _saves_and_clears}), "wrong-position"),
    "a_save_on_the_device_is_restored": (wrong_target("numba", {"save": _saves_and_clears}, device=True), "wrong-position"),
}  # fmt: skip
"""Test -> a wrong target of a fault that no mutant has, and the kind of its divergence."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_fails_the_test_of_its_row(name: str) -> None:
    target, kind = PLANTED[name]
    assert result_of(name, target, "mamba2") == kind


def test_every_test_of_a_row_is_seen_to_fail() -> None:
    seen = {*KILLED_BY, *PLANTED, "a_bad_argument_is_a_clear_error"}
    assert {f"test_{name}" for name in seen} == set(ROWS)


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ({"remove": lambda session, *_: ACCEPTED}, "must be a UsageError that names `sequence`, and it was answered accepted"),
        (
            {"decode": lambda session, batch: [][0]},
            "a decode of token 64 must be a UsageError that names `tokens`, and it raised IndexError",
        ),
    ],
)
def test_a_bad_argument_that_is_no_clear_error_fails(methods: dict[str, Callable[..., Any]], said: str) -> None:
    assert said in result_of("a_bad_argument_is_a_clear_error", wrong_target("numba", methods), "mamba2")


# --- what is not asked -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "target", "why"),
    [
        ("a_cancelled_decode_keeps_a_prefix", "numba", "this target cannot cancel a decode"),
        ("a_share_of_a_part_is_refused", "numba", "this target cannot share a range"),
        ("a_save_on_the_device_is_restored", "numba", "this target has no such save"),
        ("restored_snapshots_can_be_gone_back_to", "numba", "the target's saves carry no snapshots"),
        ("up_to_its_capacity_every_decode_is_accepted", "numba", "the target takes any number of tokens"),
    ],
)
def test_what_the_target_does_not_offer_is_skipped_with_the_reason(name: str, target: str, why: str) -> None:
    assert result_of(name, load_target(target), "mamba2") == f"skipped: {why}"


def test_a_cache_that_cannot_save_is_asked_for_no_save() -> None:
    target = wrong_target("numba", {}, save=False)
    saving = [name for name in ROWS if re.search("save|restore", name) and "whole_session" not in name]
    assert len(saving) > 8
    assert {result_of(name.removeprefix("test_"), target, "mamba2") for name in saving} <= {
        "skipped: this target cannot save a sequence", "skipped: the target's saves carry no snapshots"
    }  # fmt: skip


def test_a_target_that_takes_one_token_at_a_time_is_tested_with_such_decodes() -> None:
    right = load_target("numba")

    class OneByOne(Wrong):
        def __init__(self, model: Model, configuration: CacheConfiguration) -> None:
            session = right.open(model, configuration)
            super().__init__(session, {})
            self.capabilities = msgspec.structs.replace(session.capabilities, n_batch=1)

    target = OpenedTarget(OneByOne)
    assert result_of("a_share_makes_an_independent_copy", target, "mamba2") == "passed"
    assert result_of("a_long_batch_is_the_same_in_small_ubatches", target, "mamba2") == "passed"


def test_a_cache_of_two_sequences_is_not_asked_for_three() -> None:
    target = load_target("numba")
    bench, model = Bench(target), Model("mamba2")
    bench.set_noise({model: Noise(0.0, 1e-4, 0)})
    session = conformance.Session(bench, None, {})
    held = Conformance(session, model, CacheConfiguration(n_seq_max=2), Place("here", Path("out")))
    with pytest.raises(conformance.NotAsked, match="it takes 3 sequences, and the cache has 2"):
        held.hold("decode", "decode 2:1")


def test_a_method_that_is_no_fixture_is_said() -> None:
    with pytest.raises(TypeError, match=r"put `@pytest\.fixture` above it"):
        type("TestMine", (ConformanceSuite,), {"target": lambda self: "numba"})


def test_families_are_those_that_the_target_runs() -> None:
    only = type("Only", (), {"families": ("mamba",), "decode": None, "positions": None})
    assert type("TestOnly", (ConformanceSuite,), {"target": only}).families == ("mamba",)
    assert type("TestBoth", (ConformanceSuite,), {"target": load_target("numba")}).families == ("mamba2", "lfm2")
    assert type("TestSaid", (ConformanceSuite,), {"target": only, "families": ("rwkv7",)}).families == ("rwkv7",)


def test_an_unusable_target_is_said() -> None:
    with pytest.raises(conformance.CouldNotTest, match="must be a target, its name"):
        conformance.opened_bench(7, __name__)
    with pytest.raises(conformance.CouldNotTest, match="there is no target `nowhere`"):
        conformance.opened_bench("nowhere", __name__)
    with pytest.raises(UsageError):
        load_target("json:JSONDecoder")


def test_a_target_is_named_as_a_command_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert conformance.named("numba", __name__) == ("numba", "")
    assert conformance.named(load_target("numba-ring"), __name__) == ("statedrift.targets.numba:RING", "")
    assert conformance.named(lambda model, configuration: None, __name__) is None
    folder = tmp_path / "below"
    folder.mkdir()
    (folder / "cache_of_mine.py").write_text("class Mine: pass\n\n\ndef opened(model, configuration): return Mine()\n")
    monkeypatch.syspath_prepend(str(folder))
    import cache_of_mine  # type: ignore[import-not-found]

    assert conformance.named(cache_of_mine.Mine, __name__) == ("cache_of_mine:Mine", "below")
    assert conformance.named(cache_of_mine.opened, __name__) == ("cache_of_mine:opened", "below")
    assert conformance.named("cache_of_mine:Mine", __name__) == ("cache_of_mine:Mine", "below")
    monkeypatch.chdir(folder)
    assert conformance.named(cache_of_mine.Mine, __name__) == ("cache_of_mine:Mine", "")
