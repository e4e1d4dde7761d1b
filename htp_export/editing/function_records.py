"""Records of a flat graph in a model with functions, and the nodes that follow from them.

A node in a body represents one node for each call of the function. It has the name of the first of
them and the owners of all. Its state in one call follows from that call's tags. Facts that do not
follow (names, types, torch's own metadata) are recorded in the model's metadata, as
``htp.functions``; see ``docs/format.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx_ir as ir

from htp_export.format import tags
from htp_export.format.bounds import number_in
from htp_export.format.call_tree import CallTree, Instance
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.tags import Reason
from htp_export.lineage.tagging import Owned
from htp_export.model.tensor_names import rename
from htp_export.shapes.operator_kinds import subgraphs

DOMAIN = "htp"
"""The domain of functions that are modules."""


Record: TypeAlias = dict[str, Any]
"""Name of a node of a function's body → differences in one call from its expected state."""


@dataclass(frozen=True)
class Records:
    """The record of the flat graph in a model with functions: ``htp.functions``.

    Attributes:
        calls: Name of a call outside functions → the record of its nodes; absent for a call without
            differences.
        order: For each node, once all calls are dissolved, its index in the flat graph; empty if
            they are in that order.
    """

    calls: Mapping[str, Record]
    order: Sequence[int] = ()

    def to_json(self) -> str:
        """Return the text for the metadata; the order only if it differs."""
        written = {"calls": self.calls, **({"order": self.order} if self.order else {})}
        return tags.json_text(written)

    @classmethod
    def from_json(cls, text: str) -> Records:
        """Read the text of ``to_json``; raise ValueError for any other text."""
        content = "calls and their order"
        written = tags.json_object(tags.FUNCTIONS, text, content)
        order = written.get("order", [])
        if not isinstance(order, list) or not all(type(place) is int for place in order):
            raise ValueError(f"{tags.FUNCTIONS} is not a JSON object of {content}")
        return cls(entry_of(written, "calls"), order)


def entry_of(record: Mapping[str, Any], name: str) -> Record:
    """Return the entry of a name, or an empty one; raise ValueError if it is no JSON object."""
    entry = record.get(name, {})
    if not isinstance(entry, dict):
        raise ValueError(f"{tags.FUNCTIONS}: what it says of {name!r} is no JSON object")  # noqa: TRY004 - a bad value
    return entry


class Expectations:
    """The expected states of the nodes of functions' bodies in certain calls, by the calls' tags.

    Each body is read once, for all calls. After a change of tags, create a new object.
    """

    def __init__(self, hierarchy: Hierarchy, calls: CallTree) -> None:
        self._hierarchy, self._calls = hierarchy, calls
        self._owners: dict[ir.Node, tuple[str, ...]] = {}

    def metadata(self, shared: ir.Node, instance: Instance) -> dict[str, str]:
        """The metadata of a body's node in a call of the function for ``instance``.

        It has the owners at or below the called module, or all if there is none.
        """
        metadata = dict(shared.metadata_props)
        if shared not in self._owners:
            self._owners[shared] = tags.owners_of(metadata)
        every = self._owners[shared]
        if not every:
            return metadata
        owners = tuple(owner for owner in every if tags.is_under(owner, instance.path)) or every
        reason = metadata.get(tags.REASON, "")
        if reason == Reason.SHARED and len(owners) < 2:
            reason = Reason.SCOPE
        call = tags.encoded_calls(metadata) if owners == every else ""
        if len(owners) == 1 and not call:
            call = self._call(owners[0], instance)
        Owned(owners, reason, call).write(metadata, self._hierarchy.called)
        return metadata

    def instance(self, shared: ir.Node, instance: Instance) -> Instance:
        """The module call of a call in a body, when the function is called for ``instance``."""
        metadata = self.metadata(shared, instance)
        owners, call = tags.owners_of(metadata), number_in(metadata.get(tags.CALL, ""))
        return Instance(owners[0] if owners else instance.path, call or 0)

    def _call(self, owner: str, instance: Instance) -> str:
        """The call of a module that ran several times, but once in the called module; else ``""``."""
        if owner not in self._hierarchy or self._hierarchy[owner].calls < 2:
            return ""
        numbers = self._calls.numbers(owner, instance)
        return str(numbers[0]) if len(numbers) == 1 else ""


