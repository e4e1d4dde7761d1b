"""A summary of a model: its nodes, tensors and owners as numbers and short strings, without weights.

It holds all facts by which two models are compared, and is small enough for the metadata of a file.
Nodes of subgraphs are in the same list, after the node that holds them, which also reads the values
that they capture.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import onnx_ir as ir

from htp_export.format import tags
from htp_export.model.boundaries import dependence
from htp_export.shapes.operator_kinds import SIZES_ONLY, operator_of, values_read
from htp_export.shapes.schemas import settings
from htp_export.shapes.symbolic import Symbolic

Shape = tuple[tuple[int | str, ...] | None, int]
"""Dimensions and element type of a tensor; None and 0 if unknown."""

NOTHING = -1
"""No tensor, no node. Lists by tensor or node have a last entry for it, which this index selects."""

_SMALL_BYTES = 256
"""Constants up to this size are compared by contents: scalars, shapes and axes, not weights."""


@dataclass(slots=True)
class SummaryValue:
    """A tensor."""

    name: str
    scope: str = ""  # the graph of the name: ``""`` for the main graph, else a path to the subgraph
    # dimensions as numbers and symbols; None if the file has none
    shape: tuple[int | str, ...] | None = None
    dtype: int = 0  # ONNX's number of the element type; 0 if the file has none
    kind: str = "node"  # ``input``, ``initializer`` or ``node``, its producer
    content: str = ""  # the contents of a small constant, as a short hash; otherwise empty


@dataclass(slots=True)
class SummaryNode:
    """A node."""

    op: str  # operator, with its domain if that is not ONNX's: ``com.microsoft::Gelu``
    name: str
    inputs: tuple[int, ...]  # input values, `NOTHING` for an omitted one
    outputs: tuple[int, ...]  # output values, `NOTHING` for an omitted one
    captured: tuple[int, ...] = ()  # values of outer graphs that its subgraphs read
    attributes: str = ""  # its attributes, as a short hash
    # its attributes that are strings, such as names of operators that it includes
    words: tuple[str, ...] = ()
    scope: str = ""  # as in `SummaryValue`
    holder: int = NOTHING  # the node whose subgraph it is in; `NOTHING` in the main graph
    has_bodies: bool = False  # whether it holds subgraphs
    owners: tuple[str, ...] = ()  # its owners; empty for a node without tags
    call: str = ""  # the calls of its owners, as of ``tags.encoded_calls``
    reason: str = ""  # ``htp.reason``

    @property
    def reads(self) -> list[int]:
        """The values that the node and its subgraphs read."""
        return [value for value in self.inputs + self.captured if value != NOTHING]

    @property
    def makes(self) -> list[int]:
        """The values that the node produces."""
        return [value for value in self.outputs if value != NOTHING]


@dataclass
class GraphSummary:
    """A model."""

    # every node of the main graph and its subgraphs
    nodes: list[SummaryNode] = field(default_factory=list)
    values: list[SummaryValue] = field(default_factory=list)  # every tensor
    inputs: list[int] = field(default_factory=list)  # the main graph's inputs
    outputs: list[int] = field(default_factory=list)  # the main graph's outputs
    # infers missing shapes, by name; called once, when a missing shape is read
    infer: Callable[[], Mapping[str, Shape]] | None = field(default=None, repr=False)

    def shape(self, value: int) -> Shape:
        """Dimensions and element type of a tensor; None and 0 if unknown."""
        if value == NOTHING:
            return None, 0
        entry = self.values[value]
        if entry.shape is None and self.infer is not None and not entry.scope:
            inferred, self.infer = self.infer(), None
            for further in self.values:
                if further.shape is None and not further.scope and further.name in inferred:
                    further.shape, further.dtype = inferred[further.name]
        return entry.shape, entry.dtype

    @cached_property
    def maker(self) -> list[int]:
        """Value → its producer."""
        producers = [NOTHING] * (len(self.values) + 1)
        for index, node in enumerate(self.nodes):
            for value in node.makes:
                producers[value] = index
        return producers

    @cached_property
    def readers(self) -> list[list[int]]:
        """Value → its consumers, each once."""
        consumers: list[list[int]] = [[] for _ in (*self.values, NOTHING)]
        for index, node in enumerate(self.nodes):
            for value in dict.fromkeys(node.reads):
                consumers[value].append(index)
        return consumers

    @cached_property
    def live(self) -> list[bool]:
        """Value → whether it depends on the values of the model's inputs; their sizes do not count."""
        dependent = dependence(self._steps(), self._external_inputs())
        return [index in dependent for index in (*range(len(self.values)), NOTHING)]

    def live_inputs(self, node: SummaryNode) -> list[int]:
        """The inputs of a node that depend on the values of the model's inputs, in order.

        Weights and sizes do not.
        """
        return [value for value in node.inputs if self.live[value]]

    def stored_inputs(self, node: SummaryNode) -> list[int]:
        """The other inputs of a node, in order: weights, constants and sizes."""
        return [value for value in node.inputs if value != NOTHING and not self.live[value]]

    def consumers(self, index: int) -> list[int]:
        """The consumers of a node's outputs; a node that consumes several outputs is repeated."""
        return [reader for value in self.nodes[index].makes for reader in self.readers[value]]

    def producers(self, index: int) -> list[int]:
        """The producers of the inputs of a node and its subgraphs."""
        makers = (self.maker[value] for value in self.nodes[index].reads)
        return [maker for maker in makers if maker != NOTHING]

    def depends(self, index: int) -> bool:
        """Whether an output of a node depends on the values of the model's inputs."""
        return any(self.live[value] for value in self.nodes[index].makes)

    def with_several_owners(self, nodes: Iterable[int]) -> bool:
        """Whether some nodes have different owners, or the same in different calls."""
        return len({(self.nodes[index].owners, self.nodes[index].call) for index in nodes}) > 1

    def _external_inputs(self) -> dict[int, int]:
        """The inputs of the main graph and of functions.

        Inputs of subgraphs are not external: the node that holds the subgraph computes them.
        """
        held = {node.scope for node in self.nodes if node.holder != NOTHING}
        inputs: dict[int, int] = {}
        for index, value in enumerate(self.values):
            if value.kind == "input" and value.scope not in held:
                inputs[index] = 1
        return inputs

    def _steps(self) -> Iterator[tuple[Iterable[int], Iterable[int]]]:
        """Values that nodes read, and values that depend on them, for `htp_export.model.boundaries`."""
        inputs = defaultdict[str, list[int]](list)
        for index, value in enumerate(self.values):
            if value.kind == "input":
                inputs[value.scope].append(index)
        # holder → values that nodes in its subgraphs read, and values of which they read only the size
        values, sizes = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
        # holder → inputs of its subgraphs
        body_inputs: dict[int, dict[int, None]] = defaultdict(dict)
        # Backwards: nodes of a subgraph come after its holder, which may be in a subgraph, too.
        for index in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[index]
            if node.holder == NOTHING:
                continue
            body_inputs[node.holder].update(dict.fromkeys(inputs[node.scope]))
            read = sizes if node.op in SIZES_ONLY else values
            read[node.holder].update(values_read(node.op, node.inputs))
            sizes[node.holder] |= sizes[index]
            values[node.holder] |= values[index]
        for index, node in enumerate(self.nodes):
            if node.op in SIZES_ONLY:
                continue
            only_sizes = sizes[index] - values[index]
            captured = [value for value in node.captured if value not in only_sizes]
            yield (
                (*values_read(node.op, node.inputs), *captured),
                (*node.makes, *body_inputs[index]),
            )

    @cached_property
    def by_name(self) -> dict[str, list[int]]:
        """Name → its values; several, if several subgraphs use it."""
        by_name: dict[str, list[int]] = {}
        for index, value in enumerate(self.values):
            if value.name:
                by_name.setdefault(value.name, []).append(index)
        return by_name

    def find(self, name: str, scope: str = "") -> int:
        """The value of a name, or `NOTHING`; of several, the one in the given scope."""
        matches = self.by_name.get(name, ())
        if len(matches) > 1:
            matches = [value for value in matches if self.values[value].scope == scope] or matches
        return matches[0] if len(matches) == 1 else NOTHING


