"""Programs as text and as JSON: nothing is lost on the way, ids stay, and errors name their place.

Rules
- Golden files in golden/programs/ are canonical texts named by their id; a program that someone stored must keep both.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.errors import ProgramError, UsageError
from statedrift.spec.families import ENGINE_ONLY, FAMILIES, dimensions_of
from statedrift.spec.models import Model, model_text
from statedrift.spec.operations import (
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
    operation_name,
)
from statedrift.spec.programs import (
    NUMBER_MAX,
    SALT_MAX,
    Program,
    check_program,
    parse_program,
    parse_program_json,
    program_from_builtins,
    program_id,
    program_json,
    program_text,
    read_program,
)

GOLDEN = Path(__file__).parent / "golden" / "programs"
HEAD = "model lfm2 seed=0\n"

# --- every operation and key, by hand ---------------------------------------------------------------------------------------

SEQUENCES = 3
sequences = st.integers(0, SEQUENCES - 1)
numbers = st.integers(1, NUMBER_MAX)
positions = st.integers(OPEN, NUMBER_MAX)
slots = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,31}", fullmatch=True)
outputs = st.sampled_from(["all", "last", "embeddings"])
owners = st.lists(sequences, min_size=1, unique=True).map(tuple)
items = st.one_of(
    st.builds(Item, owners, st.integers(1, 500), st.integers(0, SALT_MAX)),
    st.builds(
        lambda who, tokens: Item(who, len(tokens), 0, tokens), owners, st.lists(st.integers(0, 63), min_size=1, max_size=9).map(tuple)
    ),
)
batches = st.lists(items, min_size=1, max_size=4).map(tuple)
key_values: dict[str, st.SearchStrategy[int | str]] = {
    "n_seq_max": st.integers(SEQUENCES, 256), "n_rs_seq": st.integers(0, 255), "n_ubatch": st.integers(1, 4096), "n_ctx": st.integers(1, 1024),
    "unified": st.integers(0, 1), "start": st.sampled_from(["fresh", "dirty", "poison"]), "interleave": st.integers(0, 1), "outputs": outputs,
    "swa_full": st.integers(0, 1), "kv": st.sampled_from(["f32", "f16"]), "flash": st.integers(0, 1),
}  # fmt: skip
damages = st.one_of(
    st.builds(Damage, slots, st.just("truncate"), numbers),
    st.builds(Damage, slots, st.just("flip"), st.integers(0, NUMBER_MAX)),
    st.builds(Damage, slots, st.sampled_from(["header", "foreign"])),
)
BY_NAME: dict[str, st.SearchStrategy[AnyOperation]] = {
    "decode": st.builds(Decode, batches, st.none() | outputs),
    "cancel": st.builds(Cancel, batches, st.integers(0, NUMBER_MAX)),
    "rollback": st.builds(Rollback, sequences, numbers),
    "remove": st.builds(Remove, sequences, positions, positions),
    "drop": st.builds(Drop, sequences),
    "share": st.builds(Share, sequences, sequences, positions, positions),
    "keep": st.builds(Keep, sequences),
    "shift": st.builds(Shift, sequences, st.integers(-NUMBER_MAX, NUMBER_MAX)),
    "divide": st.builds(Divide, sequences, numbers),
    "save": st.builds(Save, sequences, slots, st.booleans(), st.booleans()),
    "restore": st.builds(Restore, slots, sequences),
    "save_all": st.builds(SaveAll, slots),
    "restore_all": st.builds(RestoreAll, slots),
    "damage": damages,
    "clear": st.just(Clear()),
    "reopen": st.builds(Reopen, st.fixed_dictionaries({}, optional=key_values)),
}
caches = st.fixed_dictionaries({}, optional=key_values).map(lambda keys: CacheConfiguration(**keys))  # type: ignore[arg-type]
models = st.builds(
    Model,
    st.sampled_from(["lfm2", "mamba2"]),
    st.integers(0, (1 << 32) - 1),
    st.sampled_from([(), (("n_layer", 6),), (("n_layer", 2), ("n_vocab", 128))]),
)
handmade = st.builds(Program, models, caches, st.lists(st.one_of(*BY_NAME.values()), max_size=12).map(tuple))


@given(handmade)
def test_text_is_read_back_as_the_same_program(program: Program) -> None:
    check_program(program)
    assert parse_program(program_text(program)) == program


@given(handmade)
def test_json_is_read_back_as_the_same_program(program: Program) -> None:
    assert parse_program_json(program_json(program)) == program
    assert program_from_builtins(json.loads(program_json(program))) == program


@given(handmade)
def test_canonical_text_is_a_fixed_point(program: Program) -> None:
    text = program_text(program)
    assert program_text(parse_program(text)) == text


@given(handmade)
def test_a_program_fits_on_one_line(program: Program) -> None:
    line = program_text(program).rstrip("\n").replace("\n", " ; ")
    assert program_id(parse_program(line)) == program_id(program)


@pytest.mark.parametrize("name", OPERATION_NAMES)
def test_every_operation_is_read_back_from_text_and_json(name: str) -> None:
    @settings(max_examples=30)
    @given(BY_NAME[name])
    def read_back(operation: AnyOperation) -> None:
        program = Program(Model("lfm2"), CacheConfiguration(), (operation,))
        assert operation_name(operation) == name
        assert program_text(program).splitlines()[-1].split()[0] == name
        assert parse_program(program_text(program)) == parse_program_json(program_json(program)) == program

    read_back()


@pytest.mark.parametrize("key", key_values)
def test_every_cache_key_is_written_unless_it_is_the_default(key: str) -> None:
    @settings(max_examples=20)
    @given(key_values[key])
    def written(value: int | str) -> None:
        cache = CacheConfiguration(**{key: value})  # type: ignore[arg-type]
        text = program_text(Program(Model("lfm2"), cache, ()))
        is_default = value == getattr(CacheConfiguration(), key)
        assert text == "model lfm2 seed=0\n" + ("" if is_default else f"cache {key}={value}\n")

    written()


@given(handmade)
def test_reading_either_form_gives_the_same(program: Program) -> None:
    assert read_program(program_text(program)) == read_program(program_json(program).decode()) == program


# --- golden texts and ids -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.drift")), ids=lambda path: path.stem)
def test_stored_programs_keep_their_text_and_id(path: Path) -> None:
    text = path.read_text()
    program = parse_program(text)
    assert program_text(program) == text
    assert program_id(program) == path.stem


def test_the_golden_programs_use_every_operation() -> None:
    paths = list(GOLDEN.glob("*.drift"))
    names = {line.split()[0] for path in paths for line in path.read_text().splitlines()}
    assert len(paths) >= 4
    assert names == {"model", "cache", *OPERATION_NAMES}


def bounded_models() -> list[Model]:
    """Every family with each of its dimensions at its least and at its largest value, where that makes a model by itself."""
    families = {**FAMILIES, **ENGINE_ONLY}
    ends = [(name, key, end) for name, family in families.items() for key in family.defaults for end in family.bounds_of(key)]
    models = [Model(name, 0, ((key, end),)) for name, key, end in ends if end != families[name].defaults[key]]
    return [model for model in models if is_model(model)]


def is_model(model: Model) -> bool:
    try:
        dimensions_of(model)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("model", bounded_models(), ids=lambda model: model_text(model))
def test_a_dimension_at_its_bound_is_read_back_from_text_and_json(model: Model) -> None:
    program = Program(model, CacheConfiguration(), (Drop(0),))
    assert parse_program(program_text(program)) == program
    assert parse_program_json(program_json(program)) == program


def test_the_bounds_that_begin_at_zero_are_among_them() -> None:
    zeros = {(model.family, *model.dimensions) for model in bounded_models() if model.dimensions[0][1] == 0}
    assert ("kimi_linear", ("n_dense", 0)) in zeros


def test_comments_order_blanks_and_defaults_do_not_change_the_id() -> None:
    loose = (
        "# why\n\n  model   mamba2 n_layer=3 seed=4 # n_layer=3 is the default\r\n"
        "cache start=dirty n_seq_max=2 kv=f32;; decode 0:3/0 1:[ 1,2 ] # two\n\trollback 0 1;drop 1\n"
    )
    canonical = "model mamba2 seed=4\ncache n_seq_max=2 start=dirty\ndecode 0:3 1:[1,2]\nrollback 0 1\ndrop 1\n"
    assert program_text(parse_program(loose)) == canonical
    assert program_id(parse_program(loose)) == program_id(parse_program(canonical))


def test_json_is_one_object_of_format_1() -> None:
    program = parse_program(HEAD + "cache n_rs_seq=1\ndecode 0:1/2\nsave 0 a partial\n")
    assert json.loads(program_json(program)) == {
        "format": 1,
        "model": {"family": "lfm2"},
        "cache": {"n_rs_seq": 1},
        "operations": [
            {"op": "decode", "items": [{"sequences": [0], "token_count": 1, "salt": 2}]},
            {"op": "save", "sequence": 0, "slot": "a", "partial": True},
        ],
    }


# --- errors -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "column", "says"),
    [
        ("", 1, 1, "the program is empty"),
        ("# only a comment\n\n", 1, 1, "the program is empty"),
        ("decode 0:1", 1, 1, "begins with its model"),
        ("model", 1, 1, "needs a family"),
        ("model nosuch", 1, 7, "unknown family `nosuch`"),
        ("model lfm2 seed=x", 1, 12, "not `x`"),
        ("model lfm2 seed=-1", 1, 12, "from 0 to 4294967295"),
        ("model lfm2 seed=4294967296", 1, 12, "from 0 to 4294967295"),
        ("model lfm2 seed=0 seed=1", 1, 19, "`seed` is given twice"),
        ("model lfm2 n_lair=3", 1, 12, "no dimension `n_lair`"),
        ("model lfm2 sed=0", 1, 12, "family lfm2 has no dimension `sed`; there are seed, n_vocab, "),
        ("model lfm2 seed=0 n_ff=0 sed=x", 1, 19, "`n_ff` must be from 1"),
        ("model rwkv9 sed=x", 1, 7, "rwkv9"),
        ("model lfm2 seed=3 n_layer=0", 1, 19, "`n_layer` must be from 1"),
        ("model lfm2 seed=3 n_layer=9999", 1, 19, "`n_layer` must be from 1 to 64"),
        ("model lfm2 seed=3 n_ff=64 n_embd=33", 1, 27, "n_embd"),
        ("model lfm2 n_ff=4096 n_embd=4096", 1, 22, "parameters"),
        ("model kimi_linear n_dense=65", 1, 19, "`n_dense` must be from 0 to 64"),
        ("model lfm2 depth", 1, 12, "not of the form key=value"),
        (HEAD + "cache n_seq_max=0", 2, 7, "from 1 to 256, not 0"),
        (HEAD + "cache n_rs_seq=1 n_sequences=2", 2, 18, "unknown cache key `n_sequences`"),
        (HEAD + "cache start=wet", 2, 7, "fresh, dirty, poison"),
        (HEAD + "cache n_ctx", 2, 7, "not of the form key=value"),
        (HEAD + "cache n_ctx=16384 n_seq_max=256", 2, 1, "make one of them smaller"),
        (HEAD + "cache kv=f16\ncache flash=1", 3, 1, "`cache` comes once"),
        (HEAD + "decode 0:1\ncache n_ctx=8", 3, 1, "before the first operation"),
        (HEAD + "decode", 2, 1, "at least one item"),
        (HEAD + "decode 0", 2, 8, "no decode item"),
        (HEAD + "decode 0:1 1:0", 2, 12, "from 1 to 4096, not 0"),
        (HEAD + "decode 0:1/4294967296", 2, 8, "the salt must be from 0"),
        (HEAD + "decode 0:4097", 2, 8, "from 1 to 4096"),
        (HEAD + "decode 0:4000 1:97", 2, 8, "4097 tokens in one decode"),
        (HEAD + "decode 4:1", 2, 8, "sequence 4 is not in 0..3"),
        (HEAD + "decode 0:[64]", 2, 8, "token 64 is not in the vocabulary 0..63"),
        (HEAD + "decode 0:1  1:[3, -1]", 2, 13, "a token must be from 0"),
        (HEAD + "decode 0:[]", 2, 8, "a token must be a whole number"),
        (HEAD + "decode 0:[1,2", 2, 8, "no decode item"),
        (HEAD + "decode 0:[1,2]x", 2, 8, "no decode item"),
        (HEAD + "decode 0+0:1", 2, 8, "each of them once"),
        (HEAD + "decode 0:99999999999999", 2, 8, "no decode item"),
        (HEAD + "decode 0:\N{ARABIC-INDIC DIGIT ONE}", 2, 8, "no decode item"),
        (HEAD + "decode 0:1 outputs=some", 2, 12, "all, last, embeddings"),
        (HEAD + "decode 0:1 at=3", 2, 12, "a decode has no `at`"),
        (HEAD + "decode outputs=all 0:1", 2, 20, "not of the form key=value"),
        (HEAD + "cancel 0:1", 2, 1, "the point at which to stop"),
        (HEAD + "cancel 0:1 at=-1", 2, 12, "`at` must be from 0"),
        (HEAD + "rollback 0", 2, 1, "how many tokens to take back, as in `rollback 0 2`"),
        (HEAD + "rollback 0 0", 2, 12, "from 1 to"),
        (HEAD + "rollback 0 two", 2, 12, "not `two`"),
        (HEAD + "rollback 0 1 2", 2, 14, "as in `rollback 0 2`"),
        (HEAD + "rollback -1 2", 2, 10, "the sequence must be from 0"),
        (HEAD + "rollback 9 2", 2, 10, "sequence 9 is not in 0..3"),
        (HEAD + "remove 0 1", 2, 1, "the end of the range"),
        (HEAD + "remove 0 -2 4", 2, 10, "from -1"),
        (HEAD + "drop", 2, 1, "which sequence, as in `drop 1`"),
        (HEAD + "drop 0 1", 2, 8, "as in `drop 1`"),
        (HEAD + "share 0", 2, 1, "the destination"),
        (HEAD + "share 0 1 2", 2, 11, "share 0 1 0 6"),
        (HEAD + "keep x", 2, 6, "not `x`"),
        (HEAD + "shift 0 2147483648", 2, 9, "the shift must be from"),
        (HEAD + "divide 0 0", 2, 10, "the divisor must be from 1"),
        (HEAD + "save 0", 2, 1, "a slot name"),
        (HEAD + "save 0 7up", 2, 8, "`7up` is no slot name"),
        (HEAD + "save 0 a whole", 2, 10, "`whole` is not understood"),
        (HEAD + "save 0 a partial partial", 2, 10, "is not understood"),
        (HEAD + "restore a", 2, 1, "which sequence"),
        (HEAD + "save_all", 2, 1, "a slot, as in `save_all b`"),
        (HEAD + "restore_all a b", 2, 15, "as in `restore_all b`"),
        (HEAD + "damage a", 2, 1, "what to do"),
        (HEAD + "damage a burn", 2, 10, "`burn` is no damage"),
        (HEAD + "damage a truncate", 2, 10, "needs one number"),
        (HEAD + "damage a truncate 0", 2, 19, "from 1"),
        (HEAD + "damage a header 3", 2, 17, "takes no number"),
        (HEAD + "clear 0", 2, 7, "as in `clear`"),
        (HEAD + "reopen n_seqs=2", 2, 8, "unknown cache key `n_seqs`"),
        (HEAD + "reopen n_seq_max=2 n_seq_max=3", 2, 20, "given twice"),
        (HEAD + "reopen n_seq_max=2;decode 4:1", 2, 27, "sequence 4 is not in 0..3"),
        (HEAD + "reopen n_ctx=16384;reopen n_seq_max=256", 2, 20, "make one of them smaller"),
        (HEAD + "fork 0 1", 2, 1, "unknown operation `fork`"),
        (HEAD + "decode 0:1; rollback 0", 2, 13, "how many tokens"),
        ("model lfm2 # tail\n\n  decode 0:1 ; rollback 0 x", 3, 27, "not `x`"),
    ],
)
def test_a_malformed_text_is_an_error_at_its_place(text: str, line: int, column: int, says: str) -> None:
    with pytest.raises(ProgramError) as caught:
        parse_program(text)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert str(caught.value).startswith(f"line {line}, column {column}: ")
    assert says in str(caught.value)


def is_program_or_has_place(text: str) -> bool:
    """Whether the text is a program that is read back from its canonical text, or an error with a place in the text."""
    try:
        program = parse_program(text)
    except ProgramError as error:
        return 1 <= error.line <= text.count("\n") + 1 and error.column >= 1
    return parse_program(program_text(program)) == program


@given(st.text(alphabet="modelcachdrvs0123456789:/[],+-=_;# \n\t", max_size=60))
def test_any_text_is_a_program_or_an_error_with_a_place(text: str) -> None:
    assert is_program_or_has_place(text)
    assert is_program_or_has_place(HEAD + text)


@given(handmade, st.data())
def test_a_text_with_a_hole_is_a_program_or_an_error_with_a_place(program: Program, data: st.DataObject) -> None:
    text = program_text(program)
    start = data.draw(st.integers(0, len(text)))
    holed = text[:start] + data.draw(st.sampled_from(["", "x", "-", "9" * 20, ":", "\x00"])) + text[start + data.draw(st.integers(0, 3)) :]
    assert is_program_or_has_place(holed)


def test_more_operations_than_allowed_is_an_error_at_the_first_too_many() -> None:
    with pytest.raises(ProgramError, match="at most 10000 operations") as caught:
        parse_program(HEAD + "clear\n" * 10_001)
    assert caught.value.line == 10_002


def document(**changes: Any) -> str:
    return json.dumps({"format": 1, "model": {"family": "lfm2"}, "cache": {}, "operations": [], **changes})


def document_of(operation: dict[str, Any]) -> str:
    return document(operations=[operation])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no program in JSON"),
        ("{}", "`format`"),
        (document(format=2), "format 2 is not known"),
        (document(extra=1), "unknown field `extra`"),
        (document(model={"family": "nosuch"}), "unknown family `nosuch`"),
        (document(model={"family": "lfm2", "seed": 1 << 40}), "`seed` must be"),
        (document(model={"family": "lfm2", "dimensions": [["n_lair", 2]]}), "no dimension `n_lair`"),
        (document(cache={"n_seq_max": 0}), "from 1 to 256"),
        (document(cache={"kv": "f8"}), "$.cache.kv"),
        (document(cache={"unified": True}), "$.cache.unified"),
        (document_of({"op": "nope"}), "$.operations[0].op"),
        (document_of({"op": "rollback", "sequence": 0}), "`token_count`"),
        (document_of({"op": "rollback", "sequence": 0, "token_count": True}), "$.operations[0].token_count"),
        (document_of({"op": "rollback", "sequence": -1, "token_count": 1}), "sequence -1 is not in 0..3"),
        (document_of({"op": "reopen", "changes": {"n_seq_max": 1.5}}), "$.operations[0].changes"),
        (document_of({"op": "reopen", "changes": {"bad": 1}}), "unknown cache key `bad`"),
        (document_of({"op": "decode", "items": []}), "at least one item"),
        (document_of({"op": "decode", "items": [{"sequences": [], "token_count": 1}]}), "at least one sequence"),
        (document_of({"op": "decode", "items": [{"sequences": [0], "token_count": 2, "tokens": [1]}]}), "their own count"),
        (document_of({"op": "decode", "items": [{"sequences": [0], "token_count": 1, "tokens": [1], "salt": 3}]}), "without a salt"),
        (document_of({"op": "decode", "items": [{"sequences": [0], "token_count": 10**30}]}), "from 1 to 4096"),
        (document_of({"op": "save", "sequence": 0, "slot": "a b"}), "no slot name"),
        (document_of({"op": "clear", "x": 1}), "unknown field `x`"),
    ],
)
def test_a_malformed_json_is_an_error_that_names_the_key(text: str, says: str) -> None:
    with pytest.raises(ProgramError) as caught:
        read_program(text)
    assert says in str(caught.value)


def is_kept_or_refused(text: str) -> bool:
    """Whether JSON is refused, or is a program that its own text gives back."""
    try:
        program = parse_program_json(text)
    except ProgramError:
        return True
    return parse_program(program_text(program)) == program


@pytest.mark.parametrize(
    "text",
    [
        document(model={"family": "lfm2", "dimensions": [["n_layer", 4]]}),  # the default
        document(model={"family": "lfm2", "dimensions": [["n_layer", 5], ["n_ff", 40]]}),  # not sorted
        document(model={"family": "lfm2", "dimensions": [["n_layer", 5], ["n_layer", 6]]}),  # twice
        document_of({"op": "damage", "slot": "a", "how": "header", "amount": 4}),  # a number nobody reads
    ],
)
def test_json_takes_nothing_that_text_cannot_say(text: str) -> None:
    assert is_kept_or_refused(text)
