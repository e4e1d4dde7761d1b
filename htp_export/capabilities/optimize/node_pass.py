"""Passes that rewrite a graph node by node, and what their rewrites share."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir

from htp_export.editing.editing import add_constant, is_boundary, remove_unused
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.shapes.operator_kinds import is_standard
from htp_export.shapes.symbolic import Symbolic


class NodePass(ir.passes.InPlacePass):
    """Looks at the nodes of the main graph in order, and rewrites each where it can.

    Attributes:
        operators: What the pass requires: it looks at nodes of these operators of ONNX; if there are none, at all.
        opset: The lowest opset that it requires; in files of an older one it does nothing.
        graph: The graph, while the pass runs.
    """

    operators: ClassVar[tuple[str, ...]]
    opset: ClassVar[int] = 1
    graph: ir.Graph

    @classmethod
    def applies(cls, model: ir.Model) -> bool:
        """Whether a model is of the opset, and has a node of the operators, that the pass requires.

        Examples:
            >>> class OfRelu(NodePass):
            ...     operators = ("Relu",)
            >>> graph = ir.Graph([], [], nodes=[ir.node("Relu", [ir.val("x")])], opset_imports={"": 20})
            >>> OfRelu.applies(ir.Model(graph, ir_version=10))
            True
        """
        graph = model.graph
        return graph.opset_imports.get("", 1) >= cls.opset and any(is_standard(n, *cls.operators) for n in graph)

    @cached_property
    def known(self) -> Symbolic:
        """Shapes and types in the graph, as they were when they were first asked for."""
        return Symbolic(self.graph)

    @abc.abstractmethod
    def rewrite(self, node: ir.Node) -> bool:
        """Rewrite a node, and what leads to it; whether anything was changed."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self.graph = model.graph
        self.__dict__.pop("known", None)
        modified = False
        for node in model.graph if self.applies(model) else ():
            if is_standard(node, *self.operators):
                modified |= self.rewrite(node)
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, modified)


def absorbed(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The producer of a value, of these operators, that can go with the one consumer of the value.

    None if anything else reads the value, or if a module takes or gives it.
    """
    if value is None or is_boundary(value) or only_consumer(value) is None:
        return None
    return producer_of(value, *op_types)


def integers(node: ir.Node, numbers: Sequence[int], what: str) -> ir.Value:
    """A new initializer of int64, named after the output of the node that is rewritten."""
    if node.graph is None:
        raise ValueError(f"{node.op_type} {node.name!r} is in no graph")
    return add_constant(node.graph, np.array(numbers, np.int64), f"{node.outputs[0].name}_{what}")


_KEY, _CHANGED = "htp_export.declined", "htp_export.changed"  # in a node's ``meta``, never in files


@dataclass(frozen=True)
class Declined:
    """Nodes that a pass leaves as they are.

    Attributes:
        kind: A key of `htp_export.capabilities.forensics.finding.KINDS`, or the name of the pass.
        nodes: The nodes.
        why: Why they stay.
        detail: Details of these nodes.
    """

    kind: str
    nodes: tuple[ir.Node, ...]
    why: str = ""
    detail: str = ""


def decline(kind: str, nodes: Sequence[ir.Node], why: str) -> Literal[False]:
    """Note on the last of some nodes why a pass leaves them unchanged; `htp_export.forensics` reports it.

    False: so a `NodePass` says that it changed nothing.

    Examples:
        >>> relu = ir.node("Relu", [ir.val("x")])
        >>> decline("conv_relu", [relu], "other nodes read the result of the Conv")
        False
        >>> [(each.kind, each.why) for each in declined([relu])]
        [('conv_relu', 'other nodes read the result of the Conv')]
    """
    nodes[-1].meta.setdefault(_KEY, {})[kind] = Declined(kind, tuple(nodes), why)
    return False


def changed(kind: str, node: ir.Node) -> Literal[True]:
    """Note on a node, which a pass eliminates, its kind of finding; for passes that change several kinds of nodes."""
    node.meta[_CHANGED] = kind
    return True


def kind_of_change(nodes: Sequence[ir.Node]) -> str | None:
    """What a pass noted on the last of some nodes that it eliminated; None if it noted nothing."""
    return next((node.meta[_CHANGED] for node in reversed(nodes) if _CHANGED in node.meta), None)


def declined(nodes: Sequence[ir.Node]) -> Iterator[Declined]:
    """The notes of passes on nodes."""
    for node in nodes:
        yield from node.meta.get(_KEY, {}).values()
