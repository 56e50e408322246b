"""Campaigns and findings on disk: what is written is read back, and nothing else is taken for it."""

import os
from pathlib import Path

import msgspec
import pytest
from statedrift.spec.errors import UsageError
from statedrift.spec.programs import parse_program, program_text
from statedrift.spec.verdicts import ACCEPTED, Verdict
from statedrift.store.campaigns import Account, Campaign, Canary, Noise, Reach, prepare_folder, read_campaign, write_account
from statedrift.store.files import write_whole
from statedrift.store.findings import Answer, Finding, folder_name, read_finding, write_finding

PROGRAM = parse_program("model lfm2 seed=0; decode 0:2; rollback 0 1; decode 0:1")
FINDING = Finding(
    signature="own/lfm2 wrong-output at decode (self) after decode+rollback",
    title="the next outputs of the sequence are wrong after rollback, although everything was accepted",
    target="own",
    version="own 1",
    family="lfm2",
    verdict=Verdict("wrong-output", 2, 0, 1, "self", 0.25, 1e-5, reason="logits off by 0.25 (tolerance 1e-05)"),
    program=PROGRAM,
    original=parse_program("model lfm2 seed=1; cache n_rs_seq=7; decode 0:9/3 1:[1,2]; rollback 0 1; decode 0:1; save 1 a"),
    documented=True,
    undocumented_uses=(),
    reproduced=10,
    reruns=10,
    found_after_programs=17,
    found_after_seconds=0.5,
    first_seen="2026-11-29T12:00:00+00:00",
    last_seen="2026-11-29T12:01:00+00:00",
    seen=4,
    log=("a last word",),
    answers=(Answer(ACCEPTED, (1, -1, -1, -1)),),
)
ACCOUNT = Account(
    target="own",
    version="own 1",
    families=("lfm2", "mamba2"),
    seed=3,
    jobs=2,
    started_at="2026-11-29T12:00:00+00:00",
    seconds=12.5,
    programs=100,
    operations=1500,
    outcomes={"decode": {"accepted": 700, "refused": 2}},
    verdicts={"ok": 96, "wrong-output": 4},
    noise={"lfm2": Noise(1e-7, 1e-5, 200)},
    could_not_test={"mamba2": "could not test: too noisy"},
    seconds_generating=0.5,
    seconds_running=8.0,
    seconds_judging=2.0,
    seconds_reducing=2.0,
    complete=True,
)


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write_campaign(folder: Path) -> Path:
    """A campaign with one finding; the path of its finding.json."""
    prepare_folder(folder)
    write_account(folder, ACCOUNT)
    return write_finding(folder / "findings", FINDING, "print('here')\n") / "finding.json"


def test_a_campaign_is_read_back_as_it_was(tmp_path: Path) -> None:
    write_campaign(tmp_path / "run")
    assert read_campaign(tmp_path / "run") == Campaign(ACCOUNT, (FINDING,))


def test_a_campaign_without_findings_is_read_back(tmp_path: Path) -> None:
    write_account(tmp_path, ACCOUNT)
    assert read_campaign(tmp_path) == Campaign(ACCOUNT, ())


def test_an_account_of_a_version_that_counted_no_reach_and_watched_no_canary_is_read(tmp_path: Path) -> None:
    write_account(tmp_path, ACCOUNT)
    path = tmp_path / "campaign.json"
    older = msgspec.json.decode(path.read_bytes())
    del older["reach"], older["canary"]
    path.write_bytes(msgspec.json.encode(older))
    account = read_campaign(tmp_path).account
    assert (account.reach, account.canary) == (None, None)


def test_reach_and_canary_are_read_back_as_they_were(tmp_path: Path) -> None:
    counted = msgspec.structs.replace(
        ACCOUNT, reach=Reach({"edges": {"decode of 1": 3, "start dirty": 0}}, ("divide",)), canary=Canary(64, 1)
    )
    write_account(tmp_path, counted)
    assert read_campaign(tmp_path).account == counted


def test_findings_are_read_in_the_order_in_which_they_were_found(tmp_path: Path) -> None:
    write_campaign(tmp_path)
    earlier = msgspec.structs.replace(
        FINDING, program=parse_program("model lfm2 seed=0; keep 0"), found_after_programs=2, verdict=Verdict("bad-refusal", 0)
    )
    write_finding(tmp_path / "findings", earlier, None)
    assert read_campaign(tmp_path).findings == (earlier, FINDING)


