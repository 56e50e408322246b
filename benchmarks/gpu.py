"""The CUDA kernels and targets on a GPU: are they right, and how fast are they. One command, under five minutes.

    pip install -e '.[cuda]' 'numba-cuda[cu13]'       # [cu12] where the driver is one of CUDA 12
    python benchmarks/gpu.py [--write FILE] [--json FILE]
    NUMBA_ENABLE_CUDASIM=1 python benchmarks/gpu.py --toy

Rules
- First correctness: every kernel against the CPU's on fresh numbers (`--seed` repeats them), with NaN wherever nothing may be read; then
  generated programs on targets cuda and cuda-ring, held to the oracle. Speed is measured whatever came of it; the status is 1 when
  something was wrong.
- A time is what CUDA events say of a series of launches that were queued behind copies long enough for the host to be ahead: compilation,
  launching from Python and transfers are not in it. Of several series the least counts.
- The limit of a decode is memory: the bytes of the states that are read and written, over its time, as a share of what a copy on this
  device moves in the same run. A bound that is not held (`DECODE_SHARE_MIN`) is said, and is no error.
- Peers are timed in the same way on the same shapes, where they are installed and know the operation; why one is missing is said. They come
  last and in turn until the time is over (`--seconds`).
- `--toy` runs the same at sizes for the simulator. There are no speeds then.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import math
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from statedrift.cli.throughput import markdown_table
from statedrift.fuzz.campaign import Settings, run_campaign
from statedrift.fuzz.trial import Bench
from statedrift.spec.errors import UnavailableError
from statedrift.spec.programs import program_line
from statedrift.targets.cuda import CudaTarget, require_cuda

SECONDS = 280
FUZZ_SECONDS = 20
FAMILIES = ("mamba2", "lfm2", "qwen35")
"""A scan, convolutions with attention, a delta rule with attention: kernels are compiled for each of them."""
DECODE_SHARE_MIN = 0.8
REAL_TOLERANCE = 2e-4
"""Of a scan over large states, as in tests/cudasim/cases.py: their sums have more terms."""
HEADS_COMPARED_MAX = 4
SERIES = 7
LAUNCHES = 5
DEVICE = "cuda"
"""Of the peers."""
AHEAD_BYTES = 1 << 30
"""What is copied before a series, thrice: about a millisecond on the fastest devices, and their caches hold nothing of the states."""


class Shape(NamedTuple):
    """A scan of a real model's layer."""

    name: str
    heads: int
    d_state: int
    head_dim: int


SHAPES = (
    Shape("mamba2_scan", 64, 128, 64), Shape("mamba2_scan", 32, 128, 128), Shape("gated_delta_net", 32, 128, 128),
    Shape("kimi_delta_attention", 32, 128, 128), Shape("lightning_attention", 32, 128, 128), Shape("rwkv6_wkv", 64, 64, 64),
    Shape("rwkv7_wkv", 64, 64, 64), Shape("mamba1_scan", 1, 16, 16384),
)  # fmt: skip
TOY_SHAPES = tuple(shape._replace(heads=1 if shape.name == "mamba1_scan" else 2, d_state=8, head_dim=4) for shape in SHAPES)


class Work(NamedTuple):
    """What a scan is given: so many sequences with so many tokens each, and planes for each of them."""

    title: str
    sequences: int
    tokens: int
    planes: int


DECODE = Work("decode of 64", 64, 1, 1)
WORKS = (DECODE, Work("4 tokens of 64, 4 snapshots", 64, 4, 4), Work("prefill of 512", 1, 512, 1), Work("prefill of 8 x 512", 8, 512, 1))
TOY_WORKS = (Work("decode of 3", 3, 1, 1), Work("2 tokens of 2, 2 snapshots", 2, 2, 2))


class Speed(NamedTuple):
    """One row of the table of speeds.

    share  of the copy bandwidth, by the states alone; None where that is no limit
    """

    who: str
    what: str
    shape: str
    milliseconds: float
    tokens_per_second: float
    share: float | None


class Checked(NamedTuple):
    """A kernel that was compared; `failure`: why it could not be run."""

    kernel: str
    difference: float
    tolerance: float
    failure: str = ""

    @property
    def is_right(self) -> bool:
        """A difference that is no number is wrong."""
        return self.difference <= self.tolerance


class Fuzzed(NamedTuple):
    """What generated programs gave.

    divergences  each a kind and a program on one line
    failure      why there was no campaign
    """

    target: str
    families: tuple[str, ...]
    programs: int
    not_judged: int
    divergences: tuple[str, ...]
    failure: str = ""


