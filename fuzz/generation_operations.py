"""Which operations a program gets: one small function per kind, each adding to the draft what it asks for.

Rules
- Every operation is legal text; most of them apply, some do not on purpose.
- Decode is always on; of the others each program switches a random subset off (swarm) and weights the rest.
- A kind that has nothing to act on mostly becomes the kind that makes something: a restore becomes a save, a save a decode.
- What is known to go wrong is avoided before the first operation is drawn, by switching off one operation of what has to come together:
  three programs of four are clear of it, the others look for what else may go wrong there.
- Every program ends with one new-salt token on every sequence that may hold tokens, so that late effects show.
Source: docs/programs.md, "Tokens".
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..spec.configuration import CacheConfiguration, Start
from ..spec.models import Model
from ..spec.operations import (
    OPEN,
    Cancel,
    Clear,
    Damage,
    Decode,
    Divide,
    Drop,
    Item,
    Keep,
    Outputs,
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
from .choices import Choices
from .generation_draft import Draft, Saved, SavedSession, model_facts

OPERATIONS_FEWEST = 3
OPERATIONS_AVERAGE = 13
"""Before the closing decodes, which are one or two more."""

# --- the configuration -----------------------------------------------------------------------------------------------------

_N_SEQ_MAX = (4, 2, 3, 4, 2, 3, 4, 2, 3, 1, 5, 6, 8)
_N_RS_SEQ = (3, 1, 2, 3, 1, 2, 3, 1, 2, 4, 0)
_N_UBATCH = (64, 4, 8, 16, 4, 8, 16, 8, 16, 8, 5, 32)
_N_UBATCH_SAFE = 8
_N_CTX_SMALL = (32, 16)
_STARTS: tuple[Start, ...] = ("fresh", "fresh", "fresh", "dirty", "dirty", "poison")


def draw_configuration(choices: Choices, has_window: bool) -> CacheConfiguration:
    """Any configuration that a campaign draws; what an attention window may keep only where there is one."""
    n_rs_seq = choices.pick(_N_RS_SEQ)
    outputs: Outputs = "all"
    if choices.chance(12):
        outputs = choices.pick(("last", "embeddings"))
    return CacheConfiguration(
        n_seq_max=choices.pick(_N_SEQ_MAX),
        n_rs_seq=n_rs_seq,
        n_ubatch=_draw_n_ubatch(choices, n_rs_seq),
        n_ctx=choices.pick(_N_CTX_SMALL) if choices.chance(10) else 256,
        unified=int(choices.chance(40)),
        start=choices.pick(_STARTS),
        interleave=int(choices.chance(20)),
        outputs=outputs,
        swa_full=int(has_window and choices.chance(20)),
    )


def _draw_n_ubatch(choices: Choices, n_rs_seq: int) -> int:
    """Mostly above n_rs_seq + 1: engines do not promise snapshots for smaller ones."""
    n_ubatch = choices.pick(_N_UBATCH)
    if choices.chance(4):
        n_ubatch = choices.integer(1, n_rs_seq + 2)
    elif n_ubatch <= n_rs_seq + 1:
        n_ubatch = _N_UBATCH_SAFE
    return n_ubatch


# --- decoding --------------------------------------------------------------------------------------------------------------

_ITEM_COUNTS = (1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 4)
_OUTPUTS: tuple[Outputs, ...] = ("last", "all", "embeddings")


def _draw_items(draft: Draft) -> tuple[list[Item], dict[int, int], bool]:
    """Items of a batch, how many tokens each sequence gets, and whether they are believed to fit the capacity."""
    choices = draft.choices
    items: list[Item] = []
    added: dict[int, int] = {}
    fits = True
    for _ in range(choices.pick(_ITEM_COUNTS)):
        sequence = draft.any_sequence()
        if sequence in added and not choices.chance(15):
            others = [other for other in draft.active if other not in added]
            if not others:
                break
            sequence = choices.pick(others)
        token_count = draft.size_tokens()
        room = draft.room_tokens(sequence) - (sum(added.values()) if draft.cache.unified else added.get(sequence, 0))
        if token_count > room:
            if choices.chance(5):
                fits = False
            elif room > 0:
                token_count = room
            else:
                continue
        items.append(draft.item(sequence, token_count))
        added[sequence] = added.get(sequence, 0) + token_count
    return items, added, fits


def _decode(draft: Draft) -> None:
    choices = draft.choices
    if draft.couples and choices.chance(8 if draft.cache.unified else 1) and _decode_coupled(draft):
        return
    items, added, fits = _draw_items(draft)
    if not items:  # everything is full
        _drop(draft)
        return
    draft.operations.append(Decode(tuple(items), choices.pick(_OUTPUTS) if choices.chance(4) else None))
    if fits:
        for sequence, token_count in added.items():
            draft.appended(sequence, token_count)


def _decode_coupled(draft: Draft) -> bool:
    """Tokens of two sequences at once; mostly of equal logs, as prompts shared by several answers are. False when there are none."""
    choices = draft.choices
    if len(draft.tracks) < 2:
        return False
    first = draft.any_sequence()
    track = draft.tracks[first]
    equal = [other for other, candidate in enumerate(draft.tracks) if other != first and candidate.log_id == track.log_id]
    unequal = [other for other, candidate in enumerate(draft.tracks) if candidate.length != track.length]
    if unequal and choices.chance(10):  # must be refused
        draft.operations.append(Decode((Item(_sorted_pair(first, choices.pick(unequal)), 1, draft.new_salt()),)))
        return True
    token_count = min(draft.size_tokens(), draft.room_tokens(first))
    if not equal or token_count < 1:
        return False
    second = choices.pick(equal)
    items = [Item(_sorted_pair(first, second), token_count, draft.new_salt())]
    log_id = draft.new_log_id()
    for sequence in (first, second):
        draft.appended(sequence, token_count)
        draft.tracks[sequence].newest, draft.tracks[sequence].log_id = 0, log_id
    if choices.chance(30) and draft.room_tokens(first) > 0:  # and the two part within the same batch
        items.append(draft.item(first, 1))
        draft.appended(first, 1)
        draft.tracks[first].newest = 0
    draft.operations.append(Decode(tuple(items)))
    return True


def _sorted_pair(first: int, second: int) -> tuple[int, int]:
    return (first, second) if first < second else (second, first)


def _cancel(draft: Draft) -> None:
    items, added, _ = _draw_items(draft)
    if not items:
        _drop(draft)
        return
    draft.operations.append(Cancel(tuple(items), draft.choices.integer(0, draft.choices.pick((3, 20, 80)))))
    for sequence in added:
        draft.cancelled(sequence)


# --- forgetting ------------------------------------------------------------------------------------------------------------


def _draw_rollback_count(draft: Draft, sequence: int) -> int:
    """Leaning on what is promised, on the edges of the snapshots and of the last decode, and on the whole."""
    track, n_rs_seq = draft.tracks[sequence], draft.cache.n_rs_seq
    promised = list(range(1, min(n_rs_seq, track.newest - 1) + 1))
    newest = [track.newest - 1, track.newest, track.newest + 1] if track.newest else [1]
    wholly = [track.length, track.length, track.length // 2, track.length + 1]
    counts = promised * (4 if len(promised) < 3 else 2) + list(range(1, n_rs_seq + 2)) + newest + wholly
    return draft.choices.pick(sorted([max(1, count) for count in counts]))


def _sequence_to_cut(draft: Draft) -> int:
    """One that may keep a promise of rollback, mostly; never one with divided positions, if there is another."""
    fit = [sequence for sequence, track in enumerate(draft.tracks) if track.length and not track.divided]
    if not fit or draft.choices.chance(3):
        return draft.any_sequence()
    fresh = [sequence for sequence in fit if draft.tracks[sequence].newest > 1]
    return draft.one_of(fresh + fit)


def _rollback(draft: Draft) -> None:
    sequence = _sequence_to_cut(draft)
    count = _draw_rollback_count(draft, sequence)
    draft.operations.append(Rollback(sequence, count))
    draft.cut(sequence, count)


def _remove(draft: Draft) -> None:
    choices = draft.choices
    sequence = _sequence_to_cut(draft)
    track = draft.tracks[sequence]
    first, end = track.offset, track.end_position
    kind = choices.integer(0, 99)
    if kind < 55:
        count = min(_draw_rollback_count(draft, sequence), end)
        draft.operations.append(Remove(sequence, end - count, choices.pick((OPEN, OPEN, end))))
        draft.cut(sequence, count)
    elif kind < 72:
        start, stop = choices.pick(((0, OPEN), (OPEN, OPEN), (0, end), (OPEN, end)))
        draft.operations.append(Remove(sequence, start, stop))
        draft.cut(sequence, max(1, track.length))
    elif kind < 86 or track.length < 2:
        start = end + choices.integer(0, 3)
        draft.operations.append(Remove(sequence, start, choices.pick((OPEN, start, start + 2))))
    else:
        start = choices.pick((first, choices.integer(first, end - 2)))
        draft.operations.append(Remove(sequence, start, choices.integer(start + 1, end - 1)))


def _drop(draft: Draft) -> None:
    sequence = draft.filled_sequence()
    draft.operations.append(Drop(sequence))
    draft.emptied(sequence)


def _keep(draft: Draft) -> None:
    kept = draft.filled_sequence()
    draft.operations.append(Keep(kept))
    for sequence in range(len(draft.tracks)):
        if sequence != kept:
            draft.emptied(sequence)


def _clear(draft: Draft) -> None:
    draft.operations.append(Clear())
    for sequence in range(len(draft.tracks)):
        draft.emptied(sequence)


# --- sharing and moving ----------------------------------------------------------------------------------------------------


def _share(draft: Draft) -> None:
    choices = draft.choices
    source = draft.filled_sequence()
    track = draft.tracks[source]
    others = [sequence for sequence in range(len(draft.tracks)) if sequence != source]
    empty = [sequence for sequence in others if not draft.tracks[sequence].may_hold]
    if not others or choices.chance(1):
        draft.operations.append(Share(source, source))
        return
    destination = draft.one_of(empty if empty and choices.leans(60) else others)
    if choices.chance(5) and track.length and not track.divided:
        _share_range(draft, source, destination)
        return
    draft.operations.append(Share(source, destination))
    draft.shared(source, destination)


def _share_range(draft: Draft, source: int, destination: int) -> None:
    choices, track = draft.choices, draft.tracks[source]
    end = track.end_position
    if track.length < 2 or choices.chance(50):  # the whole, in other words
        draft.operations.append(Share(source, destination, *choices.pick(((0, end), (0, OPEN), (0, end + 3)))))
        draft.shared(source, destination)
    else:
        draft.operations.append(Share(source, destination, 0, choices.integer(track.offset + 1, end - 1)))


def _shift(draft: Draft) -> None:
    sequence = _sequence_to_cut(draft)
    track = draft.tracks[sequence]
    delta = draft.choices.integer(1, 8)
    if draft.choices.chance(40) and track.offset:
        delta = -draft.choices.integer(1, track.offset)
    draft.operations.append(Shift(sequence, delta))
    if track.length and not track.divided:
        track.offset += delta
        track.log_id = draft.new_log_id()
        draft.moved(sequence)


def _divide(draft: Draft) -> None:
    sequence = draft.filled_sequence()
    track = draft.tracks[sequence]
    divisor = draft.choices.integer(2, 4)
    draft.operations.append(Divide(sequence, divisor))
    if track.length:
        track.divided = True
        track.offset = max(0, (track.end_position - 1) // divisor - track.length + 1)
        track.log_id = draft.new_log_id()
        draft.moved(sequence)


# --- saving and restoring --------------------------------------------------------------------------------------------------

_SLOTS = ("a", "b", "c")
_SPECIAL_SLOTS = ("p", "q")
_SESSION_SLOTS = ("w", "x")


def _save(draft: Draft) -> None:
    choices = draft.choices
    sequence = draft.filled_sequence()
    partial, device = choices.chance(10), choices.chance(3)
    name = choices.pick(_SPECIAL_SLOTS if partial or device else _SLOTS)
    draft.operations.append(Save(sequence, name, partial, device))
    if device:
        for other in [other for other, slot in draft.slots.items() if slot.device and slot.sequence == sequence]:
            del draft.slots[other]
    draft.slots[name] = Saved(sequence, draft.tracks[sequence], draft.cache, draft.session, partial, device)


def is_usable(draft: Draft, slot: Saved) -> bool:
    """Whether a restore of the slot is believed to be promised."""
    if slot.damaged:
        return False
    if slot.device and slot.session != draft.session:
        return False
    if not slot.partial:
        return (slot.n_seq_max, slot.unified) == (draft.cache.n_seq_max, draft.cache.unified)
    return slot.session == draft.session and slot.shortest >= slot.copied.length and not slot.copied.divided


def _restore(draft: Draft) -> None:
    choices = draft.choices
    usable = [name for name, slot in draft.slots.items() if is_usable(draft, slot)]
    if choices.chance(3) or (draft.slots and not usable and choices.chance(50)):
        usable = sorted(draft.slots) or list(_SLOTS)
    if not usable:
        _save(draft)
        return
    name = choices.pick(usable)
    slot = draft.slots.get(name)
    if slot is None:
        draft.operations.append(Restore(name, draft.any_sequence()))
        return
    in_place = slot.partial or choices.leans(40)
    sequence = slot.sequence if in_place and slot.sequence < len(draft.tracks) else draft.any_sequence()
    draft.operations.append(Restore(name, sequence))
    draft.restored(sequence, slot.copied, is_usable(draft, slot))


def _save_all(draft: Draft) -> None:
    name = draft.choices.pick(_SESSION_SLOTS)
    draft.operations.append(SaveAll(name))
    draft.session_slots[name] = SavedSession(draft.tracks, draft.cache)


def _restore_all(draft: Draft) -> None:
    if not draft.session_slots:
        _save_all(draft)
        return
    name = draft.choices.pick(sorted(draft.session_slots))
    slot = draft.session_slots[name]
    draft.operations.append(RestoreAll(name))
    is_promised = (slot.n_seq_max, slot.unified) == (draft.cache.n_seq_max, draft.cache.unified)
    for sequence, copied in zip(range(len(draft.tracks)), slot.tracks, strict=False):
        draft.restored(sequence, copied, is_promised)


def _damage(draft: Draft) -> None:
    """Damage a slot; the next operation restores it."""
    choices = draft.choices
    names = [name for name, slot in draft.slots.items() if is_usable(draft, slot)]
    if not names:
        _save(draft)
        return
    name = choices.pick(names)
    draft.operations.append(_draw_damage(choices, name))
    draft.slots[name].damaged = True
    draft.damaged_slot = name


def _restore_damaged(draft: Draft, name: str) -> None:
    """Restore a damaged slot, and mostly empty the sequence it went to, whose log nobody knows any more."""
    choices = draft.choices
    draft.damaged_slot = None
    sequence = draft.any_sequence()
    draft.operations.append(Restore(name, sequence))
    track = draft.tracks[sequence]
    track.lost = track.may_hold = True
    track.newest = 0
    if choices.chance(60) and len(draft.operations) < draft.operations_max - 1:
        draft.operations.append(Drop(sequence))
        draft.emptied(sequence)


def _draw_damage(choices: Choices, name: str) -> Damage:
    match choices.integer(0, 3):
        case 0:
            return Damage(name, "truncate", choices.pick((1, 2, 7, 8, 16, 64, 200)))
        case 1:
            return Damage(name, "flip", choices.integer(0, choices.pick((15, 63, 255, 1000))))
        case 2:
            return Damage(name, "header")
        case _:
            return Damage(name, "foreign")


def _reopen(draft: Draft) -> None:
    changes: dict[str, int | str] = {}
    choices = draft.choices
    if choices.chance(50):
        for _ in range(choices.integer(1, 2)):
            key, value = _draw_change(choices, draft.cache)
            changes[key] = value
    draft.operations.append(Reopen(changes))
    draft.reopened(changes)


def _draw_change(choices: Choices, cache: CacheConfiguration) -> tuple[str, int | str]:
    match choices.integer(0, 5):
        case 0:
            return "n_rs_seq", choices.integer(0, max(0, min(4, cache.n_ubatch - 2)))
        case 1:
            return "n_ubatch", _draw_n_ubatch(choices, cache.n_rs_seq)
        case 2:
            return "n_seq_max", choices.pick(_N_SEQ_MAX)
        case 3:
            return "unified", 1 - cache.unified
        case 4:
            return "start", choices.pick(_STARTS)
        case _:
            return "interleave", 1 - cache.interleave


# --- steering --------------------------------------------------------------------------------------------------------------

_STEERED_PERCENT = 75
_SAVES = (_save, _restore, _damage)
_KINDS_OF: dict[str, tuple[Callable[[Draft], None], ...]] = {
    "rollback": (_rollback, _remove), "remove": (_remove,), "drop": (_drop,), "keep": (_keep,), "clear": (_clear,),
    "share": (_share,), "share-range": (_share,), "shift": (_shift,), "divide": (_divide,), "reopen": (_reopen,),
    "cancel": (_cancel,), "cancel-coupled": (_cancel,), "decode-coupled": (),
    "save": _SAVES, "save-partial": _SAVES, "save-device": _SAVES, "save-partial-device": _SAVES, "restore": (_restore, _damage),
    "save_all": (_save_all, _restore_all), "restore_all": (_restore_all,),
    "damage-truncate": (_damage,), "damage-flip": (_damage,), "damage-header": (_damage,), "damage-foreign": (_damage,),
}  # fmt: skip
"""Word of a signature -> the kinds that make such an operation, or one that does the same; coupled decodes are no kind of their own."""
_IMPLIED = {"restore": "save", "damage": "restore", "restore_all": "save_all"}
"""The beginning of a word -> that of words which it cannot come without: to leave out the first is enough."""


class Steering(NamedTuple):
    """What to avoid, and where the chance for it comes from; see `generate`."""

    choices: Choices
    avoided: Sequence[Sequence[str]]


def _avoidable(context: Sequence[str]) -> list[str]:
    """The words of a context that can be switched off, without those that others imply."""
    implied = {_IMPLIED[word.partition("-")[0]] for word in context if word.partition("-")[0] in _IMPLIED}
    return [word for word in context if word in _KINDS_OF and word.partition("-")[0] not in implied]


def _steer(steering: Steering, weights: list[int], draft: Draft) -> None:
    """Switch off what the steering says; the weights are those of the kinds beside decode."""
    places = {add: place for place, (_, add) in enumerate(OTHER_KINDS)}
    for context in steering.avoided:
        words = _avoidable(context)
        kinds = {word: [places[add] for add in _KINDS_OF[word]] for word in words}
        is_on = {word: any(weights[place] for place in kinds[word]) if kinds[word] else draft.couples for word in words}
        if not words or not all(is_on.values()) or not steering.choices.chance(_STEERED_PERCENT):
            continue
        off = steering.choices.pick(words)
        draft.couples = draft.couples and off != "decode-coupled"
        for place in kinds[off]:
            weights[place] = 0


# --- the program -----------------------------------------------------------------------------------------------------------

Kinds = Sequence[tuple[int, Callable[[Draft], None]]]
OTHER_KINDS: Kinds = (
    (36, _rollback), (18, _share), (8, _remove), (7, _drop), (9, _save), (13, _restore), (5, _keep), (2, _clear), (2, _save_all),
    (3, _restore_all), (3, _shift), (2, _reopen), (2, _cancel), (1, _divide), (2, _damage),
)  # fmt: skip
"""The kinds beside decode with how common they are before swarm weights, the simplest first."""
LASTING_KINDS: Kinds = tuple(entry for entry in OTHER_KINDS if entry[1] not in (_clear, _reopen))
"""Those that do not end what every sequence was."""
_NEEDS_TOKENS = frozenset((_rollback, _share, _remove, _drop, _save, _keep, _shift, _divide))
_NEEDS_TWO = frozenset((_share, _keep))
_DECODE_SHARES_PERCENT = (35, 25, 45, 55)
_DECODE_WEIGHT_LEAST = 600
"""Keeps rare kinds rare when they are all that is left switched on."""


def draw_program(choices: Choices, model: Model, operations_max: int, steering: Steering | None = None) -> Program:
    """A program of at most `operations_max` (at least 1) operations, steered away from what is known. Raises UsageError when the model is bad."""
    cache = draw_configuration(choices, model_facts(model).has_window)
    draft = Draft(choices, model, cache, operations_max)
    weights = _swarm_weights(choices, OTHER_KINDS)
    if steering is not None:
        _steer(steering, weights, draft)
    cumulative = _with_decode(choices, weights)
    _open_with_prompts(draft)

    def step() -> bool:
        add_one(draft, OTHER_KINDS, cumulative)
        return len(draft.operations) < operations_max - 1

    if operations_max > 1 + len(draft.operations):
        most = operations_max - 1 - len(draft.operations)
        choices.repeat(step, min(OPERATIONS_FEWEST, most), min(OPERATIONS_AVERAGE, most), most)
    close_draft(draft)
    return Program(model, cache, tuple(draft.operations))


def draw_weights(choices: Choices, kinds: Kinds) -> list[int]:
    """Running sums of weights: decode's, and those of the kinds of which a random subset is switched off."""
    return _with_decode(choices, _swarm_weights(choices, kinds))


