"""Baselines: what is read, what is said of a wrong file, and that a change touches nothing of people's.

Rules
- Texts of errors name the file, the entry and the key.
"""

from datetime import date
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from statedrift.spec.errors import UsageError
from statedrift.spec.programs import parse_program
from statedrift.store.baseline import Entry, Versions, key_of, known_keys, parsed_baseline, read_baseline
from statedrift.store.baseline_changes import HEAD, Change, Seen, prune_baseline, update_baseline

PROGRAM = parse_program("model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1")
SIGNATURE = "numba/lfm2 wrong-output at decode (self) after decode+rollback"
ENTRY = Entry(
    SIGNATURE, "numba", "lfm2", PROGRAM, first_seen=date(2026, 1, 1), last_seen=date(2026, 2, 1), versions=Versions("1", "2"),
)  # fmt: skip
OTHER = msgspec.structs.replace(ENTRY, signature="numba/lfm2 bad-refusal at keep (self)")
THIRD = msgspec.structs.replace(ENTRY, signature='numba/lfm2 crash at clear (self) [a "b" \\ c]', documented=False)

BY_HAND = '''\
# of our team
owner = "cache team"  # who looks after this file

# a comment far from any entry

# about the rollback
[[finding]]
mine.deep = [1,
  2]   # two lines
signature = "numba/lfm2 wrong-output at decode (self) after decode+rollback"
target = "numba"
family = "lfm2"
ticket = "#12"   # open
reason = "waits"
expires = 2027-01-31
last_seen = 2026-02-01 # seen
versions = { first = "1", last = "2" }   # of numba
program = """
# [[finding]] is no entry here
model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1
"""

[finding.extra]
text = \'\'\'
[[finding]]
\'\'\'

# about keep
[[finding]]
signature = "numba/lfm2 bad-refusal at keep (self)"
target = "numba"
family = "lfm2"
program = "model lfm2 seed=0; keep 0"
# last words

[numbers]
one = 1
'''


def written(folder: Path, text: str) -> Path:
    path = folder / "known.toml"
    path.write_text(text)
    return path


def entry_text(**changes: str) -> str:
    keys = {
        "signature": f'"{SIGNATURE}"', "target": '"numba"', "family": '"lfm2"',
        "program": '"model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1"',
    } | changes  # fmt: skip
    return "[[finding]]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items() if value)


# --- reading -----------------------------------------------------------------------------------------------------------------


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    entries = (
        ENTRY, OTHER, THIRD,
        msgspec.structs.replace(ENTRY, oracle="engine", inspect=True, alternatives=("numba/mamba2 wrong-output at decode (self)",)),
        msgspec.structs.replace(ENTRY, target="a", against="b", signature="a against b/lfm2 wrong-output at decode (self)"),
    )  # fmt: skip
    changes = update_baseline(path, entries, {})
    assert [change.what for change in changes] == ["added"] * 5
    assert read_baseline(path).entries == entries
    assert path.read_text().startswith(HEAD)


def test_a_file_written_by_hand_needs_four_keys(tmp_path: Path) -> None:
    (entry,) = read_baseline(written(tmp_path, entry_text())).entries
    assert entry == Entry(SIGNATURE, "numba", "lfm2", PROGRAM)
    assert entry.documented
    assert entry.expires is None


