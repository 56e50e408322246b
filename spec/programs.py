"""Programs: a model, a cache configuration and a list of operations, as text, as JSON, and as an id.

Rules
- Text and JSON are two forms of one thing; each is read back from the other without loss.
- Canonical text: fixed key order, defaults omitted, one operation a line, LF, no comments. A program's id is taken from it.
- Reading refuses before anything is allocated: every number has bounds, and an error names its line and column.
- A program is checked as a whole (`check_program`), whichever form it came from.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import msgspec

from .configuration import CACHE_KEYS, CacheConfiguration, changed, check_configuration, check_key
from .errors import ProgramError, UsageError
from .families import dimensions_of, family_of
from .models import Model, check_seed, model_text
from .operations import (
    OPEN,
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
    sequences_of,
)  # fmt: skip

FORMAT = 1
TEXT_CHARACTERS_MAX = 8 << 20
OPERATIONS_MAX = 10_000
DECODE_TOKENS_MAX = 4096
SALT_MAX = (1 << 32) - 1
NUMBER_MAX = (1 << 31) - 1
_SLOT = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,31}")
_WORD = re.compile(r"\[[^\]\n;#]*\]?\S*|[^\s\[]+(?:\[[^\]\n;#]*\]?\S*)?")


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is done to which model with which cache."""

    model: Model
    cache: CacheConfiguration
    operations: tuple[AnyOperation, ...]

    def __repr__(self) -> str:
        """The program as an expression to paste, for failing tests."""
        return f"parse_program({program_line(self)!r})"


# --- writing -------------------------------------------------------------------------------------------------------------


def item_text(item: Item) -> str:
    """One item of a decode, e.g. "0+1:2" or "0:4/2" or "0:[5,9,9]"."""
    owners = "+".join(map(str, item.sequences))
    if item.tokens is not None:
        return f"{owners}:[{','.join(map(str, item.tokens))}]"
    return f"{owners}:{item.token_count}" + (f"/{item.salt}" if item.salt else "")


def operation_text(operation: AnyOperation) -> str:
    """The operation as its line of program text."""
    match operation:
        case Decode(items=items, outputs=outputs):
            return " ".join(["decode", *map(item_text, items), *([f"outputs={outputs}"] if outputs else [])])
        case Cancel(items=items, at=at):
            return " ".join(["cancel", *map(item_text, items), f"at={at}"])
        case Rollback(sequence=sequence, token_count=token_count):
            return f"rollback {sequence} {token_count}"
        case Remove(sequence=sequence, start=start, end=end):
            return f"remove {sequence} {start} {end}"
        case Drop(sequence=sequence):
            return f"drop {sequence}"
        case Share(source=source, destination=destination, start=start, end=end):
            return f"share {source} {destination}" + ("" if (start, end) == (OPEN, OPEN) else f" {start} {end}")
        case Keep(sequence=sequence):
            return f"keep {sequence}"
        case Shift(sequence=sequence, delta=delta):
            return f"shift {sequence} {delta}"
        case Divide(sequence=sequence, divisor=divisor):
            return f"divide {sequence} {divisor}"
        case Save(sequence=sequence, slot=slot, partial=partial, device=device):
            return f"save {sequence} {slot}" + " partial" * partial + " device" * device
        case Restore(slot=slot, sequence=sequence):
            return f"restore {slot} {sequence}"
        case SaveAll(slot=slot):
            return f"save_all {slot}"
        case RestoreAll(slot=slot):
            return f"restore_all {slot}"
        case Damage(slot=slot, how=how, amount=amount):
            return f"damage {slot} {how}" + (f" {amount}" if how in ("truncate", "flip") else "")
        case Clear():
            return "clear"
        case Reopen(changes=changes):
            return " ".join(["reopen", *(f"{key}={changes[key]}" for key in CACHE_KEYS if key in changes)])


def cache_text(cache: CacheConfiguration) -> str:
    """The `cache` line without its word: the keys that differ from their defaults, in canonical order."""
    default = CacheConfiguration()
    return " ".join(f"{key}={getattr(cache, key)}" for key in CACHE_KEYS if getattr(cache, key) != getattr(default, key))


