"""What PROGRAM may be: a file, an id, or text; and what is said of everything else."""

import io
import shlex
from pathlib import Path

import pytest
from statedrift.cli.given import FILE_BYTES_MAX, Given, looks_like_text, one_line, read_file, read_given
from statedrift.fuzz.trial import check_judgeable
from statedrift.spec.errors import UnavailableError, UsageError
from statedrift.spec.programs import Program, parse_program, program_id, program_json, program_text

PROGRAM = parse_program("model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1/1")


def keep(folder: Path, program: Program, kind: str = "wrong-output") -> Path:
    """Put a program where a campaign keeps its findings."""
    path = folder / "findings" / f"{kind}-{program_id(program)[:6]}" / "program.drift"
    path.parent.mkdir(parents=True)
    path.write_text("# a comment\n" + program_text(program))
    return path


@pytest.mark.parametrize(
    ("argument", "is_text"),
    [
        ("model lfm2 seed=0; decode 0:1", True),
        ("  model lfm2\ndecode 0:1", True),
        ("model;", True),
        ('{"format": 1}', True),
        ("model", False),
        ("model.drift", False),
        ("models/a.drift", False),
        ("a program.drift", False),
        ("3f9ac17e02bd", False),
    ],
)
def test_text_is_recognised_by_its_beginning(argument: str, is_text: bool) -> None:
    assert looks_like_text(argument) is is_text


def test_text_json_and_files_give_the_same_program(tmp_path: Path) -> None:
    text_file, json_file = tmp_path / "a.drift", tmp_path / "a.json"
    text_file.write_bytes(b"\xef\xbb\xbf# comment\r\n" + program_text(PROGRAM).replace("\n", "\r\n").encode())
    json_file.write_bytes(program_json(PROGRAM))
    arguments = [program_text(PROGRAM), program_json(PROGRAM).decode(), str(text_file), str(json_file)]
    assert [read_given(argument, None).program for argument in arguments] == [PROGRAM] * 4


def test_the_words_of_a_text_are_read_back_by_a_shell() -> None:
    words = shlex.split(read_given(program_text(PROGRAM), None).words)
    assert len(words) == 1
    assert read_given(words[0], None).program == PROGRAM
    assert one_line(PROGRAM) == "'model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1/1'"


def test_a_file_with_a_space_in_its_name_is_quoted(tmp_path: Path) -> None:
    path = tmp_path / "a program.drift"
    path.write_text(program_text(PROGRAM))
    assert shlex.split(read_given(str(path), None).words) == [str(path)]


@pytest.mark.parametrize("digits", [4, 6, 9, 12])
def test_an_id_is_found_in_every_campaign_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: int) -> None:
    monkeypatch.chdir(tmp_path)
    keep(tmp_path / "runs" / "one", parse_program("model lfm2 seed=0; decode 0:3"))
    keep(tmp_path / "runs" / "two", PROGRAM)
    given = read_given(program_id(PROGRAM)[:digits], None)
    assert (given.program, given.words) == (PROGRAM, program_id(PROGRAM))


def test_an_id_is_found_where_a_test_suite_keeps_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keep(tmp_path / "kept", PROGRAM)
    (tmp_path / "runs" / "pytest").mkdir(parents=True)
    (tmp_path / "kept" / "findings").rename(tmp_path / "runs" / "pytest" / "TestMyCache")
    assert read_given(program_id(PROGRAM), None).program == PROGRAM


def test_a_findings_json_stands_for_the_program_beside_it(tmp_path: Path) -> None:
    keep(tmp_path, PROGRAM)
    (folder,) = (tmp_path / "findings").iterdir()
    (folder / "finding.json").write_text("{}")
    assert read_given(str(folder / "finding.json"), None).program == PROGRAM


def test_an_id_is_found_in_the_campaign_that_is_named(tmp_path: Path) -> None:
    keep(tmp_path / "my runs", PROGRAM)
    given = read_given(program_id(PROGRAM), tmp_path / "my runs")
    assert given.program == PROGRAM
    assert shlex.split(given.words) == [program_id(PROGRAM), "--campaign", str(tmp_path / "my runs")]


def test_an_id_of_nothing_says_where_was_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no finding with id 0123456789ab in runs/"):
        read_given("0123456789ab", None)
    with pytest.raises(UsageError, match="is no folder of a campaign"):
        read_given("0123456789ab", tmp_path / "nothing")


def test_a_damaged_finding_does_not_hide_another(tmp_path: Path) -> None:
    keep(tmp_path, PROGRAM)
    torn = tmp_path / "findings" / f"crash-{program_id(PROGRAM)[:6]}" / "program.drift"
    torn.parent.mkdir()
    torn.write_text("model lfm2\ndeco")
    assert read_given(program_id(PROGRAM), tmp_path).program == PROGRAM


