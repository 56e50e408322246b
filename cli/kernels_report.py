"""What `statedrift bench kernels` says: its bounds, its tables for a terminal, and its page.

Rules
- Every stated bound is a line with what was measured. One that needs a figure that is not there (a second core, a peer) is left out, and a note says why.
- Comparisons are written so that NaN fails.
"""

from collections.abc import Iterator, Sequence

from ..reports.terminal import aligned
from .kernel_bench.cases import OPERATIONS_IN_WORDS
from .kernel_bench.peers import LLAMACPP, PEERS
from .kernel_bench.results import Results, Row, What
from .throughput import Bound, bound_table, markdown_table

PREFILL_SHARE_MIN = {"mamba2_scan": 0.85, "gated_delta_net": 0.75, "kimi_delta_attention": 0.75}
DECODE_SHARE_MIN = {"mamba2_scan": 0.90}
SHARE_MIN = 0.60
"""Of every prefill and decode that has no bound of its own."""
TWO_THREADS_MIN = 1.8
OTHER_ROW_KERNEL = "mamba2_scan"
ANOTHER_ROW_MAX = 1.25
ANOTHER_ROW_CACHED_MAX = 1.05
SNAPSHOTS_MAX = 1.25
LLAMACPP_PREFILL_MIN = 2.0
NEAR_LIMIT = 0.80
"""Where both are this near to the limit, ours need not be so much quicker than llama.cpp's."""
WARM_SECONDS_MAX, COLD_SECONDS_MAX = 0.2, 15.0
ERROR_MAX = 1e-5
DIFFERENCE_MAX = 1e-3
"""Between a peer's result and ours: beyond it something else is timed."""

TITLES: dict[What, str] = {
    "prefill": "Prefill: 512 tokens of one sequence",
    "decode in place": "Decode, the states larger than the caches, written where they were read",
    "decode to another row": "Decode, the states larger than the caches, written to another row",
    "cached in place": "Decode token by token, the state in the caches, written where it was read",
    "cached to another row": "Decode token by token, the state in the caches, written to another row",
    "snapshots": "4 snapshots: a batch of 4 tokens of which every state is kept",
}
HEADINGS = ("", "size", "ms", "ns", "limit", "limit ms", "share")
_UNCLEAN = "~"
GROWTH_TITLE = "Error against float64 after so many tokens"


def bounds_of(results: Results) -> list[Bound]:
    """Every stated bound that concerns what was measured; of a check only those on results."""
    bounds = list(_results_bounds(results))
    if not results.short:
        bounds += _share_bounds(results.rows)
        bounds += _two_rows_bounds(results.rows)
        bounds += _peer_bounds(results.rows)
        bounds += _first_call_bounds(results)
    return bounds


def _results_bounds(results: Results) -> Iterator[Bound]:
    for exact in results.exactness:
        yield Bound(
            f"{exact.kernel}: the same bits for every split, order, row and number of threads",
            f"{exact.compared - exact.differing} of {exact.compared}",
            exact.differing == 0 < exact.compared,
        )
        yield Bound(f"{exact.kernel}: at most {ERROR_MAX:g} from float64", f"{exact.error:.1e}", exact.error <= ERROR_MAX)
    for name in PEERS:
        errors = [peer.error for row in results.rows for peer in row.peers if peer.name == name and peer.error is not None]
        if errors:
            right = sum(error <= DIFFERENCE_MAX for error in errors)
            yield Bound(f"{name} gives what we give, to {DIFFERENCE_MAX:g}", f"{right} of {len(errors)}", right == len(errors))


def _share_bounds(rows: Sequence[Row]) -> Iterator[Bound]:
    for row in rows:
        if row.threads == 1 and row.what in ("prefill", "decode in place"):
            least = (PREFILL_SHARE_MIN if row.what == "prefill" else DECODE_SHARE_MIN).get(row.kernel, SHARE_MIN)
            yield Bound(f"{_name(row)}: at least {100 * least:.0f} % of the limit", _percent(row.share), row.share >= least)
        if row.what == "snapshots":
            times = row.timing.seconds / row.limit_seconds
            yield Bound(f"{_name(row)}: within {SNAPSHOTS_MAX:g} of the bytes written", f"{times:.2f}", times <= SNAPSHOTS_MAX)


