"""docs/families.md: every family, what it keeps, and how far its recompute is from what others compute.

    python -m tests.conformance.table             measures everything and writes the page (some minutes)
    python -m tests.conformance.table FAMILY ...  measures these families anew, and those that the page lacks
    python -m tests.conformance.table --check     measures nothing: says where the page lacks a family or a truth, or shows too large an error

Rules
- The models and logs are those of the conformance tests, and so are the bounds.
- A truth is one entry of TRUTHS; its package is imported when it is asked to measure, so that the page can be checked without it.
- Whatever can be read off a family (title, layers, widths, dimensions) is, never written by hand.
- All numbers of a page were measured with the same versions: with others, everything is measured anew.
"""

import argparse
import ast
import functools
import io
import platform
import tempfile
import tokenize
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from statedrift.cli.throughput import markdown_table
from statedrift.fuzz.calibration import FLOORS_IN_TOLERANCE, TOLERANCE_MAX
from statedrift.fuzz.trial import Bench
from statedrift.oracle.recompute import Recompute, Request, use_one_thread
from statedrift.spec.errors import UnavailableError
from statedrift.spec.families import FAMILIES, Family
from statedrift.spec.models import Model
from statedrift.spec.state_sizes import KINDS, StateLayers, width

from tests.conformance.models import LLAMA_CPP_MODELS, RWKV_MODELS, TRANSFORMERS_MODELS

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
FLOOR_MAX = TOLERANCE_MAX / FLOORS_IN_TOLERANCE
NONE, NOT_JUDGED = "-", "not judged"
FAMILY, AT_MOST = "family", "at most"
NOISE_TARGETS = ("numba", "llamacpp")
ROOT = PAGE.parents[1]
PARTS_OF_A_FAMILY = {"facts": "spec/families", "truth": "oracle", "forward": "impl"}
PACKAGES = ("statedrift", "torch", "numba", "transformers", "rwkv", "llama-cpp-python")


Cells = dict[tuple[str, str], str]
"""The measured cells of the page, by column and family."""


class Truth(NamedTuple):
    """Something outside that computes the same.

    column   what it is called on the page
    bound    the largest error that is right
    models   that it has
    measure  the largest error on a model, and how many logs were compared
    """

    column: str
    bound: float
    models: tuple[Model, ...]
    measure: Callable[[Model], tuple[float, int]]


# --- what is measured --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def our_rows(model: Model, logs: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    return Recompute(model).rows([Request(log, range(len(log))) for log in logs])


def _transformers(model: Model) -> tuple[float, int]:
    from tests.conformance.transformers_truth import largest_error, logs_of, their_model, their_rows

    module, logs = their_model(model), tuple(logs_of(model))
    return max(largest_error(their_rows(module, log, model), ours) for log, ours in zip(logs, our_rows(model, logs), strict=True)), len(
        logs
    )


def _transformers_in_float64(model: Model) -> tuple[float, int]:
    from tests.conformance.transformers_truth import casts_to_float32_lifted, largest_error, logs_of, their_model, their_rows

    module, logs = their_model(model), tuple(logs_of(model))
    with casts_to_float32_lifted(module):
        errors = [largest_error(their_rows(module, log, model), ours) for log, ours in zip(logs, our_rows(model, logs), strict=True)]
    return max(errors), len(logs)


def _rwkv(model: Model) -> tuple[float, int]:
    from tests.conformance.rwkv_truth import largest_error, logs_of, state_dict, their_model, their_rows

    with tempfile.TemporaryDirectory() as folder:
        module, logs = their_model(model, Path(folder), state_dict(model)), tuple(logs_of(model))
        return max(largest_error(their_rows(module, log), ours) for log, ours in zip(logs, our_rows(model, logs), strict=True)), len(logs)


def _rwkv_in_float64(model: Model) -> tuple[float, int]:
    from tests.conformance.rwkv_truth import float64, largest_error, logs_of, state_dict, their_model, their_rows

    logs = tuple(logs_of(model))
    with tempfile.TemporaryDirectory() as folder, float64():
        module = their_model(model, Path(folder), state_dict(model), is_double=True)
        theirs = [their_rows(module, log) for log in logs]
    return max(largest_error(rows, ours) for rows, ours in zip(theirs, our_rows(model, logs), strict=True)), len(logs)


def _llama_cpp(model: Model) -> tuple[float, int]:
    from tests.conformance.llama_cpp_truth import errors, log_of, their_rows

    log = log_of(model)
    with tempfile.TemporaryDirectory() as folder:
        theirs = their_rows(model, log, Path(folder))
    return float(errors(theirs, our_rows(model, (log,))[0]).max()), 1


