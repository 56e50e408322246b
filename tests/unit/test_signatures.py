"""Signatures: pinned by a golden file, without numbers, coarse before reduction and fine after it.

Rules
- golden/signatures.txt holds, for every program and verdict below, the coarse and the fine signature. A change there splits or joins
  the findings of stored campaigns: it is a change for users.
"""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statedrift.fuzz.generation import generate
from statedrift.fuzz.signatures import coarse_signature, crash_site, enabling_operations, fine_signature
from statedrift.spec.models import Model
from statedrift.spec.programs import parse_program
from statedrift.spec.verdicts import DIVERGENCE_KINDS, Verdict

GOLDEN = Path(__file__).parent / "golden" / "signatures.txt"
CRASH = "the process died (SIGABRT): "
CASES = [
    ("model lfm2; decode 0:3; rollback 0 1; decode 0:1", Verdict("wrong-output", 2, 0, 3, "self", 22.8, 0.002, reason="logits off by 22.8")),
    ("model lfm2 seed=7 n_layer=6; decode 2:9/5; rollback 2 4; decode 2:1/3", Verdict("wrong-output", 2, 2, 9, "self", 0.1, 0.002)),
    ("model lfm2; decode 0:3 1:1; rollback 0 1; decode 1:1", Verdict("wrong-output", 2, 1, 3, "other")),
    ("model mamba2; decode 0:3; share 0 1; decode 1:1", Verdict("nonfinite", 2, 1)),
    ("model mamba2; decode 0:3; share 0 1; decode 1:1", Verdict("wrong-state", 2, 1, part="conv")),
    ("model mamba2; decode 0:3; share 0 1; decode 1:1", Verdict("wrong-state", 2, 1, part="recurrent")),
    ("model lfm2; decode 0:3; share 0 1 0 2", Verdict("false-success", 1, 0, relation="self")),
    ("model lfm2; decode 0:3; share 0 1 0 2; decode 1:1", Verdict("wrong-output", 2, 1)),
    ("model lfm2; decode 0+1:3; drop 0", Verdict("bad-refusal", 1, 0, relation="self")),
    ("model lfm2; cancel 0+1:3 at=2; decode 0:1", Verdict("wrong-position", 1, 0, relation="self")),
    ("model lfm2; cancel 0:3 at=2; decode 0:1", Verdict("wrong-position", 1, 0, relation="self")),
    ("model lfm2; decode 0:3; save 0 a; restore a 1", Verdict("partial-effect", 2, 1, relation="self")),
    ("model lfm2; decode 0:3; save 0 a partial; restore a 0", Verdict("bad-refusal", 2, 0, relation="self")),
    ("model lfm2; decode 0:3; save 0 a device; restore a 0", Verdict("bad-refusal", 2, 0, relation="self")),
    ("model lfm2; decode 0:3; save 0 a partial device; restore a 0", Verdict("bad-refusal", 2, 0, relation="self")),
    ("model lfm2; decode 0:3; save 0 a; damage a truncate 7; restore a 1", Verdict("false-success", 3, 1, relation="self")),
    ("model lfm2; decode 0:3; save 0 a; damage a flip 70; restore a 1", Verdict("crash", 3, 1, relation="self", reason=CRASH + "/build/7/src/llama-kv-cache.cpp:1234: GGML_ASSERT(p0 < 16 && n_seq_max == 0x7ffe01) failed")),
    ("model lfm2; decode 0:3; save 0 a; damage a header; restore a 1", Verdict("crash", 3, 1, relation="self", reason=CRASH + "free(): invalid pointer")),
    ("model lfm2; decode 0:3; save_all b; damage b foreign; restore_all b", Verdict("crash", 3, relation="self", reason="the process died (exit code 3): no message")),
    ("model lfm2; decode 0:3", Verdict("hang", 0, 0, relation="self", reason="no answer within 30 s")),
    ("model lfm2; decode 0:3", Verdict("crash", None, relation="self", reason=CRASH + "no message")),
    ("model lfm2; decode 0:3; remove 0 1 2; keep 0; shift 0 5; divide 0 2; clear; reopen n_rs_seq=1; decode 0:1", Verdict("wrong-output", 7, 0)),
    ("model lfm2; keep 1", Verdict("false-success", 0, 0, relation="other")),
]  # fmt: skip


def golden_text() -> str:
    blocks = []
    for text, verdict in CASES:
        program = parse_program(text)
        blocks.append(f"{text}\n  {coarse_signature('engine', program, verdict)}\n  {fine_signature('engine', program, verdict)}\n")
    return "\n".join(blocks)


