"""`statedrift size`: what it shows, what it takes, and what it refuses; texts are pinned by golden files in tests/unit/golden."""

import json
from pathlib import Path

import pytest
from statedrift.cli.application import run
from statedrift.cli.sizing import bytes_text, read_cache, read_layers
from statedrift.reports.terminal import WIDTH
from statedrift.spec.families import FAMILIES
from statedrift.spec.state_sizes import KINDS, CacheSize, StateLayers

GOLDEN = Path(__file__).parent / "golden"
ACCOUNT = [
    "size", "--family", "qwen35",
    "--model", "n_layer=48 n_embd=2048 attention_period=4 n_head=16 n_head_kv=4 head_dim=128 d_state=128 n_group=16 n_value_head=16",
    "--cache", "n_seq_max=4 n_rs_seq=3 n_ctx=8192 kv=f16",
]  # fmt: skip
AS_LAYERS = [
    "size", "--layers", "36 gated_delta_net d_inner=2048 d_state=128 n_group=16 d_conv=4", "--layers", "12 attention n_head_kv=4 head_dim=128",
    "--cache", "n_seq_max=4 n_rs_seq=3 n_ctx=8192 kv=f16",
]  # fmt: skip


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    status = run(arguments)
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return out


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("size_kinds.txt", ["size"]),
        ("size_account.txt", ACCOUNT),
        ("size_account.json", [*ACCOUNT, "--json"]),
        ("size_layers.txt", ["size", "--layers", "7 lightning_attention n_head=64 head_dim=128", "--layers", "1 window_attention n_head_kv=8 head_dim=128 window=4096", "--cache", "n_seq_max=1 n_rs_seq=0 n_ctx=131072 kv=q8_0"]),
    ],
)  # fmt: skip
def test_what_is_shown_is_as_pinned(name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(arguments, capsys)
    if name.endswith(".json"):
        out = json.dumps(json.loads(out), indent=2) + "\n"
    assert out == (GOLDEN / name).read_text(encoding="utf-8")
    assert name.endswith(".json") or all(len(line) <= WIDTH for line in out.split("\n"))


def test_a_family_and_its_layers_have_the_same_size(capsys: pytest.CaptureFixture[str]) -> None:
    family, layers = (json.loads(shown([*arguments, "--json"], capsys))["sizes"][0] for arguments in (ACCOUNT, AS_LAYERS))
    assert {**family, "name": "", "dimensions": {}} == {**layers, "name": ""}
    assert family["session_bytes"]["total"] == 1_451_753_472


def test_layers_add_up_to_those_of_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    extra = ["--layers", "2 per_layer_embedding n_embd=32 d_conv=4 ngram_size=3 hyper_connections=4"]
    alone, more = (json.loads(shown(["size", "--family", "lfm2", "--json", *words], capsys))["sizes"][0] for words in ([], extra))
    assert more["cell_bytes"] - alone["cell_bytes"] == 2 * 3 * 3 * 4 * 32 * 4


def test_every_family_is_sized_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for name in FAMILIES for word in ("--family", name)]
    object_ = json.loads(shown(["size", *words, "--json"], capsys))
    assert object_["format"] == 1
    assert [size["name"] for size in object_["sizes"]] == list(FAMILIES)


def test_the_kinds_are_one_object_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = json.loads(shown(["size", "--json"], capsys))["kinds"]
    assert [kind["kind"] for kind in kinds] == list(KINDS)
    assert kinds[0]["parts"][1] == {
        "part": "s", "per": "state", "title": "recurrent", "formula": "n_embd * wkv_head_size", "elements": 131_072, "row_bytes": 524_288,
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_real_size_is_beyond_what_programs_run_at(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = json.loads(shown(["size", "--family", family, "--model", "n_layer=100 n_vocab=200000", "--json"], capsys))["sizes"]
    assert sizes[0]["dimensions"]["n_layer"] == 100


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1, "1 B"), (1023, "1,023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (73728, "72 KiB"), (1 << 20, "1 MiB"),
        ((1 << 20) - 1, "1,024 KiB"), (1088, "1.063 KiB"), (40_402_944, "38.53 MiB"), (768 << 20, "768 MiB"), (1 << 30, "1 GiB"),
        (1_451_753_472, "1.352 GiB"), (10 << 40, "10 TiB"), (1 << 73, "8,192 EiB"), (1 << 170, f"{1 << 110:,} EiB"),
    ],
)  # fmt: skip
def test_bytes_are_shown_with_four_digits(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_layers_are_read_as_they_are_written() -> None:
    assert read_layers(" 12  attention n_head_kv=4 head_dim=128 ") == StateLayers(12, "attention", {"n_head_kv": 4, "head_dim": 128})


def test_keys_of_a_cache_that_are_not_given_are_those_of_a_program() -> None:
    assert read_cache("kv=q8_0 n_ctx=100000") == CacheSize(kv="q8_0", n_ctx=100000)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--family", "rwkv9"], "unknown family `rwkv9`"),
        (["--family", "lfm2", "--model", "n_layers=4"], "no dimension `n_layers`"),
        (["--family", "lfm2", "--model", "n_embd=0"], "`n_embd` must be a whole number from 1"),
        (["--family", "lfm2", "--model", "n_embd=many"], "`n_embd` must be a whole number"),
        (["--family", "lfm2", "--model", "n_embd=-2"], "`n_embd` must be a whole number from 1"),
        (["--family", "lfm2", "--model", "n_layer=1000000"], "`n_layer` must be a whole number from 1 to 65536"),
        (["--family", "lfm2", "--model", "n_embd=33"], "divisible"),
        (["--family", "lfm2", "--model", "lfm2 n_embd=64"], "`lfm2` must be a key and its value"),
        (["--family", "lfm2", "--model", "n_embd=64 n_embd=32"], "`n_embd` is given twice"),
        (["--family", "lfm2", "--family", "mamba2", "--model", "n_embd=64"], "give one --family"),
        (["--model", "n_embd=64"], "needs a --family or --layers"),
        (["--cache", "n_ctx=64"], "needs a --family or --layers"),
        (["--family", "lfm2", "--cache", "n_sq=4"], "unknown key `n_sq`; there are n_seq_max"),
        (["--family", "lfm2", "--cache", "n_seq_max=0"], "`n_seq_max` must be a whole number from 1"),
        (["--family", "lfm2", "--cache", f"n_seq_max={10**30}"], "`n_seq_max` must be a whole number from 1 to"),
        (["--layers", f"{10**25} attention n_head_kv=4 head_dim=128"], "count of layers"),
        (["--family", "lfm2", "--cache", "kv=q5_0"], "`kv` must be one of"),
        (["--family", "lfm2", "--cache", "kv=q8_0"], "packs 32 elements"),
        (["--family", "lfm2", "--cache", "start=dirty"], "unknown key `start`"),
        (["--layers", "12"], "must be a count, a layer kind and its dimensions"),
        (["--layers", "attention n_head_kv=4 head_dim=128"], "must be a count, a layer kind and its dimensions"),
        (["--layers", ""], "must be a count, a layer kind and its dimensions"),
        (["--layers", "0 attention n_head_kv=4 head_dim=128"], "count of layers"),
        (["--layers", "1 attention n_head_kv=4"], "needs `head_dim`"),
        (["--layers", "1 mamba9 d_conv=4"], "unknown layer kind `mamba9`"),
    ],
)
def test_a_usage_error_names_the_key(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["size", *arguments]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert len(err.strip().split("\n")) == 1