@pytest.mark.parametrize("text", ["", "# nothing yet\n", 'owner = "us"\n'])
def test_a_file_without_entries_is_a_baseline(text: str, tmp_path: Path) -> None:
    assert read_baseline(written(tmp_path, text)).entries == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[finding]]\nsignature = \n", ["known.toml", "line 2"]),
        ("format = 2\n", ["known.toml", "format 2", "format 1"]),
        ("finding = 3\n", ["known.toml", "[[finding]]"]),
        (entry_text(signature=""), ["entry 1, key signature", "missing", 'signature = "']),
        (entry_text(program=""), ["entry 1, key program", "missing"]),
        (entry_text(family="3"), ["entry 1, key family", 'family = "lfm2"', "not 3"]),
        (entry_text(expires='"soon"'), ["entry 1, key expires", "a date without quotes", 'the text "soon"']),
        (entry_text(expires='"2027-01-31"'), ["entry 1, key expires", "without quotes"]),
        (entry_text(expires="2027-01-31T00:00:00"), ["entry 1, key expires", "a date"]),
        (entry_text(documented='"no"'), ["entry 1, key documented", "true or false"]),
        (entry_text(documented="1"), ["entry 1, key documented", "true or false"]),
        (entry_text(versions='{ first = "1" }'), ["entry 1, key versions", "last ="]),
        (entry_text(oracle='"mine"'), ["entry 1, key oracle", '"own" or "engine"']),
        (entry_text(alternatives="[1]"), ["entry 1, key alternatives", "list of texts"]),
        (entry_text(program='"model lfm2 seed=0; rollback 0"'), ["entry 1, key program", "line 1, column"]),
        (entry_text(program='"model rwkv99; keep 0"'), ["entry 1, key program", "rwkv99"]),
        (entry_text(family='"mamba2"', signature='"numba/mamba2 crash at keep (self)"'), ["entry 1, key family", "mamba2", "lfm2"]),
        (entry_text(target='"numba-ring"'), ["entry 1, key signature", "numba-ring/lfm2"]),
        (entry_text() + entry_text(), ["entry 2, key signature", "earlier entry"]),
        ('[[finding]]\n"x\\u0000" = 1\n', ["entry 1, key signature"]),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong_and_what_to_do(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_baseline(written(tmp_path, text))
    assert [word for word in ["known.toml", *words] if word not in str(caught.value)] == []


def test_a_file_that_is_not_there_or_no_text_is_an_error_that_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--update"):
        read_baseline(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        read_baseline(tmp_path / "binary.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        read_baseline(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\ufeffformat = 1\n", "byte order mark"),
        ("own = " + "[" * 5000, "cannot be read|is no TOML"),
        ("own = " + "9" * 5000, "cannot be read"),
    ],
    ids=["byte order mark", "deep", "long number"],
)
def test_what_readers_stumble_over_is_said(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "known.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_baseline(path)


def test_a_slip_of_the_pen_is_remarked_on(tmp_path: Path) -> None:
    baseline = read_baseline(written(tmp_path, entry_text(expire="2027-01-31", note='"mine"')))
    (remark,) = baseline.remarks
    assert 'entry 1 has the key "expire"' in remark
    assert '"expires"' in remark
    assert read_baseline(written(tmp_path, "[[findings]]\n")).remarks


def test_an_entry_is_known_by_its_signature_and_its_names_in_simpler_families() -> None:
    name = "numba/mamba2 wrong-output at decode (self) after decode+rollback"
    entry = msgspec.structs.replace(ENTRY, alternatives=(name,))
    assert known_keys([entry]) == {(SIGNATURE, "own"), (name, "own")}
    assert key_of(msgspec.structs.replace(entry, oracle="engine")) not in known_keys([entry])


# --- changing ----------------------------------------------------------------------------------------------------------------


def test_bringing_an_entry_up_to_date_changes_its_day_and_version_and_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path, BY_HAND)
    changes = update_baseline(path, [], {key_of(ENTRY): Seen(date(2026, 3, 1), "3 (build 7)")})
    assert changes == (Change("updated", SIGNATURE, "last seen 2026-03-01, with 3"),)
    assert path.read_text() == (
        BY_HAND.replace("last_seen = 2026-02-01 # seen", "last_seen = 2026-03-01 # seen", 1)
        .replace('last = "2" }   # of numba', 'last = "3 (build 7)" }   # of numba')
        .replace("\n[finding.extra]", "first_seen = 2026-03-01\n\n[finding.extra]")
    )  # fmt: skip


def test_an_entry_that_says_it_already_or_knows_a_later_day_is_left_alone(tmp_path: Path) -> None:
    path = written(tmp_path, BY_HAND)
    stamp = path.stat().st_mtime_ns
    assert update_baseline(path, [msgspec.structs.replace(ENTRY, last_seen=date(2026, 1, 5))], {}) == ()
    assert update_baseline(path, [], {key_of(ENTRY): Seen(date(2026, 2, 1), "2")}) == ()
    assert (path.read_text(), path.stat().st_mtime_ns) == (BY_HAND, stamp)


def test_the_later_of_two_sightings_counts(tmp_path: Path) -> None:
    path = written(tmp_path, BY_HAND)
    later = msgspec.structs.replace(ENTRY, last_seen=date(2026, 4, 1), versions=Versions("4", "4"))
    update_baseline(path, [later], {key_of(ENTRY): Seen(date(2026, 3, 1), "3")})
    entry = read_baseline(path).entries[0]
    assert (entry.last_seen, entry.versions) == (date(2026, 4, 1), Versions("1", "4"))