def program_line(program: Program) -> str:
    """The canonical text on one line, its lines parted by "; "; read back as the text is."""
    return "; ".join(program_text(program).splitlines())


def program_text(program: Program) -> str:
    """The canonical text, ending in LF."""
    cache = cache_text(program.cache)
    lines = [f"model {model_text(program.model)}", *([f"cache {cache}"] if cache else []), *map(operation_text, program.operations)]
    return "\n".join(lines) + "\n"


def program_id(program: Program) -> str:
    """The first 12 hex digits of the BLAKE2b digest of the canonical text."""
    return hashlib.blake2b(program_text(program).encode()).hexdigest()[:12]


def program_json(program: Program) -> bytes:
    """The JSON form, one object with `"format": 1`."""
    return msgspec.json.encode({"format": FORMAT, **msgspec.to_builtins(program)})


def caches_of(program: Program) -> list[CacheConfiguration]:
    """The configurations under which the program's sessions are opened, in order. Raises UsageError for a bad change."""
    caches = [program.cache]
    for operation in program.operations:
        if isinstance(operation, Reopen):
            caches.append(changed(caches[-1], operation.changes))
    return caches


# --- checking ------------------------------------------------------------------------------------------------------------


def check_program(program: Program) -> None:
    """Raise UsageError unless every number is within its bounds and every operation fits the configuration it runs under."""
    check_seed(program.model.seed)
    _check_dimensions(program.model)
    vocabulary_size = dimensions_of(program.model)["n_vocab"]
    check_configuration(program.cache)
    if len(program.operations) > OPERATIONS_MAX:
        raise UsageError(f"{len(program.operations)} operations; a program has at most {OPERATIONS_MAX}")
    reachable = program.cache.n_seq_max
    cache = program.cache
    for number, operation in enumerate(program.operations, 1):
        if isinstance(operation, Reopen):
            cache = changed(cache, operation.changes)
            reachable = max(reachable, cache.n_seq_max)
        try:
            _check_operation(operation, reachable, vocabulary_size)
        except UsageError as error:
            raise UsageError(f"operation {number} (`{operation_text(operation)[:60]}`): {error}") from None


def _check_dimensions(model: Model) -> None:
    """Dimensions are named once, sorted, and only where they differ: one model has one text."""
    names = [name for name, _ in model.dimensions]
    if names != sorted(set(names)):
        raise UsageError("`dimensions` must be sorted by name, each of them once")
    defaults = dimensions_of(Model(model.family))
    for name, value in model.dimensions:
        if defaults.get(name) == value:
            raise UsageError(f"dimension `{name}` is {value} anyway; leave it out")


def _within(name: str, value: int, low: int, high: int = NUMBER_MAX) -> None:
    if not low <= value <= high:
        raise UsageError(f"{name} must be from {low} to {high}, not {value}")


def _check_operation(operation: AnyOperation, n_seq_max: int, vocabulary_size: int) -> None:
    for sequence in sequences_of(operation):
        if not 0 <= sequence < n_seq_max:
            raise UsageError(f"sequence {sequence} is not in 0..{n_seq_max - 1} (n_seq_max={n_seq_max})")
    match operation:
        case Decode(items=items):
            _check_items(items, vocabulary_size)
        case Cancel(items=items, at=at):
            _check_items(items, vocabulary_size)
            _within("`at`", at, 0)
        case Rollback(token_count=token_count):
            _within("the number of tokens to take back", token_count, 1)
        case Remove(start=start, end=end) | Share(start=start, end=end):
            _within("the start of the range", start, OPEN)
            _within("the end of the range", end, OPEN)
        case Shift(delta=delta):
            _within("the shift", delta, -NUMBER_MAX)
        case Divide(divisor=divisor):
            _within("the divisor", divisor, 1)
        case Damage(slot=slot, how=how, amount=amount):
            _check_slot(slot)
            if how in ("header", "foreign") and amount:
                raise UsageError(f"damage {how} takes no number")
            _within("the damage", amount, 1 if how == "truncate" else 0)
        case Save(slot=slot) | Restore(slot=slot) | SaveAll(slot=slot) | RestoreAll(slot=slot):
            _check_slot(slot)
        case Drop() | Keep() | Clear() | Reopen():
            pass


