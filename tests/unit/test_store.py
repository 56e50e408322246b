"""Campaigns and findings on disk: what is written is read back, and nothing else is taken for it."""

import os
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from statedrift.spec.errors import UsageError
from statedrift.spec.programs import parse_program, program_text
from statedrift.spec.verdicts import ACCEPTED, Verdict
from statedrift.store.campaigns import (
    Account,
    Campaign,
    Canary,
    CorpusRow,
    FindingRow,
    Noise,
    Reach,
    Tally,
    Unreduced,
    WaitingRow,
    read_campaign,
    read_kept,
)  # fmt: skip
from statedrift.store.files import write_whole
from statedrift.store.findings import Answer, Finding, checked_finding, folder_name, write_finding
from statedrift.store.keeping import Change, Store, fresh_folder

from tests.kept_campaign import identity_of, keep_campaign

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


def test_a_campaign_is_read_back_as_it_was(tmp_path: Path) -> None:
    keep_campaign(tmp_path / "run", ACCOUNT, [FINDING])
    assert read_campaign(tmp_path / "run") == Campaign(ACCOUNT, (FINDING,))


def test_a_campaign_without_findings_is_read_back(tmp_path: Path) -> None:
    keep_campaign(tmp_path, ACCOUNT)
    assert read_campaign(tmp_path) == Campaign(ACCOUNT, ())


def test_reach_and_canary_are_read_back_as_they_were(tmp_path: Path) -> None:
    counted = msgspec.structs.replace(
        ACCOUNT, reach=Reach({"edges": {"decode of 1": 3, "start dirty": 0}}, ("divide",)), canary=Canary(64, 1)
    )
    keep_campaign(tmp_path, counted)
    assert read_campaign(tmp_path).account == counted


def test_findings_are_read_in_the_order_in_which_they_were_found(tmp_path: Path) -> None:
    earlier = msgspec.structs.replace(
        FINDING,
        signature="another",
        program=parse_program("model lfm2 seed=0; keep 0"),
        found_after_programs=2,
        verdict=Verdict("bad-refusal", 0),
    )
    keep_campaign(tmp_path, ACCOUNT, [FINDING, earlier])
    assert read_campaign(tmp_path).findings == (earlier, FINDING)


def waiting(number: int, program: str, counted: str | None = None, is_generated: bool = True) -> WaitingRow:
    return WaitingRow(number, "coarse", 7, 1.5, ACCOUNT.started_at, is_generated, counted, program, "rollback share", b"trial")


def test_what_waits_is_read_back_in_its_order(tmp_path: Path) -> None:
    rows = (waiting(3, "a"), waiting(9, "b", is_generated=False), waiting(12, "c", "fine"))
    corpus = (CorpusRow("edges", "decode of 1", 1, 1, "model lfm2 seed=0; decode 0:1"),)
    kept = read_kept(keep_campaign(tmp_path, ACCOUNT, [FINDING], rows[::-1], corpus))
    assert kept is not None
    assert (kept.waiting, kept.corpus, kept.identity) == (rows, corpus, identity_of(ACCOUNT))


def test_what_was_not_reduced_is_said_with_the_shortest_program_that_waits_and_counts_for_nothing(tmp_path: Path) -> None:
    account = msgspec.structs.replace(ACCOUNT, unreduced=(Unreduced("coarse", 5, ""), Unreduced("none waits", 2, "")))
    keep_campaign(tmp_path, account, [], [waiting(1, "a long one"), waiting(2, "short"), waiting(3, "less", "fine")])
    operations = (("rollback", "share"),)
    assert read_campaign(tmp_path).account.unreduced == (Unreduced("coarse", 5, "short", operations), Unreduced("none waits", 2, ""))


def test_a_change_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    keep_campaign(tmp_path, ACCOUNT)
    with closing(Store(tmp_path)) as store:
        store.begin(identity_of(ACCOUNT), ACCOUNT.started_at, 1, 1.0, None, "own 2")
        more = msgspec.structs.replace(ACCOUNT, programs=999)
        impossible = WaitingRow(1, "coarse", 1, 1.0, "", True, None, None, "", b"")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"campaign\.sqlite cannot be written"):
            store.save(Change(more, Tally(), [FindingRow(FINDING, "coarse", None)], [impossible]), 1.0, 1)
    assert read_campaign(tmp_path) == Campaign(ACCOUNT, ())


