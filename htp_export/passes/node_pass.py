"""Passes that rewrite a graph node by node."""

from __future__ import annotations

import abc
from functools import cached_property
from typing import ClassVar

import onnx_ir as ir

from htp_export.model.operators import is_standard
from htp_export.model.shapes.symbolic import Symbolic
from htp_export.passes.editing import remove_unused

__all__ = ["NodePass"]


class NodePass(ir.passes.InPlacePass):
    """Looks at the nodes of the main graph in order, and rewrites each where it can.

    Attributes:
        operators: What the pass requires: it looks at nodes of these operators of ONNX.
        opset: The lowest opset that it requires; in files of an older one it does nothing.
        graph: The graph, while the pass runs.
    """

    operators: ClassVar[tuple[str, ...]]
    opset: ClassVar[int] = 1
    graph: ir.Graph

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
        if model.graph.opset_imports.get("", 1) >= self.opset:
            for node in model.graph:
                if is_standard(node, *self.operators):
                    modified |= self.rewrite(node)
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, modified)