def _two_rows_bounds(rows: Sequence[Row]) -> Iterator[Bound]:
    """Bounds on how two rows compare; those on writing to another row are Mamba-2's."""
    found = {(row.kernel, row.size, row.what, row.threads): row for row in rows}
    for row in rows:
        if row.threads == 2 and (alone := found.get((row.kernel, row.size, row.what, 1))) is not None:
            times = alone.timing.seconds / row.timing.seconds
            yield Bound(f"{_name(row)}: at least {TWO_THREADS_MIN} times one thread", f"{times:.2f}", times >= TWO_THREADS_MIN)
        pairs: tuple[tuple[What, What, float], ...] = (
            ("decode to another row", "decode in place", ANOTHER_ROW_MAX),
            ("cached to another row", "cached in place", ANOTHER_ROW_CACHED_MAX),
        )
        for what, other, most in pairs:
            if (
                row.kernel == OTHER_ROW_KERNEL
                and row.what == what
                and (in_place := found.get((row.kernel, row.size, other, row.threads))) is not None
            ):
                times = row.timing.seconds / in_place.timing.seconds
                yield Bound(f"{_name(row)}: within {most:g} of in place", f"{times:.2f}", times <= most)


def _peer_bounds(rows: Sequence[Row]) -> Iterator[Bound]:
    for row in rows:
        timed = {peer.name: peer.timing.seconds for peer in row.peers if peer.timing is not None}
        if not timed:
            continue
        nearest = min(timed, key=timed.__getitem__)
        times = timed[nearest] / row.timing.seconds
        yield Bound(f"{_name(row)}: faster than every peer", f"{times:.2f} ({nearest})", times > 1)
        if row.what == "prefill" and LLAMACPP in timed:
            times = timed[LLAMACPP] / row.timing.seconds
            both_near = row.share >= NEAR_LIMIT and row.limit_seconds / timed[LLAMACPP] >= NEAR_LIMIT
            yield Bound(
                f"{_name(row)}: at least {LLAMACPP_PREFILL_MIN:g} times {LLAMACPP}, or both at {100 * NEAR_LIMIT:.0f} % of the limit",
                f"{times:.2f}",
                times >= LLAMACPP_PREFILL_MIN or both_near,
            )


def _first_call_bounds(results: Results) -> Iterator[Bound]:
    if (first := results.first_call) is None:
        return
    yield Bound(
        f"first call of {first.family}, compiled before: under {WARM_SECONDS_MAX:g} s", f"{first.warm:.2f}", first.warm < WARM_SECONDS_MAX
    )
    yield Bound(
        f"first call of {first.family}, nothing compiled: under {COLD_SECONDS_MAX:g} s", f"{first.cold:.1f}", first.cold < COLD_SECONDS_MAX
    )


def _name(row: Row) -> str:
    return f"{row.kernel}, {_size(row)}, {row.what}"


def _size(row: Row) -> str:
    return row.size + f", {row.threads} threads" * (row.threads > 1)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def figure_table(results: Results, what: What) -> list[list[str]]:
    """The headings, and a line for each figure of one kind: time, limit, share, and what the peers take; nothing where there is no figure."""
    rows = [row for row in results.rows if row.what == what]
    peers = [name for name in PEERS if any(peer.name == name for row in rows for peer in row.peers)]
    lines = [
        [
            row.kernel,
            _size(row),
            _UNCLEAN * (row.timing.clean == 0) + _milliseconds(row.timing.seconds),
            f"{1e9 * row.timing.seconds / row.elements:.3f}",
            row.limit,
            _milliseconds(row.limit_seconds),
            _percent(row.share),
            *(_peer_cell(row, name) for name in peers),
        ]
        for row in rows
    ]
    return [[*HEADINGS, *peers], *lines] if rows else []


def _peer_cell(row: Row, name: str) -> str:
    found = [peer for peer in row.peers if peer.name == name]
    if not found or found[0].timing is None:
        return "-"
    seconds = found[0].timing.seconds
    return f"{_milliseconds(seconds)} ({seconds / row.timing.seconds:.1f}x)"


def limit_rows(results: Results) -> list[list[str]]:
    """What the processor can do, as it was measured over the run."""
    return [[limit.name, f"{limit.least:.1f}", f"{limit.most:.1f}", limit.unit] for limit in results.limits]


def exactness_rows(results: Results) -> list[list[str]]:
    """The promise, kernel by kernel."""
    return [[exact.kernel, f"{exact.compared}", f"{exact.differing}", f"{exact.error:.1e}"] for exact in results.exactness]


def growth_rows(results: Results) -> list[list[str]]:
    """Error growth, kernel by kernel."""
    return [[grown.kernel, grown.decays, *(f"{error:.1e}" for error in grown.errors)] for grown in results.growth]


LIMIT_HEADINGS = ("what the processor can do", "least", "most", "")
EXACTNESS_HEADINGS = ("", "compared bit for bit", "differ", "rms error against float64")


