"""The contract as tests of a cache: a class that a test class inherits.

Rules
- One test for a row of docs/contract.md, or a few; each names its row in its first line. What it does is in conformance.py.
- A row that the target does not offer is skipped, with the reason; a target that cannot be judged fails.
- A light module: what needs PyTorch is imported when the first test runs.
- A subclass says what is tested by `target`: a fixture, or the thing itself.
Source: docs/contract.md; docs/pytest.md.
"""

import contextlib
import inspect
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

if TYPE_CHECKING:
    from ..spec.models import Model
    from ..spec.target import Capabilities
    from ..store.campaigns import Noise
    from .conformance import Conformance, Place, Session

SECONDS = 10.0
OUT = "runs/pytest"
FAMILIES_DEFAULT = ("mamba2", "lfm2")
"""A purely recurrent model, and one with attention beside it."""
FUZZED = "statedrift"
"""The name of the property of a test under which a campaign's numbers stand."""
_ROLLBACKS = (
    "decode 0:4; rollback 0 3",
    "decode 0:6; decode 0:4; rollback 0 2; decode 0:2",
    "decode 0:1; decode 0:1; decode 0:1; rollback 0 1",
    "decode 0:3; decode 0:2; rollback 0 4",
    "decode 0:5 1:4; rollback 1 2; decode 0:2 1:1",
    "decode 0:4 1:4; rollback 0 2; rollback 1 1; decode 0:1 1:1",
    "decode 0:4; rollback 0 1; rollback 0 1",
    "decode 0:5; decode 0:1; rollback 0 1; decode 0:3; rollback 0 2",
)
_NO_SUCH_ROLLBACK = "the target promises no rollback (its guarantee is `none`)"
_ALL_REFUSED = "the target refuses every such rollback"


def _is_fixture(value: object) -> bool:
    return type(value).__name__ == "FixtureFunctionDefinition" or hasattr(value, "_pytestfixturefunction")


def _fixture_of(value: object, class_name: str) -> Any:
    """A fixture that gives the value."""
    if isinstance(value, staticmethod):
        value = value.__func__
    if inspect.isfunction(value) and next(iter(inspect.signature(value).parameters), None) == "self":
        raise TypeError(f"`{class_name}.target` is a method and no fixture; put `@pytest.fixture` above it")

    def target(self: "ConformanceSuite") -> object:
        return value

    return pytest.fixture(target)


