"""Names of tensors and nodes: free ones, and new ones for tensors that other models hold as well."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from htp_export.files.stored import viewed
from htp_export.format import tags
from htp_export.model.recipes import recipe_of, recorded
from htp_export.model.regions import all_values


class UsedNames:
    """Names that are in use. It grows, and finds names that are not in it.

    The second tensor or node that wants a name gets it with the number ``first``.

    Examples:
        >>> used = UsedNames(["input"])
        >>> used.unused("input"), used.unused("input"), used.unused("mask")
        ('input_2', 'input_3', 'mask')
    """

    def __init__(self, names: Iterable[str] = (), first: int = 2) -> None:
        self._names, self._before = set(names), first - 1
        self._numbers: dict[str, int] = {}  # a name → the last number after it; all before it are in use

    def unused(self, wanted: str) -> str:
        """The name, or it with the first number that makes it new; noted as used."""
        name, number = wanted, self._numbers.get(wanted, self._before)
        while name in self._names:
            number += 1
            name = f"{wanted}_{number}"
        self._numbers[wanted] = number
        self._names.add(name)
        return name


class Names:
    """The names of a model that is being changed: of its tensors and of its nodes."""

    def __init__(self, model: ir.Model) -> None:
        graphs = (model.graph, *(function.graph for function in model.functions.values()))
        self.tensors = UsedNames(str(value.name) for graph in graphs for value in all_values(graph) if value.name)
        self.nodes = UsedNames(str(node.name) for graph in graphs for node in graph.all_nodes() if node.name)


def make_node_names_unique(graph: ir.Graph) -> bool:
    """Give every node, in subgraphs too, a name of its own; returns whether any was changed."""
    used, changed = UsedNames(), False
    for node in graph.all_nodes():
        name = used.unused(node.name or node.op_type)
        changed, node.name = changed or name != node.name, name
    return changed


def rename(value: ir.Value, name: str) -> None:
    """Give a value another name, and leave its weights' name alone where other models hold them too.

    Copies of models share their weights, and onnx_ir renames the tensor together with the value, and with the tensor
    the ``TensorProto`` that it is a view of.

    Examples:
        >>> weight = ir.tensor([1.0], name="weight")
        >>> values = [ir.Value(name="weight", const_value=weight) for _ in range(2)]
        >>> rename(values[1], "layer.weight")
        >>> [(value.name, value.const_value.name) for value in values]
        [('weight', 'weight'), ('layer.weight', 'layer.weight')]
    """
    tensor = value.const_value
    if tensor is not None and value.name != name:
        unnamed = tags.RECIPE not in tensor.metadata_props and tensor.dtype.is_floating_point()
        value.const_value = recorded(tensor, recipe_of(value)) if unnamed else viewed(tensor)
    value.name = name
