"""The benchmark of our CPU kernels: its bounds, its text and its arithmetic on fixed data, and the check, which runs every part. No time is judged."""

import subprocess
from pathlib import Path
from time import sleep

import msgspec
import numpy as np
import pytest
from statedrift.cli import kernels as command
from statedrift.cli.application import run
from statedrift.cli.kernel_bench import exactness, llamacpp_operators, peers
from statedrift.cli.kernel_bench.cases import CASES, SLOW, USUAL, Case, Size
from statedrift.cli.kernel_bench.limits import Limits, cache_bytes
from statedrift.cli.kernel_bench.plain import CHUNKED, STEPS
from statedrift.cli.kernel_bench.results import Exactness, FirstCall, Growth, Limit, Peer, Results, Row, Timing
from statedrift.cli.kernel_bench.samples import Job, timed, timed_in_turn
from statedrift.cli.kernels_report import bounds_of, check_text, report_markdown, report_text

SIZE = Size(2, 64, 64)


def timing(milliseconds: float, clean: int = 12) -> Timing:
    return Timing(milliseconds / 1000, 20, clean)


def row(what, milliseconds, limit_milliseconds, kernel="mamba2_scan", threads=1, others=(), clean=12) -> Row:
    return Row(
        kernel,
        "64 heads x 64 x 128",
        what,
        threads,
        268_435_456,
        timing(milliseconds, clean),
        "arithmetic",
        limit_milliseconds / 1000,
        tuple(others),
    )


def peer(name: str, milliseconds: float, error: float = 1e-6) -> Peer:
    return Peer(name, timing(milliseconds), error)


PREFILL = row("prefill", 16.0, 14.6, others=[peer("llama.cpp", 40.0), peer("NumPy", 60.0)])
GOOD = Results(
    short=False,
    limits=(Limit("float32 multiply-adds, 1 thread", "G/s", 54.0, 56.1),),
    rows=(
        PREFILL,
        row("prefill", 8.2, 7.4, threads=2),
        row("decode in place", 5.0, 4.8),
        row("decode to another row", 6.0, 4.8),
        row("cached in place", 1.0, 0.9),
        row("cached to another row", 1.04, 0.9),
        row("snapshots", 5.5, 5.0),
        row("prefill", 20.0, 15.2, kernel="gated_delta_net"),
        row("prefill", 20.0, 12.2, kernel="rwkv6_wkv"),
    ),
    exactness=(Exactness("mamba2_scan", 16, 0, 2e-7),),
    growth=(Growth("mamba2_scan", "slow", (10, 100), (1.8e-7, 3.8e-7)),),
    first_call=FirstCall("mamba2", 12.0, 0.15),
    gaps=("Two threads: there is one core.",),
    facts=(("llama.cpp's operators", "built for AVX512"),),
)


def failing(results: Results) -> list[str]:
    return [bound.stated for bound in bounds_of(results) if not bound.holds]


def with_row(*rows: Row) -> Results:
    return msgspec.structs.replace(GOOD, rows=rows)


def test_what_is_near_its_limits_holds_every_bound() -> None:
    assert failing(GOOD) == []