def test_the_folder_of_a_finding_is_named_after_its_kind_and_program(tmp_path: Path) -> None:
    assert folder_name(FINDING) == "wrong-output-5002ed"
    own = write_finding(tmp_path, FINDING, "print('here')\n")
    assert sorted(files_below(tmp_path)) == [f"wrong-output-5002ed/{name}" for name in ("finding.json", "program.drift", "repro.py")]
    assert parse_program((own / "program.drift").read_text()) == PROGRAM
    assert (own / "program.drift").read_text() == f"# {FINDING.signature}\n# {FINDING.title}\n{program_text(PROGRAM)}"


def test_writing_a_finding_again_without_a_script_leaves_the_script(tmp_path: Path) -> None:
    write_finding(tmp_path, FINDING, "print('here')\n")
    own = write_finding(tmp_path, msgspec.structs.replace(FINDING, seen=9), None)
    assert (own / "repro.py").read_text() == "print('here')\n"
    assert read_finding(own / "finding.json").seen == 9


# --- damage ----------------------------------------------------------------------------------------------------------------

DAMAGES = {
    "empty": lambda data: b"",
    "torn": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data.rstrip()[:-1],
    "foreign": lambda data: b'{"name": "something else"}\n',
    "a list": lambda data: b"[1, 2, 3]",
    "no text": lambda data: bytes(range(256)),
    "text that is no UTF-8": lambda data: data.replace(b"own 1", b"own \xff"),
    "nested without end": lambda data: b"[" * 100_000,
    "of another format": lambda data: data.replace(b'"format": 1', b'"format": 2'),
    "with an unknown key": lambda data: data.replace(b'"format": 1', b'"format": 1, "more": 2'),
    "with a wrong kind": lambda data: data.replace(b'"seed": ', b'"seed": "x", "seed_": ').replace(b'"lfm2"', b"5"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", ["campaign.json", "finding.json"])
def test_a_damaged_file_is_named_and_left_as_it_is(damage: str, which: str, tmp_path: Path) -> None:
    finding = write_campaign(tmp_path)
    path = tmp_path / which if which == "campaign.json" else finding
    damaged = DAMAGES[damage](path.read_bytes())
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    before = files_below(tmp_path)
    with pytest.raises(UsageError, match=which):
        read_campaign(tmp_path)
    assert files_below(tmp_path) == before


@pytest.mark.parametrize(("old", "new"), [(b'"sequences": [', b'"sequences": [99, '), (b'"family": "lfm2"', b'"family": "gpt"')])
def test_a_finding_with_an_impossible_program_is_refused(old: bytes, new: bytes, tmp_path: Path) -> None:
    path = write_campaign(tmp_path)
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(UsageError, match=r"finding\.json"):
        read_finding(path)


def test_a_folder_that_is_no_campaign_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no campaign: it has no campaign\.json; `statedrift fuzz --out"):
        read_campaign(tmp_path)
    with pytest.raises(UsageError, match="no campaign"):
        read_campaign(tmp_path / "nowhere")


def test_a_file_that_is_not_there_is_no_finding(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"finding\.json cannot be read: No such file"):
        read_finding(tmp_path / "finding.json")


# --- folders and whole files -----------------------------------------------------------------------------------------------


def test_a_prepared_folder_is_empty_and_can_be_prepared_again(tmp_path: Path) -> None:
    for _ in range(2):
        prepare_folder(tmp_path / "runs" / "first")
        assert list((tmp_path / "runs" / "first").iterdir()) == []


def test_a_folder_that_holds_something_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty; choose another --out"):
        prepare_folder(tmp_path)
    assert files_below(tmp_path) == {"notes.txt": b"mine"}


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UsageError, match="is a file; --out needs a folder"):
        prepare_folder(tmp_path / "run")
    with pytest.raises(UsageError, match="cannot be written"):
        prepare_folder(tmp_path / "run" / "below")
    assert files_below(tmp_path) == {"run": b"mine"}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that nobody can write to is needed")
def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        prepare_folder(Path("/proc/self/campaign"))


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "campaign.json"
    write_whole(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UsageError, match=r"campaign\.json cannot be written: No space left on device"):
        write_whole(path, b"new")
    assert files_below(tmp_path) == {"campaign.json": b"old"}


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "campaign.json"
    write_whole(path, b"old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"new")
    assert files_below(tmp_path) == {"campaign.json": b"old"}


def test_others_can_read_what_was_written(tmp_path: Path) -> None:
    write_whole(tmp_path / "made" / "here" / "file", b"data")
    assert (tmp_path / "made" / "here" / "file").stat().st_mode & 0o777 == 0o644
