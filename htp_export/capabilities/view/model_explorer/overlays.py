"""Overlays: numbers of nodes, in the node data of Model Explorer, for files, and with the graph inside a page."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Sequence
from typing import Any

from htp_export.capabilities.view.inventory import Inventory
from htp_export.capabilities.view.measures import Measure, spread
from htp_export.capabilities.view.model_explorer.graphs import GRAPH_ID, graph_of, layers_of, node_ids
from htp_export.format import tags
from htp_export.results.tables import drawn_parents

_LAYER = "___group___"  # what Model Explorer puts after a namespace to name the layer
_COLOURS = ("#ffffff", "#ffe9a8", "#f9a35c", "#d7301f")  # from nothing to the most
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int8", "uint8", "bool")
"""In the order of their colours, which are the same in every file."""


def overlay_of(measure: Measure, inventory: Inventory) -> dict[str, Any]:
    """A measure as node data, coloured from the smallest to the largest value.

    Errors, which span many powers of ten, are coloured by these.
    """
    if measure.named:
        of_nodes = (
            next((measure.words[owner] for owner in node.owners if owner in measure.words), None)
            for node in inventory.nodes
        )
        return _words_overlay(measure.title, of_nodes, measure.words.values(), inventory)
    results: dict[str, dict[str, Any]] = {}
    values = spread(measure, inventory)
    finite = [abs(value) for value in values if value is not None and math.isfinite(value)]
    most = max(finite, default=0.0)
    for name, value in zip(node_ids(inventory), values, strict=True):
        if value is not None:
            shown = _shown(value) if math.isfinite(value) else str(value)
            results[name] = {"value": shown, "bgColor": _colour(value, most, measure.additive)}
    title = f"{measure.title} ({measure.unit})" if measure.unit else measure.title
    overlay: dict[str, Any] = {"name": title, "results": results}
    if not measure.additive:
        overlay["hideAggregatedStats"] = ["sum", "avg"]
    return overlay


def dtype_overlay(inventory: Inventory) -> dict[str, Any]:
    """The element type of what each node makes."""
    dtypes = [node.outputs[0].type.partition("[")[0] if node.outputs else "" for node in inventory.nodes]
    return _words_overlay("dtype", dtypes, _DTYPES, inventory)


def _words_overlay(
    name: str, words: Iterable[str | None], first: Iterable[str], inventory: Inventory
) -> dict[str, Any]:
    """The word of each node, with a colour for each word; words have no sum and no mean."""
    listed = list(words)
    colours = {word: _hue(place) for place, word in enumerate(dict.fromkeys((*first, *filter(None, listed))))}
    results = {
        identifier: {"value": word, "bgColor": colours[word]}
        for identifier, word in zip(node_ids(inventory), listed, strict=True)
        if word
    }
    return {"name": name, "results": results, "hideInAggregatedStatsTable": True, "hideInChildrenStatsTable": True}


def drawing(inventory: Inventory, measures: Sequence[Measure]) -> dict[str, Any]:
    """What ``page/assets/explorer.js`` reads: the answers to Model Explorer's application, and where modules are in it.

    Overlays are the element types, and each measure of the first rank. The viewer shows the last one at first, which
    is that of the first measure.
    """
    overlays = [overlay_of(measure, inventory) for measure in reversed(measures) if measure.main]
    spaces = tags.namespaces(drawn_parents(inventory.modules), inventory.called)
    return {
        "graphs": {"graphs": [graph_of(inventory, measures, keep_layers=False)]},
        "overlays": [
            {"name": overlay["name"], "data": {GRAPH_ID: overlay}}
            for overlay in (dtype_overlay(inventory), *overlays)
            if overlay["results"]
        ],
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


def _shown(value: float) -> float:
    """Counts as they are, measured numbers to six digits."""
    return value if value.is_integer() else float(f"{value:.6g}")


def _colour(value: float, most: float, additive: bool) -> str:
    if not math.isfinite(value):
        return _COLOURS[-1]
    if not value or not most:
        return _COLOURS[0]
    part = abs(value) / most if additive else max(0.0, 1 + math.log10(abs(value) / most) / 6)
    position = min(max(part, 0.0), 1.0) * (len(_COLOURS) - 1)
    low = min(int(position), len(_COLOURS) - 2)
    return _mixed(_COLOURS[low], _COLOURS[low + 1], position - low)


def _hue(place: int) -> str:
    """Light colours a golden angle apart, as the page has them for classes."""
    channels = colorsys.hls_to_rgb((210 + place * 137.5) % 360 / 360, 0.86, 0.52)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def _mixed(low: str, high: str, part: float) -> str:
    channels = ((int(low[k : k + 2], 16), int(high[k : k + 2], 16)) for k in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in channels)