def test_a_new_entry_comes_after_the_others_and_moves_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, BY_HAND)
    assert update_baseline(path, [ENTRY, THIRD], {}) == (Change("added", THIRD.signature, "undocumented"),)
    before, _, after = path.read_text().partition(
        path.read_text()[path.read_text().index('\n[[finding]]\nsignature = "numba/lfm2 crash') :]
    )
    assert BY_HAND.startswith(before)
    assert path.read_text().endswith("\n[numbers]\none = 1\n")
    assert after == ""
    entry = read_baseline(path).entries[2]
    assert (entry.signature, entry.program, entry.documented) == (THIRD.signature, PROGRAM, False)


def test_removing_takes_an_entry_and_the_comment_above_it(tmp_path: Path) -> None:
    path = written(tmp_path, BY_HAND)
    assert prune_baseline(path, {key_of(ENTRY): PROGRAM}) == (Change("removed", SIGNATURE),)
    start, end = BY_HAND.index("\n# about the rollback"), BY_HAND.index("\n# about keep")
    assert path.read_text() == BY_HAND[:start] + BY_HAND[end:]


def test_an_entry_whose_program_was_changed_since_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path, BY_HAND)
    (change,) = prune_baseline(path, {key_of(ENTRY): parse_program("model lfm2 seed=0; keep 0")})
    assert (change.what, "program" in change.why) == ("kept", True)
    assert path.read_text() == BY_HAND


def test_a_layout_that_cannot_be_changed_safely_is_left_alone(tmp_path: Path) -> None:
    inline = f'finding = [{{ signature = "{SIGNATURE}", target = "numba", family = "lfm2", program = "model lfm2 seed=0; keep 0" }}]\n'
    path = written(tmp_path, inline)
    assert len(read_baseline(path).entries) == 1
    for change in (lambda: update_baseline(path, [OTHER], {}), lambda: prune_baseline(path, {key_of(ENTRY): PROGRAM})):
        with pytest.raises(UsageError, match=r"left as it is.*\[\[finding\]\]"):
            change()
    assert path.read_text() == inline


def test_a_first_update_makes_the_file_even_when_nothing_is_known(tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    assert update_baseline(path, [], {}) == ()
    assert read_baseline(path).entries == ()
    assert update_baseline(path, [ENTRY], {}) == (Change("added", SIGNATURE),)
    assert path.read_text().startswith(HEAD + "\n[[finding]]\n")


NAMES = [f"numba/lfm2 {kind} at keep (self)" for kind in ("crash", "hang", "nonfinite", "bad-refusal")]
MINE = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x7f", exclude_categories=("Cc", "Cs")), max_size=12)
LAYOUT = st.lists(st.tuples(st.sampled_from(NAMES), MINE, MINE, st.sampled_from(["", "\n", "\n\n"])), unique_by=lambda row: row[0])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LAYOUT, st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(NAMES)))
def test_whatever_is_added_and_removed_the_rest_of_the_file_stays(
    tmp_path: Path, rows: list[tuple[str, str, str, str]], wanted: set[str], gone: set[str]
) -> None:
    blocks = {
        name: f"#{above}\n[[finding]]\nmine = {msgspec.json.encode(mine).decode()}\n"
        + entry_text(signature=f'"{name}"').removeprefix("[[finding]]\n").rstrip() + f"#{above}\n{gap}"
        for name, above, mine, gap in rows
    }  # fmt: skip
    path = written(tmp_path, "# head\n\n" + "".join(blocks.values()))
    update_baseline(path, [msgspec.structs.replace(ENTRY, signature=name) for name in sorted(wanted)], {})
    prune_baseline(path, {(name, "own"): PROGRAM for name in gone})
    left = [name for name in blocks if name not in gone]
    assert [entry.signature for entry in read_baseline(path).entries] == left + sorted(wanted - gone - blocks.keys())
    text = path.read_text()
    assert text.startswith("# head\n")
    for name in left:
        assert blocks[name].strip("\n") in text
    for name in gone & blocks.keys():
        assert name not in text
    assert parsed_baseline(path, text).remarks == ()