def _swarm_weights(choices: Choices, kinds: Kinds) -> list[int]:
    return [common * weight for (common, _), weight in zip(kinds, choices.swarm(len(kinds)), strict=True)]


def _with_decode(choices: Choices, weights: Sequence[int]) -> list[int]:
    share_percent = choices.pick(_DECODE_SHARES_PERCENT)
    decode_weight = max(_DECODE_WEIGHT_LEAST, sum(weights) * share_percent // (100 - share_percent))
    return list(accumulate([decode_weight, *weights]))


def add_one(draft: Draft, kinds: Kinds, cumulative: Sequence[int]) -> None:
    """One operation of a kind drawn by `cumulative` (`draw_weights` of these kinds); few kinds add a second one."""
    choices = draft.choices
    kind_index = choices.weighted(cumulative)
    if not kind_index and draft.is_rollback_pending() and choices.chance(40):  # let something else meet it first
        kind_index = choices.weighted(cumulative)
    if draft.damaged_slot is not None:
        _restore_damaged(draft, draft.damaged_slot)
        return
    if not kind_index:
        _decode(draft)
        return
    add = kinds[kind_index - 1][1]
    nothing_there = (add in _NEEDS_TOKENS and not draft.filled()) or (add in _NEEDS_TWO and len(draft.tracks) < 2)
    if nothing_there and not choices.chance(8):
        _decode(draft)
    else:
        add(draft)


def _open_with_prompts(draft: Draft) -> None:
    """In one program of ten two sequences get the same explicit prompt; in one of fifty a sequence is nearly full from the start."""
    choices, cache = draft.choices, draft.cache
    kind = choices.integer(0, 99)
    if kind < 88 or draft.operations_max < 4:
        return
    if kind < 98:
        if cache.n_seq_max > 1:
            _open_with_equal_prompts(draft)
    elif draft.has_attention and (not cache.unified or cache.n_seq_max == 1) and cache.n_ctx <= 256:
        sequence = draft.any_sequence()
        token_count = cache.n_ctx - choices.integer(0, 3)
        draft.operations.append(Decode((Item((sequence,), token_count),)))
        draft.appended(sequence, token_count)


def _open_with_equal_prompts(draft: Draft) -> None:
    choices = draft.choices
    tokens = draft.explicit_tokens(choices.integer(2, 8))
    first = draft.any_sequence()
    second = choices.pick([sequence for sequence in range(len(draft.tracks)) if sequence != first])
    items = tuple([Item((sequence,), len(tokens), 0, tokens) for sequence in (first, second)])
    draft.operations += [Decode((item,)) for item in items] if choices.chance(50) else [Decode(items)]
    for sequence in (first, second):
        draft.appended(sequence, len(tokens))


def close_draft(draft: Draft) -> None:
    """One new-salt token for every sequence that may hold tokens; for the hot one when none does."""
    sequences = [sequence for sequence, track in enumerate(draft.tracks) if track.may_hold] or [draft.hot]
    salt = draft.new_salt()
    items = [Item((sequence,), 1, salt) for sequence in sequences]
    full = any(draft.room_tokens(sequence) < len(items) for sequence in sequences)
    one_by_one = draft.choices.chance(40) or full  # of a batch that does not fit nothing happens
    if one_by_one and len(draft.operations) + len(items) <= draft.operations_max:
        draft.operations += [Decode((item,)) for item in items]
    else:
        draft.operations.append(Decode(tuple(items)))
