"""The graph of a page: what Model Explorer's application is answered, and where the page's modules are in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from htp_export.capabilities.view.inventory import Inventory
from htp_export.capabilities.view.measures import Measure
from htp_export.capabilities.view.model_explorer.graphs import GRAPH_ID, graph_of, layers_of, node_ids
from htp_export.capabilities.view.model_explorer.overlays import overlays_of
from htp_export.format import tags
from htp_export.results.drawn_levels import drawn_parents

__all__ = ["drawing"]

_LAYER = "___group___"  # what Model Explorer puts after a namespace to name the layer


def drawing(inventory: Inventory, measures: Sequence[Measure]) -> dict[str, Any]:
    """What ``page/assets/graph.js`` reads."""
    spaces = tags.namespaces(drawn_parents(inventory.modules), inventory.called)
    return {
        "graphs": {"graphs": [graph_of(inventory, measures, keep_layers=False)]},
        "overlays": overlays_of(inventory, measures),
        "label": "model",
        "collection": "model",
        "graph": GRAPH_ID,
        # Namespaces alone: the script lists the layers around each, which for deep models are too long to write down.
        "layer": _LAYER,
        "places": {
            "modules": [space or None for space in spaces.values()],
            "nodes": list(zip(node_ids(inventory), layers_of(inventory), strict=True)),
        },
    }