def growth_headings(results: Results) -> list[str]:
    """The numbers of tokens."""
    return ["", "decays", *(f"{tokens:,}" for tokens in (results.growth[0].tokens if results.growth else ()))]


def notes(results: Results) -> list[str]:
    """What a reader has to know about the numbers of this run."""
    texts = list(results.gaps)
    if not results.short and any(row.timing.clean == 0 for row in results.rows):
        texts.append(
            f"{_UNCLEAN}: the processor was taken away during every sample, and the caches were others' in between; the time may read high."
        )
    missing: dict[tuple[str, str], list[str]] = {}
    for row in results.rows:
        for peer in row.peers:
            if peer.missing:
                missing.setdefault((peer.name, peer.missing), []).append(row.kernel)
    for (name, reason), kernels in missing.items():
        texts.append(f"{name} is missing for {', '.join(dict.fromkeys(kernels))} where there is a `-`: {reason}.")
    return texts


def report_text(results: Results) -> str:
    """The report for a terminal."""
    lines = ["our CPU kernels, on one thread unless it says two"]
    lines += ["  " + line for line in aligned([list(LIMIT_HEADINGS), *limit_rows(results)])]
    for what, title in TITLES.items():
        if table := figure_table(results, what):
            lines += ["", title, *("  " + line for line in aligned(table, numbers_from=2))]
    lines += ["", *("  " + line for line in aligned([list(EXACTNESS_HEADINGS), *exactness_rows(results)]))]
    lines += ["", GROWTH_TITLE, *("  " + line for line in aligned([growth_headings(results), *growth_rows(results)], numbers_from=2))]
    lines += ["", *("  " + note for note in notes(results)), "", *_bound_lines(results)]
    return "\n".join(lines) + "\n"


def check_text(results: Results) -> str:
    """What a check says: whether results are right. No time is shown."""
    kernels = dict.fromkeys(row.kernel for row in results.rows)
    lines = [f"checked {len(kernels)} kernels in {len(results.rows)} ways; no time is looked at"]
    lines += [*("  " + note for note in notes(results)), *_bound_lines(results)]
    return "\n".join(lines) + "\n"


def _bound_lines(results: Results) -> list[str]:
    rows = [["holds" if bound.holds else "FAILS", bound.measured, bound.stated] for bound in bounds_of(results)]
    return ["stated bounds", *("  " + line for line in aligned(rows, 3))]


def report_markdown(results: Results, facts: Sequence[tuple[str, str]]) -> str:
    """The report as a Markdown page; facts: what it was measured with."""
    parts = [
        "# Our CPU kernels",
        "Written by `statedrift bench kernels --write FILE`. What is measured and how to read it: [docs/kernels.md](../docs/kernels.md). *ms*: the least of many samples; *ns*: that\n"
        "for one state element and token (snapshots: for each element written; the convolution: for each output). *share*: of the limit. Peers: ms, and how many times ours.",
        "## What the processor can do",
        "The least and the most that was measured over the run; every row below is held to what was measured beside it.",
        markdown_table(LIMIT_HEADINGS, limit_rows(results)),
    ]
    for what, title in TITLES.items():
        if table := figure_table(results, what):
            parts += [f"## {title}", markdown_table(table[0], table[1:])]
    if texts := notes(results):
        parts += ["\n".join(f"- {text}" for text in texts)]
    parts += [
        "Vector instructions for 16 state elements and a token that make the limit of the arithmetic, with every product fused that can be:",
        "\n".join(f"- `{kernel}` {words}." for kernel, words in OPERATIONS_IN_WORDS.items()),
        "## Stated bounds",
        bound_table(bounds_of(results)),
        "## Exactness",
        "Random splits, orders, rows and threads against one sequence after the other, each in one call; the rms error of that against float64.",
        markdown_table(EXACTNESS_HEADINGS, exactness_rows(results)),
        f"## {GROWTH_TITLE}",
        "rms over the last tenth of the tokens, relative to the rms of the truth there. Usual decays remember 3 to 300 tokens, slow ones 3,000 to 300,000.",
        markdown_table(growth_headings(results), growth_rows(results)),
    ]
    if (first := results.first_call) is not None:
        parts += [
            "## First call",
            f"The first decode of a process (`{first.family}`, its whole forward) takes {first.cold:.1f} s of CPU time with nothing compiled, {first.warm:.2f} s with all of it on disk.",
        ]
    parts += ["## Measured on", markdown_table(("", ""), [list(fact) for fact in facts])]
    return "\n\n".join(parts) + "\n"
