"""What is known by its file: commands, formulas, adapters of tools and passes are found in their folders, not listed.

Names are read from the folder, without importing anything: a module is imported when it is used.
What other packages add, and what ``htp_export_plugins`` does, is found by entry points.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable, Collection
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from htp_export.errors import InputError

__all__ = [
    "capability_modules",
    "exported_in",
    "imported_for_types",
    "imported_when_used",
    "names_in",
    "plug_in",
    "plug_ins",
    "provider",
    "providers",
]


def names_in(package: str, suffix: str = "") -> list[str]:
    """The modules of a package by name, in alphabetical order; of those that end in a suffix, without it.

    Examples:
        >>> "products" in names_in("htp_export.costs.formulas")
        True
    """
    names = [file.stem for file in _folder(package).glob(f"[!_]*{suffix}.py")]
    return sorted(name.removesuffix(suffix) for name in names if name != suffix)


def capability_modules(suffix: str) -> dict[str, str]:
    """Files of capabilities whose names end alike: the rest of the name → the module. Nothing is imported.

    What lies in a folder ``commands`` of a capability has the name of the capability and a space
    before its own.

    Examples:
        >>> capability_modules("_command")["carry"]
        'htp_export.capabilities.carry.carry_command'
        >>> capability_modules("_command")["lora fuse"]
        'htp_export.capabilities.lora.commands.fuse_command'
    """
    folder = Path(__file__).parent / "capabilities"
    found: dict[str, str] = {}
    for file in sorted((*folder.glob(f"*/*{suffix}.py"), *folder.glob(f"*/commands/*{suffix}.py"))):
        capability, *below = file.relative_to(folder).with_suffix("").parts
        name = " ".join((*(capability for _ in below[1:]), file.stem.removesuffix(suffix)))
        found[name] = ".".join(("htp_export.capabilities", capability, *below))
    return found


def provider(name: str) -> ModuleType:
    """The module ``provides_NAME.py`` of whichever capability has it: what the core needs of one.

    Raises:
        InputError: If no capability provides it, or it cannot be imported.
    """
    found = providers(name)
    if not found:
        raise InputError(f"no capability of this installation provides {name.replace('_', ' ')}")
    return found[0]


def providers(name: str) -> list[ModuleType]:
    """The modules ``provides_NAME.py`` of all capabilities that have one: what has to be told when something happens.

    Raises:
        InputError: If one cannot be imported.

    Examples:
        >>> [module.__name__.split(".")[-2] for module in providers("files_beside")]
        ['huggingface']
    """
    folder = Path(__file__).parent / "capabilities"
    found: list[ModuleType] = []
    for file in sorted(folder.glob(f"*/provides_{name}.py")):
        home = f"htp_export.capabilities.{file.parent.name}.{file.stem}"
        try:
            found.append(importlib.import_module(home))
        except ImportError as error:
            raise InputError(
                f"{home} provides {name.replace('_', ' ')}, and cannot be imported: {error}"
            ) from error
    return found


def plug_ins(capability: str) -> dict[str, EntryPoint]:
    """What installed packages add to a capability: the entry points of the group ``htp_export.CAPABILITY`` by name."""
    return {entry.name: entry for entry in entry_points(group=f"htp_export.{capability}")}


def plug_in(capability: str, name: str) -> Any:
    """What an installed package adds to a capability under the name of an entry point, imported.

    Raises:
        InputError: If there is none, or if it cannot be imported; the message says what is
            installed.
    """
    known = plug_ins(capability)
    if name not in known:
        there = f"there are: {', '.join(sorted(known))}" if known else "none is installed"
        raise InputError(f"{capability}: no plug-in {name!r}; {there}")
    try:
        return known[name].load()
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"{capability}: the plug-in {name!r} ({known[name].value}) cannot be loaded: {error}"
        ) from error


def exported_in(package: str) -> dict[str, str]:
    """What the modules of a package have in ``__all__``, in alphabetical order, each with the name of its module.

    Examples:
        >>> exported_in("htp_export.capabilities.carry.adapters")["onnxslim"]
        'optimizers'
    """
    found: dict[str, str] = {}
    for file in sorted(_folder(package).glob("[!_]*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found.update(dict.fromkeys(ast.literal_eval(node.value), file.stem))
    return dict(sorted(found.items()))


def imported_when_used(
    module: str, file: str, modules: Collection[str] = ()
) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose names are imported when they are first used.

    Importing torch takes seconds, and reading a file does not need it. The names are those that the
    package imports for type checkers alone, so that each stands once. ``modules`` of the package
    are imported when they are used, too.

    Examples:
        >>> imported_when_used("htp_export.results", str(Path(__file__).parent / "results.py"))("Profile")
        <class 'htp_export.capabilities.profile.latency_results.Profile'>
    """

    def found(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{module}.{name}")
        homes = imported_for_types(file)
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return found


@functools.cache
def imported_for_types(file: str) -> dict[str, str]:
    """What a file imports for type checkers alone: name → module."""
    blocks = [
        node
        for node in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If)
    ]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def _folder(package: str) -> Path:
    return Path(__file__).parent.joinpath(*package.split(".")[1:])
