"""A model as Model Explorer's graph, in the JSON that its application reads.

Modules are layers: the namespaces of nodes. See ``graph_builder.py`` of ``ai-edge-model-explorer`` for the fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from htp_export.capabilities.view.inventory import Inventory, ModuleEntry, NodeEntry
from htp_export.capabilities.view.measures import Measure
from htp_export.format import tags
from htp_export.results.columns import number_text
from htp_export.results.tables import drawn_parents
from htp_export.results.tag_facts import evidence_of

GRAPH_ID = "model"
_KEEPER = "htp.layer"
"""Label of the nodes that are not drawn, which keep Model Explorer from dissolving layers of one node."""


def graph_of(inventory: Inventory, measures: Sequence[Measure] = (), keep_layers: bool = True) -> dict[str, Any]:
    """The graph, with the measures among the attributes of its layers.

    With ``keep_layers``, it has nodes that are not drawn, so that layers that hold a single node stay layers whatever
    the viewer's settings say.
    """
    names, layers = node_ids(inventory), layers_of(inventory)
    nodes = [_node(node, names[position], layers[position], names) for position, node in enumerate(inventory.nodes)]
    ends = _ends(inventory, nodes)
    drawn = {path: module for path, module in inventory.modules.items() if path and (module.nodes or module.calls)}
    spaces = tags.namespaces(drawn, inventory.called)
    kept = [layer for layer in dict.fromkeys(layers) if layer and keep_layers]
    return {
        "id": GRAPH_ID,
        "nodes": [*nodes, *ends, *(_plain(f"{_KEEPER} {layer}", _KEEPER, layer) for layer in kept)],
        "groupNodeAttributes": {"": _facts(inventory)}
        | {spaces[path]: _attributes(module, measures) for path, module in drawn.items()},
        "nodeLabelsToHide": [_KEEPER],
    }


def node_ids(inventory: Inventory) -> list[str]:
    """What each node is called in the graph: its name, and its place too where it has none or another has the same."""
    times = Counter(node.name for node in inventory.nodes)
    return [
        node.name if node.name and times[node.name] == 1 else f"{node.name or node.operator}#{position}"
        for position, node in enumerate(inventory.nodes)
    ]


def layers_of(inventory: Inventory) -> list[str]:
    """The layer that each node lies in: that of its owner, or the deepest one above all its owners."""
    spaces = tags.namespaces({node.module for node in inventory.nodes}, inventory.called)
    return [spaces[node.module] for node in inventory.nodes]


def _node(node: NodeEntry, identifier: str, layer: str, names: Sequence[str]) -> dict[str, Any]:
    facts = {
        "name": node.name,
        "module": node.module or "(root)",
        "owners": ", ".join(owner or "(root)" for owner in node.owners) if len(node.owners) > 1 else "",
        "known by": node.reason,
        "call": node.call,
        "source": _end(f"{node.source.file}:{node.source.line}") if node.source else "",
        "code": node.source.code if node.source else "",
        **node.attributes,
    }
    drawn = _plain(identifier, node.operator, layer)
    drawn["attrs"] = [{"key": key, "value": value} for key, value in facts.items() if value]
    drawn["incomingEdges"] = [
        _edge(names[link.node], link.output, place) for place, link in enumerate(node.inputs) if link.node is not None
    ]
    drawn["inputsMetadata"] = [
        {"id": str(place), "attrs": [{"key": "__tensor_tag", "value": link.tensor}]}
        for place, link in enumerate(node.inputs)
        if link.tensor
    ]
    drawn["outputsMetadata"] = [
        {
            "id": str(place),
            "attrs": [{"key": "__tensor_tag", "value": out.name}, {"key": "tensor_shape", "value": out.type or "?"}],
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
        end["attrs"] = [{"key": "name", "value": tensor.name}]
        end["outputsMetadata"] = [{"id": "0", "attrs": [{"key": "tensor_shape", "value": tensor.type or "?"}]}]
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
        end["attrs"] = [{"key": "name", "value": tensor.name}]
        end["incomingEdges"] = [_edge(*made_by[tensor.name], 0)] if tensor.name in made_by else []
        ends.append(end)
    return ends


def _edge(source: str, output: int, place: int) -> dict[str, str]:
    return {"sourceNodeId": source, "sourceNodeOutputId": str(output), "targetNodeInputId": str(place)}


def _plain(identifier: str, label: str, namespace: str) -> dict[str, Any]:
    return {
        "id": identifier,
        "label": label,
        "namespace": namespace,
        "attrs": [],
        "incomingEdges": [],
        "inputsMetadata": [],
        "outputsMetadata": [],
    }


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
    """What the side panel says of a layer."""
    facts = {
        "module": module.path,
        "class": module.class_name,
        "fate": module.fate,
        "merged with": ", ".join(module.fused_with),
        "tied": ", ".join(f"{name} is {first}" for name, first in module.tied.items()),
        "calls": str(module.calls) if module.calls > 1 else "",
        "parameters": number_text(module.parameters) if module.parameters else "",
        "weights": number_text(module.weight_bytes, "B") if module.weight_bytes else "",
        "operators": ", ".join(f"{operator} {count}" for operator, count in module.operators.items()),
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
            facts[measure.title if measure.named else f"{measure.title}, in words"] = measure.words[module.path]
    return {key: value for key, value in facts.items() if value}


def _end(source: str) -> str:
    """The end of a path, which says enough: the file and the folder that it is in."""
    return "/".join(source.replace("\\", "/").split("/")[-2:])
