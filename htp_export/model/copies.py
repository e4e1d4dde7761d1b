"""A copy of a tagged model that knows which of its nodes is the copy of which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import onnx_ir as ir

from htp_export.model.regions import all_nodes
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import graphs_in


@dataclass(frozen=True, eq=False)
class Copied:
    """A copy of a model, and the pairs of nodes as of the time of the copy.

    Attributes:
        tagged: The copy; it may be changed.
        copy_of: Node of the original → its copy, also in subgraphs and functions.
        given: Input or initializer of a graph of the original → its copy.

    Examples:
        >>> from htp_export.format.hierarchy import Hierarchy, ModuleInfo
        >>> relu = ir.node("Relu", [ir.val("x")])
        >>> graph = ir.Graph(relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20})
        >>> original = TaggedModel(ir.Model(graph, ir_version=10), Hierarchy([ModuleInfo("", "Net", 1)]))
        >>> copied = Copied.of(original)
        >>> copied.copy_of[relu] is copied.tagged.nodes[0], copied.original_of[copied.tagged.nodes[0]] is relu
        (True, True)
        >>> copied.value_of(relu.outputs[0]) is copied.tagged.model.graph.outputs[0]
        True
    """

    tagged: TaggedModel
    copy_of: Mapping[ir.Node, ir.Node]
    given: Mapping[ir.Value, ir.Value] = field(repr=False)

    @classmethod
    def of(cls, original: TaggedModel) -> Copied:
        """Copy a model."""
        copy = original.clone()
        # A clone has its nodes, graphs, inputs and initializers in the same order.
        nodes = dict(zip(all_nodes(original.model), all_nodes(copy.model), strict=True))
        given = zip(_given_values(original.model), _given_values(copy.model), strict=True)
        return cls(copy, nodes, dict(given))

    @cached_property
    def original_of(self) -> Mapping[ir.Node, ir.Node]:
        """Node of the copy → its original."""
        return {copy: original for original, copy in self.copy_of.items()}

    def value_of(self, original: ir.Value) -> ir.Value | None:
        """The copy of a value; None for one that the original did not contain any more."""
        producer = original.producer()
        if producer is None:
            return self.given.get(original)
        copy = self.copy_of.get(producer)
        return None if copy is None else copy.outputs[producer.outputs.index(original)]


def _given_values(model: ir.Model) -> Iterator[ir.Value]:
    """The inputs and initializers of all graphs of a model."""
    bodies = (function.graph for function in model.functions.values())
    for outer in (model.graph, *bodies):
        for graph in graphs_in(outer):
            yield from graph.inputs
            yield from graph.initializers.values()