def test_a_damaged_program_is_not_taken_for_its_folders_id(tmp_path: Path) -> None:
    path = keep(tmp_path, PROGRAM)
    path.write_text("model lfm2 seed=0\ndecode 0:1\n")
    with pytest.raises(UsageError, match="no finding with id"):
        read_given(program_id(PROGRAM), tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"model lfm2\0", "binary"),
        (b"model lfm2 \xff\xfe", "byte 11 is not UTF-8"),
        (b"", "empty"),
        (b"model lfm2\nrollback 0\n", "line 2, column 1"),
        (b'{"format": 2}', "JSON"),
        (b"#" * (FILE_BYTES_MAX + 1), "at most 8,388,608"),
    ],
)
def test_a_file_that_is_no_program_is_named_with_what_is_wrong(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "given.drift"
    path.write_bytes(data)
    with pytest.raises(UsageError) as raised:
        read_file(path)
    assert words in str(raised.value)
    assert "given.drift" in str(raised.value)


def test_a_findings_folder_is_its_program_and_no_other_folder_is_one(tmp_path: Path) -> None:
    path = keep(tmp_path, PROGRAM)
    given = read_given(str(path.parent), None)
    assert (given.program, shlex.split(given.words)) == (PROGRAM, [str(path.parent)])
    with pytest.raises(UsageError, match="is a folder, not a program"):
        read_given(str(tmp_path), None)


@pytest.mark.parametrize("ending", ["", "/"])
def test_the_name_of_a_findings_folder_is_looked_for_in_campaigns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.chdir(tmp_path)
    keep(tmp_path / "runs" / "one", PROGRAM, "crash")
    name = f"crash-{program_id(PROGRAM)[:6]}"
    assert read_given(name + ending, None).program == PROGRAM
    given = read_given(name + ending, Path("runs/one"))
    assert (given.program, given.words) == (PROGRAM, f"{program_id(PROGRAM)} --campaign runs/one")
    with pytest.raises(UsageError, match=f"no finding hang-{program_id(PROGRAM)[:6]} in runs/;"):
        read_given(name.replace("crash", "hang"), None)


def test_an_id_that_is_short_for_several_is_refused_with_all_of_them(tmp_path: Path) -> None:
    first: dict[str, Program] = {}
    for salt in range(1, 2000):
        program = parse_program(f"model lfm2 seed=0; decode 0:1/{salt}")
        other = first.setdefault(program_id(program)[:4], program)
        if other is not program:
            break
    keep(tmp_path, program)
    keep(tmp_path, other)
    with pytest.raises(UsageError, match="give more digits"):
        read_given(program_id(program)[:4], tmp_path)
    assert read_given(program_id(program), tmp_path).program == program


def test_three_digits_are_no_id(tmp_path: Path) -> None:
    keep(tmp_path, PROGRAM)
    with pytest.raises(UsageError, match="is no file, no finding's folder or id"):
        read_given(program_id(PROGRAM)[:3], tmp_path)


class StandardInput:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


def test_standard_input_is_read_and_replayed_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", StandardInput(program_text(PROGRAM).encode()))
    assert read_given("-", None) == Given(PROGRAM, one_line(PROGRAM))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "standard input: "),
        (b"\0", "binary"),
        (b"model lfm2\nrollback 0\n", "line 2, column 1"),
        (b"#" * (FILE_BYTES_MAX + 1), "at most"),
    ],
)
def test_what_is_wrong_with_standard_input_is_said(data: bytes, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", StandardInput(data))
    with pytest.raises(UsageError) as raised:
        read_given("-", None)
    assert words in str(raised.value)
    assert "standard input" in str(raised.value)


def test_a_device_is_not_read() -> None:
    with pytest.raises(UsageError, match="no ordinary file"):
        read_given("/dev/zero", None)


@pytest.mark.parametrize(
    "text",
    ["cache kv=f16; decode 0:1", "cache flash=1; decode 0:1", "decode 0:1; reopen kv=f16; decode 0:1", "reopen flash=1; reopen flash=0"],
)
def test_what_has_an_unmeasured_noise_floor_is_not_judged(text: str) -> None:
    with pytest.raises(UnavailableError, match="could not test"):
        check_judgeable(parse_program("model lfm2 seed=0; " + text))


def test_what_is_measured_is_judged() -> None:
    check_judgeable(PROGRAM)


def test_a_standard_input_that_is_closed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match="standard input is closed"):
        read_given("-", None)
