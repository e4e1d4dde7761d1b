"""Nodes and tensors of a model by name, and the modules that they belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx_ir as ir

from htp_export.errors import InputError, nearest_names
from htp_export.format.parameters import Declared
from htp_export.model.regions import all_nodes
from htp_export.shapes.operator_kinds import operator_of

Owners = Callable[[ir.Node], Sequence[str]]


class GraphNames:
    """The nodes and tensors of a model by name, in subgraphs and functions, too.

    A name may have several nodes and tensors: functions, and subgraphs of one node, have names of
    their own.

    Attributes:
        nodes: Name → nodes.
        producers: Name of a tensor → the nodes that compute it.
        readers: Name of a tensor → the nodes that read it.
        inputs: Names of the inputs of the model.
        stored: Names of the initializers.
    """

    def __init__(self, model: ir.Model) -> None:
        self.nodes: defaultdict[str, list[ir.Node]] = defaultdict(list)
        self.producers: defaultdict[str, list[ir.Node]] = defaultdict(list)
        self.readers: defaultdict[str, list[ir.Node]] = defaultdict(list)
        for node in all_nodes(model):
            if node.name:
                self.nodes[node.name].append(node)
            for name in {value.name for value in node.outputs if value.name}:
                self.producers[name].append(node)
            for name in {value.name for value in node.inputs if value is not None and value.name}:
                self.readers[name].append(node)
        self.inputs = {str(value.name) for value in model.graph.inputs}
        self.stored = {name for graph in model.graphs() for name in graph.initializers}

    def computing(self, name: str) -> list[ir.Node]:
        """The nodes with a name, or the nodes that compute the tensor with this name.

        Raises:
            InputError: There is no such node, and no node computes such a tensor; the message has
                similar names, or the nodes that read the tensor.
        """
        found = self.nodes.get(name) or self.producers.get(name)
        if found:
            return found
        if name in self.inputs:
            raise InputError(f"{name!r} is an input of the model: no node computes it")
        if name in self.stored:
            readers = ", ".join(repr(node.name) for node in self.readers.get(name, ())[:_MOST])
            raise InputError(
                f"{name!r} is an initializer: no node computes it; it is read by {readers or 'no node'}"
            )
        nearest = nearest_names(name, sorted({*self.nodes, *self.producers}))
        hint = f"; nearest: {', '.join(map(repr, nearest))}" if nearest else ""
        raise InputError(f"no node and no tensor {name!r} in this model{hint}")

    def described(self, name: str, owners_of: Owners, parameters: Mapping[str, Declared]) -> str:
        """The object of the model that has a name, and its modules; ``""`` without one.

        ``parameters``: Full name of a parameter in PyTorch → parameter.
        """
        if nodes := self.nodes.get(name):
            operators = ", ".join(dict.fromkeys(map(operator_of, nodes)))
            return f"a node ({operators}) of {_modules(nodes, owners_of)}"
        if name in parameters:
            return f"a parameter of {_named([parameters[name].module])}"
        if nodes := self.producers.get(name):
            return f"a tensor that {_modules(nodes, owners_of)} computes"
        if name in self.inputs:
            return "an input of the model"
        if name in self.stored:
            return f"an initializer that {_modules(self.readers.get(name, ()), owners_of)} reads"
        return ""


_MOST = 3  # names in a message: enough to find the place


def _modules(nodes: Iterable[ir.Node], owners_of: Owners) -> str:
    """The modules of some nodes, for a message."""
    return _named(list(dict.fromkeys(path for node in nodes for path in owners_of(node))))


def _named(paths: Sequence[str]) -> str:
    if not paths:
        return "no module"
    more = f" and {len(paths) - _MOST} more" if len(paths) > _MOST else ""
    return f"module {', '.join(repr(path or '.') for path in paths[:_MOST])}{more}"