def test_signatures_are_those_of_the_golden_file() -> None:
    assert golden_text() == GOLDEN.read_text()


def test_the_golden_file_has_every_kind() -> None:
    assert {verdict.kind for _, verdict in CASES} == set(DIVERGENCE_KINDS)


def without_names(signature: str) -> str:
    """Names of families have digits of their own."""
    return re.sub(r"^engine/[a-z0-9]+ ", "", signature)


@pytest.mark.parametrize(("text", "verdict"), CASES)
def test_no_signature_has_a_digit(text: str, verdict: Verdict) -> None:
    program = parse_program(text)
    for signature in (coarse_signature("engine", program, verdict), fine_signature("engine", program, verdict)):
        assert not re.search(r"[0-9]", without_names(signature))
        assert "\n" not in signature


@given(st.integers(0, 10_000), st.sampled_from(DIVERGENCE_KINDS), st.integers(0, 31), st.text(max_size=200))
def test_no_signature_of_any_program_has_a_digit_or_a_line_break(seed: int, kind: str, index: int, reason: str) -> None:
    program = generate(seed, Model("lfm2"))
    verdict = Verdict(kind, index, 3, 17, "other", 1.5, 1e-5, reason=reason)  # type: ignore[arg-type]
    signature = fine_signature("engine", program, verdict)
    assert not re.search(r"\d|\n", without_names(signature))


SITES = [
    ("/build/7/src/llama-graph.cpp:842: GGML_ASSERT(x != 0x7ffe12) failed", "llama-graph.cpp GGML_ASSERT(x != ) failed"),
    ("src/a/b.cpp:1: boom", "b.cpp boom"),
    ("free(): invalid pointer", "free() invalid pointer"),
    ("double free or corruption (!prev)", "double free or corruption (!prev)"),
    ("no message", "no message"),
    ("", ""),
    ("x" * 300, "x" * 80),
]


@pytest.mark.parametrize(("words", "site"), SITES)
def test_a_crash_site_keeps_words_and_drops_numbers_paths_and_addresses(words: str, site: str) -> None:
    assert crash_site(Verdict("crash", 0, reason=CRASH + words)) == site


def test_the_same_crash_elsewhere_has_the_same_site() -> None:
    one = Verdict("crash", 0, reason=CRASH + "/home/a/src/x.cpp:12: GGML_ASSERT(n_tokens <= n_batch) failed at 0xdeadbeef")
    other = Verdict(
        "crash", 0, reason="the process died (SIGSEGV): /mnt/b/src/x.cpp:340: GGML_ASSERT(n_tokens <= n_batch) failed at 0x12ab"
    )
    assert crash_site(one) == crash_site(other) != ""


def test_only_a_crash_has_a_site() -> None:
    assert crash_site(Verdict("hang", 0, reason=CRASH + "boom")) == ""


def test_coarse_signatures_forget_what_came_before_and_whose_it_was() -> None:
    one = parse_program("model lfm2; decode 0:3; rollback 0 1; decode 0:1")
    other = parse_program("model lfm2 seed=3; decode 1:9; drop 1; share 1 2; decode 1:2 2:2")
    first, second = Verdict("wrong-output", 2, 0, 3, "self"), Verdict("wrong-output", 3, 2, 1, "other")
    assert coarse_signature("engine", one, first) == coarse_signature("engine", other, second)
    assert fine_signature("engine", one, first) != fine_signature("engine", other, second)


def test_operations_after_the_divergence_say_nothing() -> None:
    short = parse_program("model lfm2; decode 0:3; drop 0")
    long = parse_program("model lfm2; decode 0:3; drop 0; share 0 1; clear")
    verdict = Verdict("bad-refusal", 1, 0, relation="self")
    assert fine_signature("engine", short, verdict) == fine_signature("engine", long, verdict)
    assert enabling_operations(long, verdict) == {"decode"}


@pytest.mark.parametrize(
    "said", ["crash (the process died (exit code 134): x.cpp:12: GGML_ASSERT(n > 0) failed)", "crash (x.cpp:7: GGML_ASSERT(n > 0) failed)"]
)
def test_a_crash_that_only_one_of_two_targets_has_is_named_by_what_it_said(said: str) -> None:
    assert crash_site(Verdict("crash", 0, reason=f"one: accepted; other: {said}")) == "x.cpp GGML_ASSERT(n > ) failed"
