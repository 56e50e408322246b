"""Titles: one line in plain words, without numbers, for every kind of divergence."""

import re

import pytest
from statedrift.fuzz.titles import title_of
from statedrift.spec.programs import parse_program
from statedrift.spec.verdicts import DIVERGENCE_KINDS, Verdict

TEXT = "model lfm2; decode 0:3; rollback 0 1; share 0 1; decode 0:1 1:1"
TITLES = [
    (TEXT, Verdict("wrong-output", 3, 1, relation="self"), "the next outputs of the sequence are wrong after rollback and share, although everything was accepted"),
    (TEXT, Verdict("wrong-output", 3, 2, relation="other"), "the next outputs of another sequence are wrong after rollback and share, although everything was accepted"),
    (TEXT, Verdict("nonfinite", 3, 1, relation="self"), "the next outputs of the sequence are not finite after rollback and share"),
    (TEXT, Verdict("wrong-state", 3, 1, relation="self", part="conv"), "the conv state of the sequence is wrong after rollback and share"),
    (TEXT, Verdict("wrong-state", 3, 1, relation="self"), "the cached state of the sequence is wrong after rollback and share"),
    (TEXT, Verdict("wrong-position", 2, 1, relation="self"), "share leaves the sequence at a wrong position after rollback"),
    (TEXT, Verdict("bad-refusal", 1, 0, relation="self"), "rollback is refused although it must be accepted"),
    (TEXT, Verdict("false-success", 2, 0, relation="self"), "share says yes where it must refuse, or does nothing after rollback"),
    (TEXT, Verdict("partial-effect", 2, 0, relation="other"), "share is refused and still changes another sequence after rollback"),
    (TEXT, Verdict("crash", 2, 0, relation="self"), "the engine dies in share after rollback"),
    (TEXT, Verdict("hang", 0, 0, relation="self"), "the engine does not answer in decode"),
    (TEXT, Verdict("crash", None), "the engine dies in opening"),
    ("model lfm2; decode 0:3; save 0 a; restore a 0", Verdict("bad-refusal", 2, 0), "restore is refused although it must be accepted after save"),
    ("model lfm2; decode 0:3; save 0 a partial; restore a 0; decode 0:1", Verdict("wrong-output", 3, 0), "the next outputs of the sequence are wrong after save-partial and restore, although everything was accepted"),
    ("model lfm2; decode 0+1:3; drop 0; keep 1; clear; decode 0:1", Verdict("wrong-output", 4, 0), "the next outputs of the sequence are wrong after decode-coupled, drop, keep and clear, although everything was accepted"),
    ("model lfm2; decode 0:3; decode 0:1", Verdict("wrong-output", 1, 0), "the next outputs of the sequence are wrong, although everything was accepted"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "verdict", "title"), TITLES)
def test_a_divergence_has_a_title(text: str, verdict: Verdict, title: str) -> None:
    assert title_of(parse_program(text), verdict) == title


@pytest.mark.parametrize("kind", DIVERGENCE_KINDS)
@pytest.mark.parametrize("index", [None, 0, 3])
def test_no_title_of_a_divergence_has_numbers_or_more_than_a_line(kind: str, index: int | None) -> None:
    verdict = Verdict(kind, index, 1, 17, "self", 0.5, 0.001, "conv", "off by 22.8 at 0x7f\nsecond line")  # type: ignore[arg-type]
    title = title_of(parse_program(TEXT), verdict)
    assert title
    assert not re.search(r"[0-9\n]", title)


def test_what_is_no_divergence_is_told_by_its_reason() -> None:
    assert title_of(parse_program(TEXT), Verdict("unknown", reason="killed for memory")) == "killed for memory"
