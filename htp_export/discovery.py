"""What is known by its file: commands, formulas, adapters of tools and passes are found in their folders, not listed.

Names are read from the folder, without importing anything: a module is imported when it is used.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

__all__ = ["exported_in", "names_in"]


def names_in(package: str, suffix: str = "") -> list[str]:
    """The modules of a package by name, in alphabetical order.

    Args:
        package: The package.
        suffix: Only those whose names end like this, which is left out.

    Examples:
        >>> "products" in names_in("htp_export.costs.formulas")
        True
    """
    names = [module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    return sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix) and name != suffix)


def exported_in(package: str) -> dict[str, str]:
    """What the modules of a package have in ``__all__``, in alphabetical order, each with the name of its module.

    Args:
        package: The package.

    Examples:
        >>> exported_in("htp_export.provenance.adapters")["onnxslim"]
        'optimizers'
    """
    found: dict[str, str] = {}
    for folder in importlib.import_module(package).__path__:
        for file in sorted(Path(folder).glob("[!_]*.py")):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    found.update(dict.fromkeys(ast.literal_eval(node.value), file.stem))
    return dict(sorted(found.items()))