class Peer(NamedTuple):
    """Somebody else's operation on the same shapes: `prepare` gives what is timed. Raises whatever it likes when it cannot be had."""

    who: str
    work: str
    prepare: Callable[[Shape, Work], Callable[[], Any]]


@functools.cache
def tests_cases() -> Any:
    """tests/cudasim/cases.py, which is no part of what is installed."""
    path = Path(__file__).resolve().parents[1] / "tests" / "cudasim" / "cases.py"
    found = importlib.util.spec_from_file_location("statedrift_cuda_cases", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


# --- correctness -----------------------------------------------------------------------------------------------------------


def check_kernels(shapes: Sequence[Shape], seed: int, say: Callable[[str], None]) -> list[Checked]:
    """Every kernel against the CPU's, and every scan against its recurrence in float64, at small sizes and at those of `shapes`."""
    cases = tests_cases()
    cases.draw.salt = seed
    found = [_checked(name, cases.TOLERANCE, cases.difference_from_namesake, name) for name in cases.CASES]
    say(f"{len(found)} kernels compared with the CPU's")
    for name in cases.SCANS:
        for size in cases.SIZES:
            found.append(_checked(f"{name} {size[0]} x {size[1]}", cases.TOLERANCE, cases.difference_from_recurrence, name, *size))
    for name, heads, d_state, head_dim in shapes:
        size = (d_state, head_dim, min(heads, HEADS_COMPARED_MAX))
        found.append(_checked(f"{name} {d_state} x {head_dim}", REAL_TOLERANCE, cases.difference_from_recurrence, name, *size))
    for name, shape in cases.WINDOWS:
        found.append(_checked(f"{name} {shape[0]} x {shape[1]}", cases.TOLERANCE, cases.difference_of_windows, name, shape))
    return found


def _checked(kernel: str, tolerance: float, compare: Callable[..., float], *arguments: Any) -> Checked:
    """One comparison; a kernel that cannot be compiled or run is wrong, and the next ones are compared all the same."""
    try:
        return Checked(kernel, compare(*arguments), tolerance)
    except Exception as error:
        return Checked(kernel, math.inf, tolerance, _one_line(error))


class _Brief(CudaTarget):
    """The target with its noise measured over few logs, for a run of minutes."""

    def noise_logs(self) -> tuple[int, int]:
        from statedrift.kernels_cuda import SIMULATED

        return (2, 4) if SIMULATED else (10, 40)


def fuzz(seed: int, families: tuple[str, ...], seconds: float | None, programs: int | None) -> list[Fuzzed]:
    """A campaign on each of the targets."""
    targets = (_Brief("cuda", "strict", saves_snapshots=False), _Brief("cuda-ring", "ring", saves_snapshots=True))
    return [_fuzzed(target, seed % 2**32, families, seconds, programs) for target in targets]


def _fuzzed(target: CudaTarget, seed: int, families: tuple[str, ...], seconds: float | None, programs: int | None) -> Fuzzed:
    try:
        with Bench(target) as bench:
            campaign = run_campaign(Settings(target.name, families, seconds=seconds, programs=programs, seed=seed), bench=bench)
    except Exception as error:  # speeds are still to be measured
        return Fuzzed(target.name, families, 0, 0, (), _one_line(error))
    account = campaign.account
    wrong = tuple(f"{finding.verdict.kind}: {program_line(finding.program)}" for finding in campaign.findings)
    not_judged = account.verdicts.get("unknown", 0) + account.verdicts.get("harness-error", 0)
    return Fuzzed(
        target.name,
        families,
        account.programs,
        not_judged,
        wrong,
        "; ".join(f"{family}: {why}" for family, why in account.could_not_test.items()),
    )


# --- speed -----------------------------------------------------------------------------------------------------------------


class Clock:
    """Times of what is queued on the device. `copy_bandwidth`: bytes a second, read and written, of the best copy."""

    def __init__(self) -> None:
        from numba import cuda

        self._cuda = cuda
        free, _ = cuda.current_context().get_memory_info()
        self.bytes = min(AHEAD_BYTES, free // 8)
        self._from, self._to = (cuda.device_array(self.bytes, np.uint8) for _ in range(2))
        self.copy_bandwidth = 2 * self.bytes / self.seconds(lambda: self._to.copy_to_device(self._from))

    def seconds(self, launch: Callable[[], Any]) -> float:
        """Of one call of `launch`, which only queues; it is called twice before, so that everything is compiled."""
        launch()
        launch()
        self._cuda.synchronize()
        least = math.inf
        for _ in range(SERIES):
            before, after = self._cuda.event(), self._cuda.event()
            for _ in range(3):
                self._to.copy_to_device(self._from)
            before.record()
            for _ in range(LAUNCHES):
                launch()
            after.record()
            after.synchronize()
            least = min(least, before.elapsed_time(after) / 1000 / LAUNCHES)
        return least


def state_bytes(shape: Shape) -> int:
    """Of one sequence's state in one layer."""
    return shape.heads * shape.d_state * shape.head_dim * 4


def prepared_scan(shape: Shape, work: Work) -> Callable[[], None]:
    """A scan of so much work over states that it changes in place, or writes to planes; it only queues."""
    from numba import cuda
    from statedrift.kernels_cuda.arrays import Twin

    cases = tests_cases()
    tokens, sequences, planes = work.sequences * work.tokens, work.sequences, work.planes
    operands = [cuda.to_device(operand) for operand in cases.operands_of(shape.name, shape.d_state, shape.head_dim, shape.heads, tokens)]
    is_mamba1 = shape.name == "mamba1_scan"
    row = (shape.d_state, shape.head_dim) if is_mamba1 else (shape.heads, shape.d_state, shape.head_dim)
    rows = cuda.to_device(np.zeros((sequences * planes, *row), np.float32))
    y = cuda.device_array((tokens, shape.head_dim) if is_mamba1 else (tokens, shape.heads, shape.head_dim), np.float32)
    segment_start = Twin(np.arange(sequences + 1) * work.tokens)
    source_row = Twin(np.arange(sequences))
    plane_row = Twin(np.arange(sequences)[:, None] + sequences * np.arange(planes))
    scan = getattr(importlib.import_module(f"statedrift.kernels_cuda.{shape.name}"), shape.name)
    return lambda: scan(*operands, rows, segment_start, source_row, plane_row, y)


def speed_of(who: str, seconds: float, shape: Shape, work: Work, copy_bandwidth: float) -> Speed:
    """The row of a measured time."""
    moved = state_bytes(shape) * work.sequences * (1 + work.planes)
    share = moved / seconds / copy_bandwidth if work.tokens == work.planes else None
    size = f"{shape.heads} x {shape.head_dim} x {shape.d_state}"
    return Speed(who, f"{shape.name}: {work.title}", size, 1000 * seconds, work.sequences * work.tokens / seconds, share)


# --- peers -----------------------------------------------------------------------------------------------------------------


def _torch() -> Any:
    import torch

    if DEVICE == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no CUDA device")
    return torch


def _drawn(shape: Shape, work: Work) -> list[Any]:
    """The operands of a scan as tensors [sequences, tokens, ...] on the device; those of a head alone as they are."""
    cases = tests_cases()
    torch = _torch()
    tokens = work.sequences * work.tokens
    operands = cases.operands_of(shape.name, shape.d_state, shape.head_dim, shape.heads, tokens)
    return [
        torch.from_numpy(operand).to(DEVICE)
        if (shape.name, place) in cases.PER_HEAD
        else torch.from_numpy(operand).to(DEVICE).reshape(work.sequences, work.tokens, *operand.shape[1:])
        for place, operand in enumerate(operands)
    ]


def _mamba1_step(state: Any, x: Any, dt: Any, a: Any, b: Any, c: Any) -> Any:
    state.mul_((dt[:, None] * a).exp()).add_(b[:, :, None] * (dt * x)[:, None])
    return (state * c[:, :, None]).sum(1)


def _mamba2_step(state: Any, x: Any, dt: Any, a: Any, b: Any, c: Any) -> Any:
    state.mul_((dt * a).exp()[:, :, None, None]).add_(b[:, :, :, None] * (dt[:, :, None] * x)[:, :, None])
    return (state * c[:, :, :, None]).sum(2)


def _lightning_step(state: Any, query: Any, key: Any, value: Any, loss: Any) -> Any:
    state.mul_((1 + loss)[:, None, None]).add_(key[:, :, :, None] * value[:, :, None])
    return (state * query[:, :, :, None]).sum(2)


def _delta_step(state: Any, query: Any, key: Any, value: Any, log_decay: Any, beta: Any) -> Any:
    state.mul_(log_decay.exp()[:, :, None, None])
    added = beta[:, :, None] * (value - (state * key[:, :, :, None]).sum(2))
    state.add_(key[:, :, :, None] * added[:, :, None])
    return (state * query[:, :, :, None]).sum(2)


def _kimi_step(state: Any, query: Any, key: Any, value: Any, decay: Any, beta: Any) -> Any:
    state.mul_(decay[:, :, :, None])
    added = beta[:, :, None] * (value - (state * key[:, :, :, None]).sum(2))
    state.add_(key[:, :, :, None] * added[:, :, None])
    return (state * query[:, :, :, None]).sum(2)


def _rwkv6_step(state: Any, receptance: Any, key: Any, value: Any, decay: Any, first: Any) -> Any:
    given = key[:, :, :, None] * value[:, :, None]
    y = ((state + first[:, :, None] * given) * receptance[:, :, :, None]).sum(2)
    state.mul_(decay[:, :, :, None]).add_(given)
    return y


def _rwkv7_step(state: Any, receptance: Any, key: Any, value: Any, decay: Any, removal: Any, rate: Any) -> Any:
    held = (state * removal[:, :, :, None]).sum(2)
    state.mul_(decay[:, :, :, None]).add_(key[:, :, :, None] * value[:, :, None] - (removal * rate)[:, :, :, None] * held[:, :, None])
    return (state * receptance[:, :, :, None]).sum(2)


STEPS: dict[str, Callable[..., Any]] = {
    "mamba1_scan": _mamba1_step, "mamba2_scan": _mamba2_step, "lightning_attention": _lightning_step, "gated_delta_net": _delta_step,
    "kimi_delta_attention": _kimi_step, "rwkv6_wkv": _rwkv6_step, "rwkv7_wkv": _rwkv7_step,
}  # fmt: skip
"""One token of every sequence, as somebody would write it in PyTorch; `state` [sequences, heads, d_state, head_dim] is changed in place."""


def _torch_steps(shape: Shape, work: Work, compiled: bool) -> Callable[[], Any]:
    cases = tests_cases()
    torch = _torch()
    step = torch.compile(STEPS[shape.name], dynamic=False) if compiled else STEPS[shape.name]
    operands = _drawn(shape, work)
    heads = () if shape.name == "mamba1_scan" else (shape.heads,)
    state = torch.zeros((work.sequences, *heads, shape.d_state, shape.head_dim), device=DEVICE)
    by_token = [
        [operand if (shape.name, place) in cases.PER_HEAD else operand[:, token] for place, operand in enumerate(operands)]
        for token in range(work.tokens)
    ]

    def run() -> None:
        for given in by_token:
            step(state, *given)

    return run


def _mamba_ssm_decode(shape: Shape, work: Work) -> Callable[[], Any]:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    torch = _torch()
    x, dt, a, b, c = (operand if place == 2 else operand[:, 0] for place, operand in enumerate(_drawn(shape, work)))
    state = torch.zeros((work.sequences, shape.heads, shape.head_dim, shape.d_state), device=DEVICE)
    steps = dt[:, :, None].expand(-1, -1, shape.head_dim)
    decays = a[:, None, None].expand(-1, shape.head_dim, shape.d_state)
    return lambda: selective_state_update(state, x, steps, decays, b, c)


def _mamba_ssm_prefill(shape: Shape, work: Work) -> Callable[[], Any]:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x, dt, a, b, c = _drawn(shape, work)
    return lambda: mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size=128, return_final_states=True)


def _fla_delta(which: str, shape: Shape, work: Work) -> Callable[[], Any]:
    torch = _torch()
    function = getattr(importlib.import_module("fla.ops.gated_delta_rule"), f"{which}_gated_delta_rule")
    query, key, value, log_decay, beta = _drawn(shape, work)
    query, key = (part.expand(-1, -1, shape.heads, -1).contiguous() for part in (query, key))
    if which == "chunk":  # it takes half precision only
        query, key, value, beta = (part.to(torch.bfloat16) for part in (query, key, value, beta))
    state = torch.zeros((work.sequences, shape.heads, shape.d_state, shape.head_dim), device=DEVICE)
    return lambda: function(query, key, value, g=log_decay, beta=beta, initial_state=state, output_final_state=True)


def peers_of(shape: Shape, work: Work) -> list[Peer]:
    """Who else can do this work."""
    found = []
    if work.planes == 1:
        is_decode = work.tokens == 1
        if is_decode:
            found.append(Peer("PyTorch, eager", work.title, lambda shape, work: _torch_steps(shape, work, compiled=False)))
            found.append(Peer("PyTorch, compiled", work.title, lambda shape, work: _torch_steps(shape, work, compiled=True)))
        if shape.name == "mamba2_scan":
            found.append(Peer("mamba_ssm, Triton", work.title, _mamba_ssm_decode if is_decode else _mamba_ssm_prefill))
        if shape.name == "gated_delta_net":
            which = "fused_recurrent" if is_decode else "chunk"
            who = "fla, Triton" if is_decode else "fla, Triton, bfloat16"
            found.append(Peer(who, work.title, lambda shape, work: _fla_delta(which, shape, work)))
    return found


class TorchClock:
    """The same clock for what PyTorch queues."""

    def __init__(self, byte_count: int) -> None:
        self._torch = _torch()
        self._from, self._to = (self._torch.empty(byte_count, dtype=self._torch.uint8, device=DEVICE) for _ in range(2))

    def seconds(self, launch: Callable[[], Any]) -> float:
        """Of one call of `launch`; see `Clock.seconds`."""
        torch = self._torch
        with torch.no_grad():
            launch()
            launch()
            torch.cuda.synchronize()
            least = math.inf
            for _ in range(SERIES):
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                for _ in range(3):
                    self._to.copy_(self._from)
                before.record()
                for _ in range(LAUNCHES):
                    launch()
                after.record()
                after.synchronize()
                least = min(least, before.elapsed_time(after) / 1000 / LAUNCHES)
        return least


def time_peers(shapes: Sequence[Shape], works: Sequence[Work], clock: Clock, deadline: float) -> tuple[list[Speed], list[str]]:
    """The rows of all peers, and why others are missing."""
    found: list[Speed] = []
    missing: dict[str, None] = {}
    try:
        torch_clock = TorchClock(clock.bytes)
    except Exception as error:  # no PyTorch, one without CUDA, one that does not fit the driver
        return [], [f"PyTorch, mamba_ssm, fla: {_one_line(error)}"]
    every = [(shape, work, peer) for work in works for shape in shapes for peer in peers_of(shape, work)]
    for shape, work, peer in every:
        if time.monotonic() > deadline:
            missing[f"{peer.who}: no time was left for all of it (--seconds)"] = None
            continue
        try:
            seconds = torch_clock.seconds(peer.prepare(shape, work))
        except Exception as error:  # whatever somebody else's code says
            missing[f"{peer.who}, {shape.name}: {_one_line(error)}"] = None
            continue
        found.append(speed_of(peer.who, seconds, shape, work, clock.copy_bandwidth))
    return found, list(missing)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


# --- the page --------------------------------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, str]:
    """What was measured on."""
    facts = {"device": device, "Python": platform.python_version()}
    for name in ("statedrift", "numba", "numba-cuda", "torch", "triton", "mamba-ssm", "flash-linear-attention"):
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def page(result: dict[str, Any]) -> str:
    """The Markdown page of what `main` writes as JSON."""
    checked = [Checked(**row) for row in result["kernels"]]
    wrong = [row for row in checked if not row.is_right]
    worst = max(row.difference for row in checked)
    lines = ["# The CUDA kernels and targets on a GPU", "", "Written by `python benchmarks/gpu.py`.", ""]
    lines += [f"- {name}: {value}" for name, value in result["machine"].items()]
    lines += [f"- numbers drawn with --seed {result['seed']}; {result['seconds']:.0f} s in all", "", "## Correctness", ""]
    lines += [f"{len(checked)} comparisons with the CPU's kernels, {len(wrong)} of them wrong; largest difference {worst:.1e}.", ""]
    lines += [f"- WRONG: {row.kernel} is off by {row.difference:.1e} (tolerance {row.tolerance}) {row.failure}".rstrip() for row in wrong]
    fuzzed = [Fuzzed(**row) for row in result["fuzz"]]
    rows = [[row.target, " ".join(row.families), str(row.programs), str(row.not_judged), str(len(row.divergences))] for row in fuzzed]
    lines += [markdown_table(["target", "families", "programs", "not judged", "divergences"], rows), ""]
    lines += [f"- DIVERGENCE on {row.target}: {text}" for row in fuzzed for text in row.divergences]
    lines += [f"- COULD NOT TEST {row.target}: {row.failure}" for row in fuzzed if row.failure]
    lines += ["## Speed", ""]
    if result["speeds"] is None:
        return "\n".join([*lines, "None: this was the simulator.", ""])
    lines += [
        f"A copy on this device reads and writes {result['copy_bandwidth'] / 1e9:.0f} GB/s together. A share is that of the states' bytes.",
        "",
    ]
    speeds = sorted((Speed(**row) for row in result["speeds"]), key=lambda row: (row.what, row.shape, row.who != "statedrift"))
    rows = [
        [row.what, row.shape, row.who, f"{row.milliseconds:.3f}", f"{row.tokens_per_second:.3g}", _percent(row.share)] for row in speeds
    ]
    lines += [markdown_table(["what", "heads x head_dim x d_state", "who", "ms", "tokens/s", "share of copy"], rows), ""]
    lines += [f"- below {100 * DECODE_SHARE_MIN:.0f} % of the copy: {text}" for text in result["below_bound"]]
    lines += [f"- not measured: {text}" for text in result["not_measured"]]
    return "\n".join([*lines, ""])


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; the answer is the exit status: 0, 1 when something was wrong, 2 without a device, 64 for a bad argument."""
    parser = argparse.ArgumentParser(description="The CUDA kernels and targets on a GPU: are they right, and how fast are they.")
    parser.add_argument("--toy", action="store_true", help="at sizes for the simulator: NUMBA_ENABLE_CUDASIM=1")
    parser.add_argument("--seed", type=int, help="of the numbers and programs; a fresh one unless given")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="when no further peer is begun")
    parser.add_argument(
        "--fuzz-seconds", type=float, default=FUZZ_SECONDS, help="of the campaign on each target; its noise is measured before"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    given = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        require_cuda("cuda")
    except UnavailableError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    from statedrift.kernels_cuda import SIMULATED

    if given.seed is not None and given.seed < 0:
        print(f"gpu.py: --seed must not be negative, as {given.seed} is", file=sys.stderr)
        return 64
    if given.toy != SIMULATED:
        print("gpu.py: the simulator (NUMBA_ENABLE_CUDASIM=1) and --toy go together: speeds are those of a device alone", file=sys.stderr)
        return 64
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {text}", file=sys.stderr, flush=True)

    seed = secrets.randbits(31) if given.seed is None else given.seed
    device = CudaTarget("cuda", "strict", saves_snapshots=False).describe().partition("; ")[2]
    result: dict[str, Any] = {"machine": machine(device), "seed": seed}
    checked = check_kernels(TOY_SHAPES if given.toy else SHAPES, seed, say)
    say("scans and windows compared, too")
    fuzzed = fuzz(seed, ("lfm2",), None, 2) if given.toy else fuzz(seed, FAMILIES, given.fuzz_seconds, None)
    result |= {"kernels": [row._asdict() for row in checked], "fuzz": [row._asdict() for row in fuzzed]}
    say("generated programs run on both targets")
    result |= _toy_speeds() if given.toy else _speeds(started + given.seconds, say)
    result["seconds"] = time.monotonic() - started
    text = page(result)
    print(text, end="")
    if given.write:
        given.write.write_text(text, encoding="utf-8")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1, allow_nan=True) + "\n", encoding="utf-8")
    return int(not all(row.is_right for row in checked) or any(row.divergences or row.failure or row.not_judged for row in fuzzed))


def _toy_speeds() -> dict[str, Any]:
    """What is timed on a device is only run."""
    for shape in TOY_SHAPES:
        for work in TOY_WORKS:
            prepared_scan(shape, work)()
    return {"speeds": None, "copy_bandwidth": None, "below_bound": [], "not_measured": []}


def _speeds(deadline: float, say: Callable[[str], None]) -> dict[str, Any]:
    clock = Clock()
    speeds = []
    not_measured = []
    for work in WORKS:
        for shape in SHAPES:
            try:
                seconds = clock.seconds(prepared_scan(shape, work))
            except Exception as error:  # memory, mostly; that a kernel is right was looked at before
                not_measured.append(f"{shape.name}, {work.title}: {_one_line(error)}")
                continue
            speeds.append(speed_of("statedrift", seconds, shape, work, clock.copy_bandwidth))
        say(f"{work.title} timed")
    below = [
        f"{row.what} ({row.shape}): {100 * row.share:.0f} %"
        for row in speeds
        if row.what.endswith(DECODE.title) and row.share is not None and not row.share >= DECODE_SHARE_MIN
    ]
    others, missing = time_peers(SHAPES, WORKS, clock, deadline)
    return {
        "speeds": [row._asdict() for row in (*speeds, *others)],
        "copy_bandwidth": clock.copy_bandwidth,
        "below_bound": below,
        "not_measured": not_measured + missing,
    }


if __name__ == "__main__":
    sys.exit(main())
