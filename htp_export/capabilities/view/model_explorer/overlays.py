"""Overlays: numbers of nodes, in the node data of Model Explorer, for files, and with the graph inside a page."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Mapping, Sequence
from typing import Any

from htp_export.capabilities.view.inventory import Inventory
from htp_export.capabilities.view.measures import Measure, spread
from htp_export.capabilities.view.model_explorer.graphs import GRAPH_ID, graph_of, layers_of, node_ids
from htp_export.format import tags
from htp_export.results.drawn_levels import drawn_parents

__all__ = ["drawing", "dtype_overlay", "overlay_of"]

_LAYER = "___group___"  # what Model Explorer puts after a namespace to name the layer
_COLOURS = ("#ffffff", "#ffe9a8", "#f9a35c", "#d7301f")  # from nothing to the most
_DTYPES = {
    "float32": "#cfe3fb",
    "float16": "#bfe8cf",
    "bfloat16": "#d3eebc",
    "float64": "#a9b8f0",
    "int64": "#eadcf8",
    "int32": "#e3d3ee",
    "int8": "#ffd9a8",
    "uint8": "#ffe6b8",
    "bool": "#e4e6ea",
}


def overlay_of(measure: Measure, inventory: Inventory) -> dict[str, Any]:
    """A measure as node data, coloured from the smallest to the largest value.

    Errors, which span many powers of ten, are coloured by these.

    Examples:
        >>> from htp_export.capabilities.view.inventory import take_inventory
        >>> from htp_export.model.tagged import load
        >>> import onnx_ir as ir
        >>> tagged = {"htp.module": "act", "htp.reason": "scope"}
        >>> relu = ir.node("Relu", [ir.val("x")], metadata_props=tagged, name="relu")
        >>> graph = ir.Graph(relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20}, name="Net")
        >>> time = Measure("total_ms", "time", "ms", additive=True, total={"act": 2.0}, own={"act": 2.0})
        >>> overlay_of(time, take_inventory(load(ir.Model(graph, ir_version=10))))["results"]["relu"]["value"]
        2.0
    """
    if measure.named:
        return _named_overlay(measure, inventory)
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


def _named_overlay(measure: Measure, inventory: Inventory) -> dict[str, Any]:
    """The word of the module of each node, with a colour for each word."""
    colours = {word: _hue(place) for place, word in enumerate(dict.fromkeys(measure.words.values()))}
    results = {}
    for name, node in zip(node_ids(inventory), inventory.nodes, strict=True):
        word = next((measure.words[owner] for owner in node.owners if owner in measure.words), None)
        if word is not None:
            results[name] = {"value": word, "bgColor": colours[word]}
    return _words_alone(measure.title, results)


def _words_alone(name: str, results: Mapping[str, object]) -> dict[str, Any]:
    """An overlay of words, which have no sum and no mean."""
    return {"name": name, "results": results, "hideInAggregatedStatsTable": True, "hideInChildrenStatsTable": True}


def dtype_overlay(inventory: Inventory) -> dict[str, Any]:
    """The element type of what each node makes."""
    results = {}
    for name, node in zip(node_ids(inventory), inventory.nodes, strict=True):
        dtype = node.outputs[0].type.partition("[")[0] if node.outputs else ""
        if dtype:
            results[name] = {"value": dtype, "bgColor": _DTYPES.get(dtype, "#f4d6e4")}
    return _words_alone("dtype", results)


def drawing(inventory: Inventory, measures: Sequence[Measure]) -> dict[str, Any]:
    """What ``page/assets/graph.js`` reads: the answers to Model Explorer's application, and where modules are in it.

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
