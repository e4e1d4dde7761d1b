"""One node of a model as plain data: operator, owners, inputs, outputs, and the line of Python it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import onnx_ir as ir

from htp_export.format import tags
from htp_export.model.module_facts import elements_of
from htp_export.model.source_lines import SourceLine, source_lines
from htp_export.model.tagged import TaggedModel

__all__ = ["Link", "NodeEntry", "NodeReader", "TensorEntry"]

_LONGEST = 400  # characters of an attribute or a constant that are kept
_SMALL = 16  # elements of a tensor whose values are kept


class Link(NamedTuple):
    """A tensor that a node reads.

    Attributes:
        tensor: Its name; ``""`` for an input that is left out.
        node: Position of the node that makes it; None for inputs of the model and for weights.
        output: Which output of that node it is.
    """

    tensor: str
    node: int | None = None
    output: int = 0


@dataclass(frozen=True)
class TensorEntry:
    """A tensor.

    Attributes:
        name: Its name.
        type: As it is written down, ``float32[batch, 16, 768]``; ``""`` where it is not known.
        value: The values of a small constant, ``[1, 12, -1, 64]``; ``""`` for all others.
    """

    name: str
    type: str = ""
    value: str = ""


@dataclass(frozen=True)
class NodeEntry:
    """One node.

    Attributes:
        name: Its name, which need not be unique.
        op_type: Its operator.
        domain: The operator's domain; ``""`` for ONNX's own.
        owners: The modules that it computes, in order of execution; empty for an untagged node.
        reason: How the owners are known, a word of the file format; ``""`` where it does not say.
        call: Which call of the owner, as written; ``""`` where that ran once.
        module: The owner, or the deepest module above all owners.
        inputs: Its inputs, then the outputs of its subgraphs.
        outputs: Its outputs.
        attributes: Name → value, shortened.
        parameters: Elements of the weights that it reads.
        source: Where it was captured, if the file says so.
    """

    name: str
    op_type: str
    domain: str = ""
    owners: tuple[str, ...] = ()
    reason: str = ""
    call: str = ""
    module: str = ""
    inputs: tuple[Link, ...] = ()
    outputs: tuple[TensorEntry, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)
    parameters: int = 0
    source: SourceLine | None = None

    @property
    def operator(self) -> str:
        """The operator, with its domain where that is not ONNX's own."""
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type


class NodeReader:
    """Reads the nodes of one model.

    Args:
        tagged: The model.
        weights: Its weights, whose elements are the parameters of the nodes that read them.
    """

    def __init__(self, tagged: TaggedModel, weights: Set[ir.Value] = frozenset()) -> None:
        self._tagged = tagged
        self._weights = weights
        self._place = {node: position for position, node in enumerate(tagged.nodes)}

    def entries(self) -> tuple[NodeEntry, ...]:
        """Every node, in the order of ``TaggedModel.nodes``."""
        return tuple(map(self._entry, self._tagged.nodes))

    def tensor_entry(self, value: ir.Value) -> TensorEntry:
        """A tensor with its type, inferred where the file does not say it."""
        is_typed = value.const_value is not None or (value.dtype is not None and value.shape is not None)
        text = _type_text(value if is_typed else self._tagged.inferred.described(value))
        return TensorEntry(value.name or "", text, _value_text(value.const_value))

    def _entry(self, node: ir.Node) -> NodeEntry:
        owners = self._tagged.owners_of(node)
        metadata = node.metadata_props
        return NodeEntry(
            name=node.name or "",
            op_type=node.op_type,
            domain="" if node.domain == "ai.onnx" else node.domain,
            owners=owners,
            reason=metadata.get(tags.REASON, "") if self._tagged.source == "htp" else "",
            call=metadata.get(tags.CALL, "") if self._tagged.source == "htp" else "",
            module=tags.common_ancestor(owners),
            inputs=tuple(self._links(node)),
            outputs=tuple(map(self.tensor_entry, node.outputs)),
            attributes={name: _attribute_text(attribute) for name, attribute in node.attributes.items()},
            parameters=sum(
                elements_of(value) for value in {*node.inputs} if value is not None and value in self._weights
            ),
            source=next(reversed(source_lines(node)), None),
        )

    def _links(self, node: ir.Node) -> Iterator[Link]:
        for value in node.inputs:
            yield Link("") if value is None else self._link(value)
        for body in self._tagged.index.bodies.get(node, ()):
            yield from map(self._link, body.outputs)

    def _link(self, value: ir.Value) -> Link:
        """The producer of a tensor; for an input of a subgraph, that of the argument of the node that holds it."""
        name, seen = value.name or "", {value}
        while True:
            producer = value.producer()
            if producer is not None:
                return Link(name, self._place.get(producer), value.index() or 0)
            holders = self._tagged.index.holders(value.graph) if value.is_graph_input() else ()
            if len(holders) != 1 or value.graph is None:
                return Link(name)
            # Loop, Scan and calls of functions have the inputs of their body, in the same order.
            position = next(k for k, formal in enumerate(value.graph.inputs) if formal is value)
            argument = holders[0].inputs[position] if position < len(holders[0].inputs) else None
            if argument is None or argument in seen:
                return Link(name)
            value = argument
            seen.add(value)


def _type_text(value: ir.Value) -> str:
    if value.type is None and value.const_value is None:
        return ""
    dtype = value.dtype if value.dtype is not None else getattr(value.const_value, "dtype", None)
    name = _dtype_name(dtype) if dtype is not None else str(value.type)
    shape = value.shape if value.shape is not None else getattr(value.const_value, "shape", None)
    if shape is None:
        return name
    dims = (dim if isinstance(dim, int) else dim.value for dim in shape)
    return f"{name}[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"


def _dtype_name(dtype: ir.DataType) -> str:
    return {"FLOAT": "float32", "DOUBLE": "float64"}.get(dtype.name, dtype.name.lower())


def _attribute_text(attribute: ir.Attr) -> str:
    if attribute.is_ref():
        return f"@{attribute.ref_attr_name}"
    if attribute.type == ir.AttributeType.GRAPH:
        return f"graph of {sum(1 for _ in attribute.as_graph().all_nodes())} nodes"
    if attribute.type == ir.AttributeType.GRAPHS:
        return f"{len(attribute.as_graphs())} graphs"
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        text = f"{_dtype_name(tensor.dtype)}[{', '.join(map(str, tensor.shape.numpy()))}]"
        value = _value_text(tensor)
        return f"{text} = {value}" if value else text
    return _shortened(str(attribute.value))


def _value_text(tensor: ir.TensorProtocol | None) -> str:
    """The values of a small tensor; ``""`` where it is larger, or lies in another file, which is not read."""
    if tensor is None or tensor.size > _SMALL or isinstance(tensor, ir.ExternalTensor):
        return ""
    return _shortened(str(tensor.numpy().tolist()))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
