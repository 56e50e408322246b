"""What programs reach: pairs of operations, answers, the states that operations meet, and the edges of their numbers.

Rules
- Everything is read off the program, the answers and the positions, as a caller sees them; nothing off a cache's inside.
- An operation counts where it was *sent*: one that was skipped, or that the target does not offer, reaches nothing.
- It counts once for every sequence that it names; one that names none (clear, reopen, damage, save_all, restore_all) concerns all of them.
- Counting is cheap: a few hundredths of what a program costs to run (tests/quality/test_generation_reach.py holds it to that).

The states that an operation may meet, of a sequence it concerns:
- *pending*: an accepted rollback or removal left a part of its log, and no decode came since.
- *shared*: its state is that of one other sequence, or of several, by a share or by coupled tokens, and none of them went on since.
- *moved*: its newest decode was a batch of several sequences, and not the same ones in the same order as in its decode before. A cache that
  keeps a batch in a run of neighbouring cells has to move it there.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count

import msgspec

from ..spec.configuration import CacheConfiguration
from ..spec.families import dimensions_of, family_of
from ..spec.models import Model
from ..spec.operations import (
    OPERATION_NAMES,
    AnyOperation,
    Cancel,
    Clear,
    Damage,
    Decode,
    Divide,
    Drop,
    Item,
    Keep,
    Remove,
    Reopen,
    Restore,
    RestoreAll,
    Rollback,
    Save,
    SaveAll,
    Share,
    Shift,
)  # fmt: skip
from ..spec.programs import Program
from ..spec.target import Capabilities
from ..store.campaigns import Reach
from .execution import Run, Step

_CLASSES = (
    Decode, Cancel, Rollback, Remove, Drop, Share, Keep, Shift, Divide, Save, Restore, SaveAll, RestoreAll, Damage, Clear, Reopen,
)  # fmt: skip
_KIND_OF: dict[type, int] = {each: kind for kind, each in enumerate(_CLASSES)}
_KINDS = len(OPERATION_NAMES)
_DECODE, _CANCEL, _ROLLBACK, _REMOVE, _DROP, _SHARE, _KEEP, _SHIFT, _DIVIDE = range(9)
_SAVE, _RESTORE, _SAVE_ALL, _RESTORE_ALL, _DAMAGE, _CLEAR, _REOPEN = range(9, _KINDS)
_OPENING = _KINDS
"""The kind of what comes before a sequence's first operation."""
FIRST = "nothing"
"""What it is called."""

UNDECLARED = "not offered"
_WORDS = ("accepted", "refused", "cancelled", "skipped", "error", "crash", "hang", UNDECLARED)
_WORD_OF = {word: number for number, word in enumerate(_WORDS)}
_SKIPPED, _UNDECLARED = _WORD_OF["skipped"], _WORD_OF[UNDECLARED]

_ONTO, _ANOTHER = _KINDS, _KINDS + 1
ROLES = (*OPERATION_NAMES, "share onto", "keep another")
"""What an operation may be to a sequence; `share` is a share from it, `keep` keeps it."""
_PENDING, _SHARED_BY_2, _SHARED_BY_MORE, _MOVED = range(4)
STATE_TABLES = ("pending", "shared by 2", "shared by 3+", "moved")

TABLES = ("answers", "edges", *STATE_TABLES, "pairs")
"""Names of the tables, what is most telling first."""

OPERATION_NEEDS = {
    "cancel": "cancel", "shift": "shift", "divide": "divide", "save": "save", "restore": "save", "damage": "save",
    "save_all": "save_all", "restore_all": "save_all",
}  # fmt: skip
"""The ability (spec.target.Capabilities) that a session has to declare before the operation is sent."""