TRUTHS = (
    Truth("Transformers as shipped", 2e-5, TRANSFORMERS_MODELS, _transformers),
    Truth("Transformers in float64", 1e-9, TRANSFORMERS_MODELS, _transformers_in_float64),
    Truth("rwkv as shipped", 2e-5, RWKV_MODELS, _rwkv),
    Truth("rwkv in float64", 1e-9, RWKV_MODELS, _rwkv_in_float64),
    Truth("llama.cpp", 1e-4, LLAMA_CPP_MODELS, _llama_cpp),
)


def measured(truth: Truth, family: str) -> str:
    """The cell of a family's largest error; NONE when the truth does not have it."""
    results = [truth.measure(model) for model in truth.models if model.family == family]
    if not results:
        return NONE
    return f"{max(error for error, _ in results):.1e} ({len(results)} models, {sum(log_count for _, log_count in results)} logs)"


def noise_floor(bench: Bench, family: str) -> str:
    """The cell of a target's noise floor on a family's default model; NONE when it does not run it."""
    if family not in bench.target.families:
        return NONE
    try:
        return f"{bench.noise(Model(family)).floor:.1e}"
    except UnavailableError:
        return NOT_JUDGED


def measured_cells(families: Sequence[str]) -> Cells:
    """Every cell of these families."""
    cells: Cells = {}
    for family in families:
        print(f"measuring {family}", flush=True)
        cells |= {(truth.column, family): measured(truth, family) for truth in TRUTHS}
    for target in NOISE_TARGETS:
        with Bench(target) as bench:
            cells |= {(target, family): noise_floor(bench, family) for family in families}
    return cells


def code_lines(path: Path) -> int:
    """Lines of a source without blank ones, comments and docstrings; 0 when there is no such file."""
    if not path.exists():
        return 0
    text = path.read_text(encoding="utf-8")
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


# --- the page ----------------------------------------------------------------------------------------------------------------

INTRODUCTION = """\
Written by `python -m tests.conformance.table`. A family is a real architecture at toy size, with random weights that are chosen so that any
wrong state shows (tests/quality/test_sensitivity.py). What is promised of each is the same: [contract.md](contract.md). How one is
added: [add-a-family.md](add-a-family.md)."""

KEPT = """\
Each with what its layers keep by default, in the letters and widths of [caches.md](caches.md) (r, s and p: a row a state; k, v and i: a row a token),
and its dimensions."""

OUTSIDE = """\
The truth of a campaign is our own recompute in float64; here it is held to what others compute with the same weights, on the default shape with
two seeds and on other shapes, over whole logs of 1 to 70 tokens.

- *Transformers*, and the *rwkv* package of RWKV's author, *as shipped* and *in float64* (what they cast to float32 stays as it is): the largest
  difference of a log's logits, relative to the largest of them.
- *llama.cpp*: the largest error of a row as the contract defines it, max|y - r| / (1 + rms(r)); it computes in float32 with sums of its own.

A cell is the largest error, with how many models and logs were compared. `-`: that one does not have the family."""

NOISE = f"""\
The largest error of a row in 200 plain decodings of one sequence, up to 200 tokens long, whole and token by token; default model, seed 0. A campaign
tolerates {FLOORS_IN_TOLERANCE:g} times that, and does not judge a target whose floor is higher than below."""


LINES = """\
Of a family's own files, without blank lines, comments and docstrings. What stands in block files (mixers, attention, kernels) is not counted, also
where only one family uses it so far, as of `impl/` kimi_delta_mixer, latent_attention, lightning_mixer, rwkv7_mixer and shared_block."""


def page(cells: Cells, facts: Sequence[tuple[str, str]]) -> str:
    """The whole page; facts: what was compared, and when."""
    columns = [truth.column for truth in TRUTHS]
    outside = [[AT_MOST, *(f"{truth.bound:.0e}" for truth in TRUTHS)]]
    outside += [[family, *(cells[column, family] for column in columns)] for family in FAMILIES]
    noise = [[AT_MOST, *[f"{FLOOR_MAX:.0e}"] * len(NOISE_TARGETS)]]
    noise += [[family, *(cells[target, family] for target in NOISE_TARGETS)] for family in FAMILIES]
    parts = [
        "# Families",
        INTRODUCTION,
        KEPT,
        "\n".join(family_line(family) for family in FAMILIES.values()),
        "## Held to what others compute",
        OUTSIDE,
        markdown_table((FAMILY, *columns), outside),
        "## Noise floors",
        NOISE,
        markdown_table((FAMILY, *NOISE_TARGETS), noise),
        "## Lines of code",
        LINES,
        markdown_table((FAMILY, *PARTS_OF_A_FAMILY, "together"), [[name, *_lines_of(name)] for name in FAMILIES]),
        "## Measured with",
        markdown_table(("what", "which"), [list(fact) for fact in facts]),
    ]
    return "\n\n".join(parts) + "\n"