def _check_slot(slot: str) -> None:
    if not _SLOT.fullmatch(slot):
        raise UsageError(f"`{slot[:40]}` is no slot name: a letter, then letters, digits, - and _, at most 32")


def _check_items(items: tuple[Item, ...], vocabulary_size: int) -> None:
    if not items:
        raise UsageError("a decode needs at least one item, as in `decode 0:10`")
    for item in items:
        _within("the number of tokens", item.token_count, 1, DECODE_TOKENS_MAX)
        _within("the salt", item.salt, 0, SALT_MAX)
        if not item.sequences or len(set(item.sequences)) != len(item.sequences):
            raise UsageError("an item needs at least one sequence, each of them once")
        if item.tokens is not None:
            if len(item.tokens) != item.token_count or item.salt:
                raise UsageError("explicit tokens come with their own count and without a salt")
            for token in item.tokens:
                if not 0 <= token < vocabulary_size:
                    raise UsageError(f"token {token} is not in the vocabulary 0..{vocabulary_size - 1}")
    total = sum(item.token_count for item in items)
    if total > DECODE_TOKENS_MAX:
        raise UsageError(f"{total} tokens in one decode; at most {DECODE_TOKENS_MAX}")


# --- reading -------------------------------------------------------------------------------------------------------------


class Word(NamedTuple):
    """One word of program text and where it stands, counted from 1."""

    text: str
    line: int
    column: int


def _fail(word: Word, message: str) -> NoReturn:
    raise ProgramError(message, word.line, word.column)


def _statements(text: str) -> Iterator[list[Word]]:
    """The words of every statement; a `#` starts a comment, `;` and LF end a statement."""
    for line_number, line in enumerate(text.split("\n"), 1):
        start = 0
        code = line.split("#", 1)[0].rstrip("\r")
        for part in code.split(";"):
            words = [Word(match.group(), line_number, start + match.start() + 1) for match in _WORD.finditer(part)]
            if words:
                yield words
            start += len(part) + 1


def _number(word: Word, text: str, what: str, low: int, high: int = NUMBER_MAX) -> int:
    if not re.fullmatch(r"-?[0-9]{1,12}", text):
        _fail(word, f"{what} must be a whole number from {low} to {high}, not `{text[:40]}`")
    if not low <= int(text) <= high:
        _fail(word, f"{what} must be from {low} to {high}, not {text}")
    return int(text)


def _setting(word: Word) -> tuple[str, str]:
    key, separator, value = word.text.partition("=")
    if not separator or not key or not value:
        _fail(word, f"`{word.text[:40]}` is not of the form key=value")
    return key, value


def _settings(words: list[Word]) -> dict[str, tuple[Word, str]]:
    settings: dict[str, tuple[Word, str]] = {}
    for word in words:
        key, value = _setting(word)
        if key in settings:
            _fail(word, f"`{key}` is given twice")
        settings[key] = (word, value)
    return settings


def _cache_changes(words: list[Word]) -> dict[str, int | str]:
    changes: dict[str, int | str] = {}
    for key, (word, value) in _settings(words).items():
        converted: int | str = int(value) if re.fullmatch(r"-?[0-9]{1,12}", value) else value
        try:
            check_key(key, converted)
        except UsageError as error:
            _fail(word, str(error))
        changes[key] = converted
    return changes


def _read_model(words: list[Word]) -> Model:
    if len(words) < 2:
        _fail(words[0], "`model` needs a family, as in `model lfm2 seed=0`")
    try:
        family = family_of(Model(words[1].text))
    except UsageError as error:
        _fail(words[1], str(error))
    defaults = family.defaults
    seed, dimensions = 0, []
    for key, (word, value) in _settings(words[2:]).items():
        if key == "seed":
            seed = _number(word, value, "`seed`", 0, (1 << 32) - 1)
        elif key in defaults:
            dimensions.append((key, _number(word, value, f"dimension `{key}`", *family.bounds_of(key))))
        else:  # before its value, which says nothing when the name is not known
            _fail(word, f"family {words[1].text} has no dimension `{key[:40]}`; there are seed, {', '.join(defaults)}")
    model = Model(words[1].text, seed, tuple(sorted(dimensions)))
    try:
        dimensions_of(model)
    except UsageError as error:
        _fail(_dimension_at_fault(words, defaults, str(error)), str(error))
    return msgspec.structs.replace(model, dimensions=tuple((name, value) for name, value in model.dimensions if defaults[name] != value))


