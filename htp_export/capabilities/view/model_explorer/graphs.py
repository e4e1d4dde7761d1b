"""A model as Model Explorer's graph, and sidecars of viewers: overlays, Netron's metadata.

Modules are layers: the namespaces of nodes. ``graph_builder.py`` of ``ai-edge-model-explorer``
documents the fields.
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
"""Label of hidden nodes, which keep Model Explorer from dissolving layers with a single node."""


def graph_of(
    inventory: Inventory, measures: Sequence[Measure] = (), keep_layers: bool = True
) -> dict[str, Any]:
    """The graph, with the measures as attributes of its layers.

    With ``keep_layers``, hidden nodes keep layers with a single node, independent of the viewer's
    settings.
    """
    names = node_ids(inventory)
    layers = layers_of(inventory)
    nodes = [
        _node(node, names[position], layers[position], names)
        for position, node in enumerate(inventory.nodes)
    ]
    ends = _ends(inventory, nodes)
    attributes = {"": _facts(inventory)}
    for path, module in inventory.modules.items():
        if path and (module.nodes or module.calls):
            attributes[inventory.spaces[path]] = _attributes(module, measures)
    kept = [layer for layer in dict.fromkeys(layers) if layer and keep_layers]
    keepers = [_plain(f"{_KEEPER} {layer}", _KEEPER, layer) for layer in kept]
    return {
        "id": GRAPH_ID,
        "nodes": [*nodes, *ends, *keepers],
        "groupNodeAttributes": attributes,
        "nodeLabelsToHide": [_KEEPER],
    }


def node_ids(inventory: Inventory) -> list[str]:
    """The identifiers of nodes: their names; with their positions if absent or not unique."""
    times = Counter(node.name for node in inventory.nodes)
    identifiers = []
    for position, node in enumerate(inventory.nodes):
        if node.name and times[node.name] == 1:
            identifiers.append(node.name)
        else:
            identifiers.append(f"{node.name or node.operator}#{position}")
    return identifiers


def layers_of(inventory: Inventory) -> list[str]:
    """The layer of each node: that of its owner, or of its owners' common ancestor."""
    return [inventory.spaces[node.module] for node in inventory.nodes]


def _node(node: NodeEntry, identifier: str, layer: str, names: Sequence[str]) -> dict[str, Any]:
    """A node in Model Explorer's format."""
    facts = {
        "name": node.name,
        "module": node.module or "(root)",
        "owners": _several_owners(node),
        "known by": node.reason,
        "call": node.call,
        "source": _end(f"{node.source.file}:{node.source.line}") if node.source else "",
        "code": node.source.code if node.source else "",
        **node.attributes,
    }
    drawn = _plain(identifier, node.operator, layer)
    drawn["attrs"] = _attributes_of(facts)
    drawn["incomingEdges"] = [
        _edge(names[link.node], link.output, index)
        for index, link in enumerate(node.inputs)
        if link.node is not None
    ]
    drawn["inputsMetadata"] = [
        {"id": str(index), "attrs": _attributes_of({"__tensor_tag": link.tensor})}
        for index, link in enumerate(node.inputs)
        if link.tensor
    ]
    for index, out in enumerate(node.outputs):
        attrs = _attributes_of({"__tensor_tag": out.name, "tensor_shape": out.type or "?"})
        drawn["outputsMetadata"].append({"id": str(index), "attrs": attrs})
    return drawn


def _several_owners(node: NodeEntry) -> str:
    """The owners of a node as text, if there are several."""
    if len(node.owners) < 2:
        return ""
    return ", ".join(owner or "(root)" for owner in node.owners)