_REFUSALS: dict[str, tuple[str, ...]] = {
    "decode": ("attention", "coupled"),
    "rollback": ("guarantee none", "guarantee draft", "guarantee any"),
    "remove": ("recurrent",),
    "share": ("partial_share",),
    "restore": ("save",),
    "restore_all": ("save_all",),
}
"""Operations whose refusal the contract demands somewhere, or leaves to the target; where one of the abilities is there, if any is named."""

_EDGES: dict[str, str] = {
    "rollback of 1": "",
    "rollback of n_rs_seq": "snapshots",
    "rollback of n_rs_seq+1": "",
    "rollback of the whole log": "",
    "decode of 1": "",
    "decode of n_rs_seq+1": "",
    "decode of n_ubatch-1": "",
    "decode of n_ubatch": "",
    "decode of n_ubatch+1": "",
    "decode above n_ubatch+1": "",
    "decode of several sequences": "",
    "decode of a sequence twice": "",
    "decode of coupled tokens": "coupled",
    "decode for last rows": "",
    "decode for embeddings": "embeddings",
    "decode beyond the capacity": "attention",
    "decode past the window": "windowed",
    "restore into the same sequence": "save",
    "restore into another sequence": "save",
    "restore in a later session": "save",
    "restore of a partial save": "partial",
    "restore of a device save": "device",
    "restore of a damaged save": "save",
    "start fresh": "",
    "start dirty": "",
    "start poison": "poison",
    "n_rs_seq 0": "",
    "n_rs_seq above 0": "snapshots",
    "unified 0": "",
    "unified 1": "",
    "interleave 1": "",
    "swa_full 1": "windowed",
}
"""Edges, and the ability that a target has to have for each."""
_EDGE_OF = {name: number for number, name in enumerate(_EDGES)}

_ABILITIES = (
    "recurrent", "attention", "windowed", "coupled", "cancel", "shift", "divide", "save_all", "partial", "device", "embeddings",
    "partial_share", "save",
)  # fmt: skip


# --- the cells ---------------------------------------------------------------------------------------------------------------


def _pair(before: str, name: str) -> str:
    return f"{name} after {before}"


def _impossible_pairs() -> frozenset[str]:
    """Pairs that no program can reach: the contract skips the second, or it needs what the first leaves nobody with."""
    nothing_there = [_pair(before, name) for before in (FIRST, "drop", "clear", "reopen") for name in ("shift", "divide")]
    nothing_saved = [_pair(FIRST, name) for name in ("restore_all", "damage")]
    unknown_positions = [_pair("divide", name) for name in ("rollback", "remove", "shift")]
    return frozenset((*nothing_there, *nothing_saved, *unknown_positions))


IMPOSSIBLE_PAIRS = _impossible_pairs()


def abilities_of(capabilities: Capabilities) -> frozenset[str]:
    """What a session can do, as far as cells depend on it: the names of its capabilities, `snapshots`, and `guarantee` with its word."""
    names = {name for name in _ABILITIES if getattr(capabilities, name)}
    names.add(f"guarantee {capabilities.guarantee}")
    if capabilities.n_rs_seq:
        names.add("snapshots")
    return frozenset(names)


