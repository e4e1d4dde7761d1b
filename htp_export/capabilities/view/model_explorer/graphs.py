"""A model as Model Explorer's graph, and what other viewers show beside a file: its overlays, Netron's sidecar.

Modules are layers: the namespaces of nodes. See ``graph_builder.py`` of ``ai-edge-model-explorer``
for the fields.
"""

from __future__ import annotations

import colorsys
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from htp_export.capabilities.view.inventory import Inventory, ModuleEntry, NodeEntry
from htp_export.capabilities.view.measures import Measure, spread
from htp_export.reporting.columns import number_text
from htp_export.reporting.tables import drawn_parents
from htp_export.reporting.tag_facts import evidence_of

GRAPH_ID = "model"
_KEEPER = "htp.layer"
"""Label of the nodes that are not drawn, which keep Model Explorer from dissolving layers of one node."""


def graph_of(
    inventory: Inventory, measures: Sequence[Measure] = (), keep_layers: bool = True
) -> dict[str, Any]:
    """The graph, with the measures among the attributes of its layers.

    With ``keep_layers``, it has nodes that are not drawn, so that layers that hold a single node
    stay layers whatever the viewer's settings say.
    """
    names, layers = node_ids(inventory), layers_of(inventory)
    nodes = [
        _node(node, names[position], layers[position], names)
        for position, node in enumerate(inventory.nodes)
    ]
    ends = _ends(inventory, nodes)
    drawn = {
        path: module
        for path, module in inventory.modules.items()
        if path and (module.nodes or module.calls)
    }
    kept = [layer for layer in dict.fromkeys(layers) if layer and keep_layers]
    return {
        "id": GRAPH_ID,
        "nodes": [*nodes, *ends, *(_plain(f"{_KEEPER} {layer}", _KEEPER, layer) for layer in kept)],
        "groupNodeAttributes": {"": _facts(inventory)}
        | {inventory.spaces[path]: _attributes(module, measures) for path, module in drawn.items()},
        "nodeLabelsToHide": [_KEEPER],
    }


def node_ids(inventory: Inventory) -> list[str]:
    """What each node is called in the graph: its name, and its place too where it has none or another has the same."""
    times = Counter(node.name for node in inventory.nodes)
    return [
        node.name
        if node.name and times[node.name] == 1
        else f"{node.name or node.operator}#{position}"
        for position, node in enumerate(inventory.nodes)
    ]


def layers_of(inventory: Inventory) -> list[str]:
    """The layer that each node lies in: that of its owner, or the deepest one above all its owners."""
    return [inventory.spaces[node.module] for node in inventory.nodes]


def _node(node: NodeEntry, identifier: str, layer: str, names: Sequence[str]) -> dict[str, Any]:
    facts = {
        "name": node.name,
        "module": node.module or "(root)",
        "owners": ", ".join(owner or "(root)" for owner in node.owners)
        if len(node.owners) > 1
        else "",
        "known by": node.reason,
        "call": node.call,
        "source": _end(f"{node.source.file}:{node.source.line}") if node.source else "",
        "code": node.source.code if node.source else "",
        **node.attributes,
    }
    drawn = _plain(identifier, node.operator, layer)
    drawn["attrs"] = _attributes_of(facts)
    drawn["incomingEdges"] = [
        _edge(names[link.node], link.output, place)
        for place, link in enumerate(node.inputs)
        if link.node is not None
    ]
    drawn["inputsMetadata"] = [
        {"id": str(place), "attrs": _attributes_of({"__tensor_tag": link.tensor})}
        for place, link in enumerate(node.inputs)
        if link.tensor
    ]
    drawn["outputsMetadata"] = [
        {
            "id": str(place),
            "attrs": _attributes_of({"__tensor_tag": out.name, "tensor_shape": out.type or "?"}),
        }
        for place, out in enumerate(node.outputs)
    ]
    return drawn


