"""The changes of nodes and weights by a pass, attributed to modules."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TypeAlias

import onnx_ir as ir

from htp_export.capabilities.optimize.results import Change
from htp_export.editing.editing import bytes_of
from htp_export.format import tags
from htp_export.lineage.difference import PassDifference
from htp_export.lineage.settling import Bookkeeping
from htp_export.model.copies import Copied
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import graphs_in

_Weight: TypeAlias = ir.Value | tuple[ir.Node, str]
"""An initializer, or a node and its attribute with a tensor."""

_Weights: TypeAlias = Mapping[_Weight, tuple[int, str]]
"""Weight → its bytes and its module."""


class AttributedModel(Bookkeeping):
    """A model that passes change, with the changes by module."""

    def __init__(self, tagged: TaggedModel) -> None:
        super().__init__(tagged)
        self._weights = _weights(tagged.model, {})

    def _move_to(self, copied: Copied) -> None:
        super()._move_to(copied)
        weights = self._weights.items()
        self._weights = {_in_copy(weight, copied): entry for weight, entry in weights}

    def changes(self) -> dict[str, Change]:
        """Module path → the changes since the previous call, after `settle`."""
        weights, self._weights = self._weights, _weights(self.model, self._weights)
        return _changes_of(self.difference, _saved(weights, self._weights))


def _weights(model: ir.Model, before: _Weights) -> _Weights:
    """The weights of a model, with the deepest module above all consumers.

    A weight without consumers keeps the module that it has in ``before``.
    """
    weights: dict[_Weight, tuple[int, str]] = {}
    modules_of: defaultdict[ir.Value, dict[str, None]] = defaultdict(dict)
    for node in all_nodes(model):
        module = _module(node)
        for value in node.inputs:
            if value is not None and value.const_value is not None:
                modules_of[value][module] = None
        for name, attribute in node.attributes.data.items():
            if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                weights[node, name] = bytes_of(attribute.as_tensor()), module
    for graph in graphs_in(model.graph):
        for value in graph.initializers.values():
            if value.const_value is None:
                continue
            if value in modules_of:
                module = tags.common_ancestor(modules_of[value])
            else:
                _, module = before.get(value, (0, ""))
            weights[value] = bytes_of(value.const_value), module
    return weights


def _in_copy(weight: _Weight, copied: Copied) -> _Weight:
    """A weight of a copy of the model; the weight itself if the model does not contain it any more."""
    if isinstance(weight, ir.Value):
        return copied.value_of(weight) or weight
    node, attribute = weight
    return copied.copy_of.get(node, node), attribute


def _saved(before: _Weights, after: _Weights) -> Counter[str]:
    """Module → bytes by which its weights shrank."""
    saved: Counter[str] = Counter()
    for weight in {**before, **after}:
        size_before, module = before.get(weight, (0, ""))
        size_after, new_module = after.get(weight, (0, ""))
        if size_before != size_after:
            saved[module if weight in before else new_module] += size_before - size_after
    return saved


def _changes_of(difference: PassDifference, saved: Counter[str]) -> dict[str, Change]:
    """Module → the changes of its nodes and weights.

    ``saved``: module → bytes of removed weights.
    """
    before, after = difference.before.nodes, difference.after.nodes
    in_place = difference.removed.keys() & difference.added.keys()
    rewired: list[ir.Node] = []
    for node, seen in before.items():
        if node in after and seen.inputs != after[node].inputs:
            rewired.append(node)
    gone = [node for node in difference.removed if node not in in_place]
    removed = Counter(before[node].metadata.get(tags.MODULE, "") for node in gone)
    added = Counter(_module(node) for node in difference.added if node not in in_place)
    changed = Counter(map(_module, {*in_place, *difference.merged, *rewired}))
    changes: dict[str, Change] = {}
    for path in {**removed, **changed, **added, **saved}:
        change = Change(removed[path], changed[path], added[path], saved[path])
        if change != Change():
            changes[path] = change
    return changes


def _module(node: ir.Node) -> str:
    return node.metadata_props.get(tags.MODULE, "")
