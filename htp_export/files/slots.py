"""The places of tensors in a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir


@dataclass(frozen=True)
class Slot:
    """A place of a tensor in a model, and a function that replaces the tensor."""

    tensor: ir.TensorProtocol
    put: Callable[[ir.TensorProtocol], None]
    initializer: bool

    @property
    def external(self) -> bool:
        """Whether the tensor is in a data file."""
        return isinstance(self.tensor, ir.ExternalTensor)

    @property
    def path(self) -> str:
        """The path of the data file; ``""`` for a tensor in memory or in the ONNX file."""
        return self.tensor.path if isinstance(self.tensor, ir.ExternalTensor) else ""


def about(tensor: ir.TensorProtocol) -> dict[str, Any]:
    """What a tensor says besides its type and values, as arguments for another one."""
    return {"name": tensor.name or "", "doc_string": tensor.doc_string, "metadata_props": {**tensor.metadata_props}}


def slots(model: ir.Model) -> Iterator[Slot]:
    """Iterate over the tensors of a model: initializers of all graphs, and tensors in node attributes."""
    graphs = [*model.graphs(), *(graph for function in model.functions.values() for graph in function.subgraphs())]
    for graph in graphs:
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield Slot(value.const_value, functools.partial(setattr, value, "const_value"), True)
    for nodes in (model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values())):
        for node in nodes:
            for attribute in list(node.attributes.values()):
                if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                    yield Slot(attribute.as_tensor(), _attribute_setter(node, attribute.name), False)


def _attribute_setter(node: ir.Node, name: str) -> Callable[[ir.TensorProtocol], None]:
    first = node.attributes[name]

    def put(tensor: ir.TensorProtocol) -> None:
        same = tensor is first.value
        node.attributes[name] = first if same else ir.AttrTensor(name, tensor, doc_string=first.doc_string)

    return put