def _ends(inventory: Inventory, nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The model's inputs and outputs; the nodes that read an input get their edges."""
    ends = []
    made_by = {tensor.name: (f"[value] {tensor.name}", 0) for tensor in inventory.inputs}
    for tensor in inventory.inputs:
        end = _plain(made_by[tensor.name][0], f"Input: {tensor.name}", "")
        end["attrs"] = _attributes_of({"name": tensor.name})
        end["outputsMetadata"] = [
            {"id": "0", "attrs": _attributes_of({"tensor_shape": tensor.type or "?"})}
        ]
        ends.append(end)
    for entry, drawn in zip(inventory.nodes, nodes, strict=True):
        drawn["incomingEdges"] += [
            _edge(*made_by[link.tensor], place)
            for place, link in enumerate(entry.inputs)
            if link.node is None and link.tensor in made_by
        ]
    for entry, drawn in zip(inventory.nodes, nodes, strict=True):
        made_by |= {out.name: (drawn["id"], place) for place, out in enumerate(entry.outputs)}
    for tensor in inventory.outputs:
        end = _plain(f"[output] {tensor.name}", f"Output: {tensor.name}", "")
        end["attrs"] = _attributes_of({"name": tensor.name})
        end["incomingEdges"] = [_edge(*made_by[tensor.name], 0)] if tensor.name in made_by else []
        ends.append(end)
    return ends


def _edge(source: str, output: int, place: int) -> dict[str, str]:
    return {
        "sourceNodeId": source,
        "sourceNodeOutputId": str(output),
        "targetNodeInputId": str(place),
    }


def _attributes_of(facts: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in facts.items() if value]


def _plain(identifier: str, label: str, namespace: str) -> dict[str, Any]:
    lists: dict[str, Any] = {
        name: [] for name in ("attrs", "incomingEdges", "inputsMetadata", "outputsMetadata")
    }
    return {"id": identifier, "label": label, "namespace": namespace, **lists}


def _facts(inventory: Inventory) -> dict[str, str]:
    ends = len(inventory.inputs) + len(inventory.outputs)
    facts = {
        "model": inventory.name,
        "class": inventory.modules[""].class_name,
        "nodes": f"{len(inventory.nodes)}, and {ends} inputs and outputs",
        "modules": f"{len(drawn_parents(inventory.modules))}; those with nodes are layers, and so are containers",
        "parameters": number_text(inventory.modules[""].parameters),
        "weights": number_text(inventory.modules[""].weight_bytes, "B"),
        "producer": inventory.producer,
        "module tags": str(inventory.tags),
    }
    return {key: value for key, value in facts.items() if value}


def _attributes(module: ModuleEntry, measures: Sequence[Measure]) -> dict[str, str]:
    facts = {
        "module": module.path,
        "class": module.class_name,
        "fate": module.fate,
        "merged with": ", ".join(module.fused_with),
        "tied": ", ".join(f"{name} is {first}" for name, first in module.tied.items()),
        "calls": str(module.calls) if module.calls > 1 else "",
        "parameters": number_text(module.parameters) if module.parameters else "",
        "weights": number_text(module.weight_bytes, "B") if module.weight_bytes else "",
        "operators": ", ".join(
            f"{operator} {count}" for operator, count in module.operators.items()
        ),
        "owners known from": ", ".join(map(str, evidence_of(module.reasons))),
        "inputs": ", ".join(f"{tensor.name} {tensor.type}" for tensor in module.inputs),
        "outputs": ", ".join(f"{tensor.name} {tensor.type}" for tensor in module.outputs),
        "source": _end(module.source),
    }
    for measure in measures:
        value = measure.total.get(module.path)
        if value is not None:
            facts[measure.title] = number_text(value, measure.unit)
        if module.path in measure.words:
            facts[measure.title if measure.named else f"{measure.title}, in words"] = measure.words[
                module.path
            ]
    return {key: value for key, value in facts.items() if value}


def _end(source: str) -> str:
    """The end of a path, which says enough: the file and the folder that it is in."""
    return "/".join(source.replace("\\", "/").split("/")[-2:])


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
    dtypes = [
        node.outputs[0].type.partition("[")[0] if node.outputs else "" for node in inventory.nodes
    ]
    return _words_overlay("dtype", dtypes, _DTYPES, inventory)


def _words_overlay(
    name: str, words: Iterable[str | None], first: Iterable[str], inventory: Inventory
) -> dict[str, Any]:
    """The word of each node, with a colour for each word; words have no sum and no mean."""
    listed = list(words)
    colours = {
        word: _hue(place)
        for place, word in enumerate(dict.fromkeys((*first, *filter(None, listed))))
    }
    results = {
        identifier: {"value": word, "bgColor": colours[word]}
        for identifier, word in zip(node_ids(inventory), listed, strict=True)
        if word
    }
    return {
        "name": name,
        "results": results,
        "hideInAggregatedStatsTable": True,
        "hideInChildrenStatsTable": True,
    }


def drawing(inventory: Inventory, measures: Sequence[Measure]) -> dict[str, Any]:
    """What ``page/assets/explorer.js`` reads: answers to Model Explorer's application, and where modules are in it.

    The viewer shows the last overlay at first, which is that of the first measure.
    """
    overlays = [overlay_of(measure, inventory) for measure in reversed(measures) if measure.main]
    spaces = {path: inventory.spaces[path] for path in drawn_parents(inventory.modules)}
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
        # Namespaces alone: the script lists the layers around each, which for deep models are too
        # long to write down.
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


def netron_attachment(inventory: Inventory, measures: Sequence[Measure] = ()) -> dict[str, Any]:
    """The sidecar of a model; the metrics of a node are the measures, with the numbers of its module beside them."""
    times = Counter(node.name for node in inventory.nodes)
    named = [
        (position, node)
        for position, node in enumerate(inventory.nodes)
        if node.name and times[node.name] == 1 and "\n" not in node.name
    ]
    metadata, metrics = [], []
    for _, node in named:
        owner = inventory.modules.get(node.owners[0]) if len(node.owners) == 1 else None
        facts = {
            "module": (node.module or "(root)") if node.owners else "",
            "class": owner.simple_class if owner else "",
            "owners": ", ".join(path or "(root)" for path in node.owners)
            if len(node.owners) > 1
            else "",
            "call": node.call,
            "source": f"{node.source.file.rpartition('/')[2]}:{node.source.line}"
            if node.source
            else "",
        }
        facts |= {
            measure.title: measure.words.get(node.module, "")
            for measure in measures
            if measure.named
        }
        metadata += [
            _entry("node", node.name, name, value) for name, value in facts.items() if value
        ]
    for measure in measures:
        values = spread(measure, inventory)
        for position, node in named:
            value = values[position]
            if value is not None:
                metrics.append(
                    _entry("node", node.name, measure.title, number_text(value, measure.unit))
                )
            total = measure.total.get(node.module)
            if total is not None and measure.additive and math.isfinite(total):
                text = number_text(total, measure.unit)
                metrics.append(_entry("node", node.name, f"{measure.title} of the module", text))
        model_total = measure.total.get("")
        if model_total is not None:
            metrics.append(
                _entry("model", "", measure.title, number_text(model_total, measure.unit))
            )
    return {"signature": "netron:attachment", "metadata": metadata, "metrics": metrics}


def _entry(kind: str, target: str, name: str, value: str) -> dict[str, str]:
    return {"kind": kind, "target": target, "name": name, "value": value}