def family_line(family: Family) -> str:
    """What a family is, what its default model keeps, and its dimensions."""
    kept = "; ".join(_kept(layers) for layers in family.state_layers(family.defaults) if layers.count)
    dimensions = " ".join(f"{name}={value}" for name, value in family.defaults.items())
    return f"- **{family.name}**: {family.title}. Keeps {kept}. `{dimensions}`"


def _kept(layers: StateLayers) -> str:
    widths = ", ".join(f"{part.name} {width(part, layers.dimensions)}" for part in KINDS[layers.kind].parts)
    return f"{layers.count} x {layers.kind.replace('_', ' ')} ({widths})"


def _lines_of(family: str) -> list[str]:
    counts = [code_lines(ROOT / folder / f"{family}.py") for folder in PARTS_OF_A_FAMILY.values()]
    return [*(str(count) if count else NONE for count in counts), str(sum(counts))]


# --- the check ---------------------------------------------------------------------------------------------------------------


def faults(text: str) -> list[str]:
    """What is wrong with a page that was written earlier: a family or a truth that it lacks, a number of models that is no longer so, or
    an error that is not within its bound."""
    found = []
    tables, lines = _tables(text), text.splitlines()
    outside = {row[FAMILY]: row for table in tables for row in table if any(truth.column in row for truth in TRUTHS)}
    noise = {row[FAMILY]: row for table in tables for row in table if NOISE_TARGETS[0] in row}
    for name, family in FAMILIES.items():
        if name not in outside or name not in noise:
            found.append(f"{name} is not in every table")
            continue
        if family_line(family) not in lines:
            found.append(f"{name}: what the page says that it keeps is no longer so")
        for truth in TRUTHS:
            found += _cell_faults(name, truth, outside[name].get(truth.column, NONE))
        for target in NOISE_TARGETS:
            shown = noise[name][target]
            if shown not in (NONE, NOT_JUDGED) and not float(shown) <= FLOOR_MAX:
                found.append(f"{name}: the noise floor of {target}, {shown}, is too high")
    found += [f"there is no family {name}" for name in (outside.keys() | noise.keys()) - FAMILIES.keys() - {AT_MOST}]
    return found


def _cell_faults(family: str, truth: Truth, cell: str) -> list[str]:
    models = sum(model.family == family for model in truth.models)
    if not models:
        return [] if cell == NONE else [f"{family}: {truth.column} does not have it"]
    if f"({models} models," not in cell:
        return [f"{family}: {truth.column} has {models} models of it, but the page says {cell}"]
    return [] if float(cell.split()[0]) <= truth.bound else [f"{family}: {truth.column} differs by {cell}, more than {truth.bound:.0e}"]


def _tables(text: str) -> list[list[dict[str, str]]]:
    """The Markdown tables of a page, their rows by heading."""
    tables: list[list[dict[str, str]]] = []
    headings: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            headings = []
        elif not headings:
            headings = cells
            tables.append([])
        elif set("".join(cells)) - set("-: "):
            tables[-1].append(dict(zip(headings, cells, strict=True)))
    return tables


def _facts() -> list[tuple[str, str]]:
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return [("date", datetime.now(UTC).date().isoformat()), ("system", system), *((package, version(package)) for package in PACKAGES)]


def _kept_cells(text: str, facts: Sequence[tuple[str, str]]) -> Cells:
    """The cells of a page that was written earlier; none when other versions were compared than `facts` says."""
    tables = _tables(text)
    before = {row["what"]: row["which"] for table in tables for row in table if "what" in row}
    if any(before.get(what) != which for what, which in facts if what != "date"):
        return {}
    columns = (*(truth.column for truth in TRUTHS), *NOISE_TARGETS)
    return {(column, row[FAMILY]): row[column] for table in tables for row in table for column in columns if column in row}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check it; 1 when it is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.table", description="Write docs/families.md.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="measure only these, and those that are missing")
    parser.add_argument("--check", action="store_true", help="measure nothing; say what is wrong with the page as it is")
    given = parser.parse_args(arguments)
    if unknown := set(given.families) - FAMILIES.keys():
        parser.error(f"there is no family {min(unknown)}; there are {', '.join(FAMILIES)}")
    if not given.check:
        use_one_thread()
        facts = _facts()
        cells = _kept_cells(PAGE.read_text(encoding="utf-8"), facts) if given.families and PAGE.exists() else {}
        names = (*(truth.column for truth in TRUTHS), *NOISE_TARGETS)
        missing = [family for family in FAMILIES if family in given.families or any((name, family) not in cells for name in names)]
        PAGE.write_text(page(cells | measured_cells(missing), facts), encoding="utf-8")
    found = faults(PAGE.read_text(encoding="utf-8"))
    print("\n".join(found) or f"{PAGE.name} is as it should be")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
