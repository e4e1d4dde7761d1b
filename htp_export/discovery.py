"""Discovery of commands, formulas, adapters of tools and passes by their files, without a list of them.

Names are those of files, and a module is imported only when it is used. Additions of other packages
and of ``htp_export_plugins`` are found by entry points.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable, Collection
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from htp_export.errors import InputError
from htp_export.process.restoring import no_collection

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
    """Return the names of the modules of a package with a suffix, without the suffix, in alphabetical order.

    Examples:
        >>> "products" in names_in("htp_export.costs.formulas")
        True
    """
    names = [file.stem for file in _folder(package).glob(f"[!_]*{suffix}.py")]
    return sorted(name.removesuffix(suffix) for name in names if name != suffix)


def capability_modules(suffix: str) -> dict[str, str]:
    """Return the files of capabilities with a suffix: name without the suffix → module. Nothing is imported.

    The name of a file in a folder ``commands`` of a capability begins with the name of the
    capability and a space.

    Examples:
        >>> capability_modules("_command")["carry"]
        'htp_export.capabilities.carry.carry_command'
        >>> capability_modules("_command")["lora fuse"]
        'htp_export.capabilities.lora.commands.fuse_command'
    """
    folder = Path(__file__).parent / "capabilities"
    modules: dict[str, str] = {}
    for file in sorted((*folder.glob(f"*/*{suffix}.py"), *folder.glob(f"*/commands/*{suffix}.py"))):
        capability, *below = file.relative_to(folder).with_suffix("").parts
        name = file.stem.removesuffix(suffix)
        if len(below) > 1:
            name = f"{capability} {name}"
        modules[name] = ".".join(("htp_export.capabilities", capability, *below))
    return modules


def provider(name: str) -> ModuleType:
    """Return the module ``provides_NAME.py`` of the first capability that has one: a function that the core needs.

    Raises:
        InputError: If no capability provides it, or if it cannot be imported.
    """
    modules = providers(name)
    if not modules:
        raise InputError(f"no capability of this installation provides {name.replace('_', ' ')}")
    return modules[0]


def providers(name: str) -> list[ModuleType]:
    """Return the modules ``provides_NAME.py`` of all capabilities that have one, such as listeners of an event.

    Raises:
        InputError: If one of them cannot be imported.

    Examples:
        >>> [module.__name__.split(".")[-2] for module in providers("files_beside")]
        ['huggingface']
    """
    folder = Path(__file__).parent / "capabilities"
    modules: list[ModuleType] = []
    for file in sorted(folder.glob(f"*/provides_{name}.py")):
        module_name = f"htp_export.capabilities.{file.parent.name}.{file.stem}"
        try:
            modules.append(importlib.import_module(module_name))
        except ImportError as error:
            raise InputError(
                f"{module_name} provides {name.replace('_', ' ')}, and cannot be imported: {error}"
            ) from error
    return modules


def plug_ins(capability: str) -> dict[str, EntryPoint]:
    """Return the plug-ins of a capability: the entry points of the group ``htp_export.CAPABILITY`` by name."""
    return {entry.name: entry for entry in entry_points(group=f"htp_export.{capability}")}


def plug_in(capability: str, name: str) -> Any:
    """Import and return the object of a plug-in, by the name of its entry point.

    Raises:
        InputError: If there is none, or if it cannot be imported; the message lists the installed
            plug-ins.
    """
    installed = plug_ins(capability)
    if name not in installed:
        names = f"there are: {', '.join(sorted(installed))}" if installed else "none is installed"
        raise InputError(f"{capability}: no plug-in {name!r}; {names}")
    try:
        return installed[name].load()
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"{capability}: the plug-in {name!r} ({installed[name].value}) cannot be loaded: {error}"
        ) from error


def exported_in(package: str) -> dict[str, str]:
    """Return the names in ``__all__`` of the modules of a package, in alphabetical order: name → module.

    Examples:
        >>> exported_in("htp_export.capabilities.carry.adapters")["onnxslim"]
        'optimizers'
    """
    modules: dict[str, str] = {}
    for file in sorted(_folder(package).glob("[!_]*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                modules.update(dict.fromkeys(ast.literal_eval(node.value), file.stem))
    return dict(sorted(modules.items()))


def imported_when_used(
    module: str, file: str, modules: Collection[str] = ()
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose names are imported when they are first used.

    Importing torch takes seconds, and reading a file does not need it. The names are those that the
    package imports under ``TYPE_CHECKING``, so that there is only one list of them. ``modules`` are
    modules of the package that are imported when they are used, too.

    Examples:
        >>> imported_when_used("htp_export.results", str(Path(__file__).parent / "results.py"))("Profile")
        <class 'htp_export.capabilities.profile.latency_results.Profile'>
    """

    def get_attribute(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{module}.{name}")
        module_of = imported_for_types(file)
        if name not in module_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        module_name = module_of[name]
        if module_name not in sys.modules:
            # Imported objects stay alive: a full collection during an import finds nothing, and
            # visits every object of torch.
            with no_collection(kept=True):
                importlib.import_module(module_name)
        return getattr(importlib.import_module(module_name), name)

    return get_attribute


@functools.cache
def imported_for_types(file: str) -> dict[str, str]:
    """Return the names that a file imports under ``TYPE_CHECKING``: name → module."""
    module_of: dict[str, str] = {}
    for block in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if not isinstance(block, ast.If):
            continue
        for node in block.body:
            if isinstance(node, ast.ImportFrom):
                module_of.update({alias.name: str(node.module) for alias in node.names})
    return module_of


def _folder(package: str) -> Path:
    return Path(__file__).parent.joinpath(*package.split(".")[1:])
