"""Nodes of a map by name, by a tensor, or by index, with the nodes before and after them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from htp_export.capabilities.nodes.entries import MappedInitializer, MappedModule, MappedNode
from htp_export.errors import InputError, nearest_names
from htp_export.reporting.columns import many
from htp_export.reporting.result import PlainData, Result

_MOST_LISTED = 8  # consumers of a tensor as text; JSON has all
_LABEL = 12  # characters of the column of labels


Uncomputed: TypeAlias = Literal["model input", "input", "stored"]
"""The kinds of tensors that no node computes."""

_INPUTS = {
    "model input": "input of the model",
    "input": "input of the function, branch or loop body",
}


@dataclass(frozen=True)
class FoundTensor(PlainData):
    """A tensor, and the nodes around it.

    Attributes:
        name: Its name.
        kind: ``computed`` by a node, a ``model input``, an ``input`` of a function, branch or loop
            body, or ``stored`` in the file.
        producers: The nodes that compute it.
        consumers: The nodes that read it.
        parameters: The parameters that it contains, with their transformations.
        is_output: Whether the model returns it.
    """

    name: str
    kind: Literal["computed", "model input", "input", "stored"]
    producers: tuple[MappedNode, ...] = ()
    consumers: tuple[MappedNode, ...] = ()
    parameters: tuple[str, ...] = ()
    is_output: bool = False

    def data(self) -> dict[str, Any]:
        """Name → value of the entries of `to_dict`: nodes are names."""
        names = {
            "producers": [node.name for node in self.producers],
            "consumers": [node.name for node in self.consumers],
        }
        return {**super().data(), **names}


@dataclass(frozen=True)
class FoundNodes(Result):
    """The answer of `ModelMap.find`: nodes, and the tensors around them.

    Attributes:
        asked: The name or index.
        nodes: The nodes with this name or index, or that compute the tensor with this name.
        tensors: The tensor with this name, and the inputs and outputs of the nodes.
        classes: Module path → class, of the modules of the nodes.
    """

    asked: str | int
    nodes: tuple[MappedNode, ...]
    tensors: tuple[FoundTensor, ...]
    classes: Mapping[str, str]

    @property
    def tensor(self) -> FoundTensor | None:
        """The tensor with this name; None if a node has the name, or for an index."""
        if any(node.name == self.asked for node in self.nodes):
            return None
        return next((each for each in self.tensors if each.name == self.asked), None)

    @property
    def summary(self) -> str:
        """The result in one line."""
        tensor = self.tensor
        if tensor is None:
            first = self.nodes[0]
            more = f", and {many(len(self.nodes) - 1, 'more node')}" if len(self.nodes) > 1 else ""
            is_named = first.name == self.asked
            return f"{self.asked} is {_reference(first, '' if is_named else first.name)}{more}"
        if tensor.kind in _INPUTS:
            return f"{self.asked} is an {_INPUTS[tensor.kind]}"
        if tensor.kind == "stored":
            parameters = ", ".join(tensor.parameters)
            return f"{self.asked} is stored in the file{parameters and f': {parameters}'}"
        by = ", ".join(map(_reference, self.nodes[:_MOST_LISTED]))
        return f"{self.asked} is a tensor that {by or 'a node outside the selection'} computes"

    @property
    def lines(self) -> tuple[str, ...]:
        """The facts of each node, one line each."""
        lines: list[str] = []
        tensor = self.tensor
        if tensor is not None and not self.nodes:
            lines += _labelled("read by", _read_by(tensor))
        for node in self.nodes:
            lines += ["", f"{node.name}  {node.operator}"] if len(self.nodes) > 1 else []
            for label, values in self._facts(node):
                lines += _labelled(label, values)
        return tuple(lines)

    def _facts(self, node: MappedNode) -> Iterator[tuple[str, Sequence[str]]]:
        """The labels and values of a node; a label without a value is not drawn."""
        tensors = {tensor.name: tensor for tensor in self.tensors}
        yield "module", [self._module(node, path) for path in node.modules] or ["(none)"]
        yield "evidence", [node.reason] if node.reason else []
        place = f"node {node.index} of {node.inside or 'the graph'}"
        yield "place", [place]
        uses = [f"{use}, in {use.initializer}" for use in node.parameters]
        yield "parameters", uses
        yield "inputs", [_from(tensors[name]) for name in node.inputs if name]
        yield "outputs", [_to(tensors[name]) for name in node.outputs if name]
        yield "source", [f"{node.source}  {node.line.code}".rstrip()] if node.line else []

    def _module(self, node: MappedNode, path: str) -> str:
        class_name = self.classes.get(path, "").rpartition(".")[2]
        text = path or "(root)"
        if class_name:
            text = f"{text}  {class_name}"
        if path in node.calls:
            text = f"{text}, call {', '.join(map(str, node.calls[path]))}"
        return text


def _labelled(label: str, values: Sequence[str]) -> Iterator[str]:
    """Lines with values below each other, the first one after a label."""
    for value in values:
        yield f"  {label:{_LABEL}}{value}"
        label = ""


def _reference(node: MappedNode, name: str | None = None) -> str:
    """A node in one text: its name, operator and modules."""
    modules = ", ".join(path or "(root)" for path in node.modules)
    name = node.name if name is None else name
    return f"{name or 'a node'} ({node.operator}) of {modules or 'no module'}"


def _read_by(tensor: FoundTensor) -> list[str]:
    """The consumers of a tensor, the first few."""
    listed = [_reference(node) for node in tensor.consumers[:_MOST_LISTED]]
    more = len(tensor.consumers) - _MOST_LISTED
    if more > 0:
        listed.append(f"and {many(more, 'more node')}")
    return listed or ["no node"]


def _from(tensor: FoundTensor) -> str:
    """An input of a node, and its origin."""
    if tensor.producers:
        return f"{tensor.name}  from {', '.join(map(_reference, tensor.producers))}"
    if tensor.kind != "stored":
        return f"{tensor.name}  {_INPUTS.get(tensor.kind, '')}".rstrip()
    return f"{tensor.name}  stored{': ' if tensor.parameters else ''}{', '.join(tensor.parameters)}"


def _to(tensor: FoundTensor) -> str:
    """An output of a node, and its consumers."""
    consumers = _read_by(tensor) if tensor.consumers or not tensor.is_output else []
    if tensor.is_output:
        consumers.append("output of the model")
    return f"{tensor.name}  to {', '.join(consumers)}"


class Finder:
    """The nodes of a map by name, by index and by tensor.

    Tensors of functions are apart from those of the graph: a scope is ``""`` or a function.
    """

    def __init__(
        self,
        nodes: Sequence[MappedNode],
        modules: Mapping[str, MappedModule],
        initializers: Mapping[str, MappedInitializer],
        uncomputed: Mapping[tuple[str, str], Uncomputed],
        outputs: Sequence[str],
    ) -> None:
        self._nodes, self._modules, self._initializers = nodes, modules, initializers
        self._uncomputed, self._outputs = uncomputed, frozenset(outputs)

    @cached_property
    def _named(self) -> Mapping[str, Sequence[MappedNode]]:
        named: defaultdict[str, list[MappedNode]] = defaultdict(list)
        for node in self._nodes:
            named[node.name].append(node)
        return dict(named)

    @cached_property
    def _producers(self) -> Mapping[tuple[str, str], Sequence[MappedNode]]:
        """Scope and tensor → the nodes that compute it."""
        producers: defaultdict[tuple[str, str], list[MappedNode]] = defaultdict(list)
        for node in self._nodes:
            for name in filter(None, node.outputs):
                producers[node.function, name].append(node)
        return dict(producers)

    @cached_property
    def _consumers(self) -> Mapping[tuple[str, str], Sequence[MappedNode]]:
        """Scope and tensor → the nodes that read it."""
        consumers: defaultdict[tuple[str, str], list[MappedNode]] = defaultdict(list)
        for node in self._nodes:
            for name in dict.fromkeys(filter(None, node.inputs)):
                consumers[node.function, name].append(node)
        return dict(consumers)

    @cached_property
    def _scopes(self) -> Sequence[str]:
        return list(dict.fromkeys(("", *(node.function for node in self._nodes))))

    def find(self, identifier: str | int) -> FoundNodes:
        """The nodes and tensors with a name or index.

        Raises:
            InputError: There are none.
        """
        if isinstance(identifier, int):
            nodes = [node for node in self._nodes if not node.inside and node.index == identifier]
            if not nodes:
                raise InputError(f"no node {identifier} in the graph; {self._range()}")
            return self._answer(identifier, nodes)
        named = list(self._named.get(identifier, ()))
        scopes = [scope for scope in self._scopes if self._is_tensor(scope, identifier)]
        computing = [
            node for scope in scopes for node in self._producers.get((scope, identifier), ())
        ]
        if not named and not scopes:
            raise InputError(
                f"no node and no tensor {identifier!r} in this model{self._hint(identifier)}"
            )
        # a node is first found by its own name
        return self._answer(identifier, named or computing, scopes)

    def knows(self, name: str) -> bool:
        """Whether a node or a tensor has a name."""
        return name in self._named or any(self._is_tensor(scope, name) for scope in self._scopes)

    def _is_tensor(self, scope: str, name: str) -> bool:
        key = (scope, name)
        return key in self._uncomputed or key in self._producers or key in self._consumers

    def _answer(
        self, identifier: str | int, nodes: Sequence[MappedNode], scopes: Iterable[str] = ()
    ) -> FoundNodes:
        keys = {(scope, str(identifier)): None for scope in scopes}
        for node in nodes:
            for name in filter(None, (*node.inputs, *node.outputs)):
                keys[node.function, name] = None
        tensors = tuple(self._tensor(scope, name) for scope, name in keys)
        paths = dict.fromkeys(path for node in nodes for path in node.modules)
        classes = {path: self._modules[path].class_name for path in paths if path in self._modules}
        return FoundNodes(identifier, tuple(nodes), tensors, classes)

    def _tensor(self, scope: str, name: str) -> FoundTensor:
        producers = tuple(self._producers.get((scope, name), ()))
        consumers = tuple(self._consumers.get((scope, name), ()))
        kind: Uncomputed | Literal["computed"] = self._uncomputed.get((scope, name), "computed")
        weight = self._initializers.get(name) if kind == "stored" else None
        parameters = () if weight is None else tuple(map(str, weight.parameters))
        is_output = not scope and name in self._outputs
        return FoundTensor(name, kind, producers, consumers, parameters, is_output)

    def _range(self) -> str:
        count = sum(not node.inside for node in self._nodes)
        return f"it has {many(count, 'node')}, counted from 0"

    def _stored_as(self, parameter: str) -> list[str]:
        """The initializers that contain a parameter."""
        found = []
        for weight, mapped in self._initializers.items():
            names = [each.name for each in mapped.parameters]
            if parameter in names:
                found.append(weight)
        return found

    def _hint(self, name: str) -> str:
        if name in self._modules:
            return (
                f"; it is a module with {many(len(self._modules[name].nodes), 'node')}: select it"
            )
        if name.removeprefix("-").isdecimal():
            return f"; {self._range()}"
        stored = self._stored_as(name)
        if stored:
            return f"; it is a parameter, stored as {' and '.join(map(repr, stored))}"
        keys = (*self._uncomputed, *self._producers)
        nearest = nearest_names(name, sorted({*self._named, *(tensor for _, tensor in keys)}))
        return f"; nearest: {', '.join(map(repr, nearest))}" if nearest else ""
