"""The effect of a pass on nodes and bytes of weights, by module."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable

import onnx_ir as ir

from htp_export.capabilities.optimize.merging import PassDifference
from htp_export.capabilities.optimize.results import Change
from htp_export.editing.editing import bytes_of
from htp_export.format import tags
from htp_export.model.regions import all_nodes

__all__ = ["WeightBook", "changes_of"]


class WeightBook:
    """The bytes of weights of a model, by module.

    A weight belongs to the module that reads it; of several modules, to the deepest one above them. A weight without
    consumers belongs to the module that read it last.
    """

    def __init__(self, model: ir.Model) -> None:
        self._last: dict[str, str] = {}
        self._weights = self._measure(model)

    def settle(self, model: ir.Model) -> Counter[str]:
        """Compare with the last state; module → bytes by which its weights shrank."""
        before, self._weights = self._weights, self._measure(model)
        saved: Counter[str] = Counter()
        for key in {**before, **self._weights}:
            (was, module), (now, new_module) = before.get(key, (0, "")), self._weights.get(key, (0, ""))
            if was != now:
                saved[module if key in before else new_module] += was - now
        return saved

    def _measure(self, model: ir.Model) -> dict[Hashable, tuple[int, str]]:
        """Weight → its bytes and its module."""
        weights: dict[Hashable, tuple[int, str]] = {}
        readers: defaultdict[ir.Value, dict[str, None]] = defaultdict(dict)
        for node in all_nodes(model):
            module = _module(node)
            for value in node.inputs:
                if value is not None and value.const_value is not None:
                    readers[value][module] = None
            for name, attribute in node.attributes.data.items():
                if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                    weights[node, name] = bytes_of(attribute.as_tensor()), module
        for graph in model.graphs():
            for value in graph.initializers.values():
                if value.const_value is not None:
                    name = str(value.name)
                    if value in readers:
                        self._last[name] = tags.common_ancestor(readers[value])
                    weights[value] = bytes_of(value.const_value), self._last.get(name, "")
        return weights


def changes_of(difference: PassDifference, saved: Counter[str]) -> dict[str, Change]:
    """What a pass did to nodes and weights, by module; ``saved`` has the bytes that the weights of each lost."""
    before, after = difference.before.nodes, difference.after.nodes
    in_place = difference.removed.keys() & difference.added.keys()
    rewired = (node for node, seen in before.items() if node in after and seen.inputs != after[node].inputs)
    removed = Counter(before[node].metadata.get(tags.MODULE, "") for node in difference.removed if node not in in_place)
    added = Counter(_module(node) for node in difference.added if node not in in_place)
    changed = Counter(map(_module, {*in_place, *difference.merged, *rewired}))
    changes = {
        path: Change(removed[path], changed[path], added[path], saved[path])
        for path in {**removed, **changed, **added, **saved}
    }
    return {path: change for path, change in changes.items() if change != Change()}


def _module(node: ir.Node) -> str:
    return node.metadata_props.get(tags.MODULE, "")