def _dimension_at_fault(words: list[Word], defaults: dict[str, int], message: str) -> Word:
    """The first given dimension that a message names; else the one that is the most times its default; else the family."""
    given = [word for word in words[2:] if word.text.partition("=")[0] in defaults]
    for word in given:
        if re.search(rf"\b{word.text.partition('=')[0]}\b", message):
            return word
    return max(given, key=lambda word: int(word.text.partition("=")[2]) / max(1, defaults[word.text.partition("=")[0]]), default=words[1])


def _read_item(word: Word) -> Item:
    match = re.fullmatch(r"([0-9]{1,9}(?:\+[0-9]{1,9})*):(?:([0-9]{1,12})(?:/([0-9]{1,12}))?|\[([^\]]*)\])", word.text)
    if not match:
        _fail(word, f"`{word.text[:40]}` is no decode item; write sequence:count, sequence:count/salt or sequence:[token,token]")
    owners, count, salt, tokens = match.groups()
    sequences = tuple(map(int, owners.split("+")))
    if tokens is not None:
        values = tuple(_number(word, token.strip(), "a token", 0) for token in tokens.split(","))
        return Item(sequences, len(values), 0, values)
    token_count = _number(word, count, "the number of tokens", 1, DECODE_TOKENS_MAX)
    return Item(sequences, token_count, _number(word, salt or "0", "the salt", 0, SALT_MAX))


def _split_settings(words: list[Word]) -> tuple[list[Word], dict[str, tuple[Word, str]]]:
    first = next((index for index, word in enumerate(words) if "=" in word.text), len(words))
    return words[:first], _settings(words[first:])


def _read_decode(words: list[Word]) -> Decode:
    items, settings = _split_settings(words[1:])
    outputs = None
    for key, (word, value) in settings.items():
        if key != "outputs":
            _fail(word, f"a decode has no `{key}`; only `outputs`")
        try:
            check_key(key, value)
        except UsageError as error:
            _fail(word, str(error))
        outputs = value
    if not items:
        _fail(words[0], "a decode needs at least one item, as in `decode 0:10`")
    return Decode(tuple(map(_read_item, items)), outputs)  # type: ignore[arg-type]  # check_key allowed it


def _read_cancel(words: list[Word]) -> Cancel:
    items, settings = _split_settings(words[1:])
    if not items or set(settings) != {"at"}:
        _fail(words[0], "`cancel` needs items and the point at which to stop, as in `cancel 0:3 at=40`")
    word, value = settings["at"]
    return Cancel(tuple(map(_read_item, items)), _number(word, value, "`at`", 0))


def _arguments(words: list[Word], names: tuple[str, ...], example: str, optional: int = 0) -> list[Word]:
    arguments = words[1:]
    if len(arguments) not in {len(names), len(names) - optional}:
        missing = len(arguments) < len(names) - optional
        if missing:
            _fail(words[0], f"`{' '.join(word.text for word in words)}` needs {names[len(arguments)]}, as in `{example}`")
        _fail(arguments[len(names)] if len(arguments) > len(names) else arguments[-1], f"`{words[0].text}` is written as in `{example}`")
    return arguments


_SEQUENCE = "which sequence"


def _read_rollback(words: list[Word]) -> Rollback:
    sequence, count = _arguments(words, (_SEQUENCE, "how many tokens to take back"), "rollback 0 2")
    return Rollback(_number(sequence, sequence.text, "the sequence", 0), _number(count, count.text, "the number of tokens to take back", 1))


def _read_remove(words: list[Word]) -> Remove:
    sequence, start, end = _arguments(words, (_SEQUENCE, "the first position", "the end of the range (-1 is open)"), "remove 0 4 9")
    return Remove(
        _number(sequence, sequence.text, "the sequence", 0),
        _number(start, start.text, "the first position", OPEN),
        _number(end, end.text, "the end of the range", OPEN),
    )