@pytest.mark.parametrize(
    ("rows", "stated"),
    [
        ([row("prefill", 16.0, 13.5)], "at least 85 % of the limit"),
        ([row("prefill", 16.0, 13.5), row("prefill", 9.0, 7.0, threads=2)], "2 threads, prefill: at least 1.8 times one thread"),
        ([row("decode in place", 5.0, 4.4)], "at least 90 % of the limit"),
        ([row("decode in place", 5.0, 4.9), row("decode to another row", 6.3, 4.9)], "within 1.25 of in place"),
        ([row("cached in place", 5.0, 4.9), row("cached to another row", 5.3, 4.9)], "within 1.05 of in place"),
        ([row("snapshots", 6.3, 5.0)], "within 1.25 of the bytes written"),
        ([row("prefill", 20.0, 14.8, kernel="gated_delta_net")], "at least 75 % of the limit"),
        ([row("prefill", 20.0, 14.8, kernel="kimi_delta_attention")], "at least 75 % of the limit"),
        ([row("prefill", 20.0, 11.8, kernel="lightning_attention")], "at least 60 % of the limit"),
        ([row("decode in place", 20.0, 11.8, kernel="lightning_attention")], "at least 60 % of the limit"),
        ([row("prefill", 16.0, 15.0, others=[peer("llama.cpp", 40.0), peer("NumPy", 15.0)])], "faster than every peer"),
        ([row("prefill", 16.0, 15.0, others=[peer("llama.cpp", 30.0)])], "at least 2 times llama.cpp"),
        ([row("prefill", 16.0, 15.0, others=[peer("llama.cpp", 40.0, 2e-3)])], "llama.cpp gives what we give, to 0.001"),
        ([row("prefill", 16.0, 15.0, others=[peer("llama.cpp", 40.0, float("nan"))])], "llama.cpp gives what we give, to 0.001"),
        ([row("prefill", float("nan"), 15.0)], "at least 85 % of the limit"),
    ],
)  # fmt: skip
def test_a_broken_bound_is_said(rows: list[Row], stated: str) -> None:
    assert any(stated in text for text in failing(with_row(*rows)))


def test_both_near_the_limit_need_not_be_twice_apart() -> None:
    near = row("prefill", 16.0, 15.0, others=[peer("llama.cpp", 18.0)])
    assert failing(with_row(near)) == []


def test_a_bound_on_another_row_is_for_mamba2_alone() -> None:
    rows = (row("decode in place", 5.0, 4.9, kernel="rwkv6_wkv"), row("decode to another row", 9.0, 4.9, kernel="rwkv6_wkv"))
    assert failing(with_row(*rows)) == []


def test_other_bits_and_a_far_result_are_broken_bounds() -> None:
    wrong = msgspec.structs.replace(GOOD, exactness=(Exactness("mamba2_scan", 16, 1, 2e-5),))
    assert len(failing(wrong)) == 2


def test_a_slow_first_call_is_a_broken_bound() -> None:
    assert len(failing(msgspec.structs.replace(GOOD, first_call=FirstCall("mamba2", 16.0, 0.25)))) == 2


def test_a_check_looks_at_no_time() -> None:
    slow = msgspec.structs.replace(GOOD, short=True, rows=(row("prefill", 900.0, 1.0, others=[peer("NumPy", 1.0)]),))
    assert failing(slow) == []
    assert "ms" not in check_text(slow)


def test_the_report_says_what_it_measured_and_what_it_could_not() -> None:
    missing = Peer("llama.cpp", missing="llama-cpp-python is not installed: pip install 'statedrift[llamacpp]'")
    results = with_row(row("prefill", 16.0, 14.6, others=[missing, peer("NumPy", 60.0)], clean=0))
    for text in (report_text(results), report_markdown(results, [("processor", "one")])):
        assert "91 %" in text
        assert "60 (3.8x)" in text
        assert "llama.cpp is missing for mamba2_scan where there is a `-`: llama-cpp-python is not installed: pip install" in text
        assert "~16" in text
        assert "~: the processor was taken away during every sample" in text
        assert "Two threads: there is one core." in text
        assert "3.8e-07" in text
        assert "cached" not in text.partition("stated bounds")[0].partition("## Stated bounds")[0]


def test_the_page_is_a_page() -> None:
    page = report_markdown(GOOD, [("processor", "one")])
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
    assert "| mamba2_scan | 64 heads x 64 x 128, 2 threads | 8.2 |" in page
    assert "12.0 s of CPU time with nothing compiled, 0.15 s" in page
    assert page.endswith("|\n")


# --- how it measures -------------------------------------------------------------------------------------------------------


