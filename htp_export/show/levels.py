"""Which modules are levels of a drawing, and which lies right below which."""

from __future__ import annotations

from htp_export.format import tags
from htp_export.show.inventory import Inventory

__all__ = ["parents"]


def parents(inventory: Inventory) -> dict[str, str | None]:
    """The modules that are levels, in order, each with the level above it; None for the root.

    A container, which holds what runs and never ran itself, is no level: its name stands before those of its children.
    """
    holding = tags.all_above(inventory.modules)
    levels = {
        path
        for path, module in inventory.modules.items()
        if not path or module.calls or not module.nodes or path not in holding
    }
    return {
        path: next((up for up in tags.ancestors(path) if up != path and up in levels), None)
        for path in inventory.modules
        if path in levels
    }
