"""What is known by its file: commands, formulas, adapters of tools and passes are found in their folders, not listed.

Names are read from the folder, without importing anything: a module is imported when it is used.
"""

from __future__ import annotations

import importlib
import pkgutil

__all__ = ["names_in"]


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
