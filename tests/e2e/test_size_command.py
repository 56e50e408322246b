"""`statedrift size` as people run it, in a pipe: the same text as in a terminal, and as in docs/caches.md."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = "n_layer=48 n_embd=2048 attention_period=4 n_head=16 n_head_kv=4 head_dim=128 d_state=128 n_group=16 n_value_head=16"
CACHE = "n_seq_max=4 n_rs_seq=3 n_ctx=8192 kv=f16"


def statedrift(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "statedrift", *arguments], capture_output=True, text=True, timeout=300)


def test_the_size_of_a_real_model_is_shown() -> None:
    done = statedrift("size", "--family", "qwen35", "--model", MODEL, "--cache", CACHE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (ROOT / "tests/unit/golden/size_account.txt").read_text(encoding="utf-8")


def test_the_page_shows_what_is_shown() -> None:
    page = (ROOT / "docs/caches.md").read_text(encoding="utf-8")
    shown = (ROOT / "tests/unit/golden/size_account.txt").read_text(encoding="utf-8")
    layers_and_sums = shown[shown.index("36 layers") : shown.index("\nstates ")]
    assert f"```\n{layers_and_sums}```" in page
    assert MODEL in page


def test_a_wrong_size_is_one_line() -> None:
    done = statedrift("size", "--family", "lfm2", "--cache", "n_seq=4")
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == (
        "statedrift: --cache: unknown key `n_seq`; there are n_seq_max, n_rs_seq, n_ctx, n_ubatch, unified, swa_full, kv, state\n"
    )
