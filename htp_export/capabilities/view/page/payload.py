"""What the page's scripts read: an inventory and its measures as JSON."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from htp_export.capabilities.view.inventory import Inventory, ModuleEntry
from htp_export.capabilities.view.measures import Measure, spread
from htp_export.capabilities.view.node_facts import NodeEntry, TensorEntry
from htp_export.capabilities.view.shown_graph import ShownGraph
from htp_export.capabilities.view.weight_statistics import WeightStatistics
from htp_export.drawing.command_words import in_both
from htp_export.drawing.folding import likeness, repeats
from htp_export.format import tags
from htp_export.format.fates import Fate
from htp_export.results.drawn_levels import drawn_parents
from htp_export.results.tag_facts import Evidence, TagFacts, evidence_of

__all__ = ["page_data", "tags_data"]


def page_data(graph: ShownGraph, missing_graph: str = "") -> dict[str, Any]:
    """The data of one graph of a page.

    Modules that hold others and never ran themselves are left out: their names stand before those of what they hold.

    Args:
        graph: The graph; its measures are columns besides those that every page has.
        missing_graph: Why there is no interactive graph in it; ``""`` where there is one.
    """
    inventory, measures = graph.inventory, graph.measures
    above = drawn_parents(inventory.modules)
    place = {path: position for position, path in enumerate(above)}
    modules = [inventory.modules[path] for path in above]
    return {
        "name": inventory.name,
        "facts": _facts(inventory),
        "tags": tags_data(inventory.tags),
        "advice": [in_both(text) for text in (inventory.tags.advice, *inventory.notes) if text],
        "failures": _failures(inventory),
        "inputs": _tensors(inventory.inputs),
        "outputs": _tensors(inventory.outputs),
        "count": len(inventory.modules),
        "fates": {fate: {"meaning": fate.meaning, "tone": fate.tone, "remark": fate.remark} for fate in Fate},
        "modules": [
            _module(module, None if (parent := above[module.path]) is None else place[parent]) for module in modules
        ],
        "nodes": [_node(node) for node in inventory.nodes],
        "types": {tensor.name: tensor.type for tensor in _given(inventory, modules) if tensor.type},
        "values": {tensor.name: tensor.value for tensor in inventory.constants if tensor.value},
        "statistics": {name: _statistics(statistics) for name, statistics in inventory.statistics.items()},
        "repeats": [[place[path] for path in run] for run in _repeats(above, inventory, measures)],
        "measures": [_measure(measure, list(above), inventory) for measure in measures],
        "missing_graph": in_both(missing_graph),
    }


def tags_data(facts: TagFacts) -> dict[str, Any]:
    """What a page says of the module tags of a file, in the words of the command line."""
    return {
        "source": facts.source,
        "headline": facts.headline,
        "untagged": facts.untagged,
        "evidence": _evidence(facts.evidence),
    }


def _evidence(evidence: Sequence[Evidence]) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(entry.text, entry.nodes, entry.reasons) for entry in evidence]


def _repeats(above: Mapping[str, str | None], inventory: Inventory, measures: Sequence[Measure]) -> list[list[str]]:
    """Alike siblings, as the tree in the terminal draws them once."""
    flops = next((measure.total for measure in measures if measure.key == "flops"), {})
    words = [measure.words for measure in measures if measure.words]

    def alike(path: str) -> Hashable:
        module = inventory.modules[path]
        text = "; ".join(texts.get(path, "") for texts in words)
        fate = module.failure or module.fate
        return likeness(module.class_name, module.calls, fate, module.nodes, module.parameters, flops.get(path), text)

    return repeats(above, alike)


def _failures(inventory: Inventory) -> list[str]:
    """What failed, without the modules that failed because of one below them."""
    failed = {path: module.failure for path, module in inventory.modules.items() if module.failure}
    holding = tags.all_above(failed)
    return [f"{path or '(root)'}: {in_both(failure)}" for path, failure in failed.items() if path not in holding][:5]


def _facts(inventory: Inventory) -> list[str]:
    opsets = ", ".join(f"{domain} {version}" for domain, version in inventory.opsets.items())
    facts = [
        inventory.producer,
        f"opset {opsets}" if opsets else "",
        "external data" if inventory.external_data else "",
    ]
    return [fact for fact in facts if fact]


def _given(inventory: Inventory, modules: Sequence[ModuleEntry]) -> list[TensorEntry]:
    """The tensors that no node makes."""
    weights = [tensor for module in modules for tensor in module.weights]
    return [*inventory.inputs, *inventory.constants, *weights]


def _statistics(statistics: WeightStatistics) -> dict[str, float]:
    numbers = {"mean": statistics.mean, "std": statistics.std, "least": statistics.least, "most": statistics.most}
    return {
        **{name: float(f"{value:.4g}") for name, value in numbers.items()},
        "elements": statistics.elements,
        "zeros": statistics.zeros,
        "not_finite": statistics.not_finite,
    }


def _module(module: ModuleEntry, parent: int | None) -> dict[str, Any]:
    return {
        "path": module.path,
        "class": module.class_name,
        "calls": module.calls,
        "fate": module.fate,
        "with": list(module.fused_with),
        "parent": parent,
        "nodes": module.nodes,
        "own": list(module.own_nodes),
        "shared": module.shared,
        "fused": module.fused,
        "parameters": module.parameters,
        "bytes": module.weight_bytes,
        "operators": dict(module.operators),
        "evidence": _evidence(evidence_of(module.reasons)),
        "weights": _tensors(module.weights),
        "inputs": _tensors(module.inputs),
        "outputs": _tensors(module.outputs),
        "tied": dict(module.tied),
        "counted": [module.counted_parameters, module.counted_bytes],
        "source": module.source,
        "failure": module.failure,
    }


def _node(node: NodeEntry) -> dict[str, Any]:
    return {
        "name": node.name,
        "op": node.operator,
        "owners": list(node.owners),
        "reason": node.reason,
        "call": node.call,
        **({"parameters": node.parameters} if node.parameters else {}),
        "inputs": [(link.tensor, link.node) for link in node.inputs if link.tensor],
        "outputs": _tensors(node.outputs),
        "attributes": dict(node.attributes),
        "source": node.source,
    }


def _tensors(tensors: Sequence[TensorEntry]) -> list[tuple[str, str]]:
    return [(tensor.name, tensor.type) for tensor in tensors]


def _measure(measure: Measure, paths: Sequence[str], inventory: Inventory) -> dict[str, Any]:
    by_node = spread(measure, inventory) if measure.additive and (measure.main or measure.nodes) else []
    said = [position for position, node in enumerate(inventory.nodes) if node.name in measure.nodes]
    return {
        "key": measure.key,
        "title": measure.title,
        "unit": measure.unit,
        "additive": measure.additive,
        "main": measure.main,
        "named": measure.named,
        "total": [_number(measure.total, path) for path in paths],
        "own": [_number(measure.own, path) for path in paths],
        "nodes": [None if value is None else float(f"{value:.6g}") for value in by_node],
        "said": True if len(said) == len(inventory.nodes) else said,
        "words": {position: measure.words[path] for position, path in enumerate(paths) if path in measure.words},
    }


def _number(values: Mapping[str, float], path: str) -> float | str | None:
    """A value; in words where it is one that JSON has no sign for."""
    value = values.get(path)
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