def test_what_is_timed_in_turn_is_timed_alike() -> None:
    calls: list[str] = []
    jobs = (Job(lambda: calls.append("short")), Job(lambda: (calls.append("long"), sleep(0.002)), threads=2))
    short, long = timed_in_turn(jobs, 0.02)
    turns = [call for i, call in enumerate(calls) if i == 0 or calls[i - 1] != call]
    assert turns == ["short", "long"] * (len(turns) // 2)
    assert short.samples > long.samples >= 2
    assert short.seconds < 0.002 <= long.seconds


def test_what_waits_on_one_thread_takes_no_time() -> None:
    assert timed(lambda: sleep(0.002), 0.01).seconds < 0.001


def test_a_probe_does_the_work_that_it_says() -> None:
    limits = Limits(1 << 20)
    try:
        written = limits.written()
        written.run()
        assert written.work == 1 << 20
        plain, streamed = limits.copied(1 << 12)
        plain.run()
        streamed.run()
        assert plain.work == streamed.work == 2 * (1 << 22)
        limits.multiply_adds(2).run()
        limits.remember(written, timing(1.0))
        limits.remember(written, timing(0.5))
        (measured,) = limits.measured()
        assert measured.least == pytest.approx((1 << 20) / 1e-3 / 1e9)
        assert measured.most == pytest.approx(2 * measured.least)
    finally:
        limits.close()


def test_an_array_that_is_changed_in_place_and_one_that_is_copied_hold_what_they_should() -> None:
    limits = Limits(1 << 12)
    try:
        limits.written().run()
        limits.in_place().run()
        plain, _ = limits.copied()
        plain.run()
        source, target = limits._array(1 << 12, 0), limits._array(1 << 12, 1)
        assert (target == source).all()
    finally:
        limits.close()


def test_a_cache_has_a_size() -> None:
    assert 1 << 12 <= cache_bytes(1) <= cache_bytes(2) <= cache_bytes(3)


# --- that the same thing is timed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 128), (3, 1)], ids=["prefill", "decode"])
@pytest.mark.parametrize("name", [peers.NUMPY, peers.EAGER])
def test_written_plainly_a_recurrence_gives_what_the_kernel_gives(case: Case, sequences: int, tokens: int, name: str) -> None:
    arguments, states = case.arguments(3, sequences * tokens, SIZE), case.rows(3, sequences, SIZE)
    every = list(range(sequences))
    ours = exactness.run_scan(case, arguments, states.copy(), [tokens] * sequences, every, every)
    work = (
        peers.numpy_work(case, arguments, states, sequences)
        if name == peers.NUMPY
        else peers.torch_work(case, arguments, states, sequences, is_compiled=False)
    )
    assert not isinstance(work, str)
    assert peers.difference(ours, work.outputs(work.run()).reshape(ours.shape)) < 1e-4


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 24), (3, 1), (2, 4)])
def test_llama_cpps_operator_gives_what_the_kernel_gives(case: Case, sequences: int, tokens: int) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    planes = 4 if tokens == 4 and case.name in ("mamba2_scan", "gated_delta_net", "kimi_delta_attention") else 1
    arguments, states = case.arguments(4, sequences * tokens, SIZE), case.rows(4, sequences, SIZE)
    every = list(range(sequences))
    ours = exactness.run_scan(case, arguments, states.copy(), [tokens] * sequences, every, every)
    with llamacpp_operators.operator(case, arguments, states, planes) as work:
        assert not isinstance(work, str)
        theirs = work.outputs(work.run()).reshape(ours.shape)
    assert peers.difference(ours, theirs) < 1e-4


def test_llama_cpps_operators_that_do_not_fit_say_why() -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    case = next(case for case in CASES if case.name == "rwkv6_wkv")
    size = Size(2, 64, 32)
    arguments = case.arguments(1, 4, size)
    with llamacpp_operators.operator(case, arguments, case.rows(1, 1, size)) as work:
        assert work == "its operator wants square states"
    with llamacpp_operators.operator(case, case.arguments(1, 4, SIZE), case.rows(1, 1, SIZE), 4) as work:
        assert work == "its operator keeps the last state only"