class ConformanceSuite:
    """Inherit from it in a class whose name pytest collects, and say what is tested.

    target    a fixture, or an attribute: a target, its name (`module:attribute`), a class of sessions, or a function that opens them
    families  the families whose models the tests use; left out, those of a recurrent model and a hybrid, or the first that the target runs
    caches    cache configurations, as on a program's `cache` line; every row's test runs in each. The fuzz test draws its own
    program_seconds  how long a program may take before a target in a child process is said to hang
    """

    families: ClassVar[Sequence[str]] = FAMILIES_DEFAULT
    caches: ClassVar[Sequence[str]] = ("",)
    program_seconds: ClassVar[float] = 60.0

    def __init_subclass__(cls, **words: Any) -> None:
        super().__init_subclass__(**words)
        given = vars(cls).get("target")
        if given is not None and not _is_fixture(given):
            cls.target = _fixture_of(given, cls.__name__)  # type: ignore[method-assign]
            offered = tuple(getattr(given, "families", ()))
            if offered and cls.families is FAMILIES_DEFAULT:
                cls.families = tuple(family for family in FAMILIES_DEFAULT if family in offered) or offered[:1]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every family in every cache configuration."""
        if isinstance(self.families, str) or not self.families or isinstance(self.caches, str) or not self.caches:
            raise pytest.UsageError(
                f'{type(self).__name__}: `families` and `caches` are tuples that are not empty, as in `families = ("mamba2",)`'
            )
        if "contract" in metafunc.fixturenames:
            settings = [(family, cache) for family in self.families for cache in self.caches]
            names = ["-".join(filter(None, (family, cache.replace(" ", ",")))) for family, cache in settings]
            metafunc.parametrize("contract", settings, ids=names, indirect=True)

    @pytest.fixture
    def target(self) -> Any:
        """What is tested."""
        pytest.fail(
            f'{type(self).__name__} does not say what it tests: give it `target = MyCache`, a name as in `target = "my_cache:TARGET"`, '
            "or a fixture of that name",
            pytrace=False,
        )

    @pytest.fixture
    def statedrift_session(self, request: pytest.FixtureRequest, target: Any) -> "Iterator[Session]":
        """The target, ready to try programs; what was measured of it in this class stays."""
        with _judgements(), _session(request, target) as session:
            if session.bench.sandbox is not None:
                session.bench.sandbox.program_seconds_max = self.program_seconds
            yield session

    @pytest.fixture
    def contract(self, request: pytest.FixtureRequest, statedrift_session: "Session") -> "_Contract":
        """The contract, held against the target in one family and cache configuration."""
        from ..spec.models import Model
        from ..spec.programs import parse_program
        from .conformance import Conformance

        family, cache = request.param
        with _judgements():
            configuration = parse_program(f"model {family}; cache {cache}" if cache else f"model {family}").cache
            statedrift_session.prepare(Model(family), configuration)
        place, only, undocumented = _place(request), _only(request.config), _counts_undocumented(request.config)
        return _Contract(Conformance(statedrift_session, Model(family), configuration, place, only, undocumented))

    # --- decode ------------------------------------------------------------------------------------------------------------

    def test_a_decode_appends_its_tokens(self, contract: "_Contract") -> None:
        """decode: one sequence, all at once, token by token, and on and on."""
        contract.hold("decode", "decode 0:7", "decode 0:1; decode 0:1; decode 0:1", "decode 0:5; decode 0:1; decode 0:3")

    def test_only_the_last_outputs_are_asked_for(self, contract: "_Contract") -> None:
        """decode: a row of the last token of every sequence alone."""
        contract.hold("decode", "decode 0:5 1:2; decode 1:3 0:1", outputs="last")

    def test_hidden_states_are_right(self, contract: "_Contract") -> None:
        """decode: hidden states in place of logits."""
        contract.hold("decode", "decode 0:4; decode 0:2 1:1", outputs="embeddings")

    def test_sequences_of_a_batch_do_not_disturb_each_other(self, contract: "_Contract") -> None:
        """G3, G5: an operation on one sequence changes no output of another; decoded together is as decoded apart."""
        contract.hold(
            "decode", "decode 0:4 1:2; decode 1:1 0:3; decode 2:2 0:1 1:1", "decode 0:2 1:1 0:1", "decode 1:3; decode 0:2; decode 0:1 1:1",
            "decode 2:1 0:1 1:1; decode 1:1 2:1 0:1; decode 0:1 1:1 2:1",
        )  # fmt: skip

    def test_the_order_of_a_batch_changes_nothing(self, contract: "_Contract") -> None:
        """G5: tokens of several sequences in turns."""
        contract.hold("decode", "decode 0:4 1:2 2:5; decode 2:3 0:3", interleave=1)

    def test_a_long_batch_is_the_same_in_small_ubatches(self, contract: "_Contract") -> None:
        """G5: how a batch is cut into ubatches changes nothing."""
        contract.hold("decode", "decode 0:11 1:6; decode 0:5; decode 1:4 0:1", "decode 0:4; decode 0:5 1:3", n_ubatch=4)

    def test_memory_that_was_used_before_does_not_show(self, contract: "_Contract") -> None:
        """G5: a session over used memory, cleared without its data, is as a fresh one."""
        contract.hold("decode", "decode 0:3; decode 1:2", "decode 1:1 0:2; decode 1:4", start="dirty")

    def test_poisoned_memory_does_not_show(self, contract: "_Contract") -> None:
        """G5: nor do NaNs in memory that nobody wrote."""
        contract.need(contract.target.poison, "the target cannot poison its memory")
        contract.hold("decode", "decode 0:3; decode 1:2", "decode 1:1 0:2; decode 1:4", start="poison")

    def test_beyond_its_capacity_a_decode_happens_wholly_or_not_at_all(self, contract: "_Contract") -> None:
        """decode: beyond capacity either answer is right; refused, none of the batch happened."""
        contract.hold(
            "decode", "decode 0:14; decode 1:5; decode 0:6 1:1; decode 0:1", "decode 0:200; decode 1:3; decode 0:100 1:2", demand="may",
            otherwise="the target takes any number of tokens", n_ctx=16,
        )  # fmt: skip

    def test_up_to_its_capacity_every_decode_is_accepted(self, contract: "_Contract") -> None:
        """decode: must be accepted while the tokens fit; in one pool for all sequences a shared token counts once."""
        contract.need(bool(contract.capabilities.n_ctx), "the target takes any number of tokens")
        texts = (
            "decode 0:8; decode 1:8",
            "decode 0:3; share 0 1; decode 0:5; decode 1:5",
            "decode 0:12; decode 1:4",
            "decode 0:10; share 0 1; decode 0:6",
        )
        contract.hold("decode", *texts, n_seq_max=2, n_ctx=8, unified=(0, 1))

    def test_tokens_of_several_sequences_count_for_each(self, contract: "_Contract") -> None:
        """decode with a token of several sequences: accepted where their logs are equal, empty included."""
        contract.hold(
            "decode-coupled",
            "decode 0+1:3; decode 0:1; decode 1:2/1",
            "decode 0:4; share 0 1; decode 0+1:2; decode 1:1",
            demand="must-accept",
            unified=(0, 1),
        )

    def test_tokens_of_unequal_sequences_are_refused(self, contract: "_Contract") -> None:
        """decode with a token of several sequences: refused where their lengths differ."""
        contract.hold(
            "decode-coupled", "decode 0:3; decode 1:2; decode 0+1:1", "decode 1:2; decode 0+1:3", demand="must-refuse", unified=(0, 1)
        )

    def test_a_cancelled_decode_keeps_a_prefix(self, contract: "_Contract") -> None:
        """cancel: each sequence keeps a prefix of its new tokens, or is empty, and going on from there is right."""
        contract.hold(
            "cancel",
            "decode 0:3; decode 2:2; cancel 0:20 1:4 at=5; decode 0:2",
            "decode 0:3; cancel 0:2 at=0; decode 0:1",
            "cancel 0:3 at=1000",
        )

    # --- forgetting ----------------------------------------------------------------------------------------------------------

    def test_a_promised_rollback_is_accepted(self, contract: "_Contract") -> None:
        """rollback: must be accepted inside the guarantee that the target declares."""
        contract.hold("rollback", *_ROLLBACKS, demand="must-accept", otherwise=_NO_SUCH_ROLLBACK)

    def test_an_accepted_rollback_takes_back_its_tokens(self, contract: "_Contract") -> None:
        """rollback: the last tokens are gone, and no others; also where nothing was promised."""
        contract.hold("rollback", *_ROLLBACKS, answer="accepted", otherwise=_ALL_REFUSED)

    def test_a_refused_rollback_changes_nothing(self, contract: "_Contract") -> None:
        """G1: a refused operation changes no position and no later output."""
        contract.hold("rollback", *_ROLLBACKS, answer="refused", otherwise="the target accepts every such rollback")

    def test_a_rollback_reaches_into_an_earlier_ubatch(self, contract: "_Contract") -> None:
        """rollback, G5: how the decode was cut into ubatches changes nothing."""
        contract.hold("rollback", "decode 0:6; rollback 0 3; decode 0:1", "decode 0:7 1:2; rollback 0 3; decode 1:1 0:1", n_ubatch=4)

    def test_a_drop_empties_the_sequence(self, contract: "_Contract") -> None:
        """drop, and rollback of everything: must be accepted."""
        contract.hold("drop", "decode 0:4 1:3; drop 0; decode 0:2/1 1:1", "drop 0")

    def test_a_rollback_of_everything_empties_the_sequence(self, contract: "_Contract") -> None:
        """drop, and rollback of everything: must be accepted."""
        contract.hold("rollback", "decode 0:4 1:3; rollback 0 4; decode 0:2/1 1:1", "decode 0:2; rollback 0 9; decode 1:1")

    def test_removing_a_range_without_tokens_changes_nothing(self, contract: "_Contract") -> None:
        """remove of a range that holds no token: must be accepted."""
        contract.hold("remove", "decode 0:4; remove 0 4 9; decode 0:1", "decode 0:4; remove 0 7 -1; decode 0:1", "decode 0:2; remove 1 0 5")

    def test_removing_the_middle_is_refused(self, contract: "_Contract") -> None:
        """remove of a range that leaves the last token: must be refused, where there is a recurrent layer."""
        contract.hold(
            "remove", "decode 0:6; remove 0 2 4; decode 0:1", "decode 0:6; remove 0 0 3; decode 0:1",
            demand="must-refuse", otherwise="the model has no recurrent layer",
        )  # fmt: skip

    def test_removing_the_tail_is_a_rollback(self, contract: "_Contract") -> None:
        """remove of a range that covers the tail, or all: as rollback, or drop."""
        contract.hold(
            "remove", "decode 0:5; remove 0 3 -1; decode 0:1", "decode 0:5; remove 0 3 5; decode 0:1", "decode 0:5; remove 0 0 5; decode 0:2/1",
            "decode 0:5; remove 0 -1 -1; decode 0:2/1",
        )  # fmt: skip

    def test_keep_empties_every_other_sequence(self, contract: "_Contract") -> None:
        """keep: must be accepted."""
        contract.hold("keep", "decode 0:4 1:3 2:2; keep 1; decode 1:1 0:2/1", "decode 0:2; keep 1")

    def test_a_clear_empties_everything(self, contract: "_Contract") -> None:
        """clear: must be accepted."""
        contract.hold("clear", "decode 0:4 1:3; clear; decode 0:2/1 1:1/1", "clear; decode 0:1")

    # --- sharing ---------------------------------------------------------------------------------------------------------------

    def test_a_share_makes_an_independent_copy(self, contract: "_Contract") -> None:
        """share: must be accepted; afterwards the two are independent."""
        contract.hold(
            "share", "decode 0:4; share 0 1; decode 0:2; decode 1:3/1; decode 0:1 1:1", "decode 0:2; share 0 1; share 1 2; decode 2:2 1:1",
            "decode 0:1; share 0 1; decode 1:1; decode 0:1", "decode 0:2; share 0 0; decode 0:1", unified=(0, 1))  # fmt: skip

    def test_a_share_replaces_what_was_there(self, contract: "_Contract") -> None:
        """share: what the destination held is dropped, also for an empty source."""
        contract.hold("share", "decode 0:4; decode 1:6; share 0 1; decode 1:2 0:1", "decode 1:3; share 0 1; decode 1:2/1", unified=(0, 1))

    def test_a_share_of_a_pending_rollback_shares_what_is_left(self, contract: "_Contract") -> None:
        """share: must be accepted, also while a rollback of the source is pending."""
        contract.hold(
            "rollback",
            "decode 0:5; rollback 0 2; share 0 1; decode 1:2/1; decode 0:1/2",
            "decode 0:3; rollback 0 1; share 0 1; drop 0; decode 1:1",
            answer="accepted",
            otherwise=_ALL_REFUSED,
        )

    def test_a_rollback_leaves_sharers_alone(self, contract: "_Contract") -> None:
        """G3: who shares a state is not taken back with it."""
        contract.hold(
            "rollback",
            "decode 0:4; share 0 1; rollback 0 2; decode 1:2; decode 0:1",
            "decode 0:4; share 0 1; rollback 1 1; decode 0:1",
            "decode 0:4; share 0 1; rollback 0 1; rollback 1 1; decode 1:1; decode 0:1",
            "decode 0:4; share 0 1; rollback 1 2; rollback 0 1; decode 0:1; decode 1:1",
            answer="accepted",
            otherwise=_ALL_REFUSED,
        )

    def test_after_a_share_each_goes_back_to_its_own_states(self, contract: "_Contract") -> None:
        """share, rollback: of a sequence that went on alone; either answer may be right, and what follows shows it."""
        contract.hold(
            "rollback", "decode 0:1; share 0 1; decode 1:1; rollback 1 1", "decode 0:2; share 0 1; decode 1:1; rollback 1 2",
            "decode 0:3; share 0 1; decode 0:2; rollback 0 1; rollback 1 1", "decode 0:4 1:4; share 0 2; rollback 2 2; rollback 1 1; decode 1:1 2:1",
        )  # fmt: skip

    def test_forgetting_a_sharer_leaves_the_other(self, contract: "_Contract") -> None:
        """G3: nor is it forgotten with it, by drop, keep or a share onto it."""
        contract.hold(
            "share", "decode 0:2; share 0 1; drop 0; decode 2:2 1:1", "decode 0:3; share 0 1; keep 1; decode 2:2; decode 1:1",
            "decode 0:3 2:2; share 0 1; share 2 0; decode 1:1 0:1", "decode 0:2; share 0 1; share 1 2; drop 1; decode 0:1 2:1", unified=(0, 1))  # fmt: skip

    def test_a_share_of_a_part_is_refused(self, contract: "_Contract") -> None:
        """share of a range that does not cover the source: must be refused, where there is a recurrent layer."""
        contract.hold(
            "share-range", "decode 0:6; share 0 1 0 3; decode 0:1", "decode 0:6; decode 1:2; share 0 1 2 6; decode 1:1", demand="must-refuse",
            otherwise="the model has no recurrent layer",
        )  # fmt: skip

    # --- positions -------------------------------------------------------------------------------------------------------------

    def test_a_shift_moves_positions_and_no_output(self, contract: "_Contract") -> None:
        """shift: every position moves, and outputs stay those of the log."""
        contract.hold(
            "shift",
            "decode 0:4 1:3; shift 0 5; decode 0:2 1:1",
            "decode 0:6; shift 0 3; shift 0 -3; decode 0:1",
        )

    def test_a_shift_leaves_sharers_alone(self, contract: "_Contract") -> None:
        """G3: who shares a state is not moved with it."""
        contract.hold("shift", "decode 0:4; share 0 1; shift 0 3; decode 0:1; decode 1:1")

    def test_divided_positions_are_right_until_it_is_empty(self, contract: "_Contract") -> None:
        """divide: every position is divided."""
        contract.hold("divide", "decode 0:6 1:2; divide 0 2; decode 0:2 1:1; drop 0; decode 0:2/1")

    # --- saved states ----------------------------------------------------------------------------------------------------------

    def test_a_save_is_accepted_and_changes_nothing(self, contract: "_Contract") -> None:
        """save: must be accepted in every state, also empty."""
        contract.hold("save", "decode 0:4 1:2; save 0 a; decode 0:2 1:1", "save 0 a; decode 0:2")

    def test_a_restore_brings_back_what_was_saved(self, contract: "_Contract") -> None:
        """restore: must be accepted into any sequence, whatever was there before."""
        contract.hold(
            "restore", "decode 0:4; save 0 a; decode 0:3; restore a 0; decode 0:1/1", "decode 0:4; save 0 a; restore a 2; decode 2:2",
            "decode 0:2 1:6; save 0 a; restore a 1; decode 1:1 0:1", "save 0 a; decode 0:2; restore a 0; decode 0:1/1",
        )  # fmt: skip

    def test_a_save_of_a_pending_rollback_saves_what_is_left(self, contract: "_Contract") -> None:
        """save: must be accepted also with a rollback pending."""
        contract.hold(
            "rollback",
            "decode 0:4; rollback 0 2; save 0 a; restore a 1; decode 1:1; decode 0:1",
            answer="accepted",
            otherwise=_ALL_REFUSED,
            needs=("save",),
        )

    def test_a_shared_sequence_is_saved_and_restored(self, contract: "_Contract") -> None:
        """save, restore: of a shared sequence, and onto one, which leaves the other."""
        contract.hold(
            "restore",
            "decode 0:4; share 0 1; save 1 a; decode 0:1; restore a 2; decode 2:2",
            "decode 0:3; share 0 1; save 0 a; decode 0:1; restore a 1; decode 1:1",
            "decode 0:3 2:2; share 0 1; save 2 a; restore a 1; decode 0:1 1:1",
        )

    def test_a_saved_sequence_survives_a_reopen(self, contract: "_Contract") -> None:
        """restore: into any session."""
        contract.hold(
            "restore", "decode 0:4; save 0 a; reopen; restore a 1; decode 1:2", "decode 0:3; save 0 a; reopen; decode 0:1; restore a 0"
        )

    def test_after_a_restore_it_goes_back_to_what_was_saved(self, contract: "_Contract") -> None:
        """restore, rollback: never to what was there before; either answer may be right."""
        contract.hold(
            "rollback", "decode 0:3; save 0 a; restore a 1; rollback 1 1", "decode 0:4; decode 1:4; save 0 a; restore a 1; rollback 1 2",
            "decode 0:2; save 0 a; decode 0:3; restore a 0; rollback 0 1", needs=("restore",),
        )  # fmt: skip

    def test_restored_snapshots_can_be_gone_back_to(self, contract: "_Contract") -> None:
        """restore: gives back the depth that was saved, where saves carry snapshots."""
        contract.need(contract.capabilities.save and contract.capabilities.saves_snapshots, "the target's saves carry no snapshots")
        contract.hold(
            "rollback",
            "decode 0:4; save 0 a; restore a 1; rollback 1 2; decode 1:1",
            "decode 0:3; save 0 a; restore a 1; rollback 1 1; decode 1:1",
            demand="must-accept",
            otherwise=_NO_SUCH_ROLLBACK,
        )

    def test_a_truncated_save_is_refused_and_changes_nothing(self, contract: "_Contract") -> None:
        """refused restore: the destination is unchanged or empty in every part at once, no other sequence changes."""
        contract.hold(
            "restore", "decode 0:4 1:3; save 0 a; damage a truncate 1; restore a 1; decode 1:1 0:1",
            "decode 0:4; save 0 a; damage a truncate 40; restore a 2; decode 2:1 0:1", "decode 0:4; save 1 a; damage a truncate 1; restore a 0; decode 0:1",
        )  # fmt: skip

    def test_a_save_of_another_model_is_refused(self, contract: "_Contract") -> None:
        """restore of a damaged blob: one of the same family with doubled width must be refused."""
        contract.hold("restore", "decode 0:4 1:3; save 0 a; damage a foreign; restore a 1; decode 1:1 0:1", demand="must-refuse")

    def test_a_damaged_save_harms_nobody_else(self, contract: "_Contract") -> None:
        """restore of a damaged blob: either answer is right, never a crash, and all others stay checked."""
        contract.hold(
            "restore", "decode 0:4 1:3; save 0 a; damage a header; restore a 1; decode 0:1; drop 1; decode 1:1/1",
            "decode 0:4 1:3; save 0 a; damage a flip 40; restore a 1; decode 0:1; drop 1; decode 1:1/1",
        )  # fmt: skip

    def test_a_partial_save_is_restored_where_it_was_taken(self, contract: "_Contract") -> None:
        """restore of a partial blob: the saved log comes back, and the attention part is cut to it."""
        contract.hold(
            "save-partial",
            "decode 0:4; save 0 a partial; decode 0:3; restore a 0; decode 0:2/1",
            "decode 0:4 1:2; save 0 a partial; restore a 0; decode 0:1 1:1",
        )

    def test_a_save_on_the_device_is_restored(self, contract: "_Contract") -> None:
        """restore of a device-bound blob: holds in its session."""
        contract.hold("save-device", "decode 0:4; save 0 a device; decode 0:3; restore a 0; decode 0:2/1")

    def test_a_whole_session_is_saved_and_restored(self, contract: "_Contract") -> None:
        """save_all, restore_all: as save and restore, for the whole session."""
        contract.hold(
            "restore_all", "decode 0:4 1:2; save_all a; decode 0:3; drop 1; decode 2:1; restore_all a; decode 0:1/1 1:1/1 2:1/1",
            "decode 0:3 1:2; save_all a; reopen; restore_all a; decode 1:1; decode 0:1", "save_all a; decode 0:2; restore_all a; decode 0:1/1",
            "decode 0:1 1:1; save_all a; restore_all a; decode 1:1",
            "decode 0:3; save_all a; damage a truncate 1; restore_all a; decode 0:1",
        )  # fmt: skip

    def test_a_reopened_session_is_empty(self, contract: "_Contract") -> None:
        """reopen: a new session of the same model, in the same or a changed configuration."""
        contract.hold("reopen", "decode 0:4 1:2; reopen; decode 0:2/1", "decode 0:4; reopen n_seq_max=2 n_rs_seq=0; decode 1:2 0:1")

    # --- the rest --------------------------------------------------------------------------------------------------------------

    def test_a_bad_argument_is_a_clear_error(self, contract: "_Contract") -> None:
        """G6: an id or token out of range is a UsageError that names the argument, and nothing happened."""
        contract.refuses_bad_arguments()

    def test_fuzz(self, request: pytest.FixtureRequest, statedrift_session: "Session", record_property: Any) -> None:
        """Generated programs of all operations, for `--statedrift-seconds`."""
        from ..spec.configuration import CacheConfiguration
        from ..spec.models import Model
        from .conformance import Conformance, fuzz

        config = request.config
        seconds, undocumented = float(config.getoption("statedrift_seconds", SECONDS)), _counts_undocumented(config)
        with _judgements():
            for family in self.families:
                statedrift_session.prepare(Model(family), CacheConfiguration())
            if only := _only(config):
                Conformance(statedrift_session, Model(self.families[0]), CacheConfiguration(), _place(request), only, undocumented).hold("")
            elif not seconds:
                pytest.skip("left out (--statedrift-seconds 0)")
            else:
                seed = int(config.getoption("statedrift_seed", 0))
                fuzzed = fuzz(statedrift_session, self.families, seconds, seed, _place(request), undocumented)
                record_property(FUZZED, fuzzed.as_property())


# --- between pytest and conformance.py -------------------------------------------------------------------------------------------


class _Contract:
    """The contract, held against one target in one family and cache configuration, in a test: what is not asked skips it."""

    def __init__(self, conformance: "Conformance") -> None:
        self._conformance = conformance
        self.target = conformance.session.bench.target

    @property
    def capabilities(self) -> "Capabilities":
        """Of a session in this configuration."""
        with _judgements():
            return self._conformance.session.capabilities(self._conformance.model, self._conformance.cache)

    def hold(self, operation: str, *texts: str, **words: Any) -> None:
        """See `Conformance.hold`."""
        with _judgements():
            self._conformance.hold(operation, *texts, **words)

    def need(self, is_there: bool, otherwise: str) -> None:
        """Skip the test where something is not there."""
        if not is_there:
            pytest.skip(otherwise)

    def refuses_bad_arguments(self) -> None:
        """See `Conformance.refuse_bad_arguments`."""
        with _judgements():
            self._conformance.refuse_bad_arguments()


@contextlib.contextmanager
def _judgements() -> Iterator[None]:
    """Skip what is not asked; fail what cannot be tested. `Diverged` goes on as it is: the plugin shows it."""
    from ..spec.errors import UsageError
    from .conformance import CouldNotTest, NotAsked

    why, fault = "", ""
    try:
        yield
    except NotAsked as error:
        why = str(error)
    except UsageError as error:  # what the class or an option says
        fault = str(error)
    except CouldNotTest as error:
        fault = str(error) if str(error).startswith("could not test") else f"could not test: {error}"
    if fault:  # here, so that pytest shows it alone
        pytest.fail(fault, pytrace=False)
    if why:
        pytest.skip(why)


_Known = dict[tuple[object, ...], "dict[Model, Noise]"]
_NOISE = pytest.StashKey["_Known"]()
_BENCHES = pytest.StashKey["dict[str | type, Any]"]()


@contextlib.contextmanager
def _session(request: pytest.FixtureRequest, target: Any) -> "Iterator[Session]":
    """The session of a test. A named target's bench (a child process, where it needs one) stays until pytest ends; of another one a new
    bench is made for every test, as its fixture may make a new target, and what was measured is kept."""
    from .conformance import Session, opened_bench

    config = request.config
    module = request.module.__name__
    key = (module, request.cls.__qualname__, target if isinstance(target, str | type) else "", *_parameters(request))
    noise = config.stash.setdefault(_NOISE, {}).setdefault(key, {})
    benches = config.stash.setdefault(_BENCHES, {})
    is_kept = isinstance(target, str | type)
    if is_kept and target in benches:
        bench, command = benches[target]
        yield Session(bench, command, noise)
        return
    bench, command = opened_bench(target, module)
    if is_kept:
        benches[target] = bench, command
        config.add_cleanup(bench.close)
    try:
        yield Session(bench, command, noise)
    finally:
        if not is_kept:
            bench.close()


def _parameters(request: pytest.FixtureRequest) -> tuple[object, ...]:
    """Which of its parametrized fixtures' values a test has, but for the suite's own."""
    callspec = getattr(request.node, "callspec", None)
    indices = {} if callspec is None else callspec.indices
    return tuple(sorted((name, index) for name, index in indices.items() if name != "contract"))


def _counts_undocumented(config: pytest.Config) -> bool:
    return bool(config.getoption("statedrift_undocumented", False))


def _only(config: pytest.Config) -> tuple[str, ...]:
    program = config.getoption("statedrift_program", None)
    return () if program is None else (str(program),)


def _place(request: pytest.FixtureRequest) -> "Place":
    from .conformance import Place

    folder = Path(str(request.config.getoption("statedrift_out", OUT)))
    here = request.config.invocation_params.dir
    node = request.node.nodeid.partition("::")
    return Place(f"{os.path.relpath(request.path, here)}::{node[2]}", folder if folder.is_absolute() else here / folder)
