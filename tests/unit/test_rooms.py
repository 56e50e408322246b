"""The rooms import only what they may (ARCHITECTURE.md, "Rooms"): read off the source, nothing is imported.

The table here is that page's table. Inside the distribution imports between rooms are relative, so that the same files work from a
checkout, an editable installation and a wheel.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("spec", "oracle", "impl", "kernels_cuda", "targets", "store", "fuzz", "reports", "cli", "statedrift")
ALL = frozenset(ROOMS)
MAY_IMPORT: dict[str, frozenset[str]] = {
    "statedrift": ALL,
    "spec": frozenset(),
    "oracle": frozenset({"spec"}),
    "impl": frozenset({"spec"}),
    "kernels_cuda": frozenset({"spec"}),
    "targets": frozenset({"spec", "impl", "kernels_cuda"}),
    "store": frozenset({"spec"}),
    "fuzz": ALL - {"reports", "cli"},
    "reports": frozenset({"spec", "store"}),
    "cli": ALL,
}


def package_of(room: str, file: Path, folder: Path) -> tuple[str, ...]:
    """The package that a file of a room is in, e.g. ("statedrift", "spec", "families")."""
    inner = file.relative_to(folder).parent.parts
    return ("statedrift", *inner) if room == "statedrift" else ("statedrift", room, *inner)


def imported_modules(source: str, package: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...], bool]]:
    """Line, full module path, and whether it was written relatively, of everything that is imported anywhere in a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split(".")), False
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = base + tuple((node.module or "").split(".") if node.module else ())
            for alias in node.names:
                yield node.lineno, (*module, alias.name), node.level > 0


def complaints(room: str, source: str, package: tuple[str, ...]) -> list[str]:
    """What a file of a room imports and may not."""
    found = []
    for line, module, relative in imported_modules(source, package):
        if module[0] != "statedrift":
            continue
        if not relative:
            found.append(f"line {line}: absolute import of {'.'.join(module)}")
        other = module[1] if len(module) > 1 and module[1] in ROOMS else "statedrift"
        if other not in MAY_IMPORT[room] | {room}:
            found.append(f"line {line}: {room} imports {'.'.join(module)}")
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    folder = ROOT / room
    files = sorted(folder.rglob("*.py"))
    assert files
    found = [
        f"{file.relative_to(ROOT)}: {text}" for file in files for text in complaints(room, file.read_text(), package_of(room, file, folder))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("spec", "from ..oracle.contract import Checker"),
        ("spec", "from ..oracle import contract"),
        ("spec", "from .. import oracle"),
        ("spec", "from .. import __version__"),
        ("oracle", "def later():\n    from ..fuzz.execution import execute"),
        ("reports", "from ..fuzz.trial import Trial"),
        ("store", "import statedrift.fuzz"),
        ("fuzz", "from ..cli.output import say"),
        ("impl", "from statedrift.spec.models import Model"),
    ],
)
def test_a_forbidden_import_is_noticed(room: str, source: str) -> None:
    assert complaints(room, source, ("statedrift", room))


def test_levels_are_counted_from_an_inner_package() -> None:
    inner = ("statedrift", "spec", "families")
    assert complaints("spec", "from ..models import Model", inner) == []
    assert complaints("spec", "from ...oracle.contract import Checker", inner) != []


def test_the_page_has_the_same_table() -> None:
    rows = [line for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines() if line.startswith("| `")]
    table = {}
    for row in rows:
        name, _, may = (cell.strip() for cell in row.strip("|").split("|"))
        words = {word.strip(" `") for word in may.replace("all but reports and cli", "ALL-BUT").split(",")}
        expected = {"all": ALL, "ALL-BUT": ALL - {"reports", "cli"}, "nothing": frozenset()}
        table[name.strip("`/")] = expected[next(iter(words))] if len(words) == 1 and next(iter(words)) in expected else frozenset(words)
    assert table == MAY_IMPORT


def test_every_package_is_in_the_wheel() -> None:
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {".".join(package_of(room, file, ROOT / room)) for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    assert packages == set(settings["packages"])
    assert {name: str(ROOT / folder) for name, folder in settings["package-dir"].items()} == {
        name: str(ROOT / ("statedrift" if name == "statedrift" else name.removeprefix("statedrift.").replace(".", "/")))
        for name in packages
    }
