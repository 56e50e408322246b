"""Which targets there are, and how a word on the command line becomes one.

Rules
- A word is the name of an entry point in the group `statedrift.targets`, or `module:attribute`.
- What it names is a target, a class of sessions, or a function that opens them.
- statedrift's own entry points win over others of the same name.
- Nothing is loaded until it is asked for by name; what is loaded must have every member of the protocol.
- The current folder counts as importable for `module:attribute`, so that a target in development needs no installation.
"""

import importlib
import os
import sys
from importlib.metadata import EntryPoint, entry_points

from ..spec.errors import UnavailableError, UsageError
from ..spec.target import Target
from .plain import as_target

GROUP = "statedrift.targets"
PROTOCOL_MEMBERS = ("name", "isolated", "families", "poison", "undocumented", "version", "describe", "open")


def _entries() -> dict[str, EntryPoint]:
    """Name -> entry point; statedrift's own first."""
    found = sorted(entry_points(group=GROUP), key=lambda entry: not entry.value.startswith("statedrift."))
    entries: dict[str, EntryPoint] = {}
    for entry in found:
        entries.setdefault(entry.name, entry)
    return entries


def target_names() -> tuple[str, ...]:
    """Names of all installed targets: statedrift's own first, then others, each in alphabetical order."""
    entries = _entries()
    return tuple(sorted(entries, key=lambda name: (not entries[name].value.startswith("statedrift."), name)))


def load_target(name: str) -> Target:
    """The target that a word names: an entry point, or `module:attribute`.

    Raises UsageError when there is none, or when what is there is no target; UnavailableError when its module cannot be imported.
    """
    module_name, separator, attribute = name.partition(":")
    if separator:
        return _checked(name, _load_attribute(name, module_name, attribute))
    entry = _entries().get(name)
    if entry is None:
        raise UsageError(f"there is no target `{name}`; there are {', '.join(target_names()) or 'none'}, or write module:attribute")
    try:
        return _checked(name, entry.load())
    except ImportError as error:
        raise UnavailableError(f"target {name} is not available: {entry.value} cannot be imported: {error}") from error
    except AttributeError as error:
        raise UnavailableError(f"target {name} is not available: {entry.value} does not exist: {error}") from error


def _load_attribute(name: str, module_name: str, attribute: str) -> object:
    if not attribute or not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise UsageError(f"`{name}` names no target; write module:attribute, as in my_cache.target:TARGET")
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    try:
        value: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UsageError(f"target `{name}`: there is no module `{error.name}` here (the current folder was looked at, too)") from error
        raise UnavailableError(f"target {name} is not available: {module_name} cannot be imported: {error}") from error
    except ImportError as error:
        raise UnavailableError(f"target {name} is not available: {module_name} cannot be imported: {error}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise UsageError(f"target `{name}`: module `{module_name}` has no `{attribute}`")
        value = getattr(value, part)
    return value


def _checked(name: str, value: object) -> Target:
    if (target := as_target(value)) is not None:
        return target
    missing = [member for member in PROTOCOL_MEMBERS if not hasattr(value, member)]
    if isinstance(value, type) and not missing:
        raise UsageError(f"`{name}` is a class, not a target; name an instance of it")
    if missing:
        raise UsageError(f"`{name}` is no target: it has no {', '.join(missing)} (see docs/targets.md)")
    if not isinstance(value, Target):
        raise UsageError(f"`{name}` is no target: it does not follow the protocol in statedrift.spec.target")
    return value