def _read_share(words: list[Word]) -> Share:
    names = ("the source", "the destination", "the first position", "the end of the range")
    arguments = _arguments(words, names, "share 0 1` or `share 0 1 0 6", optional=2)
    lows = (0, 0, OPEN, OPEN)
    return Share(*(_number(word, word.text, name, low) for word, name, low in zip(arguments, names, lows, strict=False)))


def _read_one_sequence(kind: Callable[[int], AnyOperation]) -> Callable[[list[Word]], AnyOperation]:
    def read(words: list[Word]) -> AnyOperation:
        (sequence,) = _arguments(words, (_SEQUENCE,), f"{words[0].text} 1")
        return kind(_number(sequence, sequence.text, "the sequence", 0))

    return read


def _read_shift(words: list[Word]) -> Shift:
    sequence, delta = _arguments(words, (_SEQUENCE, "by how many positions"), "shift 0 5")
    return Shift(_number(sequence, sequence.text, "the sequence", 0), _number(delta, delta.text, "the shift", -NUMBER_MAX))


def _read_divide(words: list[Word]) -> Divide:
    sequence, divisor = _arguments(words, (_SEQUENCE, "by which number"), "divide 0 2")
    return Divide(_number(sequence, sequence.text, "the sequence", 0), _number(divisor, divisor.text, "the divisor", 1))


def _slot(word: Word) -> str:
    try:
        _check_slot(word.text)
    except UsageError as error:
        _fail(word, str(error))
    return word.text


def _read_save(words: list[Word]) -> Save:
    if len(words) < 3:
        _fail(words[0], "`save` needs a sequence and a slot name, as in `save 0 a`")
    flags = [word.text for word in words[3:]]
    for word in words[3:]:
        if word.text not in ("partial", "device") or flags.count(word.text) > 1:
            _fail(word, f"`{word.text[:40]}` is not understood; a save ends in `partial`, `device` or both")
    return Save(_number(words[1], words[1].text, "the sequence", 0), _slot(words[2]), "partial" in flags, "device" in flags)


def _read_restore(words: list[Word]) -> Restore:
    slot, sequence = _arguments(words, ("a slot", _SEQUENCE), "restore a 2")
    return Restore(_slot(slot), _number(sequence, sequence.text, "the sequence", 0))


def _read_one_slot(kind: Callable[[str], AnyOperation]) -> Callable[[list[Word]], AnyOperation]:
    def read(words: list[Word]) -> AnyOperation:
        (slot,) = _arguments(words, ("a slot",), f"{words[0].text} b")
        return kind(_slot(slot))

    return read


def _read_damage(words: list[Word]) -> Damage:
    if len(words) < 3:
        _fail(words[0], "`damage` needs a slot and what to do, as in `damage a truncate 7`")
    slot, how = _slot(words[1]), words[2].text
    match how:
        case "truncate" | "flip":
            if len(words) != 4:
                _fail(words[2], f"`damage {slot} {how}` needs one number, as in `damage {slot} {how} 7`")
            return Damage(slot, how, _number(words[3], words[3].text, "the damage", int(how == "truncate")))
        case "header" | "foreign":
            if len(words) != 3:
                _fail(words[3], f"`damage {slot} {how}` takes no number")
            return Damage(slot, how)
        case _:
            _fail(words[2], f"`{how[:40]}` is no damage; there are truncate, flip, header and foreign")


def _read_clear(words: list[Word]) -> Clear:
    _arguments(words, (), "clear")
    return Clear()


def _read_reopen(words: list[Word]) -> Reopen:
    return Reopen(_cache_changes(words[1:]))


_READERS: dict[str, Callable[[list[Word]], AnyOperation]] = {
    "decode": _read_decode, "cancel": _read_cancel, "rollback": _read_rollback, "remove": _read_remove,
    "drop": _read_one_sequence(Drop), "share": _read_share, "keep": _read_one_sequence(Keep), "shift": _read_shift,
    "divide": _read_divide, "save": _read_save, "restore": _read_restore, "save_all": _read_one_slot(SaveAll),
    "restore_all": _read_one_slot(RestoreAll), "damage": _read_damage, "clear": _read_clear, "reopen": _read_reopen,
}  # fmt: skip
assert tuple(_READERS) == OPERATION_NAMES