def _ends(inventory: Inventory, nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The model's inputs and outputs as nodes; adds the edges from inputs to their consumers."""
    ends = []
    producers = {tensor.name: (f"[value] {tensor.name}", 0) for tensor in inventory.inputs}
    for tensor in inventory.inputs:
        end = _plain(producers[tensor.name][0], f"Input: {tensor.name}", "")
        end["attrs"] = _attributes_of({"name": tensor.name})
        end["outputsMetadata"] = [
            {"id": "0", "attrs": _attributes_of({"tensor_shape": tensor.type or "?"})}
        ]
        ends.append(end)
    for entry, drawn in zip(inventory.nodes, nodes, strict=True):
        for index, link in enumerate(entry.inputs):
            if link.node is None and link.tensor in producers:
                drawn["incomingEdges"].append(_edge(*producers[link.tensor], index))
    for entry, drawn in zip(inventory.nodes, nodes, strict=True):
        for index, out in enumerate(entry.outputs):
            producers[out.name] = (drawn["id"], index)
    for tensor in inventory.outputs:
        end = _plain(f"[output] {tensor.name}", f"Output: {tensor.name}", "")
        end["attrs"] = _attributes_of({"name": tensor.name})
        end["incomingEdges"] = (
            [_edge(*producers[tensor.name], 0)] if tensor.name in producers else []
        )
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
    """A node with empty lists of edges and metadata."""
    lists: dict[str, Any] = {
        name: [] for name in ("attrs", "incomingEdges", "inputsMetadata", "outputsMetadata")
    }
    return {"id": identifier, "label": label, "namespace": namespace, **lists}


def _facts(inventory: Inventory) -> dict[str, str]:
    """Title → text of the attributes of the whole model."""
    ends = len(inventory.inputs) + len(inventory.outputs)
    facts = {
        "model": inventory.name,
        "class": inventory.modules[""].class_name,
        "nodes": f"{len(inventory.nodes)}, and {ends} inputs and outputs",
        "modules": f"{len(inventory.modules)}; those with nodes are layers",
        "parameters": number_text(inventory.modules[""].parameters),
        "weights": number_text(inventory.modules[""].weight_bytes, "B"),
        "producer": inventory.producer,
        "module tags": str(inventory.tags),
    }
    return {key: value for key, value in facts.items() if value}


def _attributes(module: ModuleEntry, measures: Sequence[Measure]) -> dict[str, str]:
    """Title → text of the attributes of a layer."""
    facts = {
        "module": module.path,
        "class": module.class_name,
        "fate": module.fate,
        "merged with": ", ".join(module.fused_with),
        "tied": ", ".join(f"{name} is {first}" for name, first in module.tied.items()),
        "calls": str(module.calls) if module.calls > 1 else "",
        "parameters": number_text(module.parameters) if module.parameters else "",
        "weights": number_text(module.weight_bytes, "B") if module.weight_bytes else "",
        "operators": ", ".join(f"{op} {count}" for op, count in module.operators.items()),
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
            title = measure.title if measure.named else f"{measure.title}, in words"
            facts[title] = measure.words[module.path]
    return {key: value for key, value in facts.items() if value}


def _end(source: str) -> str:
    """The end of a path: the file and its folder."""
    return "/".join(source.replace("\\", "/").split("/")[-2:])


_LAYER = "___group___"  # suffix by which Model Explorer names the layer of a namespace
_COLOURS = ("#ffffff", "#ffe9a8", "#f9a35c", "#d7301f")  # from zero to the largest value
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int8", "uint8", "bool")
"""Element types in the order of their colours, which are the same for every file."""


def overlay_of(measure: Measure, inventory: Inventory) -> dict[str, Any]:
    """A measure as node data, coloured from the smallest to the largest value.

    Errors span many powers of ten: their colours follow the logarithm.
    """
    if measure.named:
        words = [_word_of_owner(measure, node) for node in inventory.nodes]
        return _words_overlay(measure.title, words, measure.words.values(), inventory)
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
    """The element type of each node's first output."""
    dtypes = [_dtype(node) for node in inventory.nodes]
    return _words_overlay("dtype", dtypes, _DTYPES, inventory)


def _dtype(node: NodeEntry) -> str:
    if node.outputs:
        return node.outputs[0].type.partition("[")[0]
    return ""


def _word_of_owner(measure: Measure, node: NodeEntry) -> str | None:
    words = (measure.words[owner] for owner in node.owners if owner in measure.words)
    return next(words, None)


def _words_overlay(
    name: str, words: Iterable[str | None], first: Iterable[str], inventory: Inventory
) -> dict[str, Any]:
    """The word of each node, with a colour for each word. ``first`` words have the first colours.

    Words have no sum and no mean.
    """
    listed = list(words)
    distinct = dict.fromkeys((*first, *filter(None, listed)))
    colours = {word: _hue(index) for index, word in enumerate(distinct)}
    results = {}
    for identifier, word in zip(node_ids(inventory), listed, strict=True):
        if word:
            results[identifier] = {"value": word, "bgColor": colours[word]}
    return {
        "name": name,
        "results": results,
        "hideInAggregatedStatsTable": True,
        "hideInChildrenStatsTable": True,
    }


def drawing(inventory: Inventory, measures: Sequence[Measure]) -> dict[str, Any]:
    """The data of ``page/assets/explorer.js``: Model Explorer's input, and where modules are.

    The viewer first shows the last overlay, which is that of the first measure.
    """
    measured = [overlay_of(measure, inventory) for measure in reversed(measures) if measure.main]
    overlays = [
        {"name": overlay["name"], "data": {GRAPH_ID: overlay}}
        for overlay in (dtype_overlay(inventory), *measured)
        if overlay["results"]
    ]
    spaces = {path: inventory.spaces[path] for path in drawn_parents(inventory.modules)}
    return {
        "graphs": {"graphs": [graph_of(inventory, measures, keep_layers=False)]},
        "overlays": overlays,
        "label": "model",
        "collection": "model",
        "graph": GRAPH_ID,
        # Only the namespaces: the script lists the layers around each, which would be too long for
        # deep models.
        "layer": _LAYER,
        "places": {
            "modules": [space or None for space in spaces.values()],
            "nodes": list(zip(node_ids(inventory), layers_of(inventory), strict=True)),
        },
    }


def _shown(value: float) -> float:
    """A count as it is; a measured number with six digits."""
    return value if value.is_integer() else float(f"{value:.6g}")


def _colour(value: float, most: float, additive: bool) -> str:
    """The colour of a value, relative to the largest."""
    if not math.isfinite(value):
        return _COLOURS[-1]
    if not value or not most:
        return _COLOURS[0]
    if additive:
        part = abs(value) / most
    else:
        # Six powers of ten span the colours: errors below a millionth of the largest are white.
        part = max(0.0, 1 + math.log10(abs(value) / most) / 6)
    position = min(max(part, 0.0), 1.0) * (len(_COLOURS) - 1)
    low = min(int(position), len(_COLOURS) - 2)
    return _mixed(_COLOURS[low], _COLOURS[low + 1], position - low)


def _hue(place: int) -> str:
    """Light colours a golden angle apart, as the page has for classes."""
    channels = colorsys.hls_to_rgb((210 + place * 137.5) % 360 / 360, 0.86, 0.52)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def _mixed(low: str, high: str, part: float) -> str:
    channels = ((int(low[k : k + 2], 16), int(high[k : k + 2], 16)) for k in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in channels)


def netron_attachment(inventory: Inventory, measures: Sequence[Measure] = ()) -> dict[str, Any]:
    """The sidecar of a model: tags of nodes as metadata, and measures of nodes as metrics.

    A metric of a node is followed by that of its module.
    """
    times = Counter(node.name for node in inventory.nodes)
    named = [
        (position, node)
        for position, node in enumerate(inventory.nodes)
        if node.name and times[node.name] == 1 and "\n" not in node.name
    ]
    metadata, metrics = [], []
    for _, node in named:
        facts = _netron_facts(node, inventory, measures)
        metadata += [_entry("node", node.name, *fact) for fact in facts.items() if fact[1]]
    for measure in measures:
        values = spread(measure, inventory)
        for position, node in named:
            number = values[position]
            if number is not None:
                text = number_text(number, measure.unit)
                metrics.append(_entry("node", node.name, measure.title, text))
            total = measure.total.get(node.module)
            if total is not None and measure.additive and math.isfinite(total):
                text = number_text(total, measure.unit)
                metrics.append(_entry("node", node.name, f"{measure.title} of the module", text))
        model_total = measure.total.get("")
        if model_total is not None:
            text = number_text(model_total, measure.unit)
            metrics.append(_entry("model", "", measure.title, text))
    return {"signature": "netron:attachment", "metadata": metadata, "metrics": metrics}


def _netron_facts(
    node: NodeEntry, inventory: Inventory, measures: Sequence[Measure]
) -> dict[str, str]:
    """Title → text of the metadata of a node."""
    owner = inventory.modules.get(node.owners[0]) if len(node.owners) == 1 else None
    facts = {
        "module": (node.module or "(root)") if node.owners else "",
        "class": owner.simple_class if owner else "",
        "owners": _several_owners(node),
        "call": node.call,
        "source": "",
    }
    if node.source:
        facts["source"] = f"{node.source.file.rpartition('/')[2]}:{node.source.line}"
    for measure in measures:
        if measure.named:
            facts[measure.title] = measure.words.get(node.module, "")
    return facts


def _entry(kind: str, target: str, name: str, value: str) -> dict[str, str]:
    return {"kind": kind, "target": target, "name": name, "value": value}