def summarize(
    model: ir.Model, functions: Iterable[ir.Function] = ()
) -> tuple[GraphSummary, list[ir.Node]]:
    """Summarize a model and ``functions``, each a scope; external data are not read.

    Returns:
        The summary, and the nodes of the model in the order of the summary's nodes.
    """
    summarizer = _Summarizer(model.opset_imports)
    summary, values = summarizer.summary, summarizer.values
    summarizer.graph(model.graph, "", NOTHING)
    summary.infer = functools.partial(_infer_shapes, model)
    summary.inputs = [values[value] for value in model.graph.inputs]
    summary.outputs = [values[value] for value in model.graph.outputs if value in values]
    for function in functions:
        summarizer.graph(function.graph, f"{function.domain}::{function.name}", NOTHING)
    return summary, summarizer.nodes


def _infer_shapes(model: ir.Model) -> dict[str, Shape]:
    """Name → dimensions and element type, for the outputs of the main graph's nodes."""
    inferred = Symbolic(model.graph, functions=model.functions)
    shapes: dict[str, Shape] = {}
    for node in model.graph:
        for value in node.outputs:
            if value.name:
                described = inferred.described(value)
                dimensions = _dimensions(described.shape)
                shapes[str(described.name)] = dimensions, int(described.dtype or 0)
    return shapes


def _dimensions(shape: ir.ShapeProtocol | None) -> tuple[int | str, ...] | None:
    """Dimensions as numbers and symbols; ``?`` for an unknown one."""
    if shape is None:
        return None
    return tuple(map(_dimension, shape))


def _dimension(size: int | ir.SymbolicDimProtocol) -> int | str:
    if isinstance(size, int):
        return size
    return size.value or "?"