def test_what_is_finished_waits_no_more(tmp_path: Path) -> None:
    keep_campaign(tmp_path, ACCOUNT, [], [waiting(1, "a"), waiting(2, "b")])
    with closing(Store(tmp_path)) as store:
        store.begin(identity_of(ACCOUNT), ACCOUNT.started_at, 1, 1.0, None, "own 2")
        store.save(Change(ACCOUNT, Tally(), finished=[1]), 1.0, 1)
    kept = read_kept(tmp_path)
    assert kept is not None
    assert [row.number for row in kept.waiting] == [2]


def test_the_folder_of_a_finding_is_named_after_its_kind_and_program(tmp_path: Path) -> None:
    assert folder_name(FINDING) == "wrong-output-5002ed"
    own = write_finding(tmp_path, FINDING, "print('here')\n")
    assert sorted(files_below(tmp_path)) == [f"wrong-output-5002ed/{name}" for name in ("finding.json", "program.drift", "repro.py")]
    assert parse_program((own / "program.drift").read_text()) == PROGRAM
    assert (own / "program.drift").read_text() == f"# {FINDING.signature}\n# {FINDING.title}\n{program_text(PROGRAM)}"
    assert checked_finding((own / "finding.json").read_bytes(), "it") == FINDING


@pytest.mark.parametrize(("old", "new"), [(b'"sequences":[', b'"sequences":[99,'), (b'"family":"lfm2"', b'"family":"gpt"')])
def test_a_finding_with_an_impossible_program_is_refused(old: bytes, new: bytes) -> None:
    data = msgspec.json.encode(FINDING)
    assert checked_finding(data, "the database") == FINDING
    with pytest.raises(UsageError, match="the database holds what is no finding"):
        checked_finding(data.replace(old, new), "the database")


def test_a_folder_that_is_no_campaign_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no campaign: it has no campaign\.sqlite; `statedrift fuzz --out"):
        read_campaign(tmp_path)
    with pytest.raises(UsageError, match="no campaign"):
        read_campaign(tmp_path / "nowhere")


# --- folders and whole files -----------------------------------------------------------------------------------------------


def test_a_folder_is_used_again_after_a_campaign_that_did_not_begin(tmp_path: Path) -> None:
    for _ in range(2):
        Store(tmp_path / "runs" / "first").close()
        assert [path.name for path in (tmp_path / "runs" / "first").iterdir()] == ["campaign.lock"]


def test_a_folder_that_holds_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty and holds no campaign; choose another --out"):
        Store(tmp_path)
    assert files_below(tmp_path) == {"notes.txt": b"mine"}


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UsageError, match="is a file; --out needs a folder"):
        Store(tmp_path / "run")
    with pytest.raises(UsageError, match="cannot be written"):
        Store(tmp_path / "run" / "below")
    assert files_below(tmp_path) == {"run": b"mine"}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that nobody can write to is needed")
def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        Store(Path("/proc/self/campaign"))


def test_a_fresh_folder_is_the_first_free_one_and_taken(tmp_path: Path) -> None:
    assert fresh_folder(tmp_path / "runs" / "a") == tmp_path / "runs" / "a"
    keep_campaign(tmp_path / "runs" / "a", ACCOUNT)
    before = files_below(tmp_path)
    assert [fresh_folder(tmp_path / "runs" / "a").name for _ in range(3)] == ["a-2", "a-3", "a-4"]
    assert files_below(tmp_path) == before


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "account.json"
    write_whole(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UsageError, match=r"account\.json cannot be written: No space left on device"):
        write_whole(path, b"new")
    assert files_below(tmp_path) == {"account.json": b"old"}


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "account.json"
    write_whole(path, b"old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"new")
    assert files_below(tmp_path) == {"account.json": b"old"}


def test_others_can_read_what_was_written(tmp_path: Path) -> None:
    write_whole(tmp_path / "made" / "here" / "file", b"data")
    assert (tmp_path / "made" / "here" / "file").stat().st_mode & 0o777 == 0o644


def test_a_link_is_followed_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert (real.read_text(), real.stat().st_mode & 0o777) == ("new", 0o600)


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"new")
        assert os.read(reader, 10) == b"new"
        assert pipe.is_fifo()
    finally:
        os.close(reader)