def test_a_peer_that_is_missing_or_fails_is_a_line() -> None:
    ours = np.ones(3, np.float32)
    assert peers.measured("x", lambda: "it is not here", ours, 0.0) == Peer("x", missing="it is not here")

    def fails() -> None:
        raise RuntimeError("first line\nsecond line")

    assert peers.measured("x", lambda: peers.Work(fails, lambda y: y), ours, 0.0).missing == "RuntimeError: first line"
    other = peers.measured("x", lambda: peers.Work(lambda: 2 * ours, lambda y: y), ours, 0.0)
    assert other.error == pytest.approx(1.0)


def test_every_case_is_written_plainly() -> None:
    assert set(STEPS) == {case.name for case in CASES}
    assert set(CHUNKED) <= set(STEPS)


# --- the promise -----------------------------------------------------------------------------------------------------------


def wrong_after(case: Case, tokens: int) -> Case:
    """A kernel whose calls of more tokens than so many give another last bit."""

    def kernel(*arguments: np.ndarray) -> None:
        case.kernel(*arguments)
        y, rows, segment_start = arguments[-1], arguments[-5], arguments[-4]
        assert rows.dtype == np.float32
        if segment_start[-1] > tokens:
            y.view(np.int32)[...] ^= 1

    return case._replace(kernel=kernel)


def test_a_kernel_that_depends_on_the_split_is_seen() -> None:
    case = CASES[0]
    assert exactness.promise(case, 1).differing == 0
    broken = exactness.promise(wrong_after(case, 20), 1)
    assert broken.differing > 0
    assert broken.error == pytest.approx(exactness.promise(case, 1).error, rel=1.0)


def test_slow_decays_remember_what_usual_ones_forget() -> None:
    random = np.random.default_rng(0)
    usual, slow = (decays.rates(random, 1000) for decays in (USUAL, SLOW))
    assert 1 / 300 <= usual.min() < usual.max() <= 1 / 3
    assert slow.max() < usual.min()


def test_the_error_of_a_kernel_is_taken_where_it_says() -> None:
    case = CASES[0]
    grown = exactness.growth(case, USUAL, (10, 50))
    assert grown.tokens == (10, 50)
    assert all(0 < error < 1e-5 for error in grown.errors)
    spoiled = exactness.growth(wrong_after(case, 0)._replace(kernel=_doubled(case)), USUAL, (10, 50))
    assert spoiled.errors == pytest.approx((1.0, 1.0), rel=1e-3)


def _doubled(case: Case):
    def kernel(*arguments: np.ndarray) -> None:
        case.kernel(*arguments)
        arguments[-1][...] *= 2

    return kernel


# --- the command -----------------------------------------------------------------------------------------------------------


def test_the_check_runs_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "kernels", "--check"]) == 0
    text = capsys.readouterr().out
    assert "checked 8 kernels" in text
    assert "FAILS" not in text
    for case in CASES:
        assert f"{case.name}: the same bits" in text


def test_a_check_writes_no_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["bench", "kernels", "--check", "--write", str(tmp_path / "page.md")]) == 64
    assert "leave out --check or --write" in capsys.readouterr().err


def test_a_bound_that_fails_is_status_1_and_a_page_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "_measured", lambda is_check: GOOD)
    page = tmp_path / "page.md"
    assert run(["bench", "kernels", "--write", str(page)]) == 0
    assert "built for AVX512" in page.read_text(encoding="utf-8")
    monkeypatch.setattr(command, "_measured", lambda is_check: with_row(row("prefill", 16.0, 1.0)))
    assert run(["bench", "kernels"]) == 1
    assert "FAILS" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "said"), [(-6, "died of signal 6"), (2, "ended with status 2")])
def test_a_measuring_process_that_dies_is_said(
    status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], status))
    assert run(["bench", "kernels"]) == 2
    assert said in capsys.readouterr().err