def restore(node: ir.Node, entry: Record, metadata: Mapping[str, str]) -> None:
    """Restore a copy of a body's node: expected state, then its entry; a ValueError if invalid."""
    node.metadata_props.clear()
    node.metadata_props.update(metadata)
    try:
        _change(node.metadata_props, entry.get("metadata", {}))
        node.name = str(entry.get("name", node.name))
        for position, written in entry.get("outputs", {}).items():
            value = node.outputs[int(position)]
            value.name = str(written.get("name", value.name))
            _change(value.metadata_props, written.get("metadata", {}))
            if "type" in written:
                _set_type(value, written["type"])
        for graph, (graph_name, *names) in zip(
            subgraphs(node), entry.get("graphs", ()), strict=False
        ):
            graph.name = str(graph_name)
            for value, name in zip(given_values(graph), names, strict=True):
                rename(value, str(name))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{tags.FUNCTIONS}: what it says of node {node.name!r} cannot be read: {error}"
        ) from error


def give_tags_of_call(node: ir.Node, caller: Mapping[str, str]) -> None:
    """Give an inlined node the tags of the call, unless its own owners are inside those of the call.

    A function with nodes of other modules serves several modules.
    """
    own_paths, around = tags.owners_of(node.metadata_props), tags.owners_of(caller)
    if not around:
        return
    is_inside = bool(own_paths) and all(tags.is_under_any(path, around) for path in own_paths)
    if not is_inside:
        tags.tag_node(node.metadata_props, caller)


def _change(metadata: dict[str, str], changes: Mapping[str, str | None]) -> None:
    for key, value in changes.items():
        if value is None:
            metadata.pop(key, None)
        else:
            metadata[str(key)] = str(value)


_KINDS: Mapping[str, type[ir.SequenceType | ir.OptionalType]] = {
    "sequence": ir.SequenceType,
    "optional": ir.OptionalType,
}
"""Name in records → type of a value that contains other values."""


def written_type(value: ir.Value) -> Any:
    """The type of a value as plain data: element type and dimensions of a tensor; None if unknown.

    For a sequence or an optional value: its kind, and the type of its elements.

    Examples:
        >>> written_type(ir.Value(type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, "n"])))
        [1, [2, 'n']]
        >>> written_type(ir.Value(type=ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))))
        {'sequence': [1, None]}
    """
    shape = value.shape
    dimensions = (
        None if shape is None else [dim if isinstance(dim, int) else dim.value for dim in shape]
    )
    return _plain(value.type, dimensions)


def _plain(kind: ir.TypeProtocol | None, dimensions: list[Any] | None) -> Any:
    if isinstance(kind, ir.TensorType):
        return [int(kind.dtype), dimensions]
    for name, holder in _KINDS.items():
        if isinstance(kind, holder):
            return {name: _plain(kind.elem_type, dimensions)}
    return None


def _set_type(value: ir.Value, written: Any) -> None:
    """Set the type of a value to one from ``written_type``."""
    kinds: list[type[ir.SequenceType | ir.OptionalType]] = []
    while isinstance(written, dict):
        ((name, written),) = written.items()
        kinds.append(_KINDS[name])
    if written is None:
        value.type = value.shape = None
        return
    dtype, dimensions = written
    kind: ir.TypeProtocol = ir.TensorType(ir.DataType(dtype))
    for holder in reversed(kinds):
        kind = holder(kind)
    value.type = kind
    value.shape = None if dimensions is None else ir.Shape(dimensions)


def given_values(graph: ir.Graph) -> list[ir.Value]:
    """The inputs and initializers of a subgraph."""
    return list(dict.fromkeys((*graph.inputs, *graph.initializers.values())))