def parse_program(text: str) -> Program:
    """Read program text. Raises ProgramError with line and column."""
    if len(text) > TEXT_CHARACTERS_MAX:
        raise ProgramError(f"the text has {len(text)} characters; a program has at most {TEXT_CHARACTERS_MAX}")
    statements = _statements(text)
    first = next(statements, None)
    if first is None:
        raise ProgramError("the program is empty; it begins with a model, as in `model lfm2 seed=0`", 1, 1)
    if first[0].text != "model":
        _fail(first[0], f"a program begins with its model, as in `model lfm2 seed=0`, not with `{first[0].text[:40]}`")
    model = _read_model(first)
    vocabulary_size = dimensions_of(model)["n_vocab"]
    cache = current = CacheConfiguration()
    reachable = cache.n_seq_max
    operations: list[AnyOperation] = []
    cache_seen = False
    for words in statements:
        name = words[0]
        if name.text == "cache":
            if operations or cache_seen:
                _fail(name, "`cache` comes once, before the first operation; `reopen` changes keys later")
            cache = current = _changed(cache, words)
            cache_seen = True
            reachable = cache.n_seq_max
            continue
        if name.text not in _READERS:
            _fail(name, f"unknown operation `{name.text[:40]}`; there are {', '.join(OPERATION_NAMES)}")
        if len(operations) == OPERATIONS_MAX:
            _fail(name, f"a program has at most {OPERATIONS_MAX} operations")
        operation = _READERS[name.text](words)
        if isinstance(operation, Reopen):
            current = _changed(current, words)
            reachable = max(reachable, current.n_seq_max)
        try:
            _check_operation(operation, reachable, vocabulary_size)
        except UsageError as error:
            _fail(_culprit(words, str(error)), str(error))
        operations.append(operation)
    return Program(model, cache, tuple(operations))


def _culprit(words: list[Word], message: str) -> Word:
    """The word that names the sequence or token that a message complains of; else the first argument."""
    named = re.match(r"(?:sequence|token) ([0-9]+) is not", message)
    if named:
        number = re.compile(rf"(?<![0-9]){named.group(1)}(?![0-9])")
        for word in words[1:]:
            part = word.text.partition(":")[0 if message.startswith("sequence") else 2]
            if number.search(part):
                return word
    return words[1] if len(words) > 1 else words[0]


def _changed(cache: CacheConfiguration, words: list[Word]) -> CacheConfiguration:
    try:
        return changed(cache, _cache_changes(words[1:]))
    except ProgramError:
        raise
    except UsageError as error:
        _fail(words[0], str(error))


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    model: Model
    cache: CacheConfiguration
    operations: tuple[AnyOperation, ...]


def parse_program_json(data: bytes | str) -> Program:
    """Read the JSON form. Raises ProgramError naming the key that is wrong."""
    if len(data) > 4 * TEXT_CHARACTERS_MAX:
        raise ProgramError(f"the JSON has {len(data)} bytes; a program has at most {4 * TEXT_CHARACTERS_MAX}")
    try:
        document = msgspec.json.decode(data, type=_Document)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeError) as error:
        raise ProgramError(f"this is no program in JSON: {error}") from None
    return _checked_program(document)


def program_from_builtins(value: Any) -> Program:
    """A program from the plain objects of its JSON form. Raises ProgramError."""
    try:
        document = msgspec.convert(value, _Document)
    except msgspec.ValidationError as error:
        raise ProgramError(f"this is no program in JSON: {error}") from None
    return _checked_program(document)


def _checked_program(document: _Document) -> Program:
    if document.format != FORMAT:
        raise ProgramError(f"format {document.format} is not known; this version reads format {FORMAT}")
    program = Program(document.model, document.cache, document.operations)
    try:
        check_program(program)
    except UsageError as error:
        raise ProgramError(str(error)) from None
    return program


def read_program(text: str) -> Program:
    """A program from either form: JSON when it begins with a brace, else text. Raises ProgramError."""
    return parse_program_json(text) if text.lstrip().startswith("{") else parse_program(text)