def cells(abilities: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """For every table the names of the cells that programs can reach on a target with these abilities."""
    offered = [name for name in OPERATION_NAMES if OPERATION_NEEDS.get(name, name) in abilities or name not in OPERATION_NEEDS]
    refusals = [name for name, needs in _REFUSALS.items() if not needs or abilities & set(needs)]
    answers = [f"{name} accepted" for name in offered] + [f"{name} refused" for name in refusals]
    answers += ["cancel cancelled"] if "cancel" in offered else []
    roles = [role for name in offered if name != "damage" for role in ROLES if role.split()[0] == name]
    pairs = [_pair(before, name) for before in (FIRST, *offered) for name in offered]
    return {
        "answers": tuple(answers),
        "edges": tuple(name for name, need in _EDGES.items() if not need or need in abilities),
        **{table: tuple(roles) for table in STATE_TABLES},
        "pairs": tuple(pair for pair in pairs if pair not in IMPOSSIBLE_PAIRS),
    }


# --- what was reached --------------------------------------------------------------------------------------------------------


class Reached(msgspec.Struct, frozen=True):
    """What some programs reached.

    counts     table -> cell -> how often; only cells that were reached
    abilities  of all sessions together
    """

    counts: dict[str, dict[str, int]]
    abilities: tuple[str, ...]


NOTHING_REACHED = Reached({}, ())


class Atlas:
    """Everything that was reached so far, by the results of many shards."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {table: Counter() for table in TABLES}
        self.abilities: set[str] = set()

    def add(self, reached: Reached) -> None:
        """Take over what a shard reached."""
        for table, counts in reached.counts.items():
            self.counts[table].update(counts)
        self.abilities.update(reached.abilities)

    def take_up(self, reach: Reach, abilities: Iterable[str]) -> None:
        """Go on from what was reached before; its cells at zero are none that were reached."""
        for table, counts in reach.cells.items():
            self.counts[table].update({cell: number for cell, number in counts.items() if number})
        self.abilities.update(abilities)

    @property
    def reached_count(self) -> int:
        """How many cells were reached."""
        return sum(sum(map(bool, counts.values())) for counts in self.counts.values())

    def reach(self) -> Reach:
        """All cells that could have been reached, and how often they were; also what was reached beside them."""
        possible = cells(frozenset(self.abilities)) if self.abilities else {}
        tables = {}
        for table in TABLES:
            names = dict.fromkeys((*possible.get(table, ()), *sorted(self.counts[table])))
            tables[table] = {name: self.counts[table][name] for name in names}
        missing = [name for name, need in OPERATION_NEEDS.items() if self.abilities and need not in self.abilities]
        return Reach(tables, tuple(name for name in OPERATION_NAMES if name in missing))


class ReachCounter:
    """Counts what programs reach, cell by cell; `reached` gives it names."""

    def __init__(self, poison: bool) -> None:
        """poison: the target honours `start=poison`."""
        self.answers = [0] * (_KINDS * len(_WORDS))
        self.pairs = [0] * ((_KINDS + 1) * _KINDS)
        self.states = [0] * (len(ROLES) * len(STATE_TABLES))
        self.edges = [0] * len(_EDGES)
        self.capabilities: set[Capabilities] = set()
        self.poison = poison

    def add(self, program: Program, run: Run) -> None:
        """Count the operations of one run, as far as it came."""
        self.capabilities.update(run.sessions or (run.capabilities,))
        _Walk(self, program, run).walk(program.operations, run.steps)

    def add_and_name_new(self, program: Program, run: Run) -> tuple[tuple[str, str], ...]:
        """Count one run; the cells, as table and name, that nothing had reached before it."""
        counts = (self.answers, self.edges, self.pairs, self.states)
        before = [numbers.copy() for numbers in counts]
        self.add(program, run)
        if all(now.count(0) == then.count(0) for now, then in zip(counts, before, strict=True)):
            return ()
        new = [
            cell
            for names, now, then in zip(_cell_names(), counts, before, strict=True)
            for cell, number, earlier in zip(names, now, then, strict=True)
            if number and not earlier and cell is not None
        ]
        return tuple(new)

    @property
    def outcomes(self) -> dict[str, dict[str, int]]:
        """Operation name -> outcome word -> count, what is not offered among the refusals."""
        result: dict[str, dict[str, int]] = {}
        for name, word, number in self._named_answers():
            counts = result.setdefault(name, {})
            word = "refused" if word == UNDECLARED else word
            counts[word] = counts.get(word, 0) + number
        return result

    def _named_answers(self) -> Iterator[tuple[str, str, int]]:
        for place, number in enumerate(self.answers):
            if number:
                yield OPERATION_NAMES[place // len(_WORDS)], _WORDS[place % len(_WORDS)], number

    def reached(self) -> Reached:
        """The cells by name."""
        counts = {
            "answers": {f"{name} {word}": number for name, word, number in self._named_answers() if word not in ("skipped", UNDECLARED)},
            "edges": {name: number for name, number in zip(_EDGES, self.edges, strict=True) if number},
            "pairs": {
                _pair(before, name): number
                for before, row in zip((*OPERATION_NAMES, FIRST), _rows(self.pairs, _KINDS), strict=True)
                for name, number in zip(OPERATION_NAMES, row, strict=True)
                if number
            },
        }
        for table, column in zip(STATE_TABLES, range(len(STATE_TABLES)), strict=True):
            numbers = self.states[column :: len(STATE_TABLES)]
            counts[table] = {role: number for role, number in zip(ROLES, numbers, strict=True) if number}
        abilities = frozenset[str]().union(*map(abilities_of, self.capabilities))
        if abilities and self.poison:
            abilities |= {"poison"}
        return Reached(counts, tuple(sorted(abilities)))


@lru_cache(maxsize=1)
def _cell_names() -> tuple[tuple[tuple[str, str] | None, ...], ...]:
    """Table and name of every count of a ReachCounter: answers, edges, pairs, states; None where it is no cell."""
    answers = [None if word in ("skipped", UNDECLARED) else ("answers", f"{name} {word}") for name in OPERATION_NAMES for word in _WORDS]
    pairs = [("pairs", _pair(before, name)) for before in (*OPERATION_NAMES, FIRST) for name in OPERATION_NAMES]
    states = [(table, role) for role in ROLES for table in STATE_TABLES]
    return tuple(answers), tuple(("edges", name) for name in _EDGES), tuple(pairs), tuple(states)


def _rows(numbers: list[int], width: int) -> list[list[int]]:
    return [numbers[start : start + width] for start in range(0, len(numbers), width)]


# --- one program -------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _size_edges(token_count: int, n_rs_seq: int, n_ubatch: int) -> tuple[int, ...]:
    """The edges of a decode that gives a sequence so many tokens."""
    sizes = {
        "decode of 1": 1, "decode of n_rs_seq+1": n_rs_seq + 1, "decode of n_ubatch-1": n_ubatch - 1, "decode of n_ubatch": n_ubatch,
        "decode of n_ubatch+1": n_ubatch + 1,
    }  # fmt: skip
    names = [name for name, size in sizes.items() if size == token_count]
    names += ["decode above n_ubatch+1"] if token_count > n_ubatch + 1 else []
    return tuple(_EDGE_OF[name] for name in names)


@lru_cache(maxsize=1024)
def _session_edges(cache: CacheConfiguration, n_rs_seq: int, windowed: bool, poison: bool) -> tuple[int, ...]:
    """The edges of opening a session; n_rs_seq as the engine took it. A target that cannot poison its memory runs `poison` as `dirty`."""
    start = "dirty" if cache.start == "poison" and not poison else cache.start
    names = [f"start {start}", f"unified {cache.unified}", "n_rs_seq above 0" if n_rs_seq else "n_rs_seq 0"]
    names += ["interleave 1"] if cache.interleave else []
    names += ["swa_full 1"] if cache.swa_full and windowed else []
    return tuple(_EDGE_OF[name] for name in names)


@lru_cache(maxsize=256)
def _window(model: Model) -> int:
    return family_of(model).attention_window(dimensions_of(model))


_SEVERAL, _TWICE = _EDGE_OF["decode of several sequences"], _EDGE_OF["decode of a sequence twice"]
_COUPLED = _EDGE_OF["decode of coupled tokens"]
_LAST_ROWS, _EMBEDDINGS = _EDGE_OF["decode for last rows"], _EDGE_OF["decode for embeddings"]
_BEYOND, _PAST_WINDOW = _EDGE_OF["decode beyond the capacity"], _EDGE_OF["decode past the window"]
_ROLLBACK_OF_1, _ROLLBACK_OF_SNAPSHOTS = _EDGE_OF["rollback of 1"], _EDGE_OF["rollback of n_rs_seq"]
_ROLLBACK_OF_MORE, _ROLLBACK_OF_ALL = _EDGE_OF["rollback of n_rs_seq+1"], _EDGE_OF["rollback of the whole log"]
_SAME, _OTHER = _EDGE_OF["restore into the same sequence"], _EDGE_OF["restore into another sequence"]
_LATER, _DAMAGED = _EDGE_OF["restore in a later session"], _EDGE_OF["restore of a damaged save"]
_PARTIAL, _DEVICE = _EDGE_OF["restore of a partial save"], _EDGE_OF["restore of a device save"]


class _Saved(msgspec.Struct):
    """What is known of a slot: whose log it holds, of which session, and of which kind."""

    sequence: int
    session: int
    partial: bool
    device: bool
    damaged: bool = False


class _Walk:
    """The states of one program's sequences, brought up to date by the answers.

    previous  kind of the operation before, for every sequence and for the whole session
    pending, moved  for every sequence, as the module says
    state     for every sequence a number; two that have the same one share their state
    lineup    the sequences of the decode before, in their order; empty for one that has no tokens
    length    tokens of every log, as far as answers tell; needed for models with a window only
    positions first and last of every sequence, as they were answered last
    """

    def __init__(self, counter: ReachCounter, program: Program, run: Run) -> None:
        self.edges, self.states, self.pairs = counter.edges, counter.states, counter.pairs
        self.answers = counter.answers
        self.poison = counter.poison
        self.sessions = run.sessions or (run.capabilities,)
        self.session = -1
        self.window = _window(program.model)
        self.slots: dict[str, _Saved] = {}
        self.newest = _OPENING
        self.numbers = count()
        self.open(program.cache, _OPENING)

    def open(self, cache: CacheConfiguration, before: int) -> None:
        """A new session: every sequence is empty."""
        self.cache = cache
        self.session = min(self.session + 1, len(self.sessions) - 1)
        capabilities = self.sessions[self.session]
        self.n_rs_seq = capabilities.n_rs_seq
        for edge in _session_edges(cache, self.n_rs_seq, capabilities.windowed, self.poison):
            self.edges[edge] += 1
        n_seq_max = cache.n_seq_max
        self.previous = [before] * n_seq_max
        self.pending = [False] * n_seq_max
        self.moved = [False] * n_seq_max
        self.state = [next(self.numbers) for _ in range(n_seq_max)]
        self.lineup: list[tuple[int, ...]] = [()] * n_seq_max
        self.length = [0] * n_seq_max
        self.positions: Sequence[tuple[int, int]] = [(-1, -1)] * n_seq_max

    def walk(self, operations: Iterable[AnyOperation], steps: Iterable[Step]) -> None:
        """Count every operation that was reached."""
        for operation, step in zip(operations, steps, strict=False):
            kind = _KIND_OF[type(operation)]
            word = _UNDECLARED if step.demand == "undeclared" else _WORD_OF[step.outcome.word]
            self.answers[kind * len(_WORDS) + word] += 1
            if word not in (_SKIPPED, _UNDECLARED):
                self.take(kind, operation, step)
                self.newest = kind

    def take(self, kind: int, operation: AnyOperation, step: Step) -> None:
        """Count an operation that was sent, and bring the states up to date."""
        match operation:
            case Decode():
                self.decode(operation, step)
            case Rollback():
                self.rollback(operation, step)
            case Share():
                self.share(operation, step)
            case Cancel():
                self.batch(_CANCEL, operation.items, step)
            case Remove(sequence=sequence) | Drop(sequence=sequence):
                self.cut(kind, sequence, step)
            case Keep():
                self.keep(operation, step)
            case Shift(sequence=sequence) | Divide(sequence=sequence):
                self.meet(kind, kind, sequence)
                if step.outcome.word == "accepted":
                    self.state[sequence] = next(self.numbers)
            case Save(sequence=sequence):
                self.meet(kind, kind, sequence)
                if step.outcome.word == "accepted":
                    self.slots[operation.slot] = _Saved(sequence, self.session, operation.partial, operation.device)
            case Restore():
                self.restore(operation, step)
            case Damage(slot=slot):
                self.meet_all(kind)
                if slot in self.slots:
                    self.slots[slot].damaged = True
            case SaveAll():
                self.meet_all(kind)
            case RestoreAll() | Clear():
                self.meet_all(kind)
                for sequence, (_, last) in enumerate(step.positions):
                    if step.outcome.word == "accepted" or last < 0:
                        self.empty(sequence)
                        self.length[sequence] = last + 1
            case Reopen(changes=changes):
                self.meet_all(kind)
                if step.outcome.word == "accepted":
                    self.open(msgspec.structs.replace(self.cache, **changes), kind)
        self.positions = step.positions

    # --- meeting a state ---------------------------------------------------------------------------------------------------

    def meet(self, kind: int, role: int, sequence: int) -> None:
        """Count that an operation concerned a sequence in its present state."""
        self.pairs[self.previous[sequence] * _KINDS + kind] += 1
        self.previous[sequence] = kind
        self.meet_state(role, sequence)

    def meet_state(self, role: int, sequence: int) -> None:
        """Count what the state of the sequence is."""
        place = role * len(STATE_TABLES)
        if self.pending[sequence]:
            self.states[place + _PENDING] += 1
        if self.moved[sequence]:
            self.states[place + _MOVED] += 1
        degree = self.state.count(self.state[sequence])
        if degree > 1:
            self.states[place + (_SHARED_BY_2 if degree == 2 else _SHARED_BY_MORE)] += 1

    def meet_all(self, kind: int) -> None:
        """Count an operation that names no sequence."""
        self.pairs[self.newest * _KINDS + kind] += 1
        self.previous = [kind] * len(self.previous)
        if kind != _DAMAGE:  # which is about a slot
            for sequence, (_, last) in enumerate(self.positions):
                if last >= 0:
                    self.meet_state(kind, sequence)

    def empty(self, sequence: int) -> None:
        """The sequence has no tokens any more, or others than it had."""
        self.pending[sequence] = self.moved[sequence] = False
        self.state[sequence] = next(self.numbers)
        self.lineup[sequence] = ()
        self.length[sequence] = 0

    # --- the operations ----------------------------------------------------------------------------------------------------

    def decode(self, operation: Decode, step: Step) -> None:
        outputs = operation.outputs or self.cache.outputs
        if outputs != "all":
            self.edges[_LAST_ROWS if outputs == "last" else _EMBEDDINGS] += 1
        if step.reason == "beyond the capacity":
            self.edges[_BEYOND] += 1
        self.batch(_DECODE, operation.items, step)

    def batch(self, kind: int, items: tuple[Item, ...], step: Step) -> None:
        edges, n_rs_seq, n_ubatch = self.edges, self.n_rs_seq, self.cache.n_ubatch
        for item in items:
            for edge in _size_edges(item.token_count, n_rs_seq, n_ubatch):
                edges[edge] += 1
        lineup = items[0].sequences
        if len(items) > 1 or len(lineup) > 1:
            named = [sequence for item in items for sequence in item.sequences]
            lineup = tuple(dict.fromkeys(named))
            if len(lineup) > 1:
                edges[_SEVERAL] += 1
            if len(named) > len(lineup):
                edges[_TWICE] += 1
            if any(len(item.sequences) > 1 for item in items):
                edges[_COUPLED] += 1
        for sequence in lineup:
            self.meet(kind, kind, sequence)
        if step.outcome.word in ("accepted", "cancelled"):
            self.go_on(items, lineup, step)

    def go_on(self, items: tuple[Item, ...], lineup: tuple[int, ...], step: Step) -> None:
        """A batch, or a part of it, was taken."""
        is_batch = len(lineup) > 1
        for sequence in lineup:
            self.pending[sequence] = False
            before = self.lineup[sequence]
            self.moved[sequence] = is_batch and bool(before) and before != lineup
            self.lineup[sequence] = lineup
        for item in items:
            number = next(self.numbers)
            for sequence in item.sequences:
                self.state[sequence] = number
        if step.outcome.word == "cancelled":
            for sequence in lineup:
                if step.positions[sequence][1] < 0:
                    self.empty(sequence)
        elif self.window:
            self.lengthen(items)

    def lengthen(self, items: tuple[Item, ...]) -> None:
        """Logs grow, some of them past the window."""
        for item in items:
            for sequence in item.sequences:
                self.length[sequence] += item.token_count
                if self.length[sequence] > self.window:
                    self.edges[_PAST_WINDOW] += 1

    def rollback(self, operation: Rollback, step: Step) -> None:
        sequence, token_count, n_rs_seq, edges = operation.sequence, operation.token_count, self.n_rs_seq, self.edges
        if token_count == 1:
            edges[_ROLLBACK_OF_1] += 1
        if token_count == n_rs_seq:
            edges[_ROLLBACK_OF_SNAPSHOTS] += 1
        elif token_count == n_rs_seq + 1:
            edges[_ROLLBACK_OF_MORE] += 1
        if self.positions[sequence][1] > step.positions[sequence][1] == -1:
            edges[_ROLLBACK_OF_ALL] += 1
        self.cut(_ROLLBACK, sequence, step)

    def cut(self, kind: int, sequence: int, step: Step) -> None:
        """The end of a log may be gone, or all of it; positions tell."""
        self.meet(kind, kind, sequence)
        before, after = self.positions[sequence][1], step.positions[sequence][1]
        if after < 0:
            self.empty(sequence)
        elif after < before:
            self.pending[sequence] = True
            self.state[sequence] = next(self.numbers)
            self.length[sequence] -= before - after

    def share(self, operation: Share, step: Step) -> None:
        source, destination = operation.source, operation.destination
        self.meet(_SHARE, _SHARE, source)
        if source == destination:
            return
        self.meet(_SHARE, _ONTO, destination)
        if step.outcome.word != "accepted":
            return
        self.empty(destination)
        if step.positions[destination][1] == step.positions[source][1] >= 0:
            self.state[destination] = self.state[source]
            self.pending[destination], self.moved[destination] = self.pending[source], self.moved[source]
            self.lineup[destination], self.length[destination] = self.lineup[source], self.length[source]

    def keep(self, operation: Keep, step: Step) -> None:
        self.meet(_KEEP, _KEEP, operation.sequence)
        for sequence, (_, last) in enumerate(self.positions):
            if last >= 0 and sequence != operation.sequence:
                self.meet_state(_ANOTHER, sequence)
                if step.positions[sequence][1] < 0:
                    self.empty(sequence)

    def restore(self, operation: Restore, step: Step) -> None:
        sequence, slot = operation.sequence, self.slots.get(operation.slot)
        last = step.positions[sequence][1]
        self.meet(_RESTORE, _RESTORE, sequence)
        if slot is not None and slot.damaged:
            self.edges[_DAMAGED] += 1
        if step.outcome.word == "accepted" or last < 0:
            self.empty(sequence)
            self.length[sequence] = last + 1
        if step.outcome.word == "accepted" and slot is not None and not slot.damaged:
            self.edges[_SAME if slot.sequence == sequence else _OTHER] += 1
            if slot.session != self.session:
                self.edges[_LATER] += 1
            if slot.partial:
                self.edges[_PARTIAL] += 1
            if slot.device:
                self.edges[_DEVICE] += 1
