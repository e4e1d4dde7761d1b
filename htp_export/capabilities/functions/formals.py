"""The inputs of functions: their order, and names that say what they are for every module that shares the function."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from htp_export.editing.function_records import Instance
from htp_export.format import tags
from htp_export.format.signatures import Signature
from htp_export.model.tensor_names import UsedNames

__all__ = ["Formals"]

_LONGEST = 64
"""Characters of a name of several parts: every function around a deep module names its weights anew."""

_LONGEST_PART = 128


class Formals:
    """Orders and names the inputs of functions.

    Args:
        constant: The values that nodes compute from initializers and constants alone.
        owners: Node → the modules that it computes.
        signatures: Module path → its calls, with the arguments that tensors of the model are.
    """

    def __init__(
        self,
        constant: Collection[ir.Value],
        owners: Mapping[ir.Node, Sequence[str]],
        signatures: Mapping[str, Sequence[Signature]],
    ) -> None:
        self._constant = constant
        self._owners = owners
        self._signatures = signatures
        self._callees: dict[ir.Node, tuple[Instance, Sequence[ir.Value]]] = {}

    def order(self, values: Iterable[ir.Value]) -> list[ir.Value]:
        """Tensors first, then weights, as in ``torch.nn.functional``; each kind as it came."""
        return sorted(values, key=self.is_weight)

    def called(self, call: ir.Node, instance: Instance, formals: Sequence[ir.Value]) -> None:
        """Note what a call runs, so that inputs that are handed on to it are named as they are there."""
        self._callees[call] = (instance, formals)

    def name(
        self, values: Sequence[ir.Value], nodes: Iterable[ir.Node], instance: Instance, used: UsedNames
    ) -> list[str]:
        """A name for each input of a function.

        Arguments have the names of ``forward``'s parameters, and weights those that they have in the module,
        ``query.weight``. What has no such name in the file (exporters transpose weights and fold constants) has the
        name of the module that reads it in front, and the model's own inputs keep theirs. Of a name that is too long,
        the last parts are used.

        Args:
            values: What the nodes read from outside.
            nodes: The nodes, and those in their subgraphs.
            instance: The module call that they are.
            used: Names that are in use in the function; the new ones are noted.
        """
        readers: dict[ir.Value, tuple[ir.Node, int]] = {}
        for node in nodes:
            for position, value in enumerate(node.inputs):
                if value is not None:
                    readers.setdefault(value, (node, position))
        arguments = self._arguments(instance)
        return [
            used.unused(arguments.get(value.name or "") or self._wanted(value, readers[value], instance.path))
            for value in values
        ]

    def _arguments(self, instance: Instance) -> dict[str, str]:
        """Tensor of the model → the argument that it is of a module call."""
        calls = self._signatures.get(instance.path, ())
        given = calls[instance.call].inputs if instance.call < len(calls) else {}
        return {tensor: argument for argument, tensor in reversed(list(given.items())) if tensor is not None}

    def is_weight(self, value: ir.Value) -> bool:
        """Whether a value is an initializer, or computed from initializers and constants alone."""
        return value.is_initializer() or value in self._constant

    def _wanted(self, value: ir.Value, reader: tuple[ir.Node, int], path: str) -> str:
        name = value.name or ""
        if not self.is_weight(value):
            return name if value.is_graph_input() and name else "input"
        if value.is_initializer() and name.startswith(path + "."):
            return _last_parts(name[len(path) + 1 :])
        node, position = reader
        if node in self._callees:
            instance, formals = self._callees[node]
            return _relative(instance.path, path, formals[position].name or "input")
        is_weight = value.dtype is not None and value.dtype.is_floating_point() and bool(value.shape)
        inside = [owner for owner in self._owners.get(node, ()) if tags.is_under(owner, path)]
        return _relative(inside[0] if inside else path, path, "weight" if is_weight else "constant")


def _relative(path: str, above: str, name: str) -> str:
    below = path[len(above) + 1 :] if above and tags.is_under(path, above) else path if not above else ""
    return _last_parts(f"{below}.{name}" if below else name)


def _last_parts(name: str) -> str:
    """The name, or the name of the parameter in its own module, if the name is long."""
    return name if len(name) <= _LONGEST else ".".join(name.rsplit(".", 2)[-2:])[-_LONGEST_PART:]
