"""`statedrift targets` and `statedrift families`: what there is, and why something is not there.

Rules
- A target that cannot be used here is listed with the reason and never fails the command.
- A row is never cut: facts that do not fit a column come on lines of their own.
"""

from ..reports.terminal import aligned, wrapped
from ..spec.configuration import CacheConfiguration
from ..spec.errors import UnavailableError, UsageError
from ..spec.families import ENGINE_ONLY, FAMILIES, Family
from ..spec.models import Model
from ..spec.target import Capabilities, Target
from ..targets.registry import load_target, target_names

_WORDS = ("coupled", "cancel", "shift", "divide", "save_all", "partial", "device", "embeddings", "partial_share", "inspect")


def targets_text() -> str:
    """Every installed target: whether it can be used here, its families, its library, what a default session of each family can do."""
    lines: list[str] = []
    for name in target_names():
        lines += _target_lines(name)
    return "\n".join(lines or ["no targets are installed"]) + "\n"


def _target_lines(name: str) -> list[str]:
    try:
        target = load_target(name)
        library = target.describe()
    except (UnavailableError, UsageError) as error:
        reason = str(error).removeprefix(f"target {name} is not available: ")
        return wrapped(f"{name}  not available: {reason}", "  ")
    except Exception as error:  # a third party's target must not take the list with it
        return wrapped(f"{name}  not available: {type(error).__name__}: {error}", "  ")
    lines = wrapped(f"{name}  available  {library}", "  ")
    modelled = [family for family in target.families if family not in ENGINE_ONLY]
    width = max(map(len, modelled), default=0)
    for family in modelled:
        lines += wrapped(f"  {family:<{width}}  {_abilities(target, family)}", " " * (width + 4))
    others = [family for family in target.families if family in ENGINE_ONLY]
    return lines + (wrapped(f"  with --oracle engine also {', '.join(others)}", "    ") if others else [])


def _abilities(target: Target, family: str) -> str:
    try:
        return abilities_text(_capabilities(target, family, 0), _capabilities(target, family, 1))
    except (UnavailableError, UsageError) as error:
        return f"not available: {error}"
    except Exception as error:
        return f"cannot be opened: {type(error).__name__}: {error}"


def _capabilities(target: Target, family: str, unified: int) -> Capabilities:
    session = target.open(Model(family), CacheConfiguration(unified=unified))
    try:
        return session.capabilities
    finally:
        session.close()


def abilities_text(capabilities: Capabilities, unified: Capabilities | None = None) -> str:
    """What a session can do, on one line; `unified`: what it declares with unified=1, where that may be more or less."""
    other = capabilities if unified is None else unified
    notes = {(True, True): "", (True, False): " with unified=0", (False, True): " with unified=1"}
    words = [
        word.replace("_", " ") + notes[able]
        for word in _WORDS
        if (able := (bool(getattr(capabilities, word)), bool(getattr(other, word)))) in notes
    ]
    guarantee = f"rollback guarantee {capabilities.guarantee}" + (f" ({capabilities.n_rs_seq} snapshots)" if capabilities.n_rs_seq else "")
    return f"{guarantee}; " + (", ".join(words) if words else "no optional operation")


def families_text() -> str:
    """Every family: its title, its dimensions with their defaults, its parameters, its layers and the widths of its state rows."""
    modelled = [_family_lines(family) for family in FAMILIES.values()]
    return "\n".join("\n".join(lines) for lines in [*modelled, *map(_engine_only_lines, ENGINE_ONLY.values())]) + "\n"


def _engine_only_lines(family: Family) -> list[str]:
    rows = [
        ["  dimensions", " ".join(f"{name}={value}" for name, value in family.defaults.items())],
        ["  judged", "by the engine only (--oracle engine)"],
    ]
    lines = wrapped(f"{family.name}  {family.title.split(': ', 1)[-1]}", "  ")
    return lines + [line for row in aligned(rows, numbers_from=2) for line in wrapped(row, " " * 14)]


def _family_lines(family: Family) -> list[str]:
    dimensions = family.defaults
    parameters = sum(tensor.size for tensor in family.tensors(dimensions))
    widths = family.row_widths(dimensions)
    recurrent, attention, window = (
        family.recurrent_layers(dimensions),
        family.attention_layers(dimensions),
        family.attention_window(dimensions),
    )
    embedding = f"; in one layer {widths.embedding:,} more of n-gram embeddings" if widths.embedding else ""
    rows = [
        ["  dimensions", " ".join(f"{name}={value}" for name, value in dimensions.items())],
        ["  parameters", f"{parameters:,}"],
        ["  layers", f"{len(recurrent)} recurrent, {len(attention)} attention" + (f" with a window of {window} tokens" if window else "")],
        ["  state rows", f"convolution {widths.convolution:,}, recurrent {widths.recurrent:,} elements a layer and sequence" + embedding],
    ]
    lines = wrapped(f"{family.name}  {family.title.split(': ', 1)[-1]}", "  ")
    for line in aligned(rows, numbers_from=2):
        lines += wrapped(line, " " * 14)
    return lines