class _Summarizer:
    """Builds a summary graph by graph, and numbers the values."""

    def __init__(self, versions: Mapping[str, int]) -> None:
        self._versions = versions
        self.summary, self.nodes = GraphSummary(), list[ir.Node]()
        self.values: dict[ir.Value, int] = {}

    def graph(self, graph: ir.Graph, scope: str, holder: int) -> None:
        for value in graph.inputs:
            kind = "initializer" if value.is_initializer() else "input"
            self._value(value, scope, kind, content_of(value.const_value))
        for value in graph.initializers.values():
            self._value(value, scope, "initializer", content_of(value.const_value))
        for node in graph:
            self._node(node, scope, holder)

    def _value(
        self, value: ir.Value | None, scope: str, kind: str = "node", content: str = ""
    ) -> int:
        if value is None:
            return NOTHING
        if value in self.values:
            return self.values[value]
        shape = _dimensions(value.shape)
        if shape is None and value.const_value is not None:
            shape = _dimensions(value.const_value.shape)
        dtype = int(value.dtype) if value.dtype is not None else 0
        self.values[value] = index = len(self.summary.values)
        self.summary.values.append(
            SummaryValue(value.name or "", scope, shape, dtype, kind, content)
        )
        return index

    def _node(self, node: ir.Node, scope: str, holder: int) -> None:
        metadata, index = node.metadata_props, len(self.nodes)
        attributes, words, bodies = _attributes(node, self._versions)
        content = attributes if node.op_type == "Constant" else ""
        self.nodes.append(node)
        self.summary.nodes.append(
            SummaryNode(
                sys.intern(operator_of(node)),
                node.name or "",
                tuple([self._value(value, scope) for value in node.inputs]),
                tuple([self._value(value, scope, content=content) for value in node.outputs]),
                attributes=attributes,
                words=words,
                scope=scope,
                holder=holder,
                has_bodies=bool(bodies),
                owners=tags.owners_of(metadata),
                call=tags.encoded_calls(metadata),
                reason=metadata.get(tags.REASON, ""),
            )
        )
        for name, body in bodies:
            self._body(
                body, f"{scope}/{node.outputs[0].name if node.outputs else node.name}:{name}", index
            )

    def _body(self, body: ir.Graph, scope: str, holder: int) -> None:
        values_before = len(self.summary.values)
        nodes_before = len(self.summary.nodes)
        self.graph(body, scope, holder)
        read: list[int] = []
        for node in self.summary.nodes[nodes_before:]:
            read += node.reads
        read += [self.values[value] for value in body.outputs if value in self.values]
        captured = [value for value in read if value < values_before]
        holder_node = self.summary.nodes[holder]
        holder_node.captured = tuple(dict.fromkeys((*holder_node.captured, *captured)))


def _attributes(
    node: ir.Node, versions: Mapping[str, int]
) -> tuple[str, tuple[str, ...], list[tuple[str, ir.Graph]]]:
    """The attributes of a node as text, the strings among them, and the subgraphs."""
    parts, words, bodies = [], [], []
    for attribute in settings(node, versions):
        name, kind, value = attribute.name, attribute.type, attribute.value
        if attribute.is_ref():
            parts.append(f"{name}@{attribute.ref_attr_name}")
        elif kind == ir.AttributeType.GRAPH:
            bodies.append((name, attribute.as_graph()))
        elif kind == ir.AttributeType.GRAPHS:
            bodies.extend(
                (f"{name}.{place}", body) for place, body in enumerate(attribute.as_graphs())
            )
        elif kind == ir.AttributeType.TENSOR:
            parts.append(content_of(attribute.as_tensor()) or name)
        else:
            if kind == ir.AttributeType.STRING:
                words.append(str(value))
            parts.append(f"{name}={value!r}")
    if node.op_type == "Constant" and len(parts) == 1 and "=" in parts[0]:
        # A Constant with plain numbers equals the one with a tensor.
        parts = [content_of(ir.convenience.get_const_tensor(node.outputs[0])) or parts[0]]
    text = ";".join(parts)
    if len(text) > 24:  # the hash is shorter: 18 characters
        text = hashlib.blake2b(text.encode(), digest_size=9).hexdigest()
    return sys.intern(text), tuple(words), bodies


def content_of(tensor: ir.TensorProtocol | None) -> str:
    """The contents of a small tensor; empty for large and external tensors, and for strings."""
    if (
        tensor is None
        or isinstance(tensor, ir.ExternalTensor)
        or tensor.dtype == ir.DataType.STRING
    ):
        return ""
    if tensor.nbytes > _SMALL_BYTES:
        return ""
    shape = ",".join(str(dimension) for dimension in tensor.shape)
    text = f"{int(tensor.dtype)}:{shape}:{tensor.tobytes().hex()}"
    # The hash has 24 characters. Short contents stay readable in the map of a file.
    return text if len(text) <= 40 else hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
